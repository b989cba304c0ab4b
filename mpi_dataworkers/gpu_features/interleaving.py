"""What is done next for which batch: batch n + 2 is copied, n + 1 is computed, n is trained. Pure.

    state = layer_begins(plan, state, "mlp.forward")
    while action := next_action(plan, state):
        state = after(state, action, there_was_one)

RAP's interleaving of batches (its section 6.3). `corun.py` carries it out. A layer that never begins loses nothing:
what was to run beside it runs when the loop wants the batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from hetstream.mpi_dataworkers.gpu_features.launches import LaunchPlan

# Batches that are under way beside the one that is trained: one is computed, one is copied.
AHEAD = 2


@dataclass(frozen=True)
class Interleaving:
    """Where everything is.

    Attributes:
        trained: the batch that the loop has; -1 before the first.
        prepared: so many batches have been taken from the loader, and their copies begun.
        launched: launches of batch `trained + 1` that are under way or done.
        due: those of them that are to be launched now: their layer has begun.
        is_wanted: whether the loop waits for batch `trained + 1`.
        end: how many batches there are, once that is known.
    """

    trained: int = -1
    prepared: int = 0
    launched: frozenset[int] = frozenset()
    due: frozenset[int] = frozenset()
    is_wanted: bool = False
    end: int | None = None


@dataclass(frozen=True)
class Prepare:
    """Take this batch from the loader, and begin to copy it."""

    batch: int


@dataclass(frozen=True)
class Run:
    """Launch some features of this batch, behind what the training stream has reached."""

    batch: int
    launch: int


@dataclass(frozen=True)
class HandOver:
    """Give the loop this batch."""

    batch: int


@dataclass(frozen=True)
class Stop:
    """There is no further batch."""


Action = Prepare | Run | HandOver | Stop


def batch_wanted(state: Interleaving) -> Interleaving:
    """The loop asks for its next batch."""
    return replace(state, is_wanted=True)


def layer_begins(plan: LaunchPlan, state: Interleaving, layer: str) -> Interleaving:
    """A layer of the batch that is trained begins; a second time in one step it changes nothing."""
    if state.trained + 1 >= state.prepared:
        return state
    due = {at for at, launch in enumerate(plan.launches) if launch.layer == layer} - state.launched
    return replace(state, due=state.due | due)


def next_action(plan: LaunchPlan, state: Interleaving) -> Action | None:
    """What is to be done next; None where nothing is until the next event."""
    batch = state.trained + 1
    if state.due:
        return Run(batch, min(state.due))
    if state.is_wanted:
        if state.end is not None and batch >= state.end:
            return Stop()
        if batch >= state.prepared:
            return Prepare(batch)
        left = set(range(len(plan.launches))) - state.launched
        return Run(batch, min(left)) if left else HandOver(batch)
    if state.end is None and state.trained >= 0 and state.prepared <= state.trained + AHEAD:
        return Prepare(state.prepared)
    return None


def after(state: Interleaving, action: Action, there_was_one: bool = True) -> Interleaving:
    """What is so when an action has been carried out; `there_was_one` says it of a batch that was to be taken."""
    if isinstance(action, Prepare):
        return replace(state, prepared=action.batch + 1) if there_was_one else replace(state, end=action.batch)
    if isinstance(action, Run):
        return replace(state, launched=state.launched | {action.launch}, due=state.due - {action.launch})
    if isinstance(action, HandOver):
        return replace(state, trained=action.batch, launched=frozenset(), due=frozenset(), is_wanted=False)
    return replace(state, is_wanted=False)
