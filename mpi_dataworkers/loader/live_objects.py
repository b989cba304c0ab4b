"""Whether pickling would change the program's own objects; asked of a forked process, which has a copy of them.

torch's forked worker processes pickle no dataset, so a `__getstate__` that closes a file, counts or empties a cache is
never called in a program without hetstream.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import stat
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from hetstream.mpi_dataworkers.children import begin_child, end_group, fork_child
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.handlers import others
from hetstream.mpi_dataworkers.ops.changes import change_between, look_at

_LIMIT_S: Final = 60.0
_CHANGES: Final = "pickling changes the program's own objects, which torch's forked workers never do"
# Ends what it says: what is cut off is no answer.
_END = b"\0"


def ask_apart(objects: Mapping[str, Any], pickles: Callable[[], object]) -> None:
    """Ask whether objects would be the same after they were pickled.

    Args:
        objects: by name.
        pickles: pickles them.

    Raises:
        PipelineError: they would be others, cannot be pickled, or it takes longer than a minute.
    """
    theirs, ours = os.pipe()
    pid = None
    try:
        parent = os.getpid()
        try:
            pid = fork_child(lambda: _answer(parent, ours, objects, pickles))
        finally:
            os.close(ours)
        answer = _read(theirs)
    finally:
        os.close(theirs)
        if pid is not None:
            end_group(pid)
            os.waitpid(pid, 0)
    if answer:
        raise PipelineError(answer)


def _answer(parent: int, ours: int, objects: Mapping[str, Any], pickles: Callable[[], object]) -> int:
    if not begin_child(parent):
        return 0
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, up to the end of the process
    for output in (1, 2):
        os.dup2(sys.stdout.fileno(), output)
    _part_with_files()
    before, held = look_at(objects)
    places = {path: _place_in(value) for path, value in held.items()}
    try:
        pickles()
    except PipelineError as error:
        said = str(error)
    else:
        change = change_between(before, look_at(objects)[0])
        moved = (path for path, value in held.items() if _place_in(value) != places[path])
        change = change or next((f"{path} is closed, or read from another place" for path in moved), "")
        said = f"{_CHANGES}: {change}" if change else ""
    os.write(ours, said.encode(errors="replace").replace(_END, b"") + _END)
    return 0


def _part_with_files() -> None:
    """Open regular files anew, to read: their offsets would be the parent's, and what is written would be written."""
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        with contextlib.suppress(OSError):  # the one of the directory is closed
            if not stat.S_ISREG(os.fstat(number).st_mode):
                continue
            place = os.lseek(number, 0, os.SEEK_CUR)
            can_read = fcntl.fcntl(number, fcntl.F_GETFL) & os.O_ACCMODE != os.O_WRONLY
            anew = os.open(f"/proc/self/fd/{number}" if can_read else os.devnull, os.O_RDONLY | os.O_CLOEXEC)
            os.lseek(anew, place, os.SEEK_SET)
            os.dup2(anew, number, inheritable=False)
            os.close(anew)


def _place_in(value: Any) -> tuple[Any, ...]:
    """Whether a file, a socket or a mapping is open, and where it is read next."""
    found = []
    for ask in (lambda: bool(value.closed), lambda: value.fileno(), lambda: value.tell()):
        try:
            found.append(ask())
        except others():  # most objects have none of these
            found.append(None)
    return tuple(found)


def _read(theirs: int) -> str:
    """What the process says."""
    said, until = b"", time.monotonic() + _LIMIT_S
    waiting = select.poll()
    waiting.register(theirs, select.POLLIN)
    while not said.endswith(_END):
        if not waiting.poll(max(0.0, until - time.monotonic()) * 1000):
            return f"pickling it takes longer than {_LIMIT_S:g} s"
        part = os.read(theirs, 1 << 16)
        if not part:
            return "the process that was to pickle it first has died"
        said += part
    return said[: -len(_END)].decode(errors="replace")
