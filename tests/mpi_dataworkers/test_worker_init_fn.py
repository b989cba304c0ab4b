"""Whether a `worker_init_fn` may divide a stream: only one that never names its number certainly does not."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetstream.mpi_dataworkers.ops.streams import may_use_its_number


def seeds_without(worker_id: int) -> None:
    random.seed(torch.initial_seed())


def has_a_default(_: Any = None) -> None:
    random.seed(1)


def seeds_with(worker_id: int) -> None:
    random.seed(7 + worker_id)


def names_two(worker_id: int) -> tuple[int, int]:
    other = 3
    return other, worker_id


def closes_over(worker_id: int) -> Callable[[], int]:
    return lambda: worker_id


def sees_all(worker_id: int) -> None:
    random.seed(locals()["worker_id"])


def takes_any(*numbers: int) -> None:
    random.seed(numbers[0])


class Callable_:
    def __call__(self, worker_id: int) -> None:
        random.seed(1)


@pytest.mark.parametrize("function", [seeds_without, has_a_default, lambda _: None], ids=lambda one: one.__name__)
def test_a_function_that_never_names_its_number_divides_nothing(function: Any) -> None:
    assert not may_use_its_number(function)


@pytest.mark.parametrize(
    "function",
    [
        seeds_with,
        names_two,
        closes_over,
        sees_all,
        takes_any,
        functools.partial(seeds_without),
        Callable_(),
        functools.wraps(seeds_without)(takes_any),
    ],
    ids=["seeds with", "names two", "closes over", "sees all", "takes any", "partial", "an object", "wraps another"],
)
def test_of_all_others_nobody_knows(function: Any) -> None:
    assert may_use_its_number(function)
