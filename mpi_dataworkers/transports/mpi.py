"""Batches by MPI, between ranks of one MPI world: one job step that holds trainers and data workers.

The only home of mpi4py, which initialises MPI when it is imported: `choice.py` imports this module where the user
asked for this transport. Control stays on ZeroMQ.

An address is `mpi:WORLD/RANK/TAG/NONCE`. A batch is an *envelope* (its header and the sizes of its frames) and the
frames, each received into memory of its own without another copy. MPI has no descriptor to wait on, so a thread of the
loader looks for messages, every 0.1 ms while they come and every 2 ms when none do; a data worker waits inside `send`
until the loader has taken the batch. `MPI_Finalize` waits for all ranks, so data workers stay until all trainers are at
their end (`World`).

Headers have no seal (`proof.py`): a rank and its peers are processes that one launcher has started, and who can change
what they send each other is inside the MPI library or its network. docs/decisions/0001 says what that means.

Everything is sent on `COMM_WORLD`, with tags of 2^20 and more: making a communicator would have to wait for ranks that
make no loader.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from hetstream.base.installed import install_command
from hetstream.mpi_dataworkers.errors import ProtocolError, ServiceError
from hetstream.mpi_dataworkers.transports.base import PeerUnreachable, ReceivedBatch
from hetstream.mpi_dataworkers.transports.channels import ChannelSender
from hetstream.mpi_dataworkers.transports.proof import LoaderHandshake, WorkerHandshake
from hetstream.mpi_dataworkers.wire.codec import Leaf, decode, encode, in_one_piece
from hetstream.mpi_dataworkers.wire.messages import Delivery, Hello, Message

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: there is no libmpi
    raise ServiceError(
        f"batches by MPI need mpi4py and an MPI library: {error}. Run: {install_command('mpi')}"
    ) from error

_SCHEME = "mpi:"
# Out of the way of programs that count their tags from 0. Each receiver has three of its own.
_FIRST_TAG = 1 << 20
_TO_RECEIVER, _FRAMES, _TO_SENDER, _NUM_TAGS = range(4)
_HANDSHAKE_TIMEOUT_S = 5.0
# A loader that has not taken a batch within this time, and what it takes at a crawl, is stopped or stuck.
_STUCK_S = 10.0
_CRAWL_BYTES_PER_S = 50e6
# What a rank that has not proved the key may send.
_HANDSHAKE_BYTES = 4096
# How often is looked for messages: at once after one came, ever more rarely when none do.
_SHORTEST_S, _LONGEST_S = 0.0001, 0.002
# A transfer under way goes on inside MPI's own calls: call it without a pause, for as long as a large batch takes.
_PRESSING_S = 0.02
_BURST = 256
_GOODBYE = b""

_tags = itertools.count(_FIRST_TAG, _NUM_TAGS)
# MPI may still read or write memory of transfers that were given up.
_given_up: list[Any] = []
_short_sends: list[tuple[bytes, MPI.Request]] = []
_short_sends_lock = threading.Lock()


def world_id() -> str:
    """Name of this process's MPI world: `JOB.STEP` under Slurm's PMI-2, else one that only tells sizes apart.

    A process of another world that has the same name is told apart by the handshake, which it cannot answer.
    """
    return os.environ.get("PMI_JOBID") or f"of-{MPI.COMM_WORLD.Get_size()}"


class World:
    """The lives of all ranks, which end together: every process of the world makes one of these.

    Args:
        is_trainer: it leaves when it exits; else when `is_over`.

    Raises:
        ServiceError: the MPI library cannot be called from several threads.
    """

    def __init__(self, is_trainer: bool) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ServiceError(
                "batches by MPI need MPI_THREAD_MULTIPLE. Import the loader before anything that calls MPI_Init, or "
                "initialise MPI with it"
            )
        self.has_left = False
        if is_trainer:
            atexit.register(self._leave)
            self._hook, sys.excepthook = sys.excepthook, self._on_error
        else:
            self._everybody = MPI.COMM_WORLD.Ibarrier()

    def is_over(self) -> bool:
        """Whether all trainers have reached their ends; asked by data workers."""
        return bool(self._everybody.Test())

    def _leave(self) -> None:
        everybody = MPI.COMM_WORLD.Ibarrier()
        self.has_left = True
        while not everybody.Test():
            time.sleep(_LONGEST_S)

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End all ranks: the others would wait for this one, and this one for them in MPI_Finalize."""
        self._hook(kind, error, trace)
        sys.stdout.flush()
        sys.stderr.flush()
        MPI.COMM_WORLD.Abort(130 if issubclass(kind, KeyboardInterrupt) else 1)


_world: World | None = None


def enter_world(is_trainer: bool) -> World:
    """This process's `World`, made at the first call."""
    global _world
    if _world is None:
        _world = World(is_trainer)
    return _world


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What goes before the frames: frame 0 as `codec` encodes it, and the sizes of the others in bytes."""

    header: bytes
    sizes: list[int]


_envelopes = msgspec.msgpack.Decoder(_Envelope)


class _Pause:
    """Waits between two looks, ever longer until something happens."""

    def __init__(self) -> None:
        self._next_s = _SHORTEST_S

    def something_happened(self) -> None:
        self._next_s = _SHORTEST_S

    def next_s(self) -> float:
        now_s, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_S)
        return now_s


# --- loader ---------------------------------------------------------------------------------------------------------


class _Source:
    """A data worker's rank as the loader sees it, with the batches that are on their way, in order."""

    def __init__(self, handshake: LoaderHandshake) -> None:
        self.handshake = handshake
        self.coming: collections.deque[tuple[Delivery, list[Any], list[MPI.Request], float]] = collections.deque()


class MpiReceiver:
    """See `base.BatchReceiver`.

    Args:
        batch_key: the job's batch key in hex.
    """

    transport = "mpi"

    def __init__(self, batch_key: str) -> None:
        self._world = enter_world(is_trainer=True)
        self._comm = MPI.COMM_WORLD
        self._key = bytes.fromhex(batch_key)
        self._tag = next(_tags)
        self._address = f"{_SCHEME}{world_id()}/{self._comm.Get_rank()}/{self._tag}/{secrets.token_hex(16)}"
        self._sources: dict[int, _Source] = {}
        self._ready: collections.deque[ReceivedBatch | ProtocolError] = collections.deque()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hetstream-mpi", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        return [self._address]

    @property
    def sources(self) -> list[int]:
        return [self._news]

    @property
    def look_again_s(self) -> float:
        return math.inf

    def receive(self) -> list[ReceivedBatch | ProtocolError]:
        if self._ready:
            os.eventfd_read(self._news)
        batches = [self._ready.popleft() for _ in range(min(len(self._ready), _BURST))]
        if self._ready:
            os.eventfd_write(self._news, 1)
        return batches

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        os.close(self._news)

    # --- the receiver's thread ---

    def _run(self) -> None:
        pause = _Pause()
        pressing_until = 0.0
        try:
            while not self._closing.is_set():
                took = self._look()
                came, under_way = self._complete()
                now = time.monotonic()
                if took or came:
                    pause.something_happened()
                    pressing_until = now + _PRESSING_S
                if under_way and now < pressing_until:
                    time.sleep(0)
                else:
                    self._closing.wait(pause.next_s())
        except (MPI.Exception, MemoryError) as error:  # the thread's boundary: the loader logs it
            self._pass_on(ProtocolError(f"batches by MPI come no more: {error}"))
        self._say_goodbye()

    def _say_goodbye(self) -> None:
        for rank, source in self._sources.items():
            for _, frames, requests, _ in source.coming:
                for request in requests:
                    request.Cancel()
                _given_up.append((frames, requests))
            if source.handshake.proven and not self._world.has_left:
                _send_short(_GOODBYE, rank, self._tag + _TO_SENDER)
        self._sources.clear()

    def _pass_on(self, batch: ReceivedBatch | ProtocolError) -> None:
        self._ready.append(batch)
        os.eventfd_write(self._news, 1)

    def _look(self) -> bool:
        """Take the envelopes that have come; the frames of batches are received behind them."""
        took = False
        for _ in range(_BURST):
            found = _take(self._comm, MPI.ANY_SOURCE, self._tag + _TO_RECEIVER)
            if found is None:
                break
            took = True
            rank, raw = found
            try:
                self._open(rank, raw)
            except ProtocolError as error:
                # A stranger's bytes are not worth a line in the log; a worker that sends garbage is one from now on.
                known = self._sources.pop(rank, None)
                if known is not None and known.handshake.proven:
                    self._pass_on(error)
        return took

    def _open(self, rank: int, raw: bytearray) -> None:
        source = self._sources.get(rank)
        if (source is None or not source.handshake.proven) and len(raw) > _HANDSHAKE_BYTES:
            raise ProtocolError(f"{len(raw)} bytes of a rank that has not proved the key")
        try:
            envelope = _envelopes.decode(raw)
        except msgspec.MsgspecError as error:
            raise ProtocolError(f"an envelope of {len(raw)} bytes cannot be read: {error}") from error
        message = decode(envelope.header)
        if isinstance(message, Hello):
            source = self._sources[rank] = _Source(LoaderHandshake(self._key, self._address))
        if source is not None and not source.handshake.proven:
            answer = source.handshake.answer(message)
            if answer is not None:
                self._answer(rank, answer)
        elif isinstance(message, Delivery) and source is not None:
            frames = [np.empty(size, dtype=np.uint8) for size in envelope.sizes]
            # Frames of one rank are received in the order in which they were sent, which is that of their envelopes.
            requests = [self._comm.Irecv(frame, rank, self._tag + _FRAMES) for frame in frames if frame.nbytes]
            source.coming.append((message, frames, requests, time.monotonic()))
        else:
            raise ProtocolError(f"{type(message).__name__} is no message for this point of a batch connection")

    def _answer(self, rank: int, message: Message) -> None:
        text = encode(message)
        _send_short(text, rank, self._tag + _TO_SENDER)

    def _complete(self) -> tuple[bool, bool]:
        """Pass on batches that are whole, those of each rank in order.

        Returns:
            Whether there were any, and whether others are under way.
        """
        came = under_way = False
        for source in self._sources.values():
            while source.coming and MPI.Request.Testall(source.coming[0][2]):
                message, frames, _, began_s = source.coming.popleft()
                self._pass_on(ReceivedBatch(message, [frame.data for frame in frames], self.transport, began_s))
                came = True
            under_way = under_way or bool(source.coming)
        return came, under_way


def _send_short(text: bytes, rank: int, tag: int) -> None:
    """Send a message of a handshake: MPI takes it along at once, and is done with it some time later."""
    with _short_sends_lock:
        _short_sends.append((text, MPI.COMM_WORLD.Isend(text, rank, tag)))
        _short_sends[:] = [send for send in _short_sends if not send[1].Test()]


def _take(comm: MPI.Comm, rank: int, tag: int) -> tuple[int, bytearray] | None:
    """A message that has come: the rank that sent it and its bytes."""
    status = MPI.Status()
    message = comm.Improbe(rank, tag, status)
    if message is None:
        return None
    raw = bytearray(status.Get_count(MPI.BYTE))
    message.Recv([raw, MPI.BYTE])
    return status.Get_source(), raw


# --- data worker ----------------------------------------------------------------------------------------------------


class _Channel:
    """A data worker's way to one loader, proven in both directions. `send` returns when the loader has the batch.

    Raises:
        PeerUnreachable: there is none.
    """

    def __init__(self, key: bytes, worker_id: str, receiver: str) -> None:
        self._comm = MPI.COMM_WORLD
        world, self._rank, self._tag = _parse(receiver)
        if world != world_id() or self._rank >= self._comm.Get_size():
            raise PeerUnreachable(f"{receiver} is not in this data worker's MPI world, {world_id()}")
        self._shake_hands(WorkerHandshake(key, worker_id, receiver), receiver)

    def send(self, header: Delivery, frames: Sequence[Leaf]) -> float:
        """Hand one message to the loader.

        Returns:
            Seconds that it waited for the loader to take it.

        Raises:
            OSError: the loader is gone, or takes nothing.
        """
        rank, tag = self._rank, self._tag
        views = [memoryview(in_one_piece(frame)) for frame in frames]
        envelope = msgspec.msgpack.encode(_Envelope(encode(header), [view.nbytes for view in views]))
        requests = [self._comm.Isend(envelope, rank, tag + _TO_RECEIVER)]
        requests += [self._comm.Isend(view.cast("B"), rank, tag + _FRAMES) for view in views if view.nbytes]
        pause, begun = _Pause(), time.monotonic()
        limit_s = _STUCK_S + sum(view.nbytes for view in views) / _CRAWL_BYTES_PER_S
        while not MPI.Request.Testall(requests):
            waited_s = time.monotonic() - begun
            gone = self._comm.Iprobe(rank, tag + _TO_SENDER)
            if gone or waited_s > limit_s:
                _given_up.append((requests, envelope, views))
                raise ConnectionResetError("it left" if gone else "it takes nothing off MPI")
            time.sleep(0 if waited_s < _PRESSING_S else pause.next_s())
        return time.monotonic() - begun

    def _shake_hands(self, handshake: WorkerHandshake, receiver: str) -> None:
        answers = self._comm, self._rank, self._tag + _TO_SENDER
        while _take(*answers) is not None:
            pass  # answers to an earlier connection
        self._say(handshake.hello)
        deadline, pause = time.monotonic() + _HANDSHAKE_TIMEOUT_S, _Pause()
        while (answer := _take(*answers)) is None:
            if time.monotonic() > deadline:
                raise PeerUnreachable(f"the loader at {receiver} did not answer within {_HANDSHAKE_TIMEOUT_S:g} s")
            time.sleep(pause.next_s())
        try:
            proof = handshake.answer(decode(answer[1]))
        except ProtocolError as error:
            raise PeerUnreachable(f"no batch connection to the loader at {receiver}: {error}") from error
        self._say(proof)

    def _say(self, message: Message) -> None:
        text = msgspec.msgpack.encode(_Envelope(encode(message), []))
        _send_short(text, self._rank, self._tag + _TO_RECEIVER)

    def close(self, until: float) -> None:
        """Nothing to do: what was sent has arrived."""


class MpiBatchSender(ChannelSender):
    """See `base.BatchSender`."""

    def _open(self, receiver: str) -> _Channel:
        return _Channel(self._key, self._worker_id, receiver)


def _parse(receiver: str) -> tuple[str, int, int]:
    """World, rank and first tag of an address.

    Raises:
        PeerUnreachable: it is none.
    """
    try:
        world, rank, tag, _ = receiver.removeprefix(_SCHEME).rsplit("/", 3)
        return world, int(rank), int(tag)
    except ValueError as error:
        raise PeerUnreachable(f"{receiver!r} is no address of this transport") from error
