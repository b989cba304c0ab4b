"""Around user code: what it forks does not go on as a second copy of the process that called it."""

from __future__ import annotations

import sys
import traceback

from hetstream.base.forks import generation
from hetstream.mpi_dataworkers.children import end_process


class ForksEndHere:
    """A process that was forked inside, and comes out, ends: with the code of a `sys.exit`, with 1 after another
    exception. Torch's worker processes let such processes end in the same way."""

    __slots__ = ("_generation",)

    def __enter__(self) -> None:
        self._generation = generation()

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if generation() != self._generation:
            _end(error)


def _end(error: BaseException | None) -> None:
    code = 1
    try:
        met: set[int] = set()
        while error is not None and error.__cause__ is not None and id(error) not in met:  # `raise error from error`
            met.add(id(error))
            error = error.__cause__
        if error is None or (isinstance(error, SystemExit) and error.code is None):
            code = 0
        elif isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
        elif isinstance(error, SystemExit):
            sys.stderr.write(f"{error.code}\n")
        else:
            traceback.print_exception(error)
    finally:
        end_process(code & 0xFF)
