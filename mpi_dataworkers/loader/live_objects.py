"""Whether pickling would change the program's own objects; asked of a forked process, which has a copy of them.

torch's forked worker processes pickle no dataset, so a `__getstate__` that closes a file, counts or empties a cache is
never called in a program without hetstream.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, Final

from hetstream.base.posix import fcntl
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.changes import (
    State,
    change_between,
    is_alike,
    look_at,
    objects_at,
    state_of,
    writes_itself,
)
from hetstream.mpi_dataworkers.ops.pickled_pipeline import PickledPipeline, copy_of
from hetstream.mpi_dataworkers.ops.pickling import RunsUserCode, pickle_apart
from hetstream.mpi_dataworkers.ops.pipeline import generators_kept
from hetstream.mpi_dataworkers.process.children import begin_child, end_group, fork_child
from hetstream.mpi_dataworkers.process.handlers import others

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


# What a program has in its objects and pickling does not show: `__getstate__` leaves it out, say.
#
# Each of torch's worker processes begins with it. Before the first pass what `__getstate__` and `__reduce__` of the
# program's classes write is compared with what the objects hold. Of what is pickled alike the objects are looked at
# each time. Loaders come and go, so what was seen is remembered for the whole program.

# Paths in all that is remembered: about 200 bytes each.
_MOST_PATHS = 400_000

_seen: OrderedDict[str, State] = OrderedDict()


def unseen_change(pipeline_id: str, objects: Mapping[str, Any]) -> str:
    """What has changed since the same was sent before, on one line; "" for nothing.

    Args:
        pipeline_id: of what data workers are sent.
        objects: that it was made of.
    """
    now = state_of(objects, with_generators=False)
    before = _seen.setdefault(pipeline_id, now)
    _seen.move_to_end(pipeline_id)
    while len(_seen) > 1 and sum(map(len, _seen.values())) > _MOST_PATHS:
        _seen.popitem(last=False)
    # What is opened late, and cannot be pickled, is no change: a file, a connection.
    new = objects_at(objects, [path for path in now if before.get(path, now) is None and now[path] is not None])
    opened = [path for path, value in new.items() if not _can_be_pickled(value)]
    for path in opened:
        below = tuple(f"{path}{mark}" for mark in (".", "[", " "))
        before, now = (
            {each: state[each] for each in state if each != path and not each.startswith(below)}
            for state in (before, now)
        )
    return change_between(before, now)


def left_out(pickled: PickledPipeline, objects: Mapping[str, Any]) -> str:
    """What `__getstate__` or `__reduce__` of the program's own classes leaves out or changes, by its path; "" for
    nothing. What cannot be pickled is left out with a reason: an open file, a connection.

    Args:
        pickled: what data workers are sent.
        objects: that it was made of, as `unseen_change`.
    """
    if pickled.pipeline_id in _seen:
        return ""
    now, held = look_at(objects)
    writers = tuple(path for path, value in held.items() if writes_itself(type(value)))
    if not writers:
        return ""
    with generators_kept():
        copied = copy_of(pickled.in_private())[0]
    then, _ = look_at({**copied.user_objects, "worker_init_fn": copied.worker_init_fn})
    passed: tuple[str, ...] = ()
    for path, value in now.items():
        is_written = any(path.startswith(f"{writer}.") or path.startswith(f"{writer}[") for writer in writers)
        if not is_written or path.startswith(passed) or value is None or is_alike(then.get(path), value):
            continue
        if path not in held or _can_be_pickled(held[path]):
            return path
        passed += tuple(f"{path}{mark}" for mark in (".", "[", " "))
    return ""


def _can_be_pickled(value: Any) -> bool:
    """As far as can be said without calling user code."""
    try:
        pickle_apart(value, runs_user_code=False)
    except RunsUserCode:
        return True
    except others():  # the question is only whether it raises
        return False
    return True
