"""A training job with flash checkpoints on Slurm, to be killed and requeued, and the truth to compare it with.

Used by `benchmarks.ckpt_requeue`, `benchmarks.ckpt_migrate` and the tests in `tests/cluster`. The job is a converted
script: trainer (`ckpt_train.py`), checkpoint writers, data worker and job master are its steps. The script starts the
trainer again when it dies, as scripts do.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from hetstream.checkpoint.memory.store_files import StoreIdentity

PROGRAM = Path(__file__).with_name("ckpt_train.py")
HETSTREAM = Path(sys.executable).with_name("hetstream")
SAVE_EVERY = 5
# A loaded machine starts torch in many seconds.
_TIMEOUT_S = 120.0
_POLL_S, _LONGEST_POLL_S = 0.02, 0.2
_STREAMING = """\
#SBATCH --gres=gpu:1
#HETSTREAM --data-workers=1 --data-worker-cpus=1 --data-worker-partition=cpu --data-worker-mem=1G
"""
_SCRIPT = f"""#!/bin/bash
#SBATCH --job-name=ckpt --output=job.out --open-mode=append
#SBATCH --cpus-per-task=2 --mem=2G --time={{time}}
{{options}}#HETSTREAM --checkpoint=checkpoints --checkpoint-size=4M
for start in $(seq 100); do
  srun {sys.executable} {PROGRAM} "$HETSTREAM_CKPT_DIR" run {{steps}} {{step_s}} && exit 0
  code=$?
  [ $code = 75 ] && exit 75
done
"""


@dataclass(frozen=True)
class Start:
    """One start of the trainer.

    Attributes:
        step: it went on from; 0 at the beginning.
        source: `memory`, `disk`, or "" at the beginning.
        last: last step that was trained before.
    """

    step: int
    source: str
    last: int


@dataclass
class CheckpointJob:
    """The job.

    Attributes:
        directory: where it is submitted; all hosts share it.
        environ: in which Slurm's commands reach the cluster.
        steps: of training.
        step_s: sleep in each.
        time_limit: as sbatch writes it.
        options: lines of the script, in the place of those by which it streams to a GPU.
    """

    directory: Path
    environ: Mapping[str, str]
    steps: int
    step_s: float = 0.02
    time_limit: str = "30"
    options: str = _STREAMING
    job_id: str = field(default="", init=False)

    @property
    def checkpoints(self) -> Path:
        """The checkpoint directory."""
        return self.directory / "checkpoints"

    def submit(self) -> None:
        """Submit it with `hetstream sbatch`."""
        self.directory.mkdir()
        text = _SCRIPT.format(time=self.time_limit, steps=self.steps, step_s=self.step_s, options=self.options)
        (self.directory / "train.sbatch").write_text(text)
        self.job_id = self.run(str(HETSTREAM), "sbatch", "--parsable", "train.sbatch").strip()

    def migrate(self, *options: str) -> CheckpointJob:
        """Let another job take over with `hetstream migrate`, which returns when it has; that job."""
        done = json.loads(self.run(str(HETSTREAM), "migrate", "--json", self.job_id, *options, timeout_s=_TIMEOUT_S))
        if not done["done"]:
            raise RuntimeError(f"{done['stage']}. {self.story()}")
        return self.resume_as(done["new_job"])

    def resubmit(self) -> CheckpointJob:
        """Submit the script again, when this job is gone; that job."""
        return self.resume_as(self.run(str(HETSTREAM), "sbatch", "--parsable", "train.sbatch").strip())

    def end_soon(self, num_steps: int) -> None:
        """Make training end so many steps from now."""
        last = next(int(words[0]) for words in reversed(self.ledger()) if words[0].isdigit())
        new = self.directory / "run" / "end.new"
        new.write_text(str(last + num_steps))
        new.replace(new.with_name("end"))

    def pauses_s(self) -> list[float]:
        """For each start but the first, how long ago the last step was."""
        found, last_s = [], 0.0
        for line in (self.directory / "run" / "times").read_text().splitlines():
            what, time_s = line.split()
            if what == "start" and last_s:
                found.append(float(time_s) - last_s)
            last_s = float(time_s) if what != "start" else last_s
        return found

    def resume_as(self, job_id: str) -> CheckpointJob:
        """The job of this number, which goes on with this one's training."""
        job = dataclasses.replace(self)
        job.job_id = job_id
        return job

    def run(self, *argv: str, timeout_s: float = 60.0) -> str:
        """Run a command of Slurm."""
        done = subprocess.run(
            argv, cwd=self.directory, env=dict(self.environ), capture_output=True, text=True, timeout=timeout_s,
            check=False,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{argv} ended with {done.returncode}: {done.stderr}")
        return done.stdout

    def ledger(self) -> list[list[str]]:
        """What the trainer wrote down, in words."""
        path = self.directory / "run" / "ledger"
        text = path.read_text() if path.exists() else ""
        return [line.split() for line in text.splitlines()]

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many steps were trained after the last start, or training is over."""

        def done() -> bool:
            since = 0
            for words in self.ledger():
                since = 0 if words[0] == "start" else since + 1
            return since >= count or (self.directory / "run" / "result").exists()

        self.wait(done, f"{count} steps after a start")

    def wait(self, condition: Callable[[], object], what: str, timeout_s: float = _TIMEOUT_S) -> None:
        """Wait until a condition holds; with the job's output in the error if it does not come."""
        asked_at = time.monotonic()
        deadline = asked_at + timeout_s
        while not condition():
            answered_at = time.monotonic()
            if answered_at > deadline:
                raise TimeoutError(f"{what} did not come within {timeout_s:g} s. {self.story()}")
            # squeue is not to take the cores from what is waited for.
            time.sleep(max(_POLL_S, min(4 * (answered_at - asked_at), _LONGEST_POLL_S)))
            asked_at = time.monotonic()

    def story(self) -> str:
        """The ends of all logs of the job, for an error."""
        logs = [*self.directory.glob("job.out"), *self.directory.glob(".hetstream/**/*.log")]
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in logs)

    def state(self) -> str:
        """Slurm's state of component 0; "" when squeue shows it no more."""
        lines = self.run("squeue", "--noheader", "--format=%i %T").splitlines()
        states = dict(line.split() for line in lines)
        return states.get(f"{self.job_id}+0", states.get(self.job_id, ""))

    def kill_trainer(self) -> None:
        """SIGKILL of the trainer, as from the out-of-memory killer."""
        os.kill(self._only(self.trainers()), signal.SIGKILL)

    def kill_writer(self) -> None:
        """SIGKILL of the job's checkpoint writer."""
        os.kill(self._only(self.writers()), signal.SIGKILL)

    def requeue(self) -> list[str]:
        """`scontrol requeue`, as after a preemption, and a start at once.

        Returns:
            What of the job was left in shared memory when it had ended.
        """
        self.run("scontrol", "requeue", self.job_id)
        self.wait(lambda: self.state() == "PENDING", "the end of the requeued job")
        self.wait(lambda: not self.processes(), "the end of its processes")
        left = self.shared_memory()
        # Slurm holds a requeued job back for two minutes.
        for component in (self.job_id, str(int(self.job_id) + 1)):
            try:
                self.run("scontrol", "update", f"JobId={component}", "StartTime=now")
            except RuntimeError as error:
                # The first one's change may have started both.
                if "no longer pending" not in str(error):
                    raise
        return left

    def wait_for_end(self) -> None:
        """Wait until the job is over and nothing of it runs."""
        self.wait(lambda: not self.state(), "the end of the job")
        self.wait(lambda: not self.processes(), "the end of its processes")

    def cancel(self) -> None:
        """End it, whatever it does."""
        if self.job_id:
            self.run("scancel", "--quiet", self.job_id)
            self.wait(lambda: not self.processes(), "the end of its processes after scancel")

    def trainers(self) -> list[int]:
        """Process ids of the trainer."""
        return [pid for pid, argv in self.processes().items() if str(PROGRAM) in argv and argv[0] != "srun"]

    def writers(self) -> list[int]:
        """Process ids of the job's checkpoint writers."""
        steps = {pid: argv for pid, argv in self.processes().items() if argv[0] != "srun"}
        return [pid for pid, argv in steps.items() if ("internal", "writer") in pairwise(argv)]

    def processes(self) -> dict[int, list[str]]:
        """Everything that runs in the job, by process id: its command line."""
        found = {}
        for entry in filter(str.isdigit, os.listdir("/proc")):
            try:
                environ = Path(f"/proc/{entry}/environ").read_bytes().split(b"\0")
                argv = Path(f"/proc/{entry}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")
            except OSError:
                continue
            cluster = f"SLURM_CONF={self.environ['SLURM_CONF']}".encode()
            if f"SLURM_JOB_ID={self.job_id}".encode() in environ and cluster in environ and "slurmstepd" not in argv[0]:
                found[int(entry)] = argv
        return found

    def shared_memory(self) -> list[str]:
        """Stores of the job that are there; a job of another cluster may have the same number."""
        prefix = StoreIdentity(self.job_id, 0, 0, self.checkpoints).prefix
        return [name for name in os.listdir("/dev/shm") if name.lstrip(".").startswith(prefix)]

    def starts(self) -> list[Start]:
        """Every start of the trainer, with where it went on from."""
        output = (self.directory / "job.out").read_text(errors="replace")
        sources = iter(re.findall(r"restored step \d+ of attempt \d+ from ([\w, ]+)", output))
        found, last = [], 0
        for words in self.ledger():
            if words[0] == "start":
                found.append(Start(int(words[1]), next(sources, "") if words[1] != "0" else "", last))
            elif words[0].isdigit():
                last = int(words[0])
        return found

    def history(self) -> dict[int, tuple[str, ...]]:
        """What was trained on at each step, in the history that counts: what was undone by a start is forgotten.

        Raises:
            ValueError: a step that was made twice was not the same, or steps were left out.
        """
        steps: dict[int, tuple[str, ...]] = {}
        ever: dict[int, tuple[str, ...]] = {}
        for words in self.ledger():
            if words[0] == "start":
                steps = {step: line for step, line in steps.items() if step <= int(words[1])}
            elif words[0].isdigit():
                step, line = int(words[0]), tuple(words[1:])
                if step != len(steps) + 1 or ever.setdefault(step, line) != line:
                    raise ValueError(f"step {step}: {line} after step {len(steps)}, once {ever.get(step)}")
                steps[step] = line
        return steps

    @staticmethod
    def _only(pids: list[int]) -> int:
        if len(pids) != 1:
            raise RuntimeError(f"{len(pids)} processes where one was expected")
        return pids[0]


def undisturbed(directory: Path, steps: int) -> CheckpointJob:
    """The same training in one process without Slurm: its ledger and result are the truth."""
    directory.mkdir()
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HETSTREAM_"))}
    subprocess.run(
        [sys.executable, str(PROGRAM), str(directory / "checkpoints"), str(directory / "run"), str(steps)],
        env=environ, check=True, capture_output=True, timeout=_TIMEOUT_S,
    )  # fmt: skip
    return CheckpointJob(directory, environ, steps)


def differences(job: CheckpointJob, truth: CheckpointJob) -> Iterator[str]:
    """What of a job that has ended is not as in the undisturbed run."""
    history, true_history = job.history(), truth.history()
    if history != true_history:
        wrong = [step for step in true_history if history.get(step) != true_history[step]]
        yield f"steps {wrong[:10]} saw other data"
    result = job.directory / "run" / "result"
    if not result.exists():
        yield "training did not end"
    elif result.read_text() != (truth.directory / "run" / "result").read_text():
        yield "the final weights differ"
