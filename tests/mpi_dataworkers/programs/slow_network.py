"""Reads batches of 16 MiB over a loopback interface of 400 Mbit/s, which the caller has given a network of its own.

Prints what the loader counted, and the dispatcher's log. Started by test_slow_network.py with a folder.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from hetstream import DataLoader

NUM_STEPS = 36
BATCH_BYTES = 16 << 20


class Large(Dataset[Any]):
    """Samples that cost less than their way."""

    def __len__(self) -> int:
        return 10_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((BATCH_BYTES,), index % 251, dtype=torch.uint8)


def main(folder: Path) -> None:
    """Start a service, read, and end it."""
    for words in ("ip link set lo up", "tc qdisc add dev lo root tbf rate 400mbit burst 256k latency 400ms"):
        subprocess.run(words.split(), check=True)
    address = folder / "work" / "address"

    def start(*words: str) -> subprocess.Popen[bytes]:
        with (folder / f"{words[1]}.log").open("w") as log:
            command = [str(Path(sys.executable).with_name("hetstream")), *words]
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    work = "--bind", "tcp://127.0.0.1:0", "--work-dir", str(address.parent), "--address-file", str(address)
    running = [
        start("internal", "dispatcher", *work),
        start("internal", "worker", "--service", f"file:{address}", "--processes", "1"),
    ]
    try:
        with DataLoader(Large(), batch_size=1, seed=0, service=f"file:{address}") as loader:
            while not loader.stats()["num_data_workers"]:
                time.sleep(0.02)
            for number, batch in zip(range(NUM_STEPS), loader, strict=False):
                assert batch.shape == (1, BATCH_BYTES), number
                assert batch[0, -1] == number % 251, number
            stats = loader.stats()
    finally:
        running[0].terminate()
        for one in running:
            one.wait(30)
    log = (folder / "dispatcher.log").read_text()
    names = ("steps", "local_steps", "duplicates_dropped", "transport")
    print(json.dumps({"stats": {name: stats[name] for name in names}, "log": log}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
