"""What a loader gets for a step: a batch, the failure to make it, or word that it is to make the step itself."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any

import msgspec

from hetstream.mpi_dataworkers.wire.messages import Failure


class Delivered(msgspec.Struct, frozen=True):
    """One step as the training loop gets it: a batch, or the failure to make it.

    The fields after the first are the batch's; `origin` is `local` when it was made in process. `num_bytes` are of its
    tensors, `held_bytes` all that came for it. Without samples it is a step to go on without.
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


class LocalFallback(msgspec.Struct, frozen=True):
    """No batch will come for this step soon: the loader is to make it in process."""

    step: int
    reason: str


class Ended(enum.Enum):
    """Instead of a step."""

    ENDED = "the session has no more steps"
    LOST = "the session has no more steps, because a data worker was lost"


class LostStep:
    """In the place of a step that a lost data worker held, in a session that is read at most once."""
