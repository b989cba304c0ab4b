"""Why a heterogeneous job waits: (snapshot, its components one by one) -> what all wait for. Pure; for `hetstream why`.

Slurm names a reason for each component, and starts all or none: what one of them waits for, all do. Component 0 often
waits for Resources although it has room, and others have a word that is long out of date.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hetstream.slurm_plugin.client.model import Gres, Job, Node, Snapshot
from hetstream.slurm_plugin.insight.lacking import NOT_LOOKED_AT, Blocker
from hetstream.slurm_plugin.insight.room import COMPLETING, OTHER_USERS
from hetstream.slurm_plugin.insight.shapes import Shape
from hetstream.slurm_plugin.insight.why import HIDDEN, NODE_COUNT, SOCKETS, Explainer, Explanation

# What nothing changes comes first, then what somebody must do or end, then what is not free; a turn comes last.
_NEVER, _TURNS = ("size",), ("backfill", "priority", NOT_LOOKED_AT, NODE_COUNT, SOCKETS, HIDDEN, "scheduler")
_FREE = ("GPUs", "CPUs", "memory", "gang", "whole nodes", OTHER_USERS, COMPLETING, "nodes")


def explain_together(snapshot: Snapshot, parts: Sequence[Explanation]) -> tuple[tuple[str, Blocker], ...]:
    """What a pending heterogeneous job waits for, the true reason first, each once and with the component that has it.

    Args:
        snapshot: the cluster.
        parts: its components, in their order.
    """
    found: dict[tuple[str, str], tuple[str, Blocker]] = {}
    for part in parts:
        for blocker in part.blockers:
            if blocker.kind != "component":  # another one that waits is named itself
                found.setdefault((blocker.kind, blocker.text), (part.job.label, blocker))
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
        cpus_allocated=node.cpus_allocated + shape.cpus,
        memory_allocated_mb=node.memory_mb if shape.all_memory else node.memory_allocated_mb + shape.memory_mb,
        gres_used=(*node.gres_used, *([Gres("gpu", shape.gpu_type, shape.gpus)] if shape.gpus else ())),
    )
