"""`hetstream why`: what a pending job waits for, and whether data workers would let it start now; of a running one,
what it tells of its step, and when its memory will be full.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from hetstream.base.errors import UsageError
from hetstream.base.text import count_words, duration, printable
from hetstream.hetjob.master.controller_state_file import JobReport
from hetstream.slurm_plugin.cli.cluster_source import add_fresh_argument, read_cluster_or_jobs
from hetstream.slurm_plugin.cli.output import EXIT_CODES, add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.cli.packing_arguments import packing_reasons
from hetstream.slurm_plugin.client.model import REVOKED, Job, Snapshot, is_own
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.slurm_units import compress
from hetstream.slurm_plugin.errors import UnknownJob
from hetstream.slurm_plugin.insight.blockers import NOT_LOOKED_AT, Blocker, memory_words
from hetstream.slurm_plugin.insight.het_job import explain_together, find_jobs
from hetstream.slurm_plugin.insight.last_reading import SOURCE
from hetstream.slurm_plugin.insight.node_table import gres_in_doubt, gres_words
from hetstream.slurm_plugin.insight.proposals import told_by_job
from hetstream.slurm_plugin.insight.why import Explainer, Explanation, Remedy
from hetstream.slurm_plugin.render.tables import Column, Report, Row, Section, partition_words

EPILOG = f"""\
The explanation is worked out from what is free now. It does not look at licenses, topology and constraints that
are more than one feature, nor at priorities that still change. Jobs that Slurm may preempt, and CPUs that a job
shares by its own wish (--oversubscribe), count as in use. Slurm's own reason is always shown beside it, and where
Slurm finds no room for another thing, that is said.

examples:
  hetstream why                          your newest pending job
  hetstream why 8123
  hetstream why 8123+1                   one component of a heterogeneous job
  hetstream why 8123_4 --json            one task of an array

{EXIT_CODES}"""


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Say what a pending job waits for: CPUs, GPUs, memory, several nodes at once, another job's "
        "reservation; and whether it would start now with its data loading on other nodes. Of a running job of yours "
        "that is about to run out of memory: when, and what helps."
    )
    parser.epilog = EPILOG
    parser.add_argument(
        "job", nargs="?", metavar="JOBID", help="N, N+COMPONENT or N_TASK (default: your newest pending job)"
    )
    add_fresh_argument(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the cluster once and explain."""
    name = args.job
    if name is None:
        name, snapshot = newest_pending(args)
        jobs = named_jobs(name, snapshot)
    else:
        jobs, snapshot = read_jobs(args, [name])
    notices = {job.label: told_by_job(job) for job in jobs}
    emit(args, report_of(name, jobs, snapshot, notices, packing_reasons(snapshot, jobs)))
    return 0


def newest_pending(args: argparse.Namespace) -> tuple[str, Snapshot]:
    """Return the id of this user's newest pending job, and the cluster. Where the site daemon has seen none yet,
    slurmctld is asked.

    Raises:
        UnknownJob: none of this user's jobs waits.
    """
    snapshot = read_cluster_or_jobs(args)
    own = [job for job in snapshot.jobs if job.is_pending and is_own(job)]
    if not own and snapshot.source == SOURCE:
        snapshot = CommandSlurm().seen()
        own = [job for job in snapshot.jobs if job.is_pending and is_own(job)]
    if not own:
        raise UnknownJob("no job of yours is pending. Of another job: hetstream why JOBID; hetstream jobs lists them")
    newest = max(own, key=lambda job: (job.submit_s or 0.0, job.job_id))
    return str(newest.het.het_job_id if newest.het else newest.array_job_id or newest.job_id), snapshot


def read_jobs(args: argparse.Namespace, names: Sequence[str]) -> tuple[list[Job], Snapshot]:
    """Return the records that job ids name, and the cluster. What the site daemon has not seen yet, slurmctld is asked
    for.

    Raises:
        UsageError: one is no job id.
        UnknownJob: the queue has no such job, or hides it from this user.
    """
    snapshot = read_cluster_or_jobs(args)
    try:
        return [job for name in names for job in named_jobs(name, snapshot)], snapshot
    except UnknownJob:
        if snapshot.source != SOURCE:
            raise
    snapshot = CommandSlurm().seen()
    return [job for name in names for job in named_jobs(name, snapshot)], snapshot


def named_jobs(name: str, snapshot: Snapshot) -> list[Job]:
    """Return the records that a job id names.

    Raises:
        UsageError: it is no job id.
        UnknownJob: the queue has no such job, or hides it from this user.
    """
    try:
        jobs = find_jobs(snapshot.jobs, name)
    except ValueError as exc:
        raise UsageError(str(exc)) from exc
    if not jobs:
        hidden = f" {snapshot.hidden} may hide it from you." if snapshot.hides_jobs else ""
        raise UnknownJob(
            f"no job {name} is pending or running.{hidden} Check: scontrol show job {name.split('+')[0]}. If it "
            f"has ended: hetstream job {name}"
        )
    return jobs


def report_of(
    name: str,
    jobs: list[Job],
    snapshot: Snapshot,
    notices: Mapping[str, JobReport] | None = None,
    packing: Mapping[str, str] | None = None,
) -> Report:
    """Put the explanations into words and a table.

    Args:
        name: as the user has it.
        jobs: the records that it names.
        snapshot: the cluster.
        notices: of running jobs, by label.
        packing: why opportunistic jobs wait for the packer, or are not upgraded, by label.
    """
    notices = notices or {}
    explainer = Explainer(snapshot)
    found = [_with_packing(explainer.explain(job), packing or {}) for job in jobs]
    lines: list[str] = []
    named = [(explanation.job.label, blocker) for explanation in found for blocker in explanation.blockers]
    is_het = len(found) > 1 and all(explanation.job.het and explanation.job.is_pending for explanation in found)
    if is_het:
        found.sort(key=lambda explanation: explanation.job.het.offset if explanation.job.het else 0)
        named = list(explain_together(snapshot, found))
        lines = _het_lines(found, named, snapshot.taken_s)
    for explanation in [] if is_het else found:
        lines += [*([""] if lines else []), *_lines(explanation, snapshot.taken_s)]
        if not explanation.job.is_pending and (reason := (packing or {}).get(explanation.job.label)):
            lines.append(f"packer    {reason}")
        lines += told_lines(notices.get(explanation.job.label, JobReport()))
    blockers = [
        {"job": label, "kind": blocker.kind, "text": blocker.text, "next_step": blocker.next_step}
        for label, blocker in named
    ]
    facts = [
        {
            **_facts(explanation, snapshot.taken_s),
            "packer": (packing or {}).get(explanation.job.label),
            **{
                key: [*map(msgspec.structs.asdict, rows)]
                for key, rows in zip(
                    ("memory_warnings", "step_terms"), notices.get(explanation.job.label, JobReport()), strict=True
                )
            },
        }
        for explanation in found
    ]
    summary = {"job": name, "jobs": facts}
    section = Section("blockers", _COLUMNS, blockers, most_lines=0 if is_het else None)
    return Report(meta_of("why", snapshot), summary, lines, (section,), explainer.not_looked_at(jobs))


def _with_packing(explanation: Explanation, reasons: Mapping[str, str]) -> Explanation:
    """What a job waits for that the site holds until the packer has a GPU or quota for it."""
    job = explanation.job
    reason = reasons.get(job.label)
    if reason is None or not job.is_pending:
        return explanation
    blocker = Blocker("packer", reason, f"hetstream gpu jobs {job.label}")
    why_not = "it is the packer that starts it" if job.count("gpu") else "it shares a GPU that others have"
    return replace(explanation, blockers=(blocker,), conversion=Remedy(False, why_not))


def _facts(explanation: Explanation, now_s: float) -> Row:
    job = explanation.job
    return {
        "job": job.label,
        "job_id": job.job_id,
        "state": job.state,
        "reason": job.reason,
        "waiting_s": round(now_s - job.submit_s) if job.is_pending and job.submit_s else None,
        "planned_start_s": job.start_s if job.is_pending else None,
        "num_nodes": explanation.shape.num_nodes,
        "gpus_per_node": explanation.shape.gpus,
        "cpus_per_node": explanation.shape.cpus,
        "memory_mb_per_node": explanation.shape.memory_mb,
        "fits_on": list(explanation.fits_on) if explanation.is_room_known else None,
        "conversion_helps": explanation.conversion.helps,
        "conversion": explanation.conversion.text,
        "directive": explanation.conversion.directive,
    }


def _lines(explanation: Explanation, now_s: float) -> list[str]:
    job, facts = explanation.job, _facts(explanation, now_s)
    shape = explanation.shape
    number = f"{'about ' if shape.is_guess else ''}{count_words(shape.num_nodes, 'node')}"
    others = "".join(f", {gres_words(gres)}" for gres in shape.gres)
    asks = f"{number}, each with {count_words(shape.gpus, 'GPU')}{others}, {count_words(shape.cpus, 'CPU')}"
    head = f"job {job.label} ({job.name}) of {job.user} in {partition_words(job.partitions)}: {job.state}"
    if not job.is_pending:
        since = f" for {duration(now_s - job.start_s)}" if job.start_s and job.is_running else ""
        how = "it does not wait"
        if job.state == "CONFIGURING":
            how = "its nodes are being started or set up, for ResumeTimeout at the most: scontrol show config"
        if job.state == REVOKED:
            return [f"{head}: another cluster of its federation has it: squeue --federation --jobs={job.job_id}"]
        return [f"{head}{since} on {compress(job.nodes) or 'no node'}: {how}"]
    waiting: Any = facts["waiting_s"]
    lines = [
        f"{head} ({job.reason or 'no reason yet'}){f', for {duration(waiting)}' if waiting else ''}",
        f"asks for  {asks} and {memory_words(shape)}"
        + (f"; {job.num_records} tasks are pending" if job.num_records > 1 else ""),
        f"room now  {_room_now(explanation)}",
    ]
    if job.start_s and job.start_s > now_s:
        where = f" on {compress(job.planned_nodes)}" if job.planned_nodes else ""
        lines.append(f"planned   by Slurm to start in {_planned(job.start_s - now_s)}{where}")
    helps = "yes: " if explanation.conversion.helps else "no: "
    lines.append(f"data workers would let it start now  {helps}{explanation.conversion.text}")
    if explanation.conversion.directive:
        lines += ["          add to the script:", f"          {explanation.conversion.directive}"]
    return lines


def _planned(left_s: float) -> str:
    """How long it is until the planned start. Of a running job without a time limit Slurm takes it that it runs for a
    year.
    """
    guess = " (Slurm's guess of a year for a job without a time limit)" if left_s > 300 * 86_400 else ""
    return f"{duration(left_s)}{guess}"


def _room_now(explanation: Explanation) -> str:
    """The nodes with room, and what is not certain about it."""
    if not explanation.is_room_known:
        return "not known"
    nodes = compress(explanation.fits_on)
    if not nodes:
        return "on no node"
    # With BadConstraints it says that no node can meet what a job asks for, of which here not all is looked at.
    says_none = "Constraints" in explanation.job.reason
    if says_none or any(blocker.kind == NOT_LOOKED_AT for blocker in explanation.blockers):
        return f"{nodes} (Slurm finds none)"
    in_doubt = gres_in_doubt(explanation.shape)
    return f"{nodes} (its {in_doubt} is not counted GPU by GPU)" if in_doubt else nodes


def _het_lines(parts: Sequence[Explanation], named: Sequence[tuple[str, Blocker]], now_s: float) -> list[str]:
    """Lines on a pending heterogeneous job, four on the usual one: what all wait for, and what each component asks."""
    leader = parts[0].job
    number = leader.het.het_job_id if leader.het else leader.job_id
    waiting = f", for {duration(now_s - leader.submit_s)}" if leader.submit_s else ""
    planned = max((part.job.start_s for part in parts if part.job.start_s), default=0.0)
    start = f", planned by Slurm to start in {_planned(planned - now_s)}" if planned > now_s else ""
    reasons = ", ".join(dict.fromkeys(part.job.reason or "no reason yet" for part in parts))
    lines = [f"job {number} ({leader.name}) of {leader.user}: PENDING ({reasons}){waiting}{start}"]
    if named:
        label, blocker = named[0]
        step = f"; next: {blocker.next_step}" if blocker.next_step else ""
        lines.append(f"waits for {blocker.kind} (job {label}): {blocker.text}{step}")
    for part in parts:
        shape = part.shape
        asks = f"{count_words(shape.num_nodes, 'node')}, each with {count_words(shape.gpus, 'GPU')}"
        lines.append(
            f"job {part.job.label} in {partition_words(part.job.partitions)}: {asks}, "
            f"{count_words(shape.cpus, 'CPU')}, {memory_words(shape)}; room now {_room_now(part)}"
        )
    lines[-1] += "; all components start together, and only when the backfill scheduler has a turn"
    return lines


def told_lines(notices: JobReport) -> list[str]:
    """Return what a job that runs tells of its memory and of its step."""
    lines = []
    for warning in notices.warnings:
        lines.append(f"memory    {printable(warning.text)}")
        next_time = "next time " if warning.command.startswith("#") else ""
        lines.append(f"          what helps: {next_time}{printable(warning.command)}")
    return lines + [f"step      {printable(str(term))}" for term in notices.step_terms]


_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("kind", "WAITS FOR", left=True),
    Column("text", "BECAUSE", left=True, wraps=True),
    Column("next_step", "NEXT STEP", left=True, below=True),
)
