"""What names are worth: those of Unix sockets are public, and one in a file system may be a link."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.transports.shm import ShmReceiver
from hetstream.mpi_dataworkers.transports.sockets import SocketReceiver
from hetstream.mpi_dataworkers.wire.address import (
    ServiceAddress,
    read_address_file,
    remove_address_file,
    write_address_file,
)
from tests.base.users import STRANGER, needs_root, run_as

SERVICE = ServiceAddress("tcp://127.0.0.1:1", "a", "b", "c", "00" * 32)
RECEIVERS: dict[str, tuple[Callable[[], SocketReceiver | ShmReceiver], socket.SocketKind]] = {
    "ipc": (lambda: SocketReceiver("00" * 32, ["ipc://@hetstream-name-of-a-test"]), socket.SOCK_STREAM),
    "shm": (lambda: ShmReceiver("00" * 32, 1 << 20), socket.SOCK_SEQPACKET),
}


@needs_root
@pytest.mark.parametrize("transport", RECEIVERS)
def test_a_stranger_reads_the_name_of_a_socket_and_gets_no_further(transport: str) -> None:
    make, kind = RECEIVERS[transport]
    receiver = make()
    name = receiver.addresses[0].partition("@")[2]
    done = threading.Event()

    def serve() -> None:
        while not done.wait(0.01):
            assert receiver.receive() == []

    def intrude() -> None:
        assert f"@{name}\n" in Path("/proc/net/unix").read_text(), "the name is no secret"
        with socket.socket(socket.AF_UNIX, kind) as connection:
            connection.settimeout(10)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.connect(f"\0{name}")
                assert connection.recv(1) == b"", "he is told nothing"

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        run_as(STRANGER, intrude)
    finally:
        done.set()
        thread.join()
        receiver.close()


def test_address_files_are_no_links(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    write_address_file(real, SERVICE)
    link.symlink_to(real)
    with pytest.raises(ServiceError, match="a link, which is not followed"):
        read_address_file(link)
    remove_address_file(link, SERVICE)
    assert link.is_symlink()
    write_address_file(link, SERVICE)
    assert not link.is_symlink(), "a new file takes the place of the link, and where it led nothing changes"
    assert real.stat().st_nlink == 1
    assert read_address_file(link) == read_address_file(real) == SERVICE
    with pytest.raises(FileNotFoundError):
        read_address_file(tmp_path / "none")
