"""Orders are a function of state, measurements and time."""

from __future__ import annotations

import itertools
import random
import statistics
from dataclasses import replace

import pytest

from hetstream.hetjob.gpu.orders import FULL_SHARE, GpuUse, JobClass, Order, Statistics
from hetstream.slurm_plugin.coordinator.decide import (
    VALID_NS,
    GpuState,
    Measurements,
    OrderDecision,
    SharingJob,
    decide,
)
from hetstream.slurm_plugin.coordinator.pacing import Phase

MS = 1_000_000
GIB = 2**30
CAPACITY = 32 * GIB
HOST = 64 * GIB


class Gpu:
    """A GPU, the records of its jobs, and the coordinator's state, at a clock that the test moves."""

    def __init__(self) -> None:
        self.now_ns = 1_000_000 * MS
        self.capacity_bytes = CAPACITY
        self.state = GpuState()
        self.jobs: dict[str, SharingJob] = {}
        self.is_reserved = self.is_lost = self.is_awaited = False

    def join(self, name: str, job_class: JobClass, **record: int) -> None:
        statistics = Statistics(updated_ns=self.now_ns, host_capacity_bytes=HOST, **record)
        self.jobs[name] = SharingJob(name, job_class, self.now_ns, statistics)

    def update(self, name: str, **record: int) -> None:
        job = self.jobs[name]
        assert job.statistics is not None
        self.jobs[name] = replace(job, statistics=replace(job.statistics, updated_ns=self.now_ns, **record))

    def decide(self, advance_ms: float = 0) -> dict[str, OrderDecision]:
        self.now_ns += int(advance_ms * MS)
        self.state, decisions = decide(self.state, self.measurements(), self.now_ns)
        return decisions

    def measurements(self) -> Measurements:
        jobs = tuple(self.jobs.values())
        return Measurements(self.capacity_bytes, jobs, self.is_reserved, self.is_lost, self.is_awaited)

    def batch(self, name: str, ms: float, *, gap_ms: float = 0, **record: int) -> dict[str, OrderDecision]:
        """One mini-batch of a job, from boundary to boundary; the job is busy again when it returns."""
        self.now_ns += int(ms * MS)
        statistics = self.jobs[name].statistics
        assert statistics is not None
        made = statistics.boundaries + 1
        times = {"boundary_ns": self.now_ns, "mini_batch_ns": int(ms * MS), "gap_ns": int(gap_ms * MS)}
        self.update(name, boundaries=made, is_idle=0, **times, **record)
        return self.decide()

    def settle(self, name: str, ms: float, *, gap_ms: float = 0, **record: int) -> None:
        """Mini-batches of a guaranteed job until its pace is known."""
        for _ in range(12):
            self.batch(name, ms, gap_ms=gap_ms, **record)


@pytest.fixture
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture
def shared(gpu: Gpu) -> Gpu:
    """A guaranteed job `g` with mini-batches of 100 ms, 40 of them idle, and an opportunistic `o` that came later."""
    gpu.join("g", JobClass.GUARANTEED)
    gpu.settle("g", 100, gap_ms=40, peak_bytes=10 * GIB)
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, peak_bytes=4 * GIB)
    gpu.decide()
    return gpu


def test_a_job_that_is_alone_has_the_whole_gpu(gpu: Gpu) -> None:
    gpu.join("o", JobClass.OPPORTUNISTIC)
    order = gpu.decide()["o"].order
    assert order == Order(gpu.now_ns + VALID_NS, GpuUse.RUN, CAPACITY, FULL_SHARE)


def test_a_guaranteed_job_has_no_limit_and_never_waits(shared: Gpu) -> None:
    order = shared.decide()["g"].order
    assert order == Order(shared.now_ns + VALID_NS, GpuUse.RUN, share=FULL_SHARE)


def test_when_a_guaranteed_job_comes_others_give_memory_back_and_pause(gpu: Gpu) -> None:
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, peak_bytes=20 * GIB, held_bytes=20 * GIB)
    gpu.decide()
    gpu.join("g", JobClass.GUARANTEED)
    assert gpu.decide()["o"].order.limit_bytes == 0
    assert gpu.decide(1)["o"].order.verdict == GpuUse.FINISH  # on to its boundary, where memory is given back
    gpu.update("o", held_bytes=0)
    gpu.decide(1)
    assert gpu.decide(1)["o"].order.verdict == GpuUse.PAUSE
    gpu.settle("g", 100, gap_ms=40, peak_bytes=10 * GIB)
    decision = gpu.decide()["o"]
    assert decision.order.verdict == GpuUse.RUN
    assert decision.order.share == 0
    assert "alone a mini-batch takes 100.0 ms" in decision.reason


def test_who_does_not_come_to_a_boundary_is_stopped_where_he_is_and_reported_later(gpu: Gpu) -> None:
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, peak_bytes=20 * GIB, held_bytes=20 * GIB)
    gpu.join("g", JobClass.GUARANTEED)
    gpu.decide()
    assert gpu.decide(1999)["o"].order.verdict == GpuUse.FINISH
    late = gpu.decide(2)["o"]
    assert late.order.verdict == GpuUse.PAUSE
    assert not late.is_disobedient
    reported = gpu.decide(9000)["o"]
    assert reported.is_disobedient
    assert "it holds 21,474,836,480 bytes and may hold 0" in reported.reason


def test_a_job_that_can_give_nothing_more_back_neither_holds_up_the_measurement_nor_is_reported(gpu: Gpu) -> None:
    """Its parameters alone are more than the guaranteed job leaves."""
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, peak_bytes=20 * GIB, held_bytes=20 * GIB)
    gpu.decide()
    gpu.join("g", JobClass.GUARANTEED)
    gpu.decide()
    gpu.update("o", boundaries=6, is_idle=1, held_bytes=5 * GIB, limit_bytes=0)
    assert gpu.decide(1)["o"].order.verdict == GpuUse.PAUSE
    gpu.settle("g", 100, gap_ms=40, peak_bytes=29 * GIB)
    gpu.update("o", limit_bytes=gpu.decide()["o"].order.limit_bytes)
    decision = gpu.decide(11_000)["o"]
    assert gpu.state.pacing.phase is Phase.SHARING
    assert not decision.is_disobedient
    gpu.batch("g", 100, gap_ms=40, peak_bytes=29 * GIB, host_bytes=GIB)
    gpu.update("o", limit_bytes=0)
    assert gpu.decide()["o"].is_disobedient  # the guaranteed job goes without for its sake


def test_who_pauses_with_his_weights_is_not_reported_while_the_guaranteed_job_comes(gpu: Gpu) -> None:
    """It imports and builds its model for minutes before its first launch: it has no agent, and needs nothing yet."""
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, peak_bytes=20 * GIB, held_bytes=25_600)
    gpu.decide()
    gpu.jobs["g"] = SharingJob("g", JobClass.GUARANTEED, gpu.now_ns, None)
    assert gpu.decide()["o"].order.limit_bytes == 0
    gpu.update("o", boundaries=6, is_idle=1, limit_bytes=0)
    for _ in range(250):
        decision = gpu.decide(1000)["o"]
        assert decision.order.verdict == GpuUse.PAUSE
        assert not decision.is_disobedient
    gpu.update("o", is_idle=0)  # who does not keep to his orders is
    gpu.batch("o", 10)
    assert gpu.batch("o", 10)["o"].is_disobedient


def test_a_job_whose_parameters_keep_the_guaranteed_one_short_is_reported_as_soon_as_that_is_known(gpu: Gpu) -> None:
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, peak_bytes=20 * GIB, held_bytes=20 * GIB)
    gpu.decide()
    gpu.join("g", JobClass.GUARANTEED)
    gpu.decide()
    gpu.update("o", boundaries=6, is_idle=1, held_bytes=5 * GIB, limit_bytes=0)
    for _ in range(3):
        assert not gpu.batch("g", 600, gap_ms=40, peak_bytes=29 * GIB, host_bytes=GIB)["o"].is_disobedient
    gpu.update("o", limit_bytes=0)
    decision = gpu.batch("g", 600, gap_ms=40, peak_bytes=29 * GIB, host_bytes=GIB)["o"]
    assert decision.is_disobedient
    assert "it holds 5,368,709,120 bytes and may hold" in decision.reason


def test_a_job_that_claims_to_hold_much_holds_up_the_measurement_for_a_moment_only(gpu: Gpu) -> None:
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, held_bytes=20 * GIB)
    gpu.join("g", JobClass.GUARANTEED)
    for _ in range(40):
        gpu.update("o", held_bytes=20 * GIB)
        gpu.batch("g", 100, gap_ms=40, peak_bytes=10 * GIB)
    assert gpu.state.pacing.phase is Phase.SHARING


def test_a_job_that_claims_that_again_and_again_holds_it_up_no_longer(gpu: Gpu) -> None:
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, held_bytes=20 * GIB)
    gpu.join("g", JobClass.GUARANTEED)
    free = []
    for number in range(60):
        gpu.update("o", held_bytes=20 * GIB * (number % 2))
        free.append(gpu.batch("g", 100, gap_ms=40, peak_bytes=10 * GIB)["o"].order.verdict == GpuUse.FINISH)
        if gpu.state.pacing.phase is Phase.SHARING:
            break
    assert gpu.state.pacing.phase is Phase.SHARING
    assert sum(free) <= 20, "100 ms each"


@pytest.mark.shows("opportunistic jobs get gaps of the guaranteed one and a share of its time")
def test_gaps_are_used_up_to_a_part_that_grows_while_the_guaranteed_job_does_not_feel_it(shared: Gpu) -> None:
    opened_ns = []
    for boundaries in range(1, 10):
        shared.update("g", boundary_ns=shared.now_ns, boundaries=boundaries, is_idle=1)
        began_ns = shared.now_ns
        opened_ns.append(max(0, shared.decide()["o"].order.open_until_ns - began_ns))
        shared.update("g", is_idle=0)
        assert shared.decide(20)["o"].order.open_until_ns == 0
    assert opened_ns.count(0) == 5
    for _ in range(100):
        shared.batch("g", 100, gap_ms=40, peak_bytes=10 * GIB)
    assert shared.state.pacing.gap_use == FULL_SHARE
    shared.update("g", boundary_ns=shared.now_ns, is_idle=1)
    assert shared.decide(39)["o"].order.open_until_ns == shared.now_ns + 30 * MS  # to its end, whenever that is


def share_gaps(gpu: Gpu, batches: int, ms: float, cost_ms: float = 0.0) -> None:
    """Mini-batches of the guaranteed job, which take longer where another job may launch."""
    for _ in range(batches):
        pacing = gpu.state.pacing
        is_beside = not pacing.is_left_alone(pacing.history.seen)
        gpu.batch("g", ms + cost_ms * is_beside, gap_ms=40, peak_bytes=10 * GIB)


def test_a_guaranteed_job_that_others_make_slower_gets_its_time_back(shared: Gpu) -> None:
    share_gaps(shared, 200, 100)
    assert shared.state.pacing.share > 0
    reasons = []
    for _ in range(200):
        share_gaps(shared, 1, 100, cost_ms=4)
        reasons.append(shared.state.pacing.reason)
    order = [next(i for i, reason in enumerate(reasons) if what in reason) for what in ("busy time", "shorter gaps")]
    assert order == sorted(order)
    assert shared.state.pacing.share == 0
    assert shared.state.pacing.gap_use < FULL_SHARE


def test_a_job_that_becomes_slower_by_itself_keeps_nobody_from_its_gaps(shared: Gpu) -> None:
    """Sequences have become longer, or the machine hotter: the mini-batches without others say so."""
    share_gaps(shared, 200, 100)
    share_gaps(shared, 300, 150)
    assert shared.state.pacing.phase is Phase.SHARING
    assert shared.state.pacing.gap_use == FULL_SHARE
    assert shared.state.pacing.alone is not None
    assert shared.state.pacing.alone.mean_ns == pytest.approx(150 * MS, rel=0.05)


def test_a_pace_that_was_measured_in_a_lucky_moment_does_not_keep_gaps_closed(shared: Gpu) -> None:
    """The first mini-batches were faster than all later ones."""
    share_gaps(shared, 10, 90)
    for number in range(400):
        share_gaps(shared, 1, 100 if number % 2 else 106)
    assert shared.state.pacing.gap_use == FULL_SHARE
    assert shared.state.pacing.alone is not None
    assert shared.state.pacing.alone.mean_ns == pytest.approx(103 * MS, rel=0.01)


def test_a_job_that_becomes_a_little_faster_by_itself_does_not_hide_what_others_cost(shared: Gpu) -> None:
    """Its mini-batches alone are older than those beside others, and noise hides when it became faster."""
    source = random.Random(0)
    slowdowns = []
    for number in range(900):
        ms = source.gauss(100 if number < 300 else 90, 4)
        cost_ms = ms * shared.state.pacing.share / FULL_SHARE
        pacing = shared.state.pacing
        slowdowns.append(0.0 if pacing.is_left_alone(pacing.history.seen) else cost_ms / ms)
        share_gaps(shared, 1, ms, cost_ms)
    assert statistics.fmean(slowdowns[300:]) <= 0.03


def test_a_stop_of_minutes_says_nothing_about_mini_batches(shared: Gpu) -> None:
    """A checkpoint, or an evaluation, whether in a mini-batch beside others or in one without."""
    share_gaps(shared, 200, 100)
    before = shared.state.pacing
    for _ in range(10):
        share_gaps(shared, 1, 120_000)
        share_gaps(shared, 60, 100)
    assert shared.state.pacing.gap_use == before.gap_use
    assert shared.state.pacing.alone is not None
    assert shared.state.pacing.alone.mean_ns == pytest.approx(100 * MS, rel=0.03)


@pytest.mark.shows("an opportunistic job keeps to its memory limit, at its boundary, and shrinks and grows")
def test_memory_is_what_the_guaranteed_job_leaves_and_a_surge_is_answered_at_once(shared: Gpu) -> None:
    for _ in range(30):
        shared.decide(100)
    wanted = shared.decide()["o"].order.limit_bytes
    assert wanted == 4 * GIB + int(0.05 * CAPACITY)  # all that it asks for
    shared.batch("g", 100, gap_ms=40, peak_bytes=29 * GIB, host_bytes=GIB)
    left = CAPACITY - 29 * GIB - int(0.05 * CAPACITY)
    assert shared.decide()["o"].order.limit_bytes == left < wanted


def test_limits_rise_in_steps(shared: Gpu) -> None:
    limits = [shared.decide(100)["o"].order.limit_bytes for _ in range(4)]
    assert limits == sorted(limits)
    assert max(b - a for a, b in itertools.pairwise(limits)) <= 0.1 * CAPACITY


@pytest.mark.parametrize(
    "record",
    [
        {"mini_batch_ns": -1},
        {"boundary_ns": 2**62},
        {"is_idle": 7},
    ],
)
def test_a_guaranteed_job_whose_statistics_cannot_be_lets_nobody_on(shared: Gpu, record: dict[str, int]) -> None:
    shared.update("g", **record)
    decision = shared.decide()["o"]
    assert decision.order.verdict == GpuUse.PAUSE
    assert "says nothing that can be" in decision.reason


@pytest.mark.shows("forged statistics and pages harm nobody")
def test_statistics_that_have_become_old_pause_the_others_but_idleness_does_not(shared: Gpu) -> None:
    shared.update("g", is_idle=0)
    assert shared.decide(400)["o"].order.verdict == GpuUse.RUN
    stale = shared.decide(200)["o"]
    assert stale.order.verdict == GpuUse.PAUSE
    assert "at one mini-batch for long" in stale.reason
    shared.update("g", boundary_ns=shared.now_ns, is_idle=1)
    assert shared.decide(5000)["o"].order.open_until_ns > shared.now_ns  # it decodes on CPUs, say


def test_a_guaranteed_job_without_an_agent_lets_nobody_on(gpu: Gpu) -> None:
    gpu.join("o", JobClass.OPPORTUNISTIC)
    gpu.is_reserved = True
    decision = gpu.decide()["o"]
    assert decision.order.verdict == GpuUse.PAUSE
    assert decision.order.limit_bytes == 0
    assert "without an agent" in decision.reason


def test_beside_a_job_that_was_there_before_the_coordinator_others_wait_and_are_not_reported(gpu: Gpu) -> None:
    """However long its mini-batches are. They are stopped where they were, and may hold what they might before."""
    gpu.is_reserved = gpu.is_awaited = True
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=50, peak_bytes=4 * GIB, held_bytes=4 * GIB, limit_bytes=5 * GIB)
    for _ in range(60):
        decision = gpu.decide(1000)["o"]
        assert (decision.order.verdict, decision.order.limit_bytes) == (GpuUse.PAUSE, 5 * GIB)
        assert not decision.is_disobedient
    assert "from before this coordinator has not come to it yet" in decision.reason
    gpu.is_awaited = False
    gpu.join("g", JobClass.GUARANTEED, boundaries=100, peak_bytes=10 * GIB)
    assert gpu.decide(20)["o"].order.verdict == GpuUse.PAUSE, "it is measured"
    for _ in range(5):
        decision = gpu.batch("g", 15_000, gap_ms=40, peak_bytes=10 * GIB)["o"]
        assert not decision.is_disobedient
    assert decision.order.verdict == GpuUse.RUN
    assert decision.order.limit_bytes >= 5 * GIB


@pytest.mark.shows("a job that lies about its memory gains nothing by it")
def test_a_job_that_lies_about_its_memory_is_frozen(shared: Gpu) -> None:
    shared.jobs["o"] = replace(shared.jobs["o"], measured_bytes=20 * GIB)
    assert shared.decide()["o"].order.verdict == GpuUse.RUN  # it may have grown since it said how much
    shared.batch("g", 100, gap_ms=40, peak_bytes=10 * GIB)
    decision = shared.decide(1001)["o"]
    assert decision.order.verdict == GpuUse.PAUSE
    assert "the GPU counts 21,474,836,480" in decision.reason


@pytest.mark.parametrize("capacity_gib", [8, 24, 141])
def test_an_honest_jobs_context_is_no_lie_and_no_disobedience(gpu: Gpu, capacity_gib: int) -> None:
    """The driver counts what a process's context and libraries have, and its allocator does not."""
    gpu.capacity_bytes = capacity_gib * GIB
    limit_bytes, context_bytes = capacity_gib * GIB // 4, 600 * 2**20
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, peak_bytes=limit_bytes, held_bytes=limit_bytes)
    gpu.join("g", JobClass.GUARANTEED, boundaries=5, peak_bytes=capacity_gib * GIB // 2)
    gpu.settle("g", 100, gap_ms=40, peak_bytes=capacity_gib * GIB // 2)
    for _ in range(120):  # its cache is as large as it may be, and it is in mini-batches nearly all the time
        limit_bytes = gpu.decide()["o"].order.limit_bytes
        gpu.update("o", held_bytes=limit_bytes, limit_bytes=limit_bytes, is_idle=0)
        gpu.jobs["o"] = replace(gpu.jobs["o"], measured_bytes=limit_bytes + context_bytes)
        decision = gpu.batch("g", 100, gap_ms=40, peak_bytes=capacity_gib * GIB // 2)["o"]
        assert not decision.is_disobedient, decision.reason
    assert decision.order.verdict == GpuUse.RUN, decision.reason
    gpu.jobs["o"] = replace(gpu.jobs["o"], measured_bytes=limit_bytes + 2 * context_bytes + capacity_gib * GIB // 8)
    gpu.decide()
    assert gpu.decide(1001)["o"].order.verdict == GpuUse.PAUSE, "that is a lie"


def test_on_a_gpu_that_has_vanished_nobody_goes_on_but_the_guaranteed_job(shared: Gpu) -> None:
    shared.is_lost = True
    decisions = shared.decide()
    assert decisions["o"].order.verdict == GpuUse.PAUSE
    assert "does not answer any more" in decisions["o"].reason
    assert decisions["g"].order.verdict == GpuUse.RUN


def test_a_job_that_goes_on_while_it_should_pause_is_reported(gpu: Gpu) -> None:
    gpu.join("o", JobClass.OPPORTUNISTIC)
    gpu.is_reserved = True
    gpu.decide()
    for _ in range(30):  # made before the order was written, by a coordinator that had to wait for a core
        gpu.update("o", boundaries=gpu.jobs["o"].statistics.boundaries + 1)  # type: ignore[union-attr]
    assert not gpu.decide(50)["o"].is_disobedient
    assert not gpu.batch("o", 10)["o"].is_disobedient  # that was on its way
    assert gpu.batch("o", 10)["o"].is_disobedient


def test_a_job_that_a_new_coordinator_has_to_pause_is_not_reported_for_what_it_made_before(gpu: Gpu) -> None:
    gpu.is_reserved = True
    gpu.jobs["o"] = SharingJob("o", JobClass.OPPORTUNISTIC, gpu.now_ns)  # connected, and its page is empty
    gpu.decide()
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=1000, is_idle=1)
    assert not any(gpu.decide(20)["o"].is_disobedient for _ in range(100))
    gpu.batch("o", 10)
    assert gpu.batch("o", 10)["o"].is_disobedient
    statistics = gpu.jobs["o"].statistics
    gpu.update("o", held_bytes=-1)  # to say nothing that can be does not make it good
    gpu.decide()
    gpu.jobs["o"] = replace(gpu.jobs["o"], statistics=statistics)
    assert gpu.decide()["o"].is_disobedient


def test_the_pace_alone_is_followed_while_nobody_else_is_there(gpu: Gpu) -> None:
    """Its first mini-batches were slow, as they often are: that would hide what somebody costs who comes later."""
    gpu.join("g", JobClass.GUARANTEED)
    gpu.settle("g", 300, gap_ms=40)
    gpu.settle("g", 100, gap_ms=40)
    alone = gpu.state.pacing.alone
    assert alone is not None
    assert alone.mean_ns == pytest.approx(100 * MS, rel=0.01)
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5)
    share_gaps(gpu, 40, 100, 10)
    assert "less of its gaps" in gpu.state.pacing.reason
    while gpu.state.pacing.is_left_alone(gpu.state.pacing.history.seen):
        share_gaps(gpu, 1, 100)
    gpu.jobs.pop("o")  # a mini-batch in which it was there in part is none alone
    gpu.batch("g", 110, gap_ms=40)
    gpu.batch("g", 101, gap_ms=40)
    assert [batch.duration_ns // MS for batch in gpu.state.pacing.history.alone[-2:]] == [100, 101]


def test_what_cannot_stand_on_the_host_waits_until_it_fits(shared: Gpu) -> None:
    shared.update("o", host_capacity_bytes=0)
    assert "nothing can stand in" in shared.decide()["o"].reason
    for _ in range(5):
        shared.batch("g", 100, gap_ms=40, peak_bytes=10 * GIB)
    assert shared.decide()["o"].order.verdict == GpuUse.RUN


def test_jobs_that_are_alone_divide_memory_by_what_makes_them_fastest_together(gpu: Gpu) -> None:
    """`tough` hardly notices, `frail` needs 24 GiB: a model of Figure 10."""
    gpu.join("frail", JobClass.OPPORTUNISTIC, boundaries=1, peak_bytes=24 * GIB)
    gpu.join("tough", JobClass.OPPORTUNISTIC, boundaries=1, peak_bytes=24 * GIB)
    for _ in range(200):
        for name in ("frail", "tough"):
            missing = max(0, 24 - gpu.decide()[name].order.limit_bytes / GIB) / 24
            gpu.batch(name, 100 * (1 + missing * (6 if name == "frail" else 0.25)), peak_bytes=24 * GIB)
    limits = {name: decision.order.limit_bytes for name, decision in gpu.decide().items()}
    assert limits["frail"] > 22 * GIB
    assert sum(limits.values()) <= CAPACITY
