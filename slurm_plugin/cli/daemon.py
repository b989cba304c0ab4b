"""`hetstream site daemon` (`hetstreamd`): read the cluster, keep its history, divide data workers among jobs."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetstream.base.errors import ConfigError, UsageError
from hetstream.base.text import duration_words
from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.client import (
    ADDRESS_VARIABLE,
    SiteSettings,
    TcpAddress,
    UnixAddress,
    ask,
    parse_address,
    read_settings,
)
from hetstream.hetjob.site.messages import Answer, AskStatus, JobStatus, Question, ShowStatus
from hetstream.hetjob.site.site_file import SITE_FILE
from hetstream.slurm_plugin.cli.output import add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.cli.watching import interval_of
from hetstream.slurm_plugin.client.model import uid_of
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.daemon.settings import DaemonOptions
from hetstream.slurm_plugin.render.tables import Column, Report, Section

DEFAULT_STATE_DIR = Path("/var/lib/hetstreamd")
DEFAULT_ADDRESS = UnixAddress(Path("/run/hetstream/daemon.sock"))
EPILOG = f"""\
Without --allocate it only observes. With --allocate it tells each job with #HETSTREAM directives how many data workers
the job may have: between the minimum and the maximum that the job asks for, by the policy of `hetstream site policy`.
At first that is weighted max-min fairness over CPUs; the weight of a job is its number of GPUs. The jobs themselves, as
their own users, start and end data workers. The daemon changes nothing in Slurm, and needs no rights.

Jobs and `hetstream site status` find it by {ADDRESS_VARIABLE} in the environment or in {SITE_FILE}:
  unix:/run/hetstream/daemon.sock       for jobs on this host alone; the kernel says who asks (the default)
  tcp://USER@HOST:PORT                  for jobs on any host; MUNGE says who asks. USER runs the daemon
A job without a daemon, or whose daemon does not answer, runs as if there were none.

examples:
  hetstream site daemon --dry-run
  hetstream site daemon --allocate --pool cpu --address tcp://slurm@controller:9420
  hetstream site status --json

exit codes:
  0  ended by SIGTERM or SIGINT; --dry-run and status: done
  1  the address or the directory cannot be used; status: the daemon did not answer; --dry-run: Slurm did not answer
  2  the command line is wrong
"""


def add_daemon_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Read the cluster again and again, keep its history, and divide data workers among jobs."
    parser.epilog = EPILOG
    parser.add_argument("--allocate", action="store_true", help="tell jobs how many data workers they may have")
    parser.add_argument(
        "--pool", metavar="PARTITIONS", help="whose CPUs are divided, with commas (default: those without GPUs)"
    )
    add_address(parser)
    parser.add_argument(
        "--state-dir", metavar="DIR", type=Path, default=DEFAULT_STATE_DIR, help="what it keeps (default %(default)s)"
    )
    parser.add_argument(
        "--interval", metavar="SECONDS", type=float, default=60.0, help="between readings (default %(default)g)"
    )
    parser.add_argument(
        "--gpu-reporters",
        metavar="USERS",
        default="",
        help="who tells of the nodes' shared GPUs, and sees all of that, beside root: the users of coordinators and "
        "packer, with commas",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="say what it would do now, and end")
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def add_daemon_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Ask the running site daemon what it knows."
    add_address(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=show)


def add_address(parser: argparse.ArgumentParser) -> None:
    """Declare where the daemon is."""
    parser.add_argument("--address", metavar="ADDRESS", help=f"instead of {ADDRESS_VARIABLE}")


def settings_of(args: argparse.Namespace) -> SiteSettings:
    """Where the daemon is.

    Raises:
        UsageError: an address of another form.
    """
    try:
        settings = read_settings(os.environ)
        address = parse_address(args.address) if args.address else settings.address or DEFAULT_ADDRESS
    except ConfigError as error:
        raise UsageError(str(error)) from error
    return replace(settings, address=address)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal."""
    # Only here: they bring asyncio and sqlite3, which `status` does not need.
    from hetstream.slurm_plugin.daemon.server import Daemon
    from hetstream.slurm_plugin.daemon.store import Store

    partitions = tuple(args.pool.split(",")) if args.pool else None
    options = DaemonOptions(
        settings_of(args), args.state_dir, args.allocate, partitions, interval_of(args),
        gpu_reporters=_users(args.gpu_reporters),
    )  # fmt: skip
    if args.dry_run:
        emit(args, planned(options))
        return 0
    if args.json:
        raise UsageError("--json is for --dry-run")

    async def serve(store: Store) -> None:
        await Daemon(options, CommandSlurm(), store).run()

    with Store(options.state_dir) as store:
        asyncio.run(serve(store))
    return 0


def _users(text: str) -> frozenset[int]:
    """The user ids of names or numbers with commas.

    Raises:
        UsageError: this host does not know one.
    """
    names = [name for name in text.split(",") if name]
    found = {name: uid_of(name) for name in names}
    unknown = sorted(name for name, uid in found.items() if uid is None)
    if unknown:
        raise UsageError(f"--gpu-reporters: no user {', '.join(unknown)} on this host. Check: getent passwd")
    return frozenset(uid for uid in found.values() if uid is not None)


def show(args: argparse.Namespace) -> int:
    """Print what the daemon knows."""
    settings = settings_of(args)
    status = asked(settings, AskStatus())
    if not isinstance(status, ShowStatus):
        raise SiteError(f"the daemon at {settings.address} answers {status!r} to a question for its status")
    emit(args, status_report(status))
    return 0


def asked(settings: SiteSettings, question: Question) -> Answer:
    """The daemon's answer.

    Raises:
        SiteError: there is none, with where to look.
    """
    try:
        return ask(settings, question)
    except SiteError as error:
        raise SiteError(f"{error}. Does it run there? --address or {ADDRESS_VARIABLE} names another place") from error


def status_report(status: ShowStatus) -> Report:
    """The daemon's status as a table."""
    read = "not read yet" if status.read_s is None else f"read {duration_words(time.time() - status.read_s)} ago"
    lines = [
        f"mode {status.mode}, up {duration_words(time.time() - status.since_s)}, the cluster was {read}",
        f"pool: {status.pool_cpus} CPUs of {', '.join(status.partitions) or 'no partition yet'}",
    ]
    notes = [f"the newest of {status.num_errors} failed reading(s): {status.error}"] if status.error else []
    summary = {
        "mode": status.mode,
        "since_s": status.since_s,
        "num_readings": status.num_readings,
        "num_errors": status.num_errors,
        "read_s": status.read_s,
        "error": status.error,
        "partitions": list(status.partitions),
        "pool_cpus": status.pool_cpus,
    }
    meta = {"verb": "daemon status", "taken_s": round(time.time(), 3)}
    return Report(meta, summary, lines, (_jobs(status.jobs),), notes)


def planned(options: DaemonOptions) -> Report:
    """What a daemon with these options would do now. Reads Slurm once, and the state without locking it."""
    from hetstream.slurm_plugin.daemon.registry import Registry
    from hetstream.slurm_plugin.daemon.store import HISTORY_FILE, STATE_FILE, remembered_jobs, remembered_settings

    snapshot = CommandSlurm().snapshot()
    unknown = set(options.partitions or ()) - {partition.name for partition in snapshot.partitions}
    if unknown:
        raise UsageError(f"--pool: no partition {', '.join(sorted(unknown))}. Check: sinfo")
    registry = Registry(
        remembered_jobs(options.state_dir),
        allocating=options.allocating,
        partitions=options.partitions,
        settings=remembered_settings(options.state_dir),
    )
    registry.observe(snapshot, time.time())
    address = options.settings.address
    who = "MUNGE" if isinstance(address, TcpAddress) else "the kernel (SO_PEERCRED)"
    mode = "allocate" if options.allocating else "observe"
    consequence = "and tell them" if options.allocating else "and tell nobody"
    lines = [
        f"would {mode} as user id {os.geteuid()}: read the cluster every {options.interval_s:g} s with five commands",
        f"would keep {options.state_dir / STATE_FILE} and {HISTORY_FILE} beside it",
        f"would listen at {address}, where {who} says who asks",
        f"would divide {registry.pool_cpus} CPUs of {', '.join(registry.partitions)} among "
        f"{len(registry.jobs)} job(s), {consequence}",
        f"would divide them by policy {registry.settings.policy}",
    ]
    summary = {
        "mode": mode,
        "address": str(address),
        "state_dir": str(options.state_dir),
        "partitions": list(registry.partitions),
        "pool_cpus": registry.pool_cpus,
    }
    return Report(meta_of("daemon", snapshot), summary, lines, (_jobs(registry.status(None, time.time())),))


def _jobs(jobs: Sequence[JobStatus]) -> Section:
    rows = [{name: getattr(job, name) for name in JobStatus.__struct_fields__} for job in jobs]
    return Section("jobs", _COLUMNS, rows, empty="no job has reported")


def main() -> int:
    """The console script `hetstreamd`: `hetstream site daemon` by another name."""
    from hetstream.slurm_plugin.cli import main as hetstream

    return hetstream(["site", "daemon", *sys.argv[1:]])


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("user", "USER", left=True, priority=1),
    Column("current", "HAS"),
    Column("minimum", "MIN", priority=2),
    Column("wanted", "WANTS"),
    Column("limit", "LIMIT"),
    Column("cpus", "CPUS", priority=3),
    Column("weight", "WEIGHT", lambda value: f"{value:g}", priority=4),
    Column("wait_share", "WAITED", _percent),
    Column("reason", "BECAUSE", left=True, wraps=True),
)
