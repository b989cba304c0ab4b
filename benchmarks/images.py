"""`make bench-images`: photographs to batches by the two recipes that everybody runs, on the same cores.

Images a CPU second first, counted over all processes of a system; the limits beside them. docs/images.md explains the
rows. Runs in the environment that the target of the Makefile makes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks import harness, machine
from benchmarks.harness import Metric, Results, System, Target
from benchmarks.overhead import photographs
from benchmarks.running import ROOT

CASES = {
    f"{name}, {form}": {"training": name == "training", "floats": form == "float32 NCHW", "workers": 2}
    for form in ("uint8 NHWC", "float32 NCHW")
    for name in ("training", "evaluation")
}
COMPARED = "evaluation, uint8 NHWC"
NUM_FILES = 5000
BATCHES, WARMUP = 60, 8
OURS = "hetstream, ImageFolder"
# Name -> client, and the package that it needs.
PEERS = {
    "torch, torchvision on Pillow": ("torch-pillow", "torchvision"),
    "torch, torchvision on decode_jpeg": ("torch-decode", "torchvision"),
    "SPDL": ("spdl", "spdl"),
    "DALI": ("dali", "nvidia.dali"),
    "LitData": ("litdata", "litdata"),
    "FFCV": ("ffcv", "ffcv"),
}
# Images count as often as a job gets them.
SHARED = {
    "TensorSocket, 2 jobs": ("tensorsocket-2", "tensorsocket"),
    "TensorSocket, 4 jobs": ("tensorsocket-4", "tensorsocket"),
}
HETSTREAM = {
    OURS: ("hetstream", "hetstream"),
    "hetstream, ImageFolder exact=False": ("hetstream-inexact", "hetstream"),
    "hetstream, ImageFolder on files of quality 90": ("hetstream-recoded", "hetstream"),
    "torch, hetstream.ImageFolder": ("torch-image-folder", "hetstream"),
    "hetstream, user's dataset on Pillow": ("hetstream-user", "torchvision"),
}
DECODE = "limit: decode"
LIMITS = {
    DECODE: ("limit-decode", "simplejpeg"),
    "limit: decode at the DCT scale of the crop": ("limit-scaled", "simplejpeg"),
    "limit: memcpy": ("limit-memcpy", "torch"),
}
SYSTEMS = HETSTREAM | PEERS | SHARED | LIMITS


def missing(package: str) -> str:
    """Why a system cannot run; "" if its package is there."""
    try:
        return "" if find_spec(package) else f"{package} is not installed: make bench-images makes the environment"
    except ModuleNotFoundError as error:
        return f"{error.name} is not installed: make bench-images makes the environment"


def replicated(source: Path, folder: Path) -> Path:
    """`NUM_FILES` files in ten classes: the photographs, several times."""
    files = sorted(path for path in source.iterdir() if path.suffix.lower() in (".jpeg", ".jpg"))
    for number in range(NUM_FILES):
        place = folder / f"class{number % 10}" / f"{number:04}.jpeg"
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.symlink_to(os.path.relpath(files[number % len(files)].resolve(), place.parent.resolve()))
    return folder


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Photographs to batches, beside the peers.", repeats=1).parse_args()
    client = (sys.executable, "-m", "benchmarks.clients.photographs")
    systems = [System(name, (*client, key), missing(package)) for name, (key, package) in SYSTEMS.items()]
    taking_part = harness.chosen(systems, args.systems)
    source, origin = photographs()
    root = replicated(source, ROOT / "build" / "photographs")
    cores = sorted(set(machine.two_cores()))
    described = machine.describe(all=cores)
    request = {"root": str(root), "batches": 2 if args.quick else BATCHES, "warmup": 1 if args.quick else WARMUP}
    cases = {name: {**given, "cores": cores} for name, given in CASES.items()}
    harness.say(f"images: {origin}, as {NUM_FILES} files")
    results = harness.collect(
        taking_part, cases, request, 1 if args.quick else args.repeats, 600.0,
        lambda _case, sample: f"{sample['images_per_cpu_s']:,.0f} images/CPU-s",
    )  # fmt: skip
    systems = with_earlier(args.out / "images-samples.json", results, systems, taking_part)
    metrics = [
        Metric("images_per_cpu_s", "images/CPU-s", tuple(CASES)),
        Metric("images_per_s", "images/s", tuple(CASES)),
        Metric("largest_difference", "of 255, largest", (COMPARED,)),
        Metric("mean_difference", "of 255, mean", (COMPARED,)),
    ]
    goals = [Target(case, OURS, peer, "images_per_cpu_s", at_least=1.1) for case in CASES for peer in PEERS]
    goals += [Target(case, OURS, DECODE, "images_per_cpu_s", at_least=0.85) for case in CASES]
    context = {
        "machine": described,
        "versions": machine.versions(
            *("torch", "torchvision", "pillow", "spdl-io", "nvidia-dali-cuda120", "litdata", "ffcv", "tensorsocket"),
            "simplejpeg",
        ),
        "notes": [
            f"Images: {origin}, as {NUM_FILES} files; batches of 64. Training: random resized crop to 224, flip. "
            "Evaluation: resize to 256, centre crop to 224. float32 is normalised.",
            f"All processes of a system share the cores {cores}: two worker processes or threads. The "
            "trainer does not train.",
            "images/CPU-s: user and system time of all processes of a system. The limits run in one process, those of "
            "decoding by simplejpeg's libjpeg-turbo into memory that is there.",
            "LitData and FFCV read formats of their own; LitData in another order, so it is not compared. FFCV encodes "
            "the photographs anew, at quality 90, to 0.62 of their bytes; one row of ours reads such files, too.",
            "TensorSocket counts an image once for each job that gets it. Without a GPU it sends copies.",
            "Differences are those of the first 256 images from Pillow's, with the same crops.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, systems, metrics, goals)
    return harness.finish("images", args.out, rows, results.failures, context)


def with_earlier(path: Path, results: Results, systems: list[System], taking_part: Sequence[System]) -> list[System]:
    """Add what earlier runs of other systems have left, so that a run in parts makes one report; the systems in it."""
    names = {system.name for system in taking_part}
    if path.exists() and len(names) < len(systems):
        for case, name, repeat, sample in json.loads(path.read_text()):
            if name not in names:
                results.samples[case, name, repeat] = sample
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([[*key, sample] for key, sample in results.samples.items()]))
    names |= {name for _, name, _ in results.samples}
    return [system for system in systems if system.name in names]


if __name__ == "__main__":
    sys.exit(main())
