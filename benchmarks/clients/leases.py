"""Data workers and a loader that make nothing: they take leases from a real dispatcher as fast as it hands them out.

With the argument `ping-pong` the limit instead: the same connections to a server that sends each message back.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import zmq

from benchmarks.clients.service import running
from benchmarks.clients.window import Meter, Request, read_request
from hetstream.mpi_dataworkers.dispatcher.tables import LEASES_PER_WORKER, TARGET_LEASE_S
from hetstream.mpi_dataworkers.order.reorder import as_ranges
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, parse_service, read_address_file
from hetstream.mpi_dataworkers.wire.codec import decode, encode
from hetstream.mpi_dataworkers.wire.messages import (
    FinishLease,
    GrantLease,
    LoaderRegistered,
    LoaderStats,
    OpenSession,
    PlannedOrder,
    Program,
    ProvidePipeline,
    Refused,
    RegisterLoader,
    RegisterWorker,
    ReportProgress,
    SessionSpec,
    UnknownPeer,
    WorkerHeartbeat,
)

STEPS = 1 << 40
STATS = LoaderStats()
HEARTBEAT_S = 0.5


def connect(context: zmq.Context[Any], service: ServiceAddress) -> zmq.Socket[Any]:
    """Open a control connection as a data worker's or a loader's."""
    socket = context.socket(zmq.DEALER)
    socket.identity = secrets.token_bytes(16)
    socket.curve_serverkey = service.server_public_key.encode()
    socket.curve_publickey = service.client_public_key.encode()
    socket.curve_secretkey = service.client_secret_key.encode()
    socket.linger, socket.sndhwm = 0, 0
    socket.connect(service.address)
    return socket


def received(socket: zmq.Socket[Any]) -> Iterator[bytes]:
    """Take all messages that have come."""
    while True:
        try:
            yield socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return


class Crowd:
    """Some data workers and one loader.

    Args:
        context: of the connections.
        service: the dispatcher.
        workers: number of data workers.
        lease_steps: steps that the dispatcher is to put into a lease; it follows the times that are reported.
    """

    def __init__(self, context: zmq.Context[Any], service: ServiceAddress, workers: int, lease_steps: int) -> None:
        self.num_leases = self.num_steps = 0
        self._step_s = TARGET_LEASE_S / (lease_steps + 0.5)
        self._window = 4 * LEASES_PER_WORKER * workers * lease_steps
        self._consumed, self._ahead = 0, set[int]()
        self._reported, self._next_heartbeat = 0, 0.0
        self._loader = connect(context, service)
        self._workers = [connect(context, service) for _ in range(workers)]
        self._poller = zmq.Poller()
        for socket in (self._loader, *self._workers):
            self._poller.register(socket, zmq.POLLIN)
        for worker in self._workers:
            worker.send(encode(RegisterWorker("host", os.getpid(), "", [])))
        self._loader.send(encode(RegisterLoader("job", 0, 0, 1, "host", os.getpid(), "d", {})))

    def turn(self) -> None:
        """Answer what has come."""
        for socket, _ in self._poller.poll(100):
            for frame in received(socket):
                self._answer(socket, decode(frame))
        if self._consumed - self._reported >= self._window // 8:
            self._loader.send(
                encode(ReportProgress("s", self._consumed, as_ranges(sorted(self._ahead)), self._window, STATS))
            )
            self._reported = self._consumed
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_S
            for worker in self._workers:
                worker.send(encode(WorkerHeartbeat([])))

    def _answer(self, socket: zmq.Socket[Any], message: Any) -> None:
        if isinstance(message, GrantLease):
            steps = message.stop_step - message.first_step
            socket.send(encode(FinishLease(message.token, steps * self._step_s)))
            self.num_leases += 1
            self.num_steps += steps
            self._ahead.update(range(message.first_step, message.stop_step))
            while self._consumed in self._ahead:
                self._ahead.remove(self._consumed)
                self._consumed += 1
        elif isinstance(message, LoaderRegistered):
            if message.need_pipeline:
                socket.send(encode(ProvidePipeline("d", Program("/", []), b"", b"")))
            order = PlannedOrder(STEPS, 1, 1, 0, False, False, 0)
            session = SessionSpec("s", "d", 0, 0, order, ["tcp://127.0.0.1:1"])
            socket.send(encode(OpenSession(session, STEPS, 0, [], self._window, None)))
        elif isinstance(message, UnknownPeer):
            raise RuntimeError("the dispatcher lost one of the peers")
        elif isinstance(message, Refused):
            raise RuntimeError(f"the dispatcher refused a message: {message.text}")

    def close(self) -> None:
        """Close the connections."""
        for socket in (self._loader, *self._workers):
            socket.close()


def echo(keys: Any, core: int) -> None:
    """Send every message back, for ever."""
    os.sched_setaffinity(0, {core})
    context: zmq.Context[Any] = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.curve_server = True
    public, secret = zmq.curve_keypair()
    socket.curve_publickey, socket.curve_secretkey = public, secret
    keys.send((socket.bind_to_random_port("tcp://127.0.0.1"), public.decode()))
    while True:
        socket.send_multipart(socket.recv_multipart())


@contextmanager
def echoing(request: Request) -> Iterator[ServiceAddress]:
    """Run the echo server; yield its address."""
    mine, its = multiprocessing.Pipe()
    server = multiprocessing.get_context("fork").Process(target=echo, args=(its, request.producer_core), daemon=True)
    server.start()
    port, public = mine.recv()
    client_public, client_secret = zmq.curve_keypair()
    try:
        yield ServiceAddress(f"tcp://127.0.0.1:{port}", public, client_public.decode(), client_secret.decode(), "")
    finally:
        server.terminate()
        server.join()


class Players:
    """As many messages back and forth as a crowd of data workers has leases."""

    def __init__(self, context: zmq.Context[Any], service: ServiceAddress, workers: int) -> None:
        self.num_leases = self.num_steps = 0
        self._sockets = [connect(context, service) for _ in range(workers)]
        self._poller = zmq.Poller()
        for socket in self._sockets:
            self._poller.register(socket, zmq.POLLIN)
            for _ in range(LEASES_PER_WORKER):
                socket.send(bytes(200))

    def turn(self) -> None:
        """Send back what has come."""
        for socket, _ in self._poller.poll(100):
            for frame in received(socket):
                socket.send(frame)
                self.num_leases += 1
                self.num_steps += 1

    def close(self) -> None:
        """Close the connections."""
        for socket in self._sockets:
            socket.close()


def measure(case: str, crowd: Crowd | Players, request: Request) -> None:
    """Let the crowd take leases for the window and print the sample."""

    def run_until(enough: Callable[[], bool]) -> None:
        while not enough():
            crowd.turn()

    deadline = time.monotonic() + 30.0
    run_until(lambda: crowd.num_leases > 0 or time.monotonic() > deadline)
    warm_until = time.monotonic() + request.warmup_s
    run_until(lambda: time.monotonic() > warm_until)
    meter = Meter({request.client_core, request.producer_core})
    leases, steps, end = crowd.num_leases, crowd.num_steps, time.monotonic() + request.seconds
    run_until(lambda: time.monotonic() > end)
    spent = meter.read()
    leases, steps = crowd.num_leases - leases, crowd.num_steps - steps
    if not leases:
        raise RuntimeError(f"{case}: no lease in {request.seconds} s")
    sample = {
        "case": case,
        "leases_per_s": leases / spent.seconds,
        "samples_per_s": steps / spent.seconds,
        "dispatcher_cpu_us": spent.children_cpu_s / leases * 1e6,
        "other_load": spent.other_load,
    }
    print(json.dumps(sample), flush=True)


def main() -> None:
    """Measure every case of the request in the mode of the first argument."""
    request = read_request()
    context: zmq.Context[Any] = zmq.Context()
    context.set(zmq.MAX_SOCKETS, 4096)
    for case, options in request.cases.items():
        crowd: Crowd | Players
        if sys.argv[1] == "ping-pong":
            with echoing(request) as address:
                crowd = Players(context, address, options["workers"])
                measure(case, crowd, request)
                crowd.close()
        else:
            with running(processes=0, cores={request.producer_core}) as service:
                address = read_address_file(parse_service(service))
                crowd = Crowd(context, address, options["workers"], options["steps"])
                measure(case, crowd, request)
                crowd.close()
    context.term()


if __name__ == "__main__":
    main()
