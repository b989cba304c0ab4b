"""On real Slurm: `#HETSTREAM --cache=DIR` keeps the front of each sample for the next job."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.mpi_dataworkers.test_prefix_cache_run import NUM_FILES, PROGRAM, entries, run, write_photograph

HETSTREAM = Path(sys.executable).with_name("hetstream")
DIRECTIVES = "#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-partition=cpu --cache="


@pytest.mark.shows("a job finds what the job before has put into the prefix cache on its node's disk")
@pytest.mark.slurm
def test_a_job_finds_the_cache_of_the_job_before(devcluster: Any) -> None:
    directory = devcluster.out_dir / "prefix-cache"
    folder, place = directory / "photographs", directory / "cache"
    folder.mkdir(parents=True)
    for number in range(NUM_FILES):
        write_photograph(folder / f"{number:02}.png", number)
    time.sleep(0.2)  # younger files are not kept
    expected, kept = run(None, folder).stdout, []
    script = f"#!/bin/bash\n{DIRECTIVES}{place}\nsrun {sys.executable} {PROGRAM} {folder} > out\n"
    (directory / "job.sbatch").write_text(script)
    for _ in range(2):
        done = subprocess.run(
            [HETSTREAM, "sbatch", "--wait", "--parsable", "--time=3", "job.sbatch"],
            cwd=directory, env=dict(devcluster.env), capture_output=True, text=True, check=False, timeout=180,
        )  # fmt: skip
        logs = "\n".join(path.read_text() for path in directory.glob("slurm-*.out"))
        assert done.returncode == 0, done.stderr + logs
        assert (directory / "out").read_text() == expected, logs
        kept.append(entries(place))
    assert len(kept[0]) == NUM_FILES
    assert kept[0] == kept[1]
