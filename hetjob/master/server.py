"""The job master's I/O: start it from the batch script, serve until the job ends, leave nothing behind.

Called by `hetstream master start` (in the batch script) and `hetstream master serve` (in a job step of its own, where
`keeper.py` starts it).
Slurm kills what a batch script leaves running without a warning, but gives steps SIGTERM and `KillWait` seconds: in a
step the master has the time to end the data workers, keep the summary and remove the keys.
`state.py` decides, `children.py` carries it out.
"""

from __future__ import annotations

import functools
import logging
import os
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
from hetstream.base.files import Directory
from hetstream.base.private import make_private
from hetstream.base.signals import STOP_OF_PARENT, is_of_step
from hetstream.hetjob.elastic.controller import Controller
from hetstream.hetjob.elastic.holes import Holes
from hetstream.hetjob.elastic.measuring import Measuring
from hetstream.hetjob.elastic.remaining_work import UsualLength, Work, nothing_usual
from hetstream.hetjob.elastic.snapshot import DEFAULT_COOLDOWN_S, Limits
from hetstream.hetjob.ended_job import ended_of
from hetstream.hetjob.errors import MasterError, SlurmCommandError
from hetstream.hetjob.job_environment import JobEnvironment, export_variables
from hetstream.hetjob.job_steps import await_ready, why_no_directory
from hetstream.hetjob.master import journal_place
from hetstream.hetjob.master.children import Service
from hetstream.hetjob.master.companion_time import CompanionTime
from hetstream.hetjob.master.companions import CompanionJobs
from hetstream.hetjob.master.controller_state_file import ControllerStateFile
from hetstream.hetjob.master.elastic import Elastic
from hetstream.hetjob.master.hole_options import HOLES_VARIABLE, hole_options
from hetstream.hetjob.master.migration import LOG_FILE, Migration
from hetstream.hetjob.master.stages import ElasticStages, GpuStage, elastic_of_gpu_stage
from hetstream.hetjob.master.state import MasterState, Phase
from hetstream.hetjob.ports import Child, SiteLimit, SlurmClient
from hetstream.hetjob.processes import signals_held, start_child
from hetstream.hetjob.site.address import SITE_FILE
from hetstream.hetjob.summary import read_summary, summary_line, write_summary
from hetstream.mpi_dataworkers.dispatcher.event_log import EVENTS_FILE
from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.interpreter import remove_announcement
from hetstream.mpi_dataworkers.status_client import StatusClient, running_service

log = logging.getLogger(__name__)

# A step starts in a fraction of a second; Python from a busy shared file system may take many.
_START_LIMIT_S = 60.0
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

    @classmethod
    def read(cls, path: Path) -> MasterConfig:
        """What `start` has written for this job, for its steps on their hosts; it names the programs that they run.

        Raises:
            MasterError: the file is missing, or holds something else; or somebody else may have written it, or could
                have put it, or a directory on the way, in its place.
        """
        try:
            with Directory.open_safe(path.parent, own=True) as directory:
                return typed_json.decode(directory.read(path.name, _MOST_SPEC_BYTES), cls)
        except (OSError, msgspec.MsgspecError) as error:
            raise MasterError(
                f"{path}: {error}. `hetstream master start` writes this file, in the job that it belongs to"
            ) from error

    def job(self, environ: Mapping[str, str]) -> JobEnvironment:
        """The job that runs it, from its environment.

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
        journal_place.remove_left(job.work_dir)
        if config.journal_dir is not None:
            journal_place.lead_to(config.journal_dir, job)
        remove_announcement(job.directory)
        for left in (job.address_file, job.controller_state_file, job.gpu_controller_state_file):
            left.unlink(missing_ok=True)
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
        options, [*config.program, "master", "keep", str(job.spec_file)], job.master_log, in_background=True
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
    )
    if stages.cpu is not None:
        stages.cpu.memory_watch.migration = _migration(config, job, environ)
    launcher.stages = stages
    service = Service(MasterState(config.data_workers, bool(stages.all)), launcher, job.address_file)
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
    companions = CompanionJobs(client, job, options, launcher.worker_words, companion_time, behind or ())
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
    summary |= stages.summary(config.trainer_cpus)
    if summary:
        summary |= {"job_name": job.job_name, "submit_dir": os.path.realpath(job.submit_dir)}
        summary["ended_s"] = round(time.time(), 3)
        if work.start_s is not None and work.end_s is not None:
            summary["elapsed_s"] = round(time.time() - work.start_s, 3)
            summary["time_limit_s"] = round(work.end_s - work.start_s, 3)
        write_summary(job.directory, summary)
    log.info("job=%s summary: %s", job.job_id, summary_line(summary))
    ended = ended_of(summary, job.job_id, "", time.time())
    if ended and ended.advice:
        log.info("job=%s %s: next time --trainer-cpus=%d", job.job_id, ended.advice, ended.needed_cpus)
    for events in sorted(work_dir.glob(f"{EVENTS_FILE}*")):
        shutil.move(events, job.directory / events.name)  # from another file system, it may be
    job.spec_file.unlink(missing_ok=True)
    job.controller_state_file.unlink(missing_ok=True)
    job.gpu_controller_state_file.unlink(missing_ok=True)
    job.address_file.unlink(missing_ok=True)
    remove_announcement(job.directory)
    journal_place.remove(work_dir)


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
        arguments = ["dispatcher", "--bind", f"tcp://{self._address}:0", "--work-dir", str(self._job.work_dir)]
        arguments += ["--address-file", str(self._job.address_file)]
        log_file = self._job.directory / "dispatcher.log"
        argv = [*self._config.program, *arguments]
        return start_child(argv, log=log_file, death_signal=signal.SIGKILL, is_told_twice=True)

    def data_worker(self, index: int) -> Child:
        """One step a data worker: when one dies, only its own step is started again."""
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
        return self._client.start_step(options, arguments, self._job.directory / f"data-worker-{index}.log")

    def begin_elastic(self) -> None:
        """Let the elastic controllers submit companions."""
        for elastic in self.stages.all:
            elastic.begin()

    def end_elastic(self) -> None:
        """Ask them to end, and their companions with them."""
        for elastic in self.stages.all:
            elastic.stop()

    def worker_words(self, cpus: int) -> Sequence[str]:
        """The command of a data worker with so many CPUs."""
        threads = self._config.data_worker_threads
        more = ["--threads", str(threads)] if threads > 1 else []
        return [*self._worker(), "--processes", str(cpus // threads), *more]

    def gpu_worker_words(self, _: int) -> Sequence[str]:
        """The command of a data worker with a GPU: one process, however many CPUs it has."""
        return [*self._worker(), "--device", "gpu"]

    def _worker(self) -> list[str]:
        given = self._config.data_worker_program
        start = [*given, "worker"] if given else [*self._config.program, "worker", "--follow-program"]
        return [*start, "--service", f"file:{self._job.address_file}"]
