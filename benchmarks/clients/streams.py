"""A training that reads a stream, as its users write it; the CPU of a training step is a loop that does nothing.

    python -m benchmarks.clients.streams SYSTEM REQUEST

runs itself as the program of each case, alone or with `hetstream run`, and prints what that measured.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from benchmarks.clients.service import run_program
from benchmarks.processes import children_of, state_of

_NUM_WORKERS = 2
_PATIENCE_S = 150.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Tokens(IterableDataset[Any]):
    """Documents that are tokenised on the fly and packed into rows of one length, shuffled in a buffer.

    Args:
        folder: with `documents.txt`, one a line, and `tokenizer.json`.
        length: of a row, in tokens.
    """

    def __init__(self, folder: str, length: int = 1024) -> None:
        self.folder, self.length = folder, length

    def __iter__(self) -> Iterator[Any]:
        from tokenizers import Tokenizer

        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        tokenizer = Tokenizer.from_file(f"{self.folder}/tokenizer.json")
        worker: Any = get_worker_info()
        documents = Path(self.folder, "documents.txt").read_text().splitlines()[worker.id :: worker.num_workers]
        packed: list[int] = []
        buffer: list[list[int]] = []
        while True:
            for document in documents:
                packed += tokenizer.encode(document).ids
                while len(packed) >= self.length:
                    buffer.append(packed[: self.length])
                    packed = packed[self.length :]
                    if len(buffer) >= 64:
                        place = random.randrange(len(buffer))
                        buffer[place], buffer[-1] = buffer[-1], buffer[place]
                        yield torch.tensor(buffer.pop())


class Photographs(IterableDataset[Any]):
    """Photographs that are decoded, cropped at random and turned, as webdataset's users do it.

    Args:
        folder: of JPEG files.
    """

    def __init__(self, folder: str) -> None:
        self.files = sorted(str(path) for path in Path(folder).iterdir())

    def __iter__(self) -> Iterator[Any]:
        from PIL import Image

        worker: Any = get_worker_info()
        while True:
            for file in self.files[worker.id :: worker.num_workers]:
                image = Image.open(file).convert("RGB")
                left, top = random.random() * image.width / 4, random.random() * image.height / 4
                box = left, top, left + image.width * 0.75, top + image.height * 0.75
                pixels = np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR, box))
                yield torch.from_numpy(pixels[:, ::-1].copy() if random.random() < 0.5 else pixels.copy())


def train(asked: dict[str, Any]) -> None:
    """Read batches; print the rate of those that come when data workers have taken over, and what they cost."""
    torch.set_num_threads(1)
    dataset: Any = Tokens(asked["folder"]) if asked["kind"] == "tokens" else Photographs(asked["folder"])
    batches = iter(DataLoader(dataset, asked["batch_size"], num_workers=_NUM_WORKERS))
    begun = time.monotonic()
    # Data workers' batches are known to be the same: the processes that made them here are gone, and as many wait.
    while (
        asked["is_streamed"] and len(multiprocessing.active_children()) > _NUM_WORKERS
    ) or time.monotonic() - begun < 2:
        next(batches)
        # A training does something else from time to time: data workers, which began later, come to where it is.
        time.sleep(0.05)
        if time.monotonic() - begun > _PATIENCE_S:
            raise SystemExit("data workers never took over")
    warm_until = time.monotonic() + asked["warmup_s"]
    while time.monotonic() < warm_until:
        next(batches)
    cpu_s, begun, number = _cpu_s(asked["root"]), time.monotonic(), 0
    while time.monotonic() - begun < asked["seconds"]:
        next(batches)
        number += asked["batch_size"]
        busy_until = time.thread_time() + asked["step_cpu_s"]
        while time.thread_time() < busy_until:
            pass
    elapsed_s, cpu_s = time.monotonic() - begun, _cpu_s(asked["root"]) - cpu_s
    cpu_s -= asked["step_cpu_s"] * number / asked["batch_size"]
    print(json.dumps({"samples_per_s": number / elapsed_s, "cpu_ms": 1e3 * cpu_s / number}), flush=True)


def _cpu_s(root: int) -> float:
    """CPU time of a process and all below it: the program, its workers, dispatcher and data workers."""
    fields = state_of(root)
    own_s = (int(fields[11]) + int(fields[12])) / _TICKS_PER_S if fields else 0.0
    return own_s + sum(map(_cpu_s, children_of(root)))


def run(asked: dict[str, Any]) -> dict[str, Any]:
    """Run the program of a case on its cores, and its data workers on theirs."""
    worker_cores = asked.get("worker_cores", ())
    asked |= {"is_streamed": bool(worker_cores), "root": os.getpid()}
    program = [sys.executable, "-m", "benchmarks.clients.streams", "program", json.dumps(asked)]
    found, loaders = run_program(program, asked["cores"], (), worker_cores)
    if sum(each["differing_steps"] for each in loaders):
        raise SystemExit("data workers' batches were not torch's own")
    counted = {key: sum(each[key] for each in loaders) for key in ("local_steps", "compared_steps")}
    return found | counted if loaders else found


def main() -> None:
    """Run what the command line asks for."""
    if sys.argv[1] == "program":
        train(json.loads(sys.argv[2]))
        return
    request = json.loads(sys.argv[2])
    for case, options in request["cases"].items():
        asked = {**request, **options, **options[sys.argv[1]]}
        print(json.dumps({"case": case, **run(asked)}), flush=True)


if __name__ == "__main__":
    main()
