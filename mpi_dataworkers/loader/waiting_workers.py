"""torch's worker processes as they are when a pass begins, which wait until they are needed.

torch forks the processes of a pass when it begins, and what the program changes afterwards they do not see. So a loader
that leaves data workers in the middle of a pass needs processes that were forked before it. They wait at their very
start, and cost what torch's own cost at the start of a pass: a fork each.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
from multiprocessing import context
from typing import Any, Final

from hetstream.mpi_dataworkers.children import going_first

_LOOKS_EACH_S: Final = 5.0  # for the parent, as torch's workers do
_BEGIN, _END = b"b", b"e"


class Start:
    """A pipe on which worker processes wait."""

    def __init__(self) -> None:
        self._parent = os.getpid()
        self._theirs, self._ours = os.pipe()
        self._num_waiting = 0

    def context(self) -> context.BaseContext:
        """Makes processes that wait; all else as torch's default for forked ones does."""
        return _Context(self)

    def make(self, *args: Any, **keywords: Any) -> Any:
        """A process that waits when it is started."""
        process = Process(*args, **keywords)
        process.waits_for = self
        self._num_waiting += 1
        return process

    def give(self) -> None:
        """Have the processes begin."""
        self._tell(_BEGIN)

    def close(self) -> None:
        """Have those that still wait end. Called again, or in a forked process, it does nothing."""
        if os.getpid() == self._parent and self._num_waiting >= 0:
            self._tell(_END)

    def _tell(self, what: bytes) -> None:
        # One byte each. The end of the pipe says nothing: whatever was forked since may hold it, too.
        number, self._num_waiting = self._num_waiting, -1
        with contextlib.suppress(BrokenPipeError):
            os.write(self._ours, what * number)
        os.close(self._ours)
        os.close(self._theirs)

    def wait(self) -> None:
        """In a worker process: come back when it is to begin; else the process ends here."""
        os.close(self._ours)
        waiting = select.poll()
        waiting.register(self._theirs, select.POLLIN)
        # An interrupt is the trainer's; torch's workers are silent about it, too.
        with contextlib.suppress(KeyboardInterrupt), going_first():
            while os.getppid() == self._parent:
                if waiting.poll(_LOOKS_EACH_S * 1000):
                    if os.read(self._theirs, 1) != _BEGIN:
                        break
                    os.close(self._theirs)
                    return
        os._exit(0)


class _Context(context.ForkContext):
    def __init__(self, start: Start) -> None:
        super().__init__()
        self._start = start

    def Process(self, *args: Any, **keywords: Any) -> Any:  # type: ignore[override]
        return self._start.make(*args, **keywords)


class Process(multiprocessing.Process):  # the name is seen by the program
    waits_for: Start

    def run(self) -> None:
        self.waits_for.wait()
        del self.waits_for
        self.__class__ = multiprocessing.Process  # type: ignore[assignment]  # as user code knows it
        self.run()


def forks(multiprocessing_context: Any) -> bool:
    """Whether processes of a loader are forked, and have what is in the program's memory then."""
    if multiprocessing_context is not None:
        return bool(multiprocessing_context.get_start_method() == "fork")
    # To ask for the default would be to decide on it.
    method = multiprocessing.get_start_method(allow_none=True)
    return (method or multiprocessing.get_all_start_methods()[0]) == "fork"
