"""A site that hides jobs and reservations of others: what a plain user is told of his jobs, and that it is not all."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.sites.conftest import DROP, NOBODY

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.every_release]
KINDS = ()
SETTINGS = ("PrivateData=jobs,reservations",)
SMALL = ("--mem=100", "--time=60")
AS_USER = Path(__file__).parents[1] / "slurm_plugin" / "programs" / "as_user.py"
LINE = "PrivateData=jobs,reservations: all figures are of what this user may see, and there may be more"


def told(site: Any, *words: str) -> dict[str, Any]:
    """What `hetstream VERB --json` tells nobody, who is a plain user."""
    command = [sys.executable, str(AS_USER), str(NOBODY), *words, "--json"]
    environ = {**site.cluster.env, "HOME": "/nonexistent"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    assert LINE in found["notes"]
    return found


def test_a_plain_user_exports_what_is_hidden_only_if_he_says_so(
    site: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    command = [sys.executable, str(AS_USER), str(NOBODY), "exporter", "--listen", "0", "--fresh"]
    environ = {**site.cluster.env, "HOME": "/nonexistent"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "PrivateData=jobs,reservations hides a part of the cluster" in done.stderr
    log = tmp_path / "log"
    with log.open("w") as stderr:
        server = subprocess.Popen([*command, "--public"], env=environ, stderr=stderr)
    try:
        wait_until(lambda: "http://" in log.read_text(), 60)
        (url,) = re.findall(r"http://\S+", log.read_text())

        def answers() -> bool:
            try:
                with urllib.request.urlopen(url, timeout=30) as answer:
                    return bool(answer.read())
            except urllib.error.URLError:
                return False

        wait_until(answers, 60)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == -signal.SIGINT


def submit(site: Any, *options: str) -> str:
    """A job of nobody's."""
    argv = (*DROP.split(), "sbatch", "--parsable", "--chdir=/", "--output=/dev/null", *options, "--wrap=exec sleep 600")
    job: str = site.run(*argv)
    return job


def test_a_plain_user_is_told_of_his_own_gpus_and_no_others(site: Any) -> None:
    """gpu0: 2 GPUs of root's and 1 of nobody's. gpu1: nobody's, as a whole, with 1 GPU asked for."""
    theirs = site.submit("-wgpu0", "--gpus=2", "-c2", *SMALL)
    mine = submit(site, "-wgpu0", "--gpus=1", "-c2", *SMALL)
    whole = submit(site, "-wgpu1", "--gpus=1", "--exclusive", *SMALL)
    site.settle(**dict.fromkeys((theirs, mine, whole), "RUNNING"))
    assert {row["job"]: row["gpus"] for row in told(site, "jobs")["jobs"]} == {mine: 1, whole: 4}
    assert {row["job"]: row["gpus"] for row in site.told("jobs")["jobs"]} == {theirs: 2, mine: 1, whole: 4}
    assert site.told("jobs")["meta"]["hidden"] == ""
    util = told(site, "util", "--by=user")["groups"]
    assert [(row["user"], row["num_jobs"]) for row in util] == [("nobody", 2)]
    hours = {row["user"]: row["gpu_hours"] for row in site.told("util", "--by=user")["groups"]}
    assert util[0]["gpu_hours"] == pytest.approx(hours["nobody"], abs=5 * 10 / 3600)
    for verb in ("frag", "advise", "report"):
        assert told(site, verb)["meta"]["hidden"] == "PrivateData=jobs,reservations"
    site.run("scancel", mine, whole)


def test_a_plain_user_is_not_told_that_nobody_is_ahead(site: Any) -> None:
    """root's job waits for all CPUs of both nodes with GPUs, and keeps a longer one of nobody's from the free ones."""
    theirs = site.submit("-wgpu0", "-c16", "--time=10", "--mem=100")
    site.settle(**{theirs: "RUNNING"})
    ahead = site.submit("-N2", "-pgpu", "--exclusive", *SMALL)
    site.settle(**{ahead: "PENDING Resources"})
    mine = submit(site, "-pgpu", "-c2", "--time=600", "--mem=100")
    site.settle(**{mine: "PENDING Priority"})
    (blocker,) = told(site, "why", mine)["blockers"]
    assert (blocker["kind"], "cannot be known (PrivateData=jobs" in blocker["text"]) == ("hidden", True)
    assert [row["waits_for"] for row in told(site, "jobs")["jobs"]] == ["hidden"]
    (kind, _), *_ = site.blockers(mine)
    assert kind in ("backfill", "priority"), "root sees who is ahead"
    site.run("scancel", mine)
