"""Why a heterogeneous job waits: (snapshot, its components one by one) -> what all wait for. Pure; for `hetstream why`.

Slurm names a reason for each component, and starts all or none: what one of them waits for, all do. Component 0 often
waits for Resources although it has room, and others have a word that is long out of date.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from hetstream.base.text import count_words
from hetstream.slurm_plugin.client.model import CUT, Gres, Job, Node, Snapshot, has_task
from hetstream.slurm_plugin.insight.blockers import COMPLETING, NOT_LOOKED_AT, OTHER_USERS, Blocker
from hetstream.slurm_plugin.insight.node_table import Shape
from hetstream.slurm_plugin.insight.why import HIDDEN, NODE_COUNT, SOCKETS, Explainer, Explanation

# What nothing changes comes first, then what somebody must do or end, then what is not free; a turn comes last.
_NEVER, _TURNS = ("size",), ("backfill", "priority", NOT_LOOKED_AT, NODE_COUNT, SOCKETS, HIDDEN, "scheduler")
_FREE = ("GPUs", "CPUs", "memory", "gang", "whole nodes", OTHER_USERS, COMPLETING, "nodes")


def explain_together(snapshot: Snapshot, parts: Sequence[Explanation]) -> tuple[tuple[str, Blocker], ...]:
    """Return what a pending heterogeneous job waits for, the true reason first, each once and with the component that
    has it.

    Args:
        snapshot: the cluster.
        parts: its components, in their order.
    """
    found: dict[tuple[str, str], tuple[str, Blocker]] = {}
    for part in parts:
        for blocker in part.blockers:
            if blocker.kind != "component":  # another one that waits is named itself
                found.setdefault((blocker.kind, blocker.text), (part.job.label, blocker))
    is_told = snapshot.without_nodes or any(kind in _NEVER for kind, _ in found)
    if never := None if is_told else _never_together(snapshot, parts):
        found.setdefault((never[1].kind, never[1].text), never)
    ordered = sorted(found.values(), key=lambda entry: _rank(entry[1].kind))
    if ordered and ordered[0][1].kind in _TURNS:
        together = None if snapshot.without_nodes else _not_together(snapshot, parts)
        return (together,) if together else (ordered[0],)
    return tuple(entry for entry in ordered if entry[1].kind not in _TURNS)


def _rank(kind: str) -> tuple[int, int]:
    if kind in _NEVER:
        return (0, 0)
    if kind in _TURNS:
        return (3, _TURNS.index(kind))
    return (2, 0) if kind in _FREE else (1, 0)


def _never_together(snapshot: Snapshot, parts: Sequence[Explanation]) -> tuple[str, Blocker] | None:
    """What components need together that all nodes of their partitions have not, be they empty; None if they have.

    Only sums are compared, so nothing is said to be impossible that could start in some way or other.
    """
    shown = {node.name for node in snapshot.nodes}
    # Nodes may be hidden or powered down, and jobs may share CPUs.
    in_part = {
        partition.name
        for partition in snapshot.partitions
        if partition.jobs_per_cpu > 1 or not shown.issuperset(partition.nodes)
    }
    by_part = [frozenset(part.job.partitions) for part in parts]
    for names in dict.fromkeys([*by_part, frozenset[str]().union(*by_part)]):
        mine = [part for part in parts if names.issuperset(part.job.partitions)]
        nodes = [node for node in snapshot.nodes if names.intersection(node.partitions)]
        if len(mine) < 2 or names & in_part:
            continue
        for what, needed, has in _sums(mine, nodes):
            if needed > has:
                text = (
                    f"its components start together and need {needed:,} {what} together; all "
                    f"{count_words(len(nodes), 'node')}"
                )
                text += f" of {', '.join(sorted(names))} have {has:,}, be they empty"
                return mine[-1].job.label, Blocker(
                    "size", text, "ask for less, or for another partition: hetstream frag"
                )
    return None


def _sums(parts: Sequence[Explanation], nodes: Sequence[Node]) -> Iterator[tuple[str, int, int]]:
    """What components need at least, each resource with what nodes have of it at the most."""
    yield "CPUs", sum(part.job.num_cpus for part in parts), sum(node.cpus for node in nodes)
    yield "GPUs", sum(part.job.count("gpu") for part in parts), sum(node.devices("") for node in nodes)
    # Nobody else is on a node that one has for itself, or of which it has all memory.
    alone = [part for part in parts if part.shape.whole_nodes or part.shape.all_memory]
    beside = [part for part in parts if part not in alone and part.shape.memory_mb]
    least = sum(_num_nodes(part) for part in alone) + max(map(_num_nodes, beside), default=0)
    yield "nodes", least, len(nodes)


def _num_nodes(part: Explanation) -> int:
    return max(1, part.job.num_nodes)


def _not_together(snapshot: Snapshot, parts: Sequence[Explanation]) -> tuple[str, Blocker] | None:
    """What the components lack that have room one by one, and not all at once; None if they have.

    They are placed one after the other, the ones with the fewest places first, where the others want least to be.
    """
    nodes = {node.name: node for node in snapshot.nodes}
    mine = {part.job for part in parts}
    others = tuple(job for job in snapshot.jobs if job not in mine)
    for part in sorted(parts, key=lambda part: len(part.fits_on) - part.shape.num_nodes):
        # Alone in the queue: it is not about whose turn it is.
        alone: Job = replace(part.job, het=None)
        left = replace(snapshot, nodes=tuple(nodes.values()), jobs=(*others, alone))
        now = Explainer(left).explain(alone)
        wanted = part.shape.num_nodes
        if len(now.fits_on) < wanted:
            blocker = now.blockers[0]
            text = f"each component has room now, but not all at once: beside the others {blocker.text}"
            return part.job.label, replace(blocker, text=text)
        rivals = [other for other in parts if other is not part]
        places = sorted(now.fits_on, key=lambda name: sum(name in rival.fits_on for rival in rivals))
        for name in places[:wanted]:
            nodes[name] = _with(nodes[name], part.shape)
    return None


def _with(node: Node, shape: Shape) -> Node:
    """A node on which one more such job runs."""
    return replace(
        node,
        cpus_allocated=node.cpus if shape.whole_nodes else node.cpus_allocated + shape.cpus,
        memory_allocated_mb=node.memory_mb if shape.all_memory else node.memory_allocated_mb + shape.memory_mb,
        gres_used=(*node.gres_used, *([Gres("gpu", shape.gpu_type, shape.gpus)] if shape.gpus else ())),
    )


# Which records of the queue a job id names. Pure; called by `hetstream why` and `hetstream jobs`.


def find_jobs(jobs: Iterable[Job], name: str) -> list[Job]:
    """Return the records that a job id names: `29`, `31` with all components in order, `31+1`, `33` with all tasks,
    `33_4`.

    Raises:
        ValueError: it has another form.
    """
    match = re.fullmatch(r"(\d+)(?:\+(\d+)|_(\d+))?", name)
    if not match:
        raise ValueError(f"job id {name!r}: must be N, N+COMPONENT or N_TASK")
    number, offset, task = int(match[1]), match[2], match[3]
    if offset is not None:
        return [job for job in jobs if job.het and (job.het.het_job_id, job.het.offset) == (number, int(offset))]
    if task is not None:
        of_array = [job for job in jobs if job.array_job_id == number]
        found = [job for job in of_array if has_task(job.array_tasks, int(task))]
        # Where indices are cut, it may be one of those that are not shown.
        return found or [job for job in of_array if CUT in job.array_tasks]
    found = [
        job
        for job in jobs
        if number in (job.job_id, job.array_job_id) or (job.het is not None and job.het.het_job_id == number)
    ]
    # Slurm lists what was submitted last first.
    return sorted(found, key=lambda job: job.het.offset if job.het else 0)
