"""What happens to the writer, a rank's checkpoint writer, in the moments in which it starts, ends, or is not there.

Called by a rank of the table of pairs: while it gets ready, before the save of the step at which it happens, and before
it dies.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from hetstream import FlashCheckpointer
from hetstream.checkpoint.flash.storage import WriterLink

STARTS = "SIGTERM to the writer as it starts, SIGKILL to all ranks"
ENDS = "SIGTERM to the writer, SIGKILL to all ranks as it ends"
IS_GONE = "SIGKILL to the writer during a save, then to all ranks"
EVENTS = (STARTS, ENDS, IS_GONE)
_PATIENCE_S = 60.0


def arrange(event: str, out: Path, rank: int) -> None:
    """Before there is a checkpointer: no writer starts by itself, or each stops at its last look."""
    if event == STARTS:
        WriterLink.start = lambda link, *, job_has_writer: None  # type: ignore[method-assign]
    elif event == ENDS:
        os.environ["HETSTREAM_CKPT_FAULT"] = f"ending.looked:1:stop:{_marker(out, rank)}"


def before_save(event: str, checkpointer: FlashCheckpointer) -> None:
    """The writer is killed, and the program, which looks for it when a save begins, has just looked."""
    if event == IS_GONE:
        process = checkpointer._storage.writer.process
        assert process is not None
        process.kill()
        process.wait(_PATIENCE_S)
        checkpointer._storage.writer.check = lambda **_: None  # type: ignore[method-assign]


def stop_at_its_end(out: Path, rank: int, checkpointer: FlashCheckpointer) -> None:
    """Tell the writer to end, and wait until it has looked for the last time and stopped."""
    assert checkpointer.wait(_PATIENCE_S)
    process = checkpointer._storage.writer.process
    assert process is not None
    process.terminate()
    deadline_s = time.monotonic() + _PATIENCE_S
    while not _marker(out, rank).exists():
        assert time.monotonic() < deadline_s, "the writer was told to end, and does not"
        time.sleep(0.005)


def before_death(event: str, checkpointer: FlashCheckpointer) -> None:
    """The rank is about to be killed: the writer starts, and is told to end; or it ends."""
    if event == STARTS:
        checkpointer._storage.writer._spawn()
    process = checkpointer._storage.writer.process
    if event in (STARTS, ENDS):
        assert process is not None
        process.send_signal(signal.SIGTERM if event == STARTS else signal.SIGCONT)


def _marker(out: Path, rank: int) -> Path:
    return out.with_suffix(f".{rank}.stopped")
