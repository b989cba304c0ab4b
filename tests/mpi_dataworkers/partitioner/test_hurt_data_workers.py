"""Data workers die while a part of a forward is theirs: losses are those of a run without data workers, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sample_models as models
import torch
from torch.utils.data import default_collate

from hetstream.mpi_dataworkers.partitioner.partition import Partition, partition
from hetstream.mpi_dataworkers.process.faults import POINTS

LOADER_OPTIONS: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 3}
WORKER_POINTS = [point for point in POINTS if point.startswith("worker.") and point != "worker.draining"]


class Run:
    """A training run that is partitioned, of as many epochs as the test asks for."""

    def __init__(self, loader: Any, kind: type[torch.nn.Module], weights: Any = None) -> None:
        torch.manual_seed(0)
        self.model, self.loader = kind(), loader
        if weights is not None:
            self.model.load_state_dict(weights)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.partition: Partition = partition(
            self.model, default_collate([loader.dataset[index] for index in range(8)]), loader=loader, offload="all"
        )
        torch.manual_seed(1)

    def epoch(self, number: int) -> Iterator[str]:
        self.loader.set_epoch(number)
        return self.steps()

    def steps(self) -> Iterator[str]:
        for values, labels in self.loader:
            self.optimizer.zero_grad()
            loss = torch.nn.functional.binary_cross_entropy_with_logits(self.model(values), labels)
            loss.backward()
            self.optimizer.step()
            yield float(loss.detach()).hex()


@pytest.mark.parametrize("kind", [models.Clean, models.Noisy])
def test_a_data_worker_may_die_at_every_point(
    kind: type[torch.nn.Module],
    loaders: Callable[..., Any],
    service: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    # Two data workers, because one that loses six processes in a row gives up.
    for half in (WORKER_POINTS[::2], WORKER_POINTS[1::2]):
        faults = [f"{point}:1:kill:{tmp_path / point}.1" for point in half]
        monkeypatch.setenv("HETSTREAM_FAULT", ",".join(faults))
        service.start_workers(1)
    run, losses, epoch = Run(loaders(models.Rows(160), service=service.name), kind), [], 0
    deadline = time.monotonic() + 60
    while len([*tmp_path.glob("worker.*.1")]) < len(WORKER_POINTS):
        assert time.monotonic() < deadline, [*tmp_path.glob("worker.*")]
        losses += run.epoch(epoch)
        epoch += 1
    losses += run.epoch(epoch)
    assert run.partition.is_active
    assert run.partition.counts.original == 0
    alone = Run(loaders(models.Rows(160)), kind)
    assert losses == [loss for number in range(epoch + 1) for loss in alone.epoch(number)]


@pytest.mark.shows("a partitioned program has the losses of the original, bit for bit on CPU trainers")
def test_a_run_with_random_operators_goes_on_from_its_state_as_if_it_had_not_ended(loaders: Callable[..., Any]) -> None:
    whole = [*Run(loaders(models.Rows(80)), models.Noisy).epoch(1)]
    first = Run(loaders(models.Rows(80)), models.Noisy)
    steps = first.epoch(1)
    losses = [next(steps) for _ in range(4)]
    state, weights = first.loader.state_dict(), first.model.state_dict()
    second = Run(loaders(models.Rows(80)), models.Noisy, weights)
    second.loader.load_state_dict(state)
    assert [*losses, *second.steps()] == whole
    assert len({*whole}) > 1
