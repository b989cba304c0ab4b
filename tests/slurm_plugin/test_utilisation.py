"""Utilisation: sums by hand, what sacct prints, and `hetstream util` on a real cluster."""

from __future__ import annotations

import base64
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client.accounting import SACCT_FIELDS, Usage, from_queue, from_sacct, sacct_rows, usages_of
from hetstream.slurm_plugin.client.model import Gres, HetComponent, Job, Node
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.slurm_units import moment
from hetstream.slurm_plugin.errors import UnreadableAnswer
from hetstream.slurm_plugin.insight.utilisation import Window, capacity, together, utilisation, wait_shares

HOUR = 3600.0


def usage(job: str = "1", **more: Any) -> Usage:
    """4 CPUs and 2 GPUs for the first two hours."""
    return replace(Usage(job, "train", "alice", "lab", "gpu", 4, 2, 0.0, 2 * HOUR), **more)


@pytest.mark.shows("`util` counts allocated and effective hours, and says what is not measured")
def test_only_what_lies_in_the_window_counts() -> None:
    window = Window(HOUR, 3 * HOUR)
    jobs = [
        usage("before", end_s=HOUR),
        usage("half"),  # 1 h
        usage("inside", start_s=1.5 * HOUR),  # 0.5 h
        usage("running", start_s=2.5 * HOUR, end_s=None, user="bob"),  # 0.5 h
        usage("after", start_s=4 * HOUR, end_s=None),
    ]
    found = utilisation(jobs, window, "user")
    assert {name: (one.num_jobs, one.cpu_hours, one.gpu_hours) for name, one in found.items()} == {
        "alice": (2, 6.0, 3.0), "bob": (1, 2.0, 1.0),
    }  # fmt: skip
    assert together(jobs, window).gpu_hours == 4.0


@pytest.mark.shows("`util` counts allocated and effective hours, and says what is not measured")
def test_effective_is_measured_or_left_out() -> None:
    window = Window(0.0, 2 * HOUR)
    jobs = [
        usage("sacct", cpu_used_s=4 * HOUR, gpu_share=0.25),  # 4 of 8 CPU hours, 1 of 4 GPU hours
        usage("hetstream", wait_share=0.5),  # 2 of 4 GPU hours
        usage("unknown"),
        usage("no-gpus", gpus=0, cpu_used_s=99 * HOUR),  # never more than all
    ]
    one = together(jobs, window)
    assert (one.cpu_hours, one.cpu_hours_measured, one.cpu_hours_used) == (32.0, 16.0, 12.0)
    assert (one.gpu_hours, one.gpu_hours_measured, one.gpu_hours_used) == (12.0, 8.0, 3.0)
    assert (one.waits_known, one.wait_gpu_hours) == (True, 2.0)


def test_capacity_is_of_the_nodes_in_use() -> None:
    gpus = (Gres("gpu", "", 4),)
    nodes = [
        Node("g0", frozenset({"MIXED"}), ("gpu", "opp"), 16, 0, 1, 0, gpus),
        Node("g1", frozenset({"IDLE", "DRAIN"}), ("gpu",), 16, 0, 1, 0, gpus),
        Node("c0", frozenset({"IDLE"}), ("cpu",), 8, 0, 1, 0),
    ]
    assert (capacity(nodes), capacity(nodes, "gpu"), capacity(nodes, "cpu")) == ((24, 4), (16, 4), (8, 0))


def sacct_line(**more: str) -> str:
    row = dict.fromkeys(SACCT_FIELDS, "") | {
        "JobIDRaw": "7", "User": "alice", "Account": "lab", "Partition": "gpu", "State": "COMPLETED",
        "Start": "2026-11-20T16:00:00", "End": "2026-11-20T18:00:00", "ElapsedRaw": "7200", "AllocCPUS": "4",
        "AllocTRES": "billing=4,cpu=4,gres/gpu:h200=2,gres/gpu=2,mem=8G,node=1", "TotalCPU": "1-02:03:04",
        "TRESUsageInAve": "", "TimelimitRaw": "60", "NodeList": "g1", "AdminComment": "", "JobName": "train",
    } | more  # fmt: skip
    return "\x1f".join(row[name] for name in SACCT_FIELDS) + "\n"


@pytest.mark.shows("`util` counts allocated and effective hours, and says what is not measured")
def test_lines_of_sacct() -> None:
    """Made after Slurm's documentation of sacct: there is no slurmdbd in the recorded clusters."""
    text = (
        sacct_line()
        + sacct_line(JobIDRaw="7.batch", TRESUsageInAve="cpu=00:00:10,gres/gpumem=0,gres/gpuutil=0")
        + sacct_line(JobIDRaw="7.0", ElapsedRaw="3600", TRESUsageInAve="cpu=00:00:10,gres/gpuutil=100")
        + sacct_line(JobIDRaw="8", End="Unknown", State="RUNNING", TotalCPU="00:00.000", AllocTRES="cpu=4")
        + sacct_line(JobIDRaw="9", Start="None", State="CANCELLED by 0")
    )
    seven, eight = usages_of(sacct_rows(text))
    assert (seven.gpus, seven.cpus, seven.cpu_used_s, seven.gpu_share) == (2, 4, 93784.0, 0.5)
    assert seven.end_s == moment("2026-11-20T18:00:00")
    assert (eight.end_s, eight.cpu_used_s, eight.gpus, eight.gpu_share) == (None, None, 0, None)
    with pytest.raises(UnreadableAnswer, match="sacct printed 1 fields"):
        sacct_rows("sacct: error\n")
    with pytest.raises(UnreadableAnswer, match="CPU time"):
        usages_of(sacct_rows(sacct_line(TotalCPU="much")))


def test_each_run_of_a_job_counts_with_its_own_steps() -> None:
    """A job that was requeued; the first answer has its second run still at work, the next one its end."""
    first = sacct_line(JobIDRaw="7", State="REQUEUED", AllocTRES="cpu=4,gres/gpu=2") + sacct_line(
        JobIDRaw="7.0", AllocTRES="cpu=4,gres/gpu=2", TRESUsageInAve="gres/gpuutil=80"
    )
    again = {"JobIDRaw": "7", "Start": "2026-11-21T16:00:00", "AllocTRES": "cpu=4,gres/gpu=2"}
    second = sacct_line(**again, End="Unknown", State="RUNNING") + sacct_line(
        JobIDRaw="7.0", Start=again["Start"], TRESUsageInAve="gres/gpuutil=20"
    )
    pending = sacct_line(JobIDRaw="7", Start="Unknown", End="Unknown", State="PENDING")
    ended = sacct_line(**again, End="2026-11-21T18:00:00") + second.splitlines(keepends=True)[1]
    runs = usages_of(sacct_rows(first + pending + second + first + ended))
    assert [(run.job, run.end_s, run.gpu_share) for run in runs] == [
        ("7", moment("2026-11-20T18:00:00"), pytest.approx(0.8)),
        ("7", moment("2026-11-21T18:00:00"), pytest.approx(0.2)),
    ]  # fmt: skip


def test_what_ended_steps_of_a_running_job_used_is_no_measurement_of_it() -> None:
    """`srun nvidia-smi; srun python train.py`: sacct has the CPU time of steps that have ended."""
    line = sacct_line(JobIDRaw="8", End="Unknown", State="RUNNING", TotalCPU="00:00.001", AllocTRES="cpu=4,gres/gpu=2")
    step = sacct_line(JobIDRaw="8.0", TRESUsageInAve="gres/gpuutil=1", ElapsedRaw="1")
    (running,) = usages_of(sacct_rows(line + step))
    assert (running.cpu_used_s, running.gpu_share) == (None, None)


@pytest.mark.parametrize(
    ("steps", "share"),
    [
        # The job: 2 GPUs for 2 h. Steps: GPUs, hours, gpuutil.
        ([(2, 2, 60)], 0.6),
        ([(2, 2, 0), (2, 2, 60)], 0.6),  # the batch script waits for the step beside it
        ([(2, 0.5, 80), (2, 1.5, 40)], 0.5),  # (0.8 * 0.5 + 0.4 * 1.5) / 2
        ([(1, 2, 100), (1, 2, 20)], 0.6),  # one GPU each
        ([(2, 2, 150)], 0.75),  # one task with both: they add up
        ([(2, 2, 90), (2, 2, 90)], 1.0),  # never more than all
        ([(2, 2, 9999)], 1.0),
        ([], None),
    ],
)
def test_how_busy_gpus_were(steps: list[tuple[int, float, int]], share: float | None) -> None:
    text = sacct_line() + "".join(
        sacct_line(
            JobIDRaw=f"7.{number}", AllocTRES=f"cpu=4,gres/gpu={gpus}", ElapsedRaw=str(int(hours * 3600)),
            TRESUsageInAve=f"cpu=00:00:10,gres/gpuutil={busy}",
        )
        for number, (gpus, hours, busy) in enumerate(steps)
    )  # fmt: skip
    (one,) = usages_of(sacct_rows(text))
    assert one.gpu_share == (None if share is None else pytest.approx(share))


def jobstats(document: object) -> str:
    return f"JS1:{base64.b64encode(gzip.compress(json.dumps(document).encode(), mtime=0)).decode()}"


def test_jobstats_has_measured_it() -> None:
    """The form of its documentation: a summary for each node, GPUs by number."""
    node = {"cpus": 4, "total_time": 3000.5, "used_memory": 1, "total_memory": 2, "gpu_total_memory": {"0": 8}}
    document = {"gpus": 3, "total_time": 7200, "nodes": {
        "g0": {**node, "gpu_utilization": {"0": 90.0, "1": 60.0}}, "g1": {**node, "gpu_utilization": {"3": 30.0}},
    }}  # fmt: skip
    step = sacct_line(JobIDRaw="7.0", TRESUsageInAve="gres/gpuutil=1")
    text = sacct_line(AdminComment=jobstats(document), TotalCPU="00:00:00") + step
    (one,) = usages_of(sacct_rows(text))
    assert (one.gpu_share, one.cpu_used_s) == (pytest.approx(0.6), 6001.0)


@pytest.mark.parametrize(
    "comment",
    [
        "JS1:Short",
        "JS1:None",
        "a note",
        "JS1:AAAA",
        jobstats([1]),
        jobstats({"nodes": 5}),
        f"JS1:{base64.b64encode(gzip.compress(bytes(64 << 20), mtime=0)).decode()}",
    ],
)
def test_an_admin_comment_that_is_something_else(comment: str) -> None:
    step = sacct_line(JobIDRaw="7.0", TRESUsageInAve="gres/gpuutil=50")
    (one,) = usages_of(sacct_rows(sacct_line(AdminComment=comment) + step))
    assert one.gpu_share == 0.5


def test_parts_of_gpus_count_as_parts() -> None:
    allocated = {"cpu=4,gres/gpu=7,gres/gpu:a100_1g.5gb=7": 1, "gres/gpu:1g.10gb=7,gres/gpu:a100=2,gres/gpu=9": 3}
    for text, gpus in allocated.items():
        (one,) = usages_of(sacct_rows(sacct_line(AllocTRES=text)))
        assert one.gpus == pytest.approx(gpus)


def test_sacct_is_asked_day_by_day_and_not_for_ever(tmp_path: Path) -> None:
    tool = tmp_path / "sacct"
    line = sacct_line().rstrip("\n").replace("\x1f", "@")
    tool.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"open({str(tmp_path / 'calls')!r}, 'a').write(' '.join(sys.argv[1:]) + '\\n')\n"
        "end = next(word[12:] for word in sys.argv if word.startswith('--delimiter='))\n"
        f"print({line!r}.replace('@', end))\n"
    )
    tool.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SACCT_FORMAT": "user"}
    start_s = moment("2026-11-20T12:00:00")
    assert start_s is not None
    (one,) = from_sacct(environ, "here", start_s, start_s + 2.5 * 86400)
    assert one.job == "7"  # once, though three answers had it
    asked = [
        [word.partition("=")[2] for word in call.split() if word.startswith(("--starttime", "--endtime"))]
        for call in (tmp_path / "calls").read_text().splitlines()
    ]
    assert asked == [
        ["2026-11-20T12:00:00", "2026-11-21T12:00:00"],
        ["2026-11-21T12:00:00", "2026-11-22T12:00:00"],
        ["2026-11-22T12:00:00", "2026-11-23T00:00:00"],
    ]
    assert all("--clusters=here" in call for call in (tmp_path / "calls").read_text().splitlines())
    clock = iter([0.0, 1.0, 700.0])
    with pytest.raises(SlurmCommandError, match="ask for less"):
        from_sacct(environ, "here", start_s, start_s + 86400 * 30, lambda: next(clock))


def test_the_queue_knows_running_and_ended_jobs() -> None:
    job = Job(7, "train", "alice", ("gpu",), "RUNNING", "", 1, 4, 1, 4, 0, gres_per_node=(Gres("gpu", "", 2),),
              start_s=5.0, end_s=99.0)  # fmt: skip
    jobs = (job, replace(job, state="COMPLETED"), replace(job, state="PENDING"), replace(job, start_s=None))
    assert [(one.gpus, one.end_s) for one in from_queue(jobs)] == [(2, None), (2, 99.0)]


def test_jobs_that_cannot_be_asked_tell_nothing(tmp_path: Path) -> None:
    job = Job(7, "train", "me", ("gpu",), "RUNNING", "", 1, 4, 1, 4, 0, uid=os.geteuid(), work_dir=str(tmp_path))
    assert wait_shares([job, replace(job, work_dir=""), replace(job, work_dir="/nowhere")]) == {}
    directory = tmp_path / ".hetstream" / "job-7"
    directory.mkdir(parents=True)
    (directory / "address").write_text("{}")
    (directory / "address").chmod(0o600)
    assert wait_shares([job, replace(job, het=HetComponent(7, 1)), replace(job, state="PENDING")]) == {}


def run(env: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words]
    return subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120)


@pytest.mark.shows("`util` counts allocated and effective hours, and says what is not measured")
@pytest.mark.slurm
@pytest.mark.every_release
def test_util_on_a_real_cluster(devcluster: Any, wait_until: Callable[..., None]) -> None:
    slurm = CommandSlurm(devcluster.env)
    wait_until(lambda: not slurm.snapshot().jobs, 60)
    job_id = slurm.submit("#!/bin/sh\nsleep 600\n", ["-p", "gpu", "-c8", "--gres=gpu:4", "-o", "/dev/null"])
    try:
        wait_until(lambda: [job.state for job in slurm.snapshot().jobs] == ["RUNNING"], 60)
        started = slurm.snapshot().jobs[0].start_s
        assert started is not None
        wait_until(lambda: slurm.snapshot().taken_s > started + 2, 60)
        # The jobs of earlier tests are remembered too, and ended before this one.
        since = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(started))
        document = json.loads(run(devcluster.env, "util", "--json", "--start", since).stdout)
        by_name = {row["partition"]: row for row in document["groups"]}
        ran_s = document["meta"]["taken_s"] - started
        assert by_name["gpu"]["gpu_hours"] == pytest.approx(4 * ran_s / HOUR, abs=0.002)
        assert by_name["gpu"]["gpu_allocated_share"] == pytest.approx(1 / 2, abs=0.01)
        assert any("there is no slurmdbd" in note for note in document["notes"])
    finally:
        slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)
    ended = json.loads(run(devcluster.env, "util", "--json", "--by", "user").stdout)
    assert ended["summary"]["gpu_hours"] > 0  # remembered for MinJobAge seconds
