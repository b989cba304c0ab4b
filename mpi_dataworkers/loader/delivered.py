"""What a loader gets for a step: a batch, a failure to make it, or word that it is to make the step itself."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from hetstream.mpi_dataworkers.wire.messages import BatchFailed, Failure

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.ops.pipeline import MadeStep


class Delivered(msgspec.Struct, frozen=True):
    """One step as the training loop gets it.

    Attributes:
        payload: the batch.
        num_samples: in the batch; 0: all were skipped, and the loop gets nothing for this step.
        num_bytes: of the batch's tensors.
        origin: `local` when it was made in process; else of `wire.delivery_messages.Batch`.
        shift: in a shared stream, how far the step is from the loader's own numbering.
        num_skipped: samples that were skipped.
        left_out: how those of them failed that were tried at this step.
        snapshot: where the shard's reader is after the step; empty if it has not said so.
        held_bytes: memory of all that came for the step.
        wrote: as in `wire.delivery_messages.Batch`.
    """

    payload: Any
    num_samples: int
    num_bytes: int
    origin: str = "made"
    shift: int = 0
    num_skipped: int = 0
    left_out: Sequence[Failure] = ()
    snapshot: bytes = b""
    held_bytes: int = 0
    wrote: str = ""

    @classmethod
    def made_here(cls, batch: Any, made: MadeStep, snapshot: bytes = b"") -> Delivered:
        """A step that was made in process.

        Args:
            batch: of the step, where the program wants it.
            made: how it was made.
            snapshot: where the shard's reader is now; empty without one.
        """
        return cls(
            batch,
            num_samples=made.num_samples,
            num_bytes=0,
            origin="local",
            num_skipped=made.num_skipped,
            left_out=made.left_out,
            snapshot=snapshot,
        )


class LocalFailure:
    """Instead of a batch: user code raised while the loader made the step itself."""

    def __init__(self, error: Exception) -> None:
        # As itself a StopIteration would look like the end of the data.
        self.error = RuntimeError(f"user code raised {error!r}") if isinstance(error, StopIteration) else error


class LocalFallback(msgspec.Struct, frozen=True):
    """No batch will come for this step soon: the loader is to make it in process.

    Attributes:
        step: its number.
        reason: why.
        is_late: data workers are there, and do not deliver it.
    """

    step: int
    reason: str
    is_late: bool = False


class Ended(enum.Enum):
    """Instead of a step."""

    ENDED = "the session has no more steps"
    LOST = "the session has no more steps, because a data worker was lost"


class LostStep:
    """In the place of a step that a lost data worker held, in a session that is read at most once."""


# A step that the training loop can take.
Step = Delivered | BatchFailed | LocalFailure
