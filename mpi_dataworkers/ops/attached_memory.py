"""Segments of `multiprocessing.shared_memory` that belong to the program, and that samples attach to by name.

Python registers a segment with a tracker process at each attachment, too (cpython#82300; 3.13 lets the caller decline,
and still does it by default). The tracker unlinks what is registered when the last process that shares it has ended.
Torch's worker processes are forked from the trainer and share its tracker. Data worker processes have another one, and
leave earlier than the program.
"""

from __future__ import annotations

import functools
import threading
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from typing import Any

_KIND = "shared_memory"  # as the tracker calls it


class _Calls(threading.local):
    is_attaching = False


_calls = _Calls()
_register, _unregister = resource_tracker.register, resource_tracker.unregister
_make = SharedMemory.__init__


def leave_attachments_alone() -> None:
    """From now on a segment is unlinked at the end of this process, and of those it forks, only if they created it."""
    resource_tracker.register = _register_what_is_made
    resource_tracker.unregister = _unregister_in_any_case
    SharedMemory.__init__ = _noted  # type: ignore[method-assign]


@functools.wraps(_make)
def _noted(self: SharedMemory, name: str | None = None, create: bool = False, *args: Any, **options: Any) -> None:
    before, _calls.is_attaching = _calls.is_attaching, not create
    try:
        _make(self, name, create, *args, **options)
    finally:
        _calls.is_attaching = before


def _register_what_is_made(name: Any, rtype: str) -> None:
    if rtype != _KIND or not _calls.is_attaching:
        _register(name, rtype)


def _unregister_in_any_case(name: Any, rtype: str) -> None:
    """Unlinked is also what was only attached to, or was made by another process that shares the tracker. The tracker
    holds a set of names, and complains of one that is not in it."""
    if rtype == _KIND:
        _register(name, rtype)
    _unregister(name, rtype)
