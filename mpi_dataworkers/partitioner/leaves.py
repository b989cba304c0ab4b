"""What batches and arguments are made of: tensors and plain values. And which plain values a forward looks at.

A list of plain values is one leaf, so that a batch with the names of its files has as many leaves whatever its size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.utils import _pytree as pytree

_log = logging.getLogger(__name__)
_pytree: Any = pytree
_PLAIN = frozenset((bool, int, float, complex, str, bytes, type(None)))


def flatten(value: Any) -> tuple[list[Any], Any]:
    """Leaves, and how they are put together, for `torch.utils._pytree.tree_unflatten`."""
    leaves, spec = _pytree.tree_flatten(value, is_leaf=_is_plain_list)
    return leaves, spec


def leaves_of(value: Any) -> list[Any]:
    """The leaves alone."""
    return flatten(value)[0]


def flatten_call(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """The leaves of what a function is called with, and how they are put together: as `(args, kwargs)`."""
    leaves, spec = _pytree.tree_flatten(
        (args, dict(kwargs)), is_leaf=lambda value: value is not args and _is_plain_list(value)
    )
    return leaves, spec


def _is_plain_list(value: Any) -> bool:
    return type(value) in (list, tuple) and all(type(item) in _PLAIN for item in value)


class _Touched(Exception):
    """Something has looked at a value whose place an `_Unknown` has."""


class _Unknown:
    """Stands in the place of a value: may be handed on, and nothing else."""

    def __init__(self, touched: set[int], place: int) -> None:
        object.__setattr__(self, "_touch", lambda: touched.add(place))

    def __getattribute__(self, name: str) -> Any:
        object.__getattribute__(self, "_touch")()
        raise _Touched(name)


def _refusing(name: str) -> Callable[..., Any]:
    def method(self: Any, *_: Any) -> Any:
        object.__getattribute__(self, "_touch")()
        raise _Touched(name)

    return method


# What every object else has, or what an operator of Python would find. Of the rest there is nothing, so it raises.
_SPECIAL = (
    *("eq", "ne", "lt", "le", "gt", "ge", "hash", "bool", "repr", "str", "format", "len", "iter", "contains"),
    *("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "mod", "rmod", "truediv", "rtruediv", "int", "float"),
    *("index", "call", "setattr", "delattr", "dir", "reduce_ex", "enter", "neg", "floordiv", "rfloordiv", "pow"),
)
for _name in _SPECIAL:
    setattr(_Unknown, f"__{_name}__", _refusing(_name))


def unread(leaves: Sequence[Any], candidates: Sequence[int], call: Callable[[list[Any]], Any]) -> frozenset[int]:
    """Which values a function does not look at, so that they may change without its doing something else.

    It is called with something in their place that notices being looked at. Not noticed is who asks for an object's
    type or identity: see `side_effects.Effects.asks_for_types`.

    Args:
        leaves: of its arguments.
        candidates: places of the values in question.
        call: the function, of such leaves.
    """
    places = [*candidates]
    while places:
        touched: set[int] = set()
        given = [_Unknown(touched, place) if place in places else leaf for place, leaf in enumerate(leaves)]
        try:
            call(given)
        except Exception as error:  # noqa: BLE001, the program's own forward runs here
            _log.debug("a forward looks at a plain value: %r", error)
            if not touched:
                return frozenset()
        if not touched:
            break
        places = [place for place in places if place not in touched]
    return frozenset(places)
