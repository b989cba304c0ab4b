"""Looking into what a dataset holds runs nobody's code."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from hetstream.mpi_dataworkers.ops.pipeline import reachable


class Guarded:
    """Reading a sample is the program's business."""

    def __getitem__(self, key: Any) -> NoReturn:
        raise AssertionError(f"a sample was read: {key}")

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the samples were read")

    def values(self) -> NoReturn:
        raise AssertionError("the samples were read")


class GuardedList(Guarded, list[Any]):
    pass


class GuardedTuple(Guarded, tuple[Any, ...]):
    pass


class GuardedDict(Guarded, dict[str, Any]):
    pass


@pytest.mark.parametrize(
    "make", [lambda item: GuardedList([item]), lambda item: GuardedTuple((item,)), lambda item: GuardedDict(key=item)]
)
def test_a_dataset_that_is_a_list_with_methods_of_its_own_is_not_read(make: Any) -> None:
    generator = random.Random(1)
    found = list(reachable((make(generator),), lambda one: isinstance(one, random.Random)))
    assert found == [generator]


class Unbound:
    """A proxy without an object, as of a web framework outside of a request."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("there is no object")

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("there is no object")


def test_what_cannot_be_looked_at_holds_nothing_and_hides_nothing() -> None:
    generator = random.Random(1)
    found = list(reachable(([Unbound(), [Unbound(), generator]],), lambda one: isinstance(one, random.Random)))
    assert found == [generator]
