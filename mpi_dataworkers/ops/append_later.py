"""Files that a module opens to append, as logs are, while a data worker imports it again: nothing is appended yet.

Python's `open` answers with a stream as ever, whose descriptor leads to /dev/null as long as modules are imported, and
to the file from then on: what modules write at import is in the file already, by the program, and what samples write
comes to the file, as from torch's worker processes. A file that is not there is not made.
"""

from __future__ import annotations

import builtins
import contextlib
import io
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import IO, Any

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
