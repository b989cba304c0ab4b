"""`make bench-cache`: what a cache of decoded photographs saves, in CPU time for each image, beside torch's loader.

docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile

from benchmarks import harness, machine
from benchmarks.harness import Metric, System, Target
from benchmarks.overhead import photographs

BYTES, FLOATS, FOLDER = "uint8 crops", "float crops", "ImageFolder"
CASES = (BYTES, FLOATS, FOLDER)
TORCH, OFF = "torch DataLoader, no cache", "hetstream, no cache"
FIRST, SECOND, RESTART = "1st epoch", "2nd epoch", "restart, disk"
JOBS, ORDERED = "8 jobs at once", "8 jobs of one order"
APART, BOUND = "8 jobs without a cache", "limit of 8 jobs"
STAGES = {
    TORCH: "torch", OFF: "off", FIRST: "first", SECOND: "second", RESTART: "restart", JOBS: "jobs", ORDERED: "ordered",
    APART: "apart", BOUND: "bound",
}  # fmt: skip
_NUM_FILES = 2500
METRICS = (Metric("cpu_ms_per_image", "CPU-ms/image", CASES),)


def targets(case: str) -> list[Target]:
    """What the cache is to save in a case."""
    unit = "cpu_ms_per_image"
    return [
        Target(case, SECOND, FIRST, unit, at_most=0.5),
        Target(case, RESTART, FIRST, unit, at_most=0.5),
        Target(case, JOBS, FIRST, unit, at_most=1.5),
        Target(case, ORDERED, FIRST, unit, at_most=1.5),
        Target(case, BOUND, FIRST, unit),
        Target(case, JOBS, APART, unit),
        Target(case, SECOND, TORCH, unit),
    ]


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("CPU time of epochs and jobs with a cache of decoded photographs.", repeats=3).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.cache")
    with_torchvision = importlib.util.find_spec("torchvision") is not None
    cases = CASES if with_torchvision else (BYTES, FLOATS)
    systems = [System(name, (*client, stage)) for name, stage in STAGES.items()]
    taking_part = harness.chosen(systems, args.systems)
    cores = sorted(set(machine.two_cores()))
    root, origin = photographs()
    described = machine.describe(all=cores)
    harness.say(f"cache: {origin}")
    with tempfile.TemporaryDirectory(prefix="hetstream-bench-") as folder:
        results = harness.collect(
            taking_part,
            {case: {"cores": cores} for case in cases},
            {"root": str(root), "files": 100 if args.quick else _NUM_FILES, "folder": folder},
            1 if args.quick else args.repeats,
            600.0,
            lambda _case, sample: f"{sample['cpu_ms_per_image']:.2f} CPU-ms/image",
        )
    context = {
        "machine": described,
        "versions": machine.versions("torch", "torchvision", "pillow", "numpy"),
        "notes": [
            f"Images: {origin}, as {_NUM_FILES} files. One epoch in batches of 32, made in one process of one thread; "
            "of 8 jobs the sum.",
            f"{BYTES}, {FLOATS}: a decorated function decodes and resizes to 256 px; then random crop to 224 px and "
            "flip, as uint8 NHWC, or normalised as float NCHW.",
            f"{FOLDER}: torchvision's, with Resize, RandomCrop, RandomHorizontalFlip, ToTensor, Normalize"
            + ("." if with_torchvision else ": torchvision is not installed."),
            f"{JOBS} begin with an empty cache, each with a seed and a crop of its own; {ORDERED}: with one seed.",
            f"{APART}: each makes all by itself; with eight processes on two cores all CPU times are longer.",
            f"{BOUND}: one epoch without a cache, and seven that find all fronts in the program's memory: what "
            "augmentation and loader take by themselves.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, taking_part, METRICS, [target for case in cases for target in targets(case)])
    return harness.finish("cache", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
