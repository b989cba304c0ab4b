"""torch's own worker process makes a step that data workers do not deliver: when another process is begun for it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hetstream.mpi_dataworkers.loader.canary import Canary
from hetstream.mpi_dataworkers.loader.compared_pass import ComparedPass
from hetstream.mpi_dataworkers.loader.session import Delivered
from hetstream.mpi_dataworkers.loader.shards import PassShards, PlannedSteps
from hetstream.mpi_dataworkers.loader.witness import Made
from hetstream.mpi_dataworkers.ops.pipeline import Pipeline
from hetstream.mpi_dataworkers.order.sharding import EpochPlan
from hetstream.mpi_dataworkers.wire.messages import ErrorPolicy

NEVER = sys.maxsize


class Troubled(torch.utils.data.Dataset[Any]):
    """Notes which process makes which sample; one sample ends the process, another one never ends."""

    def __init__(self, path: Path, ends: int = -1, hangs: int = -1) -> None:
        self.path, self.ends, self.hangs = path, ends, hangs

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        with self.path.open("a") as noted:
            noted.write(f"{os.getpid()} {index}\n")
        if index == self.ends:
            os._exit(3)
        if index == self.hangs:
            threading.Event().wait()
        return torch.tensor(index)

    def by_process(self) -> list[list[int]]:
        """The samples that each process began, in order; some it makes more than once."""
        made: dict[str, dict[int, None]] = {}
        for line in self.path.read_text().splitlines() if self.path.exists() else ():
            process, index = line.split()
            made.setdefault(process, {})[int(index)] = None
        return [[*indices] for indices in made.values()]


Begin = Callable[..., ComparedPass]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Begin]:
    """Begins a pass of which two steps can be asked for, and are compared."""
    canaries: list[Canary] = []

    def begun(dataset: Troubled, is_kept: bool, has_first_workers: bool = False, ahead: int = 9) -> ComparedPass:
        pipeline = Pipeline(dataset, torch.utils.data.default_collate, len(dataset), num_workers=1 + has_first_workers)
        order = PlannedSteps(EpochPlan(len(dataset), 1, 1, drop_last=False, shuffle=False, seed=0, epoch=0), 0)
        canaries.append(Canary(is_kept, makes_steps=True))
        if not has_first_workers:
            monkeypatch.setattr(canaries[-1], "num_to_prove", lambda *_: 0)
        shards = PassShards.undivided(order, 0, 0)
        return ComparedPass(
            canaries[-1], pipeline, shards, ErrorPolicy(), 2, lambda batch: batch, str(dataset.path), ahead
        )

    yield begun
    for canary in canaries:
        canary.end_witnesses()


def test_a_step_that_another_step_has_ended_the_process_of_is_made_by_a_fresh_one_alone(
    begin: Begin, tmp_path: Path
) -> None:
    dataset = Troubled(tmp_path / "made", ends=1)
    compared = begin(dataset, False)
    made = compared.instead(2, 4, 60.0)
    assert isinstance(made, Made)
    assert made.batch.tolist() == [2]
    assert dataset.by_process() == [[0, 1], [2]]
    assert compared.due < NEVER, "what was to be compared is left"
    assert not compared.has_ended
    following = compared.instead(3, 4, 60.0)  # by the same process
    assert isinstance(following, Made)
    assert dataset.by_process() == [[0, 1], [2, 3]]


def test_a_step_that_ends_the_fresh_process_too_is_not_begun_a_third_time(begin: Begin, tmp_path: Path) -> None:
    dataset = Troubled(tmp_path / "made", ends=1)
    compared = begin(dataset, False)
    assert compared.instead(1, 2, 60.0) == "torch's own worker process ended with exit code 3"
    assert compared.has_ended
    assert dataset.by_process() == [[0, 1], [1]]


def test_a_process_that_was_kept_is_not_begun_anew(begin: Begin, tmp_path: Path) -> None:
    dataset = Troubled(tmp_path / "made", ends=1)
    compared = begin(dataset, True)
    assert compared.instead(2, 4, 60.0) == "torch's own worker process ended with exit code 3"
    assert dataset.by_process() == [[0, 1]]
    assert not compared.has_ended  # a child of now would see what the program has changed since


def test_a_step_is_compared_when_torch_would_make_it(begin: Begin, tmp_path: Path) -> None:
    """What the program writes meanwhile is seen by it."""
    dataset = Troubled(tmp_path / "made")
    compared = begin(dataset, False, True, ahead=4)
    compared.ask(8)
    found = [compared.difference(step, Delivered(torch.tensor([step]), 1, 8)) for step in range(4)]
    assert found == [""] * 4
    assert {index for indices in dataset.by_process() for index in indices} == {0, 1, 2, 3}


def test_a_step_that_hangs_is_waited_for_once(begin: Begin, tmp_path: Path) -> None:
    dataset = Troubled(tmp_path / "made", hangs=1)
    compared = begin(dataset, False)
    assert compared.instead(1, 2, 5.0) == "torch's own worker process gave no step in 5 s"
    assert not compared.has_ended
    assert len(dataset.by_process()) <= 1  # none, where it takes so long to begin


def test_first_workers_make_their_own_steps_where_data_workers_deliver_none(begin: Begin, tmp_path: Path) -> None:
    dataset = Troubled(tmp_path / "made")
    compared = begin(dataset, False, True)
    compared.ask(7)
    made = [compared.instead(step, 7, 60.0) for step in range(7)]
    assert [one.batch.tolist() for one in made if isinstance(one, Made)] == [[step] for step in range(7)]
    assert [0, 2, 4, 6] in dataset.by_process()
    assert [1, 3, 5] in dataset.by_process()


def test_a_step_that_ends_a_first_worker_is_made_by_another_process(begin: Begin, tmp_path: Path) -> None:
    dataset = Troubled(tmp_path / "made", ends=1)
    compared = begin(dataset, False, True)
    compared.ask(4)
    made = [compared.instead(step, 4, 60.0) for step in (0, 1, 2)]
    assert [one.batch.tolist() if isinstance(one, Made) else one for one in made] == [
        [0],
        "torch's own worker process ended with exit code 3",
        [2],
    ]


def test_what_differs_late_is_looked_at_by_a_process_that_has_made_the_same_steps(begin: Begin, tmp_path: Path) -> None:
    dataset = Troubled(tmp_path / "made")
    compared = begin(dataset, False, True)
    compared.ask(7)
    found = [compared.difference(step, Delivered(torch.tensor([step]), 1, 8)) for step in range(6)]
    found.append(compared.difference(6, Delivered(torch.tensor([9]), 1, 8)))
    assert found[:6] == [""] * 6
    assert found[6] == "step 6 of data workers is not the program's own: batch: 9 in place of 6"
    assert sum(made == [0, 2, 4, 6] for made in dataset.by_process()) == 3  # two more, which say what varies


@pytest.mark.parametrize("has_first_workers", [False, True])
def test_a_step_whose_process_another_one_has_ended_is_compared_all_the_same(
    has_first_workers: bool, begin: Begin, tmp_path: Path
) -> None:
    dataset = Troubled(tmp_path / "made", ends=2)
    compared = begin(dataset, False, has_first_workers)
    compared.ask(8)
    found = [compared.difference(step, Delivered(torch.tensor([step]), 1, 8)) for step in range(3)]
    assert found[:2] == ["", ""]
    said = "step 2 cannot be compared with the program's own: torch's own worker process ended with exit code 3"
    assert found[2] == (said if has_first_workers else None)
