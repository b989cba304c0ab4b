"""What user code makes or changes in the file system while it makes a step, by Python's audit events (PEP 578).

Bytes that a process writes say less: an empty file, a directory or a link has none. What C code writes by itself raises
no event.

Not told is what Python and torch do by themselves: byte code of modules and whatever an import makes, names that
`tempfile` chooses, what `multiprocessing` needs, and hetstream's own.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
from types import FrameType
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE = os.O_TMPFILE & ~os.O_DIRECTORY  # leaves nothing
# Which arguments of an event are the path and the directory that it may be below, and whether something has to be there
# or must not be: else the call changes nothing.
_ACTS = {
    "os.mkdir": (0, 2, False),
    "os.link": (1, 3, False),
    "os.symlink": (1, 2, False),
    "os.rename": (0, 2, True),
    "os.remove": (0, 1, True),
    "os.rmdir": (0, 1, True),
    "os.truncate": (0, -1, True),
}
# They act for whoever calls them.
_HELPERS = frozenset({"os", "shutil", "pathlib", "pathlib._local", "io", "tempfile", "codecs", "gzip", "bz2", "lzma"})
_OWN = "hetstream", "multiprocessing", "torch.multiprocessing"


class _State:
    def __init__(self) -> None:
        self.is_on = False
        self.found = ""
        self.temporary: set[str] = set()  # what `tempfile` has made in this step


_state = _State()


class acts_on_files:
    """Inside, note what user code makes or changes in the file system.

    Attributes:
        act: the first one, on one line; "" for none.
    """

    # Written out: a generator as context takes four times as long, of the time for each step.
    __slots__ = ("act",)

    def __enter__(self) -> acts_on_files:
        _audit()
        _state.is_on, _state.found = True, ""
        if _state.temporary:
            _state.temporary.clear()
        return self

    def __exit__(self, *_: object) -> None:
        _state.is_on, self.act = False, _state.found


@functools.cache
def _audit() -> None:
    """Once in a process and its children: an audit hook cannot be taken away."""
    sys.addaudithook(_look)


def _look(event: str, args: tuple[Any, ...]) -> None:
    if not _state.is_on:
        return
    if event == "open":
        if not args[2] & _WRITING or args[2] & _TMPFILE:
            return
    elif event not in _ACTS:
        return
    if _state.found:
        return
    number, below, is_there = _ACTS.get(event, (0, -1, False))
    if not isinstance(args[number], str | bytes | os.PathLike):  # an open file
        return
    place = _place(args[number], args[below] if below >= 0 else -1)
    if not _changes(event, place, is_there):
        return
    caller = sys._getframe(1)
    if caller.f_globals.get("__name__") == "tempfile":
        _state.temporary.add(place)
        return
    is_temporary = event != "os.rename" and any(f"{place}/".startswith(f"{made}/") for made in _state.temporary)
    if not is_temporary and _is_users(caller):
        _state.found = f"{event} {place!r}"


def _place(path: Any, descriptor: int) -> str:
    """The path with all links on the way to its directory followed."""
    directory, name = os.path.split(os.fsdecode(path).rstrip("/"))
    if descriptor >= 0:
        directory = f"/proc/self/fd/{descriptor}/{directory}"
    return os.path.join(os.path.realpath(directory), name)


def _changes(event: str, place: str, is_there: bool) -> bool:
    try:
        mode = (os.stat if event == "open" else os.lstat)(place).st_mode
    except OSError:
        return not is_there and os.path.isdir(os.path.dirname(place))
    return is_there or (event == "open" and stat.S_ISREG(mode))


def _is_users(caller: FrameType) -> bool:
    """Whether user code, or a library for it, does that, and no import."""
    frame: FrameType | None = caller
    doer = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return False
        if not doer and name not in _HELPERS:
            doer = name
        if name.partition(".")[0] == "hetstream":
            break
        frame = frame.f_back
    return not doer.startswith(_OWN)
