"""Which GPUs running jobs hold, where their own records do not say: (jobs, nodes) -> jobs. Pure; called by `read.py`.

A job with `--exclusive`, or in a partition with OverSubscribe=EXCLUSIVE, holds all GPUs of its nodes, whatever it asked
for (seen on 22.05, 24.11 and 26.05). Its allocated TRES say so where the site accounts for gres/gpu; elsewhere its
nodes do: all that is in use on a node with one job is that job's.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from hetstream.slurm_plugin.client.gres import parse_gres
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, total

_JOB_ID = re.compile(r"JobId=(\d+) ")
_JOB_GRES = re.compile(r"(?<!\S)JOB_GRES=(\S+)")


def with_held_gpus(jobs: Sequence[Job], nodes: Sequence[Node], partitions: Iterable[Partition] = ()) -> tuple[Job, ...]:
    """The jobs, with what their nodes say of those that are alone on all of theirs.

    Args:
        jobs: running ones, and also ended ones, of which the nodes say nothing any more.
        nodes: all nodes.
        partitions: where jobs get whole nodes, those that have ended had all GPUs of theirs.
    """
    num_jobs = Counter(name for job in jobs if job.holds_resources for name in job.nodes)
    used = {node.name: node.gres_used for node in nodes}
    whole = {partition.name for partition in partitions if partition.is_exclusive}
    had = {node.name: node.gres for node in nodes} if whole else {}
    found = []
    for job in jobs:
        if job.gres_held is None and job.nodes and all(name in used for name in job.nodes):
            if job.holds_resources and all(num_jobs[name] == 1 for name in job.nodes):
                job = _with(job, [gres for name in job.nodes for gres in used[name]])
            elif not job.is_running and not whole.isdisjoint(job.partitions):
                job = _with(job, [gres for name in job.nodes for gres in had[name]])
        found.append(job)
    return tuple(found)


def _with(job: Job, used: Iterable[Gres]) -> Job:
    held = Counter[tuple[str, str]]()
    for gres in used:
        held[gres.name, gres.type] += gres.count
    gpus = tuple(Gres(name, kind, count) for (name, kind), count in held.items())
    asked = job.count("gpu")
    return replace(job, gres_held=gpus) if sum(gres.count for gres in gpus if gres.name == "gpu") > asked else job


def ended_on_whole_nodes(jobs: Iterable[Job], nodes: Iterable[Node]) -> frozenset[int]:
    """Numbers of the ended jobs that had all CPUs of nodes with GPUs: with `--exclusive` they had all GPUs, too."""
    cpus = {node.name: node.cpus for node in nodes}
    gpus = {node.name for node in nodes if node.gpus or node.mig}
    return frozenset(
        job.job_id
        for job in jobs
        if job.gres_held is None and not job.is_pending and not job.is_running and not gpus.isdisjoint(job.nodes)
        and job.num_cpus >= sum(cpus.get(name, 0) for name in job.nodes)
    )  # fmt: skip


def parse_held(text: str) -> dict[int, tuple[Gres, ...] | None]:
    """What jobs held by their records of `scontrol --details --oneliner show job`; None where that is in doubt.

    A user can write a line end and a whole record, or a field, into the name of a job. Slurm's own stands beside it:
    what is said twice is in doubt.
    """
    said: dict[int, list[list[str]]] = {}
    for line in text.split("\n"):
        if match := _JOB_ID.match(line):
            said.setdefault(int(match[1]), []).append(_JOB_GRES.findall(line))
    found: dict[int, tuple[Gres, ...] | None] = {}
    for job_id, records in said.items():
        try:
            in_doubt = len(records) > 1 or len(records[0]) > 1
            found[job_id] = None if in_doubt else parse_gres("".join(records[0]))
        except ValueError:
            found[job_id] = None
    return found


def with_told_gpus(
    jobs: Sequence[Job], asked: Collection[int], held: Mapping[int, tuple[Gres, ...] | None], nodes: Iterable[Node]
) -> tuple[tuple[Job, ...], frozenset[int]]:
    """The jobs, with what their records say of those that were asked about, and the numbers of which that is unknown.

    Args:
        jobs: all.
        asked: numbers of those in question.
        held: see `parse_held`. More than the job's nodes have is not believed.
        nodes: all nodes.
    """
    most = {node.name: total(node.gres, "gpu") for node in nodes}
    found, unknown = [], set[int]()
    for job in jobs:
        if job.job_id in asked:
            gpus = held.get(job.job_id)
            if gpus is None or total(gpus, "gpu") > sum(most.get(name, 0) for name in job.nodes):
                unknown.add(job.job_id)
            else:
                job = replace(job, gres_held=gpus)
        found.append(job)
    return tuple(found), frozenset(unknown)
