"""What users are told about their loaders while the program goes on: each loader at most once. Pure."""

from __future__ import annotations

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.instructions import Instruction, Send
from hetstream.mpi_dataworkers.dispatcher.limits import LONELY_AFTER_S, UNFIT_AFTER_S
from hetstream.mpi_dataworkers.dispatcher.matching import RanksSeen
from hetstream.mpi_dataworkers.dispatcher.records import LoaderRecord, Session
from hetstream.mpi_dataworkers.dispatcher.sharing import Reader, shares_with_nobody
from hetstream.mpi_dataworkers.dispatcher.tables import Tables
from hetstream.mpi_dataworkers.programs import why_unfit
from hetstream.mpi_dataworkers.wire.messages import Notice


class Notices:
    """Finds loaders whose users should know something.

    Attributes:
        ranks_seen: which ranks have, or had, a loader.
        _tables: what is known.
    """

    def __init__(self, tables: Tables) -> None:
        self.ranks_seen = RanksSeen()
        self._tables = tables

    def tell_due(self, now: float) -> list[Instruction]:
        """What the time has come to tell."""
        return self._tell_lonely(now) + self._tell_unfit(now)

    def tell_unshared(self, session: Session) -> list[Instruction]:
        """Tell a loader whose session is to be shared, and is not, though another job's looks the same."""
        loader = self._tables.loaders[session.loader]
        if session.spec.sharing is None or loader.warned_unshared:
            return []
        others = [self._reader(other) for other in self._tables.sessions.values() if other is not session]
        text = shares_with_nobody(self._reader(session), others)
        loader.warned_unshared = bool(text)
        return [Send(session.loader, Notice(text))] if text else []

    def _reader(self, session: Session) -> Reader:
        spec = session.spec
        key = spec.sharing.key if spec.sharing is not None else ""
        pipeline = self._tables.pipelines.get(spec.pipeline_id)
        return Reader(self._tables.loaders[session.loader].registration, key, pipeline)

    def _tell_lonely(self, now: float) -> list[Instruction]:
        """Tell loaders that have taken steps of a share of the data whose rest nobody reads."""
        out: list[Instruction] = []
        for peer, loader in self._tables.loaders.items():
            if self._is_too_early(loader, now) or loader.warned_alone:
                continue
            registration = loader.registration
            missing = self.ranks_seen.missing(registration)
            if not missing:
                continue
            loader.warned_alone = True
            cause = f"made at {registration.made_at or 'an unknown place'}"
            who = events.loader_fields(registration)
            out += self._tables.tell(events.LoaderAlone(**who, missing_ranks=missing, cause=cause))
            text = (
                f"the loader made at {registration.made_at or 'an unknown place'} reads rank {registration.rank}'s "
                f"share of its data, of {registration.world_size}; rank {missing[0]} has no such loader, so nobody "
                "reads the rest. If this rank is to read all of it, give the loader rank=0, world_size=1."
            )
            out.append(Send(peer, Notice(text)))
        return out

    def _is_too_early(self, loader: LoaderRecord, now: float) -> bool:
        """Whether other ranks may still make the loader, or had it before a restart, which nobody knows then."""
        tables = self._tables
        may_be_forgotten = tables.incarnation > 1 and loader.registered_at - tables.started_at < LONELY_AFTER_S
        return may_be_forgotten or now - loader.registered_at < LONELY_AFTER_S or loader.stats.steps == 0

    def _tell_unfit(self, now: float) -> list[Instruction]:
        """Tell loaders whose program runs another Python than all data workers: nobody makes their batches."""
        workers = self._tables.workers
        out: list[Instruction] = []
        for peer, loader in self._tables.loaders.items():
            registration = loader.registration
            if loader.warned_unfit or not workers or now - loader.registered_at < UNFIT_AFTER_S:
                continue
            reasons = [why_unfit(worker.interpreter, registration.interpreter) for worker in workers.values()]
            if not all(reasons):
                continue
            loader.warned_unfit = True
            worker = next(iter(workers.values()))
            who, interpreter = events.loader_fields(registration), str(registration.interpreter)
            out += self._tables.tell(events.LoaderUnfit(**who, interpreter=interpreter, cause=reasons[0]))
            text = (
                f"the data workers run {reasons[0]} than this program, so it makes its batches itself: "
                f"{worker.interpreter} on {worker.host}; this program runs {registration.interpreter} on "
                f"{registration.host}. Give the data workers its environment: #HETSTREAM --data-worker-python=PYTHON"
            )
            out.append(Send(peer, Notice(text)))
        return out
