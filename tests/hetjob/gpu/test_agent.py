"""An agent with a GPU and a coordinator that the test is."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from hetstream.hetjob.gpu.agent import Agent
from hetstream.hetjob.gpu.device import MemoryUse
from hetstream.hetjob.gpu.orders import FULL_SHARE, NO_LIMIT, GpuUse, JobClass, Order, Statistics

MS = 1_000_000
VALID_NS = 2**62


class FakeGpu:
    """A GPU that remembers its limit."""

    name = "GPU-1a2b"
    limit_bytes = NO_LIMIT

    def memory(self) -> MemoryUse:
        return MemoryUse(8, 10, 0, 100)

    def begin_mini_batch(self) -> None: ...

    def set_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    def is_idle(self) -> bool:
        return True

    def launched(self) -> int:
        return 0


class FakeCoordinator:
    """Says what it is told to say, and remembers what it heard. While a process waits, `time_goes_by` is called."""

    def __init__(self, verdict: GpuUse) -> None:
        self.verdict = verdict
        self.limit_bytes = NO_LIMIT
        self.job_class = JobClass.OPPORTUNISTIC
        self.heard: list[Statistics] = []
        self.busy_ns = 0
        self.time_goes_by: Callable[[], None] = lambda: pytest.fail("it waits")

    def order(self) -> Order:
        return Order(VALID_NS, self.verdict, self.limit_bytes, FULL_SHARE)

    def report(self, statistics: Statistics, *, news: bool) -> None:
        self.heard.append(statistics)

    def busy_since_ns(self) -> int:
        return self.busy_ns

    def say_busy(self, now_ns: int) -> None:
        self.busy_ns = now_ns

    def look(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        self.time_goes_by()

    def close(self) -> None: ...


def agent_of(coordinator: FakeCoordinator, gpu: FakeGpu, job_class: JobClass = JobClass.OPPORTUNISTIC) -> Agent:
    now_ns = [0]

    def clock() -> int:
        now_ns[0] += MS
        return now_ns[0]

    return Agent(gpu, job_class, lambda: coordinator, clock)


@pytest.mark.shows("an opportunistic job keeps to its memory limit, at its boundary, and shrinks and grows")
def test_a_job_that_is_to_finish_ends_its_mini_batch_gives_memory_back_and_waits_at_the_boundary() -> None:
    coordinator, gpu = FakeCoordinator(GpuUse.RUN), FakeGpu()
    agent = agent_of(coordinator, gpu)
    agent.before_launch()
    agent.at_boundary()
    agent.before_launch()
    coordinator.verdict, coordinator.limit_bytes = GpuUse.FINISH, 5
    agent.before_launch()  # it is on its way, and does not wait
    assert coordinator.heard[-1].is_idle == 0
    agent.at_boundary()
    assert gpu.limit_bytes == 5
    waited = []

    def go_on_after_a_while() -> None:
        waited.append(coordinator.heard[-1])
        coordinator.verdict = GpuUse.FINISH if len(waited) < 200 else GpuUse.RUN

    coordinator.time_goes_by = go_on_after_a_while
    agent.before_launch()
    assert len(waited) == 200
    # The coordinator sees that it is at its boundary, and keeps to the limit, as long as it waits there.
    assert {(said.is_idle, said.limit_bytes, said.boundaries) for said in waited} == {(1, 5, 2)}
    assert waited[-1].updated_ns > waited[0].updated_ns
    assert coordinator.heard[-1].is_idle == 0


def test_a_guaranteed_job_waits_for_nothing_and_says_when_a_mini_batch_begins() -> None:
    coordinator = FakeCoordinator(GpuUse.PAUSE)
    agent = agent_of(coordinator, FakeGpu(), JobClass.GUARANTEED)
    agent.before_launch()
    agent.at_boundary()
    assert coordinator.heard[-1].is_idle == 1
    agent.before_launch()
    assert coordinator.heard[-1].is_idle == 0
    assert coordinator.heard[-1].gap_ns > 0


def test_a_job_that_is_upgraded_while_it_waits_goes_on_and_is_bound_by_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    coordinator, gpu = FakeCoordinator(GpuUse.PAUSE), FakeGpu()
    coordinator.limit_bytes = 5
    agent = agent_of(coordinator, gpu)

    def upgrade() -> None:
        coordinator.job_class = JobClass.GUARANTEED

    coordinator.time_goes_by = upgrade
    agent.before_launch()
    assert gpu.limit_bytes == NO_LIMIT
    coordinator.time_goes_by = lambda: pytest.fail("it waits")
    coordinator.job_class = JobClass.OPPORTUNISTIC  # nobody makes it that again
    agent.at_boundary()
    agent.before_launch()
    assert capsys.readouterr().err.count("this job has become guaranteed") == 1


@pytest.mark.parametrize("follows", [True, False])
def test_a_forked_child_that_uses_the_gpu_has_an_agent_of_its_own(follows: bool) -> None:
    made: list[FakeCoordinator] = []

    def connect() -> FakeCoordinator:
        made.append(FakeCoordinator(GpuUse.RUN))
        return made[-1]

    agent = Agent(FakeGpu(), JobClass.OPPORTUNISTIC, connect, follows_forks=follows)
    agent.before_launch()
    agent.at_boundary()
    pid = os.fork()
    if pid == 0:
        agent.before_launch()
        agent.at_boundary()
        os._exit(len(made) + 10 * made[-1].heard[-1].boundaries)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == (12 if follows else 11)
    assert len(made) == 1
