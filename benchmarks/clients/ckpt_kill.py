"""A training that is killed again and again, and says at each save and each restore what its state is.

Started once by `ckpt_kill.py`: it imports torch, and forks a trainer for each line of its standard input, as importing
takes longer than what a trainer does. A line is JSON: the folder, the interval, and the step to end after or null.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # an optimizer would import it in each trainer, which takes longer than what they do
from torch import nn

from hetstream import DataLoader, FlashCheckpointer

WIDTH, HIDDEN, NUM_SAMPLES = 128, 1024, 999


class Samples:
    """Samples that depend on nothing but their number."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((WIDTH,), index / NUM_SAMPLES)


def digest(value: Any) -> str:
    """Of the bits of a state."""
    found = hashlib.blake2b(digest_size=12)

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            found.update(one.detach().contiguous().view(-1).view(torch.uint8).numpy())
        elif isinstance(one, np.ndarray):
            found.update(one.tobytes())
        elif isinstance(one, dict):
            for key in one:
                found.update(str(key).encode())
                add(one[key])
        elif isinstance(one, list | tuple):
            for each in one:
                add(each)
        else:
            found.update(repr(one).encode())

    add(value)
    return found.hexdigest()


def train(folder: Path, interval: int, until: int | None) -> None:
    """Train until told to end; save every few steps."""
    torch.set_num_threads(1)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Dropout(0.2), nn.Linear(HIDDEN, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = DataLoader(Samples(), batch_size=8, shuffle=True, seed=1)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    parent = os.getppid()
    with open(folder / "position", "r+b") as file:
        position = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    with (
        open(folder / "events", "ab", buffering=0) as events,
        FlashCheckpointer(folder / "checkpoints", interval=interval) as checkpointer,
    ):

        def tell(event: str, step: int, **more: int) -> None:
            generators = (random.getstate(), np.random.get_state(), torch.get_rng_state())
            parts = {key: digest(value.state_dict()) for key, value in state.items()}
            parts["generators"] = digest(generators)
            line = {"event": event, "pid": os.getpid(), "step": step, "parts": parts, **more}
            events.write(json.dumps(line).encode() + b"\n")  # one write: whole or not at all

        step = checkpointer.restore(state) or 0
        tell("restored", step, lost=position[0] - step)
        position[0] = step
        while not checkpointer.stopping and step != until:
            for samples in loader:
                samples = samples + random.random() + np.random.rand() + torch.rand(WIDTH)
                optimizer.zero_grad()
                model(samples).pow(2).mean().backward()
                optimizer.step()
                scheduler.step()
                step += 1
                position[0] = step
                if os.getppid() != parent:
                    os.kill(os.getpid(), signal.SIGTERM)  # the benchmark is gone
                if checkpointer.should_save(step):
                    tell("saves", step)
                    checkpointer.save(step, state)
                if checkpointer.stopping or step == until:
                    break
        tell("ends", step)


def main() -> None:
    """Fork trainers."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        folder, interval, until = json.loads(line)
        child = os.fork()
        if child == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            code = 1
            try:
                train(Path(folder), interval, until)
                code = 0
            except BaseException:  # noqa: BLE001, the child's end: told in the log and by the missing event
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)
        print(child, flush=True)


if __name__ == "__main__":
    main()
