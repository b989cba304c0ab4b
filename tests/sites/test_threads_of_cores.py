"""A site whose cores have four threads: Slurm gives whole cores, with the memory of each CPU in them.

quad0 and quad1 have 4 such cores; they are of a cloud that nobody boots.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.devcluster.spec import ClusterShape
from tests.sites.conftest import HETSTREAM

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = ()
SHAPE = ClusterShape(1, 2, 1, 8)
SETTINGS = (
    "PrivateData=cloud",  # else 22.05 shows no node that is off
    "ResumeProgram=/bin/true", "SuspendProgram=/bin/true", "SuspendTime=-1", "ResumeTimeout=3600",
    "NodeName=quad[0-1] Port=[19998-19999] CPUs=16 Sockets=1 CoresPerSocket=4 ThreadsPerCore=4 RealMemory=64000 "
    "Gres=gpu:2 NodeAddr=127.0.0.1 State=CLOUD",
    "PartitionName=quad Nodes=quad[0-1] State=UP",
)  # fmt: skip


@pytest.mark.parametrize("options", ["-c8 --mem-per-cpu=4000", "-c16 --mem-per-cpu=4000", "-c6 --mem-per-cpu=1000"])
def test_memory_by_cpus_stays_the_same_where_cores_have_four_threads(site: Any, tmp_path: Path, options: str) -> None:
    script = tmp_path / "train.sbatch"
    script.write_text(f"#!/bin/bash\n#SBATCH -pquad --gres=gpu:1 --time=60 -o /dev/null {options}\npython train.py\n")

    def cpus_and_memory(component: str, *argv: str) -> tuple[int, str]:
        done = subprocess.run([*argv, script], env=site.cluster.env, capture_output=True, text=True, check=True)
        job = done.stdout.strip().split(";")[0]

        def shown() -> str:
            return str(site.run("scontrol", "show", "job", f"{job}{component}"))

        site.wait_until(lambda: "JobState=CONFIGURING" in shown(), 60, "it has a node")
        cpus, memory = re.findall(r"TRES=cpu=(\d+),mem=([\w.]+),", shown())[-1]
        site.cluster.cancel_all()
        return int(cpus), memory

    own = ("--data-workers=1", "--data-worker-cpus=1", "--data-worker-partition=cpu", "--data-worker-mem=100")
    plain = cpus_and_memory("", "sbatch", "--parsable", f"--chdir={tmp_path}")
    converted = cpus_and_memory("+0", str(HETSTREAM), "sbatch", "--parsable", f"--chdir={tmp_path}", *own)
    assert converted[1] == plain[1]
    assert converted[0] == (8 if "-c6" in options else 4)
