"""The accelerator that bench-partition emulates, and what it says of guards."""

from __future__ import annotations

import argparse
import time

import pytest

from benchmarks import partition
from benchmarks.partition_programs.catalogue import PROGRAMS
from benchmarks.partition_programs.training import Program, train


@pytest.mark.parametrize(
    ("asked", "expected"), [(None, {"deepfm": 15.4, "din": 2.0}), (0.0, {"deepfm": 0.0, "din": 0.0})]
)
def test_the_accelerator_takes_what_was_asked_for_or_what_the_paper_has(
    asked: float | None, expected: dict[str, float]
) -> None:
    args = argparse.Namespace(accelerator_ms=asked)
    assert {name: round(partition.accelerator_ms(name, args), 1) for name in expected} == expected


def test_what_the_processor_does_for_the_accelerator_is_not_added_to_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    own = PROGRAMS["nothing_to_move"]
    train(Program(own.name, own.model, own.dataset, own.batch_size, own.num_inputs, accelerator_ms=1e6), 2)
    assert all(0.0 < seconds < 1000.0 for seconds in slept)
    assert len(slept) == 2


def test_guards_cost_where_only_the_beginning_was_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)  # torch's compiler has a bar whose thread stays
    monkeypatch.setattr(partition, "GUARD_CALLS", 5)
    [share_row] = [row for row in partition.guards("depends_on_data", 4.0) if row.unit == "% of a step"]
    assert share_row.value
