"""When a GPU that had no memory for a batch is tried again: (what happened, now) -> Try with its reason. Pure.

    shortage = fell_short(shortage, now)  # the GPU had no memory: data workers compute the graph
    if next_try(shortage, now).is_due:
        shortage = came_back(shortage, now) if there_is_memory else fell_short(shortage, now)

Both ways back and forth have batches made again, so tries become rarer and end. `corun.py` and
`loader/feature_parts.py` carry it out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

# After a shortage it is tried again after this long, then twice as long, and so on.
RETRY_S, LONGEST_RETRY_S = 10.0, 600.0
# So many shortages and tries in vain in a row, in somewhat more than an hour, and the GPU is not tried again.
MOST_IN_A_ROW = 12
# A shortage after this long on the GPU is the first one again.
STEADY_S = 600.0


@dataclass(frozen=True)
class Shortage:
    """What is known of the GPU's memory.

    Attributes:
        is_short: whether data workers compute the graph now.
        num_in_a_row: shortages and tries in vain.
        changed_at: when it was last found short, or came back.
    """

    is_short: bool = False
    num_in_a_row: int = 0
    changed_at: float = 0.0


@dataclass(frozen=True)
class Try:
    """Whether to look for memory now.

    Attributes:
        reason: one line for the user.
    """

    is_due: bool
    reason: str


def fell_short(shortage: Shortage, now: float) -> Shortage:
    """There was no memory for a batch, or none when it was tried again."""
    is_new = not shortage.is_short and now - shortage.changed_at >= STEADY_S
    return Shortage(True, 1 if is_new else shortage.num_in_a_row + 1, now)


def came_back(shortage: Shortage, now: float) -> Shortage:
    """There is memory: the GPU computes the graph again."""
    return replace(shortage, is_short=False, changed_at=now)


def next_try(shortage: Shortage, now: float) -> Try:
    """Whether the GPU is looked at now."""
    if not shortage.is_short:
        return Try(False, "the GPU has memory")
    if shortage.num_in_a_row > MOST_IN_A_ROW:
        return Try(False, f"the GPU had no memory {shortage.num_in_a_row} times in a row, and is not tried again")
    wait_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** (shortage.num_in_a_row - 1))
    left_s = shortage.changed_at + wait_s - now
    if left_s > 0:
        return Try(False, f"the GPU is tried again in {left_s:.0f} s")
    return Try(True, f"the GPU is tried again {wait_s:.0f} s after it had no memory")
