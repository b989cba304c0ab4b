"""Data workers that fail what others make: they cost nothing but themselves. A model of a service, without sockets."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import pytest

from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.dispatcher.tables import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Instruction,
    ReportEvent,
    Send,
    WorkerBackoff,
)
from hetstream.mpi_dataworkers.wire.failures import OnFailure, StepFailures
from hetstream.mpi_dataworkers.wire.messages import (
    BatchFailed,
    ErrorPolicy,
    FailStep,
    Failure,
    FinishLease,
    GrantLease,
    LoaderStats,
    OpenSession,
    PlannedOrder,
    Program,
    ProvidePipeline,
    RegisterLoader,
    RegisterWorker,
    ReportProgress,
    SessionSpec,
    WorkerHeartbeat,
)

LOADER = "loader"
STEP_S, FAIL_S, REPORT_S = 0.05, 0.002, 0.1


def failure(sample_index: int, is_final: bool) -> Failure:
    return Failure(sample_index, ("builtins", "OSError"), "no such file", "traceback", "host", 1, is_final)


@dataclass
class Outcome:
    """How a pass went."""

    raised: list[int]
    left_out: set[int]
    num_failures: int
    took_s: float
    paused: list[events.DataWorkerPaused]
    hosts_of_failures: dict[int, list[str]]


class Cluster:
    """One loader that takes every step at once, and data workers that make steps in 50 ms or fail them in 2 ms.

    Args:
        hosts: host of each data worker.
        broken: hosts on which every step fails, from a time on, s.
        is_final: they cannot load the pipeline; else each sample raises.
        bad_steps: steps that fail everywhere.
    """

    def __init__(
        self,
        hosts: list[str],
        broken: dict[str, float],
        is_final: bool = False,
        bad_steps: frozenset[int] = frozenset(),
        policy: ErrorPolicy = ErrorPolicy(),  # noqa: B008, it is frozen
        num_steps: int = 240,
        seed: int = 0,
    ) -> None:
        self.broken, self.is_final, self.bad_steps, self.num_steps = broken, is_final, bad_steps, num_steps
        self.state = DispatcherState(1, 0.0)
        self.host_of = {f"w{number}": host for number, host in enumerate(hosts)}
        self.events: list[tuple[float, str, GrantLease]] = []
        self.now = 0.0
        self.made: set[int] = set()
        self.outcome = Outcome([], set(), 0, 0.0, [], {})
        self.send(LOADER, RegisterLoader("job", 0, 0, 1, "gpu", 1, "d", {}))
        self.send(LOADER, ProvidePipeline("d", Program("/", []), b"", b"x"))
        peers = list(self.host_of)
        random.Random(seed).shuffle(peers)
        for peer in peers:
            self.send(peer, RegisterWorker(self.host_of[peer], 1, "", []))
        order = PlannedOrder(num_steps, 1, 1, 0, False, False, 0)
        session = SessionSpec("s", "d", 0, 0, order, ["tcp://loader:1"], errors=policy)
        self.send(LOADER, OpenSession(session, num_steps, 0, [], 64, None))

    def send(self, peer: str, message: object) -> None:
        self.take(self.state.handle(peer, message, self.now))  # type: ignore[arg-type]

    def take(self, instructions: list[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, Send) and isinstance(one.message, GrantLease):
                lasts_s = FAIL_S if self.fails(one.peer) else STEP_S * (one.message.stop_step - one.message.first_step)
                self.events.append((self.now + lasts_s, one.peer, one.message))
                for left_out in one.message.left_out.values():
                    self.outcome.left_out |= {each.sample_index for each in left_out}
            elif isinstance(one, Send) and isinstance(one.message, BatchFailed):
                self.outcome.raised.append(one.message.step)
            elif isinstance(one, ReportEvent) and isinstance(one.event, events.DataWorkerPaused):
                self.outcome.paused.append(one.event)

    def fails(self, peer: str) -> bool:
        return self.now >= self.broken.get(self.host_of[peer], float("inf"))

    def work(self, peer: str, lease: GrantLease) -> None:
        """A data worker is done with a lease, or comes to a step that it cannot make."""
        is_held = lease.token in self.state.tables.leases and lease.token in self.state.tables.workers[peer].tokens
        if not is_held:
            return
        stop = self.state.tables.leases[lease.token].stop
        for step in range(lease.first_step, stop):
            is_bad = step in self.bad_steps and not lease.left_out.get(step)
            if self.fails(peer) or is_bad:
                self.outcome.num_failures += 1
                self.outcome.hosts_of_failures.setdefault(step, []).append(self.host_of[peer])
                final = self.is_final and not is_bad
                self.send(peer, FailStep(lease.token, step, failure(-1 if final else step, final)))
                return
            self.made.add(step)
        self.send(peer, FinishLease(lease.token, STEP_S * (stop - lease.first_step)))

    def run(self, limit_s: float = 120.0) -> Outcome:
        """Until all steps are there, one is raised, or the limit is over."""
        consumed, reported_at = 0, 0.0
        while consumed < self.num_steps and self.now < limit_s and not self.outcome.raised:
            self.events.sort(key=lambda event: event[0])
            if self.events and self.events[0][0] <= reported_at + REPORT_S:
                at, peer, lease = self.events.pop(0)
                self.now = max(self.now, at)
                self.work(peer, lease)
            else:
                self.now = reported_at = max(self.now, reported_at + REPORT_S)
                for peer in self.host_of:
                    self.send(peer, WorkerHeartbeat(sorted(self.state.tables.workers[peer].tokens)))
                self.take(self.state.tick(self.now))
            while consumed in self.made:
                consumed += 1
            ahead = sorted(step for step in self.made if step >= consumed)
            self.send(LOADER, ReportProgress("s", consumed, [(one, one + 1) for one in ahead], 64, LoaderStats()))
            self.state.validate()
        self.outcome.took_s = self.now
        return self.outcome


def hosts_of(num_broken: int, num_good: int, how: str) -> list[str]:
    if how == "one host":
        return ["broken"] * num_broken + ["good"] * num_good
    return [f"broken{number}" for number in range(num_broken)] + [f"good{number}" for number in range(num_good)]


@pytest.mark.parametrize("num_broken", [1, 8, 15])
@pytest.mark.parametrize("how", ["one host", "a host each"])
@pytest.mark.parametrize("is_final", [True, False], ids=["cannot load", "samples raise"])
@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_broken_data_workers_among_good_ones_raise_and_discard_nothing(
    num_broken: int, how: str, is_final: bool, on_error: str
) -> None:
    num_good = 16 - num_broken
    hosts = hosts_of(num_broken, num_good, how)
    broken = {host: 0.0 for host in hosts if host.startswith("broken")}
    policy = ErrorPolicy(on_error)  # type: ignore[arg-type]
    outcome = Cluster(hosts, broken, is_final, policy=policy, seed=num_broken).run()
    assert not outcome.raised
    assert not outcome.left_out
    assert outcome.took_s < 1.5 * 240 * STEP_S / num_good + 1, "the others lose next to no time"
    assert outcome.num_failures <= 16 * num_broken, "who fails is asked less and less"
    assert {event.host for event in outcome.paused} == set(broken)


def test_a_mount_that_is_lost_on_some_hosts_in_mid_epoch_raises_nothing() -> None:
    hosts = [f"host{number % 8}" for number in range(16)]
    outcome = Cluster(hosts, {f"host{number}": 0.5 for number in range(5)}, policy=ErrorPolicy("skip")).run()
    assert not outcome.raised
    assert not outcome.left_out


def test_a_host_that_is_mended_is_used_again() -> None:
    cluster = Cluster(["broken", "good"], {"broken": 0.0}, is_final=True, num_steps=200)
    cluster.broken["broken"] = 0.0
    for _ in range(3):
        at, peer, lease = min(cluster.events, key=lambda event: event[0])
        cluster.events.remove((at, peer, lease))
        cluster.now = at
        cluster.work(peer, lease)
    del cluster.broken["broken"]
    cluster.run()
    assert cluster.state.tables.workers["w0"].work.steps > 50
    assert cluster.state.tables.workers["w0"].standings["d"] == WorkerBackoff(is_sound=True)


@pytest.mark.parametrize("is_final", [True, False], ids=["cannot load", "samples raise"])
@pytest.mark.parametrize("hosts", [["one"], ["one"] * 16, [f"host{n}" for n in range(16)]], ids=["1", "16x1", "1x16"])
def test_what_fails_everywhere_is_raised_promptly(hosts: list[str], is_final: bool) -> None:
    cluster = Cluster(hosts, dict.fromkeys(hosts, 0.0), is_final)
    outcome = cluster.run()
    assert outcome.raised
    assert outcome.took_s < 1.0
    tried = outcome.hosts_of_failures[outcome.raised[0]]
    assert len(tried) >= 3
    if not is_final:
        assert len(set(tried)) == len(set(hosts)), "no host was asked that had made a step: each has to say so"


def test_a_bad_sample_is_raised_after_max_attempts_on_different_hosts() -> None:
    outcome = Cluster([f"host{n % 4}" for n in range(16)], {}, bad_steps=frozenset({150})).run()
    assert outcome.raised == [150]
    assert len(outcome.hosts_of_failures[150]) == 3
    assert len(set(outcome.hosts_of_failures[150])) == 3
    assert not outcome.paused


def test_many_bad_samples_are_left_out_and_nobody_is_blamed_for_them() -> None:
    bad = frozenset(range(0, 240, 4))
    outcome = Cluster(["one"] * 4 + ["two"] * 4, {}, bad_steps=bad, policy=ErrorPolicy("skip")).run()
    assert not outcome.raised
    assert outcome.left_out == bad
    assert not outcome.paused
    assert max(Counter(map(len, outcome.hosts_of_failures.values()))) <= 4


def test_one_attempt_means_one_on_each_of_two_hosts() -> None:
    policy = ErrorPolicy("skip", max_attempts=1)
    failures = StepFailures()
    able = {"w0": "one", "w1": "one", "w2": "two"}
    assert failures.note("w0", failure(7, False), policy, "one", True, able) is OnFailure.TRY_AGAIN
    assert failures.note("w2", failure(7, False), policy, "two", False, able) is OnFailure.LEAVE_OUT
    alone = {"w0": "one"}
    assert StepFailures().note("w0", failure(7, False), policy, "one", False, alone) is OnFailure.LEAVE_OUT


def test_pauses_grow_and_a_step_ends_them() -> None:
    standing = WorkerBackoff()
    assert standing.made_by_another(0.0) == 0.0, "one may be an accident"
    now, pauses = 0.0, []
    for _ in range(9):
        pauses.append(standing.made_by_another(now))
        assert standing.made_by_another(now) == 0.0, "it is paused already"
        now = standing.paused_until
    assert pauses == [min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**n) for n in range(9)]
    standing.made_step()
    assert standing.failed_step(True, now) == FIRST_PAUSE_S
