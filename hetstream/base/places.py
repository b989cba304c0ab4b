"""Who may stay where only so many can: connections of strangers, for one. Pure."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class Places(Generic[T]):
    """So many places. Whoever takes more than others gives way first, so a crowd of one user shuts out itself alone.

    Args:
        most: places in all.
        most_each: of one owner; None: all.
    """

    def __init__(self, most: int, most_each: int | None = None) -> None:
        self._most = most
        self._most_each = most if most_each is None else most_each
        self._owners: dict[T, Hashable] = {}
        self._taken: dict[Hashable, dict[T, None]] = {}  # of each owner, in the order of their coming

    def __len__(self) -> int:
        return len(self._owners)

    def __iter__(self) -> Iterator[T]:
        return iter(self._owners)

    def enter(self, key: T, owner: Hashable) -> None:
        """It takes a place, whether there is one or not."""
        self._owners[key] = owner
        self._taken.setdefault(owner, {})[key] = None

    def leave(self, key: T) -> None:
        """It is gone. A second time does nothing."""
        if key not in self._owners:
            return
        owner = self._owners.pop(key)
        del self._taken[owner][key]
        if not self._taken[owner]:
            del self._taken[owner]

    def one_too_many(self) -> T | None:
        """Who is to leave next, the oldest of the owner with the most; None while there is room for all."""
        most = max(self._taken.values(), key=len, default=None)
        if most is None or (len(self._owners) <= self._most and len(most) <= self._most_each):
            return None
        return next(iter(most))
