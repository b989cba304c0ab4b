"""What a job lacks, in words: (where it has room, what it asks for) -> blockers. Pure; called by `why.py`."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from hetstream.base.text import count_words, duration
from hetstream.slurm_plugin.client.model import RESOURCE_REASONS, SHARING, Job, Node, Snapshot
from hetstream.slurm_plugin.client.slurm_units import compress
from hetstream.slurm_plugin.insight.node_table import (
    RESOURCES,
    Counts,
    Least,
    Mask,
    NodeTable,
    Shape,
    gres_words,
    is_free,
)

# Where a job could run, and where it has room now: (nodes as arrays, what it asks for) -> masks. No I/O.
#
# Made by `why.py` for each kind of request. Two jobs that ask alike have the same room, whenever they were submitted.

# Nodes that others have for themselves, or that it wants without others: `--exclusive=user`, ExclusiveUser=YES, labels.
OTHER_USERS = "other users"
# Nodes on which jobs that have ended still complete.
COMPLETING = "completing"
# GRES that are no GPUs, and types of GPUs where a job wants several, are told as they are.
_ALL = (*RESOURCES, "GRES", OTHER_USERS, COMPLETING)


class ReservedLater(NamedTuple):
    """What reservations to come keep: all of some nodes, some CPUs of others."""

    nodes: Mask
    cpus: Counts


class Free(NamedTuple):
    """What of one resource is free on the nodes that could run a job if they were empty.

    Attributes:
        what: the resource, such as `CPUs`, `a100 GPUs` or `shard:2`.
        amount: on all of them together.
        num_nodes: on how many.
        num_enough: on how many of these as much as the job asks of a node.
    """

    what: str
    amount: int
    num_nodes: int
    num_enough: int


class FeasibleNodes:
    """The nodes of a table, for one request.

    Args:
        table: nodes.
        shape: what each node must give.
        job: where it may run.
        up: the partitions in which jobs start; None asks for none of it.
        kept: nodes, and CPUs of others, that reservations keep from the job: they begin before it would have to end.

    Attributes:
        shape: as given.
        eligible: nodes that it may use, whatever they have.
        possible: of those the ones that could give what it asks for if they were empty.
        reserved: nodes that could give it, too, and are reserved for others.
        free: of each resource what a node could give now.
        enough: of each resource that it asks for, whether that is enough.
        fits: where it has room now.
        needs_whole_nodes: it gets whole nodes only, and there are not enough idle ones for any other reason to matter.
    """

    def __init__(
        self, table: NodeTable, shape: Shape, job: Job, up: Collection[str] | None, kept: ReservedLater | None = None
    ) -> None:
        names = job.partitions if up is None else tuple(name for name in job.partitions if name in up)
        self.shape, self._names = shape, names
        self._table = table
        self._wanted = shape.num_nodes
        self._is_contiguous = job.is_contiguous and self._wanted > 1
        self._named = table.named(job.required_nodes)
        self._has_named = np.count_nonzero(self._named) == len(set(job.required_nodes))
        anywhere = table.everywhere(names) & table.asked_for(shape)
        mine = table.eligible(names, job.reservation)
        self.needs_whole_nodes = shape.whole_nodes or table.takes_whole_nodes(names)
        if kept is not None:
            mine = mine & ~(kept.nodes | (kept.cpus > 0) if self.needs_whole_nodes else kept.nodes)
        self.eligible: Mask = anywhere & mine
        cpus, cpus_free = table.cpus_for(names, shape.whole_nodes)
        if not shape.gpus and not any(gres.name in ("gpu", *SHARING) for gres in shape.gres):
            cpus, cpus_free = table.without_gpu_cores(cpus, cpus_free)
        if kept is not None:
            cpus_free = np.maximum(0, cpus_free - kept.cpus)
        self._cpus = cpus
        self.free: dict[str, Counts] = {"CPUs": cpus_free, "memory": table.memory_free_mb}
        needed, needed_mb = table.needed(shape)
        could = (cpus >= needed) & (table.memory_mb >= needed_mb) & table.laid_out(shape)
        self._needed = {"CPUs": needed, "memory": needed_mb, "GPUs": np.full_like(needed, shape.gpus)}
        self.enough: dict[str, Mask] = {}
        if shape.gpus:
            devices, self.free["GPUs"] = table.devices(shape.gpu_type)
            could = could & (devices >= shape.gpus)
            self.enough["GPUs"] = self.free["GPUs"] >= shape.gpus
        if shape.cpus:
            self.enough["CPUs"] = cpus_free >= needed
        if shape.memory_mb or shape.all_memory:
            self.enough["memory"] = table.memory_free_mb >= needed_mb
        for resource, count, had, free in table.gres_of(shape):
            could = could & (had >= count)
            self.enough[resource] = self.enough.get(resource, np.ones_like(could)) & (free >= count)
        if (others := table.kept_from(job)).any():
            self.enough[OTHER_USERS] = ~others
        if table.completing.any():
            self.enough[COMPLETING] = ~table.completing
        self.possible: Mask = self.eligible & could
        self.reserved: Mask = anywhere & ~mine & could
        self.fits: Mask = self.enough_but("")

    def enough_but(self, resource: str) -> Mask:
        """Return where it has room but for one resource, of which there may be too little."""
        mask = self.possible
        for name, enough in self.enough.items():
            if name != resource:
                mask = mask & enough
        return mask

    @property
    def fits_for_certain(self) -> Mask:
        """Of `fits` where the sockets that it asks for are free, wherever the busy cores are."""
        return self.fits & self._table.has_sockets_free(self.shape, self.free["CPUs"])

    def is_enough(self, mask: Mask) -> bool:
        """Return whether these nodes would do: as many as the job wants, with all that it names, and alike or side by
        side.
        """
        return self._has_named and any(
            np.count_nonzero(alike) >= self._wanted
            and not (self._named & ~alike).any()
            and (not self._is_contiguous or len(self._table.side_by_side(alike, self._wanted)))
            for alike in self._in_one_way(mask)
        )

    def chosen(self) -> Mask:
        """As many nodes with room as the job wants, with all that it names, alike or side by side; none if too few."""
        for alike in self._in_one_way(self.fits):
            places = np.flatnonzero(alike)
            if len(places) < self._wanted or (self._named & ~alike).any():
                continue
            if self._is_contiguous:
                places = self._table.side_by_side(alike, self._wanted)
            else:
                places = places[np.argsort(~self._named[places], kind="stable")]
            if len(places):
                return self._table.at(places[: self._wanted].tolist())
        return np.zeros_like(self.fits)

    def _in_one_way(self, mask: Mask) -> list[Mask]:
        """Of these nodes those that a job may have at once: of one partition, and with the same features."""
        places = [mask & self._table.everywhere([name]) for name in self._names] if len(self._names) > 1 else [mask]
        choices = self._table.alike(self.shape.features)
        return [place & choice for place in places for choice in choices] if choices else places

    def short_alone(self) -> tuple[str, ...]:
        """Return the resources of which more of that one alone would let it start on so many nodes.

        GPUs are named last: where more of something else would do, it is that which keeps free GPUs from being used.
        """
        ordered = sorted(_ALL, key=lambda name: name == "GPUs")
        return tuple(name for name in ordered if name in self.enough and self.is_enough(self.enough_but(name)))

    def short(self) -> tuple[str, ...]:
        """Return the resources of which some node has too little."""
        return tuple(name for name in _ALL if name in self.enough and (self.possible & ~self.enough[name]).any())

    @property
    def scarcest(self) -> str:
        """Of the resources of which some node has too little the one that the fewest nodes have enough of.

        Nodes on which jobs complete alone end that by themselves.
        """
        short = [name for name in self.short() if name != COMPLETING]
        return min(short, key=lambda name: np.count_nonzero(self.possible & self.enough[name]), default="CPUs")

    @property
    def is_enough_apart(self) -> bool:
        """Whether enough nodes have enough of each resource, and not the same nodes of all."""
        return all(self.is_enough(self.possible & enough) for enough in self.enough.values())

    @property
    def num_kept(self) -> int:
        """How many nodes that could run it others have for themselves; see `OTHER_USERS`."""
        return int(np.count_nonzero(self.possible & ~self.enough.get(OTHER_USERS, self.possible)))

    @property
    def num_completing(self) -> int:
        """Of the others on how many jobs that have ended still complete."""
        others = self.possible & self.enough.get(OTHER_USERS, self.possible)
        return int(np.count_nonzero(others & ~self.enough.get(COMPLETING, self.possible)))

    def free_in_all(self) -> list[Free]:
        """Return what is free of each resource that it asks for, on nodes where Slurm would start it."""
        mine = self.possible & self.enough.get(OTHER_USERS, self.possible) & self.enough.get(COMPLETING, self.possible)
        kind = f"{self.shape.gpu_type} GPUs" if self.shape.gpu_type else "GPUs"
        wanted = [
            (kind if name == "GPUs" else name, self.free[name], self.free[name] >= self._needed[name])
            for name in RESOURCES
            if name in self.enough and name in self.free
        ]
        for gres, (_, number, _, free) in zip(self.shape.gres, self._table.gres_of(self.shape), strict=True):
            wanted.append((gres_words(gres), free, free >= number))
        return [
            Free(what, int(free[mine].sum()), int((free[mine] > 0).sum()), int(enough[mine].sum()))
            for what, free, enough in wanted
        ]

    def lacks_together(self, least: Least) -> tuple[str, ...]:
        """Return what so many of these nodes as the job may have do not have together, if they were empty.

        The room is one for `least.of_node`. Nothing said means that they could do, in some division or other.
        """
        wanted = self._together(least, now=False)
        found = [kind for kind, number, has in wanted if _most_of(has, self.possible, least.max_nodes) < number]
        return tuple(dict.fromkeys(found))

    def lacks_together_now(self, least: Least, most: int | None) -> tuple[str, ...]:
        """Return what is too little of what is free on them now; see `most_nodes_of`.

        Nothing said means that the nodes with most of one thing have enough of all.
        """
        if self._is_contiguous or not self.is_enough(self.fits):
            return (self.scarcest,)
        wanted = self._together(least, now=True)
        for mask in self._in_one_way(self.fits):
            for _, _, order in wanted:
                chosen = np.flatnonzero(mask)
                chosen = chosen[np.argsort(-order[chosen], kind="stable")][:most]
                named = not (self._named[np.setdiff1d(np.arange(len(mask)), chosen)]).any()
                if named and all(has[chosen].sum() >= number for _, number, has in wanted):
                    return ()
        found = [kind for kind, number, has in wanted if _most_of(has, self.fits, most) < number]
        return tuple(dict.fromkeys(found))[:1] or ("CPUs",)

    def _together(self, least: Least, *, now: bool) -> list[tuple[str, int, Counts]]:
        """Of all that a job needs on its nodes together: the resource, how much, and what each node has or has free."""
        shape, table = self.shape, self._table
        threads = np.minimum(table.cpus_per_core, shape.layout[2] or table.cpus_per_core)
        cpus = (self.free["CPUs"] if now else self._cpus) // table.cpus_per_core * threads
        cpus = np.where(threads < table.cpus_per_core, cpus, self.free["CPUs"] if now else self._cpus)
        memory_mb = table.memory_free_mb if now else table.memory_mb
        tasks = cpus // max(1, shape.cpus)
        if least.task_memory_mb:
            tasks = np.minimum(tasks, memory_mb // least.task_memory_mb)
        for gres in least.task_gres:
            counts = table.devices(gres.type) if gres.name == "gpu" else table.gres(gres.name, gres.type)
            tasks = np.minimum(tasks, counts[now] // gres.count)
        if now and (per_node := shape.min_cpus // max(1, shape.cpus)) > 1:
            # As --ntasks-per-node says it: so many at the most, and where there is no memory for as many, none.
            tasks = np.where(memory_mb < per_node * least.task_memory_mb, 0, np.minimum(tasks, per_node))
        if now and least.tasks_per_core:
            tasks = np.minimum(tasks, cpus // table.cpus_per_core * least.tasks_per_core)
        wanted = [("CPUs", least.cpus, cpus), ("CPUs", least.tasks, tasks), ("memory", least.memory_mb, memory_mb)]
        wanted.append(("GPUs", least.gpus, table.devices("")[now]))
        for gres in least.gres:
            counts = table.devices(gres.type) if gres.name == "gpu" else table.gres(gres.name, gres.type)
            wanted.append(("GPUs" if gres.name == "gpu" else "GRES", gres.count, counts[now]))
        return wanted

    def most_free(self, resource: str) -> tuple[int, int, str, int]:
        """Of the nodes with enough of all other resources the one with most free of this.

        Where the job names nodes that have no room, of these.

        Returns:
            What it would give to the job, what is free there, its name, and how many such nodes there are.
        """
        others = self.enough_but(resource)
        full = self._named & ~self.fits
        places = np.flatnonzero(others & full if (others & full).any() else others)
        best = int(places[np.argmax(self.free[resource][places])])
        free, needed = int(self.free[resource][best]), int(self._needed[resource][best])
        return needed, free, self._table.nodes[best].name, len(places)


def _most_of(has: Counts, where: Mask, most: int | None) -> int:
    """What so many of these nodes have together, at the most."""
    return int(np.sort(has[where])[::-1][:most].sum())


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


def out_of_use(room: FeasibleNodes, job: Job, out: Sequence[Node], reserved: Sequence[Node]) -> Blocker:
    """Return nodes that could run it are out of use, or reserved, and the others are fewer than it needs."""
    asks, eligible, possible = _asks(room.shape) + together(job), count(room.eligible), count(room.possible)
    others = [f"{compress(node.name for node in out)} is out of use"] if out else []
    whose = f"not in its reservation {job.reservation}" if job.reservation else "reserved for others"
    others += [f"{compress(node.name for node in reserved)} is {whose}"] if reserved else []
    others = others or ["other nodes of its partitions are not shown: powered down, or hidden from you"]
    return Blocker(
        "nodes",
        f"it needs {count_words(room.shape.num_nodes, 'node')} with {asks}; {possible} of {eligible} in use could "
        f"give that, and {' and '.join(others)}",
        "; ".join([*(["sinfo -R"] if out else []), *(["scontrol show reservation"] if reserved else [])]),
    )


def together(job: Job) -> str:
    """Return what a job wants of its nodes together; empty if it takes any."""
    if job.num_nodes < 2:
        return ""
    parts = [f"{compress(job.required_nodes)} among them"] if job.required_nodes else []
    parts += ["side by side (--contiguous)"] if job.is_contiguous else []
    parts += [f"alike in {job.features}"] if "[" in job.features else []
    return "".join(f", {part}" for part in parts)


def too_large(least: Least, floor: FeasibleNodes, job: Job) -> Blocker:
    """It can never run on the nodes that it may use, be they empty, however Slurm divides it."""
    eligible, possible = count(floor.eligible), count(floor.possible)
    asks = f"{count_words(least.num_nodes, 'node')} with {_asks(floor.shape)}{together(job)}"
    text = f"it needs {asks}; {possible} of {eligible} that it may use have that at all"
    if floor.is_enough(floor.possible):
        most = f"{min(least.max_nodes, possible)} of them" if least.max_nodes else "all of them"
        text = (
            f"it needs {_all_of(least)}; of {count_words(possible, 'node')} that it may use {most} together have less"
        )
    return Blocker("size", text, "ask for less, or for another partition: hetstream frag")


def lack_together(kind: str, shape: Shape, most: int | None, least: Least, floor: FeasibleNodes) -> Blocker:
    """Return what is short where no even share of it has room.

    Args:
        kind: the resource.
        shape: its even share.
        most: how many nodes it may get; None where there is no limit.
        least: what it needs at least.
        floor: room for `least.of_node`.
    """
    where = f"{'about ' if shape.is_guess else ''}{count_words(shape.num_nodes, 'node')}"
    text = f"it needs {_all_of(least)} on {where}, divided as Slurm likes; so much is not free on so many"
    if most is None:
        text = f"it needs {_all_of(least)}, on as many nodes and divided as Slurm likes; so much is not free"
    free = ", ".join(_free_words(free) for free in floor.free_in_all())
    return Blocker(
        kind,
        f"{text}: of {count_words(count(floor.possible), 'node')} that could give a part{_kept(floor)}, free in all: "
        f"{free}",
    )


def lack_several(room: FeasibleNodes, at_once: str) -> Blocker:
    """Several resources are short, and more of none alone would do: what is free of each, the scarcest first."""
    scarcest_first = sorted(room.free_in_all(), key=lambda free: free.num_enough)
    free = ", ".join(
        _free_words(free) + (f" (enough on {free.num_enough})" if free.amount else "") for free in scarcest_first
    )
    apart = ", but not enough of all on the same node" if room.is_enough_apart else ""
    where = f"of {count_words(count(room.possible), 'node')} that could give that{_kept(room)}"
    return Blocker(
        room.scarcest, f"it needs {_asks(room.shape)} on a node{at_once}; {where}, free in all: {free}{apart}"
    )


def _kept(room: FeasibleNodes) -> str:
    """Of the nodes that could run a job those that others have, or where jobs complete; empty if none."""
    others = f", and others have {room.num_kept} for themselves" if room.num_kept else ""
    return others + (f", and on {room.num_completing} ended jobs still complete" if room.num_completing else "")


def _free_words(free: Free) -> str:
    unit = "MB" if free.what == "memory" else free.what
    return f"{free.amount:,} {unit} on {free.num_nodes}" if free.amount else f"no {free.what}"


def _asks(shape: Shape) -> str:
    parts = [count_words(shape.gpus, f"{shape.gpu_type or ''} GPU".lstrip())] if shape.gpus else []
    disk = [f"{shape.tmp_disk_mb:,} MB of disk (--tmp)"] if shape.tmp_disk_mb else []
    return ", ".join([*parts, *map(gres_words, shape.gres), count_words(shape.cpus, "CPU"), memory_words(shape), *disk])


def memory_words(shape: Shape) -> str:
    """Return what it asks of a node's memory."""
    return "all memory" if shape.all_memory else f"{shape.memory_mb:,} MB"


def _all_of(least: Least) -> str:
    memory = [f"{least.memory_mb:,} MB"] if least.memory_mb else []
    memory = ["all memory of each node"] if least.of_node.all_memory else memory
    gpus = [count_words(least.gpus, "GPU")] if least.gpus else []
    return ", ".join([*gpus, *map(gres_words, least.gres), count_words(least.cpus, "CPU"), *memory])


def kept_for_others(job: Job, nodes: Sequence[Node]) -> Blocker:
    """Return nodes that the jobs of others have for themselves, or that it wants for itself."""
    names, what, how = compress(node.name for node in nodes), "user", "--exclusive=user, ExclusiveUser=YES"
    if job.exclusive == "MCS" or any(node.mcs_label for node in nodes):
        what, how = "MCS label", "--exclusive=mcs"
    if job.exclusive in ("USER", "MCS"):
        text = f"it shares nodes with no job of another {what}, and such jobs are on {names}"
    else:
        text = f"jobs of another {what} share {names} with no others ({how})"
    return Blocker(OTHER_USERS, text, "squeue -w " + names)


def still_completing(nodes: Sequence[Node]) -> Blocker:
    """Return nodes with room on which jobs that have ended are not gone."""
    names = compress(node.name for node in nodes)
    text = f"{names} has room, and Slurm starts nothing there before jobs that have ended are gone (processes, Epilog)"
    return Blocker(COMPLETING, text, f"squeue --states=COMPLETING -w {names}")


def at_once(job: Job, room: FeasibleNodes) -> str:
    """On how many nodes it needs what each of them must have; empty of one."""
    shape = room.shape
    if shape.num_nodes < 2:
        # Whether --nodes=1 was said is not to be known of all releases.
        is_on_one = job.max_nodes == 1 or min(job.num_tasks, count(room.eligible)) < 2 or not is_free(job, shape)
        return "" if is_on_one else " if it gets one alone"
    even = " if it is divided evenly, which Slurm need not do" if is_free(job, shape) else ""
    return f", on {shape.num_nodes} at once{even}"


def lack(resource: str, room: FeasibleNodes, at_once: str) -> Blocker:
    """Return the nodes where one resource is short and there is enough of the others."""
    shape = room.shape
    beside = [name for name in RESOURCES if name != resource and (name != "GPUs" or shape.gpus)]
    asked = ", ".join(gres_words(gres) for gres in shape.gres if (gres.name == "gpu") == (resource == "GPUs"))
    if asked and resource in ("GPUs", "GRES"):
        others = count(room.enough_but(resource))
        where = f"of {count_words(others, 'node')} with enough {' and '.join(beside)} too few have them free"
        return Blocker(resource, f"it needs {asked} on a node{at_once}; {where}")
    if resource == "memory" and shape.all_memory:
        mask = room.enough_but(resource)
        where = (
            f"of {count_words(count(mask), 'node')} with enough {' and '.join(beside)} "
            f"{count(mask & room.enough[resource])}"
        )
        return Blocker(resource, f"it needs all memory of a node (--mem=0){at_once}; {where} have all of it free")
    needed, most, name, num_others = room.most_free(resource)
    unit = " MB of memory" if resource == "memory" else f" {resource}"
    where = f"{count_words(num_others, 'node')} with enough {' and '.join(beside)}"
    whole = f" ({shape.cpus:,} and what is beside them)" if needed > shape.cpus and resource == "CPUs" else ""
    text = f"it needs {needed:,}{unit}{whole} on a node{at_once}; of {where} the most free is {most:,} ({name})"
    if most >= needed:  # on too few nodes
        have = count(room.enough_but(resource) & room.enough[resource])
        text = f"it needs {needed:,}{unit}{whole} on a node{at_once}; of {where} so much is free on {have}"
    return Blocker(resource, text)


def count(mask: Mask) -> int:
    """Return how many nodes."""
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


# Slurm's reasons for which a job is pending, in words, with the next step. Pure; called by `why.py`.
#
# The names are those of Slurm's table of reasons (`job_state_reason.c`), from 22.05 to 26.05, and the texts that
# slurmctld writes in their place. `is_admitted` in `client/model.py` knows those about resources; of every other
# one more free CPUs or GPUs are no help, and one that is not known here is told in Slurm's own words.

# Reason, as a pattern of its beginning -> kind, in words, the next step. {id}, {array}, {dependency}, {reason}, {user},
# {account}, {qos}, {partition}, {reservation} and {begin} are filled in.
_SHOW_JOB, _LIMIT = "scontrol show job {id}", "scontrol update JobId={id} TimeLimit=T"
_SHOW_QOS, _SHOW_ASSOC = "sacctmgr show qos {qos}", "sacctmgr show assoc user={user} account={account}"
_OF_QOS, _OF_ASSOC = "of its QOS ({reason})", "of its account or user ({reason})"
# Limits of several jobs together. Slurm's reason is the same where one job alone asks for more.
_USER, _ACCOUNT, _QOS, _ASSOC = r"QOSMax\w*PerUser", r"Max\w*PerAccount", "QOS", "Assoc"
_OR_ALONE, _ENDS = ", or it asks for more than the limit by itself", "it starts when they end: "
_ALONE = "no job runs that counts with it ({reason}): it asks for more than the limit by itself"
_PATTERNS = (
    # An operator holds it so with `scontrol uhold`, and slurmctld itself where it cannot launch it.
    (r"JobHeldUser", "held", "it is held, by its owner or so that its owner can release it", "scontrol release {id}"),
    (r"job_requeued_in_held_state", "held",
     "it was requeued to be held (scontrol requeuehold, or RequeueExitHold of its exit code)",
     "look at its output, then: scontrol release {id}"),
    (r"job_requeued_in_special_exit_state", "held",
     "it was requeued to be held in SPECIAL_EXIT (scontrol requeuehold State=SpecialExit, or RequeueExitHold)",
     "look at its output, then: scontrol release {id}"),
    # slurmctld itself gives this reason too, such as to a job with which its scheduler makes no progress.
    (r"JobHeldAdmin", "held", "an operator holds it, or slurmctld itself, whose log then says so",
     "ask an operator for: scontrol release {id}"),
    # Its owner cannot release it: update_job in job_mgr.c.
    (r"JobHoldMaxRequeue|launch_failure_limit_exceeded", "held",
     "slurmctld holds it: its launch failed, and it was requeued, as often as Slurm allows (max_batch_requeue)",
     "look at its output and slurmd's log, then ask an operator for: scontrol release {id}"),
    (r"(launch|user_env_retrieval)_failed_requeued_held|JobLaunchFailure", "held", "its launch failed",
     "look at slurmd's log, then: scontrol release {id}"),
    (r"DependencyNeverSatisfied", "dependency", "it waits for {dependency}, which cannot come true", "scancel {id}"),
    (r"Dependency", "dependency", "it waits for {dependency}", "hetstream jobs"),
    (r"BeginTime", "time",
     "it may not begin yet: {begin}",
     "scontrol update JobId={id} StartTime=now"),
    (r"DeadLine", "time", "it cannot end before its --deadline", "scontrol update JobId={id} Deadline=TIME"),
    (r"JobArrayTaskLimit", "limit", "as many tasks of its array run as its limit allows",
     "scontrol update JobId={array} ArrayTaskThrottle=N"),
    (r"PartitionTimeLimit", "time limit", "its time limit is above the partition's", _LIMIT),
    (r"PartitionNodeLimit", "limit", "it asks for more or fewer nodes than the partition allows", "sinfo -o '%P %s'"),
    (r"PartitionConfig", "limit", "what it asks for is not allowed in its partition",
     "scontrol show partition {partition}"),
    (r"MaxMemPerLimit", "limit", "it asks for more memory than MaxMemPerNode or MaxMemPerCPU allows",
     "scontrol show config | grep MaxMem; scontrol show partition {partition}"),
    (r"Partition", "partition", "its partition is not up", "scontrol show partition {partition}"),
    (r"ReqNodeNotAvail,_(May_be_r|R)eserved", "reservation",
     "nodes that it needs may be kept by a reservation ({reason})", "scontrol show reservation; sinfo -R"),
    (r"ReqNodeNotAvail|NodeDown|FrontEndDown", "nodes", "a node that it needs is not available ({reason})",
     "sinfo -R; scontrol show reservation"),
    (r"Reservation(Deleted|Invalid)|Reservation_.*(was_deleted|is_invalid|has_ended)", "reservation",
     "its reservation is gone", "scontrol update JobId={id} ReservationName="),
    (r"Reservation", "reservation", "its reservation has not begun or is full",
     "{reservation}"),
    (r"License_request", "licenses", "its licenses are none of the cluster's any more ({reason})",
     "ask for others: scontrol show license"),
    (r"Licenses", "licenses", "its licenses are taken", "scontrol show license"),
    (r"InvalidQOS|QOSNotAllowed|Job's_QOS_not", "not allowed", "it may not use QOS {qos} here ({reason})",
     _SHOW_ASSOC + "; scontrol update JobId={id} QOS=NAME"),
    (r"uid_\d+_not_in_group", "not allowed", "{user} may not use its partition ({reason})",
     "scontrol show partition {partition}; scontrol update JobId={id} Partition=NAME"),
    (r"InvalidAccount|AccountNotAllowed|Job's_account_not", "not allowed",
     "it may not use account {account} here ({reason})", _SHOW_ASSOC + "; scontrol update JobId={id} Account=NAME"),
    (r"QOS(MaxWall|TimeLimit)", "time limit", "its time limit is above that " + _OF_QOS, _LIMIT),
    (r"Assoc(MaxWall|iationTimeLimit)", "time limit", "its time limit is above that " + _OF_ASSOC, _LIMIT),
    (r"(QOS|Assoc)Grp\w*Minutes|(QOS|Assoc)GrpWall|QOSUsageThreshold|Job_is_at_or_exceeds", "limit",
     "the CPU, GPU or wall time granted to its QOS, account or user is used up ({reason})",
     _SHOW_QOS + "; " + _SHOW_ASSOC),
    (r"QOSMax\w*(PerJob|PerNode)|QOSMin", "limit", "one job may not ask for so much or so little under the limits "
     + _OF_QOS, "ask for what they allow: " + _SHOW_QOS),
    (r"AssocMax\w*(PerJob|PerNode)", "limit", "one job may not ask for so much under the limits " + _OF_ASSOC,
     "ask for what they allow: " + _SHOW_ASSOC),
    (_USER, "limit", "other jobs of {user} hold all that one user may have under the limits " + _OF_QOS + _OR_ALONE,
     _ENDS + "squeue -u {user}; " + _SHOW_QOS),
    (_ACCOUNT, "limit", "jobs of account {account} hold all that it may have under the limits " + _OF_QOS + _OR_ALONE,
     _ENDS + "squeue -A {account}; " + _SHOW_QOS),
    (_QOS, "limit", "jobs of its QOS hold all that they may have together ({reason})" + _OR_ALONE, _ENDS + _SHOW_QOS),
    (_ASSOC, "limit", "jobs of its account or user hold all that they may have together ({reason})" + _OR_ALONE,
     _ENDS + _SHOW_ASSOC),
    (r"AccountingPolicy", "limit", "a limit of its account or QOS is reached", _SHOW_ASSOC),
    (r"BadConstraints|Constraints", "constraints", "no node can meet what it asks for", _SHOW_JOB),
    (r"BurstBuffer", "burst buffer", "its burst buffer is not ready ({reason})", "scontrol show burst"),
    (r"Power", "power", "the cluster's power limit is reached ({reason})", "scontrol show powercap"),
    (r"Cleaning", "requeue", "its last start is still being cleaned up", _SHOW_JOB),
)  # fmt: skip
_REASONS = tuple((re.compile(pattern), kind, text, step) for pattern, kind, text, step in _PATTERNS)


@dataclass(frozen=True)
class StatedReason:
    """What a reason says.

    Attributes:
        kind: `held`, `dependency`, `limit`, `time limit`, `licenses`, ...; `slurm` if only Slurm knows it.
        text: in words.
        next_step: what to do or look at.
    """

    kind: str
    text: str
    next_step: str


@dataclass(frozen=True)
class Running:
    """Whose jobs run, and so may count against the limit of another one.

    Attributes:
        users, accounts: of these jobs.
        qos: theirs, and those of the partitions that they are in.
        qos_of: of each partition the QOS, if it has one.
    """

    users: frozenset[str]
    accounts: frozenset[str]
    qos: frozenset[str]
    qos_of: Mapping[str, str]

    def may_count_with(self, job: Job, limit: str) -> bool:
        """Return whether any may count with a job against a limit, by the pattern of its reason."""
        if limit == _USER:
            return job.user in self.users
        if limit == _ACCOUNT:
            return job.account in self.accounts
        if limit == _QOS:
            return not self.qos.isdisjoint([job.qos, *(self.qos_of.get(name, "") for name in job.partitions)])
        return bool(self.users)  # of the parents of an account nothing is known here


def running_in(snapshot: Snapshot) -> Running | None:
    """Return whose jobs run; None where some may be hidden."""
    if snapshot.hides_jobs:
        return None
    jobs = [job for job in snapshot.jobs if job.is_running]
    qos_of = {partition.name: partition.qos for partition in snapshot.partitions if partition.qos}
    qos = {job.qos for job in jobs} | {qos_of.get(name, "") for job in jobs for name in job.partitions}
    return Running(
        frozenset(job.user for job in jobs), frozenset(job.account for job in jobs), frozenset(qos - {""}), qos_of
    )


def told_by_slurm(job: Job, running: Running | None = None) -> StatedReason | None:
    """Return what a pending job waits for that is no resource, in words; None if it waits for resources or its turn.

    Args:
        job: a pending one.
        running: see `running_in`.
    """
    if job.is_admitted:
        if job.short_licenses:  # Slurm has not looked so far, or says it at its next look
            text = f"its licenses are taken: {', '.join(job.short_licenses)}"
            return StatedReason("licenses", text, "scontrol show license")
        return None
    quoted_partition = shlex.quote(job.partitions[0])
    if job.barred:
        text = f"none of its partitions admits it, and Slurm has not looked so far: {job.barred}"
        return StatedReason("not allowed", text, f"scontrol show partition {quoted_partition}")
    if job.begins_s is not None:
        begin = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(job.begins_s))
        step = f"scontrol update JobId={job.job_id} StartTime=now"
        return StatedReason("time", f"it may not begin before {begin}", step)
    sentences = {
        "id": job.job_id, "array": job.array_job_id or job.job_id, "dependency": job.dependency or "another job",
        "reason": job.reason, "user": job.user, "account": job.account, "qos": job.qos,
        "partition": job.partitions[0], "reservation": job.reservation,
        "begin": f"it was requeued (start {job.num_restarts + 1}), and Slurm waits two minutes then"
        if job.num_restarts else "its --begin time has not come",
    }  # fmt: skip
    # The next step is a line for a shell: whoever named the account must not have written a part of it.
    quoted = {name: shlex.quote(str(word)) if word else "" for name, word in sentences.items()}
    reservations = [f"scontrol show reservation {shlex.quote(name)}" for name in job.reservations]  # it takes one name
    quoted["reservation"] = "; ".join(reservations) or "scontrol show reservation"
    begin = job.reason.replace(" ", "_")
    for pattern, kind, text, step in _REASONS:
        if pattern.match(begin):
            if running and step.startswith(_ENDS) and not running.may_count_with(job, pattern.pattern):
                shown = "; ".join(part for part in step.removeprefix(_ENDS).split("; ") if part.startswith("sacctmgr"))
                text, step = _ALONE, f"ask for less, unless one has just ended: {shown}"
            return StatedReason(kind, text.format(**sentences), step.format(**quoted))
    return StatedReason("slurm", f"Slurm says {job.reason}", _SHOW_JOB.format(**quoted))
