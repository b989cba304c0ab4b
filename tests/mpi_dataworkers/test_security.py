"""Who is not of the job gets nothing: no batch, no message in, no file read."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets
import zmq

from mpi_dataworkers import DataLoader
from mpi_dataworkers.address import ServiceAddress, parse_service, read_address_file, write_address_file
from mpi_dataworkers.codec import encode
from mpi_dataworkers.errors import ConfigError, ServiceError
from mpi_dataworkers.messages import Batch, Hello, Membership, Proof
from mpi_dataworkers.transports.base import PeerUnreachable
from mpi_dataworkers.transports.proof import is_proof, new_nonce, prove
from mpi_dataworkers.transports.zmq import ZmqBatchSender

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


def dealer_to(address: str, context: zmq.Context[Any]) -> zmq.Socket[Any]:
    dealer: zmq.Socket[Any] = context.socket(zmq.DEALER)
    dealer.linger = 0
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
        stranger = dealer_to(client.receiver, context)
        forged = Batch(session, 5, 1 << 60, 8, b"\xc0", [])
        for frames in ([b""], [b"junk"], [encode(forged)], [encode(Membership(0))], [encode(Proof(b"x"))]):
            stranger.send_multipart(frames)
        stranger.send(encode(Hello("w", new_nonce())))
        assert stranger.poll(5000), "the loader proves itself to anyone who asks"
        stranger.recv()
        stranger.send(encode(Proof(bytes(32))))
        stranger.send(encode(forged))
        assert not stranger.poll(300), "and says nothing more"
        stranger.close()
        ids = [i for _, batch in passing for i in batch.tolist()]
        assert ids == list(range(8, 80))


def test_a_data_worker_sends_nothing_to_an_impostor() -> None:
    with zmq.Context() as context:
        impostor = context.socket(zmq.ROUTER)
        impostor.linger = 0
        port = impostor.bind_to_random_port("tcp://127.0.0.1")
        sender = ZmqBatchSender("11" * 32, "w")
        import threading

        def answer() -> None:
            name, _ = impostor.recv_multipart()
            from mpi_dataworkers.messages import Challenge

            impostor.send_multipart([name, encode(Challenge(new_nonce(), bytes(32)))])

        thread = threading.Thread(target=answer)
        thread.start()
        with pytest.raises(PeerUnreachable, match="does not hold this job's key; nothing was sent"):
            sender.send(f"tcp://127.0.0.1:{port}", Batch("s", 0, 0, 1, b"", []), [b"secret"])
        thread.join()
        assert not impostor.poll(200)
        sender.close(0)
        impostor.close()


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
    assert "the peer speaks protocol version 7, this side version 1" in version
    assert "truncated or malformed" in truncated
    assert wrong == "Batch is not a message for a dispatcher"
    with DataLoader(datasets.Augmented(8), service=service.name) as loader:
        assert len(list(loader)) == 8
