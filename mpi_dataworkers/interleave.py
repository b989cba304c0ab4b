"""In which order the steps of several shards come: round robin, a pure function of how long the shards are. Pure.

Used by `loader/shards.py`. Some shards are read at a time, each in a place of its own. A turn takes one step of the
shard in the next place; a shard that has ended leaves its place to the next shard, or, when there is none, the place is
left out. Who made the steps, and when they came, does not matter, so the order is the same for any number of data
workers; and the state is the position in each shard that is being read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpi_dataworkers.errors import StateError


@dataclass
class Place:
    """A shard that is being read: its number and how many of its steps were taken."""

    shard: int
    step: int


class Interleave:
    """Round robin over shards.

    Args:
        shards: numbers of all shards of this pass, in the order in which they begin.
        width: how many are read at a time, at least 1.

    Attributes:
        places: shards that are being read.
        turn: the place whose step is next.
    """

    def __init__(self, shards: Sequence[int], width: int) -> None:
        self._shards = shards
        self._begun = min(width, len(shards))
        self.places = [Place(shard, 0) for shard in shards[: self._begun]]
        self.turn = 0

    def taken(self, place: int, steps: int = 1) -> None:
        """The shard in this place gave a step; more than one when some before it were lost."""
        self.places[place].step += steps
        self.turn = (place + 1) % len(self.places)

    def ended(self, place: int) -> Place | None:
        """The shard in this place has no more steps: returns what begins in its place, or None when it is left out."""
        if self._begun < len(self._shards):
            begun = Place(self._shards[self._begun], 0)
            self._begun += 1
            self.places[place] = begun
            self.turn = (place + 1) % len(self.places)
            return begun
        del self.places[place]
        self.turn = place % len(self.places) if self.places else 0
        return None

    def state(self) -> dict[str, Any]:
        """Position, as plain values."""
        places = [[place.shard, place.step] for place in self.places]
        return {"places": places, "turn": self.turn, "begun": self._begun}

    def load(self, state: Any) -> None:
        """Continue from a position.

        Raises:
            StateError: it is none of these shards.
        """
        try:
            places = [Place(int(shard), int(step)) for shard, step in state["places"]]
            turn, begun = int(state["turn"]), int(state["begun"])
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is no position among shards: {error!r}") from error
        known = set(self._shards[:begun])
        inside = 0 <= begun <= len(self._shards) and 0 <= turn < max(1, len(places))
        if not inside or any(place.shard not in known or place.step < 0 for place in places):
            raise StateError(f"the state names shards that this loader does not have: {state!r}")
        self.places, self.turn, self._begun = places, turn, begun
