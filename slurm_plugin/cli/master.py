"""`hetstream internal master start|keep|serve`: the job master of a converted script. Called by scripts."""

from __future__ import annotations

import argparse
import functools
import logging
import os
import shlex
import sys
from dataclasses import asdict
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.base.files import Directory
from hetstream.hetjob.convert.plan import EMBEDDING_SERVER_CPUS
from hetstream.hetjob.convert.render import what_runs
from hetstream.hetjob.elastic.snapshot import DEFAULT_COOLDOWN_S
from hetstream.hetjob.elastic.step_terms import UsualLength
from hetstream.hetjob.job.embedding_servers import EMBEDDING_DIR, EmbeddingServers
from hetstream.hetjob.job.ended_job import read_summary, write_summary
from hetstream.hetjob.job.job import (
    JOBS_DIR,
    JOURNAL_DIR,
    JobEnvironment,
    choose,
    export_lines,
    for_user,
    script_lines,
    setting,
)
from hetstream.hetjob.master.elastic import GpuStage
from hetstream.hetjob.master.server import MasterConfig, keep, serve, start
from hetstream.hetjob.site.client import linked
from hetstream.mpi_dataworkers.process.config import OFFLOADS
from hetstream.slurm_plugin.cli.commands import add_action
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.submit.program import own_program, program_of


def add_master_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "The job master of a converted script."
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    for action, text, run in (
        ("start", "start it in a job step and print the variables for the script to export", _start),
        ("keep", "run `serve`, and start it again when it is killed", _keep),
        ("serve", "run the dispatcher and the data workers until SIGTERM", _serve),
    ):
        p = add_action(actions, action, text, run)
        if action != "start":
            p.add_argument("spec", type=Path, metavar="SPEC", help="what `start` has written: spec.json of the job")
            continue
        p.add_argument("--data-workers", type=int, required=True, metavar="N", help="data workers in component 1")
        p.add_argument("--data-worker-cpus", type=int, required=True, metavar="N", help="CPUs of each data worker")
        p.add_argument("--data-worker-threads", type=int, default=1, metavar="N", help="threads of each process")
        p.add_argument("--companions", type=int, default=0, metavar="N", help="data workers that may join as jobs")
        p.add_argument("--gpu-companions", default="0-0", metavar="MIN-MAX", help="data workers with a GPU, as jobs")
        p.add_argument("--gpu-companion-cpus", type=int, default=1, metavar="N", help="CPUs of each of those")
        p.add_argument("--gpu-companion-options", default="", metavar="OPTIONS", help="sbatch options of those")
        p.add_argument("--embedding-servers", default="0-0", metavar="MIN-MAX", help="those of the job, and the most")
        p.add_argument("--embedding-server-bytes", type=int, default=0, metavar="BYTES", help="memory of each of those")
        p.add_argument("--embedding-dir", type=Path, default=EMBEDDING_DIR, metavar="DIR", help="holds their logs")
        p.add_argument("--embedding-companion-options", default="", metavar="OPTIONS", help="sbatch options of more")
        p.add_argument("--smallest-cpus", type=int, metavar="N", help="CPUs of the smallest of those that is tried")
        p.add_argument(
            "--cooldown", type=float, default=DEFAULT_COOLDOWN_S, metavar="S", help="seconds between two changes"
        )
        p.add_argument("--data-worker-python", metavar="COMMAND", help="Python of the data workers")
        p.add_argument("--jobs-dir", metavar="DIR", help=f"directories of jobs (default: ${JOBS_DIR}, or .hetstream)")
        p.add_argument("--journal-dir", metavar="DIR", help=f"the dispatcher's journal (default: ${JOURNAL_DIR})")
        p.add_argument("--time-min", type=float, metavar="S", help="least time of companions, in backfill holes")
        p.add_argument("--longest", type=float, metavar="S", help="the most time that those may have")
        p.add_argument("--total-steps", type=int, metavar="N", help="steps of the training loop in all")
        p.add_argument("--total-epochs", type=int, metavar="N", help="epochs of the training loop in all")
        p.add_argument("--on-memory-warning", choices=("warn", "migrate"), default="warn", help="of the trainer")
        p.add_argument("--offload", choices=OFFLOADS, help="what of a model's forward data workers may run")
        p.add_argument("--cache", metavar="PLACE", help="where fronts of samples are kept")
        p.add_argument("--stream-in-process-loaders", action="store_true", help="also DataLoaders with num_workers=0")
        p.add_argument("companion_options", nargs="*", metavar="-- SBATCH OPTIONS", help="of the companions")


def _config(args: argparse.Namespace) -> MasterConfig:
    least, _, most = args.gpu_companions.partition("-")
    gpu_options = tuple(shlex.split(args.gpu_companion_options))
    gpu_stage = GpuStage(int(least), int(most), args.gpu_companion_cpus, gpu_options) if int(most) else None
    fixed, most_servers = map(int, args.embedding_servers.split("-"))
    of_each = (args.embedding_server_bytes, args.embedding_dir, EMBEDDING_SERVER_CPUS)
    server_options = tuple(shlex.split(args.embedding_companion_options))
    embedding = EmbeddingServers(fixed, *of_each, most_servers, server_options) if fixed else None
    return MasterConfig(
        program=own_program(),
        data_workers=args.data_workers,
        data_worker_cpus=args.data_worker_cpus,
        data_worker_threads=args.data_worker_threads,
        companions=args.companions,
        companion_options=tuple(args.companion_options),
        smallest_cpus=args.smallest_cpus,
        cooldown_s=args.cooldown,
        data_worker_python=args.data_worker_python,
        data_worker_program=program_of(shlex.split(args.data_worker_python)) if args.data_worker_python else (),
        jobs_dir=args.jobs_dir,
        journal_dir=for_user(args.journal_dir) if args.journal_dir else None,
        total_steps=args.total_steps,
        total_epochs=args.total_epochs,
        time_min_s=args.time_min,
        longest_s=args.longest,
        on_memory_warning=args.on_memory_warning,
        gpu_stage=gpu_stage,
        embedding=embedding,
    )


def _start(args: argparse.Namespace) -> int:
    from hetstream.mpi_dataworkers.hook import environment

    # Printed first: the script needs them even if the master does not start.
    sys.stdout.write(script_lines(os.environ))
    try:
        # Only here: the other steps are told.
        named = args.jobs_dir or setting(JOBS_DIR, os.environ)
        args.jobs_dir, why = choose(named, Path(os.environ.get("SLURM_SUBMIT_DIR", "")))
        if why:
            print(f"hetstream: {why}", file=sys.stderr)
        args.journal_dir = args.journal_dir or setting(JOURNAL_DIR, os.environ)
        hook_environment = functools.partial(
            environment,
            offload=args.offload,
            in_process_loaders=args.stream_in_process_loaders,
            cache=args.cache,
            embedding_servers=int(args.embedding_servers.partition("-")[0]),
            has_data_workers=args.data_workers + args.companions > 0,
        )
        variables = start(_config(args), CommandSlurm(), os.environ, hook_environment)
    except HetstreamError as error:
        logging.getLogger(__name__).debug("hetstream internal master start failed", exc_info=True)
        print(f"hetstream: {error}", file=sys.stderr)
        return 1
    sys.stdout.write(export_lines(variables))
    return 0


def _keep(args: argparse.Namespace) -> int:
    # The output of a step goes through srun, which Slurm kills with the batch script; the last lines would be lost.
    config = MasterConfig.read(args.spec)
    place = config.job(os.environ).master_log
    with Directory.open_safe(place.parent, own=True) as directory:
        log = directory.open_file(place.name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    client, job = CommandSlurm(), config.job(os.environ)
    return keep([*config.program, "internal", "master", "serve", str(args.spec)], lambda: client.is_running(job.job_id))


def _serve(args: argparse.Namespace) -> int:
    config = MasterConfig.read(args.spec)
    job = config.job(os.environ)

    def usual_length() -> UsualLength | None:
        from hetstream.slurm_plugin.insight.proposals import usual_length_of

        name = config.job_name or job.job_name
        return usual_length_of(name, job.submit_dir, [job.directory.parent], os.environ)

    with linked(os.environ, int(job.job_id)) as site:
        code = serve(config, CommandSlurm(), os.environ, site, usual_length)
    _note_what_runs(job)
    return code


def _note_what_runs(job: JobEnvironment) -> None:
    """Add to the job's record what its script ran, by which past jobs are compared; last, as Slurm may be slow."""
    summary = read_summary(job.directory)
    if not summary:
        return
    try:
        script = CommandSlurm().batch_script(job.job_id).decode(errors="surrogateescape")
        write_summary(job.directory, {**summary, "what_runs": asdict(what_runs(script))})
    except (HetstreamError, OSError) as error:
        logging.getLogger(__name__).info("what the job's script runs is not known to its record: %s", error)
