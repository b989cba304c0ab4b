"""Peer: rpcdataloader, one worker started by its own launcher, over TCP. Runs in the peers' environment."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import torch
from rpcdataloader import RPCDataloader, RPCDataset  # type: ignore[import-not-found,unused-ignore]

from benchmarks.clients.prebuilt import FinishedBatches, first
from benchmarks.clients.window import measure, read_request


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    torch.set_num_threads(1)
    port = free_port()
    os.sched_setaffinity(0, {request.producer_core})
    command = [sys.executable, "-m", "rpcdataloader.launch", "--host=127.0.0.1", f"--port={port}"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as worker:
        os.sched_setaffinity(0, {request.client_core})
        try:
            for case, options in request.cases.items():
                dataset = RPCDataset([f"127.0.0.1:{port}"], FinishedBatches, options["shape"])
                loader = RPCDataloader(dataset, batch_size=1, collate_fn=first, timeout=30)
                measure(case, options["shape"], iter(loader), lambda batch: batch.numpy(), request)
        finally:
            worker.kill()
    os._exit(0)  # requests on their way would be waited for, and nobody answers any more


if __name__ == "__main__":
    main()
