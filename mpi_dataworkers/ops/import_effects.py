"""What modules of a program would do to files when a data worker imports them again.

The program has imported them once, and torch's worker processes are forked from it: they import nothing. A module that
makes a fresh output directory, or opens a log with mode `w`, would do it a second time, to the files of the program
that runs. So it is stopped before, by Python's audit events (PEP 578).
"""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.program import is_own_file

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE = os.O_TMPFILE & ~os.O_DIRECTORY  # leaves nothing

# Audit events after which something outside of the process is different; to fork is none: a child is audited, too.
# With where the path stands, and whether it is there, where that decides: what fails changes nothing.
_EVENTS: dict[str, tuple[int, bool] | None] = {
    "os.remove": (0, True),
    "os.rmdir": (0, True),
    "os.rename": (0, True),
    "shutil.rmtree": (0, True),
    "os.mkdir": (0, False),
    "os.link": (1, False),
    "os.symlink": (1, False),
    **dict.fromkeys(("os.truncate", "os.chmod", "os.chown", "os.utime", "os.setxattr", "os.removexattr")),
    **dict.fromkeys(("shutil.move", "shutil.copyfile", "shutil.copytree", "shutil.copymode", "shutil.copystat")),
    **dict.fromkeys(("shutil.chown", "shutil.make_archive", "shutil.unpack_archive")),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "pty.spawn")),
    **dict.fromkeys(("os.kill", "os.killpg", "socket.bind")),
}


class _Refused(BaseException):
    """A module would have changed something: no `except Exception` of its own hides that."""


class _Watch:
    is_on = False
    refused = ""


_watch = _Watch()


@contextlib.contextmanager
def without_effects() -> Iterator[None]:
    """Inside, modules of the program are not executed any further once they would change something outside.

    Raises:
        PipelineError: one would have; the message names it, its line and what it was about to do.
    """
    if _watch.is_on:
        yield
        return
    _audit_imports()
    _watch.is_on, _watch.refused = True, ""
    failed: BaseException | None = None
    try:
        yield
    except BaseException as error:
        failed = error
        if not _watch.refused:
            raise
    finally:
        _watch.is_on = False
    if _watch.refused:
        raise PipelineError(f"the program's modules cannot be imported in a data worker: {_watch.refused}") from failed


@functools.cache
def _audit_imports() -> None:
    """Once in a process: an audit hook cannot be taken away."""
    sys.addaudithook(_look)


def _look(event: str, args: tuple[Any, ...]) -> None:
    if not _watch.is_on or not _changes(event, args):
        return
    frame: FrameType | None = sys._getframe(1)
    if frame is not None and frame.f_code.co_filename.startswith("<frozen importlib"):
        return  # a `__pycache__`
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    # What a library does at its own import, even if a module of the program imports it, is as in any process.
    file = frame.f_globals.get("__file__") if frame is not None else None
    if frame is None or not isinstance(file, str) or not is_own_file(file):
        return
    name, what = frame.f_globals.get("__name__"), args[0] if args else ""
    while frame.f_back is not None and frame.f_code.co_filename.startswith("<"):  # `exec`
        frame = frame.f_back
    _watch.refused = _watch.refused or (
        f"{name} ({file}, line {frame.f_lineno}) would change what belongs to the running program when it is imported "
        f'again: {event} {what!r}. Move that into a function that the script calls below `if __name__ == "__main__":`'
    )
    raise _Refused(_watch.refused)


def _changes(event: str, args: tuple[Any, ...]) -> bool:
    if event == "open":
        return _opens_to_write(*args)
    if event == "sqlite3.connect":
        name = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
        return name not in ("", ":memory:") and "mode=ro" not in name and "mode=memory" not in name
    if event not in _EVENTS:
        return False
    decisive = _EVENTS[event]
    if decisive is None:
        return True
    behind = args[2 if event == "os.mkdir" else 1 :]  # its mode comes first
    if any(isinstance(arg, int) and arg >= 0 for arg in behind):  # below a directory of which there is a descriptor
        return True
    place, is_there = decisive
    return _exists(args[place]) is is_there


def _exists(path: Any) -> bool:
    return isinstance(path, str | bytes | os.PathLike) and os.path.lexists(path)


def _opens_to_write(path: Any, _: Any, flags: int) -> bool:
    if not flags & _WRITING or flags & _TMPFILE or not isinstance(path, str | bytes | os.PathLike):
        return False
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return bool(flags & os.O_CREAT)  # else it fails
    # Nothing opens a directory so; `tempfile` names one, and gives `open` an opener, which is looked at by itself.
    return not stat.S_ISCHR(mode) and not stat.S_ISDIR(mode) and not (flags & os.O_EXCL and flags & os.O_CREAT)
