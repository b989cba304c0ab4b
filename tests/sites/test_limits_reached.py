"""Limits that a submission meets: components of one job, tasks of an array, jobs that slurmctld keeps (MaxJobCount)."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.devcluster.sites import LIMITS

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = (LIMITS,)
HETSTREAM = Path(sys.executable).with_name("hetstream")
DIRECTIVE = "#HETSTREAM --data-workers={} --data-worker-cpus=1 --data-worker-partition=cpu\n"
SCRIPT = "#!/bin/bash\n#SBATCH --gpus=1 -c4 --mem-per-cpu=1000 --time=10 --output=/dev/null\n{}sleep 600\n"


def submit(site: Any, directory: Path, text: str, *options: str) -> subprocess.Popen[str]:
    (directory / "train.sbatch").write_text(text)
    temporary = directory / "tmp"
    temporary.mkdir(exist_ok=True)
    return subprocess.Popen(
        [HETSTREAM, "sbatch", *options, "train.sbatch"], cwd=directory, text=True,
        env={**site.cluster.env, "TMPDIR": str(temporary)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def check_nothing_left(site: Any, directory: Path, jobs: str = "") -> None:
    assert [*(directory / "tmp").iterdir()] == []
    assert sorted(os.listdir(directory)) == ["as-nobody", "tmp", "train.sbatch"]
    assert site.run("squeue", "--all", "--noheader", "--format=%A") == jobs


def test_too_many_components_and_tasks_are_one_error(site: Any, tmp_path: Path) -> None:
    components = "#SBATCH hetjob\n#SBATCH --partition=cpu -n1 --mem=100\n" * 128
    with submit(site, tmp_path, SCRIPT.format(components + DIRECTIVE.format(1))) as done:
        out, err = done.communicate(timeout=60)
    assert (done.returncode, out, err.count("\n")) == (2, "", 1)
    assert "starts a component, but hetstream adds the data workers as component 1 itself" in err
    check_nothing_left(site, tmp_path)
    with submit(site, tmp_path, SCRIPT.format(DIRECTIVE.format("0-1")), "--array=0-11") as done:
        out, err = done.communicate(timeout=60)
    assert (done.returncode, out) == (1, "")
    assert "Invalid job array specification" in err.splitlines()[-1]
    check_nothing_left(site, tmp_path)


def test_a_job_that_slurmctld_has_no_place_for_is_waited_for_as_sbatch_does(site: Any, tmp_path: Path) -> None:
    """There is one place, for the first of two components: sbatch tries again, and who ends it leaves nothing."""
    conf = Path(site.cluster.env["SLURM_CONF"])
    before = conf.read_text()
    held = site.submit("--hold", "--mem=100", "--time=10")
    known = len(site.run("squeue", "--all", "--noheader", "--states=all", "--format=%A").split())
    try:
        conf.write_text(f"{before}MaxJobCount={known + 1}\n")
        site.run("scontrol", "reconfigure")
        site.wait_until(lambda: re.search(rf"MaxJobCount += {known + 1}\n", site.run("scontrol", "show", "config")), 30)
        with submit(site, tmp_path, SCRIPT.format(DIRECTIVE.format(1))) as sbatch:
            assert sbatch.stderr is not None
            said = sbatch.stderr.readline()
            if said:
                assert "unable to accept job" in said
                sbatch.send_signal(signal.SIGTERM)
            out, _ = sbatch.communicate(timeout=60)
        if said:
            assert (sbatch.returncode != 0, out) == (True, "")
        else:  # slurmctld 26.05 takes the job beyond its limit
            assert (sbatch.returncode, out.startswith("Submitted batch job ")) == (0, True)
            site.run("scancel", out.split()[-1])
            site.wait_until(lambda: site.run("squeue", "--all", "--noheader", "--format=%A") == held, 60)
        check_nothing_left(site, tmp_path, held)
    finally:
        conf.write_text(before)
        site.run("scontrol", "reconfigure")
