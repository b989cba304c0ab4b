"""Sizes for which training steps are captured: how long lists become, and how a step runs, with its reason. Pure.

A CUDA graph runs on the sizes with which it was captured, and batches of lists have other ones each time. So lists may
be made longer, up to the next size of a row of few (`padded`), and each size has graphs of its own, if it comes often.
Carried out by `captured.py`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

# Sizes grow by an eighth at the most, and by no less than this.
_LEAST_STEP = 16
_STEPS_OF_A_DOUBLING = 3  # as a power of two
# Steps of a size that run as they are before it is captured: a rare one is not worth the time and the memory.
LEAST_SEEN = 3
# Sizes that are captured: each has a graph for each slot.
MOST_SIZES = 8


def padded(count: int) -> int:
    """The next size: so many values have room in it, and at most an eighth (and 15) more."""
    step = max(_LEAST_STEP, 1 << max(0, count.bit_length() - 1 - _STEPS_OF_A_DOUBLING))
    return -(-count // step) * step


class Act(enum.Enum):
    """What is done with a training step."""

    RUN = "run"
    CAPTURE = "capture"
    REPLAY = "replay"


@dataclass(frozen=True)
class Step:
    """What to do, and why."""

    act: Act
    reason: str


def decide_step(
    *, is_captured: bool, is_warm: bool, has_next: bool, num_seen: int, size_at: int, num_sizes: int, refusal: str
) -> Step:
    """Decide how a step runs.

    Args:
        is_captured: whether there is a graph of these sizes for this slot.
        is_warm: whether libraries and allocators have settled.
        has_next: whether the next batch is where a graph would look for it.
        num_seen: steps of these sizes before.
        size_at: which of the captured sizes these are, in the order in which they came; -1: none of them.
        num_sizes: that are captured.
        refusal: why nothing can be captured; "" if it can.
    """
    if is_captured:
        return Step(Act.REPLAY, "captured")
    if refusal:
        return Step(Act.RUN, refusal)
    if not is_warm:
        return Step(Act.RUN, "the first steps run as they are")
    if not has_next:
        return Step(Act.RUN, "there is no next batch to compute beside it")
    if size_at < 0 and num_seen < LEAST_SEEN:
        return Step(Act.RUN, f"{num_seen} steps had these sizes before, and {LEAST_SEEN} are waited for")
    if size_at < 0 and num_sizes >= MOST_SIZES:
        return Step(Act.RUN, f"{num_sizes} sizes are captured, and no more are")
    return Step(Act.CAPTURE, "these sizes come often")
