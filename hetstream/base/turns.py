"""How long somebody has to wait who asks more often than he may. Pure; the clock is an argument."""

from __future__ import annotations

from collections.abc import Hashable


class Turns:
    """So many turns a second for each owner, and some at once: a bucket of tokens each (a generic cell rate algorithm).

    Whoever asks too often waits, and only he. An owner who asks seldom costs no memory.

    Args:
        per_s: of one owner.
        at_once: of one owner who has not asked for long.
        longest_s: nobody's wait is longer, however many of his turns nobody took in the end.
    """

    def __init__(self, per_s: float, at_once: int, longest_s: float) -> None:
        self._interval_s = 1 / per_s
        self._ahead_s = at_once / per_s
        self._longest_s = longest_s
        self._next: dict[Hashable, float] = {}  # owner -> when his bucket is full again

    def __len__(self) -> int:
        return len(self._next)

    def wait_s(self, owner: Hashable, now_s: float) -> float:
        """Take a turn, and say in how many seconds it comes; 0: now."""
        if owner not in self._next:
            self._next = {key: full_s for key, full_s in self._next.items() if full_s > now_s}
        full_s = max(now_s, self._next.get(owner, now_s)) + self._interval_s
        self._next[owner] = min(full_s, now_s + self._ahead_s + self._longest_s)
        return max(0.0, self._next[owner] - now_s - self._ahead_s)
