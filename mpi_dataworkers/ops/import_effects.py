"""What modules of a program would do to files when a data worker imports them again.

The program has imported them once, and torch's worker processes are forked from it: they import nothing. A module that
makes a fresh output directory, or opens a log with mode `w`, would do it a second time, to the files of the program
that runs. So it is stopped before, by Python's audit events (PEP 578).

What takes nothing from anybody goes on. What this import has made itself is its own. New things may appear in the
user's cache, and under names that `tempfile` chooses: nobody looks there for what has not been there. Elsewhere they
are found, as the latest run's directory is. To what is opened to append comes nothing as long as modules are imported.
What other programs do is not seen: a module that starts one is stopped.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import stat
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import IO, Any

from hetstream.base.posix import open_flags
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.code_globals import is_own_file

# Files that a module opens to append, as logs are, while a data worker imports it again: nothing is appended yet.
#
# Python's `open` answers with a stream as ever, whose descriptor leads to /dev/null as long as modules are imported,
# and to the file from then on: what modules write at import is in the file already, by the program, and what samples
# write comes to the file, as from torch's worker processes. A file that is not there is not made.

_open = io.open
_FLAGS = {"a": os.O_WRONLY, "a+": os.O_RDWR}  # by mode, without whether it is text


class _Calls(threading.local):
    is_redirecting = False


_calls = _Calls()


def is_redirecting() -> bool:
    """Whether this thread is opening /dev/null under the name of a file."""
    return _calls.is_redirecting


@contextlib.contextmanager
def appends_to_nowhere(concerns: Callable[[FrameType, str], bool]) -> Iterator[None]:
    """Inside, what is opened to append gets nothing.

    Args:
        concerns: whether it is so for who calls `open`, with the path.
    """
    streams: list[tuple[IO[Any], str, int]] = []
    is_on = True

    # Who has kept it under a name of its own finds Python's later.
    def open(file: Any, mode: str = "r", *args: Any, **options: Any) -> IO[Any]:
        flags = _FLAGS.get("".join(sorted(set(mode) - set("tb"), reverse=True)), 0) if isinstance(mode, str) else 0
        if not is_on or not flags or not _could_append(file) or not concerns(sys._getframe(1), os.fspath(file)):
            return _open(file, mode, *args, **options)
        _calls.is_redirecting = True
        try:
            stream: IO[Any] = _open(file, mode, *args, **{**options, "opener": lambda *_: os.open(os.devnull, flags)})
        finally:
            _calls.is_redirecting = False
        streams.append((stream, os.path.abspath(os.fsdecode(file)), flags))
        return stream

    builtins.open = io.open = open  # type: ignore[assignment]
    try:
        yield
    finally:
        is_on = False
        builtins.open = io.open = _open
    for stream, path, flags in streams:
        # Closed, or gone meanwhile: nothing comes to it any more.
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
            file = os.open(path, flags | os.O_APPEND)
            try:
                os.dup2(file, stream.fileno(), inheritable=False)
            finally:
                os.close(file)


def _could_append(file: Any) -> bool:
    """Else Python's `open` fails, or it is no file."""
    if not isinstance(file, str | bytes | os.PathLike):
        return False
    try:
        return stat.S_ISREG(os.stat(file).st_mode) and os.access(file, os.W_OK)
    except FileNotFoundError:
        return os.path.isdir(os.path.dirname(os.path.abspath(file)))
    except OSError:
        return False


_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TMPFILE = open_flags("O_TMPFILE") & ~open_flags("O_DIRECTORY")  # leaves nothing


@dataclass(frozen=True)
class _Act:
    """Which arguments of an audit event say what is different afterwards.

    Attributes:
        taken: where the path stands that is gone then; -1 for none.
        changed: the path whose file is another one then.
        made: the path that is new then, if nothing is there; what replaces something takes it.
        descriptors: of the directories that those paths are below, in that order, where the call was given some.
        is_owned: what is new then is of this import alone; else it is a second name of something.
    """

    taken: int = -1
    changed: int = -1
    made: int = -1
    descriptors: tuple[int, ...] = ()
    is_owned: bool = True


# Each event after which something outside of the process is different; None: nothing says what. To fork is no such
# event: a child is audited, too. The rest of `shutil` consists of these.
_ACTS: dict[str, _Act | None] = {
    "os.remove": _Act(taken=0, descriptors=(1,)),
    "os.rmdir": _Act(taken=0, descriptors=(1,)),
    "os.rename": _Act(taken=0, made=1, descriptors=(2, 3)),
    "shutil.rmtree": _Act(taken=0, descriptors=(1,)),
    "os.mkdir": _Act(made=0, descriptors=(2,)),
    "os.link": _Act(made=1, descriptors=(3,), is_owned=False),
    "os.symlink": _Act(made=1, descriptors=(2,)),
    "os.truncate": _Act(changed=0),
    "os.chmod": _Act(changed=0, descriptors=(2,)),
    "os.chown": _Act(changed=0, descriptors=(3,)),
    "os.utime": _Act(changed=0, descriptors=(3,)),
    "os.setxattr": _Act(changed=0),
    "os.removexattr": _Act(changed=0),
    **dict.fromkeys(("subprocess.Popen", "os.system", "os.exec", "os.spawn", "os.posix_spawn", "pty.spawn")),
    **dict.fromkeys(("os.kill", "os.killpg", "socket.bind")),
}


class _Refused(BaseException):
    """A module would have changed something: no `except Exception` of its own hides that."""


class _Watch:
    is_on = False
    refused = ""
    owned: set[str]  # made by the import that goes on
    temporary_dir = ""


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
    _watch.temporary_dir = os.path.realpath(tempfile.gettempdir())
    _watch.is_on, _watch.refused, _watch.owned = True, "", set()
    failed: BaseException | None = None
    try:
        with appends_to_nowhere(lambda frame, path: _own_module(frame) is not None and not _may_make(path, frame)):
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
    if not _watch.is_on or (event != "open" and event != "sqlite3.connect" and event not in _ACTS):
        return
    caller = sys._getframe(1)
    module = _own_module(caller)
    if module is None or not _takes(event, args, caller):
        return
    name, what, frame = module.f_globals.get("__name__"), args[0] if args else "", module
    while frame.f_back is not None and frame.f_code.co_filename.startswith("<"):  # `exec`
        frame = frame.f_back
    _watch.refused = _watch.refused or (
        f"{name} ({module.f_globals['__file__']}, line {frame.f_lineno}) would change what belongs to the running "
        f"program when it is imported again: {event} {what!r}. Move that into a function that the script calls below "
        '`if __name__ == "__main__":`'
    )
    raise _Refused(_watch.refused)


def _own_module(caller: FrameType) -> FrameType | None:
    """Where a module of the program is being imported; None if no one is, or a library is."""
    frame: FrameType | None = caller
    if caller.f_code.co_filename.startswith("<frozen importlib"):
        return None  # a `__pycache__`
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back
    # What a library does at its own import, even if a module of the program imports it, is as in any process.
    file = frame.f_globals.get("__file__") if frame is not None else None
    return frame if isinstance(file, str) and is_own_file(file) else None


def _takes(event: str, args: tuple[Any, ...], caller: FrameType) -> bool:
    """Whether somebody else than this import would find something changed, or something new where it is looked for."""
    if event == "open":
        return not is_redirecting() and _opens_to_write(args[0], args[2], caller)
    if event == "sqlite3.connect":
        name = os.fsdecode(args[0]) if isinstance(args[0], str | bytes | os.PathLike) else ""
        if name in ("", ":memory:") or "mode=ro" in name or "mode=memory" in name:
            return False
        return not _is_owned(os.path.realpath(name)) and not _makes(os.path.realpath(name), caller)
    act = _ACTS[event]
    if act is None:
        return True
    descriptors = [args[number] for number in act.descriptors if number < len(args)]
    if act.taken >= 0:
        path = _place(args[act.taken], descriptors[0])
        if os.path.lexists(path) and not _is_owned(path):
            return True
    if act.changed >= 0:
        path = os.path.realpath(_place(args[act.changed], *descriptors))
        return os.path.exists(path) and not _is_owned(path)
    if act.made < 0:
        return False
    path = _place(args[act.made], descriptors[-1])
    if os.path.lexists(path):  # only to rename replaces it; else the call fails
        return event == "os.rename" and not _is_owned(path)
    return not _makes(path, caller, is_owned=act.is_owned)


def _opens_to_write(path: Any, flags: int, caller: FrameType) -> bool:
    if not flags & _WRITING or flags & _TMPFILE or not isinstance(path, str | bytes | os.PathLike):
        return False
    place = os.path.realpath(os.fsdecode(path))
    try:
        found = os.stat(place)
    except OSError:
        is_possible = flags & os.O_CREAT and os.path.isdir(os.path.dirname(place))
        return bool(is_possible) and not _makes(place, caller)
    if stat.S_ISCHR(found.st_mode) or (flags & os.O_EXCL and flags & os.O_CREAT):
        return False
    # Nothing opens a directory so; `tempfile` names one, and gives `open` an opener, which is looked at by itself.
    is_lock = found.st_size == 0 and _is_cache(place)
    return not stat.S_ISDIR(found.st_mode) and not is_lock and not _is_owned(place)


def _makes(path: str, caller: FrameType, *, is_owned: bool = True) -> bool:
    """Whether something new may appear there; it is this import's own then."""
    may = _may_make(path, caller)
    if may and is_owned:
        _watch.owned.add(path)
    return may


def _may_make(path: str, caller: FrameType) -> bool:
    path = _place(path)
    if os.path.lexists(path):
        return _is_owned(path)
    is_named = caller.f_globals.get("__name__") == "tempfile" and os.path.dirname(path) == _watch.temporary_dir
    return is_named or _is_cache(path) or _is_owned(path)


def _is_cache(path: str) -> bool:
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return path.startswith(os.path.realpath(home) + os.sep)


def _is_owned(path: str) -> bool:
    return any(path == made or path.startswith(made + os.sep) for made in _watch.owned)


def _place(path: Any, descriptor: Any = -1) -> str:
    """The path of an entry of a directory, with all links on the way to the directory followed."""
    if isinstance(path, int):
        return os.path.realpath(f"/proc/self/fd/{path}")
    directory = f"/proc/self/fd/{descriptor}" if isinstance(descriptor, int) and descriptor >= 0 else ""
    directory, name = os.path.split(os.path.join(directory, os.fsdecode(path)).rstrip(os.sep))
    return os.path.join(os.path.realpath(directory), name)
