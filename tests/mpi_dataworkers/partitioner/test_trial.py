"""A cut is measured in turn with and without it, by the trainer's own time; one that does not pay is taken back."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hetstream.mpi_dataworkers.partitioner.cut import CutAssessment, CutTrial, judged


def tried(step_s: Callable[[int, bool], float]) -> tuple[CutAssessment, list[bool]]:
    """The verdict on steps of these lengths, by number and by whether it is one with the cut; and what was used when.

    Each step waits a second for data beside.
    """
    trial, now, waited, used = CutTrial(), 0.0, 0.0, []
    for number in range(1000):
        trial.next_step(now, waited)
        if trial.verdict is not None:
            return trial.verdict, used
        used.append(trial.uses_cut)
        now += step_s(number, trial.uses_cut) + 1.0
        waited += 1.0
    raise AssertionError("it has no end")


def test_both_are_measured_without_the_wait_for_data() -> None:
    verdict, used = tried(lambda _, cut: 0.004 if cut else 0.006)
    assert verdict.pays
    assert (verdict.with_cut_s, verdict.without_s) == pytest.approx((0.004, 0.006))
    assert verdict.reason == "with the cut a step takes 4.00 ms, without 6.00 ms"
    changes = [number for number in range(1, len(used)) if used[number] != used[number - 1]]
    assert len(changes) == 2, "with, without, with: each change has data workers make batches anew"
    assert len(used) == 41


def test_a_cut_that_costs_the_trainer_more_than_it_takes_from_it_does_not_pay() -> None:
    """What it takes to receive and hand over is in the steps with it, and in none of the others."""
    received_s, handed_over_s, guards_s, saved_s = 0.0002, 0.0001, 0.0001, 0.0003
    verdict, _ = tried(lambda _, cut: 0.0036 + cut * (received_s + handed_over_s + guards_s - saved_s))
    assert not verdict.pays
    assert verdict.is_clear
    assert verdict.reason == "with the cut a step takes 3.70 ms, without 3.60 ms"


def test_a_gain_below_two_per_cent_does_not_pay() -> None:
    assert not tried(lambda _, cut: 0.0985 if cut else 0.1)[0].pays
    assert tried(lambda _, cut: 0.0975 if cut else 0.1)[0].pays


def test_a_machine_that_becomes_slower_does_not_decide() -> None:
    """It makes both slower."""
    assert tried(lambda number, cut: (0.004 if cut else 0.005) * (1 + 0.004 * number))[0].pays
    assert not tried(lambda number, _: 0.004 * (1 + 0.004 * number))[0].pays


def test_the_first_steps_of_a_block_pay_for_the_change() -> None:
    since = 0
    before = True

    def step_s(_: int, cut: bool) -> float:
        nonlocal since, before
        since, before = (since + 1 if cut == before else 0), cut
        return 0.9 if since < 3 else 0.004 if cut else 0.006

    verdict, _ = tried(step_s)
    assert (verdict.with_cut_s, verdict.without_s) == pytest.approx((0.004, 0.006))


def test_one_round_in_which_something_else_ran_is_followed_by_another_one() -> None:
    """A neighbour that has the machine during the first block with the cut."""
    verdict, used = tried(lambda number, cut: (0.004 if cut else 0.006) + 0.004 * (number < 13))
    assert len(used) == 69, "five blocks"
    assert verdict.pays
    assert verdict.without_s - verdict.with_cut_s == pytest.approx(0.002)


def test_what_is_not_clear_is_no_gain() -> None:
    verdict = judged([0.0035, 0.0042, 0.0037], [0.0036, 0.0042])
    assert not verdict.pays
    assert not verdict.is_clear
    assert verdict.reason == (
        "with the cut a step takes 3.70 ms, without 3.90 ms, and steps of the same kind differ by 0.30 ms"
    )
