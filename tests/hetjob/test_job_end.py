"""When trainers are told that their job's time is over, over a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.job.job import JobEnd, lead_s


class Clock:
    """Time passes only by waiting; Slurm's answers come from a list, the last one again and again."""

    def __init__(
        self, *answers: float | Exception | None, persist_s: Callable[[], Iterable[float]] = lambda: ()
    ) -> None:
        self.now_s = 1000.0
        self.answers = list(answers)
        self.told_to_end_s = float("inf")
        self.end = JobEnd("7", self.ask, persist_s, clock=lambda: self.now_s, wait=self.wait)

    def ask(self) -> float | None:
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def wait(self, time_s: float) -> bool:
        assert time_s > 0
        self.now_s += time_s
        return self.now_s >= self.told_to_end_s


@pytest.mark.parametrize(
    ("persist_s", "left_s", "expected_s"), [([], 3600, 60), ([20, 30], 3600, 160), ([], 60, 30), ([5000], 3600, 1800)]
)
def test_the_lead_is_two_rounds_and_a_margin(persist_s: list[float], left_s: float, expected_s: float) -> None:
    assert lead_s(persist_s, left_s) == expected_s


def test_the_warning_comes_when_what_is_in_memory_still_gets_to_disk() -> None:
    clock = Clock(4600, persist_s=lambda: [100])
    clock.end.watch()
    assert clock.now_s == 4600 - 260
    assert clock.end.reason.startswith("job 7 ends at ")


def test_saves_that_become_slower_bring_the_warning_forward() -> None:
    clock = Clock(10_000, persist_s=lambda: [10 if clock.now_s < 5000 else 1000])
    clock.end.watch()
    assert clock.now_s == pytest.approx(10_000 - 2060, abs=30)


def test_a_longer_time_limit_is_noticed() -> None:
    clock = Clock(4600, 8200)
    clock.end.watch()
    assert clock.now_s == 8200 - 60


@pytest.mark.parametrize("answers", [(None,), (4600, None)])
def test_a_job_without_an_end_is_not_warned(answers: tuple[float | None, ...]) -> None:
    clock = Clock(*answers)
    clock.end.watch()
    assert clock.end.reason == ""


def test_a_slurm_that_does_not_answer_is_asked_again() -> None:
    clock = Clock(SlurmCommandError(["squeue"], 1, "", "down"), SlurmCommandError(["squeue"], 1, "", "down"), 4600)
    clock.end.watch()
    assert clock.now_s == 4600 - 60


@pytest.mark.parametrize("answer", [4600, SlurmCommandError(["squeue"], 1, "", "down")])
def test_it_ends_when_it_is_told_to(answer: float | Exception) -> None:
    clock = Clock(answer)
    clock.told_to_end_s = 1100
    clock.end.watch()
    assert clock.end.reason == ""
    assert clock.now_s < 1200
