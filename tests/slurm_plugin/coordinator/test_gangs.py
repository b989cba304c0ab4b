"""Laws of jobs on several GPUs, whatever comes when: nobody waits for ever, and all are held up at one boundary."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from hetstream.hetjob.gpu.agent import Throttle
from hetstream.hetjob.gpu.orders import FULL_SHARE, GpuUse, JobClass, Order, Statistics
from hetstream.slurm_plugin.coordinator.decide import GpuState, Measurements, OrderDecision, SharingJob, decide_all
from hetstream.slurm_plugin.coordinator.pacing import Phase, measured_anew

MS = 1_000_000
GIB = 2**30
CAPACITY = 32 * GIB
START_NS = 10**12


@dataclass
class Rank:
    """An opportunistic process: some launches, a collective operation in which it waits for the others, a boundary."""

    gpu: str
    launches: int
    throttle: Throttle = field(default_factory=lambda: Throttle(JobClass.OPPORTUNISTIC))
    record: Statistics = field(
        default_factory=lambda: Statistics(held_bytes=8 * GIB, peak_bytes=8 * GIB, host_capacity_bytes=64 * GIB)
    )
    launched: int = 0
    host_ms: int = 0  # that it is busy on the host before its next launch

    @property
    def is_in_mini_batch(self) -> bool:
        return self.record.boundaries > 0 and not self.record.is_idle

    def tick(self, order: Order | None, now_ns: int, busy_since_ns: int) -> None:
        """A millisecond: one launch, if it is due."""
        self.host_ms -= self.host_ms > 0
        if self.launched == self.launches or self.host_ms:
            return
        wait_ns = self.throttle.wait_ns(
            order, now_ns, work_ns=MS // 2, in_mini_batch=self.is_in_mini_batch, busy_since_ns=busy_since_ns,
            boundaries=self.record.boundaries,
        )  # fmt: skip
        if wait_ns:
            return
        self.launched += 1
        self.throttle.worked(order, now_ns, MS // 2, busy_since_ns)
        self.record = replace(self.record, updated_ns=now_ns, is_idle=0)

    def end(self, order: Order | None, now_ns: int) -> None:
        """The boundary: it keeps to its limit from here on."""
        limit_bytes = order.limit_bytes if order else CAPACITY
        self.launched = 0
        self.record = replace(
            self.record, updated_ns=now_ns, boundaries=self.record.boundaries + 1, boundary_ns=now_ns, is_idle=1,
            mini_batch_ns=max(1, now_ns - self.record.boundary_ns), limit_bytes=limit_bytes,
            held_bytes=min(8 * GIB, limit_bytes),
        )  # fmt: skip


class Node:
    """GPUs, one opportunistic job on all of them, guaranteed processes on some, and the coordinator."""

    def __init__(self, seed: int, num_gpus: int) -> None:
        self.random = random.Random(seed)
        self.gpus = [f"g{number}" for number in range(num_gpus)]
        self.now_ns = START_NS
        self.states = {gpu: GpuState() for gpu in self.gpus}
        self.ranks = {gpu: Rank(gpu, self.random.randint(1, 6)) for gpu in self.gpus}
        self.guaranteed: dict[str, Statistics] = {}
        self.period: dict[str, tuple[int, int]] = {}  # of mini-batches, and the idle part of them, in ms
        self.decisions: dict[str, dict[str, OrderDecision]] = {}

    def seen(self) -> dict[str, Measurements]:
        found = {}
        for gpu in self.gpus:
            jobs = [SharingJob(f"o-{gpu}", JobClass.OPPORTUNISTIC, START_NS, self.ranks[gpu].record, None, "8\n")]
            if gpu in self.guaranteed:
                jobs.append(SharingJob(f"g-{gpu}", JobClass.GUARANTEED, START_NS, self.guaranteed[gpu], None, "7\n"))
            found[gpu] = Measurements(CAPACITY, tuple(jobs))
        return found

    def come(self, *gpus: str) -> None:
        """A guaranteed job, with a process on each of these."""
        for gpu in gpus:
            self.guaranteed[gpu] = Statistics(updated_ns=self.now_ns, host_capacity_bytes=GIB)
            self.period[gpu] = self.random.randint(8, 30), self.random.randint(0, 6)

    def measure_anew(self, gpu: str) -> None:
        state = self.states[gpu]
        self.states[gpu] = replace(state, pacing=measured_anew(state.pacing, "the test says so"))

    def leave(self) -> None:
        self.guaranteed.clear()

    def order(self, gpu: str) -> Order | None:
        return self.decisions[gpu][f"o-{gpu}"].order if self.decisions else None

    def tick(self) -> None:
        self.now_ns += MS
        for gpu, record in self.guaranteed.items():
            period, idle = self.period[gpu]
            place = (self.now_ns - START_NS) // MS % period
            if place == 0:
                self.guaranteed[gpu] = replace(
                    record, updated_ns=self.now_ns, boundaries=record.boundaries + 1, boundary_ns=self.now_ns,
                    mini_batch_ns=period * MS, gap_ns=idle * MS, is_idle=int(idle > 0), peak_bytes=8 * GIB,
                )  # fmt: skip
            elif place == idle:
                self.guaranteed[gpu] = replace(record, updated_ns=self.now_ns, is_idle=0)
        if self.random.random() < 0.2 or not self.decisions:
            self.states, self.decisions = decide_all(self.states, self.seen(), self.now_ns)
        for gpu, rank in self.ranks.items():
            record = self.guaranteed.get(gpu)
            busy_ns = self.now_ns if record and not record.is_idle else 0
            rank.tick(self.order(gpu), self.now_ns, busy_ns)
        if all(rank.launched == rank.launches for rank in self.ranks.values()):  # the collective operation
            for gpu, rank in self.ranks.items():
                rank.end(self.order(gpu), self.now_ns)
                rank.host_ms = self.random.choice((0, 0, 1, 15))

    def run(self, seconds: float) -> None:
        for _ in range(int(seconds * 1000)):
            self.tick()

    def boundaries(self) -> set[int]:
        return {rank.record.boundaries for rank in self.ranks.values()}

    def is_met(self) -> bool:
        """All are at one boundary, and nobody is in a collective operation."""
        return len(self.boundaries()) == 1 and not any(rank.launched for rank in self.ranks.values())


@pytest.mark.shows("a job with several GPUs of a node is placed, paused and upgraded as a whole")
@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(5, 12))])
def test_whoever_comes_the_job_meets_at_a_boundary_and_goes_on_later(seed: int) -> None:
    node = Node(seed, num_gpus=2 + seed % 3)
    node.run(node.random.uniform(0.2, 0.5))
    assert min(node.boundaries()) > 3, "alone, it has all GPUs"
    gpus = node.random.sample(node.gpus, node.random.randint(1, len(node.gpus)))
    node.come(*gpus)
    for _ in range(5):  # when it comes, and whenever it is measured anew
        num_met = 0
        for _ in range(3000):
            node.tick()
            for gpu in gpus:
                if node.states[gpu].pacing.phase is Phase.MEASURING and node.states[gpu].pacing.history.alone[1:]:
                    num_met += 1
                    assert node.is_met(), "it was measured while a process of the other job was in a mini-batch"
        assert num_met > 5
        assert all(node.states[gpu].pacing.phase is Phase.SHARING for gpu in gpus)
        node.measure_anew(node.random.choice(gpus))
    node.run(1.0)
    made = max(node.boundaries())
    node.leave()
    node.run(1.0)
    assert min(node.boundaries()) > made + 20
    assert {node.order(gpu).share for gpu in node.gpus} == {FULL_SHARE}  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(6))
def test_a_job_beside_guaranteed_ones_lives_from_each_gpus_own_gaps(seed: int) -> None:
    """A process need not wait until all GPUs are idle at once: then hardly anything would be left."""
    node = Node(seed, num_gpus=2)
    node.run(0.2)
    for gpu in node.gpus:
        node.come(gpu)
        node.period[gpu] = 16 + 4 * int(gpu[1:]), 6
    node.run(4.0)
    before = max(node.boundaries())
    node.run(8.0)
    # Some 40 % of a launch in each millisecond of a gap, and the slower of two ranks counts.
    assert max(node.boundaries()) - before > 100
    assert not any(decision.is_disobedient for found in node.decisions.values() for decision in found.values())


def test_a_process_that_is_held_up_holds_up_the_others_at_the_boundary_of_the_furthest() -> None:
    node = Node(0, num_gpus=2)
    node.run(0.3)
    first, second = node.ranks.values()
    first.record = replace(first.record, boundaries=7, is_idle=1)
    second.record = replace(second.record, boundaries=7, is_idle=0)  # on its way to the 8th, and waits for the other
    seen = node.seen()
    seen["g0"] = replace(seen["g0"], is_lost=True)
    _, decisions = decide_all(node.states, seen, node.now_ns)
    assert decisions["g0"]["o-g0"].order.verdict == GpuUse.PAUSE
    held = decisions["g1"]["o-g1"]
    assert (held.order.verdict, held.order.meet_at) == (GpuUse.RUN, 8)
    assert held.reason == "it waits at boundary 8 for its process on g0: the GPU does not answer any more: paused"
    throttle = Throttle(JobClass.OPPORTUNISTIC)
    assert throttle.wait_ns(held.order, node.now_ns, in_mini_batch=True, boundaries=7) == 0
    assert throttle.wait_ns(held.order, node.now_ns, in_mini_batch=False, boundaries=7) == 0, "it is behind"
    assert throttle.wait_ns(held.order, node.now_ns, in_mini_batch=False, boundaries=8) > 0


def test_processes_that_were_not_launched_together_do_not_wait_for_each_other() -> None:
    node = Node(0, num_gpus=2)
    node.run(0.3)
    seen = node.seen()
    (job,) = seen["g1"].jobs
    seen["g1"] = replace(seen["g1"], jobs=(replace(job, gang="8\nanother step"),))
    seen["g0"] = replace(seen["g0"], is_lost=True)
    _, decisions = decide_all(node.states, seen, node.now_ns)
    assert decisions["g1"]["o-g1"].order.meet_at == 0


def test_a_guaranteed_job_is_measured_on_all_of_its_gpus_at_once() -> None:
    """Others beside one of its processes would make all of them look slow."""
    node = Node(3, num_gpus=2)
    node.run(0.2)
    node.come("g0", "g1")
    node.period |= {"g0": (10, 4), "g1": (30, 4)}  # the second one takes three times as long to be known
    for _ in range(4000):
        node.tick()
        phases = {node.states[gpu].pacing.phase for gpu in node.gpus if node.guaranteed[gpu].boundaries > 1}
        assert len(phases) < 2
    assert phases == {Phase.SHARING}
    node.measure_anew("g0")
    node.states, _ = decide_all(node.states, node.seen(), node.now_ns)
    assert node.states["g1"].pacing.phase is Phase.MEASURING
    assert node.states["g1"].pacing.reason == "another of its GPUs is measured"


def test_several_processes_of_a_guaranteed_job_on_one_gpu_leave_it_idle_only_together() -> None:
    now_ns = START_NS
    trains = Statistics(
        updated_ns=now_ns, boundaries=5, boundary_ns=now_ns, is_idle=1, peak_bytes=GIB, mini_batch_ns=MS
    )
    helps = replace(trains, boundaries=0, boundary_ns=0, is_idle=0, updated_ns=now_ns - MS, host_bytes=7)
    jobs = [SharingJob(name, JobClass.GUARANTEED, now_ns, record) for name, record in (("h", helps), ("t", trains))]
    whole = Measurements(CAPACITY, tuple(jobs)).guaranteed
    assert whole is not None
    assert whole.statistics is not None
    record = whole.statistics
    assert (whole.name, record.boundaries, record.is_idle) == ("t", 5, 0)
    assert (record.updated_ns, record.peak_bytes, record.host_bytes) == (now_ns - MS, 2 * GIB, 7)
    silent = Measurements(CAPACITY, (jobs[1], replace(jobs[0], statistics=None))).guaranteed
    assert silent is not None
    assert silent.statistics is None
    # All of them are told, and shown.
    _, decisions = decide_all({"g": GpuState()}, {"g": Measurements(CAPACITY, tuple(jobs))}, now_ns)
    assert set(decisions["g"]) == {"h", "t"}
