"""What Slurm tells a batch script about its job. The one reader of SLURM_ variables on the job side; pure."""

from __future__ import annotations

import logging
import os
import re
import shlex
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from hetstream.base.access import unsafe_below
from hetstream.base.errors import ConfigError
from hetstream.base.files import make_private
from hetstream.base.process import of_own_job, with_job
from hetstream.base.text import user_name
from hetstream.checkpoint.config import JOB_WRITER
from hetstream.hetjob.errors import MasterError, SlurmCommandError, WritersNotStarted
from hetstream.hetjob.ports import Child, SlurmClient
from hetstream.hetjob.site.site_file import SITE_FILE, in_site_file

# Where the directories of jobs are: `.hetstream` where a job was submitted from, or a place of their own.
#
# Two settings, each an option, else a variable of the environment, else a line in the site's file on the host that
# asks:
#
#     HETSTREAM_JOBS_DIR      directories of jobs, on a file system that the job's hosts share (default: `.hetstream`)
#     HETSTREAM_JOURNAL_DIR   journal of the dispatcher, also on a disk of the first node (default: the job's directory)
#
# `%u` in them stands for the user. Reads the site's file and directories, asks nobody.
#
# What lies in a job's directory names programs and holds keys. Where somebody else could swap it (a group's directory,
# a colleague's), the default is `.hetstream` in the user's home directory instead; a place that was named is refused.

JOBS_DIR, JOURNAL_DIR = "HETSTREAM_JOBS_DIR", "HETSTREAM_JOURNAL_DIR"
IN_SUBMIT_DIR = ".hetstream"
RULE = "an absolute path on one line, in which %u stands for the user, such as /scratch/%u/hetstream"


def is_directory_pattern(text: str) -> bool:
    """Return whether a text has the form of these settings."""
    return text.startswith("/") and text.isprintable() and "%" not in text.replace("%u", "")


def setting(name: str, environ: Mapping[str, str], site_file: Path = SITE_FILE) -> str | None:
    """Return what the environment or the site's file says of a setting that is a directory; None if it is empty or not
    there.

    Raises:
        ConfigError: it has another form.
    """
    text, origin = environ.get(name), "environment variable "
    if text is None:
        text, origin = in_site_file(name, site_file), f"{site_file}: "
    if text and not is_directory_pattern(text):
        raise ConfigError(f"{origin}{name}={text!r}: must be {RULE}")
    return text or None


def for_user(pattern: str, user: str = "") -> Path:
    """Return the directory of a user; by default of whom this process runs as."""
    return Path(pattern.replace("%u", user or user_name(os.geteuid())))


def in_home() -> Path | None:
    """Return where the directories of jobs are that are not safe where they were submitted; None without a home
    directory.
    """
    try:
        return Path.home() / IN_SUBMIT_DIR
    except RuntimeError:
        return None


def places(submit_dirs: Iterable[Path], jobs_dir: str | None) -> list[Path]:
    """Return where directories of this user's jobs may be.

    Args:
        submit_dirs: that jobs may have been submitted from.
        jobs_dir: the setting, with `%u` for the user; None without it.
    """
    home = in_home()
    found = [*(path / IN_SUBMIT_DIR for path in submit_dirs), *([home] if home else [])]
    return [*dict.fromkeys([*found, *([for_user(jobs_dir)] if jobs_dir else [])])]


def choose(jobs_dir: str | None, submit_dir: Path) -> tuple[Path | None, str]:
    """Return the place of the directory of a job, where nobody else can put another one in its place.

    Args:
        jobs_dir: the one that was named, with `%u` for the user; None for the default.
        submit_dir: where the job is submitted.

    Returns:
        The place, None for `.hetstream` where the job is submitted; and one line for the user if that is not safe.

    Raises:
        ConfigError: the one that was named is not safe, or none is.
    """
    if jobs_dir:
        place = for_user(jobs_dir)
        if reason := unsafe_below(place):
            raise ConfigError(f"the place of jobs' directories {place} is not used: {reason}")
        return place, ""
    reason = unsafe_below(submit_dir / IN_SUBMIT_DIR)
    if not reason:
        return None, ""
    home = in_home()
    why_not_home = unsafe_below(home) if home else "there is no home directory"
    if home is None or why_not_home:
        raise ConfigError(
            f"no safe place for the job's directory. Where it is submitted: {reason}. In the home directory: "
            f"{why_not_home}. Name another one with --jobs-dir"
        )
    return home, f"the job's directory is below {home}, and not where it is submitted: {reason}"


def jobs_dir_in(script: str) -> str:
    """Return which directory a converted script names for its job; "" if it names none.

    Args:
        script: text of a user, of which nothing is believed but that word.
    """
    for line in script.splitlines():
        if line.startswith("_hetstream=$(") and " --jobs-dir=" in line:
            try:
                arguments = shlex.split(re.sub(r"\) \|\|$", "", line.removeprefix("_hetstream=$(")))
            except ValueError:
                continue
            named = (word.removeprefix("--jobs-dir=") for word in arguments if word.startswith("--jobs-dir="))
            return next((text for text in named if is_directory_pattern(text)), "")
    return ""


_COMMANDS = str(Path(__file__).parents[1] / "commands")
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
    def embedding_controller_state_file(self) -> Path:
        """The same of the controller of the embedding servers."""
        return self.directory / "elastic-embedding.json"

    @property
    def writers(self) -> Path:
        """Logs of the checkpoint writers, and a file for each that is ready."""
        return self.directory / "writers"

    @property
    def master_log(self) -> Path:
        """What the job master did and why; kept, as are the other logs beside it."""
        return self.directory / "master.log"


def plain_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that an ordinary job has and a heterogeneous one lacks.

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
    """Return what a heterogeneous job's script needs so that the jobs that it submits itself are ordinary ones.

    Its PATH begins with commands that take Slurm's variables of its components out of what they hand on, and with an
    `srun` whose tasks have what those of an ordinary job have; for that one there is the Python that runs this.
    """
    if "SLURM_HET_SIZE" not in of_own_job(environ):
        return {}
    kept = [entry for entry in environ.get("PATH", "").split(os.pathsep) if entry != _COMMANDS]
    return {"PATH": os.pathsep.join([_COMMANDS, *kept]), STEP_PYTHON: sys.executable}


def export_variables(environ: Mapping[str, str], names: Mapping[str, str]) -> dict[str, str]:
    """Return what lets variables reach the tasks of `srun` in a job submitted with `--export=NONE` or a list.

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


# When a job's time limit will end it, and when to say so: early enough that the newest state gets to disk.
#
# Called by the checkpoint writers of a job, each in a thread. Slurm's own warning, `sbatch --signal`, does not reach
# trainers: with `B:` the batch shell alone gets it, and holds it back until its `srun` has ended; without, every
# process of every step gets it, and those that do not expect it end of it. The time limit can be asked for, and may be
# raised meanwhile.

log = logging.getLogger(__name__)

# For the step that a trainer is at, its save, and the commit. `KillWait`, 30 s as a rule, comes on top.
_MARGIN_S = 60.0
# How often the lead is reckoned anew, and how soon a Slurm that does not answer is asked again.
_LOOK_S = 30.0


def lead_s(persist_s: Iterable[float], left_s: float) -> float:
    """Return how long before its end a job is to be warned.

    Args:
        persist_s: how long each store of this host takes to disk; they go one after the other.
        left_s: how long the job had from its start, or from when it was first asked.

    Returns:
        The time of two rounds, as one may have just begun, and a margin; at most half of the job.
    """
    return min(_MARGIN_S + 2 * sum(persist_s), left_s / 2)


class JobEnd:
    """Watches the end of a job. `reason` says why to stop, once it is time.

    Args:
        job_id: for messages.
        ask: when Slurm will end the job, in seconds since 1970; None if it does not say.
        persist_s: how long each store of this host takes to disk.
        clock: seconds since 1970.
        wait: sleeps a number of seconds; true if it was told to end meanwhile.
    """

    def __init__(
        self,
        job_id: str,
        ask: Callable[[], float | None],
        persist_s: Callable[[], Iterable[float]],
        *,
        clock: Callable[[], float] = time.time,
        wait: Callable[[float], bool] | None = None,
    ) -> None:
        self._job_id = job_id
        self._ask = ask
        self._persist_s = persist_s
        self._clock = clock
        self._ended = threading.Event()
        self._wait = wait or self._ended.wait
        self._reason = ""

    @property
    def reason(self) -> str:
        """Why trainers are to stop; "" as long as there is time."""
        return self._reason

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()

    def watch(self) -> None:
        """Return when it is time, when Slurm says that there is no end, or after `end`."""
        end_s = self._end_s()
        if end_s is None:
            return
        left_s = end_s - self._clock()
        while True:
            early_s = lead_s(self._persist_s(), left_s)
            wait_s = end_s - early_s - self._clock()
            if wait_s > 0:
                if self._wait(min(wait_s, _LOOK_S)):
                    return
                continue
            latest_s = self._end_s()
            if latest_s is None:
                return
            if latest_s <= end_s:
                break
            log.info("job=%s may run until %s now", self._job_id, _time_words(latest_s))
            end_s = latest_s
        self._reason = f"job {self._job_id} ends at {_time_words(end_s)}, its time limit"
        log.info("%s: trainers are asked to save and to end, %.0f s before", self._reason, early_s)

    def _end_s(self) -> float | None:
        """What Slurm says; None if it says none, or after `end`."""
        while True:
            try:
                return self._ask()
            except SlurmCommandError as error:
                log.warning("job=%s: when it ends is not known: %s", self._job_id, error)
                if self._wait(_LOOK_S):
                    return None


def _time_words(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%H:%M:%S")


# What the steps beside a job's program have in common: that of the job master, and that of the checkpoint writers.

_POLL_S = 0.05


def await_ready(step: Child, is_ready: Callable[[], bool], limit_s: float, lacking: str) -> str:
    """Wait until a step is ready; else end it.

    Args:
        step: its srun.
        is_ready: asked again and again.
        limit_s: how long to wait.
        lacking: what there is not until then, in words.

    Returns:
        Why it is not ready; "" if it is.
    """
    deadline = time.monotonic() + limit_s
    while not is_ready():
        ended = step.poll()
        if ended is not None or time.monotonic() > deadline:
            step.terminate()
            return f"the step ended with {ended}" if ended is not None else f"{lacking} within {limit_s:g} s"
        time.sleep(_POLL_S)
    return ""


def why_no_directory(what: str, directory: Path, error: OSError) -> str:
    """Return why a directory of a job cannot be made, and what the user can do."""
    return (
        f"the {what} directory {directory} cannot be made: {error.strerror or error}. Submit from a directory that you "
        "can write to and that all hosts share, or name one with --jobs-dir"
    )


# Start the checkpoint writers of a job: one on each of the trainer's nodes, in a job step of their own.
#
# Called by `hetstream ckpt start` in a converted script. Slurm ends all processes of a step with it; a checkpoint
# writer that is a child of a trainer would go with the trainer. When the job ends, the step gets SIGTERM and `KillWait`
# seconds, in which each checkpoint writer brings the newest generation to disk. What a checkpoint writer does is
# `checkpoint/persist/writer.py`'s.

# A step starts in a fraction of a second; Python from a busy shared file system may take many.
_START_LIMIT_S = 60.0


def ready_file(job: JobEnvironment) -> Path:
    """Return what the checkpoint writer of this node makes when it is ready to serve, and removes at its end."""
    return job.writers / f"{job.node}.ready"


def log_file(job: JobEnvironment) -> Path:
    """Return what the checkpoint writer of this node did and why; kept."""
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
    step = client.start_step(options, [*program, "internal", "writer", *place], output, in_background=True)
    if why := await_ready(step, lambda: _num_ready(job) >= job.num_nodes, limit_s, "not all were ready"):
        raise WritersNotStarted(f"the checkpoint writers did not start: {why}. See the logs in {job.writers}")
    return with_job({JOB_WRITER: "1"}, environ)


def _num_ready(job: JobEnvironment) -> int:
    return len(list(job.writers.glob("*.ready")))
