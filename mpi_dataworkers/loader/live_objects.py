"""Whether pickling would change the program's own objects; asked of a forked process, which has a copy of them.

torch's forked worker processes pickle no dataset, so a `__getstate__` that closes a file, counts or empties a cache is
never called in a program without hetstream.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from hetstream.mpi_dataworkers.children import fork_child
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.handlers import others
from hetstream.mpi_dataworkers.ops.changes import change_between, look_at, writes_itself

_LIMIT_S: Final = 60.0


def ask_apart(objects: Mapping[str, Any], pickles: Callable[[], object]) -> None:
    """Ask whether objects would be the same after they were pickled. Of those that cannot say so it is not asked.

    Args:
        objects: by name.
        pickles: pickles them.

    Raises:
        PipelineError: they would be others, cannot be pickled, or it takes longer than a minute.
    """
    _, held = look_at(objects)
    if not any(writes_itself(type(value)) for value in held.values()):
        return
    theirs, ours = os.pipe()
    try:
        pid = fork_child(lambda: _answer(ours, objects, pickles))
        os.close(ours)
        ours = -1
        try:
            answer = _read(theirs)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    finally:
        os.close(theirs)
        if ours >= 0:
            os.close(ours)
    if answer:
        raise PipelineError(answer)


def _answer(ours: int, objects: Mapping[str, Any], pickles: Callable[[], object]) -> int:
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115, up to the end of the process
    for output in (1, 2):
        os.dup2(sys.stdout.fileno(), output)
    before, held = look_at(objects)
    open_before = {path: _openness(value) for path, value in held.items()}
    try:
        pickles()
    except PipelineError as error:
        os.write(ours, str(error).encode(errors="replace"))
        return 0
    now, _ = look_at(objects)
    change = change_between(before, now)
    for path, value in held.items():
        if not change and _openness(value) != open_before[path]:
            change = f"{path} is closed"
    if change:
        text = f"pickling changes the program's own objects, which torch's forked workers never do: {change}"
        os.write(ours, text.encode(errors="replace"))
    os.write(ours, b"\0")
    return 0


def _openness(value: Any) -> tuple[Any, ...]:
    """What tells a file, a socket or a mapping that is open from one that is closed."""
    found = []
    for ask in (lambda: bool(value.closed), lambda: value.fileno()):
        try:
            found.append(ask())
        except others():  # most objects have neither
            found.append(None)
    return tuple(found)


def _read(theirs: int) -> str:
    """What the process says, up to its end."""
    said = b""
    while select.select([theirs], [], [], _LIMIT_S)[0]:
        part = os.read(theirs, 1 << 16)
        said += part
        if not part or part.endswith(b"\0"):
            break
    else:
        return f"pickling it takes longer than {_LIMIT_S:g} s"
    if not said:
        return "the process that pickled it has died"
    return said.rstrip(b"\0").decode(errors="replace")
