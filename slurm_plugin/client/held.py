"""Which GPUs running jobs hold, where their own records do not say: (jobs, nodes) -> jobs. Pure; called by `read.py`.

A job with `--exclusive`, or in a partition with OverSubscribe=EXCLUSIVE, holds all GPUs of its nodes, whatever it asked
for (seen on 22.05, 24.11 and 26.05). Its allocated TRES say so where the site accounts for gres/gpu; elsewhere its
nodes do: all that is in use on a node with one job is that job's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition


def with_held_gpus(jobs: Sequence[Job], nodes: Sequence[Node], partitions: Iterable[Partition] = ()) -> tuple[Job, ...]:
    """The jobs, with what their nodes say of those that are alone on all of theirs.

    Args:
        jobs: running ones, and also ended ones, of which the nodes say nothing any more.
        nodes: all nodes.
        partitions: where jobs get whole nodes, those that have ended had all GPUs of theirs.
    """
    num_jobs = Counter(name for job in jobs if job.is_running for name in job.nodes)
    used = {node.name: node.gres_used for node in nodes}
    whole = {partition.name for partition in partitions if partition.is_exclusive}
    had = {node.name: node.gres for node in nodes} if whole else {}
    found = []
    for job in jobs:
        if job.gres_held is None and job.nodes and all(name in used for name in job.nodes):
            if job.is_running and all(num_jobs[name] == 1 for name in job.nodes):
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
