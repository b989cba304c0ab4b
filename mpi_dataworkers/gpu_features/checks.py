"""Numbers and objects that programs give: what is said of one that cannot be. Pure."""

from __future__ import annotations

import math
from numbers import Integral, Real
from types import UnionType

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.graph import FeatureGraph

_LONGEST_VALUE = 200
_LARGEST_TILE = 512
_LARGEST_GRID = 2**31 - 1  # programs that CUDA launches at once


def check_number(
    name: str,
    value: object,
    least: float = 0.0,
    most: float = math.inf,
    *,
    is_above: bool = False,
    may_be_infinite: bool = False,
) -> None:
    """Raise FeatureError, in which it is called `name`, where this is no number, or smaller or larger than it may be.

    Args:
        name: of the number, for the message.
        value: what was given.
        least, most: that it may be.
        is_above: it must be larger than the least.
        may_be_infinite: positive infinity will do, too.
    """
    try:
        number = float(value) if isinstance(value, Real) else math.nan
    except OverflowError:  # a whole number that no float64 holds
        number = math.nan
    is_enough = number > least if is_above else number >= least
    if is_enough and number <= most and (may_be_infinite or math.isfinite(number)):
        return
    rule = f"above {least:g}" if is_above else f"at least {least:g}"
    rule += "" if math.isinf(most) else f", at most {most:g}"
    raise FeatureError(f"{name}={_said(value)}: give a {'' if may_be_infinite else 'finite '}number, {rule}")


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raise FeatureError where this is no whole number, or smaller or larger than it may be."""
    if not isinstance(value, Integral) or int(value) < least or (most is not None and int(value) > most):
        rule = f"at least {least}" if most is None else f"{least} to {most}"
        raise FeatureError(f"{name}={_said(value)}: give a whole number, {rule}")


def check_is(name: str, value: object, kind: type | UnionType, hint: str) -> None:
    """Raise FeatureError where this is of another type; `hint` says what to give."""
    if not isinstance(value, kind):
        raise FeatureError(f"{name}={_said(value)}: give {hint}")


def check_each(name: str, values: object, kind: type) -> None:
    """Raise FeatureError where this is no tuple or list of objects of one type."""
    if not isinstance(values, tuple | list):
        raise FeatureError(f"{name}={_said(values)}: give a tuple of {kind.__name__}")
    for at, value in enumerate(values):
        check_is(f"{name}[{at}]", value, kind, f"a {kind.__name__}")


def check_callable(name: str, value: object, hint: str) -> None:
    """Raise FeatureError where this cannot be called; `hint` says what to give."""
    if not callable(value):
        raise FeatureError(f"{name}={_said(value)}: give {hint}")


def check_graph(who: str, graph: object) -> None:
    """Raise FeatureError where this is no feature graph."""
    if not isinstance(graph, FeatureGraph):
        raise FeatureError(f"{who}: graph is a {type(graph).__name__}; give a FeatureGraph")


def check_programs(name: str, value: object) -> None:
    """Raise FeatureError where so many programs cannot be launched."""
    check_whole(name, value, 1, _LARGEST_GRID)


def check_tile(tile: int) -> None:
    """Raise FeatureError where a program cannot work on so many values."""
    if not isinstance(tile, int) or not 1 <= tile <= _LARGEST_TILE or tile & (tile - 1):
        raise FeatureError(f"tile={tile!r}: a power of two, at most {_LARGEST_TILE}")


def _said(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else text[:_LONGEST_VALUE] + "..."
