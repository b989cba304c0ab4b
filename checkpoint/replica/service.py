"""Both sides of replicas: a checkpoint writer sends its rank's newest generation to a peer and keeps others'; a trainer
tells its writer who the peer is, and brings a lost generation back from one.

The writer has threads beside its loop: one sends, one accepts, one for each connection. None of them ever holds up a
trainer or the way to disk: a generation is sent without a lock, and a failure is a line in the status.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.base.limits import ConnectionLimit
from hetstream.checkpoint.config import host_of_this_process
from hetstream.checkpoint.errors import CheckpointError, DamagedSegment, NoCheckpoint, ReplicaError, reach
from hetstream.checkpoint.memory.segment import (
    MAX_METADATA_BYTES,
    Header,
    Segment,
    check_memory,
    check_room,
    file_bytes,
    split_metadata,
)
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import SlotContent, StoreFiles
from hetstream.checkpoint.record.layout import Generation, from_json
from hetstream.checkpoint.record.lineage import Replica
from hetstream.checkpoint.record.structure import Origin, Record, read_origin
from hetstream.checkpoint.replica import wire
from hetstream.checkpoint.replica.wire import (
    Endpoint,
    Order,
    ReplicaChannel,
    ReplicaReply,
    ReplicaRequest,
    order_of,
    read_order,
    words,
    write_order,
)

# Replicas in the store of the rank whose checkpoint writer keeps them: two slot files for each rank that it keeps them
# of.
#
#     STORE/replica-1-0, STORE/replica-1-1    generations of rank 1, as `segment.py` describes them
#
# A new one overwrites the older, so a transfer that breaks off costs nothing that was whole. They go with the store.

NUM_SLOTS = 2


def make_slot(files: StoreFiles, rank: int, payload_bytes: int, metadata_bytes: int) -> Segment:
    """Return where the next generation of a rank is to be written; the newest one stays.

    Raises:
        SharedMemoryFull: there is no room.
        OSError: the store is gone.
    """
    whole = files.replicas_of(rank)
    kept = whole[0].path if whole else None
    path = next(
        candidate for candidate in (files.replica(rank, number) for number in range(NUM_SLOTS)) if candidate != kept
    )
    try:
        segment = Segment.open(path, writable=True)
        header = segment.header
        if header.payload_capacity_bytes >= payload_bytes and header.metadata_capacity_bytes >= metadata_bytes:
            return segment
        segment.close()
    except DamagedSegment:
        pass  # there is none, or it is torn: a new one takes its place
    reach("replica.allocating")
    path.unlink(missing_ok=True)
    num_bytes = file_bytes(payload_bytes, metadata_bytes)
    check_room(files.path, num_bytes)
    check_memory(files.path, num_bytes, files.promised_bytes() + files.outstanding_bytes())
    made = files.path / f"new-{path.name}"
    made.unlink(missing_ok=True)
    segment = Segment.create(made, payload_bytes, metadata_bytes)
    made.rename(path)
    segment.path = path
    return segment


def forget_others(files: StoreFiles, ranks: Collection[int]) -> None:
    """Free the replicas of all ranks but some: their peer is another now."""
    for path in files.replicas():
        if files.rank_of_replica(path) not in ranks:
            path.unlink(missing_ok=True)


def check_record(metadata: bytes, rank: int, layout_digest: str, payload_bytes: int) -> None:
    """Refuse what is not a rank's record.

    Raises:
        CheckpointError: it is not.
    """
    layout_json, structure = split_metadata(metadata)
    layout, record = from_json(layout_json), Record.read(structure)
    if layout.digest != layout_digest or layout.payload_bytes > payload_bytes or record.rank != rank:
        raise ReplicaError(f"what came is not the record of rank {rank} that was announced, but of rank {record.rank}")


def on_this_host(files: StoreFiles, rank: int) -> list[SlotContent]:
    """Return all that this host's memory has of a rank, in any store of the same job and directory; newest first."""
    found: list[SlotContent] = []
    for store in files.siblings():
        found += store.replicas_of(rank)
        found += store.complete() if store.holder().rank == rank else []
    return sorted(found, key=lambda content: content.age, reverse=True)


def for_others(files: StoreFiles) -> Iterator[Replica]:
    """Yield what this host could give to other ranks.

    The replicas in this store; and all that is in stores of dead trainers, whose ranks may run elsewhere now.
    """
    for store in files.siblings():
        is_own = store.path == files.path
        if not is_own and store.is_trainer_alive():
            continue  # it speaks for itself
        held = [(store.rank_of_replica(path), SlotContent.of(path)) for path in store.replicas()]
        if not is_own:
            held += [(store.holder().rank, content) for content in store.complete()]
        for rank, content in held:
            # What is damaged, or overwritten just now, is nothing to give.
            with contextlib.suppress(CheckpointError):
                if content:
                    origin = _origin(content, rank)
                    yield Replica(rank, content.header.generation, origin.world_size, origin.shared_elsewhere)


def _origin(content: SlotContent, rank: int) -> Origin:
    with Segment.open(content.path) as segment:
        origin = read_origin(split_metadata(segment.metadata)[1])
    if origin.rank != rank:
        raise ReplicaError(f"{content.path} holds a record of rank {origin.rank}, not {rank}")
    return origin


_log = logging.getLogger(__name__)

# Callers that have not proved the key yet; each has a thread. Peers need milliseconds for it.
_MAX_UNKNOWN = 32
_IDLE_S = 0.5
_RETRY_S, _RETRY_LIMIT_S = 1.0, 30.0
_BACKLOG = 128
# Checkpoint writers of a job start at about the same time.
_START_S = 40.0
# A sender may wait for a host that does not answer; it changes nothing any more.
_END_S = 1.0

Report = Callable[[Generation | None, str], None]


class ReplicaService:
    """Serves until `close`.

    Args:
        files: the store of this checkpoint writer.
        directory: of the checkpoints.
        order: what the trainer wants.
        report: told the generation that the peer keeps now, or why it does not. Called in a thread.

    Raises:
        ReplicaError: the attempt has no key.
        OSError: nothing can be listened to, or the directory cannot be written to.
    """

    def __init__(self, files: StoreFiles, directory: Path, order: Order, report: Report) -> None:
        self.order = order
        self._files = files
        self._directory = directory
        self._report = report
        self._key = wire.read_key(directory, order.attempt)
        self._is_closing = False
        self._began_s = time.monotonic()
        self._wake = threading.Event()
        self._keeping = threading.Lock()
        self._channels: set[ReplicaChannel] = set()
        self._unknown: ConnectionLimit[ReplicaChannel] = ConnectionLimit(_MAX_UNKNOWN)
        self._unknown_lock = threading.Lock()
        self._sent: Generation | None = None
        self._server = _listen()
        try:
            self._endpoint = Endpoint(order.attempt, order.rank, order.host, self._server.getsockname()[1])
            wire.publish(directory, self._endpoint)
        except BaseException:
            self._server.close()
            raise
        reach("replica.listed")
        self._server_thread = threading.Thread(target=self._accept, name="replica server", daemon=True)
        self._server_thread.start()
        self._sender_thread: threading.Thread | None = None
        if order.peer is not None:
            self._sender_thread = threading.Thread(target=self._send_on, name="replica sender", daemon=True)
            self._sender_thread.start()

    def wake(self) -> None:
        """The trainer may have published a generation."""
        self._wake.set()

    def close(self) -> None:
        """End all transfers and let go of the store."""
        self._is_closing = True
        wire.withdraw(self._directory, self._endpoint)
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self._wake.set()
        for channel in list(self._channels):
            channel.interrupt()
        self._server_thread.join()
        if self._sender_thread:
            self._sender_thread.join(_END_S)
        self._server.close()

    # Sending

    def _send_on(self) -> None:
        retry_s = 0.0
        while not self._is_closing:
            self._wake.wait(_IDLE_S)
            self._wake.clear()
            try:
                self._send_newest()
            except (HetstreamError, OSError) as error:
                if self._is_closing:
                    return
                retry_s = min(_RETRY_LIMIT_S, 2 * retry_s or _RETRY_S)
                _log.warning(
                    "rank=%d: rank %s has no replica, next try in %g s: %s",
                    self.order.rank,
                    self.order.peer,
                    retry_s,
                    words(error),
                )
                self._report(None, words(error))
                self._pause(retry_s)
            else:
                retry_s = 0.0

    def _pause(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        while not self._is_closing and time.monotonic() < end_s:
            self._wake.wait(end_s - time.monotonic())
            if self._is_closing:
                return
            self._wake.clear()

    def _send_newest(self) -> None:
        newest = next(iter(self._files.complete()), None)
        if newest is None or (self._sent and newest.header.generation <= self._sent):
            return
        assert self.order.peer is not None
        endpoint = wire.find(self._directory, self.order.peer, self.order.attempt)
        if endpoint is None:
            if time.monotonic() < self._began_s + _START_S:
                return  # it has not started yet
            raise ReplicaError(f"the checkpoint writer of rank {self.order.peer} is not listed in {self._directory}")
        try:
            segment = Segment.open(newest.path)
        except DamagedSegment:
            return  # overwritten just now; the next look finds a newer one
        began_s = time.monotonic()
        with segment, ReplicaChannel.connect(endpoint, self._key) as channel:
            self._channels.add(channel)
            try:
                if self._is_closing:
                    return
                header = segment.header
                request = ReplicaRequest("keep", self.order.rank, header.generation, *_sizes(header))
                channel.send_message(request)
                reach("replica.offered")
                reply = channel.receive_message(ReplicaReply)
                if not reply.error and not reply.is_there:
                    channel.send_record(segment, header)
                    reach("replica.sent")
                    reply = channel.receive_message(ReplicaReply)
            finally:
                self._channels.discard(channel)
        if reply.error:
            raise ReplicaError(f"the checkpoint writer of rank {self.order.peer} on {endpoint.address}: {reply.error}")
        self._sent = header.generation
        self._report(self._sent, "")
        _log.info(
            "rank=%d generation=%s is kept by the checkpoint writer of rank %d: %d bytes in %.2f s",
            self.order.rank,
            self._sent,
            self.order.peer,
            header.payload_bytes,
            time.monotonic() - began_s,
        )

    # Keeping and giving

    def _accept(self) -> None:
        threads: list[threading.Thread] = []
        while not self._is_closing:
            try:
                peer, address = self._server.accept()
            except OSError as error:
                if not self._is_closing:
                    _log.error("rank=%d: no connection can be accepted: %s", self.order.rank, error)
                    self._pause(_IDLE_S)
                continue
            threads = [thread for thread in threads if thread.is_alive()]
            channel = ReplicaChannel(peer)
            self._channels.add(channel)
            # A newcomer is always taken in, so a silent crowd keeps out nobody who has the key: a caller from another
            # address never leaves for it, one from the same address only if so many come before its next message.
            with self._unknown_lock:
                self._unknown.enter(channel, address[0])
                if leaving := self._unknown.one_too_many():
                    self._unknown.leave(leaving)
            if leaving:
                leaving.interrupt()
            thread = threading.Thread(target=self._talk, args=(channel,), name="replica talk", daemon=True)
            threads.append(thread)
            thread.start()
        for channel in list(self._channels):
            channel.interrupt()
        for thread in threads:
            thread.join()

    def _talk(self, channel: ReplicaChannel) -> None:
        try:
            with channel:
                if not channel.admit(self._key, self.order.attempt, self.order.rank):
                    raise ReplicaError("a caller without the key of this attempt")
                self._is_known(channel)
                request = channel.receive_message(ReplicaRequest)
                try:
                    if request.verb == "keep":
                        self._keep(channel, request)
                    else:
                        self._give(channel, request)
                except (HetstreamError, OSError) as error:
                    with contextlib.suppress(OSError):
                        channel.send_message(ReplicaReply(words(error)))
                    raise
        except (HetstreamError, OSError) as error:
            if not self._is_closing:
                _log.warning("rank=%d: a connection for replicas ended: %s", self.order.rank, words(error))
        finally:
            self._is_known(channel)
            self._channels.discard(channel)

    def _is_known(self, channel: ReplicaChannel) -> None:
        with self._unknown_lock:
            self._unknown.leave(channel)

    def _keep(self, channel: ReplicaChannel, request: ReplicaRequest) -> None:
        if request.rank not in self.order.serves:
            raise ReplicaError(f"rank {request.rank} has another peer; ranks of this one: {self.order.serves}")
        if not 0 <= request.metadata_bytes <= MAX_METADATA_BYTES or request.payload_bytes < 0:
            raise ReplicaError(f"{request.metadata_bytes} bytes of metadata and {request.payload_bytes} of payload")
        if not self._keeping.acquire(blocking=False):
            raise ReplicaError("another replica is on its way; try again")
        try:
            there = self._files.replicas_of(request.rank)
            if there and there[0].header.generation >= request.generation:
                channel.send_message(ReplicaReply(is_there=True))
                return
            self._receive(channel, request, there[0].header.serial + 1 if there else 1)
            if request.generation.attempt == self.order.attempt:
                # All ranks have restored: who ran elsewhere before has what is kept here, or needs it no more.
                forget_others(self._files, self.order.serves)
        finally:
            self._keeping.release()
        reach("replica.kept")
        channel.send_message(ReplicaReply())

    def _receive(self, channel: ReplicaChannel, request: ReplicaRequest, serial: int) -> None:
        with make_slot(self._files, request.rank, request.payload_bytes, request.metadata_bytes) as segment:
            segment.begin(request.payload_bytes)
            try:
                channel.send_message(ReplicaReply())
                metadata = bytearray(request.metadata_bytes)
                with segment.payload as payload:
                    channel.receive_record(memoryview(metadata), payload)
                check_record(bytes(metadata), request.rank, request.layout_digest, request.payload_bytes)
                reach("replica.received")
                segment.publish(request.generation, serial, request.layout_digest, bytes(metadata))
            except BaseException:
                segment.abandon()
                raise

    def _give(self, channel: ReplicaChannel, request: ReplicaRequest) -> None:
        content = next(
            (
                content
                for content in on_this_host(self._files, request.rank)
                if content.header.generation == request.generation
            ),
            None,
        )
        if content is None:
            raise ReplicaError(f"there is no {request.generation} of rank {request.rank} here any more")
        with Segment.open(content.path) as segment:
            header = segment.header
            channel.send_message(ReplicaReply("", False, *_sizes(header)))
            channel.send_record(segment, header)


def _sizes(header: Header) -> tuple[str, int, int]:
    return header.layout_digest, header.metadata_bytes, header.payload_bytes


def _listen() -> socket.socket:
    """On all of the host's addresses: which of them others see is not known here."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel may have it switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)


# Beside a checkpoint writer's way to disk: replicas are sent and kept as the trainer wants, which may change.

_SERVING_RETRY_S = 5.0


class ReplicaServing:
    """For one store, of its checkpoint writer.

    Args:
        files: of the store.
        directory: of the checkpoints.
        report: told the generation that the peer keeps now, or why it does not.
    """

    def __init__(self, files: StoreFiles, directory: Path, report: Report) -> None:
        self._files, self._directory, self._report = files, directory, report
        self._service: ReplicaService | None = None
        self._not_before_s = 0.0

    def advance(self) -> None:
        """Begin, go on or end to send and to keep replicas, as the trainer wants. It never waits for a peer."""
        order = read_order(self._files.replica_order)
        if self._service and self._service.order == order:
            self._service.wake()
            return
        self.close()
        if order is None or time.monotonic() < self._not_before_s:
            return
        try:
            self._service = ReplicaService(self._files, self._directory, order, self._report)
        except (OSError, HetstreamError) as error:
            self._not_before_s = time.monotonic() + _SERVING_RETRY_S
            _log.warning(
                "rank=%d directory=%s: no replicas, next try in %g s: %s",
                order.rank,
                self._directory,
                _SERVING_RETRY_S,
                error,
            )
            self._report(None, str(error))

    def close(self) -> None:
        """End all transfers."""
        service, self._service = self._service, None
        if service:
            service.close()


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
        wire.make_key(self._directory, attempt)

    def dismiss(self, attempt: int) -> None:
        """Remove the key of an attempt that has ended."""
        wire.remove_key(self._directory, attempt)

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
        """Return what this host could give to other ranks."""
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
        key = wire.read_key(self._directory, self._attempt)
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
            endpoint = wire.find(self._directory, holder, self._attempt)
            if endpoint:
                return endpoint
            if time.monotonic() > deadline_s:
                raise ReplicaError(f"it was not listed within {_LISTED_TIMEOUT_S:g} s")
            time.sleep(_POLL_S)
