"""What a checkpointer can be told beside its directory; checked when it is made, all problems at once."""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path

from checkpoint.errors import OptionsError
from checkpoint.formats.part import FORMATS, Format
from checkpoint.store import MIN_SLOTS, SHARED_MEMORY


@dataclass(frozen=True)
class Options:
    """The options that few programs need.

    Attributes:
        num_slots: generations that fit in memory; each takes the size of the state. With 3 a save never waits for the
            saver, with 2 it may.
        allow_pickle: pickle what has no other form, and unpickle it: only for checkpoints of one's own.
        stop_signals: what sets `stopping`; for example what `sbatch --signal` sends, beside SIGTERM.
        check_async: compare checksums of all tensors before and after each `save_async`, to find what the program
            changes too early. Slow.
        shared_memory: where generations are.
        fallback: a directory for generations that do not fit there; None: inside the checkpoint directory.
        format: of the files on disk: `safetensors`, or `torch` for files that torch.load opens as the nested state.
        replica: each rank's saver keeps the newest generation in the memory of another host too, so that a lost node
            costs no step. Takes the memory of two more slots for each rank that a host keeps replicas of. On every rank
            or on none.
        close_timeout_s: how long `close` waits for the saver to bring the newest generation to disk; None: until it is.
        hand_over_timeout_s: how long a job that takes over from another waits for it, once it has asked.
    """

    num_slots: int = 3
    allow_pickle: bool = False
    stop_signals: tuple[int, ...] = (signal.SIGTERM,)
    check_async: bool = False
    shared_memory: Path = SHARED_MEMORY
    fallback: Path | None = None
    format: Format = "safetensors"
    replica: bool = False
    close_timeout_s: float | None = None
    hand_over_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        problems = []
        if self.num_slots < MIN_SLOTS:
            problems.append(f"num_slots={self.num_slots}: at least {MIN_SLOTS}, one beside the last good one")
        unknown = [number for number in self.stop_signals if number not in signal.valid_signals()]
        if unknown:
            problems.append(f"stop_signals: {unknown} are no signals")
        if {signal.SIGKILL, signal.SIGSTOP} & {*self.stop_signals}:
            problems.append("stop_signals: nobody can listen to SIGKILL or SIGSTOP")
        if self.close_timeout_s is not None and self.close_timeout_s < 0:
            problems.append(f"close_timeout_s={self.close_timeout_s}: must not be negative")
        if not self.hand_over_timeout_s > 0:
            problems.append(f"hand_over_timeout_s={self.hand_over_timeout_s}: more than 0")
        if self.format not in FORMATS:
            problems.append(f"format={self.format!r}: one of {', '.join(FORMATS)}")
        if problems:
            raise OptionsError("; ".join(problems))
