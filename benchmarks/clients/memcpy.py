"""Limit: one copy of the batch into a reused buffer in the client process. No producer."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from benchmarks.clients.window import measure, payload, read_request


def copies(source: np.ndarray) -> Iterator[np.ndarray]:
    """Copy the batch for ever."""
    target = np.empty_like(source)
    while True:
        np.copyto(target, source)
        yield target


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    for case, options in request.cases.items():
        measure(case, options["shape"], copies(payload(options["shape"])), lambda batch: batch, request)


if __name__ == "__main__":
    main()
