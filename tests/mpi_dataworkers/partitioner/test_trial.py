"""What a cut gains is measured in turn with and without it."""

from __future__ import annotations

import pytest

from hetstream.mpi_dataworkers.partitioner.trial import Trial


def times_of(with_cut_s: float, without_s: float, slower: float = 0.0) -> tuple[float, float]:
    """Steps of these lengths, on a machine that each of them makes slower; each waits a second for data beside."""
    trial, now, waited = Trial(), 0.0, 0.0
    for number in range(1000):
        trial.next_step(now, waited)
        if trial.is_done:
            break
        now += (with_cut_s if trial.uses_cut else without_s) * (1 + slower * number) + 1.0
        waited += 1.0
    assert trial.is_done
    assert trial.uses_cut
    assert number == 40
    return trial.step_s


def test_both_are_measured_without_the_wait_for_data() -> None:
    assert times_of(0.004, 0.006) == pytest.approx((0.004, 0.006))


def test_a_machine_that_becomes_slower_does_not_decide() -> None:
    with_cut_s, without_s = times_of(0.004, 0.005, slower=0.02)
    assert with_cut_s < without_s
