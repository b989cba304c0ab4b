"""Batches by MPI, between ranks of one MPI world: one job step that holds trainers and data workers.

The only home of mpi4py, which initialises MPI when it is imported: `choice.py` imports this module where the user
asked for this transport. Control stays on ZeroMQ.

An address is `mpi:WORLD/RANK/TAG/NONCE`. A batch is an *envelope* (its header and the sizes of its frames) and the
frames, each received into memory of its own without another copy. MPI has no descriptor to wait on, so a thread of the
loader looks for messages, every 0.1 ms while they come and every 2 ms when none do; a data worker waits inside `send`
until the loader has taken the batch.

`MPI_Finalize` waits for all ranks, so data workers stay until all trainers are at their end (`World`). It fails in a
rank for which a message lies that was never received, and the launcher then kills all others. So every message is
counted (`_Messages`), and before a rank ends it takes as many as the others have sent to it.

Headers have no seal (`auth.py`): a rank and its peers are processes that one launcher has started, and who can change
what they send each other is inside the MPI library or its network. docs/decisions.md says what that means.

Everything is sent on `COMM_WORLD`, with tags of 2^20 and more: making a communicator would have to wait for ranks that
make no loader.
"""

from __future__ import annotations

import atexit
import collections
import itertools
import logging
import math
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from hetstream.base.installed import install_command
from hetstream.mpi_dataworkers.errors import ProtocolError, ServiceError
from hetstream.mpi_dataworkers.transports.auth import LoaderHandshake, WorkerHandshake
from hetstream.mpi_dataworkers.transports.base import ChannelSender, PeerUnreachable, ReceivedBatch
from hetstream.mpi_dataworkers.wire.codec import Leaf, aligned, decode, encode, in_one_piece
from hetstream.mpi_dataworkers.wire.messages import Carried, Hello, Message

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as error:  # RuntimeError: there is no libmpi
    raise ServiceError(
        f"batches by MPI need mpi4py and an MPI library: {error}. Run: {install_command('mpi')}"
    ) from error

_log = logging.getLogger(__name__)

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
# A rank may have much to do before it makes its loader; after the first time one line says who is waited for.
_SAY_AFTER_S, _ROLES_TIMEOUT_S = 10.0, 600.0
_WHO_IS_MISSING = "each rank of an MPI world has to be a data worker or make a loader"
_SAY_RANKS = (
    "Make the loader in each trainer, or say who is who: torch.distributed, rank= and world_size=, or RANK and "
    "WORLD_SIZE"
)
ONE_LAUNCH = (
    "Start trainers and data workers by one launch, `mpiexec ... : ...` of the MPI that mpi4py uses, or under Slurm "
    "`srun --mpi=pmi2 ... : ...` (docs/mpi.md)"
)
# How soon a data worker sees the end of the trainers.
_LOOK_FOR_END_S = 0.1
_GOODBYE = b""

_tags = itertools.count(_FIRST_TAG, _NUM_TAGS)


def world_id() -> str:
    """Name of this process's MPI world: `JOB.STEP` under Slurm's PMI-2, else one that only tells sizes apart.

    A process of another world that has the same name is told apart by the handshake, which it cannot answer.
    """
    return os.environ.get("PMI_JOBID") or f"of-{MPI.COMM_WORLD.Get_size()}"


class _Pause:
    """Waits between two looks, ever longer until something happens."""

    def __init__(self) -> None:
        self._next_s = _SHORTEST_S

    def something_happened(self) -> None:
        self._next_s = _SHORTEST_S

    def next_s(self) -> float:
        now_s, self._next_s = self._next_s, min(2 * self._next_s, _LONGEST_S)
        return now_s


class _Messages:
    """What this rank has sent to each other and has received from each; all goes through here, on any thread.

    Attributes:
        is_open: false from `end` on.
    """

    def __init__(self) -> None:
        self._comm = MPI.COMM_WORLD
        self.is_open = True
        self._lock = threading.Lock()
        self._sent = np.zeros(self._comm.Get_size(), dtype=np.int64)
        self._received = np.zeros_like(self._sent)
        # Where messages may come; of these, where nobody waits for them any more.
        self._tags: list[int] = []
        self._left: collections.deque[int] = collections.deque()
        # Transfers that nobody waits for, with the memory that MPI still reads or writes.
        self._sends: list[tuple[MPI.Request, Any]] = []
        self._receives: list[tuple[int, MPI.Request, Any]] = []

    def expect(self, *tags: int) -> None:
        """Messages with these tags may come from now on."""
        with self._lock:
            self._tags += tags

    def leave(self, *tags: int) -> None:
        """Nobody waits for messages with these tags any more; one may come all the same."""
        with self._lock:
            self._left += tags

    def send(self, rank: int, *messages: tuple[int, Any]) -> list[MPI.Request]:
        """Begin to send messages, each with its tag; all of them, or none.

        Raises:
            PeerUnreachable: all trainers have ended.
        """
        with self._lock:
            if not self.is_open:
                raise PeerUnreachable("the trainers of this MPI world have ended")
            self._sent[rank] += len(messages)
            return [self._comm.Isend(data, rank, tag) for tag, data in messages]

    def send_short(self, rank: int, tag: int, text: bytes) -> None:
        """Send a message of a handshake: MPI takes it along at once, and is done with it some time later."""
        self.give_up(self.send(rank, (tag, text)), text)

    def receive(self, rank: int, tag: int) -> tuple[int, bytearray] | None:
        """Return a message that has come: the rank that sent it and its bytes."""
        status = MPI.Status()
        message = self._comm.Improbe(rank, tag, status)
        if message is None:
            return None
        raw = bytearray(status.Get_count(MPI.BYTE))
        message.Recv([raw, MPI.BYTE])
        self.note_received(status.Get_source(), 1)
        return status.Get_source(), raw

    def note_received(self, rank: int, number: int) -> None:
        """So many have come into memory that waited for them."""
        with self._lock:
            self._received[rank] += number

    def give_up(self, sends: list[MPI.Request], data: Any) -> None:
        """Keep data that are being sent until MPI is done with them."""
        with self._lock:
            self._sends += [(send, data) for send in sends]
        self._settle()

    def give_up_receiving(self, rank: int, receives: list[MPI.Request], memory: Any) -> None:
        """The same of messages that were announced: they come into this memory, and nobody reads them."""
        with self._lock:
            self._receives += [(rank, receive, memory) for receive in receives]

    def tidy(self) -> None:
        """Take something of what has come and nobody waits for."""
        with self._lock:
            self._left.rotate()
            tags = [self._left[0]] if self._left else []
        self._discard(tags)

    def _discard(self, tags: Iterable[int]) -> None:
        for tag in tags:
            while self.receive(MPI.ANY_SOURCE, tag) is not None:
                pass
        self._settle()

    def _settle(self) -> None:
        with self._lock:
            self._sends = [send for send in self._sends if not send[0].Test()]
            waiting, self._receives = self._receives, []
            for receive in waiting:
                if receive[1].Test():
                    self._received[receive[0]] += 1
                else:
                    self._receives.append(receive)

    def end(self) -> None:
        """Send nothing more, and take all that other ranks have sent until they did the same. All ranks call it."""
        with self._lock:
            self.is_open = False
        coming = np.empty_like(self._sent)
        exchange, pause = self._comm.Ialltoall(self._sent, coming), _Pause()
        while not (exchange.Test() and (self._received >= coming).all() and not self._sends):
            self.discard_all()
            time.sleep(pause.next_s())
        for _, request, _ in self._receives:  # announced by a rank that then could not send it
            request.Cancel()
            request.Wait()

    def discard_all(self) -> None:
        """Take all that has come, in a rank that waits for nothing any more."""
        self._discard([*self._tags])


class World:
    """The lives of all ranks, which end together: every process of the world makes one of these.

    Args:
        is_trainer: it leaves when its program ends; else when all trainers have.

    Raises:
        ServiceError: the MPI library cannot be called from several threads.
    """

    def __init__(self, is_trainer: bool) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise ServiceError(
                "batches by MPI need MPI_THREAD_MULTIPLE. Import the loader before anything that calls MPI_Init, or "
                "initialise MPI with it"
            )
        self.messages = _Messages()
        self.receivers: set[MpiReceiver] = set()
        self._pid = os.getpid()
        self._may_leave = is_trainer
        self._has_failed = False
        self._are_trainers = np.zeros(MPI.COMM_WORLD.Get_size(), dtype=np.int8)
        self._roles = MPI.COMM_WORLD.Iallgather(np.array([is_trainer], dtype=np.int8), self._are_trainers)
        self._roles_lock = threading.Lock()
        if is_trainer:
            if is_alone():
                _log.warning(
                    "hetstream: alone in its MPI world: no data worker reaches this process by MPI. %s", ONE_LAUNCH
                )
            self._hook, sys.excepthook = sys.excepthook, self._on_error
            # A program may call it itself. Not by what MPI_Finalize deletes of COMM_SELF: in such a call MPICH 5.0.2
            # sometimes finds a lock of its own taken, and aborts.
            self._finalize, MPI.Finalize = MPI.Finalize, self._leave_and_finalize
        else:
            self._everybody = MPI.COMM_WORLD.Ibarrier()

    def trainers(self) -> list[int]:
        """Ranks of the trainers; waits until each rank has made its `World`.

        Raises:
            ServiceError: one does not.
        """
        begun, pause, is_said = time.monotonic(), _Pause(), False
        while not self._have_all_come():
            waited_s = time.monotonic() - begun
            if waited_s > _ROLES_TIMEOUT_S:
                raise ServiceError(f"{_WHO_IS_MISSING}: they did not within {_ROLES_TIMEOUT_S:g} s. {_SAY_RANKS}")
            if waited_s > _SAY_AFTER_S and not is_said:
                is_said = True
                _log.warning("hetstream: waiting: %s. %s", _WHO_IS_MISSING, _SAY_RANKS)
            time.sleep(pause.next_s())
        return [int(rank) for rank in np.flatnonzero(self._are_trainers)]

    def _have_all_come(self) -> bool:
        with self._roles_lock:
            return bool(self._roles.Test())

    def wait_for_end(self, when_over: Callable[[], None]) -> None:
        """Of a data worker, in a thread of its own: wait until all trainers have reached their ends.

        Args:
            when_over: called then, before the last messages are taken.
        """
        while not self._everybody.Test():
            time.sleep(_LOOK_FOR_END_S)
        when_over()
        self._have_all_come()  # they have, and MPI is told that this is known
        self.messages.end()

    def leave(self) -> None:
        """Of a trainer, once, when its program ends: wait for the other trainers, and take the last messages."""
        if not self._may_leave or self._pid != os.getpid():
            return
        self._may_leave = False
        for receiver in list(self.receivers):
            receiver.stop()
        if self._has_failed:
            return
        everybody, pause = MPI.COMM_WORLD.Ibarrier(), _Pause()
        while not everybody.Test():
            self.messages.discard_all()
            time.sleep(pause.next_s())
        self._have_all_come()
        self.messages.end()

    def _leave_and_finalize(self) -> None:
        self.leave()
        self._finalize()

    def _on_error(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """End all ranks: the others would wait for this one, and this one for them in MPI_Finalize.

        What the program wants to do at its exit, it does before.
        """
        self._hook(kind, error, trace)
        if self._pid != os.getpid() or getattr(sys, "last_value", None) is not error:
            return  # the program goes on: it only has the hook print something
        self._has_failed = True
        try:
            atexit._run_exitfuncs()
        finally:
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


def is_alone() -> bool:
    """Return whether this process has no other rank beside it: nobody launched it, or another MPI's launcher did."""
    return MPI.COMM_WORLD.Get_size() == 1


def trainer_identity() -> tuple[int, int] | None:
    """This trainer's number among those of its MPI world, and how many they are; None if it is alone in its world.

    Ranks of an MPI world are trainers and data workers, and each says which it is: so trainers are counted, whichever
    launcher started them.

    Raises:
        ServiceError: a rank does not say it.
    """
    if is_alone():
        return None
    trainers = enter_world(is_trainer=True).trainers()
    return trainers.index(MPI.COMM_WORLD.Get_rank()), len(trainers)


def leave_world() -> None:
    """The program ends, and its loaders are closed."""
    if _world is not None:
        _world.leave()


class _Envelope(msgspec.Struct, frozen=True, array_like=True):
    """What goes before the frames: frame 0 as `codec` encodes it, and the sizes of the others in bytes."""

    header: bytes
    sizes: list[int]


_envelopes = msgspec.msgpack.Decoder(_Envelope)


# --- loader ---------------------------------------------------------------------------------------------------------


class _Source:
    """A data worker's rank as the loader sees it, with the batches that are on their way, in order."""

    def __init__(self, handshake: LoaderHandshake) -> None:
        self.handshake = handshake
        self.coming: collections.deque[tuple[Carried, list[Any], list[MPI.Request], float]] = collections.deque()


class MpiReceiver:
    """See `base.BatchReceiver`.

    Args:
        batch_key: the job's batch key in hex.
    """

    transport = "mpi"

    def __init__(self, batch_key: str) -> None:
        self._world = enter_world(is_trainer=True)
        self._comm, self._messages = MPI.COMM_WORLD, self._world.messages
        if not self._messages.is_open:
            raise ServiceError("no batches by MPI for a loader that is made after MPI_Finalize, or by an exit handler")
        self._key = bytes.fromhex(batch_key)
        self._tag = next(_tags)
        self._messages.expect(self._tag + _TO_RECEIVER, self._tag + _FRAMES)
        self._address = f"{_SCHEME}{world_id()}/{self._comm.Get_rank()}/{self._tag}/{secrets.token_hex(16)}"
        self._sources: dict[int, _Source] = {}
        self._ready: collections.deque[ReceivedBatch | ProtocolError] = collections.deque()
        self._news = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hetstream-mpi", daemon=True)
        self._thread.start()
        self._world.receivers.add(self)

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
        self.stop()
        os.close(self._news)

    def stop(self) -> None:
        """Take nothing more, and tell data workers so."""
        self._closing.set()
        self._thread.join()
        self._world.receivers.discard(self)

    # --- the receiver's thread ---

    def _run(self) -> None:
        pause = _Pause()
        pressing_until = 0.0
        try:
            while not self._closing.is_set():
                self._messages.tidy()
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
        for rank in list(self._sources):
            if self._forget(rank).handshake.proven:
                self._messages.send_short(rank, self._tag + _TO_SENDER, _GOODBYE)
        self._messages.leave(self._tag + _TO_RECEIVER, self._tag + _FRAMES)

    def _forget(self, rank: int) -> _Source:
        source = self._sources.pop(rank)
        for _, frames, requests, _ in source.coming:
            self._messages.give_up_receiving(rank, requests, frames)
        return source

    def _pass_on(self, batch: ReceivedBatch | ProtocolError) -> None:
        self._ready.append(batch)
        os.eventfd_write(self._news, 1)

    def _look(self) -> bool:
        """Take the envelopes that have come; the frames of batches are received behind them."""
        took = False
        for _ in range(_BURST):
            found = self._messages.receive(MPI.ANY_SOURCE, self._tag + _TO_RECEIVER)
            if found is None:
                break
            took = True
            rank, raw = found
            try:
                self._open(rank, raw)
            except ProtocolError as error:
                # A stranger's bytes are not worth a line in the log; a worker that sends garbage is one from now on.
                if rank in self._sources and self._forget(rank).handshake.proven:
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
            if source is not None:
                self._forget(rank)
            source = self._sources[rank] = _Source(LoaderHandshake(self._key, self._address))
        if source is not None and not source.handshake.proven:
            answer = source.handshake.answer(message)
            if answer is not None:
                self._answer(rank, answer)
        elif isinstance(message, Carried) and source is not None:
            frames = [aligned(size) for size in envelope.sizes]
            # Frames of one rank are received in the order in which they were sent, which is that of their envelopes.
            requests = [self._comm.Irecv(frame, rank, self._tag + _FRAMES) for frame in frames if frame.nbytes]
            source.coming.append((message, frames, requests, time.monotonic()))
        else:
            raise ProtocolError(f"{type(message).__name__} is no message for this point of a batch connection")

    def _answer(self, rank: int, message: Message) -> None:
        self._messages.send_short(rank, self._tag + _TO_SENDER, encode(message))

    def _complete(self) -> tuple[bool, bool]:
        """Pass on batches that are whole, those of each rank in order.

        Returns:
            Whether there were any, and whether others are under way.
        """
        came = under_way = False
        for rank, source in self._sources.items():
            while source.coming and MPI.Request.Testall(source.coming[0][2]):
                message, frames, requests, began_s = source.coming.popleft()
                self._messages.note_received(rank, len(requests))
                self._pass_on(ReceivedBatch(message, [frame.data for frame in frames], self.transport, began_s))
                came = True
            under_way = under_way or bool(source.coming)
        return came, under_way


# --- data worker ----------------------------------------------------------------------------------------------------


class _Channel:
    """A data worker's way to one loader, proven in both directions. `send` returns when the loader has the batch.

    Raises:
        PeerUnreachable: there is none.
    """

    def __init__(self, key: bytes, worker_id: str, receiver: str) -> None:
        self._comm, self._messages = MPI.COMM_WORLD, enter_world(is_trainer=False).messages
        world, self._rank, self._tag = _parse(receiver)
        if world != world_id() or self._rank >= self._comm.Get_size():
            raise PeerUnreachable(f"{receiver} is not in this data worker's MPI world, {world_id()}")
        self._messages.expect(self._tag + _TO_SENDER)
        self._shake_hands(WorkerHandshake(key, worker_id, receiver), receiver)

    def send(self, header: Carried, frames: Sequence[Leaf]) -> float:
        """Hand one message to the loader.

        Returns:
            Seconds that it waited for the loader to take it.

        Raises:
            OSError: the loader is gone, or takes nothing.
            PeerUnreachable: all trainers have ended.
        """
        rank, tag = self._rank, self._tag
        views = [memoryview(in_one_piece(frame)) for frame in frames]
        envelope = msgspec.msgpack.encode(_Envelope(encode(header), [view.nbytes for view in views]))
        parts = [(tag + _FRAMES, view.cast("B")) for view in views if view.nbytes]
        requests = self._messages.send(rank, (tag + _TO_RECEIVER, envelope), *parts)
        pause, begun = _Pause(), time.monotonic()
        limit_s = _STUCK_S + sum(view.nbytes for view in views) / _CRAWL_BYTES_PER_S
        while not MPI.Request.Testall(requests):
            waited_s = time.monotonic() - begun
            gone = self._comm.Iprobe(rank, tag + _TO_SENDER)
            if gone or waited_s > limit_s:
                self._messages.give_up(requests, (envelope, views))
                raise ConnectionResetError("it left" if gone else "it takes nothing off MPI")
            time.sleep(0 if waited_s < _PRESSING_S else pause.next_s())
        return time.monotonic() - begun

    def _shake_hands(self, handshake: WorkerHandshake, receiver: str) -> None:
        answers = self._rank, self._tag + _TO_SENDER
        while self._messages.receive(*answers) is not None:
            pass  # answers to an earlier connection
        self._say(handshake.hello)
        deadline, pause = time.monotonic() + _HANDSHAKE_TIMEOUT_S, _Pause()
        while (answer := self._messages.receive(*answers)) is None:
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
        self._messages.send_short(self._rank, self._tag + _TO_RECEIVER, text)

    def close(self, until: float) -> None:  # noqa: ARG002, there is nothing to wait for
        """What was sent has arrived."""
        self._messages.leave(self._tag + _TO_SENDER)
        self._messages.tidy()


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
