"""The checkpoint writers' step over FakeSlurm: what it asks Slurm for, and what the script learns."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hetstream.base.process import with_job
from hetstream.hetjob.errors import WritersNotStarted
from hetstream.hetjob.job.job import JobEnvironment, ready_file, start
from hetstream.hetjob.ports import Child
from hetstream.slurm_plugin.client.fake import FakeSlurm

PROGRAM = (sys.executable, str(Path(__file__).parent / "programs" / "stand_in.py"))


@dataclass
class Slurm(FakeSlurm):
    """Remembers the steps, so that a test can wait for their end."""

    steps: list[Child] = field(default_factory=list)

    def start_step(self, *args: Any, **kwargs: Any) -> Child:
        self.steps.append(super().start_step(*args, **kwargs))
        return self.steps[-1]


def fake(directory: Path, **more: str) -> Slurm:
    environ = dict(os.environ) | {
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "gpu0",
        "SLURM_SUBMIT_DIR": str(directory),
        **more,
    }
    return Slurm(directory, environ)


@pytest.fixture(autouse=True)
def _in_the_submit_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_writers_start_beside_everything_else(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    slurm = fake(tmp_path, SLURM_HET_SIZE="2", SLURM_JOB_NUM_NODES_HET_GROUP_0="1", SLURM_JOB_NUM_NODES="5")
    assert start(PROGRAM, slurm, slurm.environ, 20) == with_job({"HETSTREAM_CKPT_WRITER": "1"}, slurm.environ)
    ((method, words),) = slurm.calls
    assert method == "start_step"
    assert words[: words.index(PROGRAM[0])] == (
        "--het-group=0", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=0",
        "--gres=none", "--kill-on-bad-exit=0", "--no-kill", "--job-name=hetstream-ckpt",
    )  # fmt: skip
    assert words[words.index(PROGRAM[1]) + 1 :] == ("internal", "writer")
    job = JobEnvironment.read(slurm.environ)
    assert stat.S_IMODE(job.writers.stat().st_mode) == 0o700
    assert ready_file(job).exists()
    slurm.steps[0].terminate()
    wait_until(lambda: slurm.steps[0].poll() is not None, what="the checkpoint writer's end")
    assert not ready_file(job).exists()


@pytest.mark.parametrize(("case", "text"), [("dies", "the step ended with 9"), ("is late", "not all were ready")])
def test_writers_that_do_not_come(tmp_path: Path, case: str, text: str, wait_until: Callable[..., None]) -> None:
    more = {}
    if case == "dies":
        (tmp_path / "die-writer").touch()
    else:
        more["SLURM_JOB_NUM_NODES"] = "2"  # the fake starts one
    slurm = fake(tmp_path, **more)
    with pytest.raises(WritersNotStarted, match=text):
        start(PROGRAM, slurm, slurm.environ, 20 if case == "dies" else 0.5)
    wait_until(lambda: slurm.steps[0].poll() is not None, what="the end of the step")


def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / ".hetstream").write_text("a file")
    slurm = fake(tmp_path)
    with pytest.raises(WritersNotStarted, match=r"cannot be made: .*all hosts share"):
        start(PROGRAM, slurm, slurm.environ)
    assert slurm.calls == []
