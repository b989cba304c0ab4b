"""`hetstream site policy`: which policy divides data workers among jobs, who has what and why, and another policy."""

from __future__ import annotations

import argparse
import math
import re
import time
from collections.abc import Sequence

import msgspec

from hetstream.base.errors import UsageError
from hetstream.base.text import duration_words, printable, shortened
from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.client import SiteSettings
from hetstream.hetjob.site.messages import (
    AskPolicy,
    DecisionTaken,
    JobNow,
    Question,
    RefusePolicy,
    SetPolicy,
    ShowPolicy,
)
from hetstream.slurm_plugin.cli.daemon import add_address, asked, settings_of
from hetstream.slurm_plugin.cli.output import add_output_arguments, emit
from hetstream.slurm_plugin.daemon.settings import PolicySettings, decode_settings
from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.policy.policies import POLICIES
from hetstream.slurm_plugin.policy.rules import EVERYBODY
from hetstream.slurm_plugin.render.tables import Column, Report, Section, remaining_words

EPILOG = """\
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
    parser.epilog = EPILOG
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Set another policy, or say what would follow; print the policy, the jobs and the last decisions."""
    where = settings_of(args)
    if args.policy is not None:
        if args.job is not None:
            raise UsageError(f"--job={printable(shortened(args.job, _LONGEST_NAME))}: a policy is set for all jobs")
        settings = changed(decode_settings(_ask(where, AskPolicy("", 0)).settings), args)
        text = msgspec.json.encode(settings).decode()
        answer = msgspec.structs.replace(_ask(where, SetPolicy(text, args.dry_run)), settings=text)
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
    answer = _ask(where, AskPolicy(job, _last(args)))
    if job and not answer.jobs and not answer.decisions:
        raise SiteError(
            f"the daemon knows nothing of job {job}: it has not reported, its last decision is forgotten, or it "
            "is not yours. hetstream site policy lists what is known"
        )
    emit(args, policy_report(answer, job=job))
    return 0


def changed(settings: PolicySettings, args: argparse.Namespace) -> PolicySettings:
    """The settings with what the command line says.

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


def _ask(where: SiteSettings, question: Question) -> ShowPolicy:
    answer = asked(where, question)
    if isinstance(answer, RefusePolicy):
        raise SiteError(f"the daemon refuses: {answer.reason}")
    if not isinstance(answer, ShowPolicy):
        raise SiteError(f"the daemon at {where.address} answers {answer!r} to a question for its policy")
    return answer


def policy_report(answer: ShowPolicy, newly_set: str = "", is_dry_run: bool = False, job: str = "") -> Report:
    """The answer as tables.

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
    sections = [_decisions(answer.decisions, "would change" if is_dry_run else "decisions")]
    if not newly_set:
        sections.insert(0, _jobs(answer.jobs, job))
    return Report({"verb": "site policy", "taken_s": round(time.time(), 3)}, summary, lines, tuple(sections), notes)


def _jobs(jobs: Sequence[JobNow], job: str) -> Section:
    rows = [{name: getattr(job, name) for name in JobNow.__struct_fields__} for job in jobs]
    return Section("jobs", _JOB_COLUMNS, rows, empty=f"job {job} has ended" if job else "no job has reported")


def _decisions(decisions: Sequence[DecisionTaken], title: str) -> Section:
    rows = [{name: getattr(decision, name) for name in DecisionTaken.__struct_fields__} for decision in decisions]
    return Section(title.replace(" ", "_"), _DECISION_COLUMNS, rows, empty=f"no {title}")


def _or_dash(value: object) -> str:
    return "-" if value is None else f"{value}"


def _ago(time_s: float) -> str:
    return duration_words(max(0.0, time.time() - time_s))


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
    Column("time_s", "AGO", _ago),
    Column("job", "JOB", left=True),
    Column("user", "USER", left=True, priority=1),
    Column("before", "FROM", _or_dash),
    Column("after", "TO", _or_dash),
    Column("policy", "BY", left=True, priority=2),
    Column("is_told", "TOLD", lambda value: "yes" if value else "no", priority=3),
    Column("reason", "BECAUSE", left=True, wraps=True),
)
