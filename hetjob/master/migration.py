"""Moves a training that runs out of memory to a job with more, by `hetstream migrate`. Called by `elastic.py`.

Only where the script says `--on-memory-warning=migrate`, and once: the command's log, which is made first, says that it
was begun, also to a job master that was started again. What the command does is its own; a failure is said, and is the
user's again.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from hetstream.hetjob.ports import Child

log = logging.getLogger(__name__)

LOG_FILE = "migrate.log"
# What describes this job or this step. sbatch would hand it on to the new job, which has its own.
_OF_THIS_JOB = re.compile(r"(SLURM|PMI)(?!_CONF$)|(CUDA_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ROCR_VISIBLE_DEVICES)$")


class Migration:
    """Moves one job.

    Args:
        program: how hetstream is called: words.
        job_id: of the job.
        log_file: for what the command says.
        environ: of the job master.
        start: starts a command with an environment; its output goes to a file.
    """

    def __init__(
        self,
        program: Sequence[str],
        job_id: str,
        log_file: Path,
        environ: Mapping[str, str],
        start: Callable[[Sequence[str], Mapping[str, str], Path], Child],
    ) -> None:
        self._program = program
        self._job_id = job_id
        self._log_file = log_file
        self._environ = outside_of_job(environ)
        self._start = start
        self._child: Child | None = None

    def begin(self, memory: str) -> None:
        """Submit the job that takes over.

        Args:
            memory: of it, as sbatch writes sizes.
        """
        argv = [*self._program, "migrate", self._job_id, f"--mem={memory}", "--no-wait"]
        try:
            os.close(os.open(self._log_file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            self._child = self._start(argv, self._environ, self._log_file)
        except FileExistsError:
            log.info("the training is not moved again: %s says what came of it", self._log_file)
        except OSError as error:
            log.error("the training is not moved to more memory: %s", error)
        else:
            log.info("the training moves to a job with --mem=%s: see %s", memory, self._log_file)

    def look(self) -> None:
        """Say how the command ended, once it has."""
        code = self._child.poll() if self._child is not None else None
        if code is None:
            return
        self._child = None
        if code:
            log.error("hetstream migrate ended with exit code %d, nothing has moved: see %s", code, self._log_file)
        else:
            log.info("the job that takes over is submitted: see %s", self._log_file)


def outside_of_job(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what Slurm has said of this job and step."""
    return {name: value for name, value in environ.items() if not _OF_THIS_JOB.match(name)}
