"""A trainer's side of replicas: it tells its writer who its peer is, and brings a lost generation back from one."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from hetstream.base.errors import HetstreamError
from hetstream.checkpoint.disk.files import write_whole
from hetstream.checkpoint.errors import NoCheckpoint, ReplicaError
from hetstream.checkpoint.memory.segment import MAX_METADATA_BYTES
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.record.agreement import Replica
from hetstream.checkpoint.record.generation import Generation
from hetstream.checkpoint.replica import rendezvous
from hetstream.checkpoint.replica.peers import order_of
from hetstream.checkpoint.replica.rendezvous import Endpoint
from hetstream.checkpoint.replica.stock import check_record, for_others
from hetstream.checkpoint.replica.wire import Channel, Reply, Request

_log = logging.getLogger(__name__)

# A job's checkpoint writer step starts with the job, and not always before its trainers.
_LISTED_TIMEOUT_S = 40.0
_POLL_S = 0.05


class TrainerReplicas:
    """Of one rank and attempt.

    Args:
        store: of this rank.
        directory: of the checkpoints.
        hosts: of all ranks, by rank, as `config.host_of_this_process` gives them.
        rank: of this trainer.
        attempt: of the job; its key has been made.

    Raises:
        OSError: the store has no room for the order.
    """

    def __init__(self, store: Store, directory: Path, hosts: Sequence[str], rank: int, attempt: int) -> None:
        self._store = store
        self._directory = directory
        self._attempt = attempt
        self._rank = rank
        self._order = order_of(hosts, rank, attempt)
        if self._order.peer is None:
            _log.warning("replica=True: all ranks run on host %s, so there is no other to keep replicas", hosts[rank])
        self.tell_writer()

    def tell_writer(self) -> None:
        """Say in the store what its checkpoint writer is to do; again when the store has been made anew.

        Raises:
            OSError: there is no room.
        """
        write_whole(self._files.replica_order, msgspec.json.encode(self._order))
        self._store.wake()

    @property
    def _files(self) -> StoreFiles:
        return StoreFiles(self._store.path)

    def offered(self) -> list[Replica]:
        """What this host could give to other ranks."""
        return [*for_others(self._files)]

    def fetch(self, generation: Generation, holders: Sequence[int]) -> None:
        """Bring a generation of this rank into its store, from the first holder that gives it whole.

        Raises:
            NoCheckpoint: none does.
        """
        if any(one.header.generation == generation for one in self._store.held()):
            return
        problems = []
        for holder in holders:
            try:
                self._fetch(generation, holder)
            except (HetstreamError, OSError) as error:
                problems.append(f"the checkpoint writer of rank {holder}: {error}")
            else:
                return
        raise NoCheckpoint("; ".join(problems) or "no rank keeps it")

    def _fetch(self, generation: Generation, holder: int) -> None:
        endpoint = self._await_listed(holder)
        key = rendezvous.read_key(self._directory, self._attempt)
        began_s = time.monotonic()
        with Channel.connect(endpoint, key) as channel:
            channel.send_message(Request("give", self._rank, generation))
            reply = channel.receive_message(Reply)
            if reply.error:
                raise ReplicaError(reply.error)
            if not 0 <= reply.metadata_bytes <= MAX_METADATA_BYTES or reply.payload_bytes < 0:
                raise ReplicaError(f"{reply.metadata_bytes} bytes of metadata and {reply.payload_bytes} of payload")
            with self._store.begin(reply.payload_bytes, reply.metadata_bytes) as slot:
                metadata = bytearray(reply.metadata_bytes)
                channel.receive_record(memoryview(metadata), slot.payload)
                check_record(bytes(metadata), self._rank, reply.layout_digest, reply.payload_bytes)
                slot.publish(generation, bytes(metadata), reply.layout_digest)
        _log.info(
            "%s came from the checkpoint writer of rank %d on %s: %d bytes in %.2f s",
            generation,
            holder,
            endpoint.address,
            reply.payload_bytes,
            time.monotonic() - began_s,
        )

    def _await_listed(self, holder: int) -> Endpoint:
        deadline_s = time.monotonic() + _LISTED_TIMEOUT_S
        while True:
            endpoint = rendezvous.find(self._directory, holder, self._attempt)
            if endpoint:
                return endpoint
            if time.monotonic() > deadline_s:
                raise ReplicaError(f"it was not listed within {_LISTED_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)


def forget_replicas(store: Path) -> None:
    """This attempt has no replicas: the checkpoint writer stops, and what was kept for others is freed."""
    files = StoreFiles(store)
    files.replica_order.unlink(missing_ok=True)
    for path in files.replicas():
        path.unlink(missing_ok=True)
