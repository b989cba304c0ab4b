"""How a job that Slurm ends saves its last step: on real daemons, below wrappers and launchers.

Slurm finds the processes of a step by their parents (proctrack/linuxproc), and then all of them get SIGTERM, below a
launcher twice; or by control groups (proctrack/cgroup), and then a step's tasks get it and nobody below them.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from benchmarks.clients.ckpt_job import HETSTREAM, CheckpointJob
from hetstream.checkpoint.disk.directory import CheckpointDirectory

pytestmark = pytest.mark.slurm

TRAINER = Path(__file__).parents[1] / "checkpoint" / "programs" / "asked_trainer.py"
PYTHON = shlex.quote(sys.executable)
TRAINING = f"{shlex.quote(str(TRAINER))} checkpoints ledger"
SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=signals --output=job.out --gpus=1 --cpus-per-task=2 --mem=2G --time=10
eval "$({shlex.quote(str(HETSTREAM))} ckpt start --checkpoint=checkpoints)"
srun {{task}}
code=$?
echo "srun ended with $code"
exit $code
"""
# What srun starts, what `wrapper.sh` does, and how many ranks there are.
TASKS = {
    "the program itself": (f"{PYTHON} {TRAINING}", "", 1),
    "a wrapper that passes nothing on": ("bash wrapper.sh", f"trap : TERM\n{PYTHON} {TRAINING}\nexit $?\n", 1),
    "torchrun": (f"{PYTHON} -m torch.distributed.run --standalone --nproc-per-node=2 {TRAINING}", "", 2),
    "accelerate": (f"{PYTHON} -m accelerate.commands.launch --multi_gpu --num_processes=2 {TRAINING}", "", 2),
}
IN_SHORT = ["a wrapper that passes nothing on"]


@dataclass
class Job(CheckpointJob):
    """A job that trains until it is asked to stop.

    Attributes:
        task: what srun starts.
        wrapper: what `wrapper.sh` does.
        num_ranks: of the training.
    """

    task: str = ""
    wrapper: str = ""
    num_ranks: int = 1

    def submit(self) -> None:
        self.directory.mkdir()
        (self.directory / "wrapper.sh").write_text(self.wrapper)
        (self.directory / "train.sbatch").write_text(SCRIPT.format(task=self.task))
        self.job_id = self.run("sbatch", "--parsable", "train.sbatch").strip()

    def of_rank(self, rank: int) -> list[list[str]]:
        """What a rank did, in words."""
        path = self.directory / f"ledger.{rank}"
        return [line.split(maxsplit=2) for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_first_save(self) -> None:
        ranks = range(self.num_ranks)
        self.wait(lambda: all(["saved", "1"] in self.of_rank(rank) for rank in ranks), "the first save")

    def newest_on_disk(self) -> int:
        return CheckpointDirectory(self.checkpoints).checkpoints()[0].generation.step

    def check_saved_and_stopped_once(self) -> None:
        """All ranks have saved the same last step, once, and it is on disk; nothing is left."""
        self.wait_for_end()
        assert self.of_rank(0)[-1][0] == "stopping", self.story()
        last = self.of_rank(0)[-1][1]
        for rank in range(self.num_ranks):
            words = [line[:2] for line in self.of_rank(rank)]
            assert words[1:] == [["from", "0"], ["saved", "1"], ["saved", last], ["stopping", last]], self.story()
        assert self.newest_on_disk() == int(last), self.story()
        assert self.shared_memory() == []

    def shown(self, field: str) -> str:
        found = re.search(rf"\b{field}=(\S+)", self.run("scontrol", "show", "job", self.job_id))
        return found[1] if found else ""


@pytest.fixture
def start(proctrack_cluster: Any) -> Iterator[Callable[..., Job]]:
    """A function that submits a job of `TASKS`, and waits until it trains; it is gone at the end of the test."""
    with ExitStack() as undo:

        def make(task: str, wrapper: str = "", num_ranks: int = 1) -> Job:
            directory = proctrack_cluster.out_dir / f"signals-{len(os.listdir(proctrack_cluster.out_dir))}"
            job = Job(directory, proctrack_cluster.env, 0, task=task, wrapper=wrapper, num_ranks=num_ranks)
            undo.callback(remove, job)
            job.submit()
            job.wait_for_first_save()
            return job

        def remove(job: Job) -> None:
            job.cancel()
            for name in job.shared_memory():
                shutil.rmtree(Path("/dev/shm") / name)

        yield make


@pytest.mark.shows("on SIGTERM the newest generation gets to disk, and all ranks stop after the same step")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "task", [task if task in IN_SHORT else pytest.param(task, marks=pytest.mark.slow) for task in TASKS]
)
def test_a_cancelled_job_saves_its_last_step_once(task: str, start: Callable[..., Job]) -> None:
    pytest.importorskip("accelerate" if task == "accelerate" else "torch")
    job = start(*TASKS[task])
    job.run("scancel", job.job_id)
    job.check_saved_and_stopped_once()
    assert job.shown("JobState") == "CANCELLED"
    assert job.shown("ExitCode") == "0:15"


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("task", "code"), [("a wrapper that passes nothing on", 75), ("torchrun", 1)])
def test_a_script_goes_on_behind_a_signal_to_its_steps(task: str, code: int, start: Callable[..., Job]) -> None:
    """As `#SBATCH --signal=TERM@60` sends it; a script may requeue its job by the program's code."""
    job = start(*TASKS[task])
    job.run("scancel", "--signal=TERM", job.job_id)
    job.check_saved_and_stopped_once()
    assert f"srun ended with {code}\n" in (job.directory / "job.out").read_text()
    assert job.shown("ExitCode") == f"{code}:0"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_below_a_wrapper_that_dies_the_last_save_is_kept_and_a_warning_was_given(start: Callable[..., Job]) -> None:
    """Slurm kills all of a step when its tasks have ended, and a shell without a trap ends of SIGTERM."""
    job = start("bash wrapper.sh", f"{PYTHON} {TRAINING}\nexit $?\n")
    warning = re.compile(r"ends bash \(process \d+\), which Slurm has started.*trap : TERM")
    job.wait(lambda: warning.search((job.directory / "job.out").read_text()), "the warning in the job's output")
    job.run("scancel", job.job_id)
    job.wait_for_end()
    # Where the program gets SIGTERM too, it may be faster than Slurm.
    assert job.newest_on_disk() == int([line for line in job.of_rank(0) if line[0] == "saved"][-1][1])
    assert job.shared_memory() == []
