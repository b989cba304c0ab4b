"""The I/O of the controller of a job's embedding servers, in a thread of the job master. Called by `server.py`."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetstream.base.text import count_words
from hetstream.hetjob.elastic.controller import ControllerState
from hetstream.hetjob.elastic.embedding import EmbeddingController, EmbeddingSnapshot, ServerLoad
from hetstream.hetjob.elastic.snapshot import Action, Companion, CompanionState, Decision, Limits
from hetstream.hetjob.job.embedding_servers import EmbeddingServers
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.master.companions import CompanionJobs
from hetstream.hetjob.master.controller_state_file import CompanionTime, ControllerStateFile
from hetstream.hetjob.master.elastic import CompanionKeeper, Steering
from hetstream.hetjob.ports import SlurmClient
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.mpi_dataworkers.embedding.registration import REGISTRY, Registration, read_registrations

# A server replaces its file each second; one that has not done so for this long is gone, or cannot be reached either.
_SILENT_S = 10.0
# What a companion is called, before the id of its job.
_COMPANION = "job-"
# A companion that was told to leave and does not say so is told again.
_ASK_AGAIN_S = 30.0


class _Seen:
    """What one server said at several looks."""

    def __init__(self, said: Registration, now: float) -> None:
        self.said, self.changed_at, self.reads_per_s = said, now, 0.0

    def take_in(self, said: Registration, now: float) -> None:
        """A look later."""
        if said.written_s != self.said.written_s:
            self.reads_per_s = said.reads_per_s(self.said) or 0.0
            self.said, self.changed_at = said, now


class ElasticEmbedding(CompanionKeeper):
    """Runs the controller of a job's embedding servers beside the job master's loop.

    Args:
        controller: decides.
        companions: acts.
        look: returns what the servers say.
        connect: to the dispatcher, which tells users what is done and why.
        controller_state_file: keeps what was decided.
        clock: seconds, never going back.
    """

    _controller: EmbeddingController
    _companions: CompanionJobs

    def __init__(
        self,
        controller: EmbeddingController,
        companions: CompanionJobs,
        look: Callable[[], Mapping[str, Registration]],
        connect: Callable[[], Steering],
        controller_state_file: ControllerStateFile,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(controller, companions, connect, controller_state_file, None, clock)
        self._look = look
        self._seen: dict[str, _Seen] = {}
        self._most_servers = 0

    def summary(self) -> dict[str, Any]:
        """Return what it did, for the job's summary."""
        return {
            "embedding_servers": sum(not seen.said.draining for seen in self._seen.values()),
            "embedding_servers_at_most": self._most_servers,
            "rows": sum(seen.said.rows for seen in self._seen.values()),
            "bytes": sum(seen.said.bytes for seen in self._seen.values()),
            "decisions": list(self._controller_state_file.changes),
            **self._time.summary(self._clock()),
        }

    def _turn(self, client: Steering) -> None:
        client.steer(self._order(None))
        now = self._clock()
        self._read(now)
        alive = {name: seen for name, seen in self._seen.items() if now - seen.changed_at < _SILENT_S}
        self._take_in({_job_of(name): seen.reads_per_s for name, seen in alive.items() if _job_of(name)}, now)
        self._ask_again(alive, now)
        snapshot = EmbeddingSnapshot(
            tuple(
                ServerLoad(name, _job_of(name), seen.said.bytes, seen.said.limit_bytes, seen.reads_per_s)
                for name, seen in alive.items()
                if not seen.said.draining
            ),
            tuple(
                Companion(job_id, companion.cpus, companion.state, companion.since)
                for job_id, companion in self._tracked.items()
            ),
        )
        self._most_servers = max(self._most_servers, len(snapshot.servers))
        decision = self._controller.decide(snapshot, now)
        self._said = self._headline(snapshot, decision)
        if decision.is_change:
            self._note(decision, len(snapshot.servers))
        self._controller_state_file.write(ControllerState())
        if decision.is_change:
            self._carry_out(decision, now, lambda: client.steer(self._order(decision)))
            if decision.action is Action.DRAIN:
                for job_id in decision.jobs:
                    self._companions.ask_to_end(job_id)

    def _read(self, now: float) -> None:
        found = self._look()
        # One that has ended in order has taken its file away.
        self._seen = {name: seen for name, seen in self._seen.items() if name in found}
        for name, said in found.items():
            self._seen.setdefault(name, _Seen(said, now)).take_in(said, now)

    def _ask_again(self, alive: dict[str, _Seen], now: float) -> None:
        for job_id, companion in self._tracked.items():
            seen = alive.get(f"{_COMPANION}{job_id}")
            is_deaf = seen is not None and not seen.said.draining
            if companion.state is CompanionState.DRAINING and is_deaf and now - companion.since >= _ASK_AGAIN_S:
                companion.since = now
                self._companions.ask_to_end(job_id)

    def _headline(self, snapshot: EmbeddingSnapshot, decision: Decision) -> str:
        limits = self._controller.limits
        states = [
            f"{len(snapshot.of(state))} {state.value}"
            for state in CompanionState
            if state is not CompanionState.WORKING and snapshot.of(state)
        ]
        counts = ", ".join([count_words(len(snapshot.servers), "embedding server"), *states])
        return f"{counts}, allowed {limits.minimum}-{limits.maximum}; {decision.reason}"


def _job_of(name: str) -> str:
    """The job of a companion, by the server's name; "" for those that start together with the trainer."""
    return name.removeprefix(_COMPANION) if name.startswith(_COMPANION) else ""


def elastic_of_embedding_servers(
    servers: EmbeddingServers | None,
    program: Sequence[str],
    client: SlurmClient,
    job: JobEnvironment,
    end_s: float | None,
) -> ElasticEmbedding | None:
    """Return the controller of a job's embedding servers; None where their number is fixed.

    Args:
        servers: what the script asks for; None for nothing.
        program: how hetstream is called.
        client: Slurm.
        job: this job.
        end_s: when the job ends at the latest, in seconds since the epoch; None where that is not known.
    """
    if servers is None or servers.most <= servers.count:
        return None
    state_file = ControllerStateFile(job.embedding_controller_state_file)
    argv = servers.words(program, job.address_file, "")

    def command(_: int) -> str:
        # Slurm gives the job its number when it has taken it.
        return f'{shlex.join(argv)} --name "{_COMPANION}$SLURM_JOB_ID"'

    return ElasticEmbedding(
        EmbeddingController(Limits(servers.count, servers.most, servers.cpus, servers.cpus)),
        CompanionJobs(
            client,
            job,
            servers.companion_options,
            command,
            CompanionTime(None, state_file.tally, end_s),
            device="embedding",
        ),
        lambda: read_registrations(job.directory / REGISTRY),
        lambda: StatusClient(running_service(job.address_file)),
        state_file,
    )
