"""How a program's saves go: `saving.py` counts, `FlashCheckpointer.stats` gives a copy with what the writer says."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetstream.checkpoint.memory.store_files import WriterStatus
from hetstream.checkpoint.record.generation import Generation


@dataclass
class CheckpointStats:
    """How the saves of one rank go.

    Attributes:
        num_saves: generations that were taken in memory.
        num_failed: saves that were not, such as for want of memory.
        blocked_s: how long the last save held the program up, in seconds.
        copied_s: how much of it was the copy.
        waited_s: how much of it was waiting for a slot.
        allocated_s: how much of it went into memory that later saves find there; the interval does not count it.
        num_bytes: size of the last generation.
        saved: newest generation in memory.
        persisted: newest generation on disk, committed.
        num_persisted: generations that the checkpoint writer has written.
        num_skipped: generations that were replaced in memory before the checkpoint writer came to them.
        persist_s: how long the checkpoint writer took for the last one.
        writer_pid: of the checkpoint writer that said all this; 0 before there was one.
        writer_alive: whether somebody brings generations to disk.
        writer_error: why the checkpoint writer's last try failed; "" if it did not.
        replicated: newest generation that another host keeps.
        replica_error: why the last one did not get there; "" if it did.
        interval: what `should_save` goes by, in words.
    """

    num_saves: int = 0
    num_failed: int = 0
    blocked_s: float = 0.0
    copied_s: float = 0.0
    waited_s: float = 0.0
    allocated_s: float = 0.0
    num_bytes: int = 0
    saved: Generation | None = None
    persisted: Generation | None = None
    num_persisted: int = 0
    num_skipped: int = 0
    persist_s: float = 0.0
    writer_pid: int = 0
    writer_alive: bool = False
    writer_error: str = ""
    replicated: Generation | None = None
    replica_error: str = ""
    interval: str = ""

    def with_writer_status(self, status: WriterStatus | None, *, writer_alive: bool, interval: str) -> CheckpointStats:
        """A copy that has the checkpoint writer's figures, too.

        Args:
            status: None: it has said nothing yet.
            writer_alive: see `CheckpointStats`.
            interval: see `CheckpointStats`.
        """
        status = status or WriterStatus(pid=0)
        return replace(
            self,
            persisted=status.persisted,
            num_persisted=status.num_persisted,
            num_skipped=status.num_skipped,
            persist_s=status.persist_s,
            writer_pid=status.pid,
            writer_alive=writer_alive,
            writer_error=status.error,
            replicated=status.replicated,
            replica_error=status.replica_error,
            interval=interval,
        )
