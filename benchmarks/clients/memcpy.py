"""Limits: one copy of the batch in the client process, without a producer.

Argument 1: `reused` copies into one buffer, `large` in turn into many, which are too large together for a cache.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np

from benchmarks.clients.window import measure, payload, read_request

LARGE_BYTES = 512 << 20


def copies(source: np.ndarray, into_bytes: int) -> Iterator[np.ndarray]:
    """Copy the batch for ever, into buffers of so many bytes in all."""
    targets = [np.zeros_like(source) for _ in range(max(1, into_bytes // source.nbytes))]
    while True:
        for target in targets:
            np.copyto(target, source)
            yield target


def main() -> None:
    """Measure every case of the request."""
    request = read_request()
    into_bytes = LARGE_BYTES if sys.argv[1] == "large" else 0
    for case, options in request.cases.items():
        measure(case, options["shape"], copies(payload(options["shape"]), into_bytes), lambda batch: batch, request)


if __name__ == "__main__":
    main()
