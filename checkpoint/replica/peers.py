"""Who keeps whose replica: every rank computes the same from the hosts of all, and tells its checkpoint writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.checkpoint.disk.files import write_whole


class Order(msgspec.Struct, frozen=True):
    """What a trainer tells its checkpoint writer to do about replicas.

    Attributes:
        attempt: of the job; its key opens the connections.
        rank: of this trainer.
        host: name under which other hosts reach this one.
        peer: the rank whose checkpoint writer keeps this rank's replica; None: there is no other host.
        serves: ranks whose replicas this rank's checkpoint writer keeps.
    """

    attempt: int
    rank: int
    host: str
    peer: int | None
    serves: list[int]


def peer_of(hosts: Sequence[str], rank: int) -> int | None:
    """The rank on the next host, in the order of the ranks' hosts, that has the same place there.

    Args:
        hosts: of all ranks, by rank.
        rank: whose peer.

    Returns:
        Its peer; None if all ranks are on one host.
    """
    mine = hosts[rank]
    order = list(dict.fromkeys(hosts))
    if len(order) == 1:
        return None
    following = order[(order.index(mine) + 1) % len(order)]
    there = [other for other, host in enumerate(hosts) if host == following]
    return there[hosts[:rank].count(mine) % len(there)]


def order_of(hosts: Sequence[str], rank: int, attempt: int) -> Order:
    """What one rank's checkpoint writer is told."""
    serves = [other for other in range(len(hosts)) if peer_of(hosts, other) == rank]
    return Order(attempt, rank, hosts[rank], peer_of(hosts, rank), serves)


def write_order(path: Path, order: Order) -> None:
    """Tell a checkpoint writer, in a file of its store.

    Raises:
        OSError: there is no room.
    """
    write_whole(path, msgspec.json.encode(order))


def read_order(path: Path) -> Order | None:
    """What a checkpoint writer is to do about replicas; None: nothing."""
    try:
        return typed_json.decode(path.read_bytes(), Order)
    except (OSError, msgspec.MsgspecError):
        return None
