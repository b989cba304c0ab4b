"""What reservations keep of which node, and from whom. Pure; called by `read.py`, and by who asks for one job.

From the one-line records of `scontrol show reservation`. Of a node that a reservation has as a whole no other job gets
anything; of one of which it has some cores (`CoreCnt=`, `TRES=cpu=`) other jobs get all other cores, and all memory.
slurmctld flags both nodes RESERVED, or MAINTENANCE, alike, some seconds late (seen on 22.05, 24.11 and 26.05): where
reservations are known, they decide, and not the flag. 22.05 names the cores some seconds late, too; until then it has
the whole node.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace

from hetstream.slurm_plugin.client.hostlist import expand
from hetstream.slurm_plugin.client.model import (
    MAINTENANCE,
    RESERVED,
    Gres,
    Job,
    Node,
    Reservation,
    ReservedPart,
    total,
)
from hetstream.slurm_plugin.client.parse_text import record
from hetstream.slurm_plugin.client.values import moment, text_or_empty, tres, whole
from hetstream.slurm_plugin.errors import UnreadableAnswer

_CORES = re.compile(r" NodeName=(\S+) CoreIDs=(\S+)")


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """The reservations of nodes, in the order of their beginning.

    Raises:
        UnreadableAnswer: a record lacks a value, or a value has another form.
    """
    found = []
    for line in text.split("\n"):
        if line.startswith("ReservationName="):
            try:
                reservation = _reservation(line)
            except (KeyError, ValueError) as exc:
                raise UnreadableAnswer(f"no reservation: {exc!r}", line) from exc
            found += [reservation] if reservation else []
    return tuple(sorted(found, key=lambda reservation: reservation.start_s))


def _reservation(line: str) -> Reservation | None:
    """None of one without nodes, such as of licenses alone."""
    row = record(line)
    begin_s, end_s = moment(row["StartTime"]), moment(row["EndTime"])
    nodes = expand(row.get("Nodes", ""))
    if begin_s is None or end_s is None or not nodes:
        return None
    kept = tres(row.get("TRES", ""))
    cores = {name: len(expand(f"c[{ids}]")) for name, ids in _CORES.findall(line.split(" TRES=")[0])}
    # Slurm numbers cores and counts CPUs: with two threads a core is two of these.
    threads = whole(kept.get("cpu", "")) / max(1, sum(cores.values()))
    flags = row.get("Flags", "").split(",")
    return Reservation(
        row["ReservationName"],
        tuple(name for name in nodes if name not in cores),
        begin_s,
        end_s,
        is_active=row.get("State") == "ACTIVE",
        is_maintenance="MAINT" in flags,
        is_flexible="FLEX" in flags,
        is_magnetic="MAGNETIC" in flags,
        users=_names(row, "Users"),
        groups=_names(row, "Groups"),
        accounts=_names(row, "Accounts"),
        allowed_partitions=_names(row, "AllowedPartitions"),
        qos=_names(row, "QOS"),
        cpus=tuple((name, round(number * max(1.0, threads))) for name, number in cores.items()),
        # Of which of its nodes nothing says: of each as many.
        gpus_on_node=-(-whole(kept.get("gres/gpu", "")) // len(cores)) if cores else 0,
    )


def _names(row: Mapping[str, str], field: str) -> tuple[str, ...]:
    return tuple(filter(None, text_or_empty(row.get(field, "")).split(",")))


def with_reservations(
    nodes: Iterable[Node], reservations: Sequence[Reservation], jobs: Iterable[Job] = ()
) -> tuple[Node, ...]:
    """The nodes as jobs without a reservation see them.

    Those of a reservation that has begun are marked as such and have its name: 22.05 names none with a node. Of those
    of which it has some cores, what it keeps from others is no part any more: CPUs and GPUs that its jobs do not hold.
    """
    active = sorted(
        (reservation for reservation in reservations if reservation.is_active),
        key=lambda reservation: reservation.is_maintenance,
    )
    names = {name: reservation.name for reservation in active for name in reservation.nodes}
    held = _held(jobs, {reservation.name for reservation in active if reservation.cpus})
    parts: dict[str, list[ReservedPart]] = {}
    for reservation in active:
        for name, cpus in reservation.cpus:
            cpus_held, gpus_held = held.get((reservation.name, name), (0, 0))
            gpus = reservation.gpus_on_node
            part = ReservedPart(reservation.name, cpus, min(cpus, cpus_held), gpus, min(gpus, gpus_held))
            parts.setdefault(name, []).append(part)
    found = []
    for node in nodes:
        if node.name in names:
            node = replace(node, states=node.states | {RESERVED}, reservation=names[node.name])
        elif node.name in parts:
            node = _without(node, tuple(parts[node.name]))
        found.append(node)
    return tuple(found)


def _held(jobs: Iterable[Job], names: Collection[str]) -> dict[tuple[str, str], tuple[int, int]]:
    """CPUs and GPUs that the jobs of reservations hold on each node; on each as many where no `shares` are known."""
    held: dict[tuple[str, str], tuple[int, int]] = {}
    for job in jobs if names else ():
        if job.holds_resources and job.nodes:
            for name in set(job.reservations).intersection(names):
                even, known = -(-job.count("gpu") // len(job.nodes)), {share.node: share.gres for share in job.shares}
                for node, has_cpus in job.cpus_on_nodes():
                    cpus, gpus = held.get((name, node), (0, 0))
                    has_gpus = total(known[node], "gpu") if node in known else even
                    held[name, node] = cpus + math.ceil(has_cpus), gpus + has_gpus
    return held


def _without(node: Node, parts: tuple[ReservedPart, ...]) -> Node:
    """A node without what is kept there for the jobs of reservations."""
    cpus = sum(part.cpus_free for part in parts)
    gpus = sum(part.gpus_free for part in parts)
    return replace(
        node,
        states=node.states - {RESERVED} - MAINTENANCE,
        reservation="",
        cpus=max(node.cpus_allocated, node.cpus - cpus),
        gres_drained=(*node.gres_drained, *_of_any_type(node, gpus)),
        reserved_parts=parts,
    )


def _of_any_type(node: Node, gpus: int) -> tuple[Gres, ...]:
    """So many GPUs, of the types of which the node has any left."""
    found = []
    for kind in node.gpu_types:
        num = min(gpus, node.devices(kind) if kind else node.devices())
        gpus -= num
        found += [Gres("gpu", kind, num)] if num else []
    return tuple(found)


def own_reservations(job: Job, reservations: Iterable[Reservation]) -> tuple[str, ...]:
    """The names of the reservations that a job may use; an empty one where it may do without."""
    if job.reservation:
        return job.reservations
    admitting = (
        reservation.name
        for reservation in reservations
        if reservation.is_magnetic
        and reservation.is_active
        and (job.user in reservation.users if reservation.groups else _admits(reservation.users, job.user))
        and _admits(reservation.accounts, job.account)
        and _admits(reservation.qos, job.qos)
        and any(_admits(reservation.allowed_partitions, name) for name in job.partitions)
    )
    return ("", *admitting)


def _admits(names: Sequence[str], name: str) -> bool:
    """Whether a list of users or accounts, or of those that it excludes (`-NAME`), has one."""
    excluded = [entry[1:] for entry in names if entry.startswith("-")]
    return name not in excluded if excluded else name in names or not names


def seen_from(nodes: Iterable[Node], reservations: Sequence[Reservation], names: Collection[str]) -> tuple[Node, ...]:
    """The nodes as jobs of some reservations see them: what these have there is theirs, and marked so.

    Args:
        nodes: see `with_reservations`.
        reservations: all.
        names: of those; an empty one among them is for jobs that may run outside as well.
    """
    own = [reservation for reservation in reservations if reservation.is_active and reservation.name in names]
    # Which of them has jobs that use what is outside, too.
    outside = next((reservation.name for reservation in own if reservation.is_flexible or "" in names), "")
    found = []
    for node in nodes:
        mine = [part for part in node.reserved_parts if part.reservation in names]
        if node.is_usable and (mine or (outside and not node.is_reserved)):
            name = mine[0].reservation if mine else outside
            node = _seen(replace(node, states=node.states | {RESERVED}, reservation=name), mine, bool(outside))
        found.append(node)
    return tuple(found)


def _seen(node: Node, mine: Sequence[ReservedPart], is_flexible: bool) -> Node:
    """A node with what is kept there for a job's reservations, and with nothing else unless the job may use it, too."""
    cpus = sum(part.cpus_free for part in mine)
    gpus = sum(part.gpus_free for part in mine)
    drained = list(node.gres_drained)
    for place, gres in enumerate(drained):
        if gres.name == "gpu":
            num = min(gpus, gres.count)
            gpus -= num
            drained[place] = replace(gres, count=gres.count - num)
    if is_flexible:
        return replace(node, cpus=node.cpus + cpus, gres_drained=tuple(drained))
    all_cpus = sum(part.cpus for part in mine)
    return replace(node, cpus=all_cpus, cpus_allocated=all_cpus - cpus, gres_drained=tuple(drained))
