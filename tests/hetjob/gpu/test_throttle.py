"""When launches are due."""

from __future__ import annotations

import pytest

from hetstream.hetjob.gpu.agent import LOOK_AGAIN_NS, Throttle
from hetstream.hetjob.gpu.orders import FULL_SHARE, GpuUse, JobClass, Order

MS = 1_000_000
NOW = 1000 * MS
VALID = NOW + 1000 * MS


@pytest.fixture
def throttle() -> Throttle:
    return Throttle(JobClass.OPPORTUNISTIC)


@pytest.mark.parametrize(
    "order",
    [
        None,
        Order(NOW, GpuUse.RUN, share=FULL_SHARE),
        Order(VALID, GpuUse.PAUSE, share=FULL_SHARE, open_until_ns=VALID),
        Order(VALID, GpuUse.RUN, share=0),
    ],
    ids=["none", "lapsed", "pause", "no share"],
)
def test_without_an_order_to_run_nothing_is_launched_but_by_guaranteed_jobs(
    throttle: Throttle, order: Order | None
) -> None:
    assert throttle.wait_ns(order, NOW) == LOOK_AGAIN_NS
    assert Throttle(JobClass.GUARANTEED).wait_ns(order, NOW) == 0


def test_a_job_that_is_to_finish_goes_on_to_its_boundary_and_no_further(throttle: Throttle) -> None:
    order = Order(VALID, GpuUse.FINISH)
    assert throttle.wait_ns(order, NOW, in_mini_batch=True) == 0
    assert throttle.wait_ns(order, NOW, in_mini_batch=False) == LOOK_AGAIN_NS


def test_a_launch_has_to_end_while_the_gpu_is_idle(throttle: Throttle) -> None:
    order = Order(VALID, GpuUse.RUN, open_until_ns=NOW + 2 * MS)
    assert throttle.wait_ns(order, NOW, work_ns=2 * MS) == 0
    assert 0 < throttle.wait_ns(order, NOW, work_ns=3 * MS) < LOOK_AGAIN_NS  # the gap may be longer by then


@pytest.mark.shows("opportunistic jobs get gaps of the guaranteed one and a share of its time")
def test_a_gap_ends_when_the_guaranteed_job_says_that_it_is_busy(throttle: Throttle) -> None:
    order = Order(VALID, GpuUse.RUN, open_until_ns=NOW + 9 * MS, idle_since_ns=NOW - MS)
    assert throttle.wait_ns(order, NOW, busy_since_ns=NOW - 2 * MS) == 0  # it was, before this gap
    assert throttle.wait_ns(order, NOW, busy_since_ns=NOW) == LOOK_AGAIN_NS
    full = Order(VALID, GpuUse.RUN, share=FULL_SHARE)
    assert throttle.wait_ns(full, NOW, busy_since_ns=2**62) == 0, "what it says ends gaps and nothing else"


@pytest.mark.parametrize("share", [10, 250, 900])
def test_a_share_is_a_share_of_the_time(throttle: Throttle, share: int) -> None:
    order = Order(10**18, GpuUse.RUN, share=share)
    now_ns, worked_ns = NOW, 0
    while now_ns < NOW + 10_000 * MS:
        wait_ns = throttle.wait_ns(order, now_ns)
        now_ns += wait_ns
        if wait_ns == 0:
            now_ns += MS
            worked_ns += MS
            throttle.worked(order, now_ns, MS)
    assert worked_ns / (10_000 * MS) == pytest.approx(share / FULL_SHARE, rel=0.02)


def test_work_in_an_idle_gap_costs_nothing_later(throttle: Throttle) -> None:
    order = Order(VALID, GpuUse.RUN, share=10, open_until_ns=NOW + 5 * MS)
    throttle.worked(order, NOW + MS, MS)
    assert throttle.wait_ns(order, NOW + 6 * MS) == 0
