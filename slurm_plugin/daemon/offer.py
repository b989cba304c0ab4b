"""What the daemon answers to those who ask for its last reading: (reading) -> two answers. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from hetstream.hetjob.site.messages import RefuseReading, ShowReading, answer_text
from hetstream.slurm_plugin.client.hidden import hidden_by
from hetstream.slurm_plugin.insight.last_reading import MAX_PACKED_BYTES, pack
from hetstream.slurm_plugin.insight.monitor import Reading


@dataclass(frozen=True, slots=True)
class Offer:
    """The answers of one reading, encoded.

    Attributes:
        to_all: to root and the daemon's own user, who see what the daemon sees.
        to_users: to everybody else.
    """

    to_all: bytes
    to_users: bytes


def offer(reading: Reading) -> Offer:
    """Answer with the reading, or say why not."""
    if reading.observation is None:
        return _refusal(reading.error or "the first reading is not there yet")
    snapshot = reading.observation.snapshot
    packed = pack(snapshot)
    if len(packed) > MAX_PACKED_BYTES:
        return _refusal(f"the reading has {len(packed)} bytes: at most {MAX_PACKED_BYTES} are sent")
    text = answer_text(ShowReading(packed))
    hidden = hidden_by(snapshot.config)
    if not hidden:
        return Offer(text, text)
    return Offer(text, answer_text(RefuseReading(f"{hidden} shows each user another part of the cluster")))


def _refusal(reason: str) -> Offer:
    text = answer_text(RefuseReading(reason))
    return Offer(text, text)
