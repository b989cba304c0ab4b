"""`hetstream frag`: which CPUs and GPUs are free and of no use, node by node."""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.base.text import count_words, duration, percent
from hetstream.hetjob.convert.plan import CLASS_MARK, opportunistic_partitions
from hetstream.hetjob.convert.spec import GUARANTEED, OPPORTUNISTIC
from hetstream.hetjob.job.job import JOBS_DIR, places, setting
from hetstream.slurm_plugin.cli.cluster_source import add_fresh_argument, read_cluster
from hetstream.slurm_plugin.cli.output import (
    EXIT_CODES,
    accounting_notes,
    add_node_arguments,
    add_output_arguments,
    chosen_nodes,
    chosen_partitions,
    emit,
    meta_of,
)
from hetstream.slurm_plugin.cli.why import named_jobs, read_jobs
from hetstream.slurm_plugin.client.accounting import has_accounting
from hetstream.slurm_plugin.client.counted import cpus_asked, held_by, memory_asked_mb, num_of_jobs, whole_if_near
from hetstream.slurm_plugin.client.model import (
    PENDING_STATES,
    REVOKED,
    Gres,
    Job,
    Node,
    Snapshot,
    is_own,
    names_of,
    uid_of,
)
from hetstream.slurm_plugin.client.read import knows_held_cpus, without_types
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.client.slurm_units import compress
from hetstream.slurm_plugin.insight.advise import Advice, advise, headline, would_start
from hetstream.slurm_plugin.insight.fragmentation import Fragmentation, NodeFragmentation, measure
from hetstream.slurm_plugin.insight.node_table import Shape, gres_words
from hetstream.slurm_plugin.insight.proposals import NextSubmission, Remembered, ended_jobs, next_submissions, remember
from hetstream.slurm_plugin.insight.utilisation import wait_shares
from hetstream.slurm_plugin.insight.why import Explainer
from hetstream.slurm_plugin.render.tables import (
    RED,
    YELLOW,
    Column,
    Report,
    Row,
    Section,
    by_state,
    gib,
    partition_words,
    signed,
)

FRAG_EPILOG = f"""\
FRAG is the free share of a node's CPUs less the free share of its GPUs (GoldMiner's indicator). Below zero the CPUs are
gone before the GPUs; above zero the GPUs are gone first. MEM is the same with memory in place of CPUs. STRANDED is what
is free although jobs wait: no pending job fits there, and LACKS says more of what would let one start. Of a pending job
that wants several nodes, the share of one node is looked at. Nodes with equal figures share a line; JSON and CSV have a
line each.

examples:
  hetstream frag
  hetstream frag -p gpu --csv > frag.csv
  hetstream frag --json | jq .summary

{EXIT_CODES}"""
# The most frequent; a busy site has thousands.
MOST_SHAPES = 20
_BAD, _WORSE = 0.25, 0.5
# How FRAG is spread is drawn where there are more nodes than one sees at a glance; the middle bar is around 0.
_FEWEST_DRAWN, _NUM_BARS, _BARS = 8, 11, " ▁▂▃▄▅▆▇█"


def add_frag_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Show which CPUs, GPUs and memory are free, and how much of it no pending job can use."
    parser.epilog = FRAG_EPILOG
    add_node_arguments(parser)
    add_fresh_argument(parser)
    add_output_arguments(parser, csv=True)
    parser.set_defaults(run=run_frag)


def run_frag(args: argparse.Namespace) -> int:
    """Read the cluster once and print."""
    snapshot = read_cluster(args)
    partitions, names = chosen_partitions(args, snapshot), chosen_nodes(args, snapshot)
    nodes = [
        node
        for node in snapshot.nodes
        if (partitions is None or set(partitions) & set(node.partitions)) and (names is None or node.name in names)
    ]
    hides = snapshot.hides_jobs
    found = measure(nodes, snapshot.jobs, snapshot.partitions, config=snapshot.config, others_are_hidden=hides)
    helped = [advice.job for advice in would_start(snapshot)] if found.total("stranded_gpus") else []
    emit(args, frag_report(found, snapshot, helped))
    return 0


def frag_report(found: Fragmentation, snapshot: Snapshot, helped: Sequence[str] = ()) -> Report:
    """Put a measurement into words and tables.

    Args:
        found: the measurement.
        snapshot: what was measured.
        helped: labels of pending jobs that would start with data workers.
    """
    summary: dict[str, Any] = {
        name: found.total(name)
        for name in (
            "cpus", "cpus_free", "gpus", "gpus_free", "memory_mb", "memory_free_mb", "stranded_gpus", "stranded_cpus",
            "mig", "mig_free",
        )
    }  # fmt: skip
    summary |= {
        "num_nodes": len(found.nodes),
        "num_gpu_nodes": len(found.gpu_nodes),
        "mean_abs_indicator": _rounded(found.mean_abs_indicator),
        "mean_indicator": _rounded(found.mean_indicator),
        "share_all_cpus_taken_gpus_free": _rounded(found.share_without_cpus),
        "share_all_gpus_taken_cpus_free": _rounded(found.share_without_gpus),
        "num_left_out": len(found.left_out),
    }
    nodes = Section("nodes", _NODE_COLUMNS, [_node_row(node) for node in found.nodes], hosts="node",
                    empty="no node can run jobs. Check: sinfo -R")  # fmt: skip
    shapes = Section(
        "shapes",
        _SHAPE_COLUMNS,
        [_shape_row(shape) for shape in found.shapes],
        title="What pending jobs ask of a node",
        empty="no job waits for resources",
        most_lines=MOST_SHAPES,
    )
    # One type alone, of whole GPUs, is what the nodes' lines say already.
    kinds = found.gpu_types if len(found.gpu_types) > 1 or any(kind.is_mig for kind in found.gpu_types) else ()
    title = "GPUs by type" if kinds else ""
    types = Section("gpu_types", _TYPE_COLUMNS, [asdict(kind) for kind in kinds], title=title)
    elsewhere = Section(
        "elsewhere",
        _ELSEWHERE_COLUMNS,
        [{"node": row.node, "cpus": row.cpus, "gpus": row.gpus, "memory_mb": row.memory_mb} for row in found.elsewhere],
        title="Held there all the same, and counted" if found.elsewhere else "",
        hosts="node",
    )
    left_out = Section(
        "left_out",
        _LEFT_OUT_COLUMNS,
        [{"node": node.name, "state": node.state, "reason": node.reason} for node in found.left_out],
        title="Left out: no job can start there" if found.left_out else "",
        hosts="node",
    )
    sections = (nodes, shapes, types, left_out, elsewhere)
    summary["would_start_with_data_workers"] = list(helped)
    sentence = headline(found, helped)
    lines = [f"{sentence} (hetstream advise)" if helped else sentence] if sentence else []
    lines += _lines(found)
    return Report(meta_of("frag", snapshot), summary, lines, sections, _notes(found, snapshot.nodes))


def _lines(found: Fragmentation) -> list[str]:
    total = found.total
    lines = [
        f"free: {total('cpus_free'):,} of {total('cpus'):,} CPUs, {total('gpus_free'):,} of {total('gpus'):,} GPUs, "
        f"{gib(total('memory_free_mb'))} of {gib(total('memory_mb'))} GiB on {count_words(len(found.nodes), 'node')}"
    ]
    if found.elsewhere:
        cpus, gpus = (sum(getattr(row, what) for row in found.elsewhere) for what in ("cpus", "gpus"))
        where = f"{count_words(len(found.elsewhere), 'node')} on which no other job can start"
        lines.append(f"of these {count_words(cpus, 'CPU')} and {count_words(gpus, 'GPU')} are held on {where}")
    if not found.gpu_nodes:
        if any(node.gpus for node in found.left_out):
            return [*lines, "no node in use has GPUs: there is no indicator. Check: sinfo -R"]
        return [*lines, "no node has GPUs: there is no indicator. Check: scontrol show node | grep Gres"]
    mean_abs, mean = found.mean_abs_indicator or 0.0, found.mean_indicator or 0.0
    nodes = count_words(len(found.gpu_nodes), "node")
    gpus, cpus = count_words(total("stranded_gpus"), "GPU"), count_words(total("stranded_cpus"), "CPU")
    return [
        *lines,
        f"stranded: {gpus}, {cpus} that no pending job can use",
        f"{nodes} with GPUs: FRAG {signed(mean)} on average ({mean_abs:.2f} without signs); "
        f"{percent(found.share_without_cpus or 0)} have no CPU left for their GPUs (a quarter free or more), "
        f"{percent(found.share_without_gpus or 0)} no GPU left for their CPUs",
        *([_spread(found)] if len(found.gpu_nodes) >= _FEWEST_DRAWN else []),
    ]


def _spread(found: Fragmentation) -> str:
    """How many nodes have which FRAG, as bars: nodes at both ends have the same average as nodes in the middle."""
    counts = [0] * _NUM_BARS
    for node in found.gpu_nodes:
        counts[min(_NUM_BARS - 1, int(((node.indicator or 0.0) + 1) / 2 * _NUM_BARS))] += 1
    bars = "".join(_BARS[math.ceil(count / max(counts) * (len(_BARS) - 1))] for count in counts)
    return f"nodes by FRAG: CPUs gone -1 [{bars}] +1 GPUs gone"


def _notes(found: Fragmentation, nodes: Sequence[Node]) -> list[str]:
    names = {row.node for row in found.nodes}
    kept = [node for node in nodes if node.name in names and any(part.cpus_free for part in node.reserved_parts)]
    notes = []
    if kept:
        cpus = sum(part.cpus_free for node in kept for part in node.reserved_parts)
        where = compress(node.name for node in kept)
        notes.append(f"kept by reservations, and not counted: {count_words(cpus, 'CPU')} of {where}")
    owned = [node for node in nodes if node.name in names and (node.owner or node.mcs_label)]
    if any(node.cpus_free or node.gpus_free() for node in owned):
        cpus, gpus = sum(node.cpus_free for node in owned), sum(node.gpus_free() for node in owned)
        where = compress(node.name for node in owned)
        notes.append(
            f"{gpus:,} free GPUs and {cpus:,} free CPUs of {where} are for jobs of one user or MCS label alone"
        )
    completing = [node for node in nodes if node.name in names and "COMPLETING" in node.states]
    if any(node.cpus_free or node.gpus_free() for node in completing):
        cpus, gpus = sum(node.cpus_free for node in completing), sum(node.gpus_free() for node in completing)
        where = compress(node.name for node in completing)
        notes.append(
            f"{gpus:,} free GPUs and {cpus:,} free CPUs of {where} can be had when jobs that have ended are gone there"
        )
    if not found.assumed or not any(node.gpus_free for node in found.nodes):
        return notes
    return [
        *notes,
        f"no pending job with GPUs could run on {compress(found.assumed)}: "
        "there a job of 1 GPU and 1 CPU is assumed for stranded GPUs",
    ]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


def _node_row(node: NodeFragmentation) -> Row:
    row = asdict(node) | {"partitions": list(node.partitions)}
    return row | {name: _rounded(row[name]) for name in ("indicator", "memory_indicator", "gpu_share_free")}


def _shape_row(shape: Shape) -> Row:
    row = asdict(shape) | {"gres": [*map(gres_words, shape.gres)]}
    del row["whose"]  # these are of all users together
    return row


def _bad(row: Row) -> str:
    value = abs(row["indicator"] or 0.0)
    return RED if value >= _WORSE else YELLOW if value >= _BAD else ""


def _stranded(row: Row) -> str:
    return RED if row["stranded_gpus"] else ""


_NODE_COLUMNS = (
    Column("node", "NODES", left=True, cuts=True),
    Column("partitions", "PARTITIONS", partition_words, left=True, priority=5),
    Column("cpus_free", "FREE CPUS"),
    Column("cpus", "OF", priority=2),
    Column("gpus_free", "FREE GPUS"),
    Column("gpus", "OF", priority=1),
    Column("memory_free_mb", "FREE GIB", gib, priority=4),
    Column("memory_mb", "OF", gib, priority=8),
    Column("indicator", "FRAG", signed, mark=_bad, priority=6),
    Column("memory_indicator", "MEM", signed, priority=7),
    Column("stranded_gpus", "STRANDED GPUS", mark=_stranded),
    Column("stranded_cpus", "STRANDED CPUS", priority=3),
    Column("lacking", "LACKS", left=True),
)
_SHAPE_COLUMNS = (
    Column("num_jobs", "JOBS"),
    Column("gpus", "GPUS"),
    Column("gpu_type", "TYPE", left=True),
    Column("gres", "GRES", lambda gres: ",".join(gres) or "-", left=True),
    Column("cpus", "CPUS"),
    Column("memory_mb", "GIB", gib, priority=4),
    Column("partitions", "PARTITIONS", partition_words, left=True, priority=5),
)
_TYPE_COLUMNS = (
    Column("type", "TYPE", left=True),
    Column("is_mig", "PART OF A GPU", lambda is_mig: "MIG" if is_mig else "-", left=True),
    Column("num_free", "FREE"),
    Column("num", "OF"),
)
_LEFT_OUT_COLUMNS = (
    Column("node", "NODES", left=True, cuts=True),
    Column("state", "STATE", left=True, mark=by_state),
    Column("reason", "REASON", left=True, wraps=True),
)
_ELSEWHERE_COLUMNS = (
    Column("node", "NODES", left=True, cuts=True),
    Column("cpus", "CPUS"),
    Column("gpus", "GPUS"),
    Column("memory_mb", "GIB", gib, priority=4),
)


# `hetstream jobs`: the queue with what its jobs hold, and what the pending ones wait for.

JOBS_EPILOG = f"""\
CPUS, GPUS and GIB are totals over all nodes of a job: what Slurm allocated to a running job, and what a pending one
asks for. Where other numbers of CPUs are in use for that (all threads of cores, CPUs that several jobs are given), the
first line says how many. A MIG instance counts as its share of a GPU. One that completes has given everything back, and
one that is suspended its CPUs, as sinfo counts them, too. WAITS FOR is worked out from what is free now; hetstream why
JOBID says more. REASON is Slurm's own word. A component of a heterogeneous job is shown as N+COMPONENT. Data workers
that joined a job later are jobs themselves, and COMPANION OF names the job that they work for. CLASS is there where
jobs share GPUs.

examples:
  hetstream jobs --me
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


def add_jobs_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Show pending and running jobs: CPUs, GPUs and memory of each, and what the pending ones wait for."
    )
    parser.epilog = JOBS_EPILOG
    parser.add_argument("jobs", nargs="*", metavar="JOBID", help="only these: N, N+COMPONENT or N_TASK")
    whose = parser.add_mutually_exclusive_group()
    whose.add_argument("--me", action="store_true", help="only jobs of yours")
    whose.add_argument("-u", "--user", metavar="NAMES", help="only jobs of these users, with commas between them")
    parser.add_argument("-p", "--partition", metavar="NAMES", help="only these partitions")
    parser.add_argument("-t", "--state", metavar="STATES", help="only these states, such as PENDING,RUNNING")
    parser.add_argument(
        "--details", action="store_true", help="also CPUs, memory and GPUs on each node; slow with thousands of jobs"
    )
    add_fresh_argument(parser)
    add_output_arguments(parser, csv=True)
    parser.set_defaults(run=run_jobs)


def run_jobs(args: argparse.Namespace) -> int:
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
        and (not args.me or is_own(job))
        and (partitions is None or {*job.partitions, *job.closed_partitions} & set(partitions))
        and (states is None or job.state in states)
    ]
    emit(args, jobs_report(chosen, snapshot, args.details))
    return 0


def chosen_users(names: str, seen: Collection[str]) -> set[str]:
    """Return the users that `-u` names, in both ways in which Slurm may name each.

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
    """Return the states that `-t` names, in full or as squeue shortens them.

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


def jobs_report(jobs: list[Job], snapshot: Snapshot, details: bool) -> Report:
    """Put the jobs into tables."""
    explainer = Explainer(snapshot)
    opportunistic = opportunistic_partitions(os.environ)
    rows = [_row_jobs(job, snapshot.taken_s, explainer, opportunistic) for job in sorted(jobs, key=_order)]
    held = [held_by(job) for job in jobs if job.holds_resources]
    cpus = sum(row["cpus"] for row in rows if row["state"] not in PENDING_STATES)
    in_use = whole_if_near(sum(part.cpus for part in held)) if knows_held_cpus(snapshot) else None
    summary = {
        "num_running": num_of_jobs(job for job in jobs if job.is_at_work),
        "num_suspended": num_of_jobs(job for job in jobs if job.state == "SUSPENDED"),
        "num_completing": num_of_jobs(job for job in jobs if job.is_running and not job.holds_resources),
        "num_pending": num_of_jobs(job for job in jobs if job.is_pending),
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
        f"{summary['num_running']:,} running with {count_words(cpus, 'CPU')}{used} and "
        f"{count_words(summary['gpus_held'], 'GPU')}, "
        f"{suspended}{completing}{summary['num_pending']:,} pending{revoked}"
    )
    companions = any(row["companion_of"] for row in rows)
    classes = any(row["job_class"] for row in rows)
    hidden = {key for key, is_shown in (("companion_of", companions), ("job_class", classes)) if not is_shown}
    columns = [column for column in _JOBS_COLUMNS if column.key not in hidden]
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


def _row_jobs(job: Job, now_s: float, explainer: Explainer, opportunistic: Collection[str]) -> Row:
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
    """Return the class of a job; empty where nothing says it.

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


_JOBS_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("name", "NAME", left=True, priority=1, cuts=True),
    Column("user", "USER", left=True),
    Column("partitions", "PARTITION", partition_words, left=True, priority=2),
    Column("state", "STATE", left=True, mark=by_state),
    Column("job_class", "CLASS", lambda name: name or "-", left=True, priority=10),
    Column("num_nodes", "NODES", priority=6),
    Column("nodes", "WHERE", lambda nodes: compress(nodes) or "-", left=True, priority=5, cuts=True),
    Column("cpus", "CPUS"),
    Column("gpus", "GPUS"),
    Column("memory_mb", "GIB", gib, priority=4),
    Column("time_s", "TIME", duration),
    Column("time_limit_s", "LIMIT", duration, priority=7),
    Column("waits_for", "WAITS FOR", left=True, wraps=True),
    Column("reason", "REASON", left=True, priority=8),
    Column("companion_of", "COMPANION OF", left=True, priority=9),
)
_SHARE_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("node", "NODES", left=True, cuts=True),
    Column("cpus", "CPUS"),
    Column("memory_mb", "GIB", gib, priority=4),
    Column("gres", "GRES (DEVICES)", lambda gres: ",".join(gres) or "-", left=True),
)


# `hetstream advise`: which jobs would gain from data workers.

ADVISE_EPILOG = f"""\
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


def add_advise_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "List running, pending and recent jobs that would gain from data workers, with an estimate."
    parser.epilog = ADVISE_EPILOG
    add_fresh_argument(parser)
    add_output_arguments(parser, csv=True)
    parser.set_defaults(run=run_advise)


def run_advise(args: argparse.Namespace) -> int:
    """Read the cluster and print."""
    snapshot = read_cluster(args)
    now_s = snapshot.taken_s
    usages = CommandSlurm().usages(snapshot, now_s - RECENT_S, now_s) if has_accounting(snapshot) else ()
    submitted = [Path.cwd(), *(Path(job.work_dir) for job in snapshot.jobs if job.work_dir and is_own(job))]
    found = places(submitted, setting(JOBS_DIR, os.environ))
    ended = ended_jobs(found, now_s - RECENT_S, now_s)
    history = remember(found, os.environ, now_s)
    report = advise_report(advise(snapshot, wait_shares(snapshot.jobs), usages, ended), snapshot, history)
    emit(args, replace(report, notes=(*accounting_notes(usages, snapshot), *report.notes)))
    return 0


def advise_report(found: tuple[Advice, ...], snapshot: Snapshot, history: Remembered | None = None) -> Report:
    """Put the advice into a table, and beside it what the history of past jobs proposes."""
    hours = sum(finding.gpu_hours_per_day or 0.0 for finding in found)
    summary = {"num_jobs": len(found), "gpu_hours_per_day": round(hours, 1)}
    about = f", about {hours:,.0f} GPU hours a day" if hours else ""
    lines = [f"{count_words(len(found), 'job')} would gain{about}" if found else "no job would gain"]
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
        title = "next submissions, from history:" if proposals else ""
        sections.append(Section("next_submissions", _NEXT_COLUMNS, proposals, title=title))
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
    """Return whether an association or a QOS may keep a job from starting that has room."""
    limits = snapshot.config.get("AccountingStorageEnforce", "").split(",")
    return not {"limits", "qos", "safe", "all"}.isdisjoint(limits)


_COLUMNS = (
    Column("job", "JOB", left=True),
    Column("user", "USER", left=True),
    Column("state", "STATE", left=True, mark=by_state),
    Column("basis", "BASIS", left=True, priority=2),
    Column("cpus_freed", "CPUS FREED"),
    Column("gpus_unlocked", "GPUS UNLOCKED"),
    Column("gpu_hours_per_day", "GPU HOURS", lambda hours: f"{hours:,.1f}"),
    Column("text", "BECAUSE", left=True, wraps=True),
    Column("step", "NEXT STEP", left=True, below=True),
)
_NEXT_COLUMNS = (
    Column("name", "SCRIPT", left=True, cuts=True),
    Column("directory", "SUBMITTED IN", left=True, priority=1, cuts=True),
    Column("num_jobs", "PAST JOBS"),
    Column("directive", "NEXT TIME", left=True, below=True),
    Column("text", "BECAUSE OF", left=True, wraps=True),
)
