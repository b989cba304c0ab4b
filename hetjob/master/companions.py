"""The companion jobs of one job: submit, list and cancel them, each by its own id. Called by `elastic.py`.

A companion is an ordinary job of one data worker or embedding server, submitted by the trainer's job as its user. Its
comment says whose it is, so a job master that was started again finds those of before. It never cancels anything else.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Sequence

from hetstream.base.text import printable
from hetstream.hetjob.convert.sbatch_options import SbatchOptions, megabytes, parse_words
from hetstream.hetjob.elastic.companions import TimeRequest
from hetstream.hetjob.job.job import JobEnvironment
from hetstream.hetjob.master.controller_state_file import CompanionTime
from hetstream.hetjob.ports import MarkedJob, SlurmClient
from hetstream.mpi_dataworkers.wire.messages import Steered

# Slurm is still taking such a job down; its CPUs are as good as free.
_COMPLETING = ("COMPLETING",)


class CompanionJobs:
    """Companion jobs in Slurm.

    Args:
        client: Slurm.
        job: whose they are.
        options: sbatch options that all of them have.
        command: from a number of CPUs to what the job runs, as shell text.
        time: how long they run; None for as long as the options say.
        hole_options: sbatch options of those in holes, which put them behind everybody else.
        device: of their data workers, or `embedding`.

    Attributes:
        time, device: see there.
    """

    def __init__(
        self,
        client: SlurmClient,
        job: JobEnvironment,
        options: Sequence[str],
        command: Callable[[int], str],
        time: CompanionTime | None = None,
        hole_options: Sequence[str] = (),
        device: Steered = "cpu",
    ) -> None:
        self.device: Steered = device
        self._kind = "" if device == "cpu" else f"{device}-"
        self._client = client
        self._job = job
        self._options = options
        self._command = command
        self.time = time or CompanionTime(None)
        self._hole_options = hole_options
        self._next = self._number_after_those_of_before()

    @property
    def job_id(self) -> str:
        """Of the job whose companions they are."""
        return self._job.job_id

    @property
    def mark(self) -> str:
        """The word in the comment of those of this start of the job, and of this stage."""
        return f"hets:{self._kind}start={self._job.job_id}.{self._job.restarts}"

    @property
    def mb_per_cpu(self) -> float | None:
        """Memory that their options ask for; None if the partition decides."""
        return megabytes(SbatchOptions(tuple(parse_words(self._options, "companion")[0])).value("mem-per-cpu") or "")

    def submit(
        self, cpus: int, mb_per_cpu: int | None = None, node: str = "", asked: TimeRequest | None = None
    ) -> str:  # fmt: skip
        """Submit one, and return its job id.

        Args:
            cpus: of it.
            mb_per_cpu: its memory, if that is not what the options say.
            node: where it is to run; empty for any.
            asked: how long, in a hole; None for as long as the options say.

        Raises:
            SlurmCommandError: Slurm refused, or was busy for too long.
        """
        number, self._next = self._next, self._next + 1
        log_file = self._job.directory / f"{self._kind}companion-{number}.log"
        with contextlib.suppress(OSError):
            log_file.touch(0o600)  # the number is taken, also when this process is killed before the companion starts
        job_id = self._job.job_id
        role = "embedding-server" if self.device == "embedding" else f"{self._kind}data-worker"
        options = [
            *self._options,
            *([*asked.options, *self._hole_options] if asked is not None else []),
            *([f"--mem-per-cpu={mb_per_cpu}M"] if mb_per_cpu is not None else []),
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={cpus}",
            f"--dependency=after:{job_id}",
            "--kill-on-invalid-dep=yes",
            "--no-requeue",
            f"--comment=hets:trainer={job_id} {self.mark}",
            f"--job-name={printable(self._job.job_name)}-{role}",
            f"--chdir={self._job.submit_dir}",
            f"--output={log_file}",
            "--open-mode=append",
        ]
        if node:
            options.append(f"--nodelist={node}")
        # One that starts when the job is over, because its job master was killed, ends at once.
        guard = f"test -e {shlex.quote(str(self._job.address_file))} || exit 0"
        script = f"#!/bin/sh\n{guard}\nexec {self._command(cpus)}\n"
        # The key: submitted once, also when the answer to the submission is lost.
        return self._client.submit(script, options, f"{job_id}.{self._job.restarts}.{self._kind}companion-{number}")

    def listed(self, known: Sequence[MarkedJob] | None = None) -> list[MarkedJob]:
        """Return those that Slurm knows and that are not over.

        Args:
            known: what somebody else has read of them; None: Slurm is asked.
        """
        jobs = self._client.marked_jobs(self.mark) if known is None else known
        return [job for job in jobs if job.state not in _COMPLETING]

    def ask_for_less(self, job_id: str, asked: TimeRequest) -> None:
        """Let one that waits start in a shorter hole."""
        self._client.update(job_id, {"TimeMin": f"{asked.time_min_s / 60:.0f}"})

    def cancel(self, job_id: str) -> None:
        """End one, pending or running."""
        self._client.cancel(job_id)

    def ask_to_end(self, job_id: str) -> None:
        """Have one end by itself, when it is ready to."""
        self._client.ask_to_end(job_id)

    def _number_after_those_of_before(self) -> int:
        names = (path.stem.rpartition("-")[2] for path in self._job.directory.glob(f"{self._kind}companion-*.log"))
        return max((int(name) + 1 for name in names if name.isdigit()), default=0)
