"""What a crowd at the dispatcher's port leaves behind."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi_dataworkers.address import read_address_file
from mpi_dataworkers.transports.zmq import CONTROL_FRAME_BYTES

# ZMTP 3.0 (https://rfc.zeromq.org/spec/23/): a greeting with the mechanism CURVE, and the head of a long command.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
HALF_A_FRAME = b"\x06" + CONTROL_FRAME_BYTES.to_bytes(8, "big") + bytes(CONTROL_FRAME_BYTES - 1)
NUM_STRANGERS = 200


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_what_strangers_announce_is_given_back_when_they_are_gone(
    service: Any, wait_until: Callable[..., None]
) -> None:
    wait_until(service.address_file.exists, what="the dispatcher")
    host, _, port = read_address_file(service.address_file).address.removeprefix("tcp://").rpartition(":")
    pid = service.dispatcher.pid
    before = rss_bytes(pid)
    with contextlib.ExitStack() as crowd:
        for _ in range(NUM_STRANGERS):
            one = crowd.enter_context(socket.create_connection((host, int(port)), timeout=10))
            with contextlib.suppress(ConnectionError):
                one.sendall(GREETING + HALF_A_FRAME)
        most = rss_bytes(pid)
        assert most > before + (NUM_STRANGERS << 20) // 4, "the attack is one"
    wait_until(lambda: rss_bytes(pid) < before + (20 << 20), timeout_s=20, what="the memory that they had")
    service.start_workers(1)  # it is still there for the job
