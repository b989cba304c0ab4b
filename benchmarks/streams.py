"""`make bench-streams`: what does `hetstream run` give a program over an IterableDataset, which it does not know?

A node of the trainer with one core, and another core elsewhere. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from benchmarks import harness, machine, running
from benchmarks.harness import Metric, System, Target
from benchmarks.overhead import photographs

HETSTREAM = "hetstream run, data workers on the other core"
ONE, BOTH = "torch's workers on the trainer's core", "limit: torch's workers on both cores"
TOKENS, IMAGES = "tokenised on the fly", "photographs"
BUSY = ", trainer's core busy"
# What a step takes of the trainer's core there: about half of what a core needs for a batch.
STEP_CPU_S = {TOKENS: 0.005, IMAGES: 0.05}


def write_documents(folder: Path, number: int = 4000) -> None:
    """Write documents of made-up words, and train a tokenizer on them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if (folder / "tokenizer.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = ["".join(draw.choices("etaoinshrdlucmfwyp", k=draw.randrange(2, 11))) for _ in range(20_000)]
    lines = [" ".join(draw.choices(words, k=draw.randrange(50, 600))) for _ in range(number)]
    (folder / "documents.txt").write_text("\n".join(lines))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=8000, show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("Streams of unmodified programs.", repeats=3).parse_args()
    documents = running.ROOT / "build" / "bench" / "documents"
    write_documents(documents, 200 if args.quick else 4000)
    root, origin = photographs()
    client = (sys.executable, "-m", "benchmarks.clients.streams")
    systems = [System(name, (*client, name)) for name in (HETSTREAM, ONE, BOTH)]
    first, second = machine.two_cores()
    where: dict[str, Any] = {
        HETSTREAM: {"cores": [first], "worker_cores": [second]},
        ONE: {"cores": [first]},
        BOTH: {"cores": sorted({first, second})},
    }
    cases = {
        TOKENS: {"kind": "tokens", "folder": str(documents), "batch_size": 8, "step_cpu_s": 0.0, **where},
        IMAGES: {"kind": "images", "folder": str(root), "batch_size": 32, "step_cpu_s": 0.0, **where},
    }
    cases |= {case + BUSY: {**cases[case], "step_cpu_s": cpu_s} for case, cpu_s in STEP_CPU_S.items()}
    described = machine.describe(trainer=[first], data_workers=[second])
    results = harness.collect(
        harness.chosen(systems, args.systems),
        cases,
        {"seconds": 2 if args.quick else 15, "warmup_s": 1 if args.quick else 4},
        1 if args.quick else args.repeats,
        600.0,
        lambda _case, sample: f"{sample['samples_per_s']:,.0f}/s",
    )
    metrics = (
        Metric("samples_per_s", "samples/s", tuple(cases)),
        Metric("cpu_ms", "CPU-ms/sample", tuple(cases)),
        Metric("compared_steps", "steps compared", tuple(cases)),
    )
    targets = [Target(case, HETSTREAM, against, "samples_per_s") for case in cases for against in (ONE, BOTH)]
    targets += [Target(case, HETSTREAM, ONE, "cpu_ms", at_most=1.1) for case in cases]
    context = {
        "machine": described,
        "versions": machine.versions("torch", "tokenizers", "pillow"),
        "notes": [
            "Tokens: documents of made-up words through a BPE tokenizer, rows of 1,024 tokens, batches of 8.",
            f"Images: {origin}. Decode, crop at random, 224 px, flip; batches of 32 (uint8).",
            "The program asks for num_workers=2 in each row. `hetstream run` finds the number of data workers itself.",
            "Measured when they have taken over; before, their batches are compared with torch's.",
            f"Busy: a step takes {1e3 * STEP_CPU_S[TOKENS]:g} (tokens) or {1e3 * STEP_CPU_S[IMAGES]:g} ms of the "
            "trainer's core, about half of what a core needs for a batch. Else it takes none.",
            "CPU-ms/sample counts all processes, without a step's: program, its workers, dispatcher and data workers.",
        ],
    }
    rows = harness.rows_of(results, systems, metrics, targets)
    return harness.finish("streams", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
