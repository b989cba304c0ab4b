"""A saver that writes nothing, for tests: it checks every generation that it gets from a store, byte by byte.

python -m tests.checkpoint.programs.store_reader STORE [--stops]
"""

from __future__ import annotations

import os
import select
import signal
import sys
from pathlib import Path

from checkpoint.store_files import SaverStatus
from checkpoint.view import StoreView
from tests.checkpoint.programs.store_trainer import check


def main() -> None:
    """See the module. Ends when it has read one generation, with `--stops`; else never."""
    stops = "--stops" in sys.argv
    with StoreView(Path(sys.argv[1])) as view:
        view.become_saver()
        if not stops:
            print("reading", flush=True)
        while True:
            with view.newest_unpersisted() as segment:
                if segment:
                    if stops:
                        print("reading", flush=True)
                        os.kill(os.getpid(), signal.SIGSTOP)
                    step = check(segment)
                    view.report(SaverStatus(pid=os.getpid(), persisted=segment.header.generation))
                    if stops:
                        print("read", step, flush=True)
                        return
            select.select([view], [], [], 1)
            view.drain()


if __name__ == "__main__":
    main()
