"""Keeps what torch says while it traces from the user, and the warnings of the program as they were. No side effects.

Python shows a warning once for each line, and forgets which it has shown as soon as anybody changes the filters. torch
changes them as it traces, so that a program would show all of its warnings once more.
"""

from __future__ import annotations

import contextlib
import io
import logging
import sys
import threading
import warnings
from collections.abc import Iterator
from typing import Any, TextIO

_LOGGERS = tuple(logging.getLogger(name) for name in ("torch", "torch._dynamo", "torch.fx"))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch's own words to itself: what it cannot do is no warning of the program's."""
    levels = [logger.level for logger in _LOGGERS]
    stream = sys.stderr
    for logger in _LOGGERS:
        logger.setLevel(logging.CRITICAL)
    try:
        with unwarned(), contextlib.redirect_stderr(_OfOthers(stream)):
            yield
    finally:
        for logger, level in zip(_LOGGERS, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def unwarned() -> Iterator[None]:
    """Show no warning; afterwards the filters are as they were, and what was shown before is known as such."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(_ignoring())
        inside = _version()
        with _ignoring():
            nested = _version()
        to_leave = _version() - nested
        before = inside - (nested - inside)
        shown = [(table, dict(table)) for table in _tables() if table.get("version") == before]
        try:
            yield
        finally:
            warnings.simplefilter("ignore")  # whatever was left there
            after = _version() + to_leave
            stack.close()
            for table, entries in shown:
                table.clear()
                table.update(entries, version=after)


@contextlib.contextmanager
def _ignoring() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _version() -> Any:
    """The number of times that filters have changed: Python notes it in each table of what was shown."""
    table: dict[Any, Any] = {}
    warnings.warn_explicit("", UserWarning, "", 0, registry=table)
    return table["version"]


def _tables() -> list[dict[Any, Any]]:
    """Python's tables of the warnings that were shown: one for each module, and one for all."""
    modules = [vars(module) for module in list(sys.modules.values()) if hasattr(module, "__dict__")]
    found = [names.get("__warningregistry__") for names in modules]
    found.append(getattr(warnings, "onceregistry", None))
    return [table for table in found if isinstance(table, dict)]


class _OfOthers(io.TextIOBase):
    """Standard error without what this thread writes: torch tells at length what it cannot trace."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._thread = stream, threading.get_ident()

    def write(self, text: str) -> int:
        """Write it, or not."""
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)
