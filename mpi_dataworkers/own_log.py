"""hetstream's own log lines in a data worker, apart from what the program's code writes and logs there."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from hetstream.mpi_dataworkers.children import flush_output

_STANDARD_OUTPUTS = (1, 2)
_log_file: TextIO | None = None


def keep_apart(path: Path | None) -> None:
    """Leave the root logger to the program, as it is in torch's worker processes.

    Args:
        path: file that hetstream's lines are appended to; None where they go on to standard error.
    """
    global _log_file
    root, ours = logging.getLogger(), logging.getLogger("hetstream")
    if path is not None:
        _log_file = path.open("a", buffering=1, encoding="utf-8", errors="backslashreplace")
    for handler in list(root.handlers):
        root.removeHandler(handler)
        ours.addHandler(handler)
        if _log_file is not None and isinstance(handler, logging.StreamHandler):
            handler.setStream(_log_file)
    ours.setLevel(root.level)
    ours.propagate = False
    root.setLevel(logging.WARNING)


@contextlib.contextmanager
def imported_again() -> Iterator[None]:
    """Put what modules write while they are imported, and objects while they are unpickled, into the log file: of the
    program's own imports it has been shown, and torch's worker processes import nothing again."""
    if _log_file is None:
        yield
        return
    flush_output()
    kept = [os.dup(descriptor) for descriptor in _STANDARD_OUTPUTS]
    try:
        for descriptor in _STANDARD_OUTPUTS:
            os.dup2(_log_file.fileno(), descriptor)
        yield
    finally:
        flush_output()
        for descriptor, before in zip(_STANDARD_OUTPUTS, kept, strict=True):
            os.dup2(before, descriptor)
            os.close(before)
