"""`hetstream advise`: which jobs would gain from data workers."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict, replace
from pathlib import Path

from hetstream.hetjob.jobs_dir import JOBS_DIR, places, setting
from hetstream.slurm_plugin.cli.output import EXIT_CODES, accounting_notes, add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.cli.reading import add_fresh_argument, read_cluster
from hetstream.slurm_plugin.client.accounting import has_accounting
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.users import is_own
from hetstream.slurm_plugin.insight.advise import Advice, advise
from hetstream.slurm_plugin.insight.past_jobs import ended_jobs
from hetstream.slurm_plugin.insight.proposals import (
    NextSubmission,
    Remembered,
    next_submissions,
    remember,
)
from hetstream.slurm_plugin.insight.wait_shares import wait_shares
from hetstream.slurm_plugin.render.report import Column, Report, Section

EPILOG = f"""\
BASIS says why a job is listed:
  measured  its trainers waited for data, as hetstream or Slurm counted; or one of your jobs that ended in the last 24
            hours held more CPUs than its trainers needed beside data workers. Jobs count that were submitted from this
            directory, or from where others of yours are pending or running
  free now  it is pending, and would start now if its data were loaded on other nodes
  shape     it is running and holds CPUs, and beside it GPUs are free that nobody can use for want of CPUs. Its user
            knows whether it loads data with these CPUs
GPU HOURS are an estimate of what is gained in a day.

Of your scripts whose jobs ended in the last 30 days, NEXT SUBMISSIONS says what past jobs propose: the most data
workers, their CPUs and memory, the trainer's CPUs. hetstream convert --auto writes it into a script.

examples:
  hetstream advise
  hetstream advise --json | jq '.advice[] | select(.basis == "measured")'

{EXIT_CODES}"""
RECENT_S = 24 * 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "List running, pending and recent jobs that would gain from data workers, with an estimate."
    parser.epilog = EPILOG
    add_fresh_argument(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the cluster and print."""
    snapshot = read_cluster(args)
    now_s = snapshot.taken_s
    usages = CommandSlurm().usages(snapshot, now_s - RECENT_S, now_s) if has_accounting(snapshot) else ()
    submitted = [Path.cwd(), *(Path(job.work_dir) for job in snapshot.jobs if job.work_dir and is_own(job))]
    found = places(submitted, setting(JOBS_DIR, os.environ))
    ended = ended_jobs(found, now_s - RECENT_S, now_s)
    history = remember(found, os.environ, now_s)
    report = report_of(advise(snapshot, wait_shares(snapshot.jobs), usages, ended), snapshot, history)
    emit(args, replace(report, notes=(*accounting_notes(usages, snapshot), *report.notes)))
    return 0


def report_of(found: tuple[Advice, ...], snapshot: Snapshot, history: Remembered | None = None) -> Report:
    """Put the advice into a table, and beside it what the history of past jobs proposes."""
    hours = sum(finding.gpu_hours_per_day or 0.0 for finding in found)
    summary = {"num_jobs": len(found), "gpu_hours_per_day": round(hours, 1)}
    about = f", about {hours:,.0f} GPU hours a day" if hours else ""
    lines = [f"{len(found):,} job(s) would gain{about}" if found else "no job would gain"]
    rows = [asdict(finding) for finding in found]
    notes = []
    if not has_accounting(snapshot):
        notes.append(
            "there is no slurmdbd: of ended jobs only those are known that hetstream kept a record of, here or where "
            "other jobs of yours were submitted"
        )
    if any(finding.basis == "free now" for finding in found) and enforces_limits(snapshot):
        notes.append(
            "limits of accounts, users and QOS, which this site enforces, were not looked at: data workers are a "
            "component or jobs beside the trainer, whose CPUs, jobs and submissions count for the same account. See: "
            "scontrol show assoc_mgr flags=assoc,qos"
        )
    sections = [Section("advice", _COLUMNS, rows)]
    if history is not None:
        notes += history.notes
        proposals = [_row(submission) for submission in next_submissions(history, snapshot.taken_s)]
        sections.append(Section("next_submissions", _NEXT_COLUMNS, proposals, title="next submissions, from history:"))
    return Report(meta_of("advise", snapshot), summary, lines, tuple(sections), notes)


def _row(submission: NextSubmission) -> dict[str, object]:
    proposal = submission.proposal
    return {
        "name": submission.name,
        "directory": submission.directory,
        "num_jobs": proposal.num_jobs,
        "data_workers": proposal.data_workers,
        "data_worker_cpus": proposal.data_worker_cpus,
        "data_worker_mb": proposal.data_worker_mb,
        "trainer_cpus": proposal.trainer_cpus,
        "directive": proposal.directive or "none: data workers brought nothing",
        "text": proposal.reason,
    }


def enforces_limits(snapshot: Snapshot) -> bool:
    """Whether an association or a QOS may keep a job from starting that has room."""
    limits = snapshot.config.get("AccountingStorageEnforce", "").split(",")
    return not {"limits", "qos", "safe", "all"}.isdisjoint(limits)


_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("user", "USER", left=True),
    Column("state", "STATE", left=True),
    Column("basis", "BASIS", left=True),
    Column("cpus_freed", "CPUS FREED"),
    Column("gpus_unlocked", "GPUS UNLOCKED"),
    Column("gpu_hours_per_day", "GPU HOURS", lambda hours: f"{hours:,.1f}"),
    Column("text", "BECAUSE", left=True),
    Column("step", "NEXT STEP", left=True),
)
_NEXT_COLUMNS = (
    Column("name", "SCRIPT", left=True),
    Column("directory", "SUBMITTED IN", left=True),
    Column("num_jobs", "PAST JOBS"),
    Column("directive", "NEXT TIME", left=True),
    Column("text", "BECAUSE OF", left=True),
)
