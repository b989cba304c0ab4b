"""Two clusters with one slurmdbd: who names the other one (`--clusters`, SLURM_CLUSTERS) is told of that one alone."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.devcluster.sites import ACCOUNTING
from tests.sites.conftest import HETSTREAM

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (ACCOUNTING,)
SCRIPT = "#!/bin/bash\n#SBATCH --gpus=1 --cpus-per-task=8 --time=10\n#HETSTREAM --data-workers=1\nsrun true\n"


def own_name(site: Any) -> str:
    """The name of the cluster that the environment names."""
    return str(site.cluster.record.cluster_name)


def converted(site: Any, place: Path, *words: str, text: str = SCRIPT, **environ: str) -> str:
    """The script that `hetstream convert` prints."""
    (place / "train.sbatch").write_text(text)
    done = subprocess.run(
        [HETSTREAM, "convert", *words, "train.sbatch"], cwd=place, env={**site.cluster.env, **environ},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return done.stdout


def test_a_job_of_another_cluster_is_converted_for_that_one(site: Any, other: str, tmp_path: Path) -> None:
    """Here 8 CPUs bring 8 * 4000 MB, there 8 * 500 MB, and the data workers go to that cluster's default partition."""
    here = converted(site, tmp_path)
    assert "--mem-per-cpu=16000M" in here
    named = SCRIPT.replace("--time=10", f"--time=10 -M {other}")
    for there in (
        converted(site, tmp_path, text=named),
        converted(site, tmp_path, SBATCH_CLUSTERS=other),
        converted(site, tmp_path, SLURM_CLUSTERS=other),
        # sbatch's environment wins over the script.
        converted(site, tmp_path, text=SCRIPT.replace("--time=10", "--time=10 -M nowhere"), SLURM_CLUSTERS=other),
    ):
        assert "--mem-per-cpu=2000" in there
        assert re.search(r"--partition=qq\b", there)


def test_a_job_of_any_cluster_keeps_the_cpus_that_bring_its_memory(site: Any, other: str, tmp_path: Path) -> None:
    text = SCRIPT.replace("--data-workers=1", "--data-workers=1 --data-worker-partition=cpu")
    for clusters in (f"{own_name(site)},{other}", "nowhere"):
        said = converted(site, tmp_path, text=text.replace("--time=10", f"--time=10 -M {clusters}"))
        assert "--cpus-per-task=2" not in said


def test_what_another_cluster_used_is_of_that_one(site: Any, other: str) -> None:
    job = site.submit("--gpus=1", "-c2", "--mem=100", command="sleep 2")
    site.wait_until(lambda: site.told("util")["summary"]["num_jobs"] > 0, 60, "the job in accounting")
    site.run("scancel", job)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(site.cluster.env, "SLURM_CLUSTERS", other)
        told = site.told("util")
        assert (told["summary"]["num_jobs"], told["groups"]) == (0, [])
        patch.setitem(site.cluster.env, "SLURM_CLUSTERS", f"{other},{own_name(site)}")
        said = subprocess.run([HETSTREAM, "frag"], env=site.cluster.env, capture_output=True, text=True, timeout=60)
    assert said.returncode != 0
    assert "SLURM_CLUSTERS" in said.stderr
