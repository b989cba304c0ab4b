"""The elastic controller's I/O, in a thread of the job master: look, let `Controller` decide, act, and say why.

A job with a stage on GPUs has two, one for the data workers of each stage; they share nothing but the dispatcher.

Once a second it asks the dispatcher what goes on, and Slurm only when companions are on their way. Slurm's commands may
take seconds when slurmctld is busy, which is why this is no part of the job master's loop. What it decides is in the
log, in the service's events, in `hetstream job` and in the summary. No decision is made here.
"""

from __future__ import annotations

import logging
import os
import shlex
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hetstream.base.errors import HetstreamError
from hetstream.base.text import count_words
from hetstream.hetjob.elastic.companions import TimeRequest
from hetstream.hetjob.elastic.controller import Controller
from hetstream.hetjob.elastic.snapshot import Action, Companion, CompanionState, Decision, Limits, Snapshot
from hetstream.hetjob.elastic.step_terms import Measuring, StepTerms, WaitsByDataWorkers
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.master.companions import CompanionJobs
from hetstream.hetjob.master.controller_state_file import CompanionTime, ControllerStateFile
from hetstream.hetjob.master.memory import CompanionMemory, MemoryWatch, TrainerMemory, read_job_memory
from hetstream.hetjob.ports import JobDemand, MarkedJob, Measured, SiteLimit, SlurmClient
from hetstream.mpi_dataworkers.dispatcher.client import StageLoad, load_of
from hetstream.mpi_dataworkers.wire.messages import (
    DataWorkerStatus,
    Device,
    LoaderStatus,
    Status,
    SteerDataWorkers,
    Steered,
)

# How fast data workers are and how many CPUs trainers use, from one look to the next.

# A process that was idle for nearly all of the last seconds says little of how fast it is: what it was before counts.
_LEAST_BUSY_SHARE = 0.02


class WorkerRates:
    """Steps per second that data workers would make if never idle: as they were seen when they last worked."""

    def __init__(self) -> None:
        self._of_processes: dict[tuple[str, int], float] = {}

    def by_job(self, workers: Iterable[DataWorkerStatus]) -> dict[str, float]:
        """For each Slurm job with data worker processes what they make together; 0 while nothing was seen of them."""
        known, self._of_processes = self._of_processes, {}
        rates: dict[str, float] = {}
        for worker in workers:
            process = (worker.host, worker.pid)
            is_busy = worker.busy_share > _LEAST_BUSY_SHARE
            rate = worker.steps_per_s / worker.busy_share if is_busy else known.get(process, 0.0)
            self._of_processes[process] = rate
            rates[worker.slurm_job] = rates.get(worker.slurm_job, 0.0) + rate
        return rates


class TrainerCpus:
    """How many CPUs a trainer's process uses, as the kernel counts: of those on this host, the busiest."""

    def __init__(self) -> None:
        self._before: dict[int, tuple[float, float]] = {}
        self._tick_s = 1.0 / os.sysconf("SC_CLK_TCK")

    def used(self, loaders: Iterable[LoaderStatus], now: float) -> float | None:
        """CPUs in use since the last call; None on the first, or if no trainer is on this host."""
        here = {row.pid for row in loaders if row.host == socket.gethostname()}
        seconds = {pid: (now, used_s) for pid in here if (used_s := self._seconds(pid)) is not None}
        before, self._before = self._before, seconds
        shares = [
            (used_s - before[pid][1]) / (at - before[pid][0])
            for pid, (at, used_s) in seconds.items()
            if pid in before and at > before[pid][0]
        ]
        return max(shares, default=None)

    def _seconds(self, pid: int) -> float | None:
        """User and system time of a process, threads included (proc(5), fields 14 and 15 of stat)."""
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) * self._tick_s


# When to ask Slurm about companions: as seldom as it tells anything new. Pure; the clock is an argument.
#
# The dispatcher says which companions work, and that at once; only what is on its way, in or out, is asked of Slurm. A
# thousand jobs that all do so must cost slurmctld next to nothing, most of all when it is slow.

# Something has just changed: what comes next, comes soon. What has not for long may wait in the queue for days.
_SOONEST_S, _LATEST_S = 2.0, 600.0
# The next look is due when this share of the time since the last change has passed again.
_SHARE = 0.5


class PollBackoff:
    """Remembers when Slurm was asked, also in vain, and what had changed by then."""

    def __init__(self) -> None:
        self._state: Hashable = None
        self._changed_s = float("-inf")
        self._asked_s = float("-inf")

    @property
    def changed_s(self) -> float:
        """When something had last changed, or a little later."""
        return self._changed_s

    def is_due(self, state: Hashable, is_settled: bool, now: float) -> bool:
        """Return whether to ask now; the caller then does.

        Args:
            state: what is known of the companions; compared with that of the last call.
            is_settled: all of them work, or there are none.
            now: seconds, never going back.
        """
        if state != self._state:
            self._state, self._changed_s = state, now
        never = self._asked_s == float("-inf")
        interval_s = min(_LATEST_S, max(_SOONEST_S, _SHARE * (now - self._changed_s)))
        if not never and (is_settled or now - self._asked_s < interval_s):
            return False
        self._asked_s = now
        return True


log = logging.getLogger(__name__)

_EVERY_S = 1.0
_STOPPED_WITHIN_S = 20.0
# Wait for the best node, after which a companion is submitted again for any node.
_PREFER_S = 30.0
# Older readings of the site daemon do not stand for what Slurm would say: it reads once a minute.
READ_WITHIN_S = 300.0
_RUNNING = (CompanionState.STARTING, CompanionState.WORKING)


class Steering(Protocol):
    """A connection to the dispatcher; `hetstream.mpi_dataworkers.dispatcher.client.StatusClient` is one."""

    def steer(self, order: SteerDataWorkers) -> Status:
        """Tell what this side does, and hear what goes on."""

    def close(self) -> None:
        """Close the connection."""


class Companions(Protocol):
    """What joins later: jobs, or processes of this host. Members as of `CompanionJobs`."""

    device: Steered
    time: CompanionTime

    @property
    def job_id(self) -> str:
        """Of the job whose companions they are."""

    @property
    def mark(self) -> str:
        """The word by which the site daemon knows them."""

    @property
    def mb_per_cpu(self) -> float | None:
        """Memory that each asks for."""

    def submit(self, cpus: int, mb_per_cpu: int | None, node: str, asked: TimeRequest | None) -> str:
        """Submit one, and return its id."""

    def listed(self, known: Sequence[MarkedJob] | None = None) -> list[MarkedJob]:
        """Return those that are not over."""

    def ask_for_less(self, job_id: str, asked: TimeRequest) -> None:
        """Let one that waits start in a shorter hole."""

    def cancel(self, job_id: str) -> None:
        """End one."""


@dataclass
class _Tracked:
    """A companion job as this side knows it."""

    cpus: int
    state: CompanionState
    since: float
    rate_per_s: float = 0.0
    node: str = ""  # that it was submitted for; empty for any
    takes_over: str = ""  # the companion that leaves when this one works; until then this one is nobody's to count
    why: str = ""  # it takes over


class Controlled(Protocol):
    """What decides; `Controller` of data workers is one."""

    def refused(self, now: float) -> float:
        """Slurm refused a submission; returns after how many seconds the next one may be tried."""

    def accepted(self) -> None:
        """Slurm took one."""


class CompanionKeeper:
    """Looks after a job's companions of one kind in a thread beside the job master's loop; each kind is a subclass.

    Args:
        controller: decides; a subclass asks it in `_turn`.
        companions: acts; says of which kind they are.
        connect: to the dispatcher.
        controller_state_file: keeps what was decided.
        site: what the site allows; None without a site daemon.
        clock: seconds, never going back.
    """

    def __init__(
        self,
        controller: Controlled,
        companions: Companions,
        connect: Callable[[], Steering],
        controller_state_file: ControllerStateFile,
        site: SiteLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller = controller
        self._companions = companions
        self._connect = connect
        self._controller_state_file = controller_state_file
        self._site = site
        self._clock = clock
        self._tracked: dict[str, _Tracked] = {}
        self._given_up: set[str] = set()
        self._looks = PollBackoff()
        self._time = companions.time
        self._said = ""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"elastic-{companions.device}")

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end and to cancel all companions; returns at once."""
        self._stopping.set()

    def join(self) -> None:
        """Wait until it has, but no longer than Slurm lets a step that is to end."""
        if self._thread.is_alive():
            self._thread.join(_STOPPED_WITHIN_S)

    def _run(self) -> None:
        client: Steering | None = None
        while not self._stopping.wait(_EVERY_S):
            try:
                if client is None:
                    client = self._connect()
                self._turn(client)
            except HetstreamError as error:
                # The dispatcher is away for a moment, or slurmctld is: what runs goes on, and the next turn looks anew.
                log.warning("elastic controller: no turn: %s", error)
                if client is not None:
                    client.close()
                    client = None
            except Exception:
                log.exception("the elastic controller fails: the number of companions stays as it is")
                break
        if client is not None:
            client.close()
        self._stopping.wait()
        self._cancel_all()

    def _turn(self, client: Steering) -> None:
        """Look, decide, act, and say why."""
        raise NotImplementedError

    def summary(self) -> dict[str, Any]:
        """Return what it did and found out, for the job's summary."""
        raise NotImplementedError

    @property
    def _mb_per_cpu(self) -> int | None:
        """Memory of the next one; None for what the options say."""
        return None

    # --- looking ----------------------------------------------------------------------------------------------------

    def _take_in(self, rates: Mapping[str, float], now: float) -> None:
        """Bring the states of the companions up to date."""
        self._look_at_slurm(now)
        for job_id, companion in self._tracked.items():
            companion.rate_per_s = rates.get(job_id, 0.0)
            if companion.state is CompanionState.DRAINING:
                continue
            if job_id in rates and companion.state is not CompanionState.WORKING:
                companion.state, companion.since = CompanionState.WORKING, now
                self._time.working(job_id, now)
            elif job_id not in rates and companion.state is CompanionState.WORKING:
                companion.state, companion.since = CompanionState.STARTING, now

    def _look_at_slurm(self, now: float) -> None:
        states = frozenset((job_id, companion.state) for job_id, companion in self._tracked.items())
        running = [job_id for job_id, companion in self._tracked.items() if companion.state in _RUNNING]
        needs_ends = self._time.needs_a_look(running)  # which only Slurm tells
        is_settled = all(companion.state is CompanionState.WORKING for companion in self._tracked.values())
        is_settled = is_settled and not needs_ends
        if not self._looks.is_due(states, is_settled, now):
            return
        found = self._companions.listed(None if needs_ends else self._read_by_site(now))
        self._time.listed(found, now)
        listed = {job.job_id: job for job in found if job.job_id not in self._given_up}
        for job_id in self._tracked.keys() - listed.keys():
            log.info("companion job=%s ended", job_id)
            self._forget(job_id, now)
        for job_id, job in listed.items():
            state = CompanionState.PENDING if job.state == "PENDING" else CompanionState.STARTING
            if job_id not in self._tracked:
                log.info("companion job=%s of a job master of before is taken over", job_id)
                self._tracked[job_id] = _Tracked(job.num_cpus, state, now)
            elif self._tracked[job_id].state is CompanionState.PENDING and state is CompanionState.STARTING:
                self._tracked[job_id].state, self._tracked[job_id].since = state, now

    def _forget(self, job_id: str, now: float) -> None:
        self._time.over(job_id, now)
        del self._tracked[job_id]

    def _read_by_site(self, now: float) -> Sequence[MarkedJob] | None:
        """What the site daemon has read, if that was of late and after the last change, which else is not in it."""
        reading = self._site.marked(self._companions.mark) if self._site is not None else None
        if reading is None or reading.taken_s <= self._looks.changed_s or now - reading.taken_s > READ_WITHIN_S:
            return None
        return reading.jobs

    # --- acting -----------------------------------------------------------------------------------------------------

    def _carry_out(self, decision: Decision, now: float, tell: Callable[[], Status]) -> None:
        if decision.action is Action.DRAIN:
            for job_id in decision.jobs:
                self._tracked[job_id].state, self._tracked[job_id].since = CompanionState.DRAINING, now
                self._time.leaves(job_id, now)
        tell()
        if decision.action is Action.GROW:
            self._submit(decision)
        if decision.action is Action.CANCEL:
            for job_id in decision.jobs:
                self._cancel(job_id)
        if decision.action is not Action.GROW:
            # Whoever was to take over from those is not needed either.
            for job_id in [new for new, companion in self._tracked.items() if companion.takes_over in decision.jobs]:
                log.info("companion job=%s is cancelled: what it was to take over leaves", job_id)
                self._cancel(job_id)

    def _cancel(self, job_id: str) -> None:
        self._companions.cancel(job_id)
        self._given_up.add(job_id)
        self._forget(job_id, self._clock())

    def _new(self, cpus: int, mb_per_cpu: int | None, node: str = "", takes_over: str = "", why: str = "") -> str:
        """Submit a companion and return its id.

        Raises:
            HetstreamError: Slurm refused, or it would be of no use any more.
        """
        asked = self._time.request(time.time())
        job_id = self._companions.submit(cpus, mb_per_cpu, node, asked)
        now = self._clock()
        self._time.submitted(job_id, cpus, asked, now)
        self._tracked[job_id] = _Tracked(cpus, CompanionState.PENDING, now, 0.0, node, takes_over, why)
        return job_id

    def _submit(self, decision: Decision) -> None:
        nodes = list(self._site.preferred_nodes()) if self._site is not None else []
        for number in range(decision.count):
            if self._stopping.is_set():
                return
            if not self._submit_one(decision.cpus, nodes[number] if number < len(nodes) else ""):
                return

    def _submit_one(self, cpus: int, node: str) -> bool:
        """Submit a companion, for a node if that is possible: Slurm has the last word."""
        try:
            job_id = self._new(cpus, self._mb_per_cpu, node)
        except HetstreamError as error:
            if node:
                log.info("no companion for node=%s, any other is as good: %s", node, error)
                return self._submit_one(cpus, "")
            delay_s = self._controller.refused(self._clock())
            log.error("no companion could be submitted, next try in %g s: %s", delay_s, error)
            return False
        self._controller.accepted()
        log.info("companion job=%s of %d CPUs submitted%s", job_id, cpus, f" for node={node}" if node else "")
        return True

    def _cancel_all(self) -> None:
        """Cancel those that Slurm lists, and those of this side, should Slurm not answer."""
        try:
            job_ids = {job.job_id for job in self._companions.listed()} | self._tracked.keys()
        except HetstreamError as error:
            log.error("companions could not be listed: %s", error)
            job_ids = set(self._tracked)
        for job_id in sorted(job_ids):
            try:
                self._companions.cancel(job_id)
                log.info("companion job=%s cancelled", job_id)
            except HetstreamError as error:
                log.error("companion job=%s could not be cancelled: %s", job_id, error)

    # --- saying -----------------------------------------------------------------------------------------------------

    def _note(self, decision: Decision, num_before: int) -> None:
        what = "embedding_servers" if self._companions.device == "embedding" else "data_workers"
        log.info("%s=%d %s %d: %s", what, num_before, decision.action.value, decision.count, decision.reason)
        self._controller_state_file.changes.append(
            {"time": round(time.time(), 3), "action": decision.action.value, "count": decision.count}
            | {"reason": decision.reason, f"{what}_before": num_before}
        )

    def _order(self, decision: Decision | None) -> SteerDataWorkers:
        leaving = [job_id for job_id, companion in self._tracked.items() if companion.state is CompanionState.DRAINING]
        device = self._companions.device
        if decision is None:
            return SteerDataWorkers(self._said, "", 0, "", leaving, device)
        return SteerDataWorkers(self._said, decision.action.value, decision.count, decision.reason, leaving, device)


class Elastic(CompanionKeeper):
    """Runs the controller of one stage of a job beside the job master's loop.

    Args:
        controller: decides.
        companions: acts; says which stage it is.
        fixed: data workers of component 1, which are of the stage without GPUs.
        connect, controller_state_file, site, clock: as of `CompanionKeeper`.
        measuring: what the site is told of the job's speed; None for nothing.

    Attributes:
        memory_watch: of trainer and companions.
    """

    _controller: Controller

    def __init__(
        self,
        controller: Controller,
        companions: Companions,
        fixed: int,
        connect: Callable[[], Steering],
        controller_state_file: ControllerStateFile,
        site: SiteLimit | None = None,
        clock: Callable[[], float] = time.monotonic,
        measuring: Measuring | None = None,
    ) -> None:
        super().__init__(controller, companions, connect, controller_state_file, site, clock)
        self._fixed = fixed
        self._measuring = measuring
        self._device: Device = "gpu" if companions.device == "gpu" else "cpu"
        self._trainer = TrainerCpus()
        self._rates = WorkerRates()
        self._memory = CompanionMemory(companions.mb_per_cpu)
        trainer_memory = TrainerMemory(companions.job_id, partial(read_job_memory, companions.job_id))
        self.memory_watch = MemoryWatch(trainer_memory, self._memory)
        self._step_terms = StepTerms()
        self._waits = WaitsByDataWorkers()
        self._last_read: Snapshot | None = None  # the newest in which a loader read

    def summary(self) -> dict[str, Any]:
        """Return what it did and found out, for the job's summary."""
        controller, last = self._controller, self._last_read
        return {
            "stage": controller.stage.value,
            "data_workers": last.num_data_workers if last else None,
            "waits_by_data_workers": self._waits.rows,
            "most_data_workers": controller.limits.maximum,
            "steps_per_s": last.steps_per_s if last else None,
            "wait_share": last.wait_share if last else None,
            "data_worker_cpus": controller.cpus,
            "data_worker_mb": self._memory.most_mb(controller.cpus),
            "trainer_cpus_recommended": controller.trainer_cpus,
            "trainer_memory": self.memory_watch.trainer.first_warning,
            "step_terms": [msgspec.structs.asdict(term) for term in self._step_terms.told],
            "local_wait_s": controller.local.wait_s if controller.local else None,
            "decisions": list(self._controller_state_file.changes),
            **self._time.summary(self._clock()),
        }

    def _turn(self, client: Steering) -> None:
        status = client.steer(self._order(None))
        now = self._clock()
        load = load_of(self._device, status)
        rates = self._rates.by_job(load.workers)
        self._take_in(rates, now)
        self._give_up_nodes(now)
        self._ask_for_less(now)
        for handover in self._hand_over(now):
            client.steer(self._order(handover))
        snapshot = self._snapshot(load, rates, now)
        self._waits.note(snapshot, now)
        if snapshot.reading and snapshot.steps_per_s > 0:
            self._last_read = snapshot
            num_working = len(snapshot.of(CompanionState.WORKING)) + self._fixed
            self._step_terms.note(status.loaders, self._controller.loading_term(num_working), now)
        decision = self._controller.decide(snapshot, now)
        measured = self._measured(snapshot, status)
        if self._device == "cpu":
            self.memory_watch.look_at_trainer(measured, now, status.loaders)
        if self._site is not None:
            limits, wanted = self._controller.limits, self._controller.wanted(snapshot, now)
            have, cpus = snapshot.num_data_workers, self._controller.cpus
            self._site.report(JobDemand(limits.minimum, have, wanted, cpus, snapshot.wait_share, measured))
        working = {
            job_id: companion.cpus
            for job_id, companion in self._tracked.items()
            if companion.state is CompanionState.WORKING
        }
        self._memory.take_in(status.data_workers, working, now, status.loaders)
        if not decision.is_change:
            decision = self._leave_in_time(snapshot, now) or decision
        if not decision.is_change:
            self._replace_one()
        self._said = self._headline(snapshot, decision)
        if decision.is_change:
            self._note(decision, snapshot.num_data_workers)
        warnings = self.memory_watch.warnings(self._controller.limits.largest_cpus, now)
        self._controller_state_file.write(self._controller.memory(), warnings, self._step_terms.told)
        if decision.is_change:
            # Written down and said first: acting may take seconds.
            self._carry_out(decision, now, lambda: client.steer(self._order(decision)))

    def _measured(self, snapshot: Snapshot, status: Status) -> Measured | None:
        if self._measuring is None:
            return None
        local = self._controller.local
        local_steps_per_s = local.steps_per_s(snapshot) if local else None
        return self._measuring.measured(snapshot, self._controller.cpus, local_steps_per_s, status.loaders, time.time())

    # --- looking ----------------------------------------------------------------------------------------------------

    def _snapshot(self, load: StageLoad, rates: Mapping[str, float], now: float) -> Snapshot:
        return Snapshot(
            reading=load.reading,
            steps_per_s=load.steps_per_s,
            wait_share=load.wait_share,
            companions=tuple(
                Companion(job_id, companion.cpus, companion.state, companion.since, companion.rate_per_s)
                for job_id, companion in self._tracked.items()
                if not companion.takes_over
            ),
            fixed=self._fixed,
            fixed_rate_per_s=sum(rate for job_id, rate in rates.items() if job_id not in self._tracked),
            site_limit=self._site.data_workers() if self._site is not None else None,
            trainer_cpus=self._trainer.used(load.trainers, now),
            earlier_wait_share=load.earlier_wait_share,
            features_share=load.features_share,
            features_on_trainer=load.features_on_trainer,
        )

    # --- acting -----------------------------------------------------------------------------------------------------

    @property
    def _mb_per_cpu(self) -> int | None:
        return self._memory.mb_per_cpu

    def _new(self, cpus: int, mb_per_cpu: int | None, node: str = "", takes_over: str = "", why: str = "") -> str:
        job_id = super()._new(cpus, mb_per_cpu, node, takes_over, why)
        self._memory.submitted(job_id, cpus, mb_per_cpu)
        return job_id

    def _leave_in_time(self, snapshot: Snapshot, now: float) -> Decision | None:
        """Let companions go before their time limit ends them; others take their places as far as they are wanted."""
        running = [job_id for job_id, companion in self._tracked.items() if companion.state in _RUNNING]
        steps_s = {row.job_id: row.cpus / row.rate_per_s for row in snapshot.companions if row.rate_per_s > 0}
        due = self._time.due(running, steps_s, now)
        if not due:
            return None
        self._time.lasted(due)
        # One that is about to take over is counted by nobody, and has no successor.
        counted = [job_id for job_id in due if not self._tracked[job_id].takes_over]
        wanted = self._controller.wanted(snapshot, now)
        allowed = wanted if snapshot.site_limit is None else min(wanted, snapshot.site_limit)
        count = max(0, min(len(counted), allowed - (snapshot.num_data_workers - len(counted))))
        successors = [job_id for job_id in counted[:count] if self._submit_one(self._tracked[job_id].cpus, "")]
        what = f"{len(successors)} more take their places" if successors else "no other takes their places"
        reason = (
            f"the time of {count_words(len(due), 'companion')} ends in {min(due.values()):.0f} s: they leave, {what}"
        )
        return Decision(Action.DRAIN, len(due), reason, tuple(due))

    def _replace_one(self) -> None:
        """Submit a companion that is to take over from one that runs out of memory."""
        growing = self._memory.replacement()
        if growing is None:
            return
        reason = f"{growing.reason}; {growing.mb_per_cpu} MB a CPU are asked for"
        if self._submit_successor(growing.job_id, growing.cpus, growing.mb_per_cpu, reason):
            self._memory.replaced(growing)
        else:
            self._memory.not_replaced(growing)

    def _submit_successor(self, job_id: str, cpus: int, mb_per_cpu: int | None, why: str) -> bool:
        """Submit a companion that takes over from another one; false if Slurm refuses."""
        try:
            new = self._new(cpus, mb_per_cpu, "", job_id, why)
        except HetstreamError as error:
            log.error("%s; Slurm takes none in its place: %s", why, error)
            return False
        log.info("%s; companion job=%s takes its place when it works", why, new)
        return True

    def _hand_over(self, now: float) -> Iterator[Decision]:
        """Let those leave whose successors work. A successor of one that is gone is a companion as any other."""
        for job_id, companion in self._tracked.items():
            predecessor = self._tracked.get(companion.takes_over)
            if not companion.takes_over:
                continue
            if predecessor is None or predecessor.state is CompanionState.DRAINING:
                companion.takes_over = ""
            elif companion.state is CompanionState.WORKING:
                predecessor.state, predecessor.since = CompanionState.DRAINING, now
                self._time.leaves(companion.takes_over, now)
                reason = f"{companion.why}; companion {job_id} works in its place"
                decision = Decision(Action.DRAIN, 1, reason, (companion.takes_over,))
                companion.takes_over = ""
                self._note(decision, self._fixed + sum(not other.takes_over for other in self._tracked.values()) - 1)
                yield decision

    def _give_up_nodes(self, now: float) -> None:
        """Let companions that wait for a node run on any."""
        for job_id, companion in list(self._tracked.items()):
            if companion.node and companion.state is CompanionState.PENDING and now - companion.since >= _PREFER_S:
                log.info("companion job=%s waits for node=%s: it is submitted again for any", job_id, companion.node)
                self._cancel(job_id)
                self._submit_one(companion.cpus, "")

    def _ask_for_less(self, now: float) -> None:
        """Let companions that wait start in shorter holes."""
        waiting = [job_id for job_id, companion in self._tracked.items() if companion.state is CompanionState.PENDING]
        for job_id, asked in self._time.impatient(waiting, now).items():
            self._time.asks(job_id, asked, now)
            try:
                self._companions.ask_for_less(job_id, asked)
            except HetstreamError as error:
                log.info("companion job=%s cannot ask for a shorter hole, it may have started: %s", job_id, error)
            else:
                log.info("companion job=%s waits: it asks for %g min at the least", job_id, asked.time_min_s / 60)

    # --- saying -----------------------------------------------------------------------------------------------------

    def _headline(self, snapshot: Snapshot, decision: Decision) -> str:
        limits = self._controller.limits
        working = snapshot.fixed + len(snapshot.of(CompanionState.WORKING))
        states = [
            f"{len(snapshot.of(state))} {state.value}"
            for state in CompanionState
            if state is not CompanionState.WORKING and snapshot.of(state)
        ]
        site = "" if snapshot.site_limit is None else f", by the site {snapshot.site_limit}"
        warning = self.memory_watch.trainer.warning
        return (
            f"{f'{warning}; ' if warning else ''}"
            f"{', '.join([f'{working} data workers', *states])}, allowed {limits.minimum}-{limits.maximum}{site}; "
            f"{self._controller.stage.value}: {decision.reason}"
        )


# The elastic controllers of one job: one for the data workers of each stage, and one for embedding servers. Called by
# `server.py`.
#
# The stage without GPUs has a controller if its number of data workers may change, the stage on GPUs always: its data
# workers are companions, and come when a loader with a `gpu_stage` waits for them.


@dataclass(frozen=True)
class GpuStage:
    """Data workers with a GPU: one process, one GPU and one companion job each.

    Attributes:
        minimum, maximum: of them.
        cpus: of each.
        options: sbatch options of each.
    """

    minimum: int
    maximum: int
    cpus: int
    options: tuple[str, ...]


def elastic_of_gpu_stage(
    stage: GpuStage,
    cooldown_s: float,
    client: SlurmClient,
    job: JobEnvironment,
    worker_words: Callable[[int], Sequence[str]],
    connect: Callable[[], Steering],
    end_s: float | None,
) -> Elastic:
    """Return the controller of a job's stage on GPUs.

    Args:
        stage: what the script asks for.
        cooldown_s: from one change to the next at the least.
        client: Slurm.
        job: this job.
        worker_words: gives the command of a data worker with a number of CPUs.
        connect: to the dispatcher.
        end_s: when the job ends at the latest, in seconds since the epoch; None where that is not known.
    """
    state_file = ControllerStateFile(job.gpu_controller_state_file)
    time = CompanionTime(None, state_file.tally, end_s)

    def command(cpus: int) -> str:
        return shlex.join(worker_words(cpus))

    companions = CompanionJobs(client, job, stage.options, command, time, device="gpu")
    limits = Limits(stage.minimum, stage.maximum, stage.cpus, stage.cpus, cooldown_s)
    return Elastic(Controller(limits, state_file.memory), companions, 0, connect, state_file)


@dataclass(frozen=True)
class ElasticStages:
    """The controllers that a job has.

    Attributes:
        cpu: of the stage without GPUs, which each job has; None if its number of data workers is fixed.
        gpu: of the stage on GPUs; None without one.
        embedding: of the embedding servers; None where their number is fixed.
    """

    cpu: Elastic | None = None
    gpu: Elastic | None = None
    embedding: CompanionKeeper | None = None

    @property
    def all(self) -> list[CompanionKeeper]:
        """Those that there are."""
        return [elastic for elastic in (self.cpu, self.gpu, self.embedding) if elastic is not None]

    def summary(self, trainer_cpus: int | None) -> dict[str, Any]:
        """Return what they did and found out, for the job's summary.

        Args:
            trainer_cpus: that each trainer task has; None where that is not known.
        """
        found: dict[str, CompanionKeeper | None] = {"elastic": self.cpu, "elastic_gpu": self.gpu}
        found["elastic_embedding"] = self.embedding
        # What the trainer itself needs is known to the stage that it takes its batches from.
        return {
            name: {**elastic.summary(), "trainer_cpus": trainer_cpus}
            for name, elastic in found.items()
            if elastic is not None
        }
