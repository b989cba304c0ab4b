"""The ranks that share a host: where each has its store, and which one holds for all of them what is equal on all.

Called by the checkpointer when its store is open. Replicated state is in memory once for each host, in the store of the
lowest rank there. Stores outlive their trainers, so it is as safe there as in each rank's own.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hetstream.checkpoint.flash.ranks import Communicator, gather
from hetstream.checkpoint.memory.segment import boot_id
from hetstream.checkpoint.memory.store import Store


@dataclass(frozen=True)
class Host:
    """The host of this process.

    Attributes:
        name: equal on ranks that can open each other's stores, and on no others.
        rank: of this process.
        stores: of the ranks of this host, ascending.
    """

    name: str
    rank: int
    stores: dict[int, Path]

    @property
    def holds_shared(self) -> bool:
        """Whether this rank holds the shared keys for its host."""
        return self.rank == next(iter(self.stores))


class _Address(msgspec.Struct, frozen=True):
    host: str
    store: str


def find_host(ranks: Communicator, store: Store, directory: Path) -> Host:
    """Find out which ranks share this host. Every rank calls it.

    Args:
        ranks: all.
        store: of this one.
        directory: of checkpoints.
    """
    places = "-".join(_place(path, ranks.rank) for path in (store.path.parent, directory))
    kernel = boot_id().hex() if any(boot_id()) else os.uname().nodename
    mine = _Address(f"{kernel}-{os.geteuid()}-{places}", os.fsencode(store.path).hex())
    addresses = gather(ranks, mine)
    stores = {
        rank: Path(os.fsdecode(bytes.fromhex(address.store)))
        for rank, address in enumerate(addresses)
        if address.host == mine.host
    }
    return Host(mine.host, ranks.rank, stores)


def _place(path: Path, rank: int) -> str:
    """A directory as this kernel knows it. Two containers of a machine often have two of one name, such as /dev/shm,
    and the name has to lead both to the same one; what a rank cannot look at, it shares with nobody."""
    try:
        status = os.stat(path)
    except OSError:
        return f"rank-{rank}"
    return f"{status.st_dev}-{status.st_ino}-{os.fsencode(path).hex()}"
