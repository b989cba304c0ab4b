"""Programs over streams that a seed makes up, under the start-up hook beside torch alone: every batch and exception."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import stream_programs as programs
import torch
from hooking import connection_of, hooked
from torch.utils.data import DataLoader
from torch.utils.data._utils.collate import default_collate

from hetstream.mpi_dataworkers.loader import unmodified_streams
from hetstream.mpi_dataworkers.loader.unmodified_streams import Differs
from hetstream.mpi_dataworkers.ops.batch_comparison import compare

pytestmark = pytest.mark.filterwarnings("ignore")

_SEEDS = range(80)


class MadeUp(programs.Numbers):
    """How it divides itself, shuffles, draws, keeps and fails, a seed says."""

    def __init__(self, seed: int) -> None:
        chosen = random.Random(seed)
        super().__init__(chosen.choice([40, 160, 400]), chosen.choice([0, 3, 30]))
        self.division = chosen.choice(["modulo", "block", "none", "uneven"])
        self.draws = chosen.sample(["python", "numpy", "torch", "own"], chosen.randrange(5))
        self.counts = chosen.choice(["", "elements", "passes"])
        self.fails_at = chosen.choice([-1, -1, -1, 37])
        self.has_map = self.fails_at >= 0 or chosen.random() < 0.3
        self.own = np.random.default_rng(seed)
        self.counted = 0

    def numbers(self) -> Iterator[int]:
        worker, workers = programs.part()
        self.counted += self.counts == "passes"
        size = -(-self.length // workers)
        yield from {
            "modulo": range(worker, self.length, workers),
            "block": range(worker * size, min(self.length, (worker + 1) * size)),
            "none": range(self.length // 3),
            "uneven": range(0, self.length * worker // workers, 2),
        }[self.division]

    def __iter__(self) -> Iterator[Any]:
        return map(self.element, self.numbers()) if self.has_map else super().__iter__()

    def element(self, number: int) -> Any:
        if number == self.fails_at:
            raise ValueError(f"{number} is damaged")
        self.counted += self.counts == "elements"
        drawn = {
            "python": random.random,
            "numpy": lambda: float(np.random.rand()),
            "torch": lambda: float(torch.rand(1)),
            "own": lambda: float(self.own.random()),
        }
        return {"at": torch.tensor([number, self.epoch, self.counted]), "drawn": [drawn[name]() for name in self.draws]}


def collate_by_size(samples: Any) -> Any:
    return default_collate(samples), len(samples), random.random()


def run(seed: int) -> tuple[list[Any], Any]:
    """What a program of this seed gets, and its loader."""
    for begin in (random.seed, np.random.seed, torch.manual_seed):
        begin(seed)
    chosen = random.Random(seed + 1000)
    dataset = MadeUp(seed)
    batch_size = chosen.choice([None, 1, 4, 7])
    options = {
        "batch_size": batch_size,
        "num_workers": chosen.choice([1, 2, 3, 5]),
        "drop_last": batch_size is not None and chosen.random() < 0.3,
        "persistent_workers": chosen.random() < 0.4,
        "prefetch_factor": chosen.choice([1, 2, 4]),
        "worker_init_fn": chosen.choice([None, programs.seed_by_worker]),
        "collate_fn": chosen.choice([None, None, collate_by_size]) if batch_size is not None else None,
    }
    loader: DataLoader[Any] = DataLoader(dataset, **options)
    got: list[Any] = []
    for epoch in range(3):
        if chosen.random() < 0.5:
            dataset.set_epoch(epoch)
        leaves_at = chosen.choice([-1, -1, -1, 5, 30])
        changes_over_at = chosen.choice([12, 18])  # when enough can have been compared, whatever the number of workers
        iterator: Any = iter(loader)
        for number in range(10_000):
            try:
                batch = next(iterator)
            except StopIteration:
                break
            except ValueError as error:
                batch = str(error)
            got.append(batch)
            if number == changes_over_at and getattr(iterator, "_streamed", None) is not None:
                with contextlib.suppress(Differs):  # the next call finds it, too
                    programs.until_data_workers_go_on(iterator)
            if number == leaves_at:
                break
        got.append((torch.rand(1), random.random()))
    return got, loader


@pytest.mark.parametrize("seed", _SEEDS)
def test_a_made_up_program_gets_torchs_batches(seed: int, three: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unmodified_streams, "_DEEPER", 0.0)
    expected, _ = run(seed)
    with hooked(three.name, monkeypatch):
        found, loader = run(seed)
        kept = vars(loader)["_hetstream"]
        local_steps = connection_of(loader).statistics.counters if kept.connection is not None else None
        print("local" if local_steps is None else f"{local_steps.local_steps} of {local_steps.steps} local")
    assert not compare(found, expected).differences
