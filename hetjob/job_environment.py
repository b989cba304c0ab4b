"""What Slurm tells a batch script about its job. The one reader of SLURM_ variables on the job side; pure."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.own_job import of_own_job
from hetstream.hetjob.errors import MasterError
from hetstream.hetjob.jobs_dir import IN_SUBMIT_DIR

_COMMANDS = str(Path(__file__).with_name("commands"))
# Of component 0, an option of srun.
_OF_SRUN = re.compile(r"SLURM_(?!JOB_|TASKS_PER_NODE_)[A-Z0-9_]+_(?:HET|PACK)_GROUP_0", re.ASCII)
_OF_NODES = r"(\d{1,9})(?:\(x(\d{1,9})\))?"  # tasks of a node, and how many such nodes
CONTROLLER_STATE_FILE = "elastic.json"
STEP_PYTHON = "HETSTREAM_STEP_PYTHON"  # read by commands/srun


@dataclass(frozen=True)
class JobEnvironment:
    """The job that a process runs in.

    Attributes:
        job_id: of the leader.
        job_name: as squeue shows it.
        node: name of this host in Slurm (`SLURMD_NODENAME`).
        submit_dir: where sbatch was called.
        het_size: number of components; 1 for an ordinary job.
        restarts: how often Slurm has requeued the job.
        num_nodes: of component 0.
        cpus_per_task: of component 0, as its batch script sees it; None if the script asks for none.
        jobs_dir: holds the directories of this user's jobs; None for `.hetstream` where sbatch was called.
    """

    job_id: str
    job_name: str
    node: str
    submit_dir: Path
    het_size: int
    restarts: int
    num_nodes: int = 1
    cpus_per_task: int | None = None
    jobs_dir: Path | None = None

    @classmethod
    def read(cls, environ: Mapping[str, str], jobs_dir: Path | None = None) -> JobEnvironment:
        """Read it from the environment of a batch script or step.

        Args:
            environ: of that.
            jobs_dir: see there.

        Raises:
            MasterError: this is no Slurm job.
        """
        missing = [name for name in ("SLURM_JOB_ID", "SLURMD_NODENAME", "SLURM_SUBMIT_DIR") if not environ.get(name)]
        if missing:
            raise MasterError(
                f"{', '.join(missing)} is not set: the job master runs inside a batch job. "
                "Submit the script with: hetstream sbatch SCRIPT"
            )
        environ = of_own_job(environ)
        plain = {**environ, **plain_variables(environ)}
        return cls(
            job_id=environ["SLURM_JOB_ID"],
            job_name=environ.get("SLURM_JOB_NAME", "job"),
            node=environ["SLURMD_NODENAME"],
            submit_dir=Path(environ["SLURM_SUBMIT_DIR"]),
            het_size=int(environ.get("SLURM_HET_SIZE") or 1),
            restarts=int(environ.get("SLURM_RESTART_COUNT") or 0),
            num_nodes=int(environ.get("SLURM_JOB_NUM_NODES_HET_GROUP_0") or environ.get("SLURM_JOB_NUM_NODES") or 1),
            cpus_per_task=int(cpus) if (cpus := plain.get("SLURM_CPUS_PER_TASK", "")).isdigit() else None,
            jobs_dir=jobs_dir,
        )

    @property
    def directory(self) -> Path:
        """The job's directory. A requeued job starts over, so it gets one of its own for each start."""
        again = f"-restart-{self.restarts}" if self.restarts else ""
        return (self.jobs_dir or self.submit_dir / IN_SUBMIT_DIR) / f"job-{self.job_id}{again}"

    @property
    def address_file(self) -> Path:
        """What trainers and data workers connect with; removed at the end."""
        return self.directory / "address"

    @property
    def work_dir(self) -> Path:
        """The dispatcher's journal, or a link to where it is; removed at the end."""
        return self.directory / "dispatcher"

    @property
    def spec_file(self) -> Path:
        """What the job asks of its job master, as JSON; for the steps of the job."""
        return self.directory / "spec.json"

    @property
    def controller_state_file(self) -> Path:
        """What the elastic controller knows, for a job master that is started again; removed at the end."""
        return self.directory / CONTROLLER_STATE_FILE

    @property
    def gpu_controller_state_file(self) -> Path:
        """The same of the controller of the stage on GPUs."""
        return self.directory / "elastic-gpu.json"

    @property
    def writers(self) -> Path:
        """Logs of the checkpoint writers, and a file for each that is ready."""
        return self.directory / "writers"

    @property
    def master_log(self) -> Path:
        """What the job master did and why; kept, as are the other logs beside it."""
        return self.directory / "master.log"


def plain_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that an ordinary job has and a heterogeneous one lacks.

    Slurm gives a heterogeneous job's batch script `SLURM_CPUS_PER_TASK_HET_GROUP_0` but no `SLURM_CPUS_PER_TASK`
    (seen on 22.05), on which the user's script may count. What the job has instead counts for nothing: the shell that
    submitted it may have had it from a job of its own, where an ordinary job gets a value anew. And with
    `--cpus-per-gpu` there are CPUs in `SLURM_TASKS_PER_NODE` (seen on 24.11 and 26.05), and tasks in
    `SLURM_TASKS_PER_NODE_HET_GROUP_0`.
    """
    own = ((re.fullmatch(r"(SLURM_\w+)_HET_GROUP_0", name), value) for name, value in of_own_job(environ).items())
    component = {match[1]: value for match, value in own if match}
    found = component | _counted_tasks(component)
    # Of nodes and ids those of the whole job stay.
    return {
        name: value
        for name, value in found.items()
        if name not in environ or (environ[name] != value and not name.startswith("SLURM_JOB_"))
    }


def _counted_tasks(component: Mapping[str, str]) -> dict[str, str]:
    """How many tasks component 0 has, where an ordinary job says so and it does not.

    Both variables are there for `--ntasks`, and also where `--ntasks-per-node` gives the number (seen on 22.05 to
    26.05). Of the latter a component lacks them since 24.11, and the job too where there is no `--cpus-per-task`.
    """
    if "SLURM_NTASKS" in component or "SLURM_NTASKS_PER_NODE" not in component:
        return {}
    of_nodes = component.get("SLURM_TASKS_PER_NODE", "")
    if not re.fullmatch(rf"{_OF_NODES}(?:,{_OF_NODES})*", of_nodes, re.ASCII):
        return {}
    tasks = str(sum(int(number) * int(nodes or 1) for number, nodes in re.findall(_OF_NODES, of_nodes, re.ASCII)))
    return {"SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks}


def script_lines(environ: Mapping[str, str]) -> str:
    """Shell text after which a heterogeneous job's script works as an ordinary one does.

    Of each option srun takes `SLURM_NTASKS_HET_GROUP_0` after `SLURM_NTASKS` (`_opt_env` in src/srun/opt.c), so what a
    script exports or unsets would count for nothing. What says which job this is, and where, stays: hetstream and MPI
    look for it.
    """
    names = [name for name in of_own_job(environ) if _OF_SRUN.fullmatch(name)]
    lines = export_lines(plain_variables(environ) | submitting(environ))
    return f"{lines}unset {' '.join(names)}\n" if names else lines


def submitting(environ: Mapping[str, str]) -> dict[str, str]:
    """What a heterogeneous job's script needs so that the jobs that it submits itself are ordinary ones.

    Its PATH begins with commands that take Slurm's variables of its components out of what they hand on, and with an
    `srun` whose tasks have what those of an ordinary job have; for that one there is the Python that runs this.
    """
    if "SLURM_HET_SIZE" not in of_own_job(environ):
        return {}
    kept = [entry for entry in environ.get("PATH", "").split(os.pathsep) if entry != _COMMANDS]
    return {"PATH": os.pathsep.join([_COMMANDS, *kept]), STEP_PYTHON: sys.executable}


def export_variables(environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """What lets variables reach the tasks of `srun` in a job submitted with `--export=NONE` or a list.

    Such a job has `SLURM_EXPORT_ENV`, and srun passes on only what it names.
    """
    before = environ.get("SLURM_EXPORT_ENV")
    if before is None or before.split(",")[0] == "ALL":
        return {}
    kept = [name for name in before.split(",") if name not in ("NONE", "NIL", "")]
    return {"SLURM_EXPORT_ENV": ",".join([*kept, *names])}


def export_lines(variables: Mapping[str, str]) -> str:
    """Shell text that exports variables."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
