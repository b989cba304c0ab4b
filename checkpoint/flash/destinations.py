"""What `restore` and `load` do with a generation: bring it into a state, or give it as plain values."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

from hetstream.base.text import count_words
from hetstream.checkpoint.flash import rng
from hetstream.checkpoint.flash.candidates import RestoreCandidates
from hetstream.checkpoint.flash.sources import StoredPart, owned
from hetstream.checkpoint.flash.state_comparison import StateComparison
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Choice
from hetstream.checkpoint.record.structure import RNG
from hetstream.checkpoint.tensors.leaves import Leaves

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A record as plain values.

    Attributes:
        step: of training.
        attempt: the start of the job that saved it.
        state: what `save` was given; objects are what their `state_dict` gave.
        sources: by rank, `memory`, `replica` or `disk`.
        notes: what was newer and could not be used, and why.
    """

    step: int
    attempt: int
    state: dict[str, Any]
    sources: Sequence[str]
    notes: Sequence[str]


@dataclass(frozen=True)
class RestoreResult:
    """What became of a restore.

    Attributes:
        generation: that was restored; None: there was nothing to restore.
        keeps_leaves: whether the state has the tensors that it had before, with other values.
    """

    generation: Generation | None = None
    keeps_leaves: bool = True

    @property
    def step(self) -> int | None:
        """Of training; None: there was nothing to restore."""
        return self.generation.step if self.generation else None


@dataclass(frozen=True)
class RestoreRequest:
    """How something is to be restored.

    Attributes:
        step: which; None: the newest.
        strict: every key and tensor must be on both sides.
        allow_pickle: unpickle what was pickled.
        only_given: keys of the checkpoint that the state has not are left out; with the states of the generators.
    """

    step: int | None = None
    strict: bool = True
    allow_pickle: bool = False
    only_given: bool = False


def restore_state(
    candidates: RestoreCandidates,
    state: MutableMapping[str, Any],
    leaves: Callable[[], Leaves],
    request: RestoreRequest,
) -> RestoreResult:
    """Bring a generation into a state, in place, and set the generators.

    Args:
        candidates: finds it.
        state: as it is given to `save`.
        leaves: gives the same taken apart; called once there is something to restore.
        request: which, and how.

    Raises:
        StateMismatch: the layout of the state has changed. Nothing is restored.
        NoCheckpoint: there are checkpoints on disk, and none of them can be used; or there is none of this step.
    """
    destination = _StateDestination(state, leaves, request, candidates.ranks.rank)
    choice = candidates.restore_into(destination, request.step)
    if choice is None:
        return RestoreResult()
    _log.info("restored %s from %s", choice.generation, ", ".join(sorted({*choice.sources})))
    return RestoreResult(choice.generation, destination.keeps_leaves)


class _StateDestination:
    """Brings a generation into a state.

    Args:
        state: as it is given to `save`.
        leaves: gives the same taken apart.
        request: how.
        rank: of this process.

    Attributes:
        keeps_leaves: as in `RestoreResult`, of what was prepared last.
    """

    def __init__(
        self, state: MutableMapping[str, Any], leaves: Callable[[], Leaves], request: RestoreRequest, rank: int
    ) -> None:
        self._state = state
        self._leaves = functools.cache(leaves)
        self._request = request
        self._rank = rank
        self._prepared: tuple[StateComparison, Any, Choice] | None = None
        self.keeps_leaves = True

    def begin(self) -> None:
        """Take the state apart."""
        self._leaves()

    def prepare(self, parts: list[StoredPart], choice: Choice) -> None:
        """Compare what was saved with the state.

        Raises:
            StateMismatch: they differ, and may not.
        """
        self._prepared = None  # memory of one that another rank could not use is given back
        state = self._state
        comparison = StateComparison(self._leaves().states)
        saved: dict[str, Any] = {}
        all_alike: set[str] = set()
        for part in parts:
            alike = comparison.take_alike(state, self._leaves(), part)
            without = alike | ({*part.record.tree} - {*state} if self._request.only_given else set())
            saved.update(part.saved(allow_pickle=self._request.allow_pickle, without=without))
            all_alike |= alike
        generators = saved.pop(RNG, None)
        comparison.compare(state, saved, all_alike)
        mismatch = comparison.mismatch()
        if mismatch and self._request.strict:
            raise mismatch
        self._prepared = comparison, generators, choice
        self.keeps_leaves = all_alike == {*state}

    def apply(self) -> None:
        """Write all that fits, and set the generators."""
        assert self._prepared is not None
        comparison, generators, choice = self._prepared
        self._prepared = None  # it refers to memory that is given back
        comparison.write(strict=self._request.strict)
        for difference in comparison.differences:
            _log.warning("not restored: %s", difference)
        _restore_generators(generators, choice, self._rank)


def load_values(candidates: RestoreCandidates, request: RestoreRequest) -> LoadedCheckpoint | None:
    """Return a generation as plain values; None if there is none.

    Args:
        candidates: finds it.
        request: which.

    Raises:
        NoCheckpoint: there are checkpoints on disk, and none of them can be used; or there is none of this step.
    """
    destination = _ValuesDestination(request)
    candidates.restore_into(destination, request.step)
    return destination.loaded


class _ValuesDestination:
    """Gives a generation as plain values.

    Args:
        request: how.

    Attributes:
        loaded: what was applied.
    """

    def __init__(self, request: RestoreRequest) -> None:
        self._request = request
        self._prepared: LoadedCheckpoint | None = None
        self.loaded: LoadedCheckpoint | None = None

    def begin(self) -> None:
        """Nothing is asked."""

    def prepare(self, parts: list[StoredPart], choice: Choice) -> None:
        """Copy the values."""
        assert choice.generation is not None
        state: dict[str, Any] = {}
        for part in parts:
            state.update(part.load(allow_pickle=self._request.allow_pickle))
        state.pop(RNG, None)
        step, attempt = choice.generation.step, choice.generation.attempt
        self._prepared = LoadedCheckpoint(step, attempt, state, tuple(choice.sources), tuple(choice.notes))

    def apply(self) -> None:
        """They are what was loaded."""
        self.loaded = self._prepared


def _restore_generators(states: Any, choice: Choice, rank: int) -> None:
    if states is None:
        return
    if rank >= choice.world_size:
        _log.warning(
            "rank %d has no saved generators, as %s saved: its random numbers go on as they are",
            rank,
            count_words(choice.world_size, "rank"),
        )
        return
    for note in rng.restore(owned(states)):
        _log.warning("%s", note)
