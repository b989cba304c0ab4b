"""When a job has read each sample once, by what its loaders say. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from hetstream.hetjob.elastic.memory import FirstPass
from hetstream.mpi_dataworkers.wire.messages import LoaderStats, LoaderStatus


def loader(steps: int, num_steps: int = 100, rank: int = 0, ordinal: int = 0, in_session: bool = True) -> LoaderStatus:
    epoch, step = divmod(steps, max(1, num_steps)) if in_session else (-1, 0)
    return LoaderStatus(
        "j", ordinal, rank, 2, "gpu0", 1, epoch, step, num_steps, 0, 8, 2, 4.0, 2e6, 0.2, LoaderStats(steps=steps)
    )  # fmt: skip


def told(*moments: tuple[float, Sequence[LoaderStatus]]) -> list[float | None]:
    counted = FirstPass()
    return [counted.left_s(loaders, now) for now, loaders in moments]


def test_what_is_left_of_the_first_epoch_goes_by_the_speed_of_all_ranks() -> None:
    both = [(float(second), [loader(second), loader(second, rank=1)]) for second in range(0, 120, 20)]
    assert told(*both) == [None, 80.0, 60.0, 40.0, 20.0, 0.0]
    assert told((0.0, []), (10.0, [loader(0)]), (60.0, [loader(50)])) == [None, None, 50.0]


def test_who_begins_within_an_epoch_has_read_all_when_the_next_one_is_over() -> None:
    assert told((0.0, [loader(60)]), (20.0, [loader(80)]), (60.0, [loader(120)])) == [None, 120.0, 80.0]
    assert told((0.0, [loader(60)]), (150.0, [loader(200)])) == [None, 0.0]


def test_between_epochs_and_with_a_loader_for_each_epoch_counting_goes_on() -> None:
    pause = (70.0, [loader(50, in_session=False)])
    assert told((0.0, [loader(0)]), (50.0, [loader(50)]), pause, (120.0, [loader(100)])) == [None, 50.0, 70.0, 0.0]
    anew = told((0.0, [loader(0)]), (50.0, [loader(50)]), (60.0, []), (110.0, [loader(50, ordinal=1)]))
    assert anew == [None, 50.0, 60.0, 0.0]


@pytest.mark.parametrize("num_steps", [-1, 0])
def test_without_the_length_of_an_epoch_nothing_is_known(num_steps: int) -> None:
    assert told((0.0, [loader(0, num_steps)]), (9.0, [loader(9, num_steps)])) == [None, None]
