"""`python -m benchmarks.hdf5`: what does a sample of an HDF5 file cost, in which layout?

Beside `Hdf5Dataset`: a program that reads one sample after the other with h5py, and what reading takes at least.
docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys
from typing import Any

from benchmarks import harness, machine
from benchmarks.harness import Metric, System, Target

PLAIN, OURS, LIMIT = "plain h5py", "hetstream", "each chunk once"
IMAGE = {"shape": [32, 32], "dtype": "u1", "compression": None, "samples": 4096}
# Slow ones have fewer samples.
LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {**IMAGE, "chunks": None},
    "a chunk for each row": {**IMAGE, "chunks": [1, 32, 32]},
    "a chunk for each row, gzip": {**IMAGE, "chunks": [1, 32, 32], "compression": "gzip"},
    "64 rows in a chunk, gzip": {**IMAGE, "chunks": [64, 32, 32], "compression": "gzip", "samples": 1024},
    "h5py's own chunks": {**IMAGE, "chunks": True, "samples": 1024},
    "h5py's own chunks, gzip": {**IMAGE, "chunks": True, "compression": "gzip", "samples": 512},
    "small rows, 8 in a chunk": {**IMAGE, "shape": [16], "dtype": "i4", "chunks": [8, 16]},
    "numbers": {**IMAGE, "shape": [], "dtype": "i8", "chunks": None},
    "text": {**IMAGE, "shape": None, "chunks": None},
}
CASES = {
    f"{name}, {order}": {**layout, "shuffled": order == "shuffled"}
    for name, layout in LAYOUTS.items()
    for order in ("in order", "shuffled")
}
# No slower: of equals, one is slower by up to 5 % in some repeats.
TARGETS = tuple(Target(case, OURS, PLAIN, "cpu_us", at_most=1.05) for case in CASES)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Samples of an HDF5 file in many layouts.", repeats=5).parse_args()
    client = System("all in turns", (sys.executable, "-m", "benchmarks.clients.hdf5"))
    rows = 2_000 if args.quick else 20_000
    cases = {case: {**layout, "samples": min(layout["samples"], rows // 2)} for case, layout in CASES.items()}
    described = machine.describe()
    harness.say(f"hdf5: {len(cases)} cases, {rows} rows")
    request = {"rows": rows, "turns": 1 if args.quick else 3}
    repeats = 1 if args.quick else args.repeats
    results = harness.collect(
        [client], cases, request, repeats, 600.0, lambda _case, sample: f"{sample['cpu_us']:.1f} us"
    )
    harness.by_system(results)
    taking_part = harness.chosen([System(name) for name in (PLAIN, OURS, LIMIT)], args.systems)
    metrics = (Metric("cpu_us", "CPU us/sample", tuple(CASES)),)
    context = {
        "machine": described,
        "versions": machine.versions("h5py", "numpy"),
        "notes": [
            "Batches of 256 of 20,000 rows; the file is in the page cache. CPU time, the least of three turns.",
            "plain h5py: a dataset whose __getitem__ reads one row. Both have HDF5's chunk cache as h5py sets it.",
            "each chunk once: without HDF5, in Python. For each batch the bytes of each needed chunk are read once, at "
            "places that are known, and inflated once; what a batch of before left in a cache does not count.",
        ],
    }
    rows_of = harness.rows_of(results, taking_part, metrics, TARGETS)
    return harness.finish("hdf5", args.out, rows_of, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
