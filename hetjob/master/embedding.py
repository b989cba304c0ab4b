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
        # Of each server: what it said last, when that was new, and its load then.
        self._seen: dict[str, tuple[Registration, float, float]] = {}
        self._most_servers = 0

    def summary(self) -> dict[str, Any]:
        """Return what it did, for the job's summary."""
        return {
            "embedding_servers_at_most": self._most_servers,
            "decisions": list(self._controller_state_file.changes),
            **self._time.summary(self._clock()),
        }

    def _turn(self, client: Steering) -> None:
        client.steer(self._order(None))
        now = self._clock()
        loads = self._read(now)
        self._take_in({load.job_id: load.reads_per_s for load, _ in loads if load.job_id}, now)
        self._ask_again({load.job_id for load, is_draining in loads if not is_draining}, now)
        snapshot = EmbeddingSnapshot(
            tuple(load for load, is_draining in loads if not is_draining),
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

    def _read(self, now: float) -> list[tuple[ServerLoad, bool]]:
        """Return the load of each server that is there, and whether it leaves."""
        before, self._seen = self._seen, {}
        for name, said in self._look().items():  # one that has ended in order has taken its file away
            known, changed_at, reads_per_s = before.get(name, (said, now, 0.0))
            if said.written_s != known.written_s:
                changed_at, reads_per_s = now, said.reads_per_s(known) or 0.0
            self._seen[name] = said, changed_at, reads_per_s
        return [
            (ServerLoad(name, _job_of(name), said.bytes, said.limit_bytes, reads_per_s), said.draining)
            for name, (said, changed_at, reads_per_s) in self._seen.items()
            if now - changed_at < _SILENT_S
        ]

    def _ask_again(self, serving: set[str], now: float) -> None:
        for job_id, companion in self._tracked.items():
            is_deaf = companion.state is CompanionState.DRAINING and job_id in serving
            if is_deaf and now - companion.since >= _ASK_AGAIN_S:
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
