"""The job master's I/O: start it from the batch script, serve until the job ends, leave nothing behind.

Called by `hetstream internal master`: by its `start` in the batch script, by its `serve` in a job step of its own.
Slurm kills what a batch script leaves running without a warning, but gives steps SIGTERM and `KillWait` seconds: in a
step the master has the time to end the data workers, keep the summary and remove the keys.
`state.py` decides, `children.py` carries it out.
"""

from __future__ import annotations

import functools
import logging
import os
import secrets
import shlex
import shutil
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from hetstream.base import typed_json
from hetstream.base.errors import ConfigError
from hetstream.base.files import Directory, make_private
from hetstream.base.process import STOP_OF_PARENT, is_of_step
from hetstream.hetjob.convert.sbatch_options import parse_words, words_of
from hetstream.hetjob.elastic.companions import NICE, Holes
from hetstream.hetjob.elastic.controller import Controller
from hetstream.hetjob.elastic.snapshot import DEFAULT_COOLDOWN_S, Limits
from hetstream.hetjob.elastic.step_terms import Measuring, UsualLength, Work, nothing_usual
from hetstream.hetjob.errors import MasterError, SlurmCommandError
from hetstream.hetjob.job.embedding_servers import (
    EmbeddingServers,
    read_ends,
    remove_registrations,
    remove_unneeded,
    summary_of,
)
from hetstream.hetjob.job.ended_job import ended_of, read_summary, servers_words, summary_line, write_summary
from hetstream.hetjob.job.job import JobEnvironment, await_ready, export_variables, why_no_directory
from hetstream.hetjob.job.processes import next_signal, signals_held, start_child
from hetstream.hetjob.master.children import Service
from hetstream.hetjob.master.companions import CompanionJobs
from hetstream.hetjob.master.controller_state_file import CompanionTime, ControllerStateFile
from hetstream.hetjob.master.elastic import Elastic, ElasticStages, GpuStage, elastic_of_gpu_stage
from hetstream.hetjob.master.embedding import elastic_of_embedding_servers
from hetstream.hetjob.master.memory import LOG_FILE, Migration
from hetstream.hetjob.master.state import (
    DISPATCHER,
    FIRST_DELAY_S,
    LONGEST_DELAY_S,
    STEADY_AFTER_S,
    MasterState,
    Phase,
    data_worker,
    embedding_server,
    log_name,
)
from hetstream.hetjob.ports import Child, SiteLimit, SlurmClient
from hetstream.hetjob.site.site_file import SITE_FILE, assignments
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.mpi_dataworkers.dispatcher.events import EVENTS_FILE
from hetstream.mpi_dataworkers.dispatcher.server import remove_leftovers
from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.process.interpreter import remove_announcement

# The dispatcher's journal on a disk of the job's first node: a link in the job's directory leads to it.
#
# The job master and its dispatcher run on that node until the job ends, so a dispatcher that is started again finds it.


def lead_to_journal(disk: Path, job: JobEnvironment) -> None:
    """Make a directory there with a name that nobody can have prepared, and the link to it.

    Raises:
        MasterError: it cannot be made there.
        OSError: the link cannot be made.
    """
    place = disk / f"hetstream-journal-{job.job_id}-{secrets.token_hex(8)}"
    try:
        make_private(place)
    except OSError as error:
        raise MasterError(
            f"the journal's directory {place} cannot be made on {job.node}: {error.strerror or error}. Name another "
            "place with --journal-dir, or none"
        ) from error
    job.work_dir.symlink_to(place)


def remove_left_journal(work_dir: Path) -> None:
    """Remove what a dispatcher that was killed has left; of one on another node's disk only the link to it.

    Raises:
        ServiceError: the dispatcher lives.
    """
    remove_leftovers(work_dir.resolve())
    if work_dir.is_symlink():
        work_dir.unlink()


def remove_journal(work_dir: Path) -> None:
    """Remove the journal, and the link to it if there is one. What cannot be removed stays."""
    shutil.rmtree(work_dir.resolve(), ignore_errors=True)
    if work_dir.is_symlink():
        work_dir.unlink()


# What a site says of companions in backfill holes: a line in its file, which no user can change.
#
# HETSTREAM_HOLES=no                                 none; companions are as without `--data-worker-time-min`
# HETSTREAM_HOLES=--partition=scavenge --qos=holes   sbatch options that put them last there, in the place of --nice

HOLES_VARIABLE = "HETSTREAM_HOLES"
_ALLOWED = ("account", "constraint", "nice", "partition", "qos", "reservation")


def hole_options(site_file: Path = SITE_FILE) -> tuple[str, ...] | None:
    """Return the sbatch options that put companions behind everybody else; None where the site wants none in holes.

    Raises:
        ConfigError: the line has another form.
    """
    try:
        text = assignments(site_file.read_text(errors="replace")).get(HOLES_VARIABLE, "")
    except OSError:
        text = ""
    if not text:
        return (f"--nice={NICE}",)
    if text == "no":
        return None
    try:
        options, others = parse_words(shlex.split(text), str(site_file))
    except ValueError as error:
        raise ConfigError(f"{site_file}: {HOLES_VARIABLE}={text!r}: {error}") from error
    other = [*(f"--{option.name}" for option in options if option.name not in _ALLOWED), *others]
    if other:
        raise ConfigError(
            f"{site_file}: {HOLES_VARIABLE}={text!r}: must be no, or of --{', --'.join(_ALLOWED)}, not {other[0]}"
        )
    return tuple(words_of(options))


log = logging.getLogger(__name__)

# A step starts in a fraction of a second; Python from a busy shared file system may take many.
_START_LIMIT_S = 60.0
# Embedding servers of companion jobs see within a second that the address file is gone.
_LAST_WORDS_S = 3.0
_MOST_SPEC_BYTES = 16 << 20
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class MasterConfig:
    """What the converted script asks of the job master; `spec.json` in the job's directory for its steps.

    Attributes:
        program: how hetstream is called on every host: words, the first an absolute path.
        data_workers: in component 1.
        data_worker_cpus: CPUs of each.
        companions: data workers that may join as companion jobs.
        companion_options: sbatch options of a companion.
        data_worker_threads: threads of each process of a data worker, which has so many times fewer of them than CPUs.
        smallest_cpus: CPUs of the smallest companion that is tried; the largest has `data_worker_cpus`.
        cooldown_s: from one change of the number of companions to the next at the least.
        trainer_cpus: CPUs of each trainer task; None where that is not known.
        job_name: of the job; None where that is not known.
        data_worker_python: command that starts the data workers' Python; None for that of the program.
        data_worker_program: how hetstream is called there; () where data workers follow the program.
        jobs_dir: see `JobEnvironment`.
        journal_dir: where the dispatcher's journal is made; None for the job's directory.
        time_min_s: the least time of companions, which run in backfill holes; None if they run as long as the job.
        longest_s: the most that they may have, then; None without a limit.
        gpu_stage: data workers with a GPU; None for none.
        total_steps, total_epochs: how much the training loop does in all; None where the script does not say.
        embedding: embedding servers, in the last component; None without.
        on_memory_warning: `migrate` where a trainer that runs out of memory is moved; else that is only said.
    """

    program: tuple[str, ...]
    data_workers: int
    data_worker_cpus: int
    companions: int = 0
    companion_options: tuple[str, ...] = ()
    data_worker_threads: int = 1
    smallest_cpus: int | None = None
    cooldown_s: float = DEFAULT_COOLDOWN_S
    trainer_cpus: int | None = None
    job_name: str | None = None
    data_worker_python: str | None = None
    data_worker_program: tuple[str, ...] = ()
    jobs_dir: Path | None = None
    journal_dir: Path | None = None
    total_steps: int | None = None
    total_epochs: int | None = None
    time_min_s: float | None = None
    longest_s: float | None = None
    on_memory_warning: Literal["warn", "migrate"] = "warn"
    gpu_stage: GpuStage | None = None
    embedding: EmbeddingServers | None = None

    @classmethod
    def read(cls, path: Path) -> MasterConfig:
        """Return what `start` has written for this job, for its steps on their hosts; it names the programs that they
        run.

        Raises:
            MasterError: the file is missing, or holds something else; or somebody else may have written it, or could
                have put it, or a directory on the way, in its place.
        """
        try:
            with Directory.open_safe(path.parent, own=True) as directory:
                return typed_json.decode(directory.read(path.name, _MOST_SPEC_BYTES), cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise MasterError(
                f"{path}: {error}. `hetstream internal master start` writes this file, in the job that it belongs to"
            ) from error

    def job(self, environ: Mapping[str, str]) -> JobEnvironment:
        """Return the job that runs it, from its environment.

        Raises:
            MasterError: this is no Slurm job.
        """
        return JobEnvironment.read(environ, self.jobs_dir)

    @property
    def limits(self) -> Limits:
        """The same for the elastic controller."""
        smallest = self.data_worker_cpus if self.smallest_cpus is None else self.smallest_cpus
        maximum = self.data_workers + self.companions
        return Limits(self.data_workers, maximum, smallest, self.data_worker_cpus, self.cooldown_s)


def start(
    config: MasterConfig,
    client: SlurmClient,
    environ: Mapping[str, str],
    hook_environment: Callable[[str], Mapping[str, str]],
    limit_s: float = _START_LIMIT_S,
) -> dict[str, str]:
    """Start the job master in a step of its own and wait until the dispatcher can be reached.

    Args:
        config: what to start.
        client: Slurm.
        environ: of the batch script.
        hook_environment: gives the variables that make a program stream from a service.
        limit_s: how long to wait.

    Returns:
        The variables that the batch script must export.

    Raises:
        MasterError: it did not come up; nothing of it is left.
        SlurmCommandError: the step could not be started.
    """
    job = config.job(environ)
    try:
        make_private(job.directory, own_parents=1)
        # A job of the same number whose job master was killed with its keeper: its keys and addresses are nobody's.
        remove_left_journal(job.work_dir)
        if config.journal_dir is not None:
            lead_to_journal(config.journal_dir, job)
        remove_announcement(job.directory)
        state_files = (job.controller_state_file, job.gpu_controller_state_file, job.embedding_controller_state_file)
        for left in (job.address_file, *state_files):
            left.unlink(missing_ok=True)
        remove_registrations(job.directory)
        if config.embedding is not None:
            config = replace(config, embedding=config.embedding.of_start(job))
        # In the environment of a step these are the step's own.
        config = replace(config, trainer_cpus=job.cpus_per_task, job_name=job.job_name)
        with Directory.open(job.directory) as directory:
            directory.write_whole(job.spec_file.name, typed_json.encode(config))
    except ServiceError as error:
        raise MasterError(f"the job master of job {job.job_id} runs already: {error}") from error
    except OSError as error:
        raise MasterError(why_no_directory("job's", job.directory, error)) from error
    options = ["--het-group=0"] if job.het_size > 1 else []
    options += ["--nodes=1", "--ntasks=1", f"--nodelist={job.node}", "--cpus-per-task=1", "--mem=0"]
    options += ["--gres=none", "--job-name=hetstream"]
    step = client.start_step(
        options, [*config.program, "internal", "master", "keep", str(job.spec_file)], job.master_log, in_background=True
    )
    if why := await_ready(step, job.address_file.exists, limit_s, "no dispatcher"):
        raise MasterError(f"the job master did not start: {why}. See {job.master_log}")
    variables = dict(hook_environment(f"file:{job.address_file}"))
    return variables | export_variables(environ, variables)


def serve(
    config: MasterConfig,
    client: SlurmClient,
    environ: Mapping[str, str],
    site: SiteLimit | None = None,
    usual_length: Callable[[], UsualLength | None] = nothing_usual,
) -> int:
    """Run the service of this job until SIGTERM.

    Args:
        config: what to run.
        client: Slurm.
        environ: of this step.
        site: what the site lets this job have; None without a site daemon.
        usual_length: says how long similar jobs ran; asked at most once.

    Returns:
        0: how the service ended is in the log, and no reason to fail a job.
    """
    job = config.job(environ)
    job = replace(job, job_name=config.job_name or job.job_name)
    work = _work(config, environ, usual_length)
    launcher = SlurmLauncher(config, client, job, _reachable_address(client, job))
    stages = ElasticStages(
        _elastic(config, client, job, launcher, work, site) if config.companions else None,
        elastic_of_gpu_stage(
            config.gpu_stage,
            config.cooldown_s,
            client,
            job,
            launcher.gpu_worker_words,
            lambda: StatusClient(running_service(job.address_file)),
            work.end_s,
        )
        if config.gpu_stage is not None
        else None,
        elastic_of_embedding_servers(config.embedding, config.program, client, job, work.end_s),
    )
    if stages.cpu is not None:
        stages.cpu.memory_watch.migration = _migration(config, job, environ)
    launcher.stages = stages
    state = MasterState(config.data_workers, bool(stages.all), config.embedding.count if config.embedding else 0)
    service = Service(state, launcher, job.address_file)
    with signals_held(_STOP_SIGNALS, and_all_others=True):
        service.begin()
        try:
            while service.phase is not Phase.ENDED:
                received = service.wait((*_STOP_SIGNALS, STOP_OF_PARENT))
                # What Slurm sends to all of the step is the keeper's, which asks what it means and hands it on.
                if received is not None and not is_of_step(received):
                    number = signal.SIGTERM if received.si_signo == STOP_OF_PARENT else received.si_signo
                    service.stop(f"signal {number:d}: the job ends")
        finally:
            if service.phase is not Phase.ENDED:
                service.finish("the job master fails")
            for elastic in stages.all:
                elastic.join()
            _tidy(config, job, stages, work)
    return 0


def _migration(config: MasterConfig, job: JobEnvironment, environ: Mapping[str, str]) -> Migration | None:
    """What moves the trainer when it runs out of memory; None where the script does not want that."""
    if config.on_memory_warning != "migrate":
        return None

    def start_command(argv: Sequence[str], env: Mapping[str, str], log_file: Path) -> Child:
        return start_child(argv, env=env, log=log_file)

    return Migration(config.program, job.job_id, job.directory / LOG_FILE, environ, start_command)


def _elastic(
    config: MasterConfig,
    client: SlurmClient,
    job: JobEnvironment,
    launcher: SlurmLauncher,
    work: Work,
    site: SiteLimit | None,
) -> Elastic:
    """The controller of the stage without GPUs."""
    behind = _hole_options(config)
    holes = None if behind is None else Holes(config.time_min_s or 0.0, config.longest_s)
    controller_state_file = ControllerStateFile(job.controller_state_file)
    companion_time = CompanionTime(holes, controller_state_file.tally, work.end_s)
    options = config.companion_options
    companions = CompanionJobs(client, job, options, launcher.worker_command, companion_time, behind or ())
    return Elastic(
        Controller(config.limits, controller_state_file.memory),
        companions,
        config.data_workers,
        lambda: StatusClient(running_service(job.address_file)),
        controller_state_file,
        site,
        measuring=Measuring(work, options),
    )


def _hole_options(config: MasterConfig) -> tuple[str, ...] | None:
    """The options of companions in holes; None if there are none, or the site wants none."""
    if config.time_min_s is None:
        return None
    try:
        options = hole_options()
    except ConfigError as error:
        log.error("companions do not run in holes: %s", error)
        return None
    if options is None:
        log.warning(
            "companions do not run in holes, this site wants none there: %s=no in %s", HOLES_VARIABLE, SITE_FILE
        )
    return options


def _work(config: MasterConfig, environ: Mapping[str, str], usual_length: Callable[[], UsualLength | None]) -> Work:
    # In seconds since the epoch, from Slurm 22.05 on (https://slurm.schedmd.com/sbatch.html).
    start, end = (environ.get(f"SLURM_JOB_{name}_TIME", "") for name in ("START", "END"))
    start_s, end_s = (float(text) if text.isascii() and text.isdigit() else None for text in (start, end))
    return Work(config.total_steps, config.total_epochs, end_s, start_s, functools.cache(usual_length))


def _tidy(config: MasterConfig, job: JobEnvironment, stages: ElasticStages, work: Work) -> None:
    """Keep the summary, the events and the logs; remove the rest: the address file and the journal hold keys."""
    work_dir = job.work_dir
    summary = read_summary(work_dir)
    job.address_file.unlink(missing_ok=True)
    ends = read_ends(job.directory, _LAST_WORDS_S)
    summary |= stages.summary(config.trainer_cpus) | summary_of(ends)
    if config.embedding is not None:
        remove_unneeded(config.embedding.directory, ends)
    if summary:
        summary |= {"job_name": job.job_name, "submit_dir": os.path.realpath(job.submit_dir)}
        summary["ended_s"] = round(time.time(), 3)
        if work.start_s is not None and work.end_s is not None:
            summary["elapsed_s"] = round(time.time() - work.start_s, 3)
            summary["time_limit_s"] = round(work.end_s - work.start_s, 3)
        write_summary(job.directory, summary)
    log.info("job=%s summary: %s%s", job.job_id, summary_line(summary), servers_words(summary))
    ended = ended_of(summary, job.job_id, "", time.time())
    if ended and ended.advice:
        log.info("job=%s %s: next time --trainer-cpus=%d", job.job_id, ended.advice, ended.needed_cpus)
    for events in sorted(work_dir.glob(f"{EVENTS_FILE}*")):
        shutil.move(events, job.directory / events.name)  # from another file system, it may be
    job.spec_file.unlink(missing_ok=True)
    job.controller_state_file.unlink(missing_ok=True)
    job.gpu_controller_state_file.unlink(missing_ok=True)
    job.embedding_controller_state_file.unlink(missing_ok=True)
    remove_registrations(job.directory)
    remove_announcement(job.directory)
    remove_journal(work_dir)


def _reachable_address(client: SlurmClient, job: JobEnvironment) -> str:
    """An IP address of this host that other hosts reach: the one Slurm itself uses.

    Where Slurm does not tell this user (`PrivateData=nodes`), the name of the node is looked up, its NodeAddr unless
    the site says otherwise (slurm.conf(5)), then the host's own name.

    Raises:
        MasterError: no name of this node resolves.
    """
    try:
        names = [client.node_address(job.node)]
    except SlurmCommandError as error:
        names = [job.node, socket.gethostname()]
        log.info("job=%s Slurm does not tell this node's address, its name is looked up: %s", job.job_id, error)
    found, failure = [], None
    for name in names:
        try:
            found.append(str(socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0]))
        except OSError as error:
            failure = error
    if not found:
        raise MasterError(
            f"{' or '.join(names)}, the address of node {job.node}, does not resolve: {failure}. "
            f"Check: getent ahostsv4 {names[-1]}"
        ) from failure
    # A host may have its own name on its loopback interface, where no other host reaches it.
    return next((address for address in found if not address.startswith("127.")), found[0])


class SlurmLauncher:
    """Starts the dispatcher here, data workers as steps of component 1, and companions as jobs.

    Args:
        config: what the script asks for.
        client: Slurm.
        job: this job.
        address: IP address for the dispatcher.
    """

    def __init__(self, config: MasterConfig, client: SlurmClient, job: JobEnvironment, address: str) -> None:
        self._config = config
        self._client = client
        self._job = job
        self._address = address
        self.stages = ElasticStages()

    def dispatcher(self) -> Child:
        """Start it with the same arguments every time, so that it recovers.

        When this process is killed, so is the dispatcher: in order it would end the service, and data workers with it,
        that the job master's next start goes on with.
        """
        arguments = [
            "internal",
            "dispatcher",
            "--bind",
            f"tcp://{self._address}:0",
            "--work-dir",
            str(self._job.work_dir),
        ]
        arguments += ["--address-file", str(self._job.address_file)]
        argv = [*self._config.program, *arguments]
        return start_child(argv, log=self.log_of(DISPATCHER), death_signal=signal.SIGKILL, is_told_twice=True)

    def data_worker(self, index: int) -> Child:
        """Return one step a data worker: when one dies, only its own step is started again."""
        options = [
            "--het-group=1",
            "--exact",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={self._config.data_worker_cpus}",
        ]
        # All steps share the component's memory: without --mem=0 the first would take it all.
        options += ["--mem=0", "--kill-on-bad-exit=0", "--job-name=data-worker"]
        arguments = self.worker_words(self._config.data_worker_cpus)
        return self._client.start_step(options, arguments, self.log_of(data_worker(index)))

    def embedding_server(self, index: int) -> Child:
        """Return one step an embedding server, in the component behind the data workers'."""
        embedding = self._config.embedding
        assert embedding is not None
        options = [f"--het-group={2 if self._config.data_workers else 1}", "--exact", "--nodes=1", "--ntasks=1"]
        options += [f"--cpus-per-task={embedding.cpus}", "--mem=0", "--kill-on-bad-exit=0"]
        argv = embedding.words(self._config.program, self._job.address_file, str(index))
        log_file = self.log_of(embedding_server(index))
        return self._client.start_step([*options, "--job-name=embedding-server"], argv, log_file)

    def log_of(self, name: str) -> Path:
        """Return the file that a child's output goes to."""
        return self._job.directory / log_name(name)

    def last_words(self, _: str) -> str:
        """Nothing: the logs are in the job's directory."""
        return ""

    def begin_elastic(self) -> None:
        """Let the elastic controllers submit companions."""
        for elastic in self.stages.all:
            elastic.begin()

    def end_elastic(self) -> None:
        """Ask them to end, and their companions with them."""
        for elastic in self.stages.all:
            elastic.stop()

    def worker_words(self, cpus: int) -> Sequence[str]:
        """Return the command of a data worker with this number of CPUs."""
        threads = self._config.data_worker_threads
        more = ["--threads", str(threads)] if threads > 1 else []
        return [*self._worker(), "--processes", str(cpus // threads), *more]

    def worker_command(self, cpus: int) -> str:
        """Return the same as shell text."""
        return shlex.join(self.worker_words(cpus))

    def gpu_worker_words(self, _: int) -> Sequence[str]:
        """Return the command of a data worker with a GPU: one process, however many CPUs it has."""
        return [*self._worker(), "--device", "gpu"]

    def _worker(self) -> list[str]:
        given = self._config.data_worker_program
        start = (
            [*given, "internal", "worker"]
            if given
            else [*self._config.program, "internal", "worker", "--follow-program"]
        )
        return [*start, "--service", f"file:{self._job.address_file}"]


# Starts the job master, and starts it again when something kills it. The first process of its step; does nothing else.
#
# A job master that is started again finds the dispatcher's journal and its companions, so the training sees a pause.
# When the keeper itself is killed, the job master ends in order, and the whole service with it.

# With an exit code so soon after its start it has said what is wrong: the same would happen again.
_EARLY_S = 10.0


def keep(command: Sequence[str], is_running: Callable[[], bool] = lambda: False) -> int:
    """Run a command until it ends by itself or a signal asks for the end, which it gets too.

    Args:
        command: of the job master.
        is_running: whether the job runs, and Slurm is not ending it; asked when Slurm sends a signal. Then that was a
            warning to the job's programs (`sbatch --signal`, the grace of a preemption).

    Returns:
        Its exit code; 0 if it was asked to end.
    """
    failures = 0

    def is_told_to_stop(timeout_s: float) -> bool:
        received = next_signal(_STOP_SIGNALS, timeout_s)
        if received is None:
            return False
        if is_of_step(received) and is_running():
            log.info("signal %d came to all steps while the job runs: the job master goes on", received.si_signo)
            return False
        return True

    with signals_held(_STOP_SIGNALS, and_all_others=True):
        while True:
            began = time.monotonic()
            child = start_child(command, is_told_twice=True)
            stopping = False
            while (returncode := child.poll()) is None:
                if is_told_to_stop(STEADY_AFTER_S):
                    stopping = True
                    child.terminate()
            lived_s = time.monotonic() - began
            if stopping or returncode == 0 or (returncode > 0 and lived_s < _EARLY_S):
                return 0 if stopping else returncode
            failures = 0 if lived_s >= STEADY_AFTER_S else failures
            delay_s = min(LONGEST_DELAY_S, FIRST_DELAY_S * 2**failures)
            failures += 1
            log.error("the job master ended with %d: starting it again in %g s", returncode, delay_s)
            if is_told_to_stop(delay_s):
                return 0
