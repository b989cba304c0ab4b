"""The coordinator's decisions with real agents on a GPU under a virtual clock: what they come to, without noise."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hetstream.hetjob.gpu.agent import Agent
from hetstream.hetjob.gpu.orders import JobClass, Order, Statistics
from hetstream.slurm_plugin.coordinator.decide import VALID_NS, GpuState, Measurements, SharingJob, decide
from tests.hetjob.gpu.fake_gpu import FakeGpu, FakeGpuChip, VirtualClock

MS = 1_000_000
MIB, GIB = 2**20, 2**30
RENEW_NS = 20 * MS
START_NS = VirtualClock().now_ns
# A mini-batch makes so many tensors, one after the other.
_TENSORS = 10


class Node:
    """A GPU and its coordinator, which decides when somebody has news, and every 20 ms."""

    def __init__(self, capacity_bytes: int = 32 * GIB) -> None:
        self.busy_since_ns = 0
        self.clock = VirtualClock()
        self.chip = FakeGpuChip(self.clock, capacity_bytes)
        self.state = GpuState()
        self.jobs: dict[str, SharingJob] = {}
        self.orders: dict[str, Order] = {}
        self.is_there = True

    def decide(self) -> None:
        if self.is_there:
            seen = Measurements(self.chip.capacity_bytes, tuple(self.jobs.values()))
            self.state, decisions = decide(self.state, seen, self.clock.now_ns)
            self.orders = {name: decision.order for name, decision in decisions.items()}

    def coordinate(self) -> None:
        while True:
            self.decide()
            self.clock.wait_until(self.clock.now_ns + RENEW_NS)


@dataclass
class Channel:
    """How an agent speaks with it."""

    node: Node
    name: str
    job_class: JobClass

    def order(self) -> Order | None:
        return self.node.orders.get(self.name)

    def report(self, statistics: Statistics, *, news: bool) -> None:
        self.node.jobs[self.name] = SharingJob(self.name, self.job_class, 0, statistics)
        if news:
            self.node.decide()

    def busy_since_ns(self) -> int:
        return self.node.busy_since_ns

    def say_busy(self, now_ns: int) -> None:
        self.node.busy_since_ns = now_ns

    def look(self) -> bool:
        return True

    def wait(self, timeout_s: float) -> None:
        # A process that may go on is woken at once; here it looks every millisecond.
        self.node.clock.wait_until(self.node.clock.now_ns + min(int(timeout_s * 1e9), MS))

    def close(self) -> None:
        self.node.jobs.pop(self.name, None)


@dataclass
class Training:
    """A training program: a wait for data, and then so many kernels."""

    node: Node
    name: str
    job_class: JobClass
    kernels: int
    kernel_ns: int
    wait_ns: Callable[[], float] = lambda: 0
    num_bytes: int = GIB
    begins_s: float = 0
    steps: int = 1_000_000
    began_ns: int = 0
    ended_ns: list[int] = field(default_factory=list)
    host_bytes: list[int] = field(default_factory=list)

    def run(self) -> None:
        clock, gpu = self.node.clock, FakeGpu(self.node.chip, "GPU-1a2b", 64 * GIB)
        clock.wait_until(clock.now_ns + int(self.begins_s * 1e9))
        channel = Channel(self.node, self.name, self.job_class)
        agent = Agent(gpu, self.job_class, lambda: channel, lambda: clock.now_ns)
        agent.before_launch()
        self.began_ns = clock.now_ns
        for _ in range(self.steps):
            clock.wait_until(clock.now_ns + int(self.wait_ns()))
            blocks = []
            for number in range(self.kernels):
                agent.before_launch()
                if number < _TENSORS:
                    blocks.append(gpu.allocate(self.num_bytes // _TENSORS))
                gpu.kernel(self.kernel_ns)
                agent.after_launch()
            gpu.finish()
            self.host_bytes.append(gpu.memory().host_bytes)
            for block in blocks:
                gpu.free(block)
            agent.at_boundary()
            self.ended_ns.append(clock.now_ns)
        gpu.set_limit(0)
        channel.close()

    def rate(self, begin_s: float) -> float:
        """Mini-batches a second from then on."""
        times = [ended_ns for ended_ns in self.ended_ns if ended_ns >= START_NS + begin_s * 1e9]
        return (len(times) - 1) / ((times[-1] - times[0]) / 1e9)


def together(node: Node, *trainings: Training, seconds: float) -> None:
    node.clock.run([node.coordinate, node.chip.serve, *(training.run for training in trainings)], seconds)


def guaranteed(node: Node, wait_ms: float) -> Training:
    """Computes for 15 ms, after a wait that differs by a fifth from time to time."""
    draw = random.Random(0)
    return Training(node, "g", JobClass.GUARANTEED, 30, MS // 2, lambda: wait_ms * MS * draw.uniform(0.9, 1.1))


def opportunistic(node: Node) -> Training:
    return Training(node, "o", JobClass.OPPORTUNISTIC, 10, MS // 5)


@pytest.mark.shows("a shared GPU has three devices: CUDA, a virtual clock, and a live emulation")
@pytest.mark.parametrize("wait_ms", [70, 13])
def test_gaps_are_used_and_the_guaranteed_job_does_not_feel_it(wait_ms: float) -> None:
    """AntMan's figure 12: at most 1.03 of alone, and at least 0.85 of what is left."""
    alone, solo, node = Node(), Node(), Node()
    first, other = guaranteed(alone, wait_ms), opportunistic(solo)
    together(alone, first, seconds=4)
    together(solo, other, seconds=1)
    beside, shared = guaranteed(node, wait_ms), opportunistic(node)
    together(node, beside, shared, seconds=11)
    left = wait_ms / (wait_ms + 15)
    assert first.rate(0) / beside.rate(8) <= 1.03
    assert shared.rate(8) / other.rate(0) / left >= 0.85


def test_several_opportunistic_jobs_together_are_felt_as_little_as_one() -> None:
    alone, solo, node = Node(), Node(), Node()
    first, other = guaranteed(alone, 30), opportunistic(solo)
    together(alone, first, seconds=4)
    together(solo, other, seconds=1)
    beside = guaranteed(node, 30)
    shared = [Training(node, f"o{number}", JobClass.OPPORTUNISTIC, 10, MS // 5) for number in range(3)]
    together(node, beside, *shared, seconds=11)
    assert first.rate(0) / beside.rate(8) <= 1.03
    assert sum(job.rate(8) for job in shared) / other.rate(0) / (30 / 45) >= 0.85


def test_a_guaranteed_job_that_comes_has_the_gpu_after_one_mini_batch_of_the_other() -> None:
    """AntMan's table 2: it needs nearly all of the memory, and its first mini-batches take no longer than alone."""

    def large(node: Node, begins_s: float) -> Training:
        wait_ns = 40 * MS
        return Training(
            node, "g", JobClass.GUARANTEED, 300, MS, lambda: wait_ns, num_bytes=29 * GIB, begins_s=begins_s, steps=12
        )

    alone, node = Node(), Node()
    first, beside = large(alone, 0), large(node, 1)
    together(alone, first, seconds=5)
    small = Training(node, "o", JobClass.OPPORTUNISTIC, 20, MS, num_bytes=4 * GIB)
    together(node, beside, small, seconds=7)
    took_alone, took = (each.ended_ns[-1] - each.began_ns for each in (first, beside))
    assert took <= 1.03 * took_alone
    assert small.rate(6) == pytest.approx(50, rel=0.01)  # it has the GPU for itself again
    assert max(beside.host_bytes[1:]) == 0


def test_a_coordinator_that_dies_stops_the_other_one_within_its_orders_validity_and_nobody_else() -> None:
    node = Node()
    beside, shared = guaranteed(node, 13), opportunistic(node)

    def die() -> None:
        node.clock.wait_until(node.clock.now_ns + 2000 * MS)
        node.is_there = False

    node.clock.run([node.coordinate, node.chip.serve, beside.run, shared.run, die], 4)
    assert beside.rate(2.5) == pytest.approx(beside.rate(1), rel=0.05)
    assert shared.ended_ns[-1] > START_NS + 1900 * MS
    assert shared.ended_ns[-1] <= START_NS + 2000 * MS + VALID_NS + 5 * MS
