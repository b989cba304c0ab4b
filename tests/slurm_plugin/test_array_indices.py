"""Pending tasks of arrays with irregular indices: all of them count, whatever squeue would cut by itself."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hetstream.slurm_plugin.client import parse_json, parse_text
from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.insight.het_job import find_jobs
from hetstream.slurm_plugin.packing.jobs import task_names

INDICES = [number * number // 7 + number for number in range(1, 41)]
JOB = Job(5, "j", "u", ("p",), "PENDING", "Priority", 1, 1, 1, 1, 0, array_job_id=5)


@pytest.mark.parametrize(
    ("tasks", "number"),
    # Cut as bit_fmt of Slurm does it, also within a number or a range.
    [
        ("1,4,6", 3),
        ("1,4,6...", 3),
        ("1-3,15-1...%3", 4),
        ("1-3,...", 4),
        ("1...", 1),
        ("...", 1),
        ("0-9:3,12...", 5),
        ("9-3", 1),
        (f"0-{10**20}", 10**20 + 1),
    ],
)
def test_cut_indices_count_as_far_as_they_are_there(tasks: str, number: int) -> None:
    assert replace(JOB, array_tasks=tasks).num_records == number


@pytest.mark.parametrize("is_json", [False, True])
def test_cut_indices_are_said_to_be(is_json: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        if is_json:
            row = {"job_id": 5, "job_state": "PENDING", "array_job_id": 5, "array_task_string": "1,4,6..."}
            (job,) = parse_json.parse_jobs(json.dumps({"jobs": [row]}))
        else:
            fields = dict.fromkeys(parse_text.JOB_FIELDS, "") | {
                "JobID": "5", "ArrayJobID": "5", "ArrayTaskID": "1,4,6...", "State": "PENDING", "NumCPUs": "1",
            }  # fmt: skip
            ends = parse_text.new_separators()
            said = ends[0].join(fields[name] for name in parse_text.JOB_FIELDS) + ends[1]
            (job,) = parse_text.parse_jobs(said, parse_text.JOB_FIELDS, *ends)
    assert (job.num_records, job.label) == (3, "5_[1,4,6...]")
    assert "more tasks are pending than are counted" in job.unreadable[0]
    assert "of job 5 a part cannot be read" in caplog.text
    # What is not shown may be the one that is asked for; one that runs is known by itself.
    assert find_jobs([job], "5_151") == [job]
    running = replace(JOB, job_id=9, state="RUNNING", array_tasks="151")
    assert find_jobs([job, running], "5_151") == [running]
    assert task_names(job) == ["5_1", "5_4"]


@pytest.mark.slurm
@pytest.mark.every_release
def test_all_indices_of_an_array_count_on_slurm(devcluster: Any, wait_until: Callable[..., None]) -> None:
    """Also for a user whose own environment has squeue cut them after 16 characters."""
    slurm = CommandSlurm({**devcluster.env, "SLURM_BITSTR_LEN": "16"})

    def told(*words: str) -> Any:
        command = [sys.executable, "-m", "hetstream.slurm_plugin.cli", *words, "--json"]
        env = {**os.environ, **devcluster.env, "SLURM_BITSTR_LEN": "16"}
        return json.loads(subprocess.run(command, env=env, capture_output=True, text=True, timeout=120).stdout)

    words = ["--output=/dev/null", "--mem=100", "-p", "gpu", "-c16", "-w", "gpu0", "--gres=gpu:4"]
    first = slurm.submit("#!/bin/sh\nexec sleep 600\n", words)
    array = slurm.submit("#!/bin/sh\nexec sleep 600\n", [*words, f"--array={','.join(map(str, INDICES))}%2"])
    try:
        wait_until(lambda: slurm.living_jobs().get(first) == "RUNNING", 60)
        pending = devcluster.run("squeue", "--noheader", "--array", "--states=PENDING", "--format=%i").split()
        assert len(pending) == len(INDICES)
        for details in (False, True):
            (job,) = [job for job in slurm.snapshot(details=details).jobs if job.is_pending]
            assert (job.num_records, job.unreadable) == (len(INDICES), ())
            assert [find_jobs([job], name) for name in pending] == [[job]] * len(INDICES)
        assert told("jobs")["summary"]["num_pending"] == len(INDICES)
        assert [shape["num_jobs"] for shape in told("frag")["shapes"]] == [len(INDICES)]
        assert told("why", f"{array}_{INDICES[-1]}")["blockers"]
    finally:
        for job_id in (array, first):
            slurm.cancel(job_id)
    wait_until(lambda: not slurm.snapshot().jobs, 60)
