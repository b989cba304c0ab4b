"""The protocol of torchdata's StatefulDataLoader: the same calls continue at the same batch in both."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import Dataset

from hetstream import DataLoader

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it warns of deprecated parts of torch
    from torchdata.stateful_dataloader import StatefulDataLoader

LENGTH, BATCH, STEPS = 20, 4, 5


class Numbers(Dataset[int]):
    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return index


def epoch(loader: Any) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


def take(loader: Any, count: int) -> Any:
    """Begin an epoch and take so many batches; return the iterator, which holds the position."""
    passing = iter(loader)
    for _ in range(count):
        next(passing)
    return passing


def in_mid_epoch(make: Callable[[], Any], num_taken: int) -> list[list[list[int]]]:
    first, second = make(), make()
    passing = take(first, num_taken)
    second.load_state_dict(first.state_dict())
    del passing
    return [epoch(second), epoch(second)]


def before_the_first(make: Callable[[], Any]) -> list[list[list[int]]]:
    first, second = make(), make()
    second.load_state_dict(first.state_dict())
    return [epoch(second), epoch(second)]


def after_the_end(make: Callable[[], Any]) -> list[list[list[int]]]:
    first, second = make(), make()
    epoch(first)
    second.load_state_dict(first.state_dict())
    return [epoch(second), epoch(second)]


def twice_in_a_row(make: Callable[[], Any]) -> list[list[list[int]]]:
    first, second, third = make(), make(), make()
    take(first, 1)
    second.load_state_dict(first.state_dict())
    take(second, 2)
    third.load_state_dict(second.state_dict())
    return [epoch(third), epoch(third)]


def loaded_and_saved_again(make: Callable[[], Any]) -> list[list[list[int]]]:
    first, second, third = make(), make(), make()
    take(first, 2)
    second.load_state_dict(first.state_dict())
    third.load_state_dict(second.state_dict())
    return [epoch(third)]


def into_the_loader_itself(make: Callable[[], Any]) -> list[list[list[int]]]:
    one = make()
    take(one, 2)
    state = one.state_dict()
    take(one, 4)
    one.load_state_dict(state)
    return [epoch(one)]


def every_batch_a_state(make: Callable[[], Any]) -> list[list[list[int]]]:
    first = make()
    states = [first.state_dict() for _ in first]
    found = []
    for state in states[:-1]:
        other = make()
        other.load_state_dict(state)
        found.append(epoch(other))
    return found


PATTERNS: dict[str, Callable[[Callable[[], Any]], Any]] = {
    "before the first": before_the_first,
    "after one": lambda make: in_mid_epoch(make, 1),
    "after three": lambda make: in_mid_epoch(make, 3),
    "after the end": after_the_end,
    "twice in a row": twice_in_a_row,
    "loaded and saved again": loaded_and_saved_again,
    "into the loader itself": into_the_loader_itself,
    "a state at every batch": every_batch_a_state,
}


@pytest.mark.shows("a run that was resumed from any state gives what the uninterrupted run gives; the state is JSON")
@pytest.mark.parametrize(("pattern", "num_workers"), [*((one, 0) for one in PATTERNS), ("after the end", 1)])
@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_the_same_calls_continue_at_the_same_batch(pattern: str, num_workers: int) -> None:
    def ours() -> Any:
        return DataLoader(Numbers(), BATCH, num_workers=num_workers, snapshot_every_n_steps=1)

    def theirs() -> Any:
        return StatefulDataLoader(Numbers(), BATCH, num_workers=num_workers, snapshot_every_n_steps=1)

    assert PATTERNS[pattern](ours) == PATTERNS[pattern](theirs)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata calls it
def test_after_the_last_batch_ours_begins_the_next_epoch_where_torchdatas_is_empty_first() -> None:
    def after_the_last(kind: Any) -> list[list[list[int]]]:
        return in_mid_epoch(lambda: kind(Numbers(), BATCH), STEPS)

    whole = epoch(DataLoader(Numbers(), BATCH))
    assert after_the_last(StatefulDataLoader) == [[], whole]
    assert after_the_last(DataLoader) == [whole, whole]
