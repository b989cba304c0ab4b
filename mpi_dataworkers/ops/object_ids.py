"""Copies of a program's objects answer `id()` as the program's own do.

Samples may note which object has made them, and the program looks for that object: MONAI's inverse transforms do. In
torch's forked workers the objects have the ids that they have in the program. Elsewhere they are copies, and what the
code of their classes calls `id` gives for a copy the id of the one it was made from. `hash` and `repr` by address are
not followed; where samples show them, the comparison finds it.
"""

from __future__ import annotations

import builtins
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from types import CodeType, FunctionType
from typing import Any

_NO_USERS = frozenset((*sys.stdlib_module_names, "numpy", "torch", "cloudpickle", "hetstream"))
_MOST = 10_000  # of more objects nobody looks for one by its id
# By the id of a copy: the copy, and the id of what it is one of. An id is another object's when the copy is gone.
_originals: dict[int, tuple[weakref.ref[Any], int]] = {}

_users: weakref.WeakKeyDictionary[type, bool] = weakref.WeakKeyDictionary()  # see `is_users`


def id_of_original(value: Any) -> int:
    """What `id` gives in the code of a pipeline's classes."""
    own = builtins.id(value)
    reference, original = _originals.get(own, (None, own))
    return original if reference is not None and reference() is value else own


def is_users(kind: type) -> bool:
    """Whether a class, or one that it extends, is of the program or of a package whose samples may note an object."""
    known = _users.get(kind)
    if known is None:
        known = _users[kind] = any(base.__module__.partition(".")[0] not in _NO_USERS for base in kind.__mro__)
    return known


def _asking(kind: type) -> Iterator[FunctionType]:
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in _NO_USERS:
            for value in vars(base).values():
                function = getattr(value, "fget", None) or getattr(value, "__func__", value)
                if not isinstance(function, FunctionType) or not _names_id(function.__code__):
                    continue
                if function.__globals__.get("id", id_of_original) is id_of_original:
                    yield function


def _names_id(code: CodeType) -> bool:
    return "id" in code.co_names or any(_names_id(part) for part in code.co_consts if isinstance(part, CodeType))


def written(objects: list[Any], memo: Callable[[], dict[int, tuple[int, Any]]]) -> bytes:
    """The ids of objects, to follow the pickle that holds them; empty if no code asks for any.

    Args:
        objects: of users' classes.
        memo: gives a pickler's, by id: the place of each object.
    """
    if len(objects) > _MOST or not any(True for kind in {*map(type, objects)} for _ in _asking(kind)):
        return b""
    places = memo()
    return pickle.dumps({places[id(each)][0]: id_of_original(each) for each in objects if id(each) in places})


def read(data: bytes, memo: dict[int, Any]) -> None:
    """Have copies answer with what `written` has noted.

    Args:
        data: what it gave.
        memo: an unpickler's, by place.
    """
    for place, original in pickle.loads(data).items():
        copy = memo[place]
        try:
            reference = weakref.ref(copy, partial(_forget, id(copy)))
        except TypeError:  # `__slots__` without one for references: who else had its id cannot be told
            continue
        _originals[id(copy)] = reference, original
        for function in _asking(type(copy)):
            function.__globals__["id"] = id_of_original


def _forget(own: int, _: Any) -> None:
    _originals.pop(own, None)
