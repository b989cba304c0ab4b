"""How an opportunistic job becomes guaranteed where it runs: (job, its placeholders, readings, time) -> steps. Pure.

Slurm starts guaranteed jobs by itself, so its own books must say that the job's GPUs are taken: small jobs of the
packer's, *placeholders*, take each a GPU of the node, until each GPU of the job is held by one of them. When the whole
gang is held, another small job on all of its nodes has their Prolog, which is root's, write the job's grants anew.
Each look begins with what is there, so whoever dies in between, the next packer goes on:

| it died                      | what it finds                            | what follows                            |
|------------------------------|------------------------------------------|-----------------------------------------|
| while it submits placeholders| some of them                             | the missing ones, or all are cancelled  |
| before the upgrade           | all GPUs held, `upgrading` noted or not  | the upgrade                             |
| between upgrade and note     | nodes that call the job guaranteed       | the note                                |
| after the note               | placeholders of a guaranteed job         | they stay as long as the job runs       |
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from hetstream.slurm_plugin.client.model import Node, Snapshot
from hetstream.slurm_plugin.client.read import release_of
from hetstream.slurm_plugin.packing.jobs import OpportunisticJob
from hetstream.slurm_plugin.packing.rules import PackingRules
from hetstream.slurm_plugin.packing.tenants import SeenGpus, is_being_upgraded, is_upgraded
from hetstream.slurm_plugin.packing.words import where

# Of a placeholder: it runs nothing but `sleep`.
PLACEHOLDER_MB = 32
# Of a node, beside one for each placeholder: for the job that upgrades. All are of a partition that could preempt the
# very job that they are for.
_UPGRADE_CPUS = 1
# slurm.conf(5), PreemptParameters: a running job whose Priority is above this number is not preempted.
_EXEMPT = re.compile(r"\bmin_exempt_priority=(\d{1,10})\b", re.ASCII)
FIRST_THAT_EXEMPTS = (23, 2)
_MOST_PRIORITY = 4_294_967_293  # the next numbers have other meanings


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A job of the packer's that keeps a GPU, or waits for one.

    Attributes:
        job_id: its number.
        spot: node and number of its GPU; None as long as it waits, or where Slurm does not tell.
        submit_s: when it was submitted.
        is_pending: it waits.
    """

    job_id: int
    spot: tuple[str, int] | None
    submit_s: float
    is_pending: bool


@dataclass(frozen=True, slots=True)
class Keep:
    """Submit so many placeholders on a node."""

    node: str
    count: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Cancel placeholders."""

    job_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Have the nodes call the job guaranteed."""


@dataclass(frozen=True, slots=True)
class Note:
    """Write down that it is."""


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Take the job away: its GPU is another guaranteed job's by now."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Try no more: for a while, or if nothing was tried yet, in this look."""

    reason: str
    rests: bool


Step = Keep | Drop | Upgrade | Note | GiveWay | GiveUp


def exempt_priority(snapshot: Snapshot) -> int | None:
    """The least Priority with which Slurm preempts a running job no more; None where it preempts whatever that is."""
    found = _EXEMPT.search(snapshot.config.get("PreemptParameters", ""))
    if found is None or release_of(snapshot.version) < FIRST_THAT_EXEMPTS:
        return None
    least = int(found[1]) + 1
    return least if 1 < least <= _MOST_PRIORITY else None


def priority_of(job: OpportunisticJob, exempt: int | None) -> dict[str, str]:
    """What is to be changed of a running job's Priority, so that Slurm preempts it exactly if it is opportunistic."""
    if exempt is None or is_being_upgraded(job) or is_upgraded(job) == (job.job.priority >= exempt):
        return {}
    return {"Priority": str(exempt if is_upgraded(job) else exempt - 1)}


def upgrade_steps(
    job: OpportunisticJob,
    held: Sequence[Placeholder],
    seen: SeenGpus,
    nodes: Mapping[str, Node],
    *,
    is_wanted: bool,
    is_upgrading: bool,
    rules: PackingRules,
) -> list[Step]:
    """What is to be done now for one job.

    Args:
        job: runs as it was placed.
        held: its placeholders.
        seen: what its nodes say.
        nodes: of Slurm, by name.
        is_wanted: it has quota, and is ready.
        is_upgrading: a job that has the nodes call it guaranteed is there.
        rules: other than the usual ones.
    """
    assert job.record.placed is not None
    place = job.record.placed.place
    by_spot = {placeholder.spot: placeholder for placeholder in held if placeholder.spot}
    missing = [spot for spot in place.gpus() if spot not in by_spot]
    pending = [placeholder for placeholder in held if placeholder.is_pending]
    upgraded = is_upgraded(job)
    # From here on there is no way back: a node may call it guaranteed, though its last reading does not say so.
    has_begun = is_being_upgraded(job) or seen.has_begun(job)
    if seen.of(job) is None:
        return []  # its nodes say nothing; and nothing is given up, because it may be guaranteed there
    if not (is_wanted or upgraded or has_begun):
        return _drop(held)
    if not missing:
        extra = [placeholder for placeholder in held if placeholder.spot not in place.gpus()]
        if extra or upgraded:
            return _drop(extra)  # their CPUs are free in the next look
        if seen.is_guaranteed(job):
            return [Note()]
        full = next((name for name in place.nodes if name not in nodes or nodes[name].cpus_free < 1), "")
        closed = next((name for name in place.nodes if name in nodes and not nodes[name].is_usable), "")
        if (full or closed) and not has_begun:
            return [*_drop(held), _no_room(full or closed, len(place.indices), rests=True)]
        return [] if is_upgrading or full else [Upgrade()]
    others = seen.others(job)
    if others and (upgraded or has_begun):
        return [GiveWay(f"Slurm gave {where(place)} to guaranteed job {others[0]}")]
    if any(seen.now_s - placeholder.submit_s > rules.keep_s for placeholder in pending):
        return [
            *_drop(pending if upgraded or has_begun else held),
            _no_room(missing[0][0], len(place.indices), rests=True),
        ]
    if pending or any(placeholder.spot is None for placeholder in held):
        return []  # until it is known which GPU each has
    return _keep(held, missing, nodes, stays=upgraded or has_begun)


def _keep(
    held: Sequence[Placeholder], missing: Sequence[tuple[str, int]], nodes: Mapping[str, Node], *, stays: bool
) -> list[Step]:
    """Submit placeholders: as many on a node as it has GPUs free, since Slurm chooses which of them each gets.

    Args:
        held: those that run.
        missing: GPUs that none of them has.
        nodes: by name.
        stays: the job is guaranteed, or may be, so what is held stays.
    """
    steps: list[Step] = []
    for name, count in Counter(node for node, _ in missing).items():
        node = nodes.get(name)
        room = 0
        if node is not None and node.is_usable and (stays or node.cpus_free >= count + _UPGRADE_CPUS):
            room = min(node.gpus_free(), node.cpus_free, node.memory_free_mb // PLACEHOLDER_MB)
        if room < 1:
            return [*([] if stays else _drop(held)), _no_room(name, count, rests=bool(held))]
        steps.append(Keep(name, room))
    return steps


def _no_room(node: str, gpus: int, *, rests: bool) -> GiveUp:
    return GiveUp(
        f"{node} lacks a GPU or {gpus + _UPGRADE_CPUS} CPUs for the jobs that keep GPUs and upgrade it, or takes none",
        rests,
    )


def _drop(placeholders: Iterable[Placeholder]) -> list[Step]:
    found = tuple(placeholder.job_id for placeholder in placeholders)
    return [Drop(found)] if found else []
