"""Start the checkpoint savers of a job: one on each of the trainer's nodes, in a job step of their own.

Called by `hetstream ckpt start` in a converted script. Slurm ends all processes of a step with it; a saver that is a
child of a trainer would go with the trainer. When the job ends, the step gets SIGTERM and `KillWait` seconds, in which
each saver brings the newest generation to disk. What a saver does is `checkpoint/saver.py`'s.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from checkpoint.config import JOB_SAVER
from hetjob.errors import SaversError
from hetjob.job_environment import JobEnvironment
from hetjob.ports import SlurmClient
from hetstream.base.private import make_private

# A step starts in a fraction of a second; Python from a busy shared file system may take many.
_START_LIMIT_S = 60.0
_POLL_S = 0.05


def ready_file(job: JobEnvironment) -> Path:
    """What the saver of this node makes when it is ready to serve, and removes at its end."""
    return job.savers / f"{job.node}.ready"


def log_file(job: JobEnvironment) -> Path:
    """What the saver of this node did and why; kept."""
    return job.savers / f"{job.node}.log"


def start(
    program: Sequence[str],
    client: SlurmClient,
    environ: Mapping[str, str],
    limit_s: float = _START_LIMIT_S,
    jobs_dir: Path | None = None,
) -> dict[str, str]:
    """Start them and wait until all are ready.

    Args:
        program: how hetstream is called on every host: words, the first an absolute path.
        client: Slurm.
        environ: of the batch script.
        limit_s: how long to wait.
        jobs_dir: see `JobEnvironment`.

    Returns:
        The variables that the batch script must export.

    Raises:
        MasterError: this is no Slurm job.
        SaversError: they did not come up; nothing of them is left.
        SlurmCommandError: the step could not be started.
    """
    job = JobEnvironment.read(environ, jobs_dir)
    try:
        make_private(job.directory, own_parents=1)
        make_private(job.savers, own_parents=2)
    except OSError as error:
        raise SaversError(
            f"the savers' directory {job.savers} cannot be made: {error.strerror or error}. Submit from a directory "
            "that you can write to and that all hosts share, or name one with --jobs-dir"
        ) from error
    options = ["--het-group=0"] if job.het_size > 1 else []
    options += [f"--nodes={job.num_nodes}", f"--ntasks={job.num_nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    # One saver that ends, or one node that fails, is no reason to end the others.
    options += ["--mem=0", "--gres=none", "--kill-on-bad-exit=0", "--no-kill", "--job-name=hetstream-ckpt"]
    output = job.savers / "step.log"
    place = [f"--jobs-dir={jobs_dir}"] if jobs_dir else []
    step = client.start_step(options, [*program, "ckpt", "saver", *place], output, in_background=True)
    deadline = time.monotonic() + limit_s
    while len(list(job.savers.glob("*.ready"))) < job.num_nodes:
        ended = step.poll()
        if ended is not None or time.monotonic() > deadline:
            step.terminate()
            how = f"their step ended with {ended}" if ended is not None else f"not all were ready in {limit_s:g} s"
            raise SaversError(f"the checkpoint savers did not start: {how}. See the logs in {job.savers}")
        time.sleep(_POLL_S)
    return {JOB_SAVER: "1"}
