"""A program whose worker process takes what one process alone can have. Prints its batches."""

from __future__ import annotations

import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

HELD: list[Any] = []


class Exclusive(Dataset[Any]):
    """Its samples say which worker has made them; nothing of it may run in the trainer."""

    def __init__(self, at_sample: str = "") -> None:
        self.trainer = os.getpid()
        self.at_sample = at_sample

    def __len__(self) -> int:
        return 14

    def __getitem__(self, index: int) -> Any:
        assert os.getpid() != self.trainer, "in the trainer"
        if self.at_sample and not HELD:
            TAKES[self.at_sample](0)
        info = get_worker_info()
        assert info is not None
        return torch.tensor([index, info.id])


def take_port(worker_id: int) -> None:
    taken = socket.socket()
    taken.bind(("127.0.0.1", int(Path("port").read_text()) + worker_id))
    taken.listen()
    HELD.append(taken)


def take_lock(worker_id: int) -> None:
    taken = open(f"lock-{worker_id}", "w")  # noqa: SIM115, it is held as long as the process lives
    fcntl.flock(taken, fcntl.LOCK_EX)
    HELD.append(taken)


def try_lock(worker_id: int) -> None:
    taken = open(f"lock-{worker_id}", "w")  # noqa: SIM115, as above
    fcntl.flock(taken, fcntl.LOCK_EX | fcntl.LOCK_NB)
    HELD.append(taken)


def later(index: int) -> None:
    """Of some samples alone."""


TAKES = {"port": take_port, "lock": take_lock, "try": try_lock}


def main(kind: str, where: str, num_workers: int) -> None:
    if where == "worker_init_fn":
        loader = DataLoader(Exclusive(), 2, num_workers=num_workers, worker_init_fn=TAKES[kind])
    else:
        loader = DataLoader(Exclusive(kind), 2, num_workers=1, persistent_workers=where == "kept")
    for number in range(2):
        print(number, [batch.tolist() for batch in loader], flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
