"""A sample that takes more memory than its data worker has, where Slurm's control groups limit each step."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import host_programs
from tests.clusters import Devcluster, running_cluster
from tests.devcluster.cgroups import groups_of, why_not
from tests.devcluster.spec import ClusterShape

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# The data worker has 700 MB, the trainer 3 GB.
PROGRAM = """
from torch.utils.data import DataLoader, Dataset

class Greedy(Dataset):
    def __len__(self):
        return 80
    def __getitem__(self, index):
        if index == 41:
            bytearray(1500 << 20)
        return index

if __name__ == "__main__":
    print(sum([batch.tolist() for batch in DataLoader(Greedy(), batch_size=4, num_workers=1)], []) == [*range(80)])
"""
SCRIPT = f"""#!/bin/bash
#SBATCH --partition=cpu --cpus-per-task=2 --mem=3G --time=5 --output=out.txt
#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-mem=700M --data-worker-partition=cpu
srun {sys.executable} train.py
"""


@pytest.fixture
def cluster() -> Iterator[Devcluster]:
    problem = why_not(host_programs().version)
    if problem:
        pytest.skip(f"no control groups: {problem}")
    with running_cluster("memory", ClusterShape(gpu_nodes=0, cpu_nodes=2), cgroups=True) as found:
        yield found
    assert groups_of(found.record.cluster_name) == []


@pytest.mark.shows("on Slurm with memory limits the kernel ends the process of a greedy sample, and training goes on")
def test_a_sample_beyond_its_data_workers_memory_does_not_end_the_training(
    cluster: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "train.sbatch").write_text(SCRIPT)
    hetstream = Path(sys.executable).with_name("hetstream")
    subprocess.run(
        [hetstream, "sbatch", "train.sbatch"], env=cluster.env, cwd=tmp_path, check=True, capture_output=True
    )
    wait_until(lambda: not cluster.run("squeue", "--noheader"), timeout_s=180, what="the end of the job")
    said = (tmp_path / "out.txt").read_text()
    assert said.endswith("True\n"), said
    assert "was killed by the kernel: out of memory, at sample 41 of step 10" in said
    [log] = tmp_path.glob(".hetstream/*/data-worker-0.log")
    assert log.read_text().count("was killed by the kernel: out of memory") == 3
