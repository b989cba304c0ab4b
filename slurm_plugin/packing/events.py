"""What the packer says of what it does."""

from __future__ import annotations

from dataclasses import dataclass

from hetstream.slurm_plugin.packing.state import Place


@dataclass(frozen=True)
class PackingEvent:
    """Something that the packer did, saw, or would have done.

    Attributes:
        event: `placed`, `started`, `evicted`, `taken back`, `refused`, `waits`; of guaranteed jobs `granted`, `moved`,
            `upgraded`, `not upgraded`, `held`; `would place`, `would evict` and others where it only observes.
        job: which.
        reason: why.
        place: where; None if that does not matter.
    """

    event: str
    job: str
    reason: str
    place: Place | None = None
