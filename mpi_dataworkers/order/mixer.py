"""Which part of a mixture the next element comes from: a function of (seed, epoch, step) and the weights. Pure.

Used by `loader/mixing.py` for batches of loaders and for elements of datasets.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.errors import StateError
from hetstream.mpi_dataworkers.order.sharding import Indices, derive_seed, derive_seeds

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
        """The part of the next step, or None when the mixture has ended."""
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
        """The chosen part had none: returns whether to start it again; the step is to be chosen again."""
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
    """What `Mixer` chooses in epoch 0 for parts of these lengths, all at once.

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
    """The weights of a mixture, checked; all problems at once.

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
