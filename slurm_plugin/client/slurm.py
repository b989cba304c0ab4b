"""The Slurm client: `hetjob.ports.SlurmClient` over the command line. Used by the job master and `hetstream sbatch`.

Commands and their text output are the base on every version: their JSON is missing on 22.05 and differs later.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from hetjob.errors import SlurmCommandError
from hetjob.ports import Child, Cluster
from hetjob.processes import start_child
from slurm_plugin.client.run import EXIT_NOT_FOUND, run_slurm

# Variables that say which job this is and how to reach its controller. Every other SLURM_ variable describes the
# surrounding batch script or step, and srun would take it as an option of the new step.
_KEEP = re.compile(
    r"SLURM_(CONF|CONF_SERVER|JOB_ID|JOBID|JOB_UID|JOB_USER|JOB_NODELIST\w*|JOB_NUM_NODES\w*|HET_SIZE|"
    r"JOB_ID_HET_GROUP_\d+|CLUSTER_NAME|WORKING_CLUSTER|SUBMIT_DIR|SUBMIT_HOST|NODE_ALIASES)$"
)


class CommandSlurm:
    """Runs sbatch, scancel, scontrol, sinfo and srun.

    Args:
        environ: the environment to run them in; None means this process's own.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        self._environ = dict(os.environ if environ is None else environ)

    def cluster(self) -> Cluster:
        """Partitions (a default one is marked `*` by sinfo) and scheduler of the cluster."""
        listed = run_slurm(["sinfo", "--noheader", "--format=%P"], env=self._environ, hint="Check: scontrol ping")
        names = listed.stdout.split()
        config = run_slurm(["scontrol", "show", "config"], env=self._environ, hint="Check: scontrol ping").stdout
        scheduler = re.search(r"^SchedulerType\s*=\s*(\S+)", config, re.MULTILINE)
        return Cluster(
            partitions=frozenset(name.rstrip("*") for name in names),
            default_partition=next((name.rstrip("*") for name in names if name.endswith("*")), None),
            scheduler=scheduler[1] if scheduler else None,
        )

    def submit(self, script: str, options: Sequence[str]) -> str:
        """Submit a script from standard input and return the job id (`sbatch --parsable` prints `id[;cluster]`)."""
        argv = ["sbatch", "--parsable", *options]
        done = run_slurm(argv, env=_outside_of_steps(self._environ), stdin=script)
        job_id = done.stdout.strip().split(";")[0]
        if not job_id.isdigit():
            raise SlurmCommandError(argv, 0, done.stdout, done.stderr, "sbatch printed no job id. Check: squeue --me")
        return job_id

    def cancel(self, job_id: str) -> None:
        """Cancel a job. `scancel --quiet` says nothing, and succeeds, about jobs that have ended."""
        run_slurm(["scancel", "--quiet", job_id], env=self._environ, hint=f"Check: squeue --jobs={job_id}")

    def node_address(self, node: str) -> str:
        """`NodeAddr` in `scontrol show node`."""
        argv = ["scontrol", "show", "node", node]
        shown = run_slurm(argv, env=self._environ, hint="Check: sinfo -N")
        address = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
        if not address:
            raise SlurmCommandError(argv, 0, shown.stdout, shown.stderr, "It shows no NodeAddr. Check: sinfo -N")
        return address[1]

    def working_directory(self, job_id: str) -> Path:
        """Where a job was submitted, or its `--chdir`; known for as long as squeue shows the job."""
        argv = ["squeue", "--noheader", f"--jobs={job_id}", "--format=%Z"]
        shown = run_slurm(argv, env=self._environ, hint="Check: squeue --me").stdout.split("\n")[0]
        return Path(shown)

    def living_jobs(self) -> dict[str, str]:
        """The jobs of this user that are not over: id of each (of array tasks and components, their own) and state."""
        argv = ["squeue", "--noheader", f"--user={os.geteuid()}", "--format=%A %T"]
        lines = run_slurm(argv, env=self._environ, hint="Check: scontrol ping").stdout.splitlines()
        return dict(line.split(maxsplit=1) for line in lines if line.strip())

    def start_step(
        self, options: Sequence[str], command: Sequence[str], log: Path, *, in_background: bool = False
    ) -> Child:
        """Start `srun` with its output appended to `log`."""
        beside = [self._background_option()] if in_background else []
        argv = ["srun", *beside, *options, *command]
        try:
            death_signal = None if in_background else signal.SIGTERM
            return start_child(argv, env=_outside_of_steps(self._environ), log=log, death_signal=death_signal)
        except OSError as exc:
            reason = exc.strerror or str(exc)
            raise SlurmCommandError(argv, EXIT_NOT_FOUND, "", reason, "Check PATH inside the job") from exc

    def _background_option(self) -> str:
        """The option for a step that leaves everything to the others.

        From 23.11 on, an `srun` that names no number of tasks waits for a node without any step, and `--overlap` does
        not help (seen on 24.11 and 26.05). Steps of an external launcher, such as the daemons that mpirun starts, do
        not count; that option came with the same release.
        """
        said = run_slurm(["srun", "--version"], env=self._environ).stdout
        version = re.search(r"(\d+)\.(\d+)", said)
        if version and (int(version[1]), int(version[2])) >= (23, 11):
            return "--external-launcher"
        return "--overlap"


def run_sbatch(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run sbatch on this process's own standard streams and return its exit code.

    There is no deadline: with `--wait` it runs as long as the job. 128 + N when signal N ended it, as in a shell.

    Raises:
        SlurmCommandError: sbatch could not be started.
    """
    argv = ["sbatch", *words]
    try:
        process = subprocess.Popen(argv, env=dict(environ))
    except OSError as exc:
        advice = "Run this where Slurm's commands are installed"
        raise SlurmCommandError(argv, EXIT_NOT_FOUND, "", exc.strerror or str(exc), advice) from exc
    while True:
        try:
            returncode = process.wait()
        except KeyboardInterrupt:
            continue  # the terminal has told sbatch too: how it ends is its own decision
        return returncode if returncode >= 0 else 128 - returncode


def _outside_of_steps(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to the surrounding batch script or step."""
    foreign = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_")
    return {name: value for name, value in environ.items() if not name.startswith(foreign) or _KEEP.match(name)}
