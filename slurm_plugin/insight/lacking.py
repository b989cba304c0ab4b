"""What a job lacks, in words: (where it has room, what it asks for) -> blockers. Pure; called by `why.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hetstream.slurm_plugin.client.hostlist import compress
from hetstream.slurm_plugin.client.model import RESOURCE_REASONS, Job, Node
from hetstream.slurm_plugin.insight.node_table import Mask
from hetstream.slurm_plugin.insight.room import COMPLETING, OTHER_USERS, Free, Room
from hetstream.slurm_plugin.insight.shapes import RESOURCES, Least, Shape, gres_words, is_free
from hetstream.slurm_plugin.render.report import duration

# Slurm finds no room, and nothing that is looked at here is lacking.
NOT_LOOKED_AT = "not looked at"


@dataclass(frozen=True)
class Blocker:
    """One thing that a job waits for.

    Attributes:
        kind: `GPUs`, `CPUs`, `memory`, `gang`, `size`, `backfill`, `priority`, `held`, `dependency`, `limit`, ...;
            `not looked at` where Slurm finds no room and hetstream does.
        text: in words.
        next_step: what to do or look at; empty if there is nothing but to wait.
    """

    kind: str
    text: str
    next_step: str = ""


def out_of_use(room: Room, job: Job, out: Sequence[Node], reserved: Sequence[Node]) -> Blocker:
    """Nodes that could run it are out of use, or reserved, and the others are fewer than it needs."""
    asks, eligible, possible = _asks(room.shape) + together(job), count(room.eligible), count(room.possible)
    others = [f"{compress(node.name for node in out)} is out of use"] if out else []
    whose = f"not in its reservation {job.reservation}" if job.reservation else "reserved for others"
    others += [f"{compress(node.name for node in reserved)} is {whose}"] if reserved else []
    others = others or ["other nodes of its partitions are not shown: powered down, or hidden from you"]
    return Blocker(
        "nodes",
        f"it needs {room.shape.num_nodes} node(s) with {asks}; {possible} of {eligible} in use could give that, and "
        f"{' and '.join(others)}",
        "; ".join([*(["sinfo -R"] if out else []), *(["scontrol show reservation"] if reserved else [])]),
    )


def together(job: Job) -> str:
    """What a job wants of its nodes together; empty if it takes any."""
    if job.num_nodes < 2:
        return ""
    parts = [f"{compress(job.required_nodes)} among them"] if job.required_nodes else []
    parts += ["side by side (--contiguous)"] if job.is_contiguous else []
    parts += [f"alike in {job.features}"] if "[" in job.features else []
    return "".join(f", {part}" for part in parts)


def too_large(least: Least, floor: Room, job: Job) -> Blocker:
    """It can never run on the nodes that it may use, be they empty, however Slurm divides it."""
    eligible, possible = count(floor.eligible), count(floor.possible)
    asks = f"{least.num_nodes} node(s) with {_asks(floor.shape)}{together(job)}"
    text = f"it needs {asks}; {possible} of {eligible} that it may use have that at all"
    if floor.is_enough(floor.possible):
        most = f"{min(least.max_nodes, possible)} of them" if least.max_nodes else "all of them"
        text = f"it needs {_all_of(least)}; of {possible} node(s) that it may use {most} together have less"
    return Blocker("size", text, "ask for less, or for another partition: hetstream frag")


def lack_together(kind: str, shape: Shape, most: int | None, least: Least, floor: Room) -> Blocker:
    """What is short where no even share of it has room.

    Args:
        kind: the resource.
        shape: its even share.
        most: how many nodes it may get; None where there is no limit.
        least: what it needs at least.
        floor: room for `least.of_node`.
    """
    where = f"about {shape.num_nodes} node(s)" if shape.is_guess else f"{shape.num_nodes} node(s)"
    text = f"it needs {_all_of(least)} on {where}, divided as Slurm likes; so much is not free on so many"
    if most is None:
        text = f"it needs {_all_of(least)}, on as many nodes and divided as Slurm likes; so much is not free"
    free = ", ".join(_free_words(free) for free in floor.free_in_all())
    return Blocker(
        kind, f"{text}: of {count(floor.possible)} node(s) that could give a part{_kept(floor)}, free in all: {free}"
    )


def lack_several(room: Room, at_once: str) -> Blocker:
    """Several resources are short, and more of none alone would do: what is free of each, the scarcest first."""
    scarcest_first = sorted(room.free_in_all(), key=lambda free: free.num_enough)
    free = ", ".join(
        _free_words(free) + (f" (enough on {free.num_enough})" if free.amount else "") for free in scarcest_first
    )
    apart = ", but not enough of all on the same node(s)" if room.is_enough_apart else ""
    where = f"of {count(room.possible)} node(s) that could give that{_kept(room)}"
    return Blocker(
        room.scarcest, f"it needs {_asks(room.shape)} on a node{at_once}; {where}, free in all: {free}{apart}"
    )


def _kept(room: Room) -> str:
    """Of the nodes that could run a job those that others have, or where jobs complete; empty if none."""
    others = f", and others have {room.num_kept} for themselves" if room.num_kept else ""
    return others + (f", and on {room.num_completing} ended jobs still complete" if room.num_completing else "")


def _free_words(free: Free) -> str:
    unit = "MB" if free.what == "memory" else free.what
    return f"{free.amount:,} {unit} on {free.num_nodes}" if free.amount else f"no {free.what}"


def _asks(shape: Shape) -> str:
    typed = f" {shape.gpu_type}" if shape.gpu_type else ""
    parts = [f"{shape.gpus}{typed} GPU(s)"] if shape.gpus else []
    disk = [f"{shape.tmp_disk_mb:,} MB of disk (--tmp)"] if shape.tmp_disk_mb else []
    return ", ".join([*parts, *map(gres_words, shape.gres), f"{shape.cpus} CPU(s)", memory_words(shape), *disk])


def memory_words(shape: Shape) -> str:
    """What it asks of a node's memory."""
    return "all memory" if shape.all_memory else f"{shape.memory_mb:,} MB"


def _all_of(least: Least) -> str:
    memory = [f"{least.memory_mb:,} MB"] if least.memory_mb else []
    memory = ["all memory of each node"] if least.of_node.all_memory else memory
    gpus = [f"{least.gpus} GPU(s)"] if least.gpus else []
    return ", ".join([*gpus, *map(gres_words, least.gres), f"{least.cpus} CPU(s)", *memory])


def kept_for_others(job: Job, nodes: Sequence[Node]) -> Blocker:
    """Nodes that the jobs of others have for themselves, or that it wants for itself."""
    names, what, how = compress(node.name for node in nodes), "user", "--exclusive=user, ExclusiveUser=YES"
    if job.exclusive == "MCS" or any(node.mcs_label for node in nodes):
        what, how = "MCS label", "--exclusive=mcs"
    if job.exclusive in ("USER", "MCS"):
        text = f"it shares nodes with no job of another {what}, and such jobs are on {names}"
    else:
        text = f"jobs of another {what} share {names} with no others ({how})"
    return Blocker(OTHER_USERS, text, "squeue -w " + names)


def still_completing(nodes: Sequence[Node]) -> Blocker:
    """Nodes with room on which jobs that have ended are not gone."""
    names = compress(node.name for node in nodes)
    text = f"{names} has room, and Slurm starts nothing there before jobs that have ended are gone (processes, Epilog)"
    return Blocker(COMPLETING, text, f"squeue --states=COMPLETING -w {names}")


def at_once(job: Job, room: Room) -> str:
    """On how many nodes it needs what each of them must have; empty of one."""
    shape = room.shape
    if shape.num_nodes < 2:
        # Whether --nodes=1 was said is not to be known of all releases.
        is_on_one = job.max_nodes == 1 or min(job.num_tasks, count(room.eligible)) < 2 or not is_free(job, shape)
        return "" if is_on_one else " if it gets one alone"
    even = " if it is divided evenly, which Slurm need not do" if is_free(job, shape) else ""
    return f", on {shape.num_nodes} at once{even}"


def lack(resource: str, room: Room, at_once: str) -> Blocker:
    """One resource is short on nodes that have enough of the others."""
    shape = room.shape
    beside = [name for name in RESOURCES if name != resource and (name != "GPUs" or shape.gpus)]
    asked = ", ".join(gres_words(gres) for gres in shape.gres if (gres.name == "gpu") == (resource == "GPUs"))
    if asked and resource in ("GPUs", "GRES"):
        others = count(room.enough_but(resource))
        where = f"of {others} node(s) with enough {' and '.join(beside)} too few have them free"
        return Blocker(resource, f"it needs {asked} on a node{at_once}; {where}")
    if resource == "memory" and shape.all_memory:
        mask = room.enough_but(resource)
        where = f"of {count(mask)} node(s) with enough {' and '.join(beside)} {count(mask & room.enough[resource])}"
        return Blocker(resource, f"it needs all memory of a node (--mem=0){at_once}; {where} have all of it free")
    needed, most, name, num_others = room.most_free(resource)
    unit = " MB of memory" if resource == "memory" else f" {resource}"
    where = f"{num_others} node(s) with enough {' and '.join(beside)}"
    whole = f" ({shape.cpus:,} and what is beside them)" if needed > shape.cpus and resource == "CPUs" else ""
    text = f"it needs {needed:,}{unit}{whole} on a node{at_once}; of {where} the most free is {most:,} ({name})"
    if most >= needed:  # on too few nodes
        have = count(room.enough_but(resource) & room.enough[resource])
        text = f"it needs {needed:,}{unit}{whole} on a node{at_once}; of {where} {have} have so much free"
    return Blocker(resource, text)


def count(mask: Mask) -> int:
    """How many nodes."""
    return int(np.count_nonzero(mask))


def found_none(job: Job, now_s: float) -> Blocker:
    """Slurm finds no room, and nothing that is looked at here is lacking."""
    who, when, unless = "Slurm", "", ""
    if job.het is not None:
        who, unless = "Slurm's backfill scheduler", ", unless it was freed since backfill last looked"
    elif job.last_sched_eval_s is not None:
        when = f" when it last looked, {duration(max(0.0, now_s - job.last_sched_eval_s))} ago"
        unless = ", unless it was freed since"
    said = f" (Slurm says: {job.reason})" if job.reason not in RESOURCE_REASONS else ""
    planned = ""
    if job.start_s is not None and job.start_s > now_s:
        planned = f", and plans its start in {duration(job.start_s - now_s)}"
    return Blocker(
        NOT_LOOKED_AT,
        f"no job is ahead, and all that is looked at here has room, but {who} found none{when}{planned}: for something "
        f"that is not looked at here{said}{unless}",
        f"scontrol show job {job.job_id}; scontrol show node",
    )
