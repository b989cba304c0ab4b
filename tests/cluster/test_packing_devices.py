"""Shared GPUs where Slurm constrains devices by control groups: what a job can open, and where packing is refused."""

from __future__ import annotations

import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.clusters import Devcluster, running_cluster
from tests.conftest import WaitUntil
from tests.devcluster.cgroups import why_not
from tests.devcluster.roots import DEFAULT_CACHE_DIR, choose_programs
from tests.devcluster.spec import ClusterShape

HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
pytestmark = pytest.mark.slurm
OPENS = "for number in 0 1; do (: <{devices}/gpu$number) 2>/dev/null && echo $number; done; echo told"


def boot_constrained(release: str) -> AbstractContextManager[Devcluster]:
    """Boot a cluster of a release with shared GPUs and constrained devices."""
    if reason := why_not(choose_programs(release, DEFAULT_CACHE_DIR, print).version):
        pytest.skip(reason)
    return running_cluster("devices", ClusterShape(1, 2, 0, 4), release, packing=True, cgroups=True)


@pytest.mark.shows("Slurm 22.05 with ConstrainDevices: `doctor` says what packing needs, and the packer does not begin")
def test_slurm_22_05_gives_nobody_access_and_the_packer_says_so() -> None:
    with boot_constrained("host") as cluster:
        environ = {**cluster.env, "HETSTREAM_OPPORTUNISTIC_PARTITIONS": "opp"}
        for words, code in ((["doctor"], 3), (["gpu", "pack", "--once", "--lock", str(cluster.out_dir / "lock")], 1)):
            done = subprocess.run([HETSTREAM, *words], env=environ, capture_output=True, text=True, check=False)
            assert (done.returncode, "gres_opp.so" in done.stdout + done.stderr) == (code, True), (
                done.stdout + done.stderr
            )


@pytest.mark.shows("jobs that share a GPU see the same one, and can open no other")
@pytest.mark.slow
def test_a_job_opens_the_gpu_that_it_shares_and_no_other(wait_until: WaitUntil) -> None:
    with boot_constrained("24.11") as cluster:
        words = ["--parsable", "--mem=100", f"--output={cluster.out_dir}/%j.out"]
        script = OPENS.format(devices=cluster.state_dir / "dev")
        held = cluster.run("sbatch", *words, "-pgpu", "--gpus=1", f"--wrap={script}; sleep 60")
        seen = {}

        def told(job: str) -> bool:
            path = cluster.out_dir / f"{job}.out"
            seen[job] = path.read_text().split() if path.exists() else []
            return "told" in seen[job]

        wait_until(lambda: told(held), 30, "the guaranteed job")
        for number in ("0", "1"):
            job = cluster.run("sbatch", *words, "-popp", f"--wrap={script}")
            fields = ["ReqNodeList=gpu0", f"Gres=opp:p{number}:1", f"Comment=hetstream:gpu={number}"]
            cluster.run("scontrol", "update", f"JobId={job}", *fields)
            cluster.run("scontrol", "release", job)
            wait_until(lambda job=job: told(job), 30, "the opportunistic job")
            assert seen[job] == [number, "told"]
        assert seen[held] == ["0", "told"]
