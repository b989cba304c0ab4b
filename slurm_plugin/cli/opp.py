"""`hetstream opp`: the opportunistic jobs, where they are or why they wait, and one look of the packer by hand."""

from __future__ import annotations

import argparse
import socket
import time
from collections.abc import Mapping

from hetstream.base.errors import HetstreamError
from hetstream.base.text import printable
from hetstream.slurm_plugin.cli.commands import add_action
from hetstream.slurm_plugin.cli.daemon import settings_of
from hetstream.slurm_plugin.cli.output import EXIT_CODES, add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.cli.packer import DEFAULT_LOCK, alone, checked_quotas, why_elsewhere
from hetstream.slurm_plugin.cli.packing_arguments import (
    add_packing_arguments,
    check_partitions,
    gpu_readings,
    named_qos,
    partitions_of,
    quotas_path,
    reasons,
    seen_by,
    upgrade_in_words,
)
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.errors import UnknownJob
from hetstream.slurm_plugin.packing.decide import PackingPlan, verdicts
from hetstream.slurm_plugin.packing.events import PackingEvent
from hetstream.slurm_plugin.packing.jobs import OpportunisticJob
from hetstream.slurm_plugin.packing.observe import PackingView
from hetstream.slurm_plugin.packing.packer import Packer
from hetstream.slurm_plugin.packing.state import PackingState
from hetstream.slurm_plugin.packing.tenants import is_upgraded
from hetstream.slurm_plugin.packing.words import where
from hetstream.slurm_plugin.render.report import Column, Report, Row, Section, percent

EPILOG = f"""\
ls and why need no rights: they work out what the packer decides from what everybody may see. place looks, decides and
acts once, as `hetstream packer --once` does, and needs the packer's rights; with --dry-run it says what it would do.

examples:
  hetstream opp ls
  hetstream opp why 8123
  hetstream opp place --dry-run

{EXIT_CODES}"""
_GIB = 1 << 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb with its actions."""
    parser.description = "Show opportunistic GPU jobs and why they wait; place them once by hand."
    parser.epilog = EPILOG
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    text = "all opportunistic jobs: where they are, or why they wait"
    _add_shared(add_action(actions, "ls", text, list_jobs))
    text = "why one of them waits, GPU by GPU"
    why = _add_shared(add_action(actions, "why", text, explain))
    why.add_argument("job", metavar="JOBID", help="N, or N_TASK of an array")
    text = "look, decide and act once"
    place = _add_shared(add_action(actions, "place", text, place_once))
    place.add_argument("-n", "--dry-run", action="store_true", help="say what it would do, and change nothing")


def _add_shared(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    add_packing_arguments(parser)
    add_output_arguments(parser)
    return parser


def list_jobs(args: argparse.Namespace) -> int:
    """Print all of them."""
    snapshot, seen, plan, missing = _see(args)
    emit(args, ls_report(snapshot, seen, reasons(seen, plan, missing), missing))
    return 0


def explain(args: argparse.Namespace) -> int:
    """Print what each GPU says to one of them."""
    snapshot, seen, plan, missing = _see(args)
    job = next((job for name, job in seen.jobs.items() if args.job in (name, str(job.job.job_id))), None)
    if job is None and args.job in seen.quota.guaranteed:
        emit(args, quota_report(snapshot, seen, args.job, reasons(seen, plan, missing), missing))
        return 0
    if job is None:
        names = ", ".join(sorted(partitions_of(args)))
        raise UnknownJob(f"no job {args.job} is pending or running in {names}. Check: hetstream opp ls")
    emit(args, why_report(snapshot, seen, job, reasons(seen, plan, missing), missing))
    return 0


def place_once(args: argparse.Namespace) -> int:
    """Act once, and print what was done."""
    slurm, events = PackingSlurm(), list[PackingEvent]()
    packer = Packer(
        slurm, gpu_readings(settings_of(args)), partitions_of(args), events.append, acting=not args.dry_run,
        quotas=checked_quotas(args, slurm, slurm.snapshot()) if quotas_path(args) else None, qos=named_qos(),
    )  # fmt: skip
    if args.dry_run:
        packer.step()
    else:
        with alone(DEFAULT_LOCK):
            if reason := why_elsewhere(slurm.controller(), socket.gethostname()):
                raise HetstreamError(reason)
            packer.step()
    rows = [
        {
            "event": event.event, "job": event.job, "place": where(event.place) if event.place else "",
            "reason": event.reason,
        }
        for event in events
    ]  # fmt: skip
    columns = (
        Column("event", "EVENT", left=True), Column("job", "JOB", left=True), Column("place", "WHERE", left=True),
        Column("reason", "BECAUSE", left=True),
    )  # fmt: skip
    section = Section("events", columns, rows, empty="nothing is to be done")
    emit(args, Report({"verb": "opp place"}, {"dry_run": args.dry_run}, (), (section,)))
    return 1 if any(event.event == "refused" for event in events) else 0


def _see(args: argparse.Namespace) -> tuple[Snapshot, PackingView, PackingPlan, str]:
    slurm = PackingSlurm()
    snapshot = slurm.snapshot()
    if args.partition is not None:
        check_partitions(partitions_of(args), snapshot)
    return snapshot, *seen_by(snapshot, slurm, settings_of(args), partitions_of(args), quotas_path(args))


def ls_report(snapshot: Snapshot, seen: PackingView, waits: dict[str, str], missing: str) -> Report:
    """All jobs as a table."""
    rows = [_row(job, waits.get(name, "")) for name, job in seen.jobs.items()]
    num_waiting = sum(bool(row["reason"]) for row in rows)
    lines = [f"{len(rows)} opportunistic job(s), {num_waiting} of them wait; {_gpus_in_words(seen.state)}"]
    columns = (
        Column("job", "JOB", left=True), Column("user", "USER", left=True), Column("state", "STATE", left=True),
        Column("gpus", "GPUS"), Column("gpu_memory_gib", "GIB EACH", show=lambda value: f"{value:.1f}"),
        Column("place", "WHERE", left=True), Column("class", "CLASS", left=True),
        Column("num_evictions", "EVICTED"),
        Column("reason", "WAITS BECAUSE", left=True), Column("not_upgraded", "NOT UPGRADED BECAUSE", left=True),
    )  # fmt: skip
    section = Section("jobs", columns, rows, empty="no opportunistic job is pending or running")
    notes = [missing] if missing else []
    facts = {"num_jobs": len(rows), "num_waiting": num_waiting}
    return Report(meta_of("opp ls", snapshot), facts, lines, (section, *_line(seen, waits)), notes)


def _line(seen: PackingView, waits: Mapping[str, str]) -> tuple[Section, ...]:
    """The jobs that have or want quota, where there are quotas."""
    if not seen.quota.quotas.partitions:
        return ()
    rows = [
        {
            "job": decision.job.name, "tenant": printable(decision.job.tenant), "gpus": decision.job.gpus,
            "class": decision.job.runs_as.value if decision.job.runs_as else "", "verdict": decision.verdict.value,
            "reason": waits.get(decision.job.name, decision.reason),
        }
        for decision in seen.quota.decisions
    ]  # fmt: skip
    columns = (
        Column("job", "JOB", left=True), Column("tenant", "TENANT", left=True), Column("gpus", "GPUS"),
        Column("class", "RUNS AS", left=True), Column("verdict", "VERDICT", left=True),
        Column("reason", "BECAUSE", left=True),
    )  # fmt: skip
    return (Section("line", columns, rows, empty="no job has or wants quota"),)


def quota_report(snapshot: Snapshot, seen: PackingView, name: str, waits: Mapping[str, str], missing: str) -> Report:
    """A guaranteed job, and why it waits for quota."""
    decision = next((found for found in seen.quota.decisions if found.job.name == name), None)
    job = seen.quota.guaranteed[name]
    reason = waits.get(name, decision.reason if decision else "")
    row: Row = {
        "job": name, "user": job.user, "state": job.state, "gpus": job.count("gpu"), "tenant": job.account,
        "verdict": decision.verdict.value if decision else "", "reason": reason,
    }  # fmt: skip
    lines = [f"job {name} of {job.user}: {job.state}, {job.count('gpu')} GPU(s), account {printable(job.account)}"]
    lines += [f"waits     {reason}"] if job.is_pending and reason else []
    return Report(meta_of("opp why", snapshot), row, lines, (), [missing] if missing else [])


def why_report(
    snapshot: Snapshot, seen: PackingView, job: OpportunisticJob, waits: dict[str, str], missing: str
) -> Report:
    """One job, and what each GPU says to it."""
    row = _row(job, waits.get(job.name, ""))
    asked = next((waiting for waiting in seen.state.waiting if waiting.job == job.name), None)
    found = verdicts(seen.state, asked, time.time()) if asked else []
    rows = [
        {
            "node": node, "gpu": gpu.index, "used_share": gpu.use and gpu.use.used_share,
            "free_gib": gpu.use and gpu.use.free_bytes / _GIB, "wait_share": gpu.use and gpu.use.wait_share,
            "verdict": why_not or "takes it",
        }
        for node, gpu, why_not in found
    ]  # fmt: skip
    columns = (
        Column("node", "NODE", left=True), Column("gpu", "GPU"), Column("used_share", "USED", show=percent),
        Column("free_gib", "GIB FREE", show=lambda value: f"{value:.1f}"),
        Column("wait_share", "TRAINER WAITS", show=percent), Column("verdict", "VERDICT", left=True),
    )  # fmt: skip
    place = f" on {row['place']}" if row["place"] else ""
    each = f"{job.wish.gpus} GPU(s) with {job.wish.gpu_bytes / _GIB:.1f} GiB each"
    asks = f"{each} on each of {max(1, job.job.num_nodes)} node(s)"
    lines = [f"job {job.name} of {job.job.user}: {row['state']}{place}", f"asks for  {asks}"]
    lines += [f"waits     {row['reason']}"] if row["reason"] else []
    lines += [f"upgrade   {row['not_upgraded']}"] if row["not_upgraded"] else []
    section = Section("gpus", columns, rows)
    return Report(meta_of("opp why", snapshot), row, lines, (section,), [missing] if missing else [])


def _row(job: OpportunisticJob, reason: str) -> Row:
    placed = None if job.is_held else job.record.placed
    return {
        "job": job.name, "user": job.job.user, "state": job.job.state,
        "gpus": job.wish.gpus * max(1, job.job.num_nodes), "gpu_memory_gib": job.wish.gpu_bytes / _GIB,
        "place": where(placed.place) if placed else "", "class": "guaranteed" if is_upgraded(job) else "opportunistic",
        "num_evictions": job.record.evicted.count if job.record.evicted else 0, "reason": reason,
        "not_upgraded": upgrade_in_words(job),
    }  # fmt: skip


def _gpus_in_words(state: PackingState) -> str:
    gpus = [gpu for node in state.nodes for gpu in node.gpus]
    known = sum(gpu.use is not None for gpu in gpus)
    return f"{known} of {len(gpus)} GPUs for them are known"
