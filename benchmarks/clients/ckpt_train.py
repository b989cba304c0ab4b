"""A training program with a flash checkpoint of model, optimizer, generators and data position, to be killed.

Usage: ckpt_train.py CHECKPOINTS DIRECTORY STEPS [STEP_S]

`DIRECTORY/ledger` gets a line `start STEP` for each start and `STEP EPOCH IDS SHA256` for each batch that was trained
on, `DIRECTORY/times` the time of each such line, `DIRECTORY/result` the digest of the final weights and moments. When
it is asked to stop it saves once more and ends with 75. A number in `DIRECTORY/end` is the last step.
"""

from __future__ import annotations

import hashlib
import logging
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import Dataset

from hetstream import DataLoader, FlashCheckpointer

SAMPLES = 640
BATCH = 16
SAVE_EVERY = 5


class Pictures(Dataset):  # type: ignore[type-arg]
    """Samples with random augmentation: the same bytes only come out of the same seeds."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((8, 8), float(index) / SAMPLES) + torch.rand(8, 8), index


def digest_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> str:
    digest = hashlib.sha256()
    for tensor in [*model.state_dict().values(), *(v for one in optimizer.state.values() for v in one.values())]:
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def main() -> int:
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(asctime)s %(name)s: %(message)s")
    checkpoints, directory, num_steps = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    step_s = float(sys.argv[4]) if len(sys.argv) > 4 else 0.0
    directory.mkdir(exist_ok=True)
    torch.manual_seed(1234)
    torch.set_num_threads(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.Dropout(0.2), torch.nn.Linear(256, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with (
        DataLoader(Pictures(), batch_size=BATCH, shuffle=True, seed=7) as loader,
        FlashCheckpointer(checkpoints, shared=("model", "optimizer"), interval=SAVE_EVERY) as ckpt,
        (directory / "ledger").open("a", buffering=1) as ledger,
        (directory / "times").open("a", buffering=1) as times,
    ):
        state = {"model": model, "optimizer": optimizer, "loader": loader}
        step = ckpt.restore(state) or 0
        print("start", time.time(), file=times)
        print("start", step, file=ledger)
        while step < num_steps:
            loader.set_epoch(epoch := loader.state_dict()["epoch"])
            for images, ids in loader:
                optimizer.zero_grad()
                ((model(images.flatten(1)) - ids[:, None] / SAMPLES) ** 2).mean().backward()
                optimizer.step()
                step += 1
                print(step, time.time(), file=times)
                digest = hashlib.sha256(images.numpy().tobytes()).hexdigest()
                print(step, epoch, ",".join(map(str, ids.tolist())), digest, file=ledger)
                time.sleep(step_s)
                if (directory / "end").exists():
                    num_steps = max(step, int((directory / "end").read_text()))
                if ckpt.stopping and step < num_steps:
                    ckpt.save(step, state)
                    print("stopping", step, file=ledger)
                    return 75
                if ckpt.should_save(step):
                    ckpt.save(step, state)
                if step == num_steps:
                    break
        (directory / "result.new").write_text(digest_of(model, optimizer))
        (directory / "result.new").replace(directory / "result")
    return 0


if __name__ == "__main__":
    sys.exit(main())
