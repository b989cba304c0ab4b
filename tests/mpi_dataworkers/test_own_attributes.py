"""A program's own attributes keep the meaning that the program gives them, whatever hetstream calls by that name."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import h5py
import hook_programs as programs
import numpy as np
import pytest
from hooking import assert_no_local_step, hooked
from torch.utils.data import DataLoader, default_collate

from hetstream import DataLoader as OwnLoader
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline, fingerprint_of
from hetstream.mpi_dataworkers.sources import reads_apart
from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset


class Molecules(programs.Numbers):
    """Has methods and attributes of names that hetstream knows from elsewhere."""

    transform = None
    files = "none"

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self._fingerprint = np.zeros(3)

    def fingerprint(self, molecule: int) -> int:
        """Of one molecule."""
        return molecule

    def read_samples(self, path: str) -> list[Any]:
        """From a file."""
        raise FileNotFoundError(path)


class Looked(programs.Numbers):
    """Finds what it does not have in a table, and does not say AttributeError where there is nothing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return {"unit": 10}[name]

    def __getitem__(self, index: int) -> int:
        return index * int(self.unit)


class Wrapping:
    """Has all that the dataset inside has, and another `__getitem__`."""

    def __init__(self, inside: Any) -> None:
        self.inside = inside

    def __getattr__(self, name: str) -> Any:
        if name == "inside":
            raise AttributeError(name)
        return getattr(self.inside, name)

    def __len__(self) -> int:
        return len(self.inside)

    def __getitem__(self, index: int) -> float:
        return float(self.inside[index]) + random.random()


class ThreadSafe(programs.Numbers):
    """Says something of itself alone."""

    thread_safe = True


class NoLength(programs.Numbers):
    """Its length cannot be told; it is read by a sampler."""

    def __len__(self) -> int:
        raise TypeError("a table without an index has no length")


@pytest.mark.parametrize("kind", [Molecules, Looked, NoLength], ids=lambda kind: kind.__name__)
def test_a_dataset_is_read_as_torch_reads_it_whatever_its_attributes_are_called(
    three: Any, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    def read(loader: Any) -> list[Any]:
        return [batch.tolist() for batch in loader]

    plain = read(DataLoader(kind(8), 4, sampler=range(8)))
    assert read(OwnLoader(kind(8), 4, sampler=range(8))) == plain
    with OwnLoader(kind(8), 4, sampler=range(8), service=three.name) as own:
        assert read(own) == plain
        assert own.stats()["local_steps"] == 0
    with hooked(three.name, monkeypatch):
        loader = DataLoader(kind(8), 4, sampler=range(8))
        assert read(loader) == plain
        assert_no_local_step(loader)


def test_a_fingerprint_is_text_or_a_number_that_the_dataset_itself_has() -> None:
    dataset: Any = programs.Numbers(4)
    assert fingerprint_of(dataset) == fingerprint_of(Molecules(4)) == fingerprint_of(Looked(4)) == ""
    dataset._fingerprint = "abc"
    assert (fingerprint_of(dataset), fingerprint_of(Wrapping(dataset))) == ("abc", "")
    dataset.fingerprint = lambda: 7
    assert fingerprint_of(dataset) == "7"


def test_samples_of_a_wrapper_are_seeded_though_the_dataset_inside_says_that_it_is_thread_safe() -> None:
    indices, seeds = np.arange(4), [1, 2, 3, 4]

    def made(dataset: Any) -> Any:
        random.seed()
        pipeline = Pipeline(dataset, default_collate, 4)
        return pipeline.make_batch(indices, seeds).tolist()

    assert Pipeline(ThreadSafe(4), default_collate, 4).thread_safe
    assert made(Wrapping(ThreadSafe(4))) == made(Wrapping(ThreadSafe(4)))


class Doubled(Hdf5Dataset):
    """Makes samples of its own."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) * 2


class Reversed(Hdf5Dataset):
    """Makes batches of its own."""

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        return super().__getitems__(indices)[::-1]


class Same(Hdf5Dataset):
    """Changes nothing of how it is read."""


def test_a_subclass_of_a_source_is_read_by_its_own_methods(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["rows"] = np.arange(6)
    for kind, expected in (
        (Same, [[0, 1, 2], [3, 4, 5]]),
        (Doubled, [[0, 2, 4], [6, 8, 10]]),
        (Reversed, [[2, 1, 0], [5, 4, 3]]),
    ):
        dataset: Any = kind(tmp_path / "rows.h5", "rows")
        assert reads_apart(dataset) is (kind is Same)
        for loader in (DataLoader(dataset, 3), OwnLoader(dataset, 3)):
            assert [batch.tolist() for batch in loader] == expected
        assert dataset[5] == (10 if kind is Doubled else 5)
        dataset.close()


class Forking(programs.Numbers):
    """Has a process of its own make each sample, which ends as a script does."""

    def __getitem__(self, index: int) -> int:
        pid = os.fork()
        if pid == 0:
            if index == 2:
                sys.exit()
            if index == 3:
                raise ValueError("of the forked process alone")
            sys.exit(index + 10)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_a_process_that_a_sample_forks_ends_with_the_sample(three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with hooked(three.name, monkeypatch):
        loader: Any = DataLoader(Forking(5), 5, num_workers=1, timeout=30)
        assert [batch.tolist() for batch in loader] == [[10, 11, 0, 1, 14]]
        assert_no_local_step(loader)
