"""Which data workers can make the steps of a session, and which of them are to. Pure.

A data worker process runs one program only, in a Python that is the program's, and has to reach the loader. Of those
that can, one that fails what others make is given no steps of that pipeline for a while.
"""

from __future__ import annotations

from hetstream.mpi_dataworkers.dispatcher.records import Binding, Session, WorkerRecord
from hetstream.mpi_dataworkers.dispatcher.tables import Tables
from hetstream.mpi_dataworkers.programs import joined, serves, why_unfit

# A worker that failed this many steps, of which nobody knows yet whether others can make them, waits for that.
_MAX_UNEXPLAINED = 2


class Placement:
    """Answers who can make what, from the tables.

    Attributes:
        _tables: what is known.
    """

    def __init__(self, tables: Tables) -> None:
        self._tables = tables

    def able(self, session: Session, now: float) -> dict[str, str]:
        """Hosts of the data workers that can be given steps of the session, now or when they come free, by peer id."""
        return {
            peer: worker.host
            for peer, worker in self._tables.workers.items()
            if not worker.draining and self.can_make(worker, session, now)
        }

    def is_fit(self, peer: str, session: Session, now: float) -> bool:
        """Whether nothing is known against a data worker: it is not paused, and few of its failures are unexplained."""
        standing = self._tables.workers[peer].standings.get(session.spec.pipeline_id)
        if standing is None or standing.is_sound:
            return True
        unexplained = sum(peer in failures.workers for failures in session.failures.values())
        return now >= standing.paused_until and unexplained < _MAX_UNEXPLAINED

    def may_try(self, peer: str, session: Session, now: float) -> bool:
        """Whether a data worker is to be given steps of the session: where none is fit, who is there has to try."""
        if not self.can_make(self._tables.workers[peer], session, now):
            return False
        return self.is_fit(peer, session, now) or not any(
            self.is_fit(other, session, now) for other in self.able(session, now)
        )

    def not_known_to_fail(self, able: dict[str, str], pipeline_id: str) -> dict[str, str]:
        """Those of the data workers that use the pipeline, or on whose hosts none has said that it cannot."""
        standings = {peer: self._tables.workers[peer].standings.get(pipeline_id) for peer in able}
        failed = {able[peer] for peer, its in standings.items() if its is not None and its.cannot_load}
        sound = {peer for peer, its in standings.items() if its is not None and its.is_sound}
        return {peer: host for peer, host in able.items() if peer in sound or host not in failed}

    def can_make(self, worker: WorkerRecord, session: Session, now: float) -> bool:
        """Whether a data worker reaches the session's loader, and may run its program."""
        reaches = worker.unreachable.get(session.loader, 0.0) <= now
        return reaches and self.pipeline_for(worker, session) is not None

    def works_for(self, worker: WorkerRecord, session: Session) -> bool:
        """Whether a data worker has had leases of this pipeline and trainer, so that no more need be asked."""
        binding = worker.binding
        return binding is not None and (session.spec.pipeline_id, self._tables.trainer_of(session)) in binding.granted

    def pipeline_for(self, worker: WorkerRecord, session: Session) -> str | None:
        """The pipeline from which a data worker process would make the session's steps; None if it must not.

        Where jobs share a stream under a name of their choice, they promise that their pipelines agree.
        """
        spec = session.spec
        # One that works for a stage of the program works for no other one.
        if worker.device != self._tables.loaders[session.loader].registration.device:
            return None
        if self.works_for(worker, session) or self.fits(worker, spec.pipeline_id, session.loader):
            return spec.pipeline_id
        if spec.sharing is None or worker.binding is None:
            return None
        agreed = worker.binding.streams.get(spec.sharing.key, "")
        return agreed if agreed in self._tables.pipelines else None

    def fits(self, worker: WorkerRecord, pipeline_id: str, loader: str) -> bool:
        """Whether a process may run a pipeline of a loader: it works for this program now, or is fresh and no other
        process of its slot works for it.

        A program that runs again gets fresh processes: the last run may have left something behind. The ranks of one
        run are there at the same time.
        """
        tables = self._tables
        binding, trainer = worker.binding, tables.loaders[loader].registration.trainer
        if not self.suits(worker, loader):
            return False
        if binding is None:
            siblings = [tables.workers[peer] for peer in tables.slots.get(worker.slot, ())]
            return not any(
                sibling.binding and not sibling.draining and self.fits(sibling, pipeline_id, loader)
                for sibling in siblings
            )
        if (pipeline_id, trainer) in binding.granted:
            return True
        if not serves(binding.program, tables.program_of(pipeline_id)):
            return False
        trainers = binding.trainers
        if trainers is None or trainer in trainers:
            return True
        return any(other.registration.trainer in trainers for other in tables.loaders.values())

    def suits(self, worker: WorkerRecord, loader: str) -> bool:
        """Whether a data worker has what a loader's stage needs, and a Python as good as that of its program."""
        registration = self._tables.loaders[loader].registration
        return worker.device == registration.device and not why_unfit(worker.interpreter, registration.interpreter)

    def bind(self, worker: WorkerRecord, session: Session, pipeline_id: str) -> None:
        """The data worker process gets a lease, and is one of the session's program from now on."""
        tables, spec, trainer = self._tables, session.spec, self._tables.trainer_of(session)
        if pipeline_id != spec.pipeline_id:
            return  # it goes on with its own program
        program = tables.program_of(pipeline_id)
        if worker.binding is None:
            worker.binding = Binding(program, {trainer})
            tables.rooms_changed = True
        binding = worker.binding
        binding.program = joined(binding.program, program)
        binding.trainers = {*(binding.trainers or ()), trainer}
        binding.granted.add((pipeline_id, trainer))
        if spec.sharing is not None:
            binding.streams[spec.sharing.key] = pipeline_id
