"""The main job on real Slurm: an unmodified script and program become a heterogeneous job that streams.

A data worker is killed in mid-epoch. The ledger of sample ids and bytes must equal that of the run without Slurm.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clusters import running_cluster
from tests.devcluster.spec import ClusterShape
from tests.programs import require

PROGRAM = Path(__file__).parent / "programs" / "train.py"
HETSTREAM = Path(sys.executable).with_name("hetstream")
SCRIPT = f"""#!/bin/bash -l
#SBATCH --job-name="main job" --output=%x-%j.out
#SBATCH --gres=gpu:1 --cpus-per-task=8 --time=10
#HETSTREAM --data-workers=2 --data-worker-cpus=1 --data-worker-partition=cpu
set -euo pipefail
trap 'echo "the user trap saw $?"' EXIT
echo "cpus=$SLURM_CPUS_PER_TASK arguments=$*"
srun {sys.executable} {PROGRAM} ledger
exit 7
"""


def processes(*words: str) -> dict[int, list[str]]:
    """Processes whose arguments contain all these words; srun, which has them too, is left out."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                argv = Path(f"/proc/{entry}/cmdline").read_text().split("\0")
            except OSError:
                continue
            if all(word in argv for word in words) and "--het-group=1" not in argv:
                found[int(entry)] = argv
    return found


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


@pytest.mark.slurm
@pytest.mark.every_release
def test_an_unmodified_job_streams_and_survives_a_killed_data_worker(
    release: str, devcluster: Any, wait_until: Callable[..., None]
) -> None:
    # A login shell resets PATH, and the newer releases' commands are nowhere but there.
    script = SCRIPT if release == "host" else SCRIPT.replace("bash -l", "bash")
    stream_and_survive(devcluster, script, wait_until)


@pytest.mark.shows("64 virtual nodes run on two cores, without a GPU")
@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.parametrize("network", [False, True])
def test_the_same_on_64_nodes(network: bool, wait_until: Callable[..., None]) -> None:
    if network:
        require("ip")
    with running_cluster("64", ClusterShape(gpu_nodes=16, cpu_nodes=48), network=network) as cluster:
        words = [str(HETSTREAM), "frag", "--json"]
        before = json.loads(cluster.run(*words))["summary"]
        assert (before["num_nodes"], before["cpus_free"], before["gpus_free"]) == (64, 64 * 16, 16 * 4)
        stream_and_survive(cluster, SCRIPT, wait_until)
        assert json.loads(cluster.run(*words))["summary"] == before, "all is free again"


def stream_and_survive(cluster: Any, script: str, wait_until: Callable[..., None]) -> None:
    """Submit the main job, kill a data worker in mid-epoch, and compare the ledgers."""
    directory = cluster.out_dir / "main job"
    directory.mkdir()
    (directory / "train.sbatch").write_text(script)
    environ = dict(cluster.env)

    def run(*argv: str) -> str:
        return subprocess.run(
            argv, cwd=directory, env=environ, capture_output=True, text=True, check=True, timeout=60
        ).stdout

    job_id = run(str(HETSTREAM), "sbatch", "--parsable", "train.sbatch", "one", "two words").strip()
    assert job_id.isdigit()
    ledger = directory / "ledger"
    output = directory / f"main job-{job_id}.out"

    def mid_epoch() -> bool:
        assert "the user trap" not in (output.read_text() if output.exists() else ""), output.read_text()
        return ledger.exists() and ledger.read_text().count("\n") >= 10

    try:
        wait_until(mid_epoch, timeout_s=90, what="mid-epoch")
        nodes = dict(
            re.findall(r"HetJobOffset=(\d).*?\n\s+NodeList=(\S+)", run("scontrol", "show", "job", job_id), re.S)
        )
        assert nodes.keys() == {"0", "1"}
        assert nodes["0"].startswith("gpu")
        assert nodes["1"].startswith("cpu")

        job_directory = directory / ".hetstream" / f"job-{job_id}"
        workers = processes("worker", f"file:{job_directory}/address")
        leaders = [pid for pid in workers if parent(pid) not in workers]
        assert len(leaders) == 2
        os.kill(leaders[0], signal.SIGKILL)
        assert ledger.read_text().count("\n") < 40, "the kill came too late to be in mid-epoch"

        wait_until(
            lambda: not run("squeue", "--noheader", "--states=PD,R,CG"), timeout_s=120, what="the end of the job"
        )
        assert "ExitCode=7:0" in run("scontrol", "show", "job", job_id)
    finally:
        subprocess.run(["scancel", "--quiet", job_id], env=environ, check=False)

    assert "cpus=2 arguments=one two words" in output.read_text()
    assert "the user trap saw 7" in output.read_text()
    lines = ledger.read_text().splitlines()
    for epoch in ("0", "1"):
        ids = Counter(
            int(number) for line in lines if line.startswith(f"{epoch} ") for number in line.split()[1].split(",")
        )
        assert sorted(ids) == list(range(640)), "lost samples"
        assert max(ids.values()) == 1, "duplicated samples"
    subprocess.run(
        [HETSTREAM, "run", "--data-workers", "0", "--", sys.executable, PROGRAM, "local"],
        cwd=directory, env=os.environ | {"DECODE_S": "0"}, check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    assert lines == (directory / "local").read_text().splitlines(), "another order, or other bytes"

    wait_until(lambda: not (job_directory / "address").exists(), timeout_s=60, what="the removal of the keys")
    assert not (job_directory / "dispatcher").exists()
    assert "80 steps, 1280 samples" in (job_directory / "master.log").read_text()
    assert "started: it ended 1 time in a row" in (job_directory / "master.log").read_text()
    wait_until(lambda: not processes(f"file:{job_directory}/address"), timeout_s=60, what="the end of every process")
