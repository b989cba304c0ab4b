"""Limits of arrays, partitions and heterogeneous jobs.

Of gpu 2 hours, of cpu 1 hour; of both 2 nodes for a job and 4,000 MB for a CPU. MaxArraySize is 11.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hetstream.hetjob.errors import SlurmCommandError
from tests.devcluster.sites import LIMITS

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (LIMITS,)
SMALL = ("--mem=1000", "--time=60")


def test_limits_of_partitions_and_arrays_are_no_lack_of_resources(site: Any) -> None:
    """By hand: 2 tasks of 8 of the array run, with 4 CPUs and 1 GPU each, on one node: 88 CPUs and 6 GPUs are free.

    No pending job waits for resources: none strands anything, and none would gain.
    """
    array = site.submit("--array=0-7%2", "--gpus=1", "-c4", *SMALL)
    waiting = {
        site.submit("-pcpu", "--nodes=3", *SMALL): ("PartitionNodeLimit", "limit"),
        site.submit("-pcpu", "--mem=1000", "--time=90"): ("PartitionTimeLimit", "time limit"),
    }
    site.settle(**{f"{array}_0": "RUNNING", f"{array}_1": "RUNNING", f"{array}_7": "PENDING JobArrayTaskLimit"})
    site.settle(**{job: f"PENDING {reason}" for job, (reason, _) in waiting.items()})
    assert site.totals("cpus_free", "gpus_free", "stranded_gpus", "stranded_cpus") == [88, 6, 0, 0]
    assert site.told("frag")["shapes"] == []
    for job, (_, kind) in waiting.items():
        assert [told for told, _ in site.blockers(job)] == [kind]
    told = site.told("why", f"{array}_7")
    assert [one["kind"] for one in told["blockers"]] == ["limit"]
    assert told["blockers"][0]["next_step"] == f"scontrol update JobId={array} ArrayTaskThrottle=N"
    assert told["summary"]["jobs"][0]["conversion_helps"] is False
    assert site.told("advise")["advice"] == []
    with pytest.raises(SlurmCommandError, match="array"):
        site.submit("--array=0-11", *SMALL)


def test_a_job_that_would_wait_for_its_data_workers_partition_is_told(site: Any, tmp_path: Path) -> None:
    """Alone 90 minutes are allowed in gpu; data workers in cpu have the same limit, and are allowed 60."""
    script = tmp_path / "train.sbatch"

    def notes(time: str) -> list[str]:
        script.write_text(
            f"#!/bin/bash\n#SBATCH --gpus=1 --cpus-per-task=4 --time={time} --mem-per-cpu=1000\n"
            "#HETSTREAM --data-workers=1 --data-worker-partition=cpu\nsleep 600\n"
        )
        converted = site.told("convert", str(script))
        (tmp_path / "converted.sbatch").write_text(converted["script"])
        return [str(note) for note in converted["notes"]]

    (note,) = notes("1:30:00")
    assert note.startswith("--time=1:30:00 is more than MaxTime=01:00:00 of partition cpu")
    submit = ("sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "converted.sbatch"))
    job = site.run(*submit)
    # What the note says: alone the trainer would have started.
    site.settle(**{f"{job}+1": "PENDING PartitionTimeLimit"})
    alone = site.submit("--gpus=1", "-c4", "--mem=1000", "--time=90")
    site.settle(**{alone: "RUNNING"})
    trainer, workers = site.told("why", job)["summary"]["jobs"]
    assert {trainer["job"], workers["job"]} == {f"{job}+0", f"{job}+1"}
    kinds = {one["job"]: one["kind"] for one in site.told("why", job)["blockers"]}
    assert kinds[f"{job}+1"] == "time limit"
    assert notes("1:00:00") == []
    job = site.run(*submit)
    site.settle(**{f"{job}+0": "RUNNING", f"{job}+1": "RUNNING"})
