"""In which order the steps of several shards come: round robin, a pure function of how long the shards are. Pure.

Used by `loader/shards.py`. Some shards are read at a time, each in a slot of its own. The next step is that of
the shard in the next slot; a shard that has ended leaves its slot to the next shard, or, when there is none, the slot
goes. Who made the steps, and when they came, does not matter, so the order is the same for any number of data workers;
and the state is the position in each shard that is being read, and which shards are left.

The shards of a stream are dealt out among ranks. The positions of all ranks together (`gather`) can be dealt out anew
among any number of them (`deal`), in the order in which their steps would have come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.errors import StateError
from hetstream.mpi_dataworkers.order.sharding import Indices, derive_seed, derive_seeds


@dataclass
class Slot:
    """A shard that is being read: its number and how many of its steps were taken."""

    shard: int
    step: int


class Interleave:
    """Round robin over shards.

    Args:
        shards: numbers of all shards of this pass, in the order in which they begin.
        width: how many are read at a time, at least 1.

    Attributes:
        slots: shards that are being read.
        next_slot: the one whose step is next.
    """

    def __init__(self, shards: Sequence[int], width: int) -> None:
        self._left = as_strides(shards)
        self.slots = [Slot(shard, 0) for shard in take(self._left, width)]
        self.next_slot = 0

    def taken(self, slot_index: int, steps: int = 1) -> None:
        """The shard in this slot gave a step; more than one when some before it were lost."""
        self.next_slot = (slot_index + 1) % len(self.slots)
        self.slots[slot_index].step += steps

    def ended(self, slot_index: int) -> Slot | None:
        """Return the shard in this slot has no more steps: what begins in its place, or None when the slot goes."""
        if self._left:
            begun = self.slots[slot_index] = Slot(take(self._left, 1)[0], 0)
            self.next_slot = (slot_index + 1) % len(self.slots)
            return begun
        del self.slots[slot_index]
        self.next_slot = slot_index % len(self.slots) if self.slots else 0
        return None

    def state(self) -> dict[str, Any]:
        """Position, as plain values."""
        return _state(self.slots, self.next_slot, self._left)

    def load(self, state: Any, num_shards: int) -> None:
        """Continue from a position.

        Args:
            state: of `state` or `deal`.
            num_shards: how many there are, for all ranks.

        Raises:
            StateError: it is none among these shards.
        """
        self.slots, self.next_slot, self._left = _read(state, num_shards)


def gather(states: Sequence[Any], num_shards: int) -> dict[str, Any]:
    """Return the position of several ranks that share one deal, as one.

    Args:
        states: each rank's position, in order of rank; a rank that has nothing left has no slots.
        num_shards: how many there are, for all ranks.

    Raises:
        StateError: they are no positions of one deal.
    """
    read = [_read(state, num_shards) for state in states]
    most_slots = max((len(slots) for slots, _, _ in read), default=0)
    gathered = [
        slots[(next_slot + number) % len(slots)]
        for number in range(most_slots)
        for slots, next_slot, _ in read
        if number < len(slots)
    ]
    left = sorted(shard for _, _, strides in read for stride in strides for shard in stride)
    named = [*left, *(slot.shard for slot in gathered)]
    if len(set(named)) < len(named):
        raise StateError("the states name a shard twice: they are not of the ranks of one run at one moment")
    return _state(gathered, 0, as_strides(left))


def deal(state: Any, num_shards: int, rank: int, num_ranks: int, width: int) -> dict[str, Any]:
    """Return one rank's position of a gathered one: the shards that are being read, in the order of their steps, then
    others.

    Args:
        state: of `gather`.
        num_shards: how many there are, for all ranks.
        rank, num_ranks: whose position; each shard has one rank.
        width: how many shards a rank reads at a time.

    Raises:
        StateError: it is no position among these shards.
    """
    slots, _, left = _read(state, num_shards)
    mine = slots[rank::num_ranks]
    first = (rank - len(slots)) % num_ranks  # who had the fewest goes on
    others = []
    for stride in left:
        others.append(stride[first::num_ranks])
        first = (first - len(stride)) % num_ranks
    others = [stride for stride in others if stride]
    mine += [Slot(shard, 0) for shard in take(others, max(0, width - len(mine)))]
    return _state(mine, 0, others)


def as_strides(shards: Iterable[int]) -> list[range]:
    """Ascending numbers as few ranges: the shards of a rank are evenly spaced for the most part."""
    if isinstance(shards, range):
        return [shards] if shards else []
    strides: list[range] = []
    for shard in shards:
        last = strides[-1] if strides else None
        if last is not None and len(last) == 1 and shard > last[0]:
            strides[-1] = range(last[0], shard + 1, shard - last[0])
        elif last is not None and shard == last[-1] + last.step:
            strides[-1] = range(last[0], shard + 1, last.step)
        else:
            strides.append(range(shard, shard + 1))
    return strides


def take(strides: list[range], count: int) -> list[int]:
    """Take the first numbers out, in place; fewer where there are no more."""
    taken: list[int] = []
    while strides and len(taken) < count:
        wanted = count - len(taken)
        taken += strides[0][:wanted]
        strides[0] = strides[0][wanted:]
        if not strides[0]:
            del strides[0]
    return taken


def _state(slots: list[Slot], next_slot: int, left: list[range]) -> dict[str, Any]:
    return {
        "slots": [[slot.shard, slot.step] for slot in slots],
        "next_slot": next_slot,
        "left": [[stride.start, stride.stop, stride.step] for stride in left],
    }


def _read(state: Any, num_shards: int) -> tuple[list[Slot], int, list[range]]:
    try:
        slots = [Slot(int(shard), int(step)) for shard, step in state["slots"]]
        next_slot = int(state["next_slot"])
        left = [range(int(start), int(stop), int(step)) for start, stop, step in state["left"]]
    except (KeyError, TypeError, ValueError) as error:
        raise StateError(f"this is no position among shards: {error!r}") from error
    known = range(num_shards)
    inside = all(slot.shard in known and slot.step >= 0 for slot in slots) and 0 <= next_slot < max(1, len(slots))
    if not inside or any(not stride or stride[0] not in known or stride[-1] not in known for stride in left):
        raise StateError(f"the state names shards that this loader does not have: {state!r}")
    return slots, next_slot, left


# Which part of a mixture the next element comes from: a function of (seed, epoch, step) and the weights. Pure.
#
# Used by `loader/mixing.py` for batches of loaders and for elements of datasets.

Stop = Literal["first_exhausted", "all_exhausted", "cycle_until_all"]
# Steps that are chosen at once: many for numpy, few for memory.
_PIECE = 1 << 16


class Mixer:
    """Chooses a part for each step by weight.

    Step k draws one number in [0, 1) from (seed, epoch, k) and looks it up among the weights of the parts that are not
    left out. A part that turns out to be exhausted at its step is dealt with by the stop rule, and the step is chosen
    again.

    Args:
        weights: positive, one for each part; only their ratios matter.
        seed: base of the choices.
        epoch: the epoch.
        stop: first_exhausted ends when a part is asked that has nothing left; all_exhausted leaves such a part out and
            ends with the last one, so every element comes once; cycle_until_all starts it again and ends when every
            part has been exhausted once.

    Attributes:
        step: steps taken.
    """

    def __init__(self, weights: Sequence[float], seed: int, epoch: int, stop: Stop) -> None:
        self._weights = [float(weight) for weight in weights]
        self._seed, self._epoch, self._stop = seed, epoch, stop
        self.step = 0
        self._exhausted: set[int] = set()
        self._restarted: set[int] = set()  # at this step
        self._empty: set[int] = set()  # had nothing when it was started again

    def choose(self) -> int | None:
        """Return the part of the next step, or None when the mixture has ended."""
        if (self._stop == "first_exhausted" and self._exhausted) or len(self._exhausted) == len(self._weights):
            return None
        left_out = self._exhausted if self._stop == "all_exhausted" else self._empty
        live = [part for part in range(len(self._weights)) if part not in left_out]
        point = derive_seed(self._seed, self._epoch, self.step) / 2**64 * sum(self._weights[part] for part in live)
        for part in live:
            point -= self._weights[part]
            if point < 0:
                return part
        return live[-1]  # rounding

    def taken(self) -> None:
        """The chosen part gave its element."""
        self.step += 1
        self._restarted.clear()

    def exhausted(self, part: int) -> bool:
        """Return whether to start the chosen part, which had none, again; the step is to be chosen again."""
        self._exhausted.add(part)
        if part in self._restarted:
            self._empty.add(part)
        self._restarted.add(part)
        pending = len(self._exhausted) < len(self._weights)
        return self._stop == "cycle_until_all" and pending and part not in self._empty

    def state(self) -> dict[str, Any]:
        """Position, as plain values."""
        return {"step": self.step, "exhausted": sorted(self._exhausted), "empty": sorted(self._empty)}

    def load(self, state: Any) -> None:
        """Continue from a position.

        Raises:
            StateError: it is no position of such a mixture.
        """
        try:
            step = int(state["step"])
            exhausted, empty = ({int(part) for part in state[key]} for key in ("exhausted", "empty"))
        except (KeyError, TypeError, ValueError) as error:
            raise StateError(f"this is no position in a mixture: {error!r}") from error
        if step < 0 or not empty <= exhausted <= set(range(len(self._weights))):
            raise StateError(f"the state names parts that this mixture does not have: {state!r}")
        self.step, self._exhausted, self._empty = step, exhausted, empty


def choices_of(lengths: Sequence[int], weights: Sequence[float], seed: int, stop: Stop) -> npt.NDArray[np.uint16]:
    """Return what `Mixer` chooses in epoch 0 for parts of these lengths, all at once.

    Args:
        lengths: number of elements of each part.
        weights, seed, stop: as for `Mixer`.

    Returns:
        uint16 array: the part of each element. Element k is the n-th of its part, where n is how often the part was
        chosen before k, modulo the part's length.
    """
    left = np.array(lengths, dtype=np.int64)
    exhausted: set[int] = set()
    live = list(range(len(lengths)))
    pieces: list[npt.NDArray[np.uint16]] = []
    step = 0
    while len(exhausted) < len(lengths) and not (stop == "first_exhausted" and exhausted):
        piece = _choose(np.arange(step, step + _PIECE), [weights[part] for part in live], live, seed)
        stop_at, ended = _PIECE, -1
        for part in live:
            if part not in exhausted:
                places = np.flatnonzero(piece == part)
                if len(places) > left[part] and places[left[part]] < stop_at:
                    stop_at, ended = int(places[left[part]]), part
        pieces.append(piece[:stop_at])
        left -= np.bincount(piece[:stop_at], minlength=len(lengths))
        step += stop_at
        if ended >= 0:
            exhausted.add(ended)
            if stop == "all_exhausted" or lengths[ended] == 0:
                live.remove(ended)
    return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.uint16)


def _choose(steps: Indices, weights: list[float], parts: list[int], seed: int) -> npt.NDArray[np.uint16]:
    """The same arithmetic as `Mixer.choose`, so that the last bit is the same."""
    points = derive_seeds(derive_seed(seed, 0), steps) / 2**64 * sum(weights)
    chosen = np.full(len(steps), parts[-1], dtype=np.uint16)
    open_steps = np.ones(len(steps), dtype=bool)
    for part, weight in zip(parts, weights, strict=True):
        points = points - weight
        chosen[open_steps & (points < 0)] = part
        open_steps &= points >= 0
    return chosen


def check_mixture(num_parts: int, weights: Sequence[float] | None, seed: int, stop: str) -> list[float]:
    """Return the weights of a mixture, checked; all problems at once.

    Raises:
        ConfigError: naming each.
    """
    problems: list[str] = []
    if num_parts < 1:
        problems.append("no parts: there must be at least one dataset or loader")
    chosen = [1.0] * num_parts if weights is None else list(weights)
    if len(chosen) != num_parts:
        problems.append(f"weights={chosen!r}: {num_parts} parts need as many weights")
    if not all(isinstance(weight, int | float) and 0 < weight < float("inf") for weight in chosen):
        problems.append(f"weights={chosen!r}: each must be a positive number")
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        problems.append(f"seed={seed!r}: must be a whole number of at least 0")
    if stop not in get_args(Stop):
        problems.append(f"stop={stop!r}: must be one of {', '.join(get_args(Stop))}")
    if problems:
        raise ConfigError("this mixture cannot be: " + "; ".join(problems))
    return [float(weight) for weight in chosen]
