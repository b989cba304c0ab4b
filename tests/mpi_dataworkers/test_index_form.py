"""A dataset is asked for its samples in the form in which the program's sampler gives their indices."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any

import hook_programs as programs
import numpy as np
import pytest
import torch
from hooking import assert_no_local_step, hooked
from torch.utils.data import DataLoader, SubsetRandomSampler

from hetstream import DataLoader as OwnLoader
from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.loader.shards import ListedSteps
from hetstream.mpi_dataworkers.ops.index_form import pack_indices, unpack_indices

# What a sampler gives for a step, and whether that has an index for each of its samples.
GIVEN: list[tuple[Any, bool]] = [
    ([3, 1], True),
    ((3, 1), True),
    ([np.int64(3), np.int64(1)], True),
    ((np.uint8(3), np.uint8(1)), True),
    ([torch.tensor(3), torch.tensor(1)], True),
    (np.array([3, 1], np.int32), True),
    (torch.tensor([3, 1], dtype=torch.int16), True),
    ([2**63 - 1, -1], True),
    (3, False),
    ([3], False),
    ([3, 1], False),
    (np.int64(3), False),
    (torch.tensor(3), False),
    ([torch.tensor(3), torch.tensor(1)], False),
]


def described(index: Any) -> str:
    parts = [described(part) for part in index] if isinstance(index, list | tuple) else []
    kind = type(index).__name__
    return f"{kind}{parts}" if parts else f"{kind} {getattr(index, 'dtype', '')} {index}"


@pytest.mark.parametrize(("given", "batched"), GIVEN, ids=described)
def test_indices_travel_with_what_they_are(given: Any, batched: bool) -> None:
    order = ListedSteps([given], batched)
    indices = order.indices(0)
    assert indices is not None
    packed = pack_indices(indices, order.form(0))
    came, form = unpack_indices(np.frombuffer(packed, dtype="<i8"), batched)
    assert came.tolist() == indices.tolist()
    assert described(form.given(came)) == described(given)


def test_what_has_no_form_of_its_own_is_a_list_of_int() -> None:
    order = ListedSteps([[1, np.int64(2)], range(3), [torch.tensor(1), torch.tensor(2, dtype=torch.int8)]], True)
    for step, expected in enumerate(([1, 2], [0, 1, 2], [1, 2])):
        indices = order.indices(step)
        assert indices is not None
        assert described(order.form(step).given(indices)) == described(expected)


class Cropped(int):
    """An index that says how large its sample is to be, as samplers for training at several sizes give."""

    size = 0


def test_an_index_that_says_more_than_its_number_is_none() -> None:
    index = Cropped(3)
    assert ListedSteps([[index, 1]], True).indices(0) is not None, "it does not say more"
    index.size = 224
    for given, batched in (([index, 1], True), ((index,), True), (index, False)):
        with pytest.raises(PipelineError, match="data workers need whole-number indices"):
            ListedSteps([given], batched).indices(0)
    assert ListedSteps([[enum.IntEnum("Part", "a b").b]], True).indices(0) is not None


class Described(programs.Numbers):
    """A sample says in which form it was asked for."""

    def __getitem__(self, index: Any) -> str:
        return described(index)


class Together(Described):
    """Is asked for a whole batch."""

    def __getitems__(self, indices: Any) -> list[str]:
        return [described(indices)]


class Drawn:
    """A sampler that gives what it was given."""

    def __init__(self, *steps: Any) -> None:
        self.steps = steps

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.steps)


def asked_for(kind: Any, **options: Any) -> list[Any]:
    """In which forms a dataset is asked."""
    batches = [given for given, batched in GIVEN if batched]
    singles = [given for given, batched in GIVEN if not batched]
    subset: Any = SubsetRandomSampler(np.arange(6), torch.Generator().manual_seed(3))  # type: ignore[arg-type]
    loaders = [
        kind(Described(8), batch_sampler=Drawn(*batches), collate_fn=list, **options),
        kind(Together(8), batch_sampler=Drawn(*batches), collate_fn=list, **options),
        kind(Described(8), batch_size=None, sampler=Drawn(*singles), **options),
        kind(Described(8), 2, sampler=subset, collate_fn=list, **options),
        kind(Described(8), 2, sampler=torch.arange(8), collate_fn=list, **options),
    ]
    found = [list(loader) for loader in loaders]
    for loader in loaders:
        if "_hetstream" in vars(loader):
            assert_no_local_step(loader)
    return found


def test_a_dataset_is_asked_as_torch_asks_it(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = asked_for(DataLoader)
    assert asked_for(OwnLoader) == plain, "the own loader, in process"
    assert asked_for(OwnLoader, service=three.name) == plain, "the own loader, from data workers"
    with hooked(three.name, monkeypatch):
        assert asked_for(DataLoader, num_workers=1) == plain
