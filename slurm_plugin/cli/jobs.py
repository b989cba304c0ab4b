"""`hetstream jobs`: the queue with what its jobs hold, and what the pending ones wait for."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection

from hetstream.base.errors import UsageError
from hetstream.hetjob.convert_class import CLASS_MARK, opportunistic_partitions
from hetstream.hetjob.spec import GUARANTEED, OPPORTUNISTIC
from hetstream.slurm_plugin.cli.output import EXIT_CODES, add_output_arguments, chosen_partitions, emit, meta_of
from hetstream.slurm_plugin.cli.reading import add_fresh_argument
from hetstream.slurm_plugin.cli.why import named_jobs, read_jobs
from hetstream.slurm_plugin.client.counted import cpus_asked, held_by, memory_asked_mb, whole_if_near
from hetstream.slurm_plugin.client.held import knows_held_cpus, without_types
from hetstream.slurm_plugin.client.hostlist import compress
from hetstream.slurm_plugin.client.model import PENDING_STATES, REVOKED, Gres, Job, Snapshot
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.users import names_of, uid_of
from hetstream.slurm_plugin.insight.why import Explainer
from hetstream.slurm_plugin.render.report import Column, Report, Row, Section, duration, gib, partition_words

EPILOG = f"""\
CPUS, GPUS and GIB are totals over all nodes of a job: what Slurm allocated to a running job, and what a pending one
asks for. Where other numbers of CPUs are in use for that (all threads of cores, CPUs that several jobs are given), the
first line says how many. A MIG instance counts as its share of a GPU. One that completes has given everything back, and
one that is suspended its CPUs, as sinfo counts them, too. WAITS FOR is worked out from what is free now; hetstream why
JOBID says more. REASON is Slurm's own word. A component of a heterogeneous job is shown as N+COMPONENT. Data workers
that joined a job later are jobs themselves, and COMPANION OF names the job that they work for. CLASS is there where
jobs share GPUs.

examples:
  hetstream jobs -u $USER
  hetstream jobs --state PENDING --csv
  hetstream jobs 8123 --details          which GPUs it holds, on which nodes

{EXIT_CODES}"""
# By which opportunistic jobs stand on GPUs that others have.
OPPORTUNISTIC_GRES = "opp"
# Of jobs that are not over: https://slurm.schedmd.com/squeue.html, JOB STATE CODES.
STATES = {
    "PD": "PENDING", "R": "RUNNING", "CF": "CONFIGURING", "CG": "COMPLETING", "S": "SUSPENDED", "ST": "STOPPED",
    "RS": "RESIZING", "SI": "SIGNALING", "SO": "STAGE_OUT", "RQ": "REQUEUED", "RH": "REQUEUE_HOLD",
    "RD": "RESV_DEL_HOLD", "SE": "SPECIAL_EXIT", "RV": "REVOKED",
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Show pending and running jobs: CPUs, GPUs and memory of each, and what the pending ones wait for."
    )
    parser.epilog = EPILOG
    parser.add_argument("jobs", nargs="*", metavar="JOBID", help="only these: N, N+COMPONENT or N_TASK")
    parser.add_argument("-u", "--user", metavar="NAMES", help="only jobs of these users, with commas between them")
    parser.add_argument("-p", "--partition", metavar="NAMES", help="only these partitions")
    parser.add_argument("-t", "--state", metavar="STATES", help="only these states, such as PENDING,RUNNING")
    parser.add_argument(
        "--details", action="store_true", help="also CPUs, memory and GPUs on each node; slow with thousands of jobs"
    )
    add_fresh_argument(parser)
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read the cluster once and print."""
    if args.details:  # what a job holds on each node is in no reading of the site daemon
        snapshot = CommandSlurm().seen(details=True)
        named = [job for name in args.jobs for job in named_jobs(name, snapshot)]
    else:
        named, snapshot = read_jobs(args, args.jobs)
    jobs = named if args.jobs else list(snapshot.jobs)
    partitions = chosen_partitions(args, snapshot)
    users = None if args.user is None else chosen_users(args.user, {job.user for job in snapshot.jobs})
    states = None if args.state is None else chosen_states(args.state)
    chosen = [
        job
        for job in jobs
        if (users is None or job.user in users)
        and (partitions is None or {*job.partitions, *job.closed_partitions} & set(partitions))
        and (states is None or job.state in states)
    ]
    emit(args, report_of(chosen, snapshot, args.details))
    return 0


def chosen_users(names: str, seen: Collection[str]) -> set[str]:
    """The users that `-u` names, in both ways in which Slurm may name each.

    Raises:
        UsageError: neither the queue nor this host knows one.
    """
    found: set[str] = set()
    for name in names.split(","):
        uid = uid_of(name)
        if uid is None and name not in seen:
            raise UsageError(f"--user={names}: there is no user {name!r} here. Check: getent passwd, or hetstream jobs")
        found |= {name} if uid is None else names_of(uid)
    return found


def chosen_states(text: str) -> set[str]:
    """The states that `-t` names, in full or as squeue shortens them.

    Raises:
        UsageError: one that no job in the queue can have.
    """
    given = [word.upper() for word in text.split(",")]
    unknown = [word for word in given if word not in STATES and word not in STATES.values()]
    if unknown:
        raise UsageError(
            f"--state={text}: no job in the queue can be {', '.join(unknown)}. There are: {', '.join(STATES.values())}"
        )
    return {STATES.get(word, word) for word in given}


def report_of(jobs: list[Job], snapshot: Snapshot, details: bool) -> Report:
    """Put the jobs into tables."""
    explainer = Explainer(snapshot)
    opportunistic = opportunistic_partitions(os.environ)
    rows = [_row(job, snapshot.taken_s, explainer, opportunistic) for job in sorted(jobs, key=_order)]
    held = [held_by(job) for job in jobs if job.holds_resources]
    cpus = sum(row["cpus"] for row in rows if row["state"] not in PENDING_STATES)
    in_use = whole_if_near(sum(part.cpus for part in held)) if knows_held_cpus(snapshot) else None
    summary = {
        "num_running": sum(job.is_at_work for job in jobs),
        "num_suspended": sum(job.state == "SUSPENDED" for job in jobs),
        "num_completing": sum(job.is_running and not job.holds_resources for job in jobs),
        "num_pending": sum(job.num_records for job in jobs if job.is_pending),
        "num_revoked": sum(job.state == REVOKED for job in jobs),
        "cpus_allocated": cpus,
        "cpus_held": in_use,
        "gpus_held": whole_if_near(sum(part.gpus for part in held)),
    }
    used = f" ({in_use:,} in use on their nodes)" if in_use not in (None, cpus) else ""
    completing = f"{summary['num_completing']:,} completing, " if summary["num_completing"] else ""
    suspended = f"{summary['num_suspended']:,} suspended, " if summary["num_suspended"] else ""
    revoked = f", {summary['num_revoked']:,} in other clusters of the federation" if summary["num_revoked"] else ""
    line = (
        f"{summary['num_running']:,} running with {cpus:,} CPUs{used} and {summary['gpus_held']:,} GPUs, "
        f"{suspended}{completing}{summary['num_pending']:,} pending{revoked}"
    )
    companions = any(row["companion_of"] for row in rows)
    classes = any(row["job_class"] for row in rows)
    hidden = {key for key, is_shown in (("companion_of", companions), ("job_class", classes)) if not is_shown}
    columns = [column for column in _COLUMNS if column.key not in hidden]
    sections = [Section("jobs", columns, rows, empty="no job is pending or running, as far as this user can see")]
    if details:
        shares = [
            {
                "job": job.label,
                "node": share.node,
                "cpus": share.cpus,
                "memory_mb": share.memory_mb,
                "gres": [_gres_words(gres) for gres in share.gres],
            }
            for job in sorted(jobs, key=_order)
            for share in job.shares
        ]
        sections.append(Section("shares", _SHARE_COLUMNS, shares, title="Held on each node", hosts="node"))
    notes = [
        *without_types(sum(job.holds_resources and not job.gpu_types_known for job in jobs)),
        *explainer.not_looked_at(jobs),
    ]
    return Report(meta_of("jobs", snapshot), summary, [line], sections, notes)


def _order(job: Job) -> tuple[bool, int, int]:
    # The last task of an array to start keeps the array's own number: job ids are not in the order of tasks.
    if job.het:
        return (job.is_pending, job.het.het_job_id, job.het.offset)
    return (job.is_pending, job.array_job_id or job.job_id, int(job.array_tasks) if job.array_tasks.isdigit() else -1)


def _row(job: Job, now_s: float, explainer: Explainer, opportunistic: Collection[str]) -> Row:
    since_s = job.submit_s if job.is_pending else job.start_s if job.is_running else None
    held = held_by(job)
    has = (job.gpus, memory_asked_mb(job)) if job.is_pending else (held.gpus, held.memory_mb)
    return {
        "job": job.label,
        "job_id": job.job_id,
        "name": job.name,
        "user": job.user,
        "account": job.account,
        "partitions": [*job.partitions, *job.closed_partitions],
        "state": job.state,
        "num_nodes": job.num_nodes,
        "nodes": list(job.nodes),
        # Whoever may see the job is told the same, also who may not see its nodes, or the jobs beside it.
        "cpus": cpus_asked(job) if job.is_pending or held.cpus else 0,
        "gpus": whole_if_near(has[0]),
        "memory_mb": has[1],
        "time_s": max(0, round(now_s - since_s)) if since_s else None,
        "time_limit_s": job.time_limit_s,
        "waits_for": explainer.waits_for(job),
        "reason": job.reason,
        "companion_of": job.trainer,
        "job_class": class_of(job, opportunistic),
    }


def class_of(job: Job, opportunistic: Collection[str]) -> str:
    """The class of a job; empty where nothing says it.

    Args:
        job: of it.
        opportunistic: partitions of opportunistic jobs. They and Slurm's resources count before what its owner says.
    """
    asked = (*job.gres_asked, *(job.gres_held or ()))
    if not set(opportunistic).isdisjoint(job.partitions) or any(gres.name == OPPORTUNISTIC_GRES for gres in asked):
        return OPPORTUNISTIC
    said = next((word for word in job.comment.split() if word.startswith(CLASS_MARK)), "").removeprefix(CLASS_MARK)
    return said if said in (GUARANTEED, OPPORTUNISTIC) else ""


def _gres_words(gres: Gres) -> str:
    kind = f"{gres.name}:{gres.type}" if gres.type else gres.name
    return f"{kind}:{gres.count}" + (f"({','.join(map(str, gres.indices))})" if gres.indices else "")


_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("name", "NAME", lambda name: name if len(name) <= 24 else f"{name[:23]}…", left=True),
    Column("user", "USER", left=True),
    Column("partitions", "PARTITION", partition_words, left=True),
    Column("state", "STATE", left=True),
    Column("job_class", "CLASS", lambda name: name or "-", left=True),
    Column("num_nodes", "NODES"),
    Column("nodes", "WHERE", lambda nodes: compress(nodes) or "-", left=True),
    Column("cpus", "CPUS"),
    Column("gpus", "GPUS"),
    Column("memory_mb", "GIB", gib),
    Column("time_s", "TIME", duration),
    Column("time_limit_s", "LIMIT", duration),
    Column("waits_for", "WAITS FOR", left=True),
    Column("reason", "REASON", left=True),
    Column("companion_of", "COMPANION OF", left=True),
)
_SHARE_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("node", "NODES", left=True),
    Column("cpus", "CPUS"),
    Column("memory_mb", "GIB", gib),
    Column("gres", "GRES (DEVICES)", lambda gres: ",".join(gres) or "-", left=True),
)
