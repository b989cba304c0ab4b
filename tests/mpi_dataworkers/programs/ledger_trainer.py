"""A training program that writes down every batch, saves its state now and then, and is started again when it dies.

    ledger_trainer.py DIRECTORY SERVICE SAMPLES EPOCHS

A parent process forks the program and forks it again when a signal ended it, as a launcher would. `DIRECTORY` gets
`ledger` (a line `epoch step ids sha256` a batch, a line `resume epoch step` a start), `state.json`, `trainer.pid`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import sample_datasets as datasets

from hetstream import DataLoader

SAVE_EVERY = 7
BATCH_SIZE = 4
SEED = 11


def make_loader(samples: int, service: str | None) -> DataLoader:
    return DataLoader(datasets.Augmented(samples), batch_size=BATCH_SIZE, shuffle=True, seed=SEED, service=service)


def line(epoch: int, step: int, batch: Any) -> str:
    values, ids = batch
    digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
    return f"{epoch} {step} {','.join(map(str, ids.tolist()))} {digest}\n"


def train(directory: Path, service: str, samples: int, epochs: int) -> None:
    state_file = directory / "state.json"

    def save() -> None:
        temporary = directory / "state.new"
        temporary.write_text(json.dumps(loader.state_dict()))
        temporary.replace(state_file)

    with make_loader(samples, service) as loader, (directory / "ledger").open("a", buffering=1) as ledger:
        if state_file.exists():
            loader.load_state_dict(json.loads(state_file.read_text()))
        state = loader.state_dict()
        epoch, step = state["epoch"], state["step"]
        ledger.write(f"resume {epoch} {step}\n")
        while epoch < epochs:
            loader.set_epoch(epoch)
            for batch in loader:
                ledger.write(line(epoch, step, batch))
                step += 1
                if step % SAVE_EVERY == 0:
                    save()
            save()
            epoch, step = epoch + 1, 0


def main() -> int:
    directory, service = Path(sys.argv[1]), sys.argv[2]
    samples, epochs = int(sys.argv[3]), int(sys.argv[4])
    while True:
        pid = os.fork()
        if pid == 0:
            train(directory, service, samples, epochs)
            return 0
        (directory / "trainer.pid").write_text(str(pid))
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) >= 0:
            return os.waitstatus_to_exitcode(status)


if __name__ == "__main__":
    sys.exit(main())
