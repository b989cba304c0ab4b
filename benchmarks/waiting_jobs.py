"""Slurm jobs that wait at a named pipe until they are let go. Used by `stub_jobs.py` and `fidelity.py`.

That the pipe can be opened says that Slurm has started the job, and that nobody reads any more says that the job is
gone: slurmctld is not asked how they are.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetstream.slurm_plugin.client.run import run_slurm
from hetstream.slurm_plugin.client.slurm import CommandSlurm

TRAINERS, WORKERS = "trainers", "workers"
_COMMON = ("--output=/dev/null", "--chdir=/tmp", "--no-requeue", "--mem-per-cpu=10")
_THREADS = 4
_LOOK_S = 0.01


@dataclass(eq=False)
class WaitingJob:
    """One job.

    Attributes:
        pipe: its path.
        submission: its number, when sbatch has answered.
        node: that it was submitted for; empty for any.
        since_s: when that was, by the monotonic clock.
        fd: of the pipe, when the job runs.
        is_leaving: it was told to.
    """

    pipe: Path
    submission: Future[str]
    node: str
    since_s: float
    fd: int | None = None
    is_leaving: bool = False

    @property
    def job_id(self) -> str | None:
        """None while sbatch has not answered."""
        return self.submission.result() if self.submission.done() else None

    def opens(self) -> bool:
        """Whether the job has come to its pipe since the last look."""
        if self.fd is not None:
            return False
        try:
            self.fd = os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            if error.errno != errno.ENXIO:  # nobody reads
                raise
            return False
        return True

    def close(self) -> None:
        """Let it go, if it runs."""
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None
        self.pipe.unlink(missing_ok=True)


class WaitingJobs:
    """Submits and cancels them, by threads of its own.

    Args:
        directory: for the pipes.
        environ: in which Slurm's commands reach the cluster.
    """

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        self._directory, self._environ = directory, dict(environ)
        self._slurm = CommandSlurm(environ)
        self._commands = ThreadPoolExecutor(_THREADS, "slurm")
        self.num_submitted = self.num_cancelled = 0

    def submit(self, options: Sequence[str], node: str = "") -> WaitingJob:
        """Submit one; sbatch is not waited for."""
        self.num_submitted += 1
        pipe = self._directory / f"pipe-{self.num_submitted}"
        os.mkfifo(pipe, 0o600)
        words = [*options, *_COMMON, *([f"--nodelist={node}"] if node else [])]
        script = f"#!/bin/sh\nread -r line < {pipe} || true\n"
        return WaitingJob(pipe, self._commands.submit(self._slurm.submit, script, words), node, time.monotonic())

    def cancel(self, leaving: Sequence[WaitingJob]) -> Future[Any]:
        """Cancel some whose numbers are known."""
        for one in leaving:
            one.is_leaving = True
        self.num_cancelled += len(leaving)
        words = ["scancel", "--quiet", *(str(one.job_id) for one in leaving)]
        return self._commands.submit(run_slurm, words, env=self._environ)

    def started(self, jobs: Sequence[WaitingJob], most_s: float = 60.0) -> list[float]:
        """When each of these has come to its pipe, by the monotonic clock.

        Raises:
            TimeoutError: some have not.
        """
        at_s: dict[int, float] = {}
        deadline_s = time.monotonic() + most_s
        while len(at_s) < len(jobs):
            for place, one in enumerate(jobs):
                if place not in at_s and (one.fd is not None or one.opens()):
                    at_s[place] = time.monotonic()
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{len(jobs) - len(at_s)} jobs have not started within {most_s:g} s")
            time.sleep(_LOOK_S)
        return [at_s[place] for place in range(len(jobs))]

    def close(self) -> None:
        """End the threads, and every job of this user."""
        self._commands.submit(run_slurm, ["scancel", f"--user={os.geteuid()}"], env=self._environ).result()
        self._commands.shutdown()

    def __enter__(self) -> WaitingJobs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
