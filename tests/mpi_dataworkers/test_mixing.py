"""Mixtures of loaders and of datasets: what comes how often, and that a state taken at any step continues there."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from typing import Any

import pytest
import sample_datasets as datasets
import torch

from hetstream import DataLoader, mix
from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.errors import StateError

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 4}


def batches_of(iterator: Any) -> list[tuple[float, list[int]]]:
    return [(float(values.sum()), ids.tolist()) for values, ids in iterator]


def three_loaders(make: Any, **options: Any) -> list[DataLoader]:
    return [
        make(datasets.Augmented(22), shuffle=True, **options),
        make(datasets.Log(30), num_shards=2, **options),
        make(datasets.Augmented(9), batch_size=2, **options),
    ]


@pytest.mark.shows("a mixture ends by each of its three stop rules after the documented number of elements")
@pytest.mark.parametrize("stop", ["first_exhausted", "all_exhausted", "cycle_until_all"])
def test_a_mixture_of_loaders_continues_from_any_step(loaders: Any, stop: Any) -> None:
    whole_loader = mix(three_loaders(loaders), [1, 2, 1], 3, stop)
    whole = [batches_of(whole_loader), batches_of(whole_loader)]
    assert whole[0] != whole[1]
    if stop == "all_exhausted":
        assert all(Counter(index for _, ids in epoch for index in ids).total() == 61 for epoch in whole)
    for at in range(len(whole[0]) + 1):
        saved = mix(three_loaders(loaders), [1, 2, 1], 3, stop)
        assert batches_of(islice(iter(saved), at)) == whole[0][:at]
        state = json.loads(json.dumps(saved.state_dict()))  # type: ignore[union-attr]
        resumed = mix(three_loaders(loaders), [1, 2, 1], 3, stop)
        resumed.load_state_dict(state)  # type: ignore[union-attr]
        assert batches_of(resumed) == whole[0][at:], f"continued at {at}"
        assert batches_of(resumed) == whole[1]


def test_a_mixture_of_loaders_from_data_workers_is_the_one_made_here(three: Any, loaders: Any) -> None:
    streamed, local = (mix(three_loaders(loaders, **options), [1, 2, 1]) for options in ({"service": three.name}, {}))
    assert batches_of(streamed) == batches_of(local)


@pytest.mark.shows("datasets can be zipped, concatenated, and mixed by weights")
def test_mixed_datasets_are_one_dataset(three: Any, loaders: Any) -> None:
    mixed = mix([torch.arange(300), torch.arange(1000, 1100)], [3, 1], stop="first_exhausted")
    values = [int(mixed[index]) for index in range(len(mixed))]  # type: ignore[index, arg-type]
    small = [value for value in values if value >= 1000]
    assert small == list(range(1000, 1000 + len(small)))
    assert len(small) / len(values) == pytest.approx(0.25, abs=0.07)
    with pytest.raises(IndexError):
        mixed[len(values)]  # type: ignore[index]
    streamed = loaders(mixed, service=three.name, shuffle=True)
    assert sorted(int(value) for batch in streamed for value in batch) == sorted(values)


def test_mixed_streams_divide_themselves(three: Any, loaders: Any) -> None:
    mixed = mix([datasets.Log(120), datasets.Log(60)], [2, 1])
    streamed, local = loaders(mixed, service=three.name), loaders(mixed)
    batches = batches_of(streamed)
    assert batches == batches_of(local)
    assert Counter(index for _, ids in batches for index in ids) == Counter([*range(120), *range(60)])


@pytest.mark.shows("datasets can be zipped, concatenated, and mixed by weights")
def test_zip_ends_at_the_shorter_and_concatenate_keeps_both(three: Any, loaders: Any) -> None:
    both = loaders(torch.utils.data.ConcatDataset([datasets.Augmented(5), datasets.Augmented(3)]), service=three.name)
    assert sorted(index for _, ids in batches_of(both) for index in ids) == [0, 0, 1, 1, 2, 2, 3, 4]
    chained = loaders(torch.utils.data.ChainDataset([datasets.Log(5), datasets.Log(3)]), service=three.name)
    assert sorted(index for _, ids in batches_of(chained) for index in ids) == [0, 0, 1, 1, 2, 2, 3, 4]
    zipped = loaders(datasets.Zipped(datasets.Log(50), datasets.Log(30)), service=three.name)
    assert sorted(pair for one, two in zipped for pair in zip(one.tolist(), two.tolist(), strict=True)) == [
        (index, index) for index in range(30)
    ]
    stacked = loaders(torch.utils.data.StackDataset(range(7), range(10, 17)), service=three.name)
    assert [pair for one, two in stacked for pair in zip(one.tolist(), two.tolist(), strict=True)] == [
        (index, index + 10) for index in range(7)
    ]


def test_what_cannot_be_mixed_is_told(loaders: Any) -> None:
    with pytest.raises(ConfigError, match="must all be loaders, all datasets with indices, or all streams"):
        mix([datasets.Augmented(3), datasets.Log(3)])
    with pytest.raises(ConfigError, match="at least one dataset or loader"):
        mix([])
    one = mix([loaders(datasets.Augmented(8))], seed=1)
    other = mix([loaders(datasets.Augmented(8))], seed=2)
    with pytest.raises(StateError, match="another mixture"):
        one.load_state_dict(other.state_dict())  # type: ignore[union-attr]
    with pytest.raises(StateError, match="no state_dict: DataLoader"):
        mix([torch.utils.data.DataLoader(datasets.Augmented(8))]).state_dict()  # type: ignore[union-attr]
