"""What a crowd at the dispatcher's port leaves behind."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.transports.zmq import _MAX_UNPROVEN, CONTROL_FRAME_BYTES
from hetstream.mpi_dataworkers.wire.address import read_address_file

# ZMTP 3.0 (https://rfc.zeromq.org/spec/23/): a greeting with the mechanism CURVE, and the head of a long command.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + b"\0" + bytes(31)
HALF_A_FRAME = b"\x06" + CONTROL_FRAME_BYTES.to_bytes(8, "big") + bytes(CONTROL_FRAME_BYTES - 1)
NUM_STRANGERS = _MAX_UNPROVEN + 300
# What all of them may have the dispatcher hold: a frame, and what libzmq keeps for a connection.
MOST_BYTES = _MAX_UNPROVEN * (CONTROL_FRAME_BYTES + (48 << 10))


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@contextlib.contextmanager
def many_descriptors() -> Iterator[None]:
    """Let this process have a crowd's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_strangers_announce_is_given_back_when_they_are_gone(
    service: Any, wait_until: Callable[..., None]
) -> None:
    wait_until(service.address_file.exists, what="the dispatcher")
    host, _, port = read_address_file(service.address_file).address.removeprefix("tcp://").rpartition(":")
    pid = service.dispatcher.pid
    before = rss_bytes(pid)
    with contextlib.ExitStack() as crowd, many_descriptors():
        for _ in range(NUM_STRANGERS):
            one = crowd.enter_context(socket.create_connection((host, int(port)), timeout=10))
            with contextlib.suppress(ConnectionError):
                one.sendall(GREETING + HALF_A_FRAME)
        assert rss_bytes(pid) > before + _MAX_UNPROVEN * CONTROL_FRAME_BYTES // 4, "the attack is one"
        # Those that are too many go at once; what they had goes with them.
        limit = before + MOST_BYTES + (20 << 20)
        wait_until(lambda: rss_bytes(pid) < limit, timeout_s=4, what="a limit of what all of them hold")
    # The frames are gone; some 20 KB of libzmq's for each connection stay with the allocator, which uses them again.
    wait_until(lambda: rss_bytes(pid) < before + (40 << 20), timeout_s=20, what="the memory that they had")
    service.start_workers(1)  # it is still there for the job


# As a crowd at a port: large blocks, with small ones that stay between them. The first large block that is freed has
# glibc take the next ones from the heap.
HOLD_AND_FREE = """
import ctypes, os, sys
from hetstream.mpi_dataworkers.process.interpreter import give_back_freed_memory
if sys.argv[1] == "gives back":
    give_back_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype = ctypes.c_void_p
libc.free.argtypes = [ctypes.c_void_p]
libc.free(libc.malloc(4 << 20))
large = []
for _ in range(100):
    large.append(libc.malloc(1 << 20))
    ctypes.memset(ctypes.c_void_p(large[-1]), 1, 1 << 20)
    libc.malloc(20000)
for block in large:
    libc.free(block)
print(int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_freed_memory_goes_back_to_the_kernel_because_it_was_asked_for() -> None:
    def held_mib(how: str) -> int:
        argv = [sys.executable, "-c", HOLD_AND_FREE, how]
        return int(subprocess.run(argv, capture_output=True, text=True, check=True).stdout)

    assert held_mib("keeps") > held_mib("gives back") + 90
