"""Passes of streams wait for data workers, also short ones: a plugin of pytest, or `waiting.py PROGRAM [ARGUMENT ...]`.

A stream changes over to data workers once they are where the program is, which a pass of a few milliseconds does not
live to see. Here the program waits for them after the first batch of each worker, and at the end of a pass that had no
more. So data workers make a step, or it is compared with theirs.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
from pathlib import Path
from typing import Any

_LIMIT_S = 60.0


def _have_streams_wait() -> None:
    from hetstream.mpi_dataworkers.loader import unmodified_streams as streams

    kind: Any = streams.StreamedStreamIter
    next_data, end_streaming = kind._next_data, kind._end_streaming

    def is_compared(iterator: Any) -> bool:
        return iterator._streamed is not None and iterator._plain is not None

    def _next_data(self: Any) -> Any:
        deadline = time.monotonic() + _LIMIT_S
        with contextlib.suppress(streams.Differs):  # it is found again below
            while is_compared(self) and self._num_given >= self._num_to_compare and time.monotonic() < deadline:
                self._look()
                time.sleep(0.002)
        return next_data(self)

    def _end_streaming(self: Any) -> None:
        if is_compared(self) and self._is_over and self._kept.connection is not None:
            self._come_to_the_end()
        end_streaming(self)

    kind._next_data, kind._end_streaming = _next_data, _end_streaming
    streams._PAUSE_S = _LIMIT_S
    streams._DEEPER, streams._LEAST_COMPARED, streams._FIRST_OF_EACH = 0.0, 0, 1


_have_streams_wait()

if __name__ == "__main__":
    program, *arguments = sys.argv[1:]
    sys.argv = [program, *arguments]
    sys.path[0] = str(Path(program).parent)
    runpy.run_path(program, run_name="__main__")
