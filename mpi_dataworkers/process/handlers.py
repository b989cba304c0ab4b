"""Which exceptions handlers of signals raise: they come up wherever the program waits, and are the program's.

Who catches what user code, torch or the system may raise lets these through: `except others():`. They are known by
their tracebacks: Python calls a handler with the frame that it interrupts, and no other function is given its caller's
frame as an argument.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType, MethodType
from typing import Any


def others() -> tuple[type[Exception], ...]:
    """Return what `except` catches so that a handler's exception goes on: all kinds, or none while it is one of a
    handler.
    """
    error = sys.exc_info()[1]
    return () if error is not None and of_handler(error) else (Exception,)


@contextlib.contextmanager
def suppressed_others() -> Iterator[None]:
    """Go on behind the block where something in it raises, but for a handler."""
    try:
        yield
    except others():
        pass


def of_handler(error: BaseException) -> bool:
    """Return whether a handler of a signal has raised this, and not what was being done."""
    before: FrameType | None = None
    handlers = None
    at = error.__traceback__
    while at is not None:
        frame = at.tb_frame
        if before is not None and any(given is before for given in _arguments(frame)):
            return True
        before, at = frame, at.tb_next
    # It may have dropped its arguments.
    at = error.__traceback__
    while at is not None:
        handlers = _handlers() if handlers is None else handlers
        if at.tb_frame.f_code in handlers:
            return True
        at = at.tb_next
    return False


def _arguments(frame: FrameType) -> list[Any]:
    """What a frame's function was given, as far as it still has it; nothing where it cannot be a handler.

    Before Python 3.13 a frame that was asked for its variables keeps them in a dictionary.
    """
    code = frame.f_code
    if code.co_argcount < 2 and not code.co_flags & 4:  # a handler is called with two arguments
        return []
    found = frame.f_locals
    num_named = code.co_argcount + code.co_kwonlyargcount
    several = num_named if code.co_flags & 4 else None  # CO_VARARGS
    given = [found.get(name) for name in code.co_varnames[:num_named]]
    return given if several is None else [*given, *(found.get(code.co_varnames[several]) or ())]


def _handlers() -> set[Any]:
    """Code of the handlers that are set now."""
    codes = set()
    for number in signal.valid_signals():
        handler: Any = signal.getsignal(number)
        while handler is not None and not hasattr(handler, "__code__"):
            if isinstance(handler, MethodType):
                handler = handler.__func__
            elif hasattr(handler, "func"):  # functools.partial
                handler = handler.func
            else:
                called = getattr(type(handler), "__call__", None)  # noqa: B004, it is asked for its code
                handler = called if hasattr(called, "__code__") else None
        if handler is not None:
            codes.add(handler.__code__)
    return codes
