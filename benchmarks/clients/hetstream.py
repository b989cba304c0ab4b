"""hetstream as a user runs it: `hetstream dispatcher`, `hetstream worker` and the loader, over TCP."""

from __future__ import annotations

import torch

from benchmarks.clients.prebuilt import loader_arguments
from benchmarks.clients.service import running
from benchmarks.clients.window import measure, read_request
from mpi_dataworkers import DataLoader


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    torch.set_num_threads(1)
    with running(processes=1, cores={request.producer_core}) as service:
        for number, (case, options) in enumerate(request.cases.items()):
            arguments = loader_arguments(options["shape"], options.get("collate", False))
            loader = DataLoader(**arguments, seed=0, service=service, job_name=f"transport-{number}")  # type: ignore[arg-type]
            measure(case, options["shape"], iter(loader), lambda batch: batch.numpy(), request)
            loader.close()


if __name__ == "__main__":
    main()
