"""What `gpu pack`, `gpu jobs` and `why` have in common: whose jobs are packed, and what is known of them now."""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.text import printable
from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.client import SiteSettings, ask, read_settings
from hetstream.hetjob.site.messages import AskGpus, RefuseGpus, ShowGpus
from hetstream.hetjob.site.site_file import SITE_FILE, in_site_file
from hetstream.slurm_plugin.cli.daemon import add_address
from hetstream.slurm_plugin.client.model import Job, Snapshot
from hetstream.slurm_plugin.client.packing_slurm import PackingSlurm
from hetstream.slurm_plugin.errors import QuotaError
from hetstream.slurm_plugin.packing.decide import PackingPlan, decide
from hetstream.slurm_plugin.packing.jobs import OpportunisticJob, served_jobs, who_holds
from hetstream.slurm_plugin.packing.notes import is_guarded, where
from hetstream.slurm_plugin.packing.observe import PackingView, view
from hetstream.slurm_plugin.packing.quota import QuotaAction, Quotas
from hetstream.slurm_plugin.packing.quota_file import QuotaFile, QuotaView, Tenants, why_not_upgraded

PARTITIONS_VARIABLE, QUOTAS_VARIABLE = "HETSTREAM_OPPORTUNISTIC_PARTITIONS", "HETSTREAM_QUOTAS"
QOS_VARIABLE = "HETSTREAM_OPPORTUNISTIC_QOS"
# The nodes' scripts have it from there; one file with both is enough on the host of the packer.
PACKING_FILE = SITE_FILE.with_name("packing.env")
_FILES = (SITE_FILE, PACKING_FILE)
_ANSWER_S = 5.0


_TO_COME = {
    QuotaAction.GUARANTEED: "it is to be released: ",
    QuotaAction.OPPORTUNISTIC: "it is to become an opportunistic job: ",
    QuotaAction.RESERVE: "GPUs are kept for it: ",
}


def add_packing_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--partition` and `--address`."""
    parser.add_argument(
        "-p",
        "--partition",
        metavar="NAMES",
        help=f"of opportunistic jobs, with commas (default: {PARTITIONS_VARIABLE})",
    )
    parser.add_argument(
        "--quotas", metavar="FILE", type=Path, help=f"tenants' quotas of GPUs (default: {QUOTAS_VARIABLE}, or none)"
    )
    add_address(parser)


def named_partitions(files: Collection[Path] = _FILES) -> frozenset[str]:
    """Return the partitions of opportunistic jobs by the environment, else by the site's files; none where
    nobody says.
    """
    return _named(PARTITIONS_VARIABLE, files)


def named_qos() -> frozenset[str]:
    """Return the QOS of opportunistic jobs, in the same way."""
    return _named(QOS_VARIABLE, _FILES)


def _named(variable: str, files: Collection[Path]) -> frozenset[str]:
    texts = [os.environ.get(variable), *(in_site_file(variable, path) for path in files)]
    return _names(next((text for text in texts if text is not None), ""))


def partitions_of(args: argparse.Namespace) -> frozenset[str]:
    """Return the same, or those of `--partition`.

    Raises:
        UsageError: nobody names one.
    """
    found = named_partitions() if args.partition is None else _names(args.partition)
    if not found:
        raise UsageError(
            f"whose jobs are opportunistic? Write --partition=NAME, or {PARTITIONS_VARIABLE}=NAME into {SITE_FILE}"
        )
    return found


def quotas_path(args: argparse.Namespace | None = None) -> Path | None:
    """Return the site's file of quotas; None where there is none."""
    if args is not None and args.quotas is not None:
        return Path(args.quotas)
    texts = [os.environ.get(QUOTAS_VARIABLE), *(in_site_file(QUOTAS_VARIABLE, path) for path in _FILES)]
    text = next((text for text in texts if text is not None), "")
    return Path(text) if text else None


def quota_file(path: Path, slurm: PackingSlurm, partitions: Collection[str]) -> QuotaFile:
    """Return what reads it."""
    return QuotaFile(path, partitions, slurm.accounts)


def gpu_readings(settings: SiteSettings) -> Callable[[], ShowGpus]:
    """Return what asks the site daemon for the nodes' readings.

    Args:
        settings: where it is.
    """

    def ask_daemon() -> ShowGpus:
        answer = ask(settings, AskGpus(), _ANSWER_S)
        if isinstance(answer, ShowGpus):
            return answer
        if isinstance(answer, RefuseGpus):
            raise SiteError(f"the site daemon shows no readings of GPUs: {answer.reason}")
        raise SiteError(f"the daemon at {settings.address} answers {answer!r} to a question for readings of GPUs")

    return ask_daemon


def check_partitions(names: Collection[str], snapshot: Snapshot) -> None:
    """Look whether a cluster has these partitions: of one that is misspelled no job would ever be placed.

    Raises:
        UsageError: it has not.
    """
    missing = sorted(set(names) - {partition.name for partition in snapshot.partitions})
    if missing:
        raise UsageError(f"there is no partition {printable(','.join(missing))}. See: sinfo --all")


def seen_by(
    snapshot: Snapshot,
    slurm: PackingSlurm,
    settings: SiteSettings,
    partitions: frozenset[str],
    quotas: Path | None,
) -> tuple[PackingView, PackingPlan, str]:
    """Return what anybody sees of what the packer sees, what it would decide, and what of that is missing.

    Args:
        snapshot: the cluster.
        slurm: the same.
        settings: where the site daemon is.
        partitions: of opportunistic jobs.
        quotas: the site's file; None: there is none.
    """
    missing = []
    read: ShowGpus | None = None
    known: Quotas | None = None
    try:
        read = gpu_readings(settings)()
    except SiteError as error:
        missing.append(str(error))
    try:
        # Accounts are the packer's to check, and slurmdbd may be slow, or closed to users.
        known = QuotaFile(quotas, partitions, lambda _: None).first(snapshot) if quotas else None
    except QuotaError as error:
        missing.append(str(error))
    now_s = time.time()
    known = known or Quotas()
    tenants = Tenants(known, opportunistic_qos=named_qos())
    notes = slurm.notes(partitions | tenants.partitions(snapshot))
    tenants = replace(tenants, notes=notes)
    jobs = served_jobs(snapshot, notes, partitions, now_s)
    seen = view(snapshot, jobs, read, partitions, now_s, slurm.switches(), tenants=tenants)
    return seen, decide(seen.state, now_s), "; ".join(missing)


def reasons(seen: PackingView, plan: PackingPlan, missing: str) -> dict[str, str]:
    """Return why each job waits, by its name, in words for its owner."""
    found = {placement.job: f"it is to be placed on {where(placement.place)}" for placement in plan.placements}
    found |= {amiss.job.name: f"it is to wait again: {amiss.reason}" for amiss in seen.settlements}
    closed = {job.job for job in seen.state.waiting if job.closed}
    for job, reason in plan.reasons.items():
        unknown = missing and job not in closed
        found[job] = f"it waits for the packer, and why cannot be told here: {missing}" if unknown else reason
    for placed in seen.state.placed:
        if seen.jobs[placed.job].job.is_pending:
            found[placed.job] = f"it is placed on {where(placed.place)}, and Slurm is to start it"
    return found | quota_reasons(seen.quota)


def quota_reasons(quota: QuotaView) -> dict[str, str]:
    """Return why jobs that wait for quota wait, by name, in words for their owners."""
    found = dict(quota.reasons)
    for decision in quota.decisions:
        job = quota.guaranteed.get(decision.job.name)
        if job is not None and decision.job.runs_as is None:
            found[decision.job.name] = _TO_COME.get(decision.verdict, "") + decision.reason
    return found


def upgrade_in_words(job: OpportunisticJob) -> str:
    """Return why a job that runs is still opportunistic although it was to be upgraded; empty if that was not tried."""
    reason = why_not_upgraded(job)
    return f"its upgrade was given up, and is tried again: {reason}" if reason else ""


def packing_reasons(snapshot: Snapshot, jobs: Collection[Job]) -> dict[str, str]:
    """Return why those of some jobs wait, or are not upgraded, that are opportunistic, by their labels; nothing of
    others.

    Args:
        snapshot: the cluster.
        jobs: of it.

    Raises:
        HetstreamError: Slurm does not tell.
    """
    partitions, quotas = named_partitions(), quotas_path()
    pending = [job for job in jobs if job.is_pending]
    waits_for_quota = quotas is not None and any(job.priority == 0 and job.count("gpu") for job in pending)
    if not waits_for_quota and not any(partitions.issuperset(job.partitions) for job in jobs):
        return guarded_reasons([job for job in pending if job.priority == 0])
    seen, plan, missing = seen_by(snapshot, PackingSlurm(), read_settings(os.environ), partitions, quotas)
    found = reasons(seen, plan, missing)
    found |= {name: reason for name, job in seen.jobs.items() if (reason := upgrade_in_words(job))}
    records = {name: job.job for name, job in seen.jobs.items()} | {**seen.quota.guaranteed}
    found_by_label = {records[name].label: reason for name, reason in reversed(found.items())}
    if quotas is not None and not seen.quota.quotas.partitions:  # nobody can say here whose jobs have quotas
        held = [job.label for job in pending if job.priority == 0 and job.count("gpu")]
        why = f"it is held, perhaps for quota, and why cannot be told here: {missing}"
        found_by_label = dict.fromkeys(held, why) | found_by_label
    return found_by_label


def guarded_reasons(held: Collection[Job]) -> dict[str, str]:
    """Return why held jobs wait on a host where nothing says which jobs are the packer's, by label; nothing of others.

    The guard has written it into those that it holds: a release would start them without a GPU, or be refused.
    """
    jobs = [job for job in held if not who_holds(job, job.label)]
    if not jobs:
        return {}
    notes = PackingSlurm().notes({name for job in jobs for name in job.partitions})
    why = (
        f"it waits for the packer, and why cannot be told here, where {SITE_FILE} does not set {PARTITIONS_VARIABLE} "
        f"or {QUOTAS_VARIABLE}: hetstream gpu jobs takes --partition=NAME --quotas=FILE instead"
    )
    guarded = {number for number, note in notes.items() if is_guarded(note.admin_comment)}
    return {job.label: why for job in jobs if job.job_id in guarded}


def _names(text: str) -> frozenset[str]:
    return frozenset(filter(None, re.split(r"[\s,]+", text)))
