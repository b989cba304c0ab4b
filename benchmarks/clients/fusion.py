"""A batch of many tensors, or each of them in a step of its own: `fusion hetstream|rpc fused|unfused NUMBER`.

`hetstream` moves a step by its own TCP transport; `rpc` asks another process for it over a connection, a request for
each step, as TensorFlow's workers ask for tensors by gRPC.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import sys
from collections.abc import Iterator
from multiprocessing import get_context
from typing import Any

import torch

from benchmarks.clients.prebuilt import BATCH_SIZE, hand_over
from benchmarks.clients.service import running, streaming
from benchmarks.clients.tensors import Features
from benchmarks.clients.window import last_is, measure_cpu, read_request
from hetstream import DataLoader


class OneByOne(Features):
    """The same tensors, one in each step."""

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        name = f"feature{indices[0] // BATCH_SIZE % self.count}"
        return {name: super().__getitems__(indices)[name]}


def batches_of(steps: Iterator[dict[str, torch.Tensor]], num_steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Put so many steps together."""
    while True:
        batch: dict[str, torch.Tensor] = {}
        for step in itertools.islice(steps, num_steps):
            batch.update(step)
        yield batch


def answer(connection: socket.socket, num_bytes: int, count: int, core: int) -> None:
    """Send a tensor for each request, or all of them for the request -1; until the connection ends."""
    os.sched_setaffinity(0, {core})
    features = Features(num_bytes, count)
    arrays = [tensor.numpy() for tensor in features.__getitems__([0]).values()]
    with connection:
        while request := connection.recv(4, socket.MSG_WAITALL):
            [wanted] = struct.unpack("<i", request)
            for array in arrays if wanted < 0 else arrays[wanted : wanted + 1]:
                connection.sendall(array.data)


def ask(connection: socket.socket, length: int, count: int, fused: bool) -> Iterator[dict[str, torch.Tensor]]:
    """The client of `answer`: a batch by one request, or by one for each tensor."""
    while True:
        batch = {}
        if fused:
            connection.sendall(struct.pack("<i", -1))
        flat = torch.empty(count if fused else 0, length)
        if fused:
            receive(connection, flat)
        for number in range(count):
            if fused:
                batch[f"feature{number}"] = flat[number]
                continue
            connection.sendall(struct.pack("<i", number))
            tensor = torch.empty(length)
            receive(connection, tensor)
            batch[f"feature{number}"] = tensor
        yield batch


def receive(connection: socket.socket, goal: torch.Tensor) -> None:
    """Fill a tensor."""
    view = memoryview(goal.numpy().data).cast("B")
    while view:
        view = view[connection.recv_into(view) :]


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    by, how, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
    fused = how == "fused"
    torch.set_num_threads(1)
    os.environ["HETSTREAM_TRANSPORT"] = "tcp"
    for number, (case, options) in enumerate(request.cases.items()):
        num_bytes = options["num_bytes"]
        if by == "rpc":
            measure_rpc(case, num_bytes, count, fused, request)
            continue
        dataset: Any = Features(num_bytes, count) if fused else OneByOne(num_bytes, count)
        with running(processes=1, cores={request.producer_core}) as service:
            loader: Any = DataLoader(
                dataset, batch_size=BATCH_SIZE, collate_fn=hand_over, service=service, job_name=f"fusion-{number}"
            )
            with streaming(loader, processes=1) as streamed:
                batches = streamed if fused else batches_of(streamed, count)
                measure_cpu(case, batches, last_is(count), request)


def measure_rpc(case: str, num_bytes: int, count: int, fused: bool, request: Any) -> None:
    """A process that answers, over TCP of this host."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = get_context("spawn").Process(
            target=serve, args=(server.getsockname(), num_bytes, count, request.producer_core), daemon=True
        )
        process.start()
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        measure_cpu(case, ask(connection, num_bytes // 4 // count, count, fused), last_is(count), request)
    process.join(10.0)


def serve(address: Any, num_bytes: int, count: int, core: int) -> None:
    """The process that answers."""
    torch.set_num_threads(1)
    connection = socket.create_connection(address)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    answer(connection, num_bytes, count, core)


if __name__ == "__main__":
    main()
