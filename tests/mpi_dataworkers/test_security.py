"""Who is not of the job gets nothing: no batch, no message in, no file read."""

from __future__ import annotations

import contextlib
import copy
import json
import math
import os
import pickle
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sample_datasets as datasets
import zmq

from hetstream import DataLoader
from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.errors import ProtocolError, ServiceError
from hetstream.mpi_dataworkers.transports import sockets
from hetstream.mpi_dataworkers.transports.auth import (
    SEAL_BYTES,
    LoaderHandshake,
    Seal,
    WorkerHandshake,
    is_proof,
    most_unproven,
    new_nonce,
    prove,
)
from hetstream.mpi_dataworkers.transports.base import PeerUnreachable, find_frames, lay_out
from hetstream.mpi_dataworkers.transports.sockets import SocketBatchSender, SocketReceiver
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, parse_service, read_address_file, write_address_file
from hetstream.mpi_dataworkers.wire.codec import encode
from hetstream.mpi_dataworkers.wire.messages import PROTOCOL_VERSION, Batch, Challenge, Hello, Membership, Proof

PROGRAMS = Path(__file__).with_name("programs")
SERVICE = ServiceAddress("tcp://127.0.0.1:1", "a", "b", "c", "00" * 32)
KEY = bytes(32)


def test_a_proof_holds_for_its_role_nonces_and_address_only() -> None:
    worker, loader = new_nonce(), new_nonce()
    proof = prove(KEY, "loader", worker, loader, "tcp://h:1")
    assert is_proof(proof, KEY, "loader", worker, loader, "tcp://h:1")
    assert not is_proof(proof, KEY, "worker", worker, loader, "tcp://h:1")
    assert not is_proof(proof, KEY, "loader", new_nonce(), loader, "tcp://h:1")
    assert not is_proof(proof, KEY, "loader", worker, new_nonce(), "tcp://h:1")
    assert not is_proof(proof, KEY, "loader", worker, loader, "tcp://h:2")
    assert not is_proof(proof, bytes(31) + b"\1", "loader", worker, loader, "tcp://h:1")
    assert not is_proof(prove(KEY, "loader", b"", b"", "a"), KEY, "loader", b"", b"", "a"), "nonces are never short"


def test_a_handshake_cannot_be_replayed_shortened_or_turned_round() -> None:
    worker = WorkerHandshake(KEY, "w", "tcp://h:1")
    loader = LoaderHandshake(KEY, "tcp://h:1")
    challenge = loader.answer(worker.hello)
    assert challenge is not None
    proof = worker.answer(challenge)
    assert loader.answer(proof) is None
    assert loader.proven
    again = LoaderHandshake(KEY, "tcp://h:1")
    with pytest.raises(ProtocolError, match="without the job's key"):
        again.answer(proof)
    again.answer(worker.hello)
    with pytest.raises(ProtocolError, match="without the job's key"):
        again.answer(proof)  # as it was recorded, under a new nonce
    assert not again.proven
    with pytest.raises(ProtocolError, match="Hello"):
        again.answer(worker.hello)
    with pytest.raises(ProtocolError, match="Hello"):
        LoaderHandshake(KEY, "tcp://h:2").answer(worker.hello)
    for wrong in (Challenge(new_nonce(), challenge.proof), Challenge(challenge.nonce, proof.proof), proof):
        with pytest.raises(ProtocolError, match="does not hold this job's key"):
            worker.answer(wrong)


def test_a_seal_holds_for_its_header_number_and_connection_only() -> None:
    there, here, elsewhere = Seal(KEY), Seal(KEY), Seal(bytes(31) + b"\1")
    first, second = there.put_on(b"one"), there.put_on(b"two")
    assert bytes(here.take_off(memoryview(first))) == b"one"
    for wrong in (first, second[:-1], b"tWo" + second[3:], b""):
        again = copy.copy(here)
        with pytest.raises(ProtocolError, match="was changed on its way"):
            again.take_off(memoryview(wrong))
    assert bytes(here.take_off(memoryview(second))) == b"two"
    with pytest.raises(ProtocolError, match="was changed on its way"):
        elsewhere.take_off(memoryview(first))


def test_address_files_are_checked(tmp_path: Path) -> None:
    path = tmp_path / "address"
    write_address_file(path, SERVICE)
    assert read_address_file(path) == SERVICE
    assert "00" * 32 not in repr(SERVICE)
    for text in ("", "[]", "{}", json.dumps({"format": 2}), json.dumps({"format": 1, "address": "x"})):
        path.write_text(text)
        with pytest.raises(ServiceError, match=str(path)):
            read_address_file(path)
    for service in ("", "file:", "tcp://host:1", "file"):
        with pytest.raises(ConfigError, match="the form is file:PATH"):
            parse_service(service)
    assert parse_service("file:work/address") == Path.cwd() / "work" / "address"


def dealer_to(address: str, context: zmq.Context[Any]) -> zmq.Socket[Any]:
    dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
    dealer.linger = 0
    dealer.connect(address)
    return dealer


def connect_to(address: str) -> socket.socket:
    """A connection to a receiver of batches, as anybody could make it."""
    if address.startswith("ipc:"):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(address.removeprefix("ipc://").replace("@", "\0", 1))
    else:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        connection = socket.create_connection((host, int(port)))
    connection.settimeout(10)
    return connection


def framed(text: bytes) -> bytes:
    table, _, total = lay_out([len(text)])
    return total.to_bytes(8, "little") + table + text


def is_closed(connection: socket.socket) -> bool:
    """Whether the other end closes without a word."""
    with contextlib.suppress(ConnectionResetError):
        return connection.recv(1) == b""
    return True


def test_a_stranger_can_neither_deliver_nor_read_batches(service: Any) -> None:
    service.start_workers()
    with DataLoader(datasets.Augmented(80), batch_size=8, service=service.name) as loader:
        passing = iter(loader)
        next(passing)
        client = loader._connection.client
        assert client is not None
        session = passing._pass._source._sessions[0].session_id  # type: ignore[attr-defined]
        forged = Batch(session, 5, 1 << 60, 8, b"\xc0", [])
        for receiver in client.receivers:
            if not receiver.startswith(("tcp", "ipc")):
                continue
            for message in (forged, Membership(0), Proof(b"x")):
                with connect_to(receiver) as stranger:
                    stranger.sendall(framed(encode(message)))
                    assert is_closed(stranger)
            with connect_to(receiver) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert is_closed(stranger)
            with connect_to(receiver) as insider:
                insider.sendall(framed(encode(Hello("w", receiver, new_nonce()))))
                assert insider.recv(4096), "the loader proves itself to anyone who asks"
                insider.sendall(framed(encode(Proof(bytes(32)))) + framed(encode(forged)))
                assert is_closed(insider), "and says nothing more"
        ids = [i for _, batch in passing for i in batch.tolist()]
        assert ids == list(range(8, 80))


def test_a_data_worker_sends_nothing_to_an_impostor() -> None:
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        receiver = "tcp://{}:{}".format(*impostor.getsockname())
        sender = SocketBatchSender("11" * 32, "w")
        heard = []

        def answer(reply: bytes) -> None:
            connection, _ = impostor.accept()
            with connection:
                heard.append(connection.recv(4096))
                connection.sendall(reply)
                heard.append(connection.recv(4096))

        forged = framed(encode(Challenge(new_nonce(), bytes(32))))
        for reply, why in (
            (forged, "does not hold this job's key; nothing was sent"),
            ((1 << 40).to_bytes(8, "little"), "it answers with 1099511627776 bytes; nothing was sent"),
            (b"HTTP/1.1", "nothing was sent"),
            (framed(b"junk"), "no hetstream message"),
        ):
            thread = threading.Thread(target=answer, args=(reply,))
            thread.start()
            with pytest.raises(PeerUnreachable, match=why):
                sender.send(receiver, Batch("s", 0, 0, 1, b"", []), [b"secret"])
            thread.join()
        assert heard[1::2] == [b""] * 4
        assert b"secret" not in b"".join(heard)
        sender.close(0)


def test_without_the_key_the_dispatcher_does_not_answer(service: Any, wait_until: Any) -> None:
    wait_until(service.address_file.exists)
    address = json.loads(service.address_file.read_text())["address"]
    with zmq.Context() as context:
        stranger = dealer_to(address, context)
        stranger.send(encode(Membership(0)))
        assert not stranger.poll(500)
        stranger.close()
    with DataLoader(datasets.Augmented(8), service=service.name) as loader:
        assert len(list(loader)) == 8


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stranger_cannot_make_a_loader_hold_memory() -> None:
    """What is announced is not allocated, and of what is sent no more is read than a handshake has."""
    receiver = SocketReceiver("11" * 32, ["tcp://127.0.0.1:*"])
    before = rss_bytes()
    for announced in (4097, 1 << 40, (1 << 64) - 1):
        with connect_to(receiver.addresses[0]) as stranger:
            stranger.sendall(announced.to_bytes(8, "little") + b"x" * 1000)
            while receiver._unproven or not select.select([stranger], [], [], 0)[0]:
                assert receiver.receive() == []
            assert is_closed(stranger)
    flood = [connect_to(receiver.addresses[0]) for _ in range(16)]
    sent = [0] * len(flood)

    def send(number: int) -> None:
        with contextlib.suppress(OSError):
            flood[number].sendall((4096).to_bytes(8, "little"))
            while True:
                sent[number] += flood[number].send(bytes(1 << 20))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(flood))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        select.select(receiver.sources, [], [], 0.01)
        assert receiver.receive() == []
    for thread in threads:
        thread.join()
    assert rss_bytes() - before < 64 << 20, "16 MiB of it are the senders' own"
    for stranger in flood:
        stranger.close()
    receiver.close()


def test_who_does_not_prove_the_key_in_time_is_cut_off(monkeypatch: pytest.MonkeyPatch, wait_until: Any) -> None:
    monkeypatch.setattr(sockets, "_HANDSHAKE_TIMEOUT_S", 0.2)
    receiver = SocketReceiver("11" * 32, ["tcp://127.0.0.1:*"])
    with connect_to(receiver.addresses[0]) as stranger:
        stranger.sendall(b"\x10")
        wait_until(lambda: receiver.receive() or receiver._unproven, 10, "a stranger")
        assert receiver.look_again_s == 0.2
        wait_until(lambda: receiver.receive() or not receiver._unproven, 10, "its end")
        assert is_closed(stranger)
    assert receiver.look_again_s == math.inf
    receiver.close()


def test_strangers_get_an_eighth_of_the_descriptors_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, most in ((1024, 128), (64, 8), (1 << 20, 256), (4, 1), (resource.RLIM_INFINITY, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, limit=limit: (limit, limit))
        assert most_unproven(256) == most


def test_a_crowd_of_strangers_makes_room_for_data_workers(monkeypatch: pytest.MonkeyPatch, wait_until: Any) -> None:
    monkeypatch.setattr(sockets, "_MAX_UNPROVEN", 3)
    receiver = SocketReceiver("11" * 32, ["tcp://127.0.0.1:*"])
    crowd = []
    for number in range(5):
        crowd.append(connect_to(receiver.addresses[0]))
        wait_until(lambda: receiver.receive() or len(receiver._unproven) == min(3, len(crowd)), 10, f"{number}")
    sender = SocketBatchSender("11" * 32, "w")
    thread = threading.Thread(target=sender.send, args=(receiver.addresses[0], Batch("s", 0, 0, 1, b"", []), [b"x"]))
    thread.start()
    came: list[Any] = []
    wait_until(lambda: came.extend(receiver.receive()) or came, 10, "a batch")
    assert bytes(came[0].frames[0]) == b"x"
    thread.join()
    assert all(map(is_closed, crowd[:2])), "the oldest made room"
    sender.close(0)
    receiver.close()
    for stranger in crowd:
        stranger.close()


class OnPath:
    """Somebody on the network between data worker and loader, who forwards what they send and changes batches.

    Args:
        receiver: the loader's address.
        change: from the bytes of batches in order to those to be forwarded.
    """

    def __init__(self, receiver: str, change: Any) -> None:
        self._change = change
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.name = self._listener.getsockname()
        self._loader = connect_to(receiver)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        worker, _ = self._listener.accept()
        back = threading.Thread(target=self._forward_back, args=(worker,))
        back.start()
        with worker:
            for _ in range(2):  # Hello, Proof
                self._loader.sendall(framed_as_it_is(read_message(worker)))
            batches = [read_message(worker) for _ in range(3)]
            with contextlib.suppress(OSError):  # the loader has hung up on it
                for text in self._change(batches):
                    self._loader.sendall(framed_as_it_is(text))
            back.join()

    def _forward_back(self, worker: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while text := self._loader.recv(4096):
                worker.sendall(text)

    def close(self) -> None:
        self._thread.join()
        self._loader.close()
        self._listener.close()


def framed_as_it_is(text: bytes) -> bytes:
    return len(text).to_bytes(8, "little") + text


def read_message(connection: socket.socket) -> bytes:
    def read(num_bytes: int) -> bytes:
        text = b""
        while len(text) < num_bytes:
            more = connection.recv(num_bytes - len(text))
            assert more, "the connection ended inside a message"
            text += more
        return text

    return read(int.from_bytes(read(8), "little"))


class Evil:
    """Its pickle runs code where it is read."""

    def __reduce__(self) -> Any:
        return os.abort, ()


def with_a_pickle(text: bytes) -> bytes:
    """A batch with another header, whose structure is a pickle of the attacker's."""
    frames = find_frames(memoryview(text))
    spec = msgspec.msgpack.encode(([], [], ["p", pickle.dumps(Evil())]))
    header = encode(Batch("s", 0, 0, 1, spec, [])) + bytes(frames[0][-SEAL_BYTES:])
    table, offsets, total = lay_out([len(header), *(len(frame) for frame in frames[1:])])
    whole = bytearray(total)
    whole[: len(table)] = table
    for frame, offset in zip([header, *frames[1:]], offsets, strict=True):
        whole[offset : offset + len(frame)] = frame
    return bytes(whole)


@pytest.mark.parametrize(
    ("change", "untouched"),
    [
        (lambda batches: batches, 3),
        (lambda batches: [batches[0], with_a_pickle(batches[1]), batches[2]], 1),
        (lambda batches: [batches[0], batches[0], batches[1]], 1),
        (lambda batches: [batches[1], batches[0], batches[2]], 0),
        (lambda batches: [batches[0], batches[2]], 1),
    ],
    ids=["nothing", "a pickle in a header", "repeated", "moved", "left out"],
)
@pytest.mark.parametrize("compress", [False, True], ids=["plain", "compressed"])
def test_who_is_on_the_path_cannot_change_what_is_made_into_objects(
    monkeypatch: pytest.MonkeyPatch, change: Any, untouched: int, compress: bool
) -> None:
    receiver = SocketReceiver("11" * 32, ["tcp://127.0.0.1:*"], compress)
    (address,) = receiver.addresses
    attacker = OnPath(address, change)
    monkeypatch.setattr(sockets, "_tcp_name", lambda _: attacker.name)
    sender = SocketBatchSender("11" * 32, "w")

    def send() -> None:
        for step in range(3):
            sender.send(address, Batch("s", step, 0, 1, b"spec", [(0, 0, 1 << 17)]), [bytes(1 << 17)])

    thread = threading.Thread(target=send)
    thread.start()
    came: list[Any] = []
    deadline = time.monotonic() + 10
    while len(came) < min(3, untouched + 1) and time.monotonic() < deadline:
        select.select(receiver.sources, [], [], 0.1)
        came += receiver.receive()
    thread.join()
    assert [one.header.step for one in came if not isinstance(one, ProtocolError)] == list(range(untouched))
    refused = [str(one) for one in came if isinstance(one, ProtocolError)]
    assert ["was changed on its way" in text for text in refused] == [True] * (untouched < 3)
    assert len(receiver._connections) == (untouched == 3), "it has to prove the key again"
    receiver.close()
    attacker.close()
    sender.close(0)


def test_the_dispatcher_refuses_other_versions_and_goes_on(service: Any, wait_until: Any) -> None:
    wait_until(service.address_file.exists)
    program = f"""
import sys
from pathlib import Path
from hetstream.mpi_dataworkers.wire.address import read_address_file
from hetstream.mpi_dataworkers.wire.codec import encode
from hetstream.mpi_dataworkers.wire.messages import Batch, LeaveWorker
from hetstream.mpi_dataworkers.transports.zmq import ZmqWorkerEndpoint
endpoint = ZmqWorkerEndpoint(read_address_file(Path({str(service.address_file)!r})), "ab" * 16, 10)
for bad in (b"HET\\x07" + encode(LeaveWorker())[4:], encode(LeaveWorker())[:7], encode(Batch("s", 0, 0, 0, b"", []))):
    endpoint._control.send(bad)
    print(endpoint.poll(10)[0].text)
endpoint.close()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    version, truncated, wrong = result.stdout.splitlines()
    assert f"the peer speaks protocol version 7, this side version {PROTOCOL_VERSION}" in version
    assert "truncated or malformed" in truncated
    assert wrong == "Batch is not a message for a dispatcher"
    with DataLoader(datasets.Augmented(8), service=service.name) as loader:
        assert len(list(loader)) == 8
