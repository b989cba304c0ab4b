"""`hetstream site daemon` (`hetstreamd`) and `hetstream site policy`: divide data workers among jobs.

The daemon reads the cluster and keeps its history. `site policy` shows which policy divides data workers, who has what
and why, and sets another policy.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from hetstream.base.errors import ConfigError, UsageError
from hetstream.base.text import count_words, duration_words, printable, shortened
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
from hetstream.hetjob.site.messages import (
    Answer,
    AskPolicy,
    AskStatus,
    DecisionTaken,
    JobNow,
    JobStatus,
    Question,
    RefusePolicy,
    SetPolicy,
    ShowPolicy,
    ShowStatus,
)
from hetstream.hetjob.site.site_file import SITE_FILE
from hetstream.slurm_plugin.cli.output import add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.cli.watching import interval_of
from hetstream.slurm_plugin.client.model import uid_of
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.daemon.settings import DaemonOptions, PolicySettings, decode_settings
from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.policy.policies import EVERYBODY, POLICIES
from hetstream.slurm_plugin.render.tables import Column, Report, Section, remaining_words

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
    """Return where the daemon is.

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
    """Return the daemon's answer.

    Raises:
        SiteError: there is none, with where to look.
    """
    try:
        return ask(settings, question)
    except SiteError as error:
        raise SiteError(f"{error}. Does it run there? --address or {ADDRESS_VARIABLE} names another place") from error


def status_report(status: ShowStatus) -> Report:
    """Return the daemon's status as a table."""
    read = "not read yet" if status.read_s is None else f"read {duration_words(time.time() - status.read_s)} ago"
    lines = [
        f"mode {status.mode}, up {duration_words(time.time() - status.since_s)}, the cluster was {read}",
        f"pool: {status.pool_cpus} CPUs of {', '.join(status.partitions) or 'no partition yet'}",
    ]
    notes = (
        [f"the newest of {count_words(status.num_errors, 'failed reading')}: {status.error}"] if status.error else []
    )
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
    """Return what a daemon with these options would do now. Reads Slurm once, and the state without locking it."""
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
        f"{count_words(len(registry.jobs), 'job')}, {consequence}",
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
    """Run the console script `hetstreamd`: `hetstream site daemon` by another name."""
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


POLICY_EPILOG = """\
share    weighted max-min fairness of CPUs, with GPUs as the weight: needs no measurement and trusts none (the default)
fair     all jobs at the same share of their greatest speed (GoldMiner's Fair)
maxtp    the greatest sum of speeds (GoldMiner's MaxTP)
srtf     the least remaining CPU work first (GoldMiner's SRTF)
dlrover  gain for its cost, times a weight for jobs that end soon (DLRover-RM's weighted selection)
stretch  hetstream's own: as srtf, but narrow jobs and those with GPUs start earlier where that delays nobody

All but share believe what jobs measure of themselves. Under each of them no job goes below its minimum or, as far as
the CPUs go, below --floor of its greatest speed; a move must pay for what it costs; and the caps hold. A daemon that
only observes decides too, and tells nobody: here is what it would have done.

examples:
  hetstream site policy
  hetstream site policy --job 8123
  hetstream site policy srtf --dry-run
  hetstream site policy stretch --tenant-cap vision=512 --user-cap 256
  hetstream site policy share --tenant-cap none --user-cap none

exit codes:
  0  done
  1  the daemon did not answer, or refused; a policy is set by root and the daemon's own user
  2  the command line is wrong
"""
# What is only said when a policy is set.
_SETTINGS = (
    "floor", "cpus_per_gpu", "network_gbps", "network_share", "user_cap", "tenant_cap", "dry_run",
)  # fmt: skip
# No job id of Slurm, and no number of CPUs, has more digits.
_NUMBER = re.compile(r"[0-9]{1,10}")
# Of users and accounts; Slurm's own are shorter.
_LONGEST_NAME = 256


def add_policy_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = (
        "Show how the site daemon divides data workers among jobs, explain it for one job, or have it divide otherwise "
        "from now on."
    )
    parser.epilog = POLICY_EPILOG
    parser.add_argument(
        "policy", nargs="?", metavar="POLICY", choices=tuple(POLICIES), help=f"set this one: {', '.join(POLICIES)}"
    )
    parser.add_argument(
        "--job", metavar="JOBID", help="what is known of this job, and every decision about it that is remembered"
    )
    parser.add_argument("--last", type=int, default=50, metavar="N", help="decisions to show (default %(default)s)")
    change = parser.add_argument_group("with POLICY; what is not named stays as it is")
    change.add_argument("--floor", type=float, metavar="SHARE", help="least speed of every job, 0 to 0.5")
    change.add_argument("--cpus-per-gpu", type=float, metavar="CPUS", help="for jobs that have measured nothing")
    change.add_argument("--network-gbps", type=float, metavar="GBPS", help="what a node's link carries; 0: not known")
    change.add_argument("--network-share", type=float, metavar="SHARE", help="of it for data workers of all jobs")
    for who in ("user", "tenant"):
        what = "a Slurm account" if who == "tenant" else "a user"
        change.add_argument(
            f"--{who}-cap",
            action="append",
            metavar="[NAME=]CPUS",
            help=f"of all data workers of {what}, or without NAME of each; NAME=none or none for no cap",
        )
    change.add_argument("-n", "--dry-run", action="store_true", help="say who would get what, and change nothing")
    add_address(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run_policy)


def run_policy(args: argparse.Namespace) -> int:
    """Set another policy, or say what would follow; print the policy, the jobs and the last decisions."""
    where = settings_of(args)
    if args.policy is not None:
        if args.job is not None:
            raise UsageError(f"--job={printable(shortened(args.job, _LONGEST_NAME))}: a policy is set for all jobs")
        settings = changed(decode_settings(_asked_for_policy(where, AskPolicy("", 0)).settings), args)
        text = msgspec.json.encode(settings).decode()
        answer = msgspec.structs.replace(_asked_for_policy(where, SetPolicy(text, args.dry_run)), settings=text)
        emit(args, policy_report(answer, args.policy, args.dry_run))
        return 0
    if given := [option for option in _SETTINGS if getattr(args, option) not in (None, False)]:
        raise UsageError(
            f"--{given[0].replace('_', '-')}: name the policy that it is for. Check: hetstream site policy"
        )
    job = "" if args.job is None else args.job
    if args.job is not None and not _NUMBER.fullmatch(job):
        shown = printable(shortened(job, _LONGEST_NAME))
        raise UsageError(f"'{shown}' is no job id: write the number alone, of a heterogeneous job without +COMPONENT")
    answer = _asked_for_policy(where, AskPolicy(job, _last(args)))
    if job and not answer.jobs and not answer.decisions:
        raise SiteError(
            f"the daemon knows nothing of job {job}: it has not reported, its last decision is forgotten, or it "
            "is not yours. hetstream site policy lists what is known"
        )
    emit(args, policy_report(answer, job=job))
    return 0


def changed(settings: PolicySettings, args: argparse.Namespace) -> PolicySettings:
    """Return the settings with what the command line says.

    Raises:
        UsageError: a value out of range, or a cap of another form.
    """
    numbers = ("floor", "cpus_per_gpu", "network_gbps", "network_share")
    given = {name: value for name in numbers if (value := getattr(args, name)) is not None}
    for name, value in given.items():
        if not math.isfinite(value):
            raise UsageError(f"--{name.replace('_', '-')}={value:g}: must be a finite number")
    caps = {
        f"{who}_caps": _caps(getattr(settings, f"{who}_caps"), getattr(args, f"{who}_cap") or (), who)
        for who in ("user", "tenant")
    }
    try:
        found = msgspec.structs.replace(settings, policy=args.policy, **given, **caps)
        return decode_settings(msgspec.json.encode(found))
    except PolicyError as error:
        raise UsageError(str(error)) from error


def _caps(before: dict[str, int], arguments: Sequence[str], who: str) -> dict[str, int]:
    caps = dict(before)
    for word in arguments:
        shown = printable(shortened(word, _LONGEST_NAME))
        name, _, number = word.rpartition("=")
        if number == "none" and not name:
            caps.clear()
        elif number == "none":
            caps.pop(name, None)
        elif not name.isprintable() or len(name) > _LONGEST_NAME:
            raise UsageError(
                f"--{who}-cap={shown}: the name must have at most {_LONGEST_NAME} characters, all of them printable"
            )
        elif _NUMBER.fullmatch(number):
            caps[name or EVERYBODY] = int(number)
        else:
            raise UsageError(f"--{who}-cap={shown}: must be CPUS, NAME=CPUS, NAME=none or none, where CPUS is a number")
    return caps


def _last(args: argparse.Namespace) -> int:
    if not 0 <= args.last <= 1000:
        raise UsageError(f"--last={args.last}: must be 0 to 1000")
    return int(args.last)


def _asked_for_policy(where: SiteSettings, question: Question) -> ShowPolicy:
    answer = asked(where, question)
    if isinstance(answer, RefusePolicy):
        raise SiteError(f"the daemon refuses: {answer.reason}")
    if not isinstance(answer, ShowPolicy):
        raise SiteError(f"the daemon at {where.address} answers {answer!r} to a question for its policy")
    return answer


def policy_report(answer: ShowPolicy, newly_set: str = "", is_dry_run: bool = False, job: str = "") -> Report:
    """Return the answer as tables.

    Args:
        answer: the daemon's.
        newly_set: the policy that was set, or would be; empty: none.
        is_dry_run: would be.
        job: whose decisions it has; empty: those of all.
    """
    settings = decode_settings(answer.settings)
    caps = [
        f"{who} {'each' if name == EVERYBODY else name} at most {cpus} CPUs"
        for who, found in (("user", settings.user_caps), ("tenant", settings.tenant_caps))
        for name, cpus in sorted(found.items())
    ]
    mode = "jobs are told" if answer.mode == "allocate" else "jobs are not told: the daemon observes"
    lines = [
        f"policy {settings.policy}{', if it were set' if is_dry_run else ''}: {answer.pool_cpus} CPUs; {mode}",
        f"floor {settings.floor:.0%} of a job's greatest speed; {settings.cpus_per_gpu:g} CPUs for a GPU where nothing "
        "was measured",
        f"caps: {'; '.join(caps) or 'none'}",
    ]
    if settings.network_gbps:
        lines.append(
            f"network: data workers may use {settings.network_share:.0%} of each node's {settings.network_gbps:g} Gb/s"
        )
    if job:
        lines += [remaining_words(job_now) for job_now in answer.jobs]
    notes = [f"the last limits are kept: {answer.problem}"] if answer.problem else []
    summary = {
        "mode": answer.mode,
        "settings": msgspec.to_builtins(settings),
        "choices": list(answer.choices),
        "pool_cpus": answer.pool_cpus,
        "problem": answer.problem,
        "dry_run": is_dry_run,
    }
    sections = [
        _decisions(answer.decisions, "would change", "no job's limit would change")
        if is_dry_run
        else _decisions(answer.decisions, "decisions", "no decision was taken so far")
    ]
    if not newly_set:
        sections.insert(0, _shares(answer.jobs, job))
    return Report({"verb": "site policy", "taken_s": round(time.time(), 3)}, summary, lines, tuple(sections), notes)


def _shares(jobs: Sequence[JobNow], job: str) -> Section:
    rows = [{name: getattr(job, name) for name in JobNow.__struct_fields__} for job in jobs]
    return Section("jobs", _JOB_COLUMNS, rows, empty=f"job {job} has ended" if job else "no job has reported")


def _decisions(decisions: Sequence[DecisionTaken], title: str, empty: str) -> Section:
    rows = [{name: getattr(decision, name) for name in DecisionTaken.__struct_fields__} for decision in decisions]
    return Section(title.replace(" ", "_"), _DECISION_COLUMNS, rows, empty=empty)


def _or_dash(value: object) -> str:
    return "-" if value is None else f"{value}"


_JOB_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("user", "USER", left=True, priority=1),
    Column("tenant", "TENANT", left=True, priority=5),
    Column("current", "HAS"),
    Column("minimum", "MIN", priority=3),
    Column("wanted", "WANTS"),
    Column("limit", "LIMIT", _or_dash),
    Column("cpus", "CPUS", priority=4),
    Column("gpus", "GPUS", lambda value: f"{value:g}", priority=6),
    Column("speed", "SPEED", lambda value: "-" if value is None else f"{value:.0%}", priority=2),
    Column("remaining_s", "LEFT", lambda value: "-" if value is None else duration_words(value), priority=1),
    Column("reason", "BECAUSE", left=True, wraps=True),
)
_DECISION_COLUMNS = (
    Column("time_s", "AGO", lambda time_s: duration_words(max(0.0, time.time() - time_s))),
    Column("job", "JOB", left=True),
    Column("user", "USER", left=True, priority=1),
    Column("before", "FROM", _or_dash),
    Column("after", "TO", _or_dash),
    Column("policy", "BY", left=True, priority=2),
    Column("is_told", "TOLD", lambda value: "yes" if value else "no", priority=3),
    Column("reason", "BECAUSE", left=True, wraps=True),
)
