"""The trainer of the soak: takes every batch, checks it, counts it, saves its state, and is forked again when it dies.

    python -m benchmarks.clients.soak FOLDER SERVICE BATCHES EPOCHS

`FOLDER/counts` has a byte for each step of all epochs: how often it was taken since the state that the trainer last
continued from. At the end each is 1; a 0 is a lost batch, more is one that was given twice. `FOLDER/errors` has a line
for each batch with wrong contents or in the wrong place, `FOLDER/position` the steps taken.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from hetstream import DataLoader
from hetstream.mpi_dataworkers.order.sharding import EpochPlan

BATCH_SIZE = 4
SAVE_EVERY = 500
SEED = 3


class Cheap:
    """Samples that cost nothing; a batch is the indices and a value made of each."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Any:
        drawn = np.array(indices, dtype=np.int64)
        return np.stack([drawn, drawn * 2654435761])


def as_it_is(batch: Any) -> Any:
    """collate_fn: a batch is one array already."""
    return batch


def train(folder: Path, service: str, batches: int, epochs: int) -> None:
    """Read all epochs from where the saved state says, and account for each batch."""
    samples = batches * BATCH_SIZE
    counts = np.memmap(folder / "counts", dtype=np.uint8, mode="r+", shape=(epochs * batches,))
    position = np.memmap(folder / "position", dtype=np.int64, mode="r+", shape=(1,))
    state_file = folder / "state.json"
    options: dict[str, Any] = {"batch_size": BATCH_SIZE, "shuffle": True, "seed": SEED, "collate_fn": as_it_is}
    with DataLoader(Cheap(samples), service=service, **options) as loader, (folder / "errors").open("a") as errors:
        if state_file.exists():
            loader.load_state_dict(json.loads(state_file.read_text()))
        state = loader.state_dict()
        at = state["epoch"] * batches + state["step"]
        if at > position[0]:
            errors.write(f"continued at {at}, {at - position[0]} steps after the last\n")
        counts[at:] = 0  # what was taken after the state was saved is taken again
        for epoch in range(state["epoch"], epochs):
            loader.set_epoch(epoch)
            plan = EpochPlan(samples, BATCH_SIZE, 1, False, True, SEED, epoch)
            for batch in loader:
                if not np.array_equal(batch, Cheap(samples).__getitems__(plan.indices(at % batches, 0).tolist())):
                    errors.write(f"step {at}: {batch.tolist()}\n")
                counts[at] += 1
                at += 1
                position[0] = at
                if at % SAVE_EVERY == 0:
                    temporary = folder / "state.new"
                    temporary.write_text(json.dumps(loader.state_dict()))
                    temporary.replace(state_file)


def main() -> int:
    """Fork the trainer until it ends by itself."""
    folder, service, batches, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    while True:
        pid = os.fork()
        if pid == 0:
            # From the module's own name, so that data workers find the dataset's class.
            from benchmarks.clients import soak

            soak.train(folder, service, batches, epochs)
            return 0
        (folder / "trainer.pid").write_text(str(pid))
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) >= 0:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
