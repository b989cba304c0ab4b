"""`make bench-overhead`: what does it cost to make batches in other processes, when no core is added?

JPEG decode, random resized crop to 224 px, flip and default collate; the whole of each system (trainer, dispatcher,
data workers) is pinned to the same cores. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks import harness, machine, running
from benchmarks.harness import Metric, System, Target

ONE, TWO = "1 core, 1 data worker", "2 cores, 2 data workers"
HETSTREAM, LOOP, TORCH = "hetstream", "in-process loop", "torch DataLoader"
# Real photographs where they are at hand: how much CPU a JPEG takes depends on what is in it.
PHOTOGRAPHS = running.ROOT.parent / "shared" / "data" / "jpeg"
SYNTHETIC = running.ROOT / "build" / "bench" / "synthetic-jpeg"

METRICS = (Metric("images_per_s", "images/s", (ONE, TWO)), Metric("cpu_ms_per_image", "CPU-ms/image", (ONE, TWO)))
TARGETS = (
    Target(ONE, HETSTREAM, LOOP, "images_per_s", at_least=0.95),
    Target(TWO, HETSTREAM, LOOP, "images_per_s", at_least=0.95),
    Target(ONE, HETSTREAM, LOOP, "cpu_ms_per_image", at_most=1.05),
    Target(TWO, HETSTREAM, LOOP, "cpu_ms_per_image", at_most=1.05),
)


def photographs() -> tuple[Path, str]:
    """Return the folder of JPEG files and how to describe it."""
    if PHOTOGRAPHS.is_dir():
        return (
            PHOTOGRAPHS,
            f"{len(list(PHOTOGRAPHS.iterdir()))} photographs from ../{PHOTOGRAPHS.relative_to(running.ROOT.parent)}",
        )
    write_synthetic(SYNTHETIC, 128)
    return SYNTHETIC, f"128 synthetic JPEG files ({PHOTOGRAPHS} is not there): not comparable with runs on photographs"


def write_synthetic(folder: Path, number: int) -> None:
    """Write JPEG files of 500 x 375 with some detail at every scale, as photographs have."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(0)
    for index in range(number):
        layers = []
        for edge in (4, 16, 64, 256):
            layer = Image.fromarray(draw.integers(0, 256, (edge, edge, 3), dtype=np.uint8))
            layers.append(np.asarray(layer.resize((500, 375), Image.Resampling.BICUBIC), dtype=np.float32))
        picture = np.mean(layers, axis=0).astype(np.uint8)
        Image.fromarray(picture).save(folder / f"class{index % 4}_{index:04}.jpeg", quality=90)


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Overhead of disaggregation on the same cores.", repeats=5).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.images")
    systems = [
        System(LOOP, (*client, "in-process")),
        System(HETSTREAM, (*client, "hetstream")),
        System(TORCH, (*client, "torch")),
    ]
    taking_part = harness.chosen(systems, args.systems)
    first, second = machine.two_cores()
    cases: dict[str, dict[str, Any]] = {ONE: {"workers": 1, "cores": [first]}}
    if first != second:
        cases[TWO] = {"workers": 2, "cores": [first, second]}
    root, origin = photographs()
    # Two data workers have a batch in work each when a window begins and ends: a long one makes that a small error.
    request = {"root": str(root), "batches": 1 if args.quick else 48, "warmup": 1 if args.quick else 4}
    described = machine.describe(**{case: options["cores"] for case, options in cases.items()})
    harness.say(f"overhead: {origin}; {request['batches']} batches of 64 a case")
    results = harness.collect(
        taking_part,
        cases,
        request,
        1 if args.quick else args.repeats,
        300.0,
        lambda _case, sample: f"{sample['images_per_s']:,.0f} images/s",
    )
    pinned = "; ".join(f"{case}: {options['cores']}" for case, options in cases.items())
    metrics = [Metric(metric.key, metric.unit, tuple(cases)) for metric in METRICS]
    context = {
        "machine": described,
        "versions": machine.versions("torch", "pillow", "numpy", "pyzmq"),
        "notes": [
            f"Images: {origin}. Decode, random resized crop to 224 px, flip, default_collate, batches of 64 (uint8).",
            f"All processes of a system share the same cores ({pinned}); the trainer does no training.",
            "In-process loop on two cores: two independent loops, the most that two cores can make.",
            harness.disturbance(results),
            "CPU-ms/image counts every process of the system; unlike images/s it hardly feels other load.",
        ],
    }
    rows = harness.rows_of(results, taking_part, metrics, TARGETS)
    return harness.finish("overhead", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
