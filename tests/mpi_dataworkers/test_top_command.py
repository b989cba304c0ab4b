"""`hetstream job` and `hetstream job --events` as a user calls them, beside a running service."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets

from hetstream import DataLoader
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.mpi_dataworkers.wire.messages import LoaderStats
from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.insight.utilisation import wait_shares

SQUEUE = """#!/bin/sh
echo "slurm_load_jobs error: Invalid job id specified" >&2
exit 1
"""
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))


def hetstream(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([HETSTREAM, *words], capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.mark.shows("what happens can be seen by `stats()`, status, events and Prometheus")
def test_top_and_events_show_a_running_service(service: Any) -> None:
    service.start_workers()
    with DataLoader(datasets.Augmented(64), batch_size=4, service=service.name, job_name="shown") as loader:
        batches = iter(loader)
        next(batches)
        shown = hetstream("job", "--service", service.name)
        assert shown.returncode == 0, shown.stderr
        assert re.search(r"^shown Augmented test_top_command\.py:\d+ rank 0/1 ", shown.stdout, re.MULTILINE)
        assert "\x1b" not in shown.stdout, "no terminal, no colours"
        (row,) = json.loads(hetstream("job", "--json", str(service.address_file.parent)).stdout)["service"]["loaders"]
        assert (row["job"], row["epoch"], row["num_steps"]) == ("shown", 0, 16)
        list(batches)
    told = hetstream("job", "--events", "--service", service.name)
    assert told.returncode == 0, told.stderr
    assert "all steps were taken" in told.stdout
    lines = hetstream("job", "--events", "--json", "--service", service.name).stdout.splitlines()
    assert json.loads(lines[0])["event"] == "DispatcherStarted"
    assert len(lines) == len(told.stdout.splitlines())


def told_by(service: Any) -> list[LoaderStats]:
    """What the loaders have told their dispatcher."""
    with StatusClient(running_service(service.address_file)) as client:
        return [row.totals for row in client.fetch().loaders]


@pytest.fixture
def service_of_job(service_in: Any, tmp_path: Path) -> Iterator[Any]:
    """A dispatcher in the directory of job 7, which is no link."""
    (tmp_path / ".hetstream" / "job-7").mkdir(parents=True, mode=0o700)
    running = service_in(tmp_path / ".hetstream", "job-7")
    running.start_dispatcher()
    yield running
    running.stop()


@pytest.mark.shows("`util` counts allocated and effective hours, and says what is not measured")
def test_a_running_job_tells_how_long_its_trainers_wait(service_of_job: Any, tmp_path: Path, wait_until: Any) -> None:
    service = service_of_job
    job = Job(7, "train", "me", ("gpu",), "RUNNING", "", 1, 4, 1, 4, 0, uid=os.geteuid(), work_dir=str(tmp_path))
    service.start_workers()
    assert wait_shares([job]) == {}, "no loader has told anything"
    with DataLoader(datasets.Augmented(64), batch_size=4, service=service.name) as loader:
        began = time.monotonic()
        batches = iter(loader)
        next(batches)  # of a pass that goes on: it may be the only one, and take weeks
        wait_until(lambda: "7" in wait_shares([job]), what="the first step to be told")
        assert wait_shares([replace(job, uid=os.geteuid() + 1)]) == {}, "what another user says lies there is not read"
        for _ in batches:
            pass
        for _ in zip(loader, range(4), strict=False):  # another that does not end
            pass
        shares = wait_shares([job])
        (told,) = told_by(service)
        lasted_s = time.monotonic() - began
    assert set(shares) == {"7"}
    assert 0 < shares["7"] <= 1
    assert 0 < told.wait_s <= told.elapsed_s <= lasted_s


def test_top_on_a_terminal_draws_until_ctrl_c(service: Any) -> None:
    service.start_workers()
    ours, theirs = pty.openpty()
    command = [HETSTREAM, "job", "--watch", "--interval", "0.1", "--service", service.name]
    with subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE) as top:
        os.close(theirs)
        seen = b""
        while seen.count(b"data worker process") < 3:
            seen += os.read(ours, 65536)
        top.send_signal(signal.SIGINT)
        while True:
            try:
                seen += os.read(ours, 65536)
            except OSError:  # the terminal's other end is closed
                break
        assert top.stderr is not None
        assert top.stderr.read() == b""
    os.close(ours)
    assert top.returncode == 130
    assert b"DATA WORKER" in seen
    screen, shown = seen.split(b"\x1b[?1049l")
    assert screen.startswith(b"\x1b[?1049h"), "on a screen of its own"
    assert b"DATA WORKER" in shown, "what was seen last stays"
    assert b"\x1b[?25h" in screen + shown, "the cursor is back"


def test_following_events_ends_by_ctrl_c(service: Any) -> None:
    command = [HETSTREAM, "job", "--events", "--watch", "--json", "--service", service.name]
    service.start_workers()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as follower:
        assert follower.stdout is not None
        assert follower.stderr is not None
        names = [json.loads(follower.stdout.readline())["event"] for _ in range(2)]
        assert names == ["DispatcherStarted", "DataWorkerRegistered"]
        service.start_workers()
        assert json.loads(follower.stdout.readline())["data_worker"] == 1
        follower.send_signal(signal.SIGINT)
        assert follower.stderr.read() == b""
    assert follower.returncode == 130


def test_there_is_one_clear_error_where_there_is_no_service(tmp_path: Path) -> None:
    missing = hetstream("job", "--service", f"file:{tmp_path}/address")
    assert missing.returncode == 1
    assert missing.stderr.count("\n") == 1
    assert "there is no address file" in missing.stderr
    for words in (["job", "8123"], ["job", "--events", "8123"]):
        # Without Slurm, and with a Slurm that does not know the job.
        for says, squeue in (
            ("squeue: No such file or directory", ""),
            ("squeue: slurm_load_jobs error: Invalid job id", SQUEUE),
        ):
            if squeue:
                (tmp_path / "squeue").write_text(squeue)
                (tmp_path / "squeue").chmod(0o755)
            unknown = hetstream(*words, cwd=tmp_path, env=os.environ | {"PATH": str(tmp_path)})
            assert unknown.returncode == 1
            assert unknown.stderr.count("\n") == 1
            assert "no directory .hetstream/job-8123 here, and Slurm does not say where job 8123" in unknown.stderr
            assert says in unknown.stderr
            assert "run this there, or give the path of that directory" in unknown.stderr
        (tmp_path / "squeue").unlink()
    none = hetstream("job", "--events", "--service", f"file:{tmp_path}/address")
    assert none.returncode == 2
    assert "no events.jsonl" in none.stderr
