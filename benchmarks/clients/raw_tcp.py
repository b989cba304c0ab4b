"""Limit: one loopback TCP connection and plain blocking sockets.

Two modes, given as the first argument:

- `framed`: an 8-byte length before each batch, the batch received into one reused buffer of its size. What a
  transport would do that had nothing else to do.
- `coalesced`: no frames; both sides move 1 MiB at a time, many small batches in one call. What a transport could
  reach for small batches that gathered them.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import struct
import sys
from collections.abc import Iterator
from math import prod

import numpy as np

from benchmarks.clients.window import measure, payload, read_request

HEADER = struct.Struct("!Q")
COALESCED_BYTES = 1 << 20


def send_framed(address: tuple[str, int], shape: list[int], core: int) -> None:
    """Send the batch until the client goes away."""
    os.sched_setaffinity(0, {core})
    batch = payload(shape).reshape(-1).data
    header = HEADER.pack(len(batch))
    with socket.create_connection(address) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            while True:
                sent = connection.sendmsg([header, batch]) - len(header)
                if sent < len(batch):
                    connection.sendall(batch[sent:])
        except (BrokenPipeError, ConnectionResetError):
            return


def send_coalesced(address: tuple[str, int], _shape: list[int], core: int) -> None:
    """Send 1 MiB at a time until the client goes away."""
    os.sched_setaffinity(0, {core})
    piece = bytes(COALESCED_BYTES)
    with socket.create_connection(address) as connection:
        try:
            while True:
                connection.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            return


def receive_framed(connection: socket.socket, shape: list[int]) -> Iterator[np.ndarray]:
    """Yield the same buffer again and again, filled anew."""
    buffer = np.empty(prod(shape), np.uint8)
    view, header = buffer.data, bytearray(HEADER.size)
    while True:
        connection.recv_into(header, HEADER.size, socket.MSG_WAITALL)
        (size,) = HEADER.unpack(header)
        got = 0
        while got < size:
            count = connection.recv_into(view[got:size], size - got, socket.MSG_WAITALL)
            if count == 0:
                raise ConnectionError("the sender closed the connection")
            got += count
        yield buffer


def receive_coalesced(connection: socket.socket, shape: list[int]) -> Iterator[np.ndarray]:
    """Yield a stand-in batch each time as many bytes as a batch has went through the 1 MiB buffer."""
    stand_in, size, surplus = payload(shape), prod(shape), 0
    view = memoryview(bytearray(COALESCED_BYTES))
    while True:
        while surplus < size:
            count = connection.recv_into(view)
            if count == 0:
                raise ConnectionError("the sender closed the connection")
            surplus += count
        surplus -= size
        yield stand_in


MODES = {"framed": (send_framed, receive_framed), "coalesced": (send_coalesced, receive_coalesced)}


def main() -> None:
    """Measure every case of the request in the mode of the first argument."""
    request = read_request()
    send, receive = MODES[sys.argv[1]]
    for case, options in request.cases.items():
        shape = options["shape"]
        with socket.create_server(("127.0.0.1", 0)) as server:
            sender = multiprocessing.get_context("fork").Process(
                target=send, args=(server.getsockname(), shape, request.producer_core)
            )
            sender.start()
            connection, _ = server.accept()
        with connection:
            measure(case, shape, receive(connection, shape), lambda batch: batch, request)
        sender.join()


if __name__ == "__main__":
    main()
