"""Marks datasets that read the samples of a batch at once and transform them one by one, each with its own seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_MARK = "_hetstream_reads_apart"
_Method = TypeVar("_Method", bound=Callable[..., Any])


def transforms_what_it_reads(getitems: _Method) -> _Method:
    """Say of a `__getitems__` that it is `self.transform` over `self.read_samples(indices)`, and nothing else."""
    setattr(getitems, _MARK, True)
    return getitems


def reads_apart(dataset: object) -> bool:
    """Whether a loader may call `read_samples` and `transform` in the place of `__getitems__`.

    A subclass with a `__getitems__` of its own, and a program's class that has a method called `read_samples`, are
    asked as torch asks them.
    """
    return hasattr(getattr(type(dataset), "__getitems__", None), _MARK)
