"""Time to the first batch and memory of a data worker whose dataset is large, beside torch's DataLoader.

    python -m benchmarks.startup [--processes 4] [--paths 1200000]

The dataset is a list of paths (str) in memory, which costs a pickle for each process that is spawned. For hetstream the
first batch is counted from the loader's construction, with the service running; a second figure is the second loader,
when the data worker has the dataset. Memory is PSS (proc(5)): what processes share is divided among them. It grows with
what was read: Python writes into each object that it uses, and so each process comes to have it for itself.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch.utils.data

from hetstream import DataLoader


class Paths(torch.utils.data.Dataset[int]):
    """Sample i is the length of the i-th path."""

    def __init__(self, length: int) -> None:
        self.paths = [f"/data/images/train/class_{i % 1000:04d}/image_{i:08d}.jpg" for i in range(length)]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> int:
        return len(self.paths[index])


def pss_bytes(pid: int) -> int:
    """Memory of a process and its descendants."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    own = next(int(line.split()[1]) << 10 for line in rollup if line.startswith("Pss:"))
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return own + sum(pss_bytes(int(child)) for child in children)


def first_batch_s(loader: Any) -> float:
    """Seconds until a pass gives its first batch."""
    started = time.perf_counter()
    passing = iter(loader)
    next(passing)
    return time.perf_counter() - started


def measure_torch(dataset: Paths, processes: int, context: str) -> None:
    """torch's DataLoader with worker processes."""
    loader: Any = torch.utils.data.DataLoader(
        dataset, batch_size=64, num_workers=processes, multiprocessing_context=context
    )
    print(f"torch {context:<6} {processes} workers   first batch {first_batch_s(loader):6.2f} s")


def measure_hetstream(dataset: Paths, processes: int) -> None:
    """A dispatcher and a data worker with so many processes, as commands."""
    hetstream = [str(Path(sys.executable).with_name("hetstream"))]
    with tempfile.TemporaryDirectory() as directory:
        address = Path(directory) / "address"
        bind = ["--bind", "tcp://127.0.0.1:0", "--work-dir", f"{directory}/work", "--address-file", str(address)]
        with (Path(directory) / "log").open("wb") as log:
            dispatcher = subprocess.Popen([*hetstream, "dispatcher", *bind], stderr=log)
            worker = subprocess.Popen(
                [*hetstream, "worker", "--service", f"file:{address}", "--processes", str(processes)], stderr=log
            )
        try:
            while (Path(directory) / "log").read_bytes().count(b"registered") < 2 * processes:
                time.sleep(0.05)
            empty = pss_bytes(worker.pid)
            for what in ("first loader", "second loader"):
                started = time.perf_counter()
                with DataLoader(dataset, batch_size=64, shuffle=True, service=f"file:{address}") as loader:
                    passing = iter(loader)
                    before = -1
                    while loader.stats()["local_steps"] != before:  # until data workers deliver
                        before = loader.stats()["local_steps"]
                        next(passing)
                    took_s = time.perf_counter() - started
                    for _ in range(200):
                        next(passing)
                grown = (pss_bytes(worker.pid) - empty) / 1e6
                print(f"hetstream    {processes} processes first batch {took_s:6.2f} s, PSS +{grown:.0f} MB ({what})")
            with DataLoader(dataset, batch_size=1000, shuffle=True, service=f"file:{address}") as loader:
                for _ in loader:
                    pass
            grown = (pss_bytes(worker.pid) - empty) / 1e6
            print(f"hetstream    {processes} processes PSS +{grown:.0f} MB (after an epoch)")
        finally:
            dispatcher.terminate()
            worker.wait()
            dispatcher.wait()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--paths", type=int, default=1_200_000)
    args = parser.parse_args()
    dataset = Paths(args.paths)
    print(f"{args.paths} paths, the dataset in the trainer: {sys.getsizeof(dataset.paths) / 1e6:.0f} MB of pointers")
    for processes in sorted({1, args.processes}):
        measure_hetstream(dataset, processes)
        for context in ("fork", "spawn"):
            measure_torch(dataset, processes, context)


if __name__ == "__main__":
    main()
