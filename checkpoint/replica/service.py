"""What a rank's checkpoint writer does about replicas: it sends its own rank's newest generation to a peer, and keeps
others'.

Threads beside the checkpoint writer's loop: one sends, one accepts, one for each connection. None of them ever holds up
a trainer
or the way to disk: a generation is sent without a lock, and a failure is a line in the status.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.checkpoint.errors import DamagedSegment, ReplicaError
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.memory.segment import MAX_METADATA_BYTES, Header, Segment
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.record.generation import Generation
from hetstream.checkpoint.replica import rendezvous
from hetstream.checkpoint.replica.callers import UnknownCallers
from hetstream.checkpoint.replica.peers import Order
from hetstream.checkpoint.replica.rendezvous import Endpoint
from hetstream.checkpoint.replica.slots import check_record, forget_others, make_slot, on_this_host
from hetstream.checkpoint.replica.wire import Channel, Reply, Request, words

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
        self._key = rendezvous.read_key(directory, order.attempt)
        self._is_closing = False
        self._began_s = time.monotonic()
        self._wake = threading.Event()
        self._keeping = threading.Lock()
        self._channels: set[Channel] = set()
        self._unknown: UnknownCallers[Channel] = UnknownCallers(_MAX_UNKNOWN)
        self._unknown_lock = threading.Lock()
        self._sent: Generation | None = None
        self._server = _listen()
        try:
            self._endpoint = Endpoint(order.attempt, order.rank, order.host, self._server.getsockname()[1])
            rendezvous.publish(directory, self._endpoint)
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
        rendezvous.withdraw(self._directory, self._endpoint)
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
        endpoint = rendezvous.find(self._directory, self.order.peer, self.order.attempt)
        if endpoint is None:
            if time.monotonic() < self._began_s + _START_S:
                return  # it has not started yet
            raise ReplicaError(f"the checkpoint writer of rank {self.order.peer} is not listed in {self._directory}")
        try:
            segment = Segment.open(newest.path)
        except DamagedSegment:
            return  # overwritten just now; the next look finds a newer one
        began_s = time.monotonic()
        with segment, Channel.connect(endpoint, self._key) as channel:
            self._channels.add(channel)
            try:
                if self._is_closing:
                    return
                header = segment.header
                request = Request("keep", self.order.rank, header.generation, *_sizes(header))
                channel.send_message(request)
                reach("replica.offered")
                reply = channel.receive_message(Reply)
                if not reply.error and not reply.is_there:
                    channel.send_record(segment, header)
                    reach("replica.sent")
                    reply = channel.receive_message(Reply)
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
            channel = Channel(peer)
            self._channels.add(channel)
            with self._unknown_lock:
                leaving = self._unknown.add(address[0], channel)
            if leaving:
                leaving.interrupt()
            thread = threading.Thread(target=self._talk, args=(channel,), name="replica talk", daemon=True)
            threads.append(thread)
            thread.start()
        for channel in list(self._channels):
            channel.interrupt()
        for thread in threads:
            thread.join()

    def _talk(self, channel: Channel) -> None:
        try:
            with channel:
                if not channel.admit(self._key, self.order.attempt, self.order.rank):
                    raise ReplicaError("a caller without the key of this attempt")
                self._is_known(channel)
                request = channel.receive_message(Request)
                try:
                    if request.verb == "keep":
                        self._keep(channel, request)
                    else:
                        self._give(channel, request)
                except (HetstreamError, OSError) as error:
                    with contextlib.suppress(OSError):
                        channel.send_message(Reply(words(error)))
                    raise
        except (HetstreamError, OSError) as error:
            if not self._is_closing:
                _log.warning("rank=%d: a connection for replicas ended: %s", self.order.rank, words(error))
        finally:
            self._is_known(channel)
            self._channels.discard(channel)

    def _is_known(self, channel: Channel) -> None:
        with self._unknown_lock:
            self._unknown.discard(channel)

    def _keep(self, channel: Channel, request: Request) -> None:
        if request.rank not in self.order.serves:
            raise ReplicaError(f"rank {request.rank} has another peer; ranks of this one: {self.order.serves}")
        if not 0 <= request.metadata_bytes <= MAX_METADATA_BYTES or request.payload_bytes < 0:
            raise ReplicaError(f"{request.metadata_bytes} bytes of metadata and {request.payload_bytes} of payload")
        if not self._keeping.acquire(blocking=False):
            raise ReplicaError("another replica is on its way; try again")
        try:
            there = self._files.replicas_of(request.rank)
            if there and there[0].header.generation >= request.generation:
                channel.send_message(Reply(is_there=True))
                return
            self._receive(channel, request, there[0].header.serial + 1 if there else 1)
            if request.generation.attempt == self.order.attempt:
                # All ranks have restored: who ran elsewhere before has what is kept here, or needs it no more.
                forget_others(self._files, self.order.serves)
        finally:
            self._keeping.release()
        reach("replica.kept")
        channel.send_message(Reply())

    def _receive(self, channel: Channel, request: Request, serial: int) -> None:
        with make_slot(self._files, request.rank, request.payload_bytes, request.metadata_bytes) as segment:
            segment.begin(request.payload_bytes)
            try:
                channel.send_message(Reply())
                metadata = bytearray(request.metadata_bytes)
                with segment.payload as payload:
                    channel.receive_record(memoryview(metadata), payload)
                check_record(bytes(metadata), request.rank, request.layout_digest, request.payload_bytes)
                reach("replica.received")
                segment.publish(request.generation, serial, request.layout_digest, bytes(metadata))
            except BaseException:
                segment.abandon()
                raise

    def _give(self, channel: Channel, request: Request) -> None:
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
            channel.send_message(Reply("", False, *_sizes(header)))
            channel.send_record(segment, header)


def _sizes(header: Header) -> tuple[str, int, int]:
    return header.layout_digest, header.metadata_bytes, header.payload_bytes


def _listen() -> socket.socket:
    """On all of the host's addresses: which of them others see is not known here."""
    if socket.has_dualstack_ipv6():
        with contextlib.suppress(OSError):  # the kernel may have it switched off
            return socket.create_server(("", 0), family=socket.AF_INET6, backlog=_BACKLOG, dualstack_ipv6=True)
    return socket.create_server(("", 0), backlog=_BACKLOG)
