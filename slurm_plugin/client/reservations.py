"""Reservations of nodes, from the one-line records of `scontrol show reservation`. Pure; called by `read.py`.

One that holds some cores of a node and not all of it is left out: Slurm lets other jobs start beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from hetstream.slurm_plugin.client.hostlist import expand
from hetstream.slurm_plugin.client.model import RESERVED, Node, Reservation
from hetstream.slurm_plugin.client.parse_text import record
from hetstream.slurm_plugin.client.values import moment
from hetstream.slurm_plugin.errors import UnreadableAnswer


def parse_reservations(text: str) -> tuple[Reservation, ...]:
    """The reservations of whole nodes, in the order of their beginning.

    Raises:
        UnreadableAnswer: a record lacks a value, or a value has another form.
    """
    found = []
    for line in text.split("\n"):
        if not line.startswith("ReservationName=") or " CoreIDs=" in line:
            continue
        row = record(line)
        try:
            begin_s, end_s = moment(row["StartTime"]), moment(row["EndTime"])
            nodes = expand(row.get("Nodes", ""))
        except (KeyError, ValueError) as exc:
            raise UnreadableAnswer(f"no reservation: {exc!r}", line) from exc
        if begin_s is not None and end_s is not None and nodes:
            is_active = row.get("State") == "ACTIVE"
            is_maintenance = "MAINT" in row.get("Flags", "").split(",")
            found.append(Reservation(row["ReservationName"], nodes, begin_s, end_s, is_active, is_maintenance))
    return tuple(sorted(found, key=lambda reservation: reservation.start_s))


def with_reservations(nodes: Iterable[Node], reservations: Sequence[Reservation]) -> tuple[Node, ...]:
    """The nodes, those of reservations that have begun marked as such and with their names.

    22.05 names no reservation with a node, and every release marks its nodes some seconds late.
    """
    active = sorted(
        (reservation for reservation in reservations if reservation.is_active),
        key=lambda reservation: reservation.is_maintenance,
    )
    names = {name: reservation.name for reservation in active for name in reservation.nodes}
    return tuple(
        replace(node, states=node.states | {RESERVED}, reservation=names[node.name]) if node.name in names else node
        for node in nodes
    )
