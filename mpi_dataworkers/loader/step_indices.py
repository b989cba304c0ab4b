"""Which samples each step of one pass has, as the loader sees it. No I/O.

A planned order is a function of (seed, epoch) that data workers compute themselves; a listed order comes from the
program's own sampler and is drawn as it is needed.
"""

from __future__ import annotations

import enum
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetstream.mpi_dataworkers.errors import PipelineError, StateError
from hetstream.mpi_dataworkers.handlers import of_handler
from hetstream.mpi_dataworkers.ops.index_form import INTS, IndexForm, form_of
from hetstream.mpi_dataworkers.ops.origins import PassSeeds
from hetstream.mpi_dataworkers.order.bucketing import BucketPlan, order_of
from hetstream.mpi_dataworkers.order.sharding import EpochPlan, Indices, SampleSeeds
from hetstream.mpi_dataworkers.wire.messages import ListedOrder

_LARGEST_INDEX = 2**63 - 1
# Of a pass that torch's own workers are to go on with, so many steps at most are made again by them before.
_MOST_MADE_AGAIN = 256
# Without another bound, a listed order is drawn from the program's sampler this many steps beyond the window.
_LIST_AHEAD_STEPS = 64


@dataclass(frozen=True)
class LookAhead:
    """How far a program's sampler is drawn ahead of the training loop.

    Attributes:
        num_steps: as far as torch's own loader draws it, `prefetch_factor * num_workers`; None for no bound but the
            window.
        num_unseen: from the first one on, so many steps of the pass can be drawn at any time, and nobody can tell.
    """

    num_steps: int | None = None
    num_unseen: int = 0

    def goal(self, position: int, window: int, taking: bool, has_begun: bool, as_torch: bool = False) -> int:
        """Up to which step to draw.

        Args:
            position: the training loop's next step.
            window: steps that may be under way.
            taking: the training loop asks for that step now.
            has_begun: a step of the pass was drawn.
            as_torch: no further than torch's own loader, though nobody sees it of the sampler: see `ComparedPass`.
        """
        beyond_window = position + window + _LIST_AHEAD_STEPS
        if self.num_steps is None:
            return beyond_window
        torchs = position + self.num_steps + taking
        if as_torch:
            return torchs
        return max(torchs, min(self.num_unseen, beyond_window)) if has_begun or torchs > 0 else 0


def steps_to_gather(goal: int, position: int) -> int:
    """Steps that are drawn before they are sent together: each message takes time from the training loop."""
    return min(32, max(1, (goal - position) // 4))


class PlannedSteps:
    """Steps of an order that is a function of (seed, epoch)."""

    def __init__(self, plan: EpochPlan | BucketPlan, rank: int) -> None:
        self.num_steps = plan.num_steps
        self.wire_order = order_of(plan, rank)
        self._plan = plan

    @property
    def num_known(self) -> int:
        """Steps whose samples are known now."""
        return self.num_steps

    def indices(self, step: int) -> Indices | None:
        """Sample indices of a step, or None after the last."""
        return self._plan.indices(step, self.wire_order.rank) if step < self.num_steps else None

    def seeds(self, step: int, indices: Indices, seeds: PassSeeds) -> SampleSeeds:  # noqa: ARG002, see ListedSteps
        """Seeds of the step's samples."""
        return seeds.of_step(indices)

    def form(self, step: int) -> IndexForm:  # noqa: ARG002, see ListedSteps
        """In which form the dataset is asked for a step's samples."""
        return INTS

    def forget(self, step: int) -> None:
        """Nothing is kept."""

    def taken(self, step: int) -> PlannedSteps:  # noqa: ARG002, see ListedSteps
        """Says of a step that was taken what it said before."""
        return self


@dataclass(frozen=True)
class TakenStep:
    """A step of a listed order that the training loop has taken, so that it can be made once more."""

    taken: Indices
    taken_form: IndexForm

    def indices(self, step: int) -> Indices:  # noqa: ARG002, see ListedSteps
        """Its sample indices."""
        return self.taken

    def seeds(self, step: int, indices: Indices, seeds: PassSeeds) -> SampleSeeds:
        """Seeds of its samples."""
        return seeds.of_step(indices, step)

    def form(self, step: int) -> IndexForm:  # noqa: ARG002, see ListedSteps
        """In which form the sampler gave its indices."""
        return self.taken_form


class ListedSteps:
    """Steps as the program's own sampler gives them; drawn as they are needed.

    Args:
        index_sampler: what gives the indices of each step.
        batched: a step is a list of them; else it is one, for which the dataset may be given a list.
        beginning: how the sampler began, for a later resume.

    Attributes:
        has_raised: the sampler has ended with an error.
    """

    def __init__(self, index_sampler: Iterable[Any], batched: bool, beginning: str = "") -> None:
        self.num_steps = -1
        self.wire_order = ListedOrder(batched)
        self.beginning, self.has_raised = beginning, False
        self._iterator = iter(index_sampler)
        self._given: list[Any] = []  # by the sampler, for the next step
        self._batched = batched
        self._drawn: dict[int, Indices] = {}
        self._forms: dict[int, IndexForm] = {}
        self._digests = {0: b""}  # of all that was drawn before a step
        self._next = 0
        self._last: tuple[int, TakenStep] | None = None

    @property
    def num_known(self) -> int:
        """Steps that were drawn."""
        return self._next

    def indices(self, step: int) -> Indices | None:
        """Sample indices of a step, or None after the last.

        Raises:
            PipelineError: the sampler gives something else than whole numbers.
        """
        while self._next <= step and self.num_steps < 0:
            if not self._given:
                try:
                    self._given.extend(itertools.islice(self._iterator, 1))
                except Exception as error:
                    self.has_raised = not of_handler(error)
                    raise
            if not self._given:
                self.num_steps = self._next
                break
            drawn = self._given[0]
            indices = _as_indices(drawn, self._batched)
            if indices is None:
                self._end_at(drawn)
                break
            self._drawn[self._next] = indices
            self._forms[self._next] = form_of(drawn, self._batched)
            chained = hashlib.blake2b(self._digests[self._next], digest_size=16)
            chained.update(indices.tobytes())
            self._digests[self._next + 1] = chained.digest()
            self._next, self._given = self._next + 1, []  # at once: a signal's handler may raise anywhere
        return self._drawn.get(step)

    def _end_at(self, drawn: Any) -> None:
        raise PipelineError(
            f"{self._refusal(drawn)} Keep this loader local (num_workers of torch), or map keys to numbers in the "
            "dataset."
        )

    def _refusal(self, drawn: Any) -> str:
        return f"the sampler gave {drawn!r} for step {self._next}; data workers need whole-number indices."

    def seeds(self, step: int, indices: Indices, seeds: PassSeeds) -> SampleSeeds:
        """Seeds of the step's samples."""
        return seeds.of_step(indices, step)

    def form(self, step: int) -> IndexForm:
        """In which form the sampler gave a step's indices."""
        return self._forms[step]

    def forget(self, step: int) -> None:
        """Drop a step that the training loop has taken, but for `taken`."""
        if step in self._drawn:
            self._last = step, TakenStep(self._drawn[step], self._forms[step])
            self._drawn.pop(step)
        self._forms.pop(step, None)
        self._digests.pop(step, None)

    def taken(self, step: int) -> TakenStep | None:
        """What is known of a step that was taken, if it is the last one."""
        return self._last[1] if self._last is not None and self._last[0] == step else None

    def drawn(self, step: int) -> str:
        """Digest of the indices of all steps before this one, the training loop's next."""
        return self._digests[step].hex()

    def skip(self, num_steps: int, drawn: str) -> None:
        """Draw the steps that were taken before a resume.

        Raises:
            StateError: they are others than those that were taken.
        """
        for step in range(num_steps):
            if self.indices(step) is None:
                raise StateError(f"the sampler ends at step {step}, the state was saved at step {num_steps}")
            self.forget(step)
        if num_steps and self.drawn(num_steps) != drawn:
            raise StateError(
                f"the sampler gave other samples for the first {num_steps} steps when the state was saved: its data, "
                "its seed or its epoch differ (is set_epoch called as it was then?), or it has no state and draws "
                "anew each time. Use shuffle=True with seed=, or a sampler with set_epoch, or with state_dict and "
                "load_state_dict"
            )


def _as_indices(drawn: Any, batched: bool) -> Indices | None:
    """A step's sample indices, or None where they are no whole numbers, or none at all.

    Unbatched, a list is one index: the dataset is asked for all its samples at once. It has the shape (1, n).
    """
    is_one = not batched and type(drawn) is list
    try:
        array = np.asarray(drawn if batched or is_one else [drawn])
    except ValueError:  # lists of different lengths
        return None
    if array.dtype.kind not in "iu" or array.ndim != 1 or array.size == 0:
        return None
    if array.dtype.kind == "u" and int(array.max()) > _LARGEST_INDEX:
        return None
    given = drawn if batched or is_one else [drawn]
    if type(given) in (list, tuple) and type(given[0]) is not int and any(map(_says_more, given)):
        return None
    indices = array.astype(np.int64)
    return indices[np.newaxis] if is_one else indices


def _says_more(index: Any) -> bool:
    """Whether an index is a whole number that has attributes of its own, which would not travel with it."""
    return isinstance(index, int) and bool(getattr(index, "__dict__", None)) and not isinstance(index, enum.Enum)


class PartlyListedSteps(ListedSteps):
    """A listed pass that ends before the first step which data workers cannot make.

    Attributes:
        unlisted: what the sampler gives from that step on; None while there is no such step.
        reason: why they cannot.
    """

    unlisted: Iterator[Any] | None = None
    reason = ""

    def __init__(self, index_sampler: Iterable[Any], batched: bool) -> None:
        super().__init__(index_sampler, batched)
        self._taken: list[Any] = []  # what the sampler gave for the first steps

    def forget(self, step: int) -> None:
        """Drop a step that the training loop has taken, but for the first ones and `taken`."""
        if step == len(self._taken) < _MOST_MADE_AGAIN and step in self._drawn:
            self._taken.append(self._forms[step].given(self._drawn[step]))
        super().forget(step)

    def _end_at(self, drawn: Any) -> None:
        self.reason = self._refusal(drawn).rstrip(".")
        self.unlisted = itertools.chain([drawn], self._iterator)
        self.num_steps = self._next

    def from_step(self, step: int) -> Iterator[Any]:
        """What the sampler gives from a step on that was not taken: what was drawn already, and then the others."""
        drawn = [self._forms[number].given(self._drawn[number]) for number in range(step, self._next)]
        return (
            itertools.chain(drawn, self._given, self._iterator)
            if self.unlisted is None
            else itertools.chain(drawn, self.unlisted)
        )

    def steps_before(self, step: int) -> list[Any]:
        """What the sampler gave for all steps before this one, which were taken; empty where that is not kept."""
        return self._taken[:step] if step <= len(self._taken) else []


Order = PlannedSteps | ListedSteps
