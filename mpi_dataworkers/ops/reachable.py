"""What a dataset or a collate function holds: a look through attributes, lists, tuples and dictionaries."""

from __future__ import annotations

import inspect
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.handlers import others, suppressed_others

# Looking takes a moment for each object: of a long list, which is data, only the beginning.
_MAX_ITEMS = 1_000
_MAX_OBJECTS = 20_000
_PLAIN = (str, bytes, int, float, complex, bool, type(None), type, ModuleType, np.ndarray)


def reachable(roots: tuple[Any, ...], is_wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """The wanted ones among the objects that some roots hold, the near ones first, each once; not what those hold."""
    waiting, seen = deque(roots), {id(root) for root in roots}
    kept_alive = list(roots)  # an id belongs to one object for as long as that lives
    while waiting:
        found = waiting.popleft()
        if is_wanted(found):
            yield found
            continue
        for part in _parts_of(found):
            if id(part) in seen or not _may_hold_more(part):
                continue
            if len(seen) < _MAX_OBJECTS:
                seen.add(id(part))
                kept_alive.append(part)
                waiting.append(part)


def _may_hold_more(part: Any) -> bool:
    try:
        return not (isinstance(part, _PLAIN) or inspect.isroutine(part))
    except others():  # a proxy asks for its object, and there is none
        return False


def _parts_of(value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        return
    with suppressed_others():  # a proxy, as above
        attributes = value.__dict__
        if isinstance(attributes, dict):
            yield from list(attributes.values())
    # Not the methods of the user's own class, which may read a sample: looking runs nobody's code.
    items: Iterable[Any] = ()
    if isinstance(value, list):
        items = list.__iter__(value)
    elif isinstance(value, tuple):
        items = tuple.__iter__(value)
    elif isinstance(value, dict):
        items = dict.values(value)
    yield from list(itertools.islice(items, _MAX_ITEMS))


def device_of(*roots: Any) -> str:
    """The device of a tensor that is not in the host's memory, as `cuda:0`; "" when there is none."""
    for tensor in reachable(roots, lambda found: isinstance(found, torch.Tensor) and found.device.type != "cpu"):
        return str(tensor.device)
    return ""


def holders(root: Any) -> list[dict[Any, Any] | list[Any]]:
    """Where the parts of an object stand: attributes, dictionaries and lists, the nearest first.

    Long ones hold data; of many the first are given.
    """
    found: list[dict[Any, Any] | list[Any]] = []

    def note(held: Any) -> bool:
        with suppressed_others():  # a proxy, as above
            for place in (held, getattr(held, "__dict__", None)):
                if isinstance(place, dict | list) and len(place) <= _MAX_ITEMS:
                    found.append(place)
        return len(found) >= _MAX_ITEMS

    next(reachable((root,), note), None)
    return found
