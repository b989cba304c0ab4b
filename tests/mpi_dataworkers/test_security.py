"""Who is not of the job gets nothing: no batch, no message in, no file read."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets
import zmq

from mpi_dataworkers import DataLoader
from mpi_dataworkers.address import ServiceAddress, parse_service, read_address_file, write_address_file
from mpi_dataworkers.codec import encode
from mpi_dataworkers.errors import ConfigError, ServiceError
from mpi_dataworkers.messages import PROTOCOL_VERSION, Batch, Challenge, Hello, Membership, Proof
from mpi_dataworkers.transports import door
from mpi_dataworkers.transports.base import PeerUnreachable
from mpi_dataworkers.transports.proof import TicketGate, is_proof, new_nonce, new_ticket, prove
from mpi_dataworkers.transports.zmq import BATCH_FRAME_BYTES, ZmqBatchReceiver, ZmqBatchSender, _Gate

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


def test_a_ticket_is_good_once_for_its_address_and_key() -> None:
    gate = TicketGate(KEY, ["tcp://h:1"])
    name, ticket = new_ticket(KEY, "tcp://h:1")
    assert not gate.admits(name, b"x")
    assert not gate.admits("\xe9".encode(), "\xe9".encode())
    assert gate.admits(name, ticket)
    assert not gate.admits(name, ticket), "a replay"
    assert not gate.admits(*new_ticket(KEY, "tcp://h:2"))
    assert not gate.admits(*new_ticket(bytes(31) + b"\1", "tcp://h:1"))


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


def key_of(service: Any) -> str:
    return read_address_file(service.address_file).batch_key


def dealer_to(address: str, context: zmq.Context[Any], ticket: tuple[bytes, bytes] | None = None) -> zmq.Socket[Any]:
    dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
    dealer.linger = 0
    if ticket is not None:
        dealer.plain_username, dealer.plain_password = ticket
    dealer.connect(address)
    return dealer


def test_a_stranger_can_neither_deliver_nor_read_batches(service: Any) -> None:
    service.start_workers()
    with DataLoader(datasets.Augmented(80), batch_size=8, service=service.name) as loader, zmq.Context() as context:
        passing = iter(loader)
        next(passing)
        client = loader._stream.client
        assert client is not None
        session = passing._passing._pass.session.session_id  # type: ignore[attr-defined]
        forged = Batch(session, 5, 1 << 60, 8, b"\xc0", [])
        for receiver in client.receivers:
            if not receiver.startswith(("tcp", "ipc")):
                continue
            stranger = dealer_to(receiver, context, ticket=(b"ab" * 32, b"cd" * 32))
            for frames in ([b""], [b"junk"], [encode(forged)], [encode(Membership(0))], [encode(Proof(b"x"))]):
                stranger.send_multipart(frames)
            stranger.send(encode(Hello("w", receiver, new_nonce())))
            assert not stranger.poll(300), "without a ticket not even a handshake is read"
            stranger.close()
            insider = dealer_to(receiver, context, ticket=new_ticket(bytes.fromhex(key_of(service)), receiver))
            insider.send(encode(Hello("w", receiver, new_nonce())))
            assert insider.poll(5000), "the loader proves itself to anyone who asks with a ticket"
            insider.recv()
            insider.send(encode(Proof(bytes(32))))
            insider.send(encode(forged))
            assert not insider.poll(300), "and says nothing more"
            insider.close()
        ids = [i for _, batch in passing for i in batch.tolist()]
        assert ids == list(range(8, 80))


def test_a_data_worker_sends_nothing_to_an_impostor() -> None:
    with zmq.Context() as context:
        gate = _Gate(context, b"PLAIN", lambda _: True)  # lets in whom it can get
        impostor = context.socket(zmq.ROUTER)
        impostor.linger = 0
        impostor.plain_server = True
        receiver = f"tcp://127.0.0.1:{impostor.bind_to_random_port('tcp://127.0.0.1')}"
        sender = ZmqBatchSender("11" * 32, "w")

        def answer() -> None:
            while not impostor.poll(20):
                gate.answer()
            name, _ = impostor.recv_multipart()
            impostor.send_multipart([name, encode(Challenge(new_nonce(), bytes(32)))])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerUnreachable, match="does not hold this job's key; nothing was sent"):
            sender.send(receiver, Batch("s", 0, 0, 1, b"", []), [b"secret"])
        thread.join()
        assert not impostor.poll(200)
        sender.close(0)
        impostor.close()
        gate.socket.close()


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


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_cannot_read_the_keys(service: Any, wait_until: Any) -> None:
    wait_until(service.address_file.exists)
    service.directory.chmod(0o755)
    for parent in service.directory.parents:
        if str(parent).startswith("/tmp/pytest-of"):
            parent.chmod(0o755)
    for path in (service.address_file, service.directory / "work" / "journal.sqlite"):
        argv = ["setpriv", "--reuid", "nobody", "--clear-groups", "cat", str(path)]
        result = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert "Permission denied" in result.stderr
        assert result.stdout == ""


@pytest.mark.skipif(os.geteuid() != 0, reason="becoming another user needs root")
def test_another_user_of_the_host_gets_nothing_and_the_job_goes_on(service: Any) -> None:
    """He knows every address, a used ticket and a recorded handshake. He can import hetstream, so he has its code."""
    service.start_workers()
    service.directory.chmod(0o755)
    with DataLoader(datasets.Augmented(80), batch_size=8, service=service.name) as loader:
        passing = iter(loader)
        next(passing)
        client = loader._stream.client
        assert client is not None
        (over_zmq,) = (address for address in client.receivers if address.startswith("tcp"))
        key, worker, other = bytes.fromhex(key_of(service)), new_nonce(), new_nonce()
        used = new_ticket(key, over_zmq)
        with zmq.Context() as context:  # so that the ticket is used up
            insider = dealer_to(over_zmq, context, ticket=used)
            insider.send(encode(Hello("w", over_zmq, worker)))
            assert insider.poll(5000)
            insider.close()
        recorded = [
            encode(Hello("w", client.receivers[0], worker)),
            encode(Proof(prove(key, "worker", worker, other, client.receivers[0]))),
        ]
        known = {
            "session": passing._passing._pass.session.session_id,  # type: ignore[attr-defined]
            "dispatcher": read_address_file(service.address_file).address,
            "receivers": client.receivers,
            "address_file": str(service.address_file),
            "journal": str(service.directory / "work" / "journal.sqlite"),
            "pid": os.getpid(),
            "recorded": [one.hex() for one in recorded],
            "ticket": [word.decode() for word in used],
        }
        intruder = subprocess.run(
            [sys.executable, str(PROGRAMS / "intruder.py"), json.dumps(known)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert intruder.returncode == 0, intruder.stderr
        assert json.loads(intruder.stdout) == [], intruder.stderr
        ids = [i for _, batch in passing for i in batch.tolist()]
        assert ids == list(range(8, 80))


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_a_stranger_cannot_make_a_loader_hold_memory(caplog: pytest.LogCaptureFixture) -> None:
    """What is announced is not allocated, and what is sent is bounded by a frame and ended by the handshake's limit."""
    receiver = ZmqBatchReceiver("11" * 32, ["tcp://127.0.0.1:*"])
    host, _, port = receiver.addresses[0].removeprefix("tcp://").rpartition(":")
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"PLAIN".ljust(20, b"\0") + bytes(32)
    before = rss_bytes()
    strangers = []
    for announced in (BATCH_FRAME_BYTES + 1, 1 << 40, (1 << 63) - 1, BATCH_FRAME_BYTES - 1):
        stranger = socket.create_connection((host, int(port)))
        strangers.append(stranger)
        stranger.sendall(greeting)
        got = b""
        while len(got) < len(greeting):
            got += stranger.recv(len(greeting) - len(got))
        stranger.sendall(b"\x06" + announced.to_bytes(8, "big") + b"x" * 1000)  # a long command frame
        if announced > BATCH_FRAME_BYTES:
            with contextlib.suppress(ConnectionResetError):
                assert stranger.recv(1) == b"", "too long: closed at once"
        receiver.receive()
    assert rss_bytes() - before < 8 << 20
    # Nor by sending it, in many connections at once: they are cut off.
    flood = [socket.create_connection((host, int(port))) for _ in range(16)]
    for stranger in flood:
        stranger.settimeout(10)
        stranger.sendall(greeting + b"\x06" + (BATCH_FRAME_BYTES - 1).to_bytes(8, "big"))
    sent = [0] * len(flood)

    def send(number: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                sent[number] += flood[number].send(bytes(1 << 20))

    threads = [threading.Thread(target=send, args=(number,)) for number in range(len(flood))]
    for thread in threads:
        thread.start()
    most = 0
    while any(thread.is_alive() for thread in threads):
        select.select([], [], [], receiver.look_again_s if receiver.look_again_s < 1 else 0.01)
        receiver.receive()
        most = max(most, rss_bytes() - before)
    for thread in threads:
        thread.join()
    assert most < 256 << 20, "16 frames are 1 GiB"
    assert sum(sent) < 16 * BATCH_FRAME_BYTES / 2
    assert [message for message in caplog.messages if "cut a connection" in message], "told once"
    for stranger in (*strangers, *flood):
        stranger.close()
    receiver.close()


def test_a_crowd_of_strangers_makes_room_for_data_workers(monkeypatch: pytest.MonkeyPatch, wait_until: Any) -> None:
    monkeypatch.setattr(door, "_MAX_STRANGERS", 3)
    receiver = ZmqBatchReceiver("11" * 32, ["tcp://127.0.0.1:*"])
    host, _, port = receiver.addresses[0].removeprefix("tcp://").rpartition(":")
    crowd = [socket.create_connection((host, int(port))) for _ in range(5)]
    sender = ZmqBatchSender("11" * 32, "w")
    thread = threading.Thread(target=sender.send, args=(receiver.addresses[0], Batch("s", 0, 0, 1, b"", []), [b"x"]))
    wait_until(lambda: receiver.receive() or len(receiver._door) == 3, 10, "that the first of them are cut off")
    thread.start()
    came: list[Any] = []
    wait_until(lambda: came.extend(receiver.receive()) or came, 10, "a batch")
    assert bytes(came[0].frames[0]) == b"x"
    thread.join()
    for stranger in crowd[:2]:
        stranger.settimeout(10)
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(100):
                pass
    assert receiver.look_again_s < 1, "some strangers are left"
    sender.close(0)
    receiver.close()
    for stranger in crowd:
        stranger.close()


def test_the_dispatcher_refuses_other_versions_and_goes_on(service: Any, wait_until: Any) -> None:
    wait_until(service.address_file.exists)
    program = f"""
import sys
from pathlib import Path
from mpi_dataworkers.address import read_address_file
from mpi_dataworkers.codec import encode
from mpi_dataworkers.messages import Batch, LeaveWorker
from mpi_dataworkers.transports.zmq import ZmqWorkerEndpoint
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
