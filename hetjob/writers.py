"""Start the checkpoint writers of a job: one on each of the trainer's nodes, in a job step of their own.

Called by `hetstream ckpt start` in a converted script. Slurm ends all processes of a step with it; a checkpoint writer
that is a child of a trainer would go with the trainer. When the job ends, the step gets SIGTERM and `KillWait` seconds,
in which each checkpoint writer brings the newest generation to disk. What a checkpoint writer does is
`checkpoint/persist/writer.py`'s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from hetstream.base.own_job import with_job
from hetstream.base.private import make_private
from hetstream.checkpoint.config import JOB_WRITER
from hetstream.hetjob.errors import WritersNotStarted
from hetstream.hetjob.job_environment import JobEnvironment
from hetstream.hetjob.job_steps import await_ready, why_no_directory
from hetstream.hetjob.ports import SlurmClient

# A step starts in a fraction of a second; Python from a busy shared file system may take many.
_START_LIMIT_S = 60.0


def ready_file(job: JobEnvironment) -> Path:
    """What the checkpoint writer of this node makes when it is ready to serve, and removes at its end."""
    return job.writers / f"{job.node}.ready"


def log_file(job: JobEnvironment) -> Path:
    """What the checkpoint writer of this node did and why; kept."""
    return job.writers / f"{job.node}.log"


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
        WritersNotStarted: they did not come up; nothing of them is left.
        SlurmCommandError: the step could not be started.
    """
    job = JobEnvironment.read(environ, jobs_dir)
    try:
        make_private(job.directory, own_parents=1)
        make_private(job.writers, own_parents=2)
    except OSError as error:
        raise WritersNotStarted(why_no_directory("writers'", job.writers, error)) from error
    options = ["--het-group=0"] if job.het_size > 1 else []
    options += [f"--nodes={job.num_nodes}", f"--ntasks={job.num_nodes}", "--ntasks-per-node=1", "--cpus-per-task=1"]
    # One checkpoint writer that ends, or one node that fails, is no reason to end the others.
    options += ["--mem=0", "--gres=none", "--kill-on-bad-exit=0", "--no-kill", "--job-name=hetstream-ckpt"]
    output = job.writers / "step.log"
    place = [f"--jobs-dir={jobs_dir}"] if jobs_dir else []
    step = client.start_step(options, [*program, "ckpt", "writer", *place], output, in_background=True)
    if why := await_ready(step, lambda: _num_ready(job) >= job.num_nodes, limit_s, "not all were ready"):
        raise WritersNotStarted(f"the checkpoint writers did not start: {why}. See the logs in {job.writers}")
    return with_job({JOB_WRITER: "1"}, environ)


def _num_ready(job: JobEnvironment) -> int:
    return len(list(job.writers.glob("*.ready")))
