"""Replicas: who keeps whose, what a stranger gets, and what is left of a transfer that broke off. Writers are real."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import stat
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.errors import ForeignOwner, NoCheckpoint, ReplicaError
from hetstream.checkpoint.memory.segment import Segment
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreFiles, StoreIdentity, WriterStatus
from hetstream.checkpoint.memory.view import StoreView, find_stores
from hetstream.checkpoint.record.layout import Generation, checksum
from hetstream.checkpoint.record.lineage import Offer, OfferedRecord, Replica, choose_generation
from hetstream.checkpoint.replica import wire
from hetstream.checkpoint.replica.service import ReplicaService, TrainerReplicas, for_others
from hetstream.checkpoint.replica.wire import (
    ReplicaChannel,
    ReplicaReply,
    ReplicaRequest,
    order_of,
    peer_of,
    read_order,
    write_order,
)
from tests.checkpoint import fake_trainer
from tests.checkpoint.processes import FakeTrainer, begin_trainer, begin_writer

MIB = 1 << 20
NUM_BYTES = 5 * MIB
TIMEOUT_S = 60.0
HOSTS = ("127.0.0.1", "127.0.0.2")
WaitUntil = Callable[..., None]


# --- who keeps whose -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hosts", "peers"),
    [
        ("a", [None]),
        ("aaa", [None, None, None]),
        ("ab", [1, 0]),
        ("abc", [1, 2, 0]),
        ("aabb", [2, 3, 0, 1]),
        ("abab", [1, 0, 3, 2]),
        ("aaab", [3, 3, 3, 0]),
    ],
)
def test_the_peer_is_on_the_next_host(hosts: str, peers: list[int | None]) -> None:
    assert [peer_of(hosts, rank) for rank in range(len(hosts))] == peers
    for rank, peer in enumerate(peers):
        assert peer is None or hosts[peer] != hosts[rank]
        order = order_of(list(hosts), rank, 1)
        assert order.peer == peer
        assert order.serves == [other for other, one in enumerate(peers) if one == rank]


def test_a_replica_comes_after_memory_and_before_the_disk() -> None:
    one, two = Generation(1, 1), Generation(1, 2)
    here = Offer(
        memory=[OfferedRecord(two, 2)],
        disk=[OfferedRecord(one, 2), OfferedRecord(two, 2)],
        replicas=[Replica(1, two, 2)],
    )
    lost = Offer(disk=[OfferedRecord(one, 2), OfferedRecord(two, 2)])
    choice = choose_generation([here, lost])
    assert (choice.generation, choice.sources, choice.holders[1]) == (two, ["memory", "replica"], [0])
    # It could not be brought here: then the disk has the same.
    again = choose_generation([here, lost.without(two, "replica", "its peer does not answer")])
    assert (again.generation, again.sources) == (two, ["memory", "disk"])
    # Without the replica and without the newer one on disk, all go back to the older.
    old = choose_generation(
        [Offer(memory=[OfferedRecord(two, 2)], disk=[OfferedRecord(one, 2)]), Offer(disk=[OfferedRecord(one, 2)])]
    )
    assert (old.generation, old.sources) == (one, ["disk", "disk"])


def test_a_replica_of_another_number_of_ranks_or_behind_own_memory_is_not_taken() -> None:
    one, two = Generation(1, 1), Generation(1, 2)
    assert (
        choose_generation([Offer(memory=[OfferedRecord(one, 2)], replicas=[Replica(1, one, 3)]), Offer()]).generation
        is None
    )
    behind = choose_generation(
        [Offer(memory=[OfferedRecord(one, 2)], replicas=[Replica(1, one, 2)]), Offer(memory=[OfferedRecord(two, 2)])]
    )
    assert behind.generation is None


# --- one service, and callers of every kind ------------------------------------------------------------------------


@dataclass
class Keeper:
    """The service of rank 1, which keeps the replicas of rank 0."""

    store: Store
    directory: Path
    service: ReplicaService

    @property
    def files(self) -> StoreFiles:
        return StoreFiles(self.store.path)

    @property
    def endpoint(self) -> wire.Endpoint:
        found = wire.find(self.directory, 1, 1)
        assert found
        return found

    def connect(self) -> ReplicaChannel:
        return ReplicaChannel.connect(self.endpoint, wire.read_key(self.directory, 1))

    def keep(self, source: Store, spoil: Callable[[ReplicaChannel, Segment], None] | None = None) -> ReplicaReply:
        """Send the newest generation of a store, in the way of a checkpoint writer or in another."""
        content = source.held()[0]
        with self.connect() as channel, Segment.open(content.path) as segment:
            header = segment.header
            sizes = (header.layout_digest, header.metadata_bytes, header.payload_bytes)
            channel.send_message(ReplicaRequest("keep", 0, header.generation, *sizes))
            reply = channel.receive_message(ReplicaReply)
            if reply.error or reply.is_there:
                return reply
            (spoil or (lambda channel, segment: channel.send_record(segment, header)))(channel, segment)
            return channel.receive_message(ReplicaReply)

    def kept(self) -> list[Generation]:
        """What is kept of rank 0; every byte is compared."""
        return check_kept(self.files, 0)


def check_kept(files: StoreFiles, rank: int, num_bytes: int = NUM_BYTES) -> list[Generation]:
    kept = files.replicas_of(rank)
    for content in kept:
        with Segment.open(content.path) as segment:
            for entry in fake_trainer.layout_of(num_bytes).entries:
                expected = fake_trainer.content(content.header.generation, rank, entry.name, entry.num_bytes)
                assert bytes(segment.payload[entry.offset : entry.offset + entry.num_bytes]) == expected
    return [content.header.generation for content in kept]


def open_store(path: Path, rank: int) -> Store:
    path.mkdir(exist_ok=True)
    return Store.open(StoreIdentity("77", 0, rank, path.parent / "ckpt"), shared_memory=path)


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    directory = tmp_path / "ckpt"
    directory.mkdir()
    wire.make_key(directory, 1)
    with open_store(tmp_path / "host-1", 1) as store:
        order = order_of(HOSTS, 1, 1)
        # Its own rank has nothing to send; the peer is not there.
        service = ReplicaService(StoreFiles(store.path), directory, order, lambda *_: None)
        try:
            yield Keeper(store, directory, service)
        finally:
            service.close()


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path / "host-0", 0) as store:
        yield store


def save(store: Store, step: int) -> None:
    fake_trainer.save(store, Generation(1, step), 0, 2, NUM_BYTES)


def test_two_generations_are_kept_and_found(keeper: Keeper, source: Store) -> None:
    for step in (10, 20, 30):
        save(source, step)
        assert keeper.keep(source) == ReplicaReply()
        assert keeper.keep(source) == ReplicaReply(is_there=True)
    assert keeper.kept() == [Generation(1, 30), Generation(1, 20)]
    assert [stat.S_IMODE(path.stat().st_mode) for path in keeper.files.replicas()] == [0o600, 0o600]
    found = sorted(for_others(keeper.files), key=lambda one: one.generation)
    assert found == [Replica(0, Generation(1, 20), 2), Replica(0, Generation(1, 30), 2)]
    assert keeper.files.num_bytes() > 2 * NUM_BYTES
    with keeper.connect() as channel:
        channel.send_message(ReplicaRequest("give", 0, Generation(1, 20)))
        reply = channel.receive_message(ReplicaReply)
        metadata, payload = bytearray(reply.metadata_bytes), bytearray(reply.payload_bytes)
        channel.receive_record(memoryview(metadata), memoryview(payload))
    with Segment.open(keeper.files.replicas_of(0)[1].path) as segment:
        assert (bytes(segment.payload), segment.metadata) == (payload, metadata)


@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
def test_a_stranger_gets_nothing_and_allocates_nothing(keeper: Keeper) -> None:
    with pytest.raises(ReplicaError, match="does not have the key"):
        ReplicaChannel.connect(keeper.endpoint, bytes(32))
    address = (keeper.endpoint.address, keeper.endpoint.port)
    # One who speaks the protocol, and guesses; then one who does not; all are cut off after a few bytes.
    for first, second in ((b"HETREPL1" + bytes(32), bytes(32)), (b"GET / HTTP/1.1\r\n" * 10, b"")):
        with socket.create_connection(address, TIMEOUT_S) as stranger:
            stranger.sendall(first)
            got = b""
            with contextlib.suppress(ConnectionError):
                got = stranger.recv(64, socket.MSG_WAITALL) if second else b""
                stranger.sendall(second + b"\xff" * 1000)
                assert stranger.recv(1) == b""
            assert len(got) in (0, 64)
    with keeper.connect() as channel:
        channel.send_message(ReplicaRequest("give", 1, Generation(1, 1)))
        assert "no step 1" in channel.receive_message(ReplicaReply).error
    assert keeper.files.replicas() == []


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (ReplicaRequest("keep", 1, Generation(1, 1), "0" * 32, 10, 10), "has another peer"),
        (ReplicaRequest("keep", 0, Generation(1, 1), "0" * 32, 10, 1 << 55), "no room"),
        (ReplicaRequest("keep", 0, Generation(1, 1), "0" * 32, 1 << 40, 10), "bytes of metadata"),
        (ReplicaRequest("keep", 0, Generation(1, 1), "0" * 32, 10, -1), "bytes of metadata"),
    ],
)
def test_a_peer_cannot_ask_for_anything(keeper: Keeper, request_: ReplicaRequest, error: str) -> None:
    with keeper.connect() as channel:
        channel.send_message(request_)
        assert error in channel.receive_message(ReplicaReply).error
    assert keeper.files.replicas() == []
    with keeper.connect() as channel:
        channel.send((20 << 10).to_bytes(4, "little") + b"{")
        with pytest.raises((ReplicaError, ConnectionError)):
            channel.receive(1)


def sending(
    send: Callable[..., None], changes: dict[int, Callable[[bytearray], None]]
) -> Callable[[ReplicaChannel, bytes | memoryview, float], None]:
    """`ReplicaChannel.send` that changes what some connection sends at some of its calls."""
    counts: dict[int, int] = {}

    def changed(channel: ReplicaChannel, data: bytes | memoryview, timeout_s: float = TIMEOUT_S) -> None:
        counts[id(channel)] = counts.get(id(channel), 0) + 1
        buffer = bytearray(data)
        changes.get(counts[id(channel)], lambda _: None)(buffer)
        send(channel, bytes(buffer), timeout_s)

    return changed


class Spoilt:
    """Ways to send a record that must not be kept."""

    @staticmethod
    def _flipped(channel: ReplicaChannel, segment: Segment) -> None:
        """A bit changes on the way."""

        def flip(data: bytearray) -> None:
            data[77] ^= 4

        Spoilt._Relay(channel, flip).send_record(segment, segment.header)

    class _Relay(ReplicaChannel):
        def __init__(self, channel: ReplicaChannel, act: Callable[[bytearray], None]) -> None:
            self._socket = channel._socket
            self._num_sent = 0
            self._act = act

        def send(self, data: bytes | memoryview, timeout_s: float = TIMEOUT_S) -> None:
            self._num_sent += 1
            changed = bytearray(data)
            if self._num_sent == 4:
                self._act(changed)
            super().send(bytes(changed), timeout_s)

    @staticmethod
    def _overwritten(channel: ReplicaChannel, segment: Segment) -> None:
        """The trainer saves into the slot meanwhile."""
        header = segment.header

        def overwrite(_: bytearray) -> None:
            with Segment.open(segment.path, writable=True) as writable:
                writable.begin(header.payload_bytes)

        Spoilt._Relay(channel, overwrite).send_record(segment, header)

    @staticmethod
    def _of_another(channel: ReplicaChannel, segment: Segment) -> None:
        """Whole, and not what was announced."""
        header = segment.header
        channel.send(bytes(header.metadata_bytes))
        for begin in range(0, header.payload_bytes, MIB):
            channel.send(bytes(min(MIB, header.payload_bytes - begin)))
        value = checksum(bytes(header.metadata_bytes + header.payload_bytes))
        channel.send(b"\1" + value.to_bytes(8, "little"))


@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (Spoilt._flipped, "checksum"),
        (Spoilt._overwritten, "overwritten"),
        (Spoilt._of_another, "DamagedLayout|layout|cannot be read"),
    ],
)
def test_what_is_not_what_was_saved_is_refused(
    keeper: Keeper, source: Store, spoil: Callable[[ReplicaChannel, Segment], None], error: str
) -> None:
    save(source, 10)
    assert keeper.keep(source) == ReplicaReply()
    save(source, 20)
    reply = keeper.keep(source, spoil)
    assert any(one in reply.error for one in error.split("|")), reply
    assert keeper.kept() == [Generation(1, 10)]
    save(source, 30)
    assert keeper.keep(source) == ReplicaReply()
    assert keeper.kept() == [Generation(1, 30), Generation(1, 10)]


def test_a_record_that_is_cut_off_is_not_kept(keeper: Keeper, source: Store, wait_until: WaitUntil) -> None:
    save(source, 10)
    assert keeper.keep(source) == ReplicaReply()
    save(source, 20)

    def cut(channel: ReplicaChannel, segment: Segment) -> None:
        channel.send(segment.metadata)
        channel.send(segment.payload[: 2 * MIB])
        channel.close()

    with pytest.raises((ReplicaError, OSError)):
        keeper.keep(source, cut)
    wait_until(lambda: not keeper.service._keeping.locked(), TIMEOUT_S, "the end of the transfer")
    assert keeper.kept() == [Generation(1, 10)]
    assert keeper.keep(source) == ReplicaReply()
    assert keeper.kept() == [Generation(1, 20), Generation(1, 10)]


def test_a_rank_without_memory_gets_its_generation_into_its_own_store(
    keeper: Keeper, source: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(source, 10)
    assert keeper.keep(source) == ReplicaReply()
    monkeypatch.setattr("hetstream.checkpoint.replica.service._LISTED_TIMEOUT_S", 0.2)
    with open_store(tmp_path / "host-2", 0) as store:
        replicas = TrainerReplicas(keeper.directory, 0)
        replicas.arrange(store, HOSTS, 1)
        # The first holder has no checkpoint writer; the second one has another generation, or this one.
        with pytest.raises(NoCheckpoint, match=r"rank 0: it was not listed.*rank 1: there is no step 20"):
            replicas.fetch(Generation(1, 20), [0, 1])
        with monkeypatch.context() as changed:
            flip = {4: lambda data: data.__setitem__(77, data[77] ^ 4)}
            changed.setattr(ReplicaChannel, "send", sending(ReplicaChannel.send, flip))
            with pytest.raises(NoCheckpoint, match="checksum"):
                replicas.fetch(Generation(1, 10), [1])
        assert store.held() == []
        replicas.fetch(Generation(1, 10), [0, 1])
        (held,) = store.held()
        assert held.header.generation == Generation(1, 10)
        with store.read(held) as fetched, Segment.open(source.held()[0].path) as saved:
            assert (bytes(fetched.payload), fetched.metadata) == (bytes(saved.payload), saved.metadata)


def test_replicas_go_with_the_store(keeper: Keeper, source: Store, tmp_path: Path) -> None:
    save(source, 10)
    assert keeper.keep(source) == ReplicaReply()
    keeper.service.close()
    keeper.store.close(keep=True)  # as a trainer that crashed
    (found,) = find_stores([tmp_path / "host-1"])
    assert found.num_bytes > NUM_BYTES
    with StoreView(found.path) as view:
        assert view.remove()  # what `hetstream ckpt gc` does
    assert list((tmp_path / "host-1").iterdir()) == []


def test_replicas_of_ranks_with_another_peer_now_stay_until_all_have_restored(keeper: Keeper, source: Store) -> None:
    for generation, left in ((Generation(0, 10), ["replica-0-0", "replica-5-0"]), (Generation(1, 1), ["replica-0-1"])):
        fake_trainer.save(source, generation, 0, 2, NUM_BYTES)
        shutil.copy(source.held()[0].path, keeper.files.replica(5, 0))
        assert keeper.keep(source) == ReplicaReply()
        names = [path.name for path in keeper.files.replicas()]
        assert set(left) <= set(names)
        assert ("replica-5-0" in names) == (generation.attempt == 0)


def test_without_replicas_nothing_of_them_stays(keeper: Keeper, source: Store) -> None:
    save(source, 10)
    assert keeper.keep(source) == ReplicaReply()
    write_order(keeper.files.replica_order, order_of(HOSTS, 1, 1))
    assert read_order(keeper.files.replica_order) == order_of(HOSTS, 1, 1)
    keeper.files.forget_others()
    assert (read_order(keeper.files.replica_order), keeper.files.replicas()) == (None, [])


def test_a_key_that_others_can_read_is_not_used(tmp_path: Path) -> None:
    wire.make_key(tmp_path, 1)
    (path,) = (tmp_path / "replicas").iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    path.chmod(0o640)
    with pytest.raises(ForeignOwner):
        wire.read_key(tmp_path, 1)
    wire.make_key(tmp_path, 2)
    with pytest.raises(ReplicaError):
        wire.read_key(tmp_path, 1)
    wire.remove_key(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


# --- checkpoint writers that are killed, stopped, or full
# ----------------------------------------------------------------------


@dataclass
class Pair:
    """Two hosts with a trainer and a checkpoint writer each."""

    path: Path
    wait_until: WaitUntil
    undo: contextlib.ExitStack
    trainers: list[FakeTrainer] = field(default_factory=list)

    @property
    def directory(self) -> Path:
        return self.path / "ckpt"

    def trainer(self, rank: int) -> None:
        memory = self.path / f"host-{rank}"
        memory.mkdir()
        self.trainers.append(begin_trainer(self.undo, memory, self.directory, "77", rank, 2, 1, NUM_BYTES))
        write_order(StoreFiles(self.trainers[-1].store).replica_order, order_of(HOSTS, rank, 1))

    def writer(self, rank: int, fault: str = "") -> subprocess.Popen[bytes]:
        request = f"{fault}:{self.path / 'marker'}" if fault else ""
        return begin_writer(self.undo, self.trainers[rank].store, self.directory, self.path / "writer.log", request)

    def status(self, rank: int) -> WriterStatus:
        return StoreView(self.trainers[rank].store).files.read_status() or WriterStatus(pid=0)

    def until(self, condition: Callable[[], object], what: str) -> None:
        try:
            self.wait_until(condition, TIMEOUT_S, what)
        except BaseException:
            print((self.path / "writer.log").read_text()[-4000:])
            raise

    def until_replicated(self, rank: int, step: int) -> None:
        self.until(lambda: self.status(rank).replicated == Generation(1, step), f"the replica of step {step}")
        assert check_kept(StoreFiles(self.trainers[1 - rank].store), rank)[0] == Generation(1, step)


@pytest.fixture
def pair(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Pair]:
    (tmp_path / "ckpt").mkdir()
    wire.make_key(tmp_path / "ckpt", 1)
    with contextlib.ExitStack() as undo:
        made = Pair(tmp_path, wait_until, undo)
        made.trainer(0)
        made.trainer(1)
        yield made


@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
def test_writers_keep_each_others_newest_and_leave_nothing(pair: Pair) -> None:
    writers = [pair.writer(rank) for rank in (0, 1)]
    for step in (10, 20, 30):
        for rank in (0, 1):
            pair.trainers[rank].say(f"save {step}")
        for rank in (0, 1):
            pair.until_replicated(rank, step)
    assert [pair.status(rank).replica_error for rank in (0, 1)] == ["", ""]
    assert commit.committed(pair.directory)
    for rank in (0, 1):
        pair.trainers[rank].say("close")
        stdin = pair.trainers[rank].process.stdin
        assert stdin
        stdin.close()
    assert [writer.wait(TIMEOUT_S) for writer in writers] == [0, 0]
    assert find_stores([pair.path / "host-0", pair.path / "host-1"]) == []
    wire.remove_key(pair.directory, 1)
    assert not (pair.directory / "replicas").exists()


# Each transfer has seven chunks; the second one is hit.
@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
@pytest.mark.parametrize(
    ("rank", "point"),
    [
        pytest.param(0, "replica.offered:2", marks=pytest.mark.slow),
        (0, "replica.sending:10"),
        pytest.param(0, "replica.sent:2", marks=pytest.mark.slow),
        pytest.param(1, "replica.listed:1", marks=pytest.mark.slow),
        pytest.param(1, "replica.allocating:2", marks=pytest.mark.slow),
        (1, "replica.receiving:10"),
        (1, "replica.received:2"),
        pytest.param(1, "replica.kept:2", marks=pytest.mark.slow),
    ],
)
def test_a_writer_killed_at_any_point_leaves_the_old_or_the_new(pair: Pair, rank: int, point: str) -> None:
    writers = [pair.writer(one, f"{point}:kill" if one == rank else "") for one in (0, 1)]
    if point != "replica.listed:1":
        pair.trainers[0].say("save 10")
        pair.until_replicated(0, 10)
    pair.trainers[0].say("save 20")
    assert writers[rank].wait(TIMEOUT_S) == -signal.SIGKILL
    kept = check_kept(StoreFiles(pair.trainers[1].store), 0)
    assert kept[:1] in ([Generation(1, 10)], [Generation(1, 20)]) or point == "replica.listed:1"
    pair.writer(rank)
    pair.until_replicated(0, 20)


@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "replica.receiving:10:stop"])
def test_a_stopped_peer_holds_up_neither_the_disk_nor_the_trainer(pair: Pair, fault: str) -> None:
    writers = [pair.writer(0), pair.writer(1, fault)]
    for rank in (0, 1):
        pair.trainers[rank].say("save 10")
    pair.until_replicated(0, 10)
    pair.until(lambda: commit.committed(pair.directory), "the checkpoint")
    if not fault:  # else it stops in the middle of the next transfer
        writers[1].send_signal(signal.SIGSTOP)
    for step in range(20, 30):
        pair.trainers[0].say(f"save {step}")  # ten saves into three slots wait for nobody
    pair.until(lambda: any(one.step >= 20 for one in commit.written_by(pair.directory, 0)), "a newer part on disk")
    pair.until(lambda: pair.status(0).replica_error, "the error in the status")
    writers[1].send_signal(signal.SIGCONT)
    pair.until_replicated(0, 29)
    assert pair.status(0).replica_error == ""


@pytest.mark.shows("after the loss of a host, replicas restore the newest common generation bit by bit")
def test_full_memory_of_the_peer_is_said_and_training_goes_on(pair: Pair) -> None:
    pair.writer(0)
    pair.writer(1, "replica.allocating:1:full")
    pair.trainers[0].say("save 10")
    pair.until(lambda: "No space left" in pair.status(0).replica_error, "the error in the status")
    pair.until(lambda: commit.written_by(pair.directory, 0), "the part on disk")
    pair.trainers[0].say("save 20")
    pair.until_replicated(0, 20)
