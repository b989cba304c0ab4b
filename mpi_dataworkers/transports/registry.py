"""The transports that there are, best first. This is the one place where a new one is entered.

`config.py` takes their names from here, `choice.py` opens them, and the conformance suite tests each of them. A
transport's own module is imported when one of its ends is opened: so whoever only wants the names imports no sockets,
and MPI initialises itself in ranks of an MPI step alone.
"""

from __future__ import annotations

import atexit
import secrets
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hetstream.mpi_dataworkers.errors import ServiceError

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.transports.base import BatchReceiver, BatchSender

# Loaders of one process that are read at the same time (validation within training) and find room in shared memory; of
# what more there are, batches go in pieces while it is full.
_POOL_LOADERS = 2


@dataclass(frozen=True)
class LoaderSide:
    """What the loaders of a process have for their ends of the transports.

    Attributes:
        batch_key: the job's batch key in hex.
        dispatcher: address of the dispatcher, `tcp://HOST:PORT`; data workers come from the same networks.
        buffer_bytes: finished batches that a loader holds ahead of the training loop.
        compress: ask data workers that come over a network to compress.
        names: the transports that the user wants, by name.
    """

    batch_key: str
    dispatcher: str
    buffer_bytes: int
    compress: bool
    names: Collection[str]


@dataclass(frozen=True)
class Transport:
    """One way for batches, or several that share their ends.

    Attributes:
        names: in HETSTREAM_TRANSPORT, in the addresses of receivers (`NAME:...`) and in `loader.stats()`, best first.
        receiver: opens a loader's end, for those of its names that the user wants.
        sender: opens a data worker's end, from the job's batch key in hex and the data worker's id.
        mpi_world_only: nobody has it but ranks of an MPI step, and loaders only if the user names it.
    """

    names: tuple[str, ...]
    receiver: Callable[[LoaderSide], BatchReceiver]
    sender: Callable[[str, str], BatchSender]
    mpi_world_only: bool = False


def _mpi_receiver(side: LoaderSide) -> BatchReceiver:
    from hetstream.mpi_dataworkers.transports.mpi import MpiReceiver

    return MpiReceiver(side.batch_key)


def _mpi_sender(batch_key: str, worker_id: str) -> BatchSender:
    from hetstream.mpi_dataworkers.transports.mpi import MpiBatchSender

    return MpiBatchSender(batch_key, worker_id)


def _shm_receiver(side: LoaderSide) -> BatchReceiver:
    from hetstream.mpi_dataworkers.transports.shm import ShmReceiver

    # Larger than what the window lets through: it is full only while the training loop keeps old batches.
    return ShmReceiver(side.batch_key, _POOL_LOADERS * (side.buffer_bytes + side.buffer_bytes // 4))


def _shm_sender(batch_key: str, worker_id: str) -> BatchSender:
    from hetstream.mpi_dataworkers.transports.shm import ShmBatchSender

    return ShmBatchSender(batch_key, worker_id)


def _socket_receiver(side: LoaderSide) -> BatchReceiver:
    from hetstream.mpi_dataworkers.transports.sockets import SocketReceiver, local_address_towards

    binds = []
    if "ipc" in side.names:
        # A name in the abstract namespace: nothing is left in a directory, whatever ends this process.
        binds.append(f"ipc://@hetstream-{secrets.token_hex(16)}")
    if "tcp" in side.names:
        try:
            binds.append(f"tcp://{local_address_towards(side.dispatcher)}:*")
        except OSError as error:
            raise ServiceError(f"no address for batches on the route to {side.dispatcher}: {error}") from error
    return SocketReceiver(side.batch_key, binds, side.compress)


def _socket_sender(batch_key: str, worker_id: str) -> BatchSender:
    from hetstream.mpi_dataworkers.transports.sockets import SocketBatchSender

    return SocketBatchSender(batch_key, worker_id)


TRANSPORTS = (
    Transport(("mpi",), _mpi_receiver, _mpi_sender, mpi_world_only=True),
    Transport(("shm",), _shm_receiver, _shm_sender),
    Transport(("ipc", "tcp"), _socket_receiver, _socket_sender),
)
ALL_NAMES = tuple(name for transport in TRANSPORTS for name in transport.names)
DEFAULT_NAMES = tuple(name for transport in TRANSPORTS if not transport.mpi_world_only for name in transport.names)


@atexit.register
def _leave_mpi_world() -> None:
    """End this process's part in an MPI world, if it has one.

    Exit handlers run last first, and all of hetstream's others are made after this one: loaders are closed by now. What
    a program registered before it imported hetstream comes later, while the other ranks wait for this one.
    """
    mpi = sys.modules.get("hetstream.mpi_dataworkers.transports.mpi")
    if mpi is not None:
        mpi.leave_world()
