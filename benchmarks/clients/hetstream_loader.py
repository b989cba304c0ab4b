"""hetstream as a user runs it: its dispatcher, its data workers and the loader, on transport argv[1]."""

from __future__ import annotations

import os
import sys

import torch

from benchmarks.clients.prebuilt import loader_arguments
from benchmarks.clients.service import running, streaming
from benchmarks.clients.window import measure, read_request
from hetstream import DataLoader


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    transport = os.environ["HETSTREAM_TRANSPORT"] = sys.argv[1]
    torch.set_num_threads(1)
    with running(processes=1, cores={request.producer_core}) as service:
        for number, (case, options) in enumerate(request.cases.items()):
            arguments = loader_arguments(options["shape"], options.get("collate", False))
            loader = DataLoader(**arguments, seed=0, service=service, job_name=f"transport-{number}")  # type: ignore[arg-type]
            with streaming(loader, processes=1) as batches:
                measure(case, options["shape"], batches, lambda batch: batch.numpy(), request)
                if set(loader.stats()["transport"]) != {transport}:
                    raise RuntimeError(f"not all batches came by {transport}: {loader.stats()['transport']}")


if __name__ == "__main__":
    main()
