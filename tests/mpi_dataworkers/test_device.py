"""Batches on the device: every structure, and a state that does not count what is only ahead."""

from __future__ import annotations

from collections import defaultdict, namedtuple
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import sample_datasets as datasets
import torch

from hetstream import DataLoader
from hetstream.base.errors import OptionsError
from hetstream.mpi_dataworkers.loader.pass_iterator import OnDevice, move

Pair = namedtuple("Pair", "first second")
DATA = datasets.Augmented(24)


class Same(Pair):
    """Is made of one value."""

    def __new__(cls, value: Any) -> Same:
        return super().__new__(cls, value, value)


class Own:
    """A batch class of the user's."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values

    def to(self, device: torch.device) -> Own:
        return Own(self.values.to(device))


def test_every_structure_is_moved_and_kept() -> None:
    one = torch.ones(2)
    batch = {
        "a": [one, "text"], "b": (one, 3, None), "c": Pair(one, b"bytes"), "d": Own(one),
        "e": defaultdict(list, key=one), "f": Same(one),
    }  # fmt: skip
    moved = move(batch, lambda value: value.to(torch.device("meta")))
    assert [type(moved[key]) for key in "abcdef"] == [list, tuple, Pair, Own, defaultdict, Same]
    tensors = moved["a"][0], moved["b"][0], moved["c"].first, moved["d"].values, moved["e"]["key"], moved["f"].first
    assert (moved["e"]["other"], batch["e"]["key"] is one) == ([], True)
    assert all(value.is_meta for value in tensors)
    assert (moved["a"][1], moved["b"][1:], moved["c"].second) == ("text", (3, None), b"bytes")


def test_an_iteration_has_the_length_of_its_loader() -> None:
    for options in ({}, {"device": "meta"}, {"drop_last": True, "repeat": 2}, {"num_workers": 1}):
        loader = DataLoader(DATA, 5, **options)  # type: ignore[arg-type]
        assert len(iter(loader)) == len(loader)  # type: ignore[arg-type]


def test_the_host_is_the_default_and_nothing_is_copied() -> None:
    assert [ids.tolist() for _, ids in DataLoader(DATA, 4, device="cpu")] == [
        ids.tolist() for _, ids in DataLoader(DATA, 4)
    ]
    assert not isinstance(iter(DataLoader(DATA, 4, device="cpu")), OnDevice)


def test_an_interrupted_program_that_goes_on_gets_the_batch_that_it_did_not_get() -> None:
    """Ctrl-C comes while the next batch is waited for, and that is when a loop has not got the one before."""

    class Waited(Iterator[int]):
        taken = -1
        was_interrupted = False

        def __next__(self) -> int:
            if self.taken == 1 and not self.was_interrupted:
                self.was_interrupted = True
                raise KeyboardInterrupt
            self.taken += 1
            return self.taken

    position: Any = SimpleNamespace(taken=-1)
    batches: Any = OnDevice(Waited(), torch.device("meta"), position)  # type: ignore[arg-type]
    assert next(batches) == position.taken == 0
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert position.taken == 0
    assert [next(batches), next(batches), position.taken] == [1, 2, 2]


@pytest.mark.parametrize("options", [{"shuffle": True}, {"sampler": range(23, -1, -1)}, {"repeat": 2}], ids=str)
def test_the_state_is_of_what_the_training_loop_took(options: dict[str, Any]) -> None:
    plain, ahead = DataLoader(DATA, 4, **options), DataLoader(DATA, 4, device="meta", **options)
    for _ in range(2):
        assert ahead.state_dict() == plain.state_dict()
        for (values, ids), (here, _) in zip(ahead, plain, strict=True):
            assert ids.is_meta
            assert values.shape == here.shape
            assert ahead.state_dict() == plain.state_dict()
    passing = iter(ahead)
    next(passing)
    resumed = DataLoader(DATA, 4, **options)
    resumed.load_state_dict(ahead.state_dict())
    assert len(list(resumed)) == len(resumed) - 1


def test_an_error_comes_at_its_own_batch() -> None:
    loader = DataLoader(datasets.Poisoned(40), 20, device="meta")
    ahead, steps = iter(loader), []
    next(ahead)
    steps.append(loader.state_dict()["step"])
    with pytest.raises(datasets.UserError, match="sample 37"):
        next(ahead)
    steps.append(loader.state_dict()["step"])
    with pytest.raises(StopIteration):
        next(ahead)
    assert steps == [1, 2]
    assert loader.state_dict()["epoch"] == 1


@pytest.mark.parametrize(
    ("device", "says"),
    [
        ("cuda:99", "device='cuda:99': this process has"),
        ("gpu", "device='gpu': "),
        ("mps", "device='mps': must be a CUDA"),
    ],
)
def test_a_device_that_is_not_there_is_refused(device: str, says: str) -> None:
    with pytest.raises(OptionsError, match=says):
        DataLoader(DATA, device=device)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_batches_arrive_on_the_gpu_and_are_whole() -> None:
    loader = DataLoader(datasets.Augmented(512), 8, shuffle=True, device="cuda")
    total = torch.zeros((), device="cuda", dtype=torch.float64)
    for values, ids in loader:
        assert values.is_cuda
        assert ids.is_cuda
        total += values.double().sum()  # queued behind the copy, without waiting on the host
    expected = sum(values.double().sum().item() for values, _ in DataLoader(datasets.Augmented(512), 8, shuffle=True))
    assert total.item() == pytest.approx(expected)
