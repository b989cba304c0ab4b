"""A checkpoint writer that writes nothing, for tests: it checks every generation that it gets from a store, byte by
byte.

python -m tests.checkpoint.programs.store_reader STORE [--stops]
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from hetstream.checkpoint.errors import DamagedSegment
from hetstream.checkpoint.memory.segment import Segment
from hetstream.checkpoint.memory.store_files import WriterStatus
from hetstream.checkpoint.memory.view import StoreView
from tests.checkpoint.programs.store_trainer import check

# The trainer may publish while the slots are looked at.
TRIES_EACH = 3
TRIES = 9


@contextlib.contextmanager
def newest_unpersisted(view: StoreView) -> Iterator[Segment | None]:
    """The newest generation if it is newer than what is persisted, else None. It stays as it is meanwhile."""
    with contextlib.ExitStack() as held:
        yield _hold_newest(view, held)


def _hold_newest(view: StoreView, held: contextlib.ExitStack) -> Segment | None:
    for attempt in range(TRIES):
        persisted = view.persisted
        newer = [one for one in view.generations() if persisted is None or one.header.generation > persisted]
        if not newer:
            return None
        with contextlib.suppress(DamagedSegment):
            return held.enter_context(newer[min(attempt // TRIES_EACH, len(newer) - 1)].open())
    return None


def main() -> None:
    """See the module. Ends when it has read one generation, with `--stops`; else never."""
    stops = "--stops" in sys.argv
    with StoreView(Path(sys.argv[1])) as view:
        view.become_writer()
        if not stops:
            print("reading", flush=True)
        while True:
            with newest_unpersisted(view) as segment:
                if segment:
                    if stops:
                        print("reading", flush=True)
                        os.kill(os.getpid(), signal.SIGSTOP)
                    step = check(segment)
                    view.report(WriterStatus(pid=os.getpid(), persisted=segment.header.generation))
                    if stops:
                        print("read", step, flush=True)
                        return
            select.select([view], [], [], 1)
            view.drain()


if __name__ == "__main__":
    main()
