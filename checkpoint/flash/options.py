"""What a checkpointer can be told beside its directory; checked when it is made, all problems at once."""

from __future__ import annotations

import operator
import os
import signal
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, SupportsIndex

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.memory.store import MIN_SLOTS
from hetstream.checkpoint.memory.store_files import SHARED_MEMORY, WriterStatus
from hetstream.checkpoint.policy import Adaptive, Every, Retention
from hetstream.checkpoint.record.layout import MAX_NUMBER, Generation
from hetstream.checkpoint.record.structure import RNG


@dataclass(frozen=True)
class CheckpointOptions:
    """The options that few programs need.

    Attributes:
        num_slots: generations that fit in memory; each takes the size of the state. With 3 a save never waits for the
            checkpoint writer, with 2 it may.
        allow_pickle: pickle what has no other form, and unpickle it: only for checkpoints of one's own.
        stop_signals: what sets `stopping`; for example what `sbatch --signal` sends, beside SIGTERM.
        check_async: compare checksums of all tensors before and after each `save_async`, to find what the program
            changes too early. Slow.
        shared_memory: where generations are.
        fallback: a directory for generations that do not fit there; None: inside the checkpoint directory.
        replica: each rank's checkpoint writer keeps the newest generation in the memory of another host too, so that a
            lost node costs no step. Takes the memory of two more slots for each rank that a host keeps replicas of. On
            every rank or on none.
        close_timeout_s: how long `close` waits for the checkpoint writer to bring the newest generation to disk; None:
            until it is there. For a job's checkpoint writer, which outlives the program, None means a minute.
        hand_over_timeout_s: how long a job that takes over from another waits for it, once it has asked.
    """

    num_slots: int = 3
    allow_pickle: bool = False
    stop_signals: tuple[int, ...] = (signal.SIGTERM,)
    check_async: bool = False
    shared_memory: Path = SHARED_MEMORY
    fallback: Path | None = None
    replica: bool = False
    close_timeout_s: float | None = None
    hand_over_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        problems = []
        if not isinstance(self.num_slots, int) or self.num_slots < MIN_SLOTS:
            problems.append(f"num_slots={self.num_slots!r}: at least {MIN_SLOTS}, one beside the last good one")
        if not isinstance(self.stop_signals, Collection):
            problems.append(f"stop_signals={self.stop_signals!r}: a tuple of signals, such as (signal.SIGTERM,)")
        else:
            unknown = [number for number in self.stop_signals if number not in signal.valid_signals()]
            if unknown:
                problems.append(f"stop_signals: {unknown} are no signals")
            if {signal.SIGKILL, signal.SIGSTOP} & {*self.stop_signals}:
                problems.append("stop_signals: nobody can listen to SIGKILL or SIGSTOP")
        for name in ("shared_memory", "fallback"):
            path = getattr(self, name)
            if isinstance(path, str | os.PathLike):
                object.__setattr__(self, name, Path(path))
            elif path is not None or name == "shared_memory":
                problems.append(f"{name}={path!r}: a directory")
        if self.close_timeout_s is not None and not _is_number(self.close_timeout_s):
            problems.append(f"close_timeout_s={self.close_timeout_s!r}: seconds, not negative")
        if not _is_number(self.hand_over_timeout_s) or self.hand_over_timeout_s == 0:
            problems.append(f"hand_over_timeout_s={self.hand_over_timeout_s!r}: seconds, more than 0")
        if problems:
            raise OptionsError("; ".join(problems))


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and value >= 0


def check_arguments(shared: Any, interval: Any, keep: Any, ranks: Any, options: Any) -> None:
    """Refuse what a checkpointer cannot be made with, all at once. Some of it would show only in the checkpoint writer.

    Args:
        shared: of `FlashCheckpointer`.
        interval: of `FlashCheckpointer`.
        keep: of `FlashCheckpointer`.
        ranks: of `FlashCheckpointer`.
        options: of `FlashCheckpointer`.

    Raises:
        OptionsError: one breaks its rule.
    """
    problems = []
    are_keys = isinstance(shared, Collection) and all(isinstance(key, str) for key in shared)
    if isinstance(shared, str) or not are_keys or RNG in shared:
        problems.append(f"shared={shared!r}: a collection of top-level keys, without {RNG!r}")
    if not isinstance(interval, int | Every | Adaptive | None) or isinstance(interval, bool):
        problems.append(f"interval={interval!r}: a number of steps, Every(seconds=...), or Adaptive(...)")
    if not isinstance(keep, Retention | None):
        problems.append(f"keep={keep!r}: a rule, such as Retention(keep_last=3)")
    if ranks is not None and not all(hasattr(ranks, name) for name in ("rank", "world_size", "all_gather")):
        problems.append(f"ranks={ranks!r}: an object with rank, world_size and all_gather")
    if not isinstance(options, CheckpointOptions):
        problems.append(f"options={options!r}: CheckpointOptions(...), such as CheckpointOptions(num_slots=2)")
    if problems:
        raise OptionsError("; ".join(problems))


def checked_step(step: int) -> int:
    """Return a step as Python's number.

    Raises:
        OptionsError: it is none.
    """
    if not isinstance(step, SupportsIndex) or not 0 <= operator.index(step) <= MAX_NUMBER:
        raise OptionsError(f"step={step!r}: a number of steps, from 0 to {MAX_NUMBER}")
    return operator.index(step)


def requested_step(step: int | None) -> int | None:
    """Return a step to restore as Python's number; None: the newest.

    Raises:
        OptionsError: it is none.
    """
    return None if step is None else checked_step(step)


# How a program's saves go: `saving.py` counts, `FlashCheckpointer.stats` gives a copy with what the writer says.


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
        """Return a copy that has the checkpoint writer's figures, too.

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
