"""A job and the site daemon on real Slurm: the job grows as far as its share goes, and further when there is more."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.elastic_job import ElasticJob
from hetstream.hetjob.site.client import SiteSettings, UnixAddress, ask
from hetstream.hetjob.site.messages import AskStatus, JobStatus, ShowStatus

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]


@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
def test_a_starving_job_grows_as_far_as_its_share(
    devcluster: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    """Four data workers would feed it. At first two CPUs of the pool are free, the others are held by another job."""
    address = UnixAddress(tmp_path / "socket")
    options = ["--allocate", "--pool", "cpu", "--interval", "5", "--state-dir", str(tmp_path / "state")]
    argv = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "site", "daemon", "--address", str(address), *options]
    held = ["sbatch", "--parsable", "-p", "cpu", "-N4", "-n62", "--mem-per-cpu=1", "--output=/dev/null"]
    other = devcluster.run(*held, "--wrap=sleep 600")
    wait_until(lambda: devcluster.run("squeue", "-hj", other, "-o", "%t") == "R", 60)
    env = {**devcluster.env, "HETSTREAM_DAEMON": str(address)}
    directives = "--data-workers=0-6 --data-worker-cpus=1 --data-worker-cooldown=2"
    job = None
    with (tmp_path / "log").open("w") as log:
        daemon = subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def known() -> list[JobStatus]:
        status = ask(SiteSettings(address, None), AskStatus(), 30)
        assert isinstance(status, ShowStatus)
        return list(status.jobs)

    try:
        wait_until(address.path.exists, 60, "the daemon")
        job = ElasticJob(
            devcluster.out_dir / "site", env, directives, "--make-s=0.1", "--step-s=0.03", "--num-steps=60"
        )
        wait_until(lambda: [one for one in known() if one.wanted > 2], 120, "a wish for more than two")
        wait_until(lambda: len(job.companions("R")) == 2, 60, "two companions")
        wait_until(lambda: [one.limit for one in known()] == [2], 30, "a limit of two")
        assert "by the site 2" in job.status()["elastic"]
        devcluster.run("scancel", other)
        wait_until(lambda: len(job.companions("R")) >= 4, 90, "as many as feed it")
        assert "site limit=2: 2 of " in (job.home / "master.log").read_text()
        # Without the daemon the job goes on as it is.
        daemon.kill()
        steps = len(job.steps())
        wait_until(lambda: len(job.steps()) > steps + 80, 60, "steps")
        assert len(job.companions("R")) >= 4
    finally:
        daemon.kill()
        daemon.wait(60)
        devcluster.run("scancel", other)
        if job is not None:
            job.cancel()
            wait_until(job.has_ended, timeout_s=120, what="an empty queue")
    assert "Traceback" not in (tmp_path / "log").read_text()
