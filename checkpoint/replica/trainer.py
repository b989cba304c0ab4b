"""A trainer's side of replicas: it tells its writer who its peer is, and brings a lost generation back from one."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Sequence
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.checkpoint.config import host_of_this_process
from hetstream.checkpoint.errors import NoCheckpoint, ReplicaError
from hetstream.checkpoint.memory.segment import MAX_METADATA_BYTES
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.record.agreement import Replica
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.replica import rendezvous
from hetstream.checkpoint.replica.rendezvous import Endpoint
from hetstream.checkpoint.replica.service import check_record, for_others
from hetstream.checkpoint.replica.wire import Order, ReplicaChannel, ReplicaReply, ReplicaRequest, order_of, write_order

_log = logging.getLogger(__name__)

# A job's checkpoint writer step starts with the job, and not always before its trainers.
_LISTED_TIMEOUT_S = 40.0
_POLL_S = 0.05


class TrainerReplicas:
    """Of one rank; plugged into a checkpointer as its `OtherHosts`.

    Args:
        directory: of the checkpoints.
        rank: of this trainer.

    Attributes:
        host: the name under which other hosts reach this one.
    """

    def __init__(self, directory: Path, rank: int) -> None:
        self.host = host_of_this_process()
        self._directory = directory
        self._rank = rank
        self._attempt = 0
        self._store: Store | None = None
        self._order: Order | None = None

    def admit(self, attempt: int) -> None:
        """Make the key of a new attempt. For rank 0, before any other rank knows of it.

        Raises:
            OSError: the directory cannot be written to.
        """
        rendezvous.make_key(self._directory, attempt)

    def dismiss(self, attempt: int) -> None:
        """Remove the key of an attempt that has ended."""
        rendezvous.remove_key(self._directory, attempt)

    def arrange(self, store: Store, hosts: Sequence[str], attempt: int) -> None:
        """Tell the checkpoint writer who its peer is.

        Args:
            store: of this rank.
            hosts: of all ranks, by rank.
            attempt: of the job; its key has been made.

        Raises:
            OSError: the store has no room for the order.
        """
        self._store, self._attempt = store, attempt
        self._order = order_of(hosts, self._rank, attempt)
        if self._order.peer is None:
            host = hosts[self._rank]
            _log.warning("replica=True: all ranks run on host %s, so there is no other to keep replicas", host)
        self._tell_writer(store, self._order)

    def on_renewed(self) -> None:
        """Tell the checkpoint writer again, as the store has been made anew."""
        if self._store and self._order:
            with contextlib.suppress(OSError):  # there is no room: then there are no replicas
                self._tell_writer(self._store, self._order)

    def _tell_writer(self, store: Store, order: Order) -> None:
        write_order(StoreFiles(store.path).replica_order, order)
        store.wake()

    def offered(self) -> list[Replica]:
        """What this host could give to other ranks."""
        return [*for_others(StoreFiles(self._store.path))] if self._store else []

    def fetch(self, generation: Generation, holders: Sequence[int]) -> None:
        """Bring a generation of this rank into its store, from the first holder that gives it whole.

        Raises:
            NoCheckpoint: none does.
        """
        store = self._store
        if store is None or any(content.header.generation == generation for content in store.held()):
            return
        problems = []
        for holder in holders:
            try:
                self._fetch(store, generation, holder)
            except (HetstreamError, OSError) as error:
                problems.append(f"the checkpoint writer of rank {holder}: {error}")
            else:
                return
        raise NoCheckpoint("; ".join(problems) or "no rank keeps it")

    def _fetch(self, store: Store, generation: Generation, holder: int) -> None:
        endpoint = self._await_listed(holder)
        key = rendezvous.read_key(self._directory, self._attempt)
        began_s = time.monotonic()
        with ReplicaChannel.connect(endpoint, key) as channel:
            channel.send_message(ReplicaRequest("give", self._rank, generation))
            reply = channel.receive_message(ReplicaReply)
            if reply.error:
                raise ReplicaError(reply.error)
            if not 0 <= reply.metadata_bytes <= MAX_METADATA_BYTES or reply.payload_bytes < 0:
                raise ReplicaError(f"{reply.metadata_bytes} bytes of metadata and {reply.payload_bytes} of payload")
            with store.begin(reply.payload_bytes, reply.metadata_bytes) as slot:
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
