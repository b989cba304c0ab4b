"""`hetstream job` of jobs without data workers: why they wait, what they were given, and what they used of it."""

from __future__ import annotations

import getpass
import json
import os
from pathlib import Path

import pytest
from recorded import Recorded, hours_ago, job

from hetstream.slurm_plugin.cli.screen import show_again
from hetstream.slurm_plugin.client.accounting import SACCT_FIELDS

ACCOUNTING = "AccountingStorageType   = accounting_storage/slurmdbd\n"
GATHERS = "JobAcctGatherType       = jobacct_gather/cgroup\n"
FIELDS = (*SACCT_FIELDS[:-1], "JobID", "TRESUsageInTot", "ExitCode", "JobName")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Jobs 41, which waits, and 42, which has run for three hours; a place without a job's directory."""
    directory = tmp_path / "bin"
    directory.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    slurm = Recorded(directory)
    config = [
        line
        for line in (directory / "config").read_text().splitlines(keepends=True)
        if not line.startswith(("AccountingStorageType ", "JobAcctGatherType "))
    ]
    slurm.write("config", "".join(config) + ACCOUNTING + GATHERS)
    return slurm


def accounting(slurm: Recorded, *rows: dict[str, str]) -> None:
    """An sacct that prints these, of jobs and of their steps."""
    lines = ["@".join((dict.fromkeys(FIELDS, "") | row)[name] for name in FIELDS) for row in rows]
    slurm.write("sacct.txt", "\n".join(lines) + "\n")
    asked = """d=$(printf '%s' "$*" | sed -n 's/.*--delimiter=\\([^ ]*\\) .*/\\1/p')"""
    slurm.tool("sacct", f'echo "$@" >> {slurm.directory}/asked; {asked}; sed "s/@/$d/g" {slurm.directory}/sacct.txt')


def ended(number: str = "40", **more: str) -> dict[str, str]:
    """Four CPUs and 8 GiB on one node for 1000 s."""
    return {
        "JobIDRaw": number, "JobID": number, "JobName": "train", "User": "alice", "State": "COMPLETED",
        "Submit": "2026-11-20T16:00:00", "Start": "2026-11-20T16:00:00", "End": "2026-11-20T16:16:40",
        "ElapsedRaw": "1000", "AllocCPUS": "4", "AllocTRES": "billing=4,cpu=4,mem=8G,node=1", "TotalCPU": "00:33:20",
        "TimelimitRaw": "60", "ExitCode": "0:0", "Partition": "gpu", "NodeList": "g1",
    } | more  # fmt: skip


def test_a_pending_job_is_told_as_why_tells_it(slurm: Recorded) -> None:
    shown = slurm.run("job 41")
    assert shown.returncode == 0, shown.stderr
    assert "room now" in shown.stdout
    assert shown.stdout.splitlines()[1:3] == slurm.run("why 41").stdout.splitlines()[1:3]
    document = json.loads(slurm.run("job 41 --json").stdout)
    assert document["why"]["job"] == "41"
    assert document["uses"] == []


def test_a_job_that_runs_is_told_with_what_it_uses_now(slurm: Recorded) -> None:
    usage = "cpu=03:00:00,energy=0,mem=50M,pages=0"
    slurm.tool("sstat", f'case "$*" in *delimiter*) exit 1;; esac; echo "42.batch|{usage}"')
    shown = slurm.run("job 42")
    assert shown.returncode == 0, shown.stderr
    (row,) = json.loads(slurm.run("job 42 --json").stdout)["uses"]
    assert (row["job"], row["state"], row["cpus"], row["memory_share"]) == ("42", "RUNNING", 2, 0.5)
    assert 0.3 < row["cpu_share"] <= 0.5, "three hours of CPU time in three to four hours on two CPUs"
    assert "50 %" in shown.stdout
    slurm.tool("sstat", "echo 'sstat: error: no such job' >&2; exit 1")
    (report,) = json.loads(slurm.run("job 42 --json").stdout)["notes"]
    assert report.startswith("what it uses now is not known: sstat: ")


def test_an_ended_job_is_told_with_its_efficiency(slurm: Recorded) -> None:
    step = {"JobIDRaw": "40.batch", "JobID": "40.batch", "TRESUsageInTot": "cpu=00:33:20,mem=2G", "ElapsedRaw": "1000"}
    accounting(slurm, ended(State="FAILED", ExitCode="3:0"), step)
    shown = slurm.run("job 40")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("job 40 (train) of alice has ended: FAILED, exit code 3\n")
    head, row = shown.stdout.splitlines()[2:4]
    assert dict(zip(head.split(), row.replace(" %", "%").split(), strict=True)) == {
        "JOB": "40", "NAME": "train", "STATE": "FAILED", "NODES": "1", "CPUS": "4", "CPU": "50%", "GIB": "8.0",
        "MEMORY": "25%", "TIME": "00:16:40", "OF": "01:00:00",
    }  # fmt: skip
    assert "--jobs=40" in (slurm.directory / "asked").read_text()


def test_each_component_of_a_heterogeneous_job_has_a_line_and_gpus_of_whom_has_them(slurm: Recorded) -> None:
    gpus = "billing=4,cpu=4,gres/gpu=2,mem=8G,node=1"
    busy = {"JobIDRaw": "40.0", "JobID": "40+0.0", "TRESUsageInAve": "gres/gpuutil=60", "ElapsedRaw": "1000",
            "AllocTRES": gpus, "TRESUsageInTot": "mem=1G"}  # fmt: skip
    accounting(slurm, ended("40", JobID="40+0", AllocTRES=gpus), busy, ended("41", JobID="40+1"))
    slurm.write("queue", job("42", "RUNNING", NodeList="g1"))
    rows = json.loads(slurm.run("job 40 --json").stdout)["uses"]
    assert [(row["job"], row["gpus"], row["gpu_share"], row["memory_share"]) for row in rows] == [
        ("40+0", 2, 0.6, 0.125), ("40+1", 0, None, None),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (GATHERS, "what an ended job used is not recorded: this cluster has no accounting"),
        (ACCOUNTING + "JobAcctGatherType       = jobacct_gather/none\n", "JobAcctGatherType=jobacct_gather/none"),
    ],
)
def test_what_nobody_recorded_is_said_to_be_so(slurm: Recorded, config: str, said: str) -> None:
    text = (slurm.directory / "config").read_text().replace(ACCOUNTING, "").replace(GATHERS, "")
    slurm.write("config", text + config)
    accounting(slurm, ended(TotalCPU="00:00:00"))
    times = {"StartTime": hours_ago(3), "EndTime": hours_ago(2)}
    slurm.write("ended", job("40", "COMPLETED", NodeList="g1", **times))
    everything = (slurm.directory / "squeue").read_text().removeprefix("#!/bin/sh\n")
    filed = everything.replace(f"{slurm.directory}/queue", "$file")
    slurm.tool(
        "squeue",
        f'file={slurm.directory}/queue; case "$*" in *states=all*) file={slurm.directory}/ended;; esac; {filed}',
    )
    shown = slurm.run("job 40")
    assert shown.returncode == 0, shown.stderr
    assert "has ended: COMPLETED" in shown.stdout
    assert said in shown.stdout


def test_all_jobs_of_a_user_are_shown_by_me(slurm: Recorded) -> None:
    me = getpass.getuser()
    slurm.write("queue", job("41", "PENDING", UserName=me) + job("42", "RUNNING", NodeList="g1", UserName="alice"))
    accounting(slurm, ended(User=me))
    rows = json.loads(slurm.run("job --me --json").stdout)["uses"]
    assert [(row["job"], row["state"]) for row in rows] == [("40", "COMPLETED"), ("41", "PENDING")]
    assert f"--user={os.geteuid()}" in (slurm.directory / "asked").read_text()
    assert [row["job"] for row in json.loads(slurm.run("jobs --me --json").stdout)["jobs"]] == ["41"]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("job 77", 1, "no directory .hetstream/job-77 here"),
        ("job 41 42", 2, "'42': one job at a time"),
        ("job --me 41", 2, "--me names the jobs"),
        ("job --events --logs 41", 2, "one of them"),
        ("job --logs", 2, "--logs: name a job, or its directory"),
        ("job 41 --watch --interval 0", 2, "--interval 0: must be more than 0"),
    ],
)
def test_a_wrong_command_line_or_job_is_one_line(slurm: Recorded, line: str, code: int, said: str) -> None:
    accounting(slurm)
    done = slurm.run(line)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), done
    assert said in done.stderr


def test_what_is_watched_is_shown_again(slurm: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    class Enough(Exception):
        pass

    looked: list[float] = []

    def rest(seconds: float) -> None:
        looked.append(seconds)
        if len(looked) == 2:
            raise Enough

    monkeypatch.setattr(f"{show_again.__module__}.sleep_in_parts", rest)
    with pytest.raises(Enough):
        slurm.run("job 41 --watch --interval 5")
    assert looked == [5.0, 5.0]
