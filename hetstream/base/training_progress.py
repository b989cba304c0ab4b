"""How far the training loop of this process is and how long it will be, where its framework knows.

Told by the callbacks for frameworks (`checkpoint/integrations`), read by loaders, which send it along with their own
progress. Neither may import the other, so what both speak of is here.
"""

from __future__ import annotations

import math
from typing import Annotated

import msgspec

# A framework's word for "for ever" is a larger number.
_MOST_STEPS = 10**12


class TrainingProgress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Steps of a loader, that is batches of one rank.

    Attributes:
        done: that the training loop has taken, those before a restart among them.
        total: that it takes in all.
    """

    done: Annotated[int, msgspec.Meta(ge=0, le=_MOST_STEPS)]
    total: Annotated[int, msgspec.Meta(ge=1, le=_MOST_STEPS)]


_told: TrainingProgress | None = None


def tell(done: float, total: float) -> None:
    """Say how far this process is. Numbers that say nothing, such as an infinite total, mean that nobody knows."""
    global _told
    is_known = math.isfinite(done) and done >= 0 and 1 <= total <= _MOST_STEPS
    _told = TrainingProgress(min(int(done), int(total)), int(total)) if is_known else None


def forget() -> None:
    """The training loop has ended: what comes now, nobody has planned."""
    global _told
    _told = None


def told() -> TrainingProgress | None:
    """What was said last; None if nobody knows."""
    return _told
