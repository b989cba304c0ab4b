"""Which GPUs running jobs hold, where their own records do not say: (jobs, nodes) -> jobs. Pure; called by `read.py`.

A job with `--exclusive`, or in a partition with OverSubscribe=EXCLUSIVE, holds all GPUs of its nodes, whatever it asked
for (seen on 22.05, 24.11 and 26.05). Its allocated TRES say so where the site accounts for gres/gpu; elsewhere its
nodes do: all that is in use on a node with one job is that job's. Where jobs of others are hidden from who asks,
nothing says that a job is alone, and its own record is asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from hetstream.slurm_plugin.client.array_tasks import num_tasks
from hetstream.slurm_plugin.client.counted import held_by
from hetstream.slurm_plugin.client.gres import parse_gres
from hetstream.slurm_plugin.client.hostlist import expand
from hetstream.slurm_plugin.client.model import (
    PARTITION_DOWN,
    Gres,
    Job,
    Node,
    NodeShare,
    Partition,
    Reservation,
    Snapshot,
    gpu_share,
    total,
)
from hetstream.slurm_plugin.client.parse_text import records_of_jobs, said_of_jobs

# What a job holds on nodes of which it has as much of each (slurm_sprint_job_info).
_GROUP = re.compile(r"(?<!\S)Nodes=(\S+) CPU_IDs=([-,\d]+) Mem=(\d+) GRES=(\S*)")
# From so many characters on 22.05 has cut them (tmp1 in slurm_sprint_job_info).
_CUT_IDS = 127


def with_held_gpus(
    jobs: Sequence[Job],
    nodes: Sequence[Node],
    partitions: Iterable[Partition] = (),
    *,
    others_are_hidden: bool = False,
) -> tuple[Job, ...]:
    """The jobs; those that are alone on all of their nodes hold what is in use there.

    Args:
        jobs: running ones, and also ended ones and those that complete, of which the nodes say nothing any more.
        nodes: all nodes.
        partitions: where jobs get whole nodes, those that have ended had all GPUs of theirs.
        others_are_hidden: there may be more jobs than these: none is known to be alone on its nodes.
    """
    num_jobs = Counter(name for job in jobs if job.holds_resources for name in job.nodes)
    used = {node.name: node.gres_used for node in nodes}
    whole = {partition.name for partition in partitions if partition.is_exclusive}
    had = {node.name: node.gres for node in nodes} if whole else {}
    found = []
    for job in jobs:
        if job.gres_held is None and job.nodes and all(name in used for name in job.nodes):
            if job.holds_resources and not others_are_hidden and all(num_jobs[name] == 1 for name in job.nodes):
                job = _with(job, [gres for name in job.nodes for gres in used[name]])
            elif not job.holds_resources and not whole.isdisjoint(job.partitions):
                job = _with(job, [gres for name in job.nodes for gres in had[name]])
        found.append(job)
    return tuple(found)


def in_question(jobs: Iterable[Job], nodes: Iterable[Node] | None, *, others_are_hidden: bool) -> frozenset[int]:
    """Numbers of the running jobs of which only their own records say what GPUs they hold; see `with_held_gpus`.

    Args:
        jobs: all that are seen.
        nodes: all; None where nothing is known of them.
        others_are_hidden: there may be more jobs than these.
    """
    with_gpus = {node.name for node in nodes or () if node.gpu_types} if others_are_hidden else set()
    return frozenset(
        job.job_id
        for job in jobs
        if job.holds_resources
        and (job.gpus_in_doubt or (job.gres_held is None and (nodes is None or not with_gpus.isdisjoint(job.nodes))))
    )


def _with(job: Job, used: Iterable[Gres]) -> Job:
    held = Counter[tuple[str, str]]()
    for gres in used:
        held[gres.name, gres.type] += gres.count
    gpus = tuple(Gres(name, kind, count) for (name, kind), count in held.items())
    asked = job.count("gpu")
    is_more = sum(gres.count for gres in gpus if gres.name == "gpu") > asked
    return replace(job, gres_held=gpus) if is_more or job.gpus_in_doubt else job


def with_shared_cpus(jobs: Sequence[Job], nodes: Sequence[Node], partitions: Iterable[Partition]) -> tuple[Job, ...]:
    """The jobs, with which share of their CPUs counts as their own where a partition gives CPUs to several jobs.

    A node of such a partition says how many CPUs are in use, each once: where several jobs are, they have them in
    proportion to what each was given there.

    Args:
        jobs: with `shares` where `spread_in_question` asks for them.
        nodes: all nodes.
        partitions: all partitions.
    """
    sharing = {partition.name for partition in partitions if partition.jobs_per_cpu > 1}
    if not sharing:
        return tuple(jobs)
    given, num_jobs = dict.fromkeys((node.name for node in nodes), 0.0), Counter[str]()
    for job in jobs:
        if held_by(job).cpus:
            num_jobs.update(job.nodes)
            for name, cpus in job.cpus_on_nodes():
                given[name] = given.get(name, 0.0) + cpus
    shares = {
        node.name: node.cpus_allocated / given[node.name]
        for node in nodes
        if num_jobs[node.name] > 1
        and 0 < node.cpus_allocated < given[node.name]
        and not sharing.isdisjoint(node.partitions)
    }
    return tuple(
        replace(job, cpu_share=sum(cpus * shares.get(name, 1.0) for name, cpus in job.cpus_on_nodes()) / job.num_cpus)
        if job.holds_resources and not shares.keys().isdisjoint(job.nodes)
        else job
        for job in jobs
    )


def spread_in_question(
    jobs: Iterable[Job], nodes: Iterable[Node], partitions: Iterable[Partition], reservations: Iterable[Reservation]
) -> frozenset[int]:
    """Numbers of the running jobs of which a figure needs to know how many CPUs they have on each of their nodes.

    squeue says how many on all together. It matters where several jobs are given the same CPUs, where a partition gives
    so many of a node and no more, and to a reservation of some cores.
    """
    sharing = {partition.name for partition in partitions if partition.jobs_per_cpu > 1}
    limited = {partition.name for partition in partitions if partition.max_cpus_per_node is not None}
    reserved = {reservation.name for reservation in reservations if reservation.is_active and reservation.cpus}
    shared = {node.name for node in nodes if not sharing.isdisjoint(node.partitions)}
    return frozenset(
        job.job_id
        for job in jobs
        if job.holds_resources and not job.shares and 1 < len(job.nodes) < job.num_cpus
        and not (shared.isdisjoint(job.nodes) and limited.isdisjoint(job.partitions)
                 and reserved.isdisjoint(job.reservations))
    )  # fmt: skip


def parts_of_cores_in_question(jobs: Iterable[Job], nodes: Iterable[Node], config: Mapping[str, str]) -> frozenset[int]:
    """Numbers of the running jobs that may hold more CPUs than they have.

    With CR_CPU a job has as many as it asked for, and no other job is given what is left of its cores: the node counts
    all threads of those as in use (seen on 22.05, 24.11 and 26.05). With CR_Core the job itself has them.
    """
    if "CR_CPU" not in config.get("SelectTypeParameters", "").upper():
        return frozenset()
    threaded = {node.name for node in nodes if node.cpus_per_core > 1}
    return frozenset(job.job_id for job in jobs if job.holds_resources and not threaded.isdisjoint(job.nodes))


def knows_held_cpus(snapshot: Snapshot) -> bool:
    """Whether who read it is told how many CPUs jobs keep others from, where those are not what Slurm allocated."""
    shares = any(partition.jobs_per_cpu > 1 for partition in snapshot.partitions)
    has_parts = "CR_CPU" in snapshot.config.get("SelectTypeParameters", "").upper()
    return not (snapshot.without_nodes and (has_parts or shares)) and not (snapshot.hides_jobs and shares)


def with_shares(
    jobs: Iterable[Job], asked: Collection[int], text: str, parts_of_cores: Collection[int] = ()
) -> tuple[Job, ...]:
    """The jobs, those that were asked about with what they hold on each node, where nothing leaves that in doubt.

    Args:
        jobs: all.
        asked: numbers of those in question.
        text: the records of `scontrol --details --oneliner show job`.
        parts_of_cores: see `parts_of_cores_in_question`: of those that are asked about, too.
    """
    records = records_of_jobs(text) if asked else {}
    found = []
    for job in jobs:
        if job.job_id in asked:
            is_whole = job.job_id in parts_of_cores
            shares = _shares(job, records.get(job.job_id, []), is_whole)
            if shares and is_whole:
                held = sum(share.cpus_held or 0 for share in shares)
                job = replace(job, cpu_share=held / job.num_cpus)
            job = replace(job, shares=shares or job.shares)
        found.append(job)
    return tuple(found)


def _shares(job: Job, records: Sequence[str], is_whole: bool) -> tuple[NodeShare, ...]:
    groups = _GROUP.findall(records[0]) if len(records) == 1 else []
    shown: list[tuple[str, int, int, str]] = []
    for names, ids, memory_mb, gres in groups:
        if len(ids) >= _CUT_IDS:
            return ()
        shown += [(name, num_tasks(ids), int(memory_mb), gres) for name in _expanded(names)]
    # A user may have written a group into the job's name: it has a node twice, or one that is not the job's.
    if sorted(name for name, *_ in shown) != sorted(job.nodes):
        return ()
    # All threads of a core are shown, whether they are CPUs or not.
    threads = sum(num for _, num, *_ in shown) / job.num_cpus
    try:
        return tuple(
            NodeShare(name, round(num / threads), memory_mb, parse_gres(gres), num if is_whole else None)
            for name, num, memory_mb, gres in shown
        )
    except ValueError:
        return ()


def _expanded(names: str) -> tuple[str, ...]:
    try:
        return expand(names)
    except ValueError:
        return ()


def with_closed_partitions(nodes: Iterable[Node], partitions: Iterable[Partition]) -> tuple[Node, ...]:
    """The nodes; those of which no partition starts jobs have a word of ours among their states, which keeps jobs away.

    A partition that is not shown may start some.
    """
    closed = {partition.name for partition in partitions if not partition.is_up}
    return tuple(
        replace(node, states=node.states | {PARTITION_DOWN})
        if node.partitions and closed.issuperset(node.partitions)
        else node
        for node in nodes
    )


def with_gpu_shares(jobs: Sequence[Job], nodes: Sequence[Node]) -> tuple[Job, ...]:
    """The jobs, with what each GPU without a type is on nodes that MIG divides.

    Slurm accounts for gres/gpu without types unless the site names each (AccountingStorageTRES). What is in use on the
    node, less what jobs hold that asked for a type, are the instances of the others; of an ended job it is all that the
    node has. Instances of one size leave no doubt; of several sizes each counts as their average, so that together they
    are what is in use.
    """
    divided = {node.name: node for node in nodes if node.mig}
    if not divided:
        return tuple(jobs)
    jobs = [_with_asked_types(job) if not divided.keys().isdisjoint(job.nodes) else job for job in jobs]
    left = {node.name: gpus_by_type(node.gres_used) for node in nodes}
    for job in jobs:
        if job.holds_resources and len(job.nodes) == 1 and job.nodes[0] in divided:
            left[job.nodes[0]] -= Counter({kind: num for kind, num in gpus_by_type(job.amounts("gpu")).items() if kind})
    everything = {node.name: gpus_by_type(node.gres) for node in nodes}
    found = []
    for job in jobs:
        if not divided.keys().isdisjoint(job.nodes) and job.gpus and job.has_untyped_gpus:
            counts = [left if job.holds_resources else everything, everything]
            share, is_known = untyped_share(counts, job.nodes, job.count("gpu"))
            job = replace(job, untyped_gpu_share=share, gpu_types_known=is_known)
        found.append(job)
    return tuple(found)


def untyped_share(
    counts: Iterable[Mapping[str, Counter[str]]], nodes: Collection[str], num_gpus: float
) -> tuple[float, bool]:
    """The share of a whole GPU that a GPU without a type is on average; and whether it is exactly that.

    It is where all have the same share, or the job has all of them.

    Args:
        counts: of each node GPUs by type; the first that have any count.
        nodes: of which.
        num_gpus: that the job has.
    """
    for of_nodes in counts:
        sums = sum((of_nodes.get(name, Counter[str]()) for name in nodes), Counter[str]())
        shares = {kind: gpu_share(kind) for kind, num in sums.items() if num > 0}
        if shares:
            num = sum(sums[kind] for kind in shares)
            weighed = sum(share * sums[kind] for kind, share in shares.items())
            return weighed / num, len(set(shares.values())) == 1 or num == num_gpus
    return 1.0, True


def without_types(num_jobs: int) -> list[str]:
    """The line about jobs whose GPUs count as an average; none where there are no such jobs."""
    if not num_jobs:
        return []
    return [
        f"of {num_jobs:,} job(s) on nodes with MIG instances of several sizes Slurm does not say which they held: each "
        "counts as the average there. It says so with AccountingStorageTRES=gres/gpu,gres/gpu:TYPE for each type"
    ]


def _with_asked_types(job: Job) -> Job:
    """The job; if no GPU that it holds has a type, and it has or asked for as many of some types, with these."""
    held = gpus_by_type(job.gres_held or ())
    has = gpus_by_type(gres for share in job.shares for gres in share.gres)
    asked = gpus_by_type(replace(job, gres_held=None).amounts("gpu"))
    others = tuple(gres for gres in job.gres_held or () if gres.name != "gpu")
    for typed in (has, asked):
        if set(held) == {""} and "" not in typed and sum(typed.values()) == held[""]:
            return replace(job, gres_held=(*others, *(Gres("gpu", kind, num) for kind, num in typed.items())))
    return job


def gpus_by_type(gres: Iterable[Gres]) -> Counter[str]:
    """How many GPUs of each type; of none under the empty name."""
    found = Counter[str]()
    for resource in gres:
        if resource.name == "gpu":
            found[resource.type] += resource.count
    return found


def ended_on_whole_nodes(jobs: Iterable[Job], nodes: Iterable[Node]) -> frozenset[int]:
    """Numbers of the ended jobs that had all CPUs of nodes with GPUs: with `--exclusive` they had all GPUs, too."""
    cpus = {node.name: node.cpus for node in nodes}
    gpus = {node.name for node in nodes if node.gpus or node.mig}
    return frozenset(
        job.job_id
        for job in jobs
        if job.gres_held is None and not job.is_pending and not job.holds_resources and not gpus.isdisjoint(job.nodes)
        and job.num_cpus >= sum(cpus.get(name, 0) for name in job.nodes)
    )  # fmt: skip


def parse_held(text: str) -> dict[int, tuple[Gres, ...] | None]:
    """What jobs held by their records of `scontrol --details --oneliner show job`; None where that is in doubt."""
    found: dict[int, tuple[Gres, ...] | None] = {}
    for job_id, gres in said_of_jobs(text, "JOB_GRES").items():
        try:
            found[job_id] = None if gres is None else parse_gres(gres)
        except ValueError:
            found[job_id] = None
    return found


def held_in_shares(jobs: Iterable[Job]) -> dict[int, tuple[Gres, ...] | None]:
    """What running jobs hold by their shares; None where they have none."""
    found: dict[int, tuple[Gres, ...] | None] = {}
    for job in jobs:
        held = Counter((gres.name, gres.type) for share in job.shares for gres in share.gres for _ in range(gres.count))
        found[job.job_id] = tuple(Gres(*kind, num) for kind, num in held.items()) if job.shares else None
    return found


def with_told_gpus(
    jobs: Sequence[Job],
    asked: Collection[int],
    held: Mapping[int, tuple[Gres, ...] | None],
    nodes: Iterable[Node] | None,
) -> tuple[tuple[Job, ...], frozenset[int]]:
    """The jobs, with what their records say of those that were asked about, and the numbers of which that is unknown.

    Args:
        jobs: all.
        asked: numbers of those in question.
        held: see `parse_held`. More than the job's nodes have is not believed.
        nodes: all nodes; None where nothing is known of them.
    """
    most = None if nodes is None else {node.name: total(node.gres, "gpu") for node in nodes}
    found, unknown = [], set[int]()
    for job in jobs:
        if job.job_id in asked:
            gpus = held.get(job.job_id)
            if gpus is None or (most is not None and total(gpus, "gpu") > sum(most.get(name, 0) for name in job.nodes)):
                unknown.add(job.job_id)
            else:
                job = replace(job, gres_held=gpus)
        found.append(job)
    return tuple(found), frozenset(unknown)
