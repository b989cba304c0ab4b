"""A training job moves to another node on real Slurm, with data workers: no step is lost, none is made twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.ckpt_migrate import MIGRATE, measure
from hetstream.checkpoint.disk.ownership import history

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]


@pytest.mark.timeout(400)
def test_a_training_job_moves_to_another_node_without_a_step_lost(devcluster: Any) -> None:
    directory: Path = devcluster.out_dir / "migrated"
    directory.mkdir()
    rows, problems = measure(directory, devcluster.env, [MIGRATE])
    assert problems == []
    assert all(row.met is not False for row in rows), rows
    events = history(directory / "job" / "checkpoints")
    assert [one.event for one in events] == ["started", "handed over", "started", "took over", "ended"]
    hosts = {one.identity.job: one.identity for one in events if one.identity}
    assert len(hosts) == 2
    print(f"pause: {events[3].pause_s:.2f} s by the history, {rows[0].value:.2f} s by the ledger")
