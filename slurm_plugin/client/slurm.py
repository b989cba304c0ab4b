"""The Slurm client: `hetstream.hetjob.ports.SlurmClient` over the command line, and all that is read and changed.

Used by the job master, `hetstream sbatch` and the commands for admins. `read.py` reads, `run.py` says which failures
pass by themselves. It never uses more rights than its user has, and never goes round a refusal.
"""

from __future__ import annotations

import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hetstream.base.access import is_in_common
from hetstream.base.files import temporary_place
from hetstream.base.process import FATAL, of_own_job
from hetstream.hetjob.convert.sbatch_options import refuse_other_words
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.job.job import STEP_PYTHON
from hetstream.hetjob.job.processes import next_signal, signals_held, start_child
from hetstream.hetjob.ports import Child, ClusterLimits, MarkedJob
from hetstream.mpi_dataworkers.process.config import with_whole_paths, without_places_in_common
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.parse_text import SINFO_FORMAT, names_of, parse_default_memory, parse_limits
from hetstream.slurm_plugin.client.read import (
    CommandReader,
    ended_on_whole_nodes,
    in_question,
    plain_environ,
    release_of,
    with_gpu_shares,
    with_held_gpus,
    with_told_gpus,
)
from hetstream.slurm_plugin.client.run import EXIT_NOT_FOUND, CompletedCommand, is_denied, run_slurm, with_retries
from hetstream.slurm_plugin.errors import NodesHidden

if TYPE_CHECKING:
    from hetstream.slurm_plugin.client.accounting import Usage

# Signals that end a program which waits for sbatch; and how long a wake-up that was missed costs.
_HANDED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_LOOK_S = 5.0
# sbatch answers in hundredths of a second, once it has its configuration.
_ASKING_S = 10.0
# Signals that srun acts on (src/srun/srun.c); of any other it would die, and its step with it.
_OF_SRUN = frozenset(
    (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
)
# What a process that Slurm may be about to kill can wait for an answer.
_STATE_S = 4.0

# Variables that say which job this is, which start of it, and how to reach its controller. Every other SLURM_ variable
# describes the surrounding batch script or step, and srun would take it as an option of the new step.
_KEEP = re.compile(
    r"SLURM_(CONF|CONF_SERVER|JOB_ID|JOBID|JOB_UID|JOB_USER|JOB_NODELIST\w*|JOB_NUM_NODES\w*|HET_SIZE|"
    r"JOB_ID_HET_GROUP_\d+|CLUSTER_NAME|RESTART_COUNT|WORKING_CLUSTER|SUBMIT_DIR|SUBMIT_HOST|NODE_ALIASES)$"
)


class CommandSlurm:
    """Runs sbatch, scancel, scontrol, sinfo and srun.

    Args:
        environ: the environment to run them in; None means this process's own.
        sleep: waits before a command is tried again, in seconds.
    """

    def __init__(self, environ: Mapping[str, str] | None = None, sleep: Callable[[float], object] = time.sleep) -> None:
        self._environ = dict(os.environ if environ is None else environ)
        self._sleep = sleep
        self._reader = CommandReader(self._environ)

    def snapshot(self, *, details: bool = False) -> Snapshot:
        """Return the cluster now; see `CommandReader.snapshot`."""
        return self._reader.snapshot(details=details)

    def seen(self, *, details: bool = False) -> Snapshot:
        """Return the same as far as Slurm tells this user of it: without nodes where it hides them."""
        try:
            return self._reader.snapshot(details=details)
        except NodesHidden:
            return self._reader.snapshot(details=details, without_nodes=True)

    def cluster(self, name: str = "") -> ClusterLimits:
        """Partitions, what one job can get there as far as Slurm shows nodes to this user, and scheduler.

        Args:
            name: of the cluster; empty for the one that the environment names.
        """

        environ = plain_environ(self._environ) | ({"SLURM_CLUSTERS": name} if name else {})

        def ask(*argv: str) -> str:
            return run_slurm(argv, env=environ, hint="Check: scontrol ping").stdout

        # --all: who names a hidden partition may mean it.
        try:
            lines = ask("sinfo", "--all", "--noheader", "--exact", SINFO_FORMAT).split()
        except SlurmCommandError as error:
            if not is_denied(error):
                raise
            lines = []  # what nodes have is not for this user (PrivateData=nodes), and all else is
        config = ask("scontrol", "show", "config")
        partitions = ask("scontrol", "--all", "--oneliner", "show", "partition")
        lines = lines or names_of(partitions)
        names = [line.partition("|")[0] for line in lines]
        scheduler = re.search(r"^SchedulerType\s*=\s*(\S+)", config, re.MULTILINE)
        return ClusterLimits(
            partitions=frozenset(name.rstrip("*") for name in names),
            default_partition=next((name.rstrip("*") for name in names if name.endswith("*")), None),
            scheduler=scheduler[1] if scheduler else None,
            limits=parse_limits(lines, partitions, config),
            default_mb_per_cpu=parse_default_memory(partitions, config),
            release=release_of("".join(re.findall(r"^SLURM_VERSION\s*=(.*)$", config, re.MULTILINE))),
        )

    def usages(self, snapshot: Snapshot, start_s: float, end_s: float) -> tuple[Usage, ...]:
        """Return what jobs held and used within a window, from accounting where the cluster has it; see
        `accounting.py`.
        """
        # Only here: each sbatch of a site with the Lua plugin imports this file.
        from hetstream.slurm_plugin.client.accounting import (
            from_queue,
            from_sacct,
            has_accounting,
            times_of_queue,
            with_mig,
        )

        if has_accounting(snapshot):
            usages = from_sacct(self._environ, snapshot.config.get("ClusterName", ""), start_s, end_s)
            return with_mig(usages, snapshot, self._reader.held_gpus)
        now_s, times = time.time(), times_of_queue(self._environ)
        hides = snapshot.hides_jobs
        found = self._reader.jobs(ended=True)
        jobs = with_held_gpus(found, snapshot.nodes, snapshot.partitions, others_are_hidden=hides)
        jobs = with_gpu_shares(jobs, snapshot.nodes)
        asked, unknown = ended_on_whole_nodes(jobs, snapshot.nodes), frozenset[int]()
        asked |= in_question(jobs, snapshot.nodes, others_are_hidden=hides) if hides else frozenset()
        in_doubt = {job.job_id for job in jobs if not job.gpu_types_known}
        if asked or in_doubt:
            jobs, unknown = with_told_gpus(jobs, asked | in_doubt, self._reader.held_gpus(), snapshot.nodes)
            jobs = with_gpu_shares(jobs, snapshot.nodes)
        return from_queue(jobs, unknown & asked, times, now_s)

    def submit(self, script: str, options: Sequence[str], key: str = "") -> str:
        """Submit a script from standard input and return the job id (`sbatch --parsable` prints `id[;cluster]`).

        Args:
            script: text of the batch script.
            options: of sbatch.
            key: a word that names this submission. It is written into the job's comment, and after a lost answer the
                job is looked for by it, so that it is never submitted twice. Without a key a lost answer is an error.

        Raises:
            UsageError: a word is no option of sbatch, or more than one line.
            SlurmCommandError: sbatch refused, or slurmctld was busy for too long.
        """
        refuse_other_words(options)
        argv = ["sbatch", "--parsable", *(_with_key(options, key) if key else options)]
        environ = _outside_of_steps(self._environ)

        def act() -> str:
            return _job_id_of(argv, run_slurm(argv, env=environ, stdin=script))

        find = (lambda: self.find(key)) if key else None
        return with_retries(act, find=find, repeatable=False, sleep=self._sleep)

    def find(self, key: str) -> str | None:
        """Return the job id of this user's submission with this key; None if no pending or running job has it."""
        return self._reader.job_with(key_token(key), os.geteuid())

    def marked_jobs(self, mark: str) -> list[MarkedJob]:
        """Return the jobs of this user that are not over and have this word in their comment."""
        return self._reader.marked_jobs(mark, os.geteuid())

    def cancel(self, job_id: str) -> None:
        """Cancel a job. `scancel --quiet` says nothing, and succeeds, about jobs that have ended."""
        self._act(["scancel", "--quiet", job_id], job_id)

    def ask_to_end(self, job_id: str) -> None:
        """Signal a job's batch script alone; it is no end of the job, so nothing limits its time."""
        self._act(["scancel", "--quiet", "--batch", "--signal=TERM", job_id], job_id)

    def hold(self, job_id: str) -> None:
        """Keep a pending job from starting. Its owner can release it; only what an operator holds stays held."""
        self._act(["scontrol", "hold", job_id], job_id)

    def release(self, job_id: str) -> None:
        """Let a held job start."""
        self._act(["scontrol", "release", job_id], job_id)

    def update(self, job_id: str, fields: Mapping[str, str]) -> None:
        """Change fields of a job in one call: Slurm does not check updates against each other.

        Args:
            job_id: the record's own number; of a component `31+1` not all fields can be changed.
            fields: as `scontrol update` names them, such as `{"TimeLimit": "20"}`. rc 0 is no proof that a field took
                effect: read the job again (22.05 ignores `TresPerNode=gres/opp:p2:1`).

        Raises:
            ValueError: a field that adds (`TimeLimit+`): done twice after a lost answer, it would add twice.
        """
        adding = [name for name in fields if not name.isalnum()]
        if adding:
            raise ValueError(f"update of {', '.join(adding)}: must be NAME=VALUE, because it may be sent twice")
        arguments = [f"{name}={value}" for name, value in fields.items()]
        self._act(["scontrol", "update", f"JobId={job_id}", *arguments], job_id)

    def _act(self, argv: Sequence[str], job_id: str) -> None:
        """Run a command that may be run twice."""

        def act() -> None:
            try:
                run_slurm(argv, env=self._environ, hint=f"Check: squeue --jobs={job_id}")
            except SlurmCommandError as error:
                if not _took_effect(error):
                    raise

        with_retries(act, sleep=self._sleep)

    def node_address(self, node: str) -> str:
        """`NodeAddr` in `scontrol show node`."""
        argv = ["scontrol", "show", "node", node]
        shown = run_slurm(argv, env=self._environ, hint="Check: sinfo -N")
        address = re.search(r"\bNodeAddr=(\S+)", shown.stdout)
        if not address:
            raise SlurmCommandError(argv, 0, shown.stdout, shown.stderr, "It shows no NodeAddr. Check: sinfo -N")
        return address[1]

    def batch_script(self, job_id: str) -> bytes:
        """Return the script of a job, as it was submitted. Slurm shows it to the job's user."""
        with tempfile.TemporaryDirectory(prefix="hetstream-", dir=temporary_place()) as directory:
            path = Path(directory, "script")
            argv = ["scontrol", "write", "batch_script", job_id, str(path)]
            done = run_slurm(argv, env=self._environ, hint=f"Check: scontrol show job {job_id}")
            if not path.is_file():
                raise SlurmCommandError(argv, 0, done.stdout, done.stderr, "It wrote no script")
            return path.read_bytes()

    def command(self, job_id: str) -> str:
        """Return the script's path and its arguments, with a blank between them, as sbatch was given them."""
        shown = run_slurm(["scontrol", "show", "job", job_id], env=self._environ, hint="Check: squeue --me").stdout
        found = re.search(r"^\s*Command=(.*)$", shown, re.MULTILINE)
        return found[1].strip() if found else ""

    def client_version(self) -> str:
        """Return what Slurm's commands say that they are, such as `slurm-wlm 22.05.8`."""
        return run_slurm(["scontrol", "--version"], env=self._environ).stdout.strip()

    def living_jobs(self) -> dict[str, str]:
        """Return the jobs of this user that are not over: id of each (of array tasks and components, their own) and
        state.
        """
        return self._reader.living_jobs(os.geteuid())

    def is_running(self, job_id: str) -> bool:
        """Return whether all components of a job run, and nothing ends them; False where slurmctld does not say at
        once.
        """
        argv = ["squeue", "--noheader", "--format=%T", f"--jobs={job_id}"]
        try:
            states = run_slurm(argv, env=plain_environ(self._environ), timeout_s=_STATE_S).stdout.split()
        except SlurmCommandError:
            return False
        # SIGNALING while a signal is on its way.
        return bool(states) and {*states} <= {"RUNNING", "SIGNALING", "RESIZING"}

    def end_s(self, job_id: str) -> float | None:
        """Return when a running job's time limit ends it, in seconds since 1970; None if Slurm does not say."""
        return self._reader.end_s(job_id)

    def start_step(
        self, options: Sequence[str], command: Sequence[str], log: Path, *, in_background: bool = False
    ) -> Child:
        """Start `srun` with its output appended to `log`."""
        beside = [self._background_option()] if in_background else []
        argv = ["srun", *beside, *options, *command]
        try:
            death_signal = None if in_background else signal.SIGTERM
            environ = _outside_of_steps(self._environ)
            return start_child(argv, env=environ, log=log, death_signal=death_signal, ignored=FATAL - _OF_SRUN)
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
        return "--external-launcher" if release_of(said) >= (23, 11) else "--overlap"


def sbatch_takes_value(name: str, environ: Mapping[str, str]) -> bool:
    """Return whether a long option of sbatch that is in no table, such as a SPANK plugin's, has its value in the next
    word.

    sbatch is asked, and submits nothing: it ends with success where it comes to read --version, and in vain reads its
    empty standard input as a script where --version was the value.
    """

    def ends_well(option: str) -> bool:
        try:
            run_slurm(["sbatch", "--test-only", option, "--version"], env=environ, timeout_s=_ASKING_S)
        except SlurmCommandError:
            return False
        return True

    return ends_well(f"--{name}=x") and not ends_well(f"--{name}")


def key_token(key: str) -> str:
    """Return the word in a job's comment that says which submission it is.

    Raises:
        ValueError: the key is not one word of letters, digits and . _ : + -
    """
    if not re.fullmatch(r"[A-Za-z0-9._:+-]{1,128}", key):
        raise ValueError(f"submission key {key!r}: must be 1 to 128 letters, digits or . _ : + -")
    return f"hetstream:key={key}"


def _with_key(options: Sequence[str], key: str) -> list[str]:
    """The options with the key's token behind what they say as comment; a comment in the script gives way."""
    kept, comment = [], ""
    arguments = iter(options)
    for word in arguments:
        if word == "--comment":
            comment = next(arguments, "")
        elif word.startswith("--comment="):
            comment = word.removeprefix("--comment=")
        else:
            kept.append(word)
    return [f"--comment={comment} {key_token(key)}".replace("= ", "="), *kept]


def _took_effect(error: SlurmCommandError) -> bool:
    """Whether an update of an array was applied to all tasks that have not ended: scontrol exits with 1 all the same.

    22.05 lists `33_0-3,5: No error` too, 26.05 writes `20_[4]: Job has already finished`.
    """
    lines = [line for line in f"{error.stdout}\n{error.stderr}".splitlines() if line.strip()]
    answers = [re.fullmatch(r"\d+_[\[\]\d,-]+: (No error|Job has already finished)", line.strip()) for line in lines]
    return bool(answers) and all(answers)


def submit_script(
    options: Sequence[str], script: Path, arguments: Sequence[str], environ: Mapping[str, str], cwd: str
) -> str:
    """Run sbatch on a script file, once, and return the job's id.

    Args:
        options: of sbatch.
        script: absolute.
        arguments: of the script.
        environ: that sbatch runs in.
        cwd: likewise.

    Raises:
        UsageError: a word is no option of sbatch, or more than one line.
        SlurmCommandError: sbatch refused, cannot run there, or printed no job id.
    """
    refuse_other_words(options)
    argv = ["sbatch", "--parsable", *options, str(script), *arguments]
    return _job_id_of(argv, run_slurm(argv, env=environ, cwd=cwd))


def _job_id_of(argv: Sequence[str], done: CompletedCommand) -> str:
    """What `sbatch --parsable` printed, without the cluster's name behind it."""
    job_id = done.stdout.strip().split(";")[0]
    if not job_id.isdigit():
        raise SlurmCommandError(argv, 0, done.stdout, done.stderr, "sbatch printed no job id. Check: squeue --me")
    return job_id


def run_sbatch(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run sbatch on this process's own standard streams and return its exit code.

    There is no deadline: with `--wait` it runs as long as the job. 128 + N when signal N ended it, as in a shell. A
    signal that this process alone gets is handed on, and if this process is killed, sbatch ends too.

    Raises:
        SlurmCommandError: sbatch could not be started.
    """
    argv = ["sbatch", *arguments]
    with signals_held(_HANDED_ON):
        try:
            process = start_child(argv, env=environ, foreground=True)
        except OSError as exc:
            advice = "Run this where Slurm's commands are installed"
            raise SlurmCommandError(argv, EXIT_NOT_FOUND, "", exc.strerror or str(exc), advice) from exc
        while (returncode := process.poll()) is None:
            received = next_signal(_HANDED_ON, _LOOK_S)
            # si_code above 0: from the kernel, that is from the terminal, which has told sbatch too.
            if received is not None and received.si_code <= 0:
                process.send_signal(received.si_signo)
        return returncode if returncode >= 0 else 128 - returncode


def _outside_of_steps(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment without what belongs to the surrounding batch script or step, for a process on any node."""
    foreign = ("SLURM_", "SBATCH_", "SRUN_", "PMI_", "PMIX_")
    own = of_own_job(environ)
    kept = {
        name: value
        for name, value in own.items()
        if (not name.startswith(foreign) or _KEEP.match(name)) and name != STEP_PYTHON
    }
    return without_places_in_common(with_whole_paths(kept), is_in_common)
