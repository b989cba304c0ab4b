"""Who has to leave when more callers wait to be known than there is room for. Pure; used by the service."""

from __future__ import annotations

from collections import Counter
from typing import Generic, TypeVar

T = TypeVar("T")


class UnknownCallers(Generic[T]):
    """Callers that have not proved the key yet, in the order in which they came.

    A newcomer is always taken in. So a crowd that says nothing keeps out nobody who has the key: who comes from another
    address than the crowd never leaves for it, and who comes from the same one leaves only if `room` others come
    between its two messages.

    Args:
        room: how many may wait.
    """

    def __init__(self, room: int) -> None:
        self._room = room
        self._waiting: list[tuple[str, T]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, address: str, caller: T) -> T | None:
        """Take a caller in.

        Returns:
            Who has to leave for it: the oldest of an address that has the most; None: nobody.
        """
        self._waiting.append((address, caller))
        if len(self._waiting) <= self._room:
            return None
        counts = Counter(address for address, _ in self._waiting)
        most = max(counts.values())
        leaving = next(waiting for waiting in self._waiting if counts[waiting[0]] == most)
        self._waiting.remove(leaving)
        return leaving[1]

    def discard(self, caller: T) -> None:
        """A caller is known now, or has gone. A second time does nothing."""
        self._waiting = [waiting for waiting in self._waiting if waiting[1] is not caller]
