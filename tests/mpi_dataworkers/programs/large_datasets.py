"""Datasets whose objects are large in pickled form, and which note where they are loaded."""

from __future__ import annotations

import mmap
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset, get_worker_info


class Words(Dataset[Any]):
    """Sample i is (the process that made it, the i-th word); each process that loads it adds its id to a file."""

    WORD_BYTES = 500

    def __init__(self, length: int, note: Path) -> None:
        self.words = [f"{number:0{self.WORD_BYTES}d}" for number in range(length)]
        self.note, self.trainer = note, os.getpid()
        note.touch()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if os.getpid() != self.trainer:
            with self.note.open("a") as note:
                note.write(f"{os.getpid()}\n")
            self.loaded()

    def loaded(self) -> None:
        """What else happens when it is loaded."""

    def loaders(self) -> list[int]:
        """Processes that have loaded it, but the trainer."""
        return [int(line) for line in self.note.read_text().split()]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> tuple[int, int]:
        return os.getpid(), int(self.words[index])


class Checked(Words):
    """Sample i says, too, whether what was made when the dataset was loaded is its process's own."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "own"}

    def __getitem__(self, index: int) -> Any:
        return *super().__getitem__(index), self.is_own(index)

    def is_own(self, index: int) -> bool:
        """See the class."""
        return True


class StartsAThread(Checked):
    """Loading it starts a thread."""

    def loaded(self) -> None:
        self.own = threading.Thread(target=threading.Event().wait, daemon=True)
        self.own.start()

    def is_own(self, index: int) -> bool:
        return self.own.is_alive()


class Multiplies(Words):
    """Loading it starts threads of OpenBLAS, which ends them before each fork; samples multiply matrices, too."""

    def loaded(self) -> None:
        self.product = float((np.ones((600, 600)) @ np.ones((600, 600))).sum())
        with self.note.with_name("threads").open("a") as threads:
            threads.write(f"{len(os.listdir('/proc/self/task'))}\n")

    def __getitem__(self, index: int) -> tuple[int, int]:
        assert self.product == (np.ones((600, 600)) @ np.ones((600, 600))).sum()
        return super().__getitem__(index)


class StartsAProcess(Checked):
    """Loading it leaves a process, whose own parent has ended."""

    def loaded(self) -> None:
        subprocess.run(["sh", "-c", "sleep 0.1 &"], check=True)


class MapsMemory(Checked):
    """Loading it makes memory that its process shares with those that it forks; samples write to it who makes them."""

    def loaded(self) -> None:
        self.own = mmap.mmap(-1, 4096)

    def is_own(self, index: int) -> bool:
        self.own[:8] = os.getpid().to_bytes(8, "little")
        time.sleep(0.001)
        return self.own[:8] == os.getpid().to_bytes(8, "little")


class OpensAFile(Checked):
    """Loading it opens a file."""

    def loaded(self) -> None:
        self.own = self.note.open("rb")

    def is_own(self, index: int) -> bool:
        self.own.seek(index)
        time.sleep(0.001)
        return os.lseek(self.own.fileno(), 0, os.SEEK_CUR) == index


class EndsItsProcess(Checked):
    """The first process that loads it ends."""

    def loaded(self) -> None:
        if len(self.loaders()) == 1:
            os._exit(3)


class StopsItsProcess(Checked):
    """The first process that loads it is stopped."""

    def loaded(self) -> None:
        if len(self.loaders()) == 1:
            os.kill(os.getpid(), signal.SIGSTOP)


class HangsItsProcess(Checked):
    """The first process that loads it does not come to an end."""

    def loaded(self) -> None:
        if len(self.loaders()) == 1:
            time.sleep(600)


class Entered(Words):
    """Sample i says, too, which worker made it, and how often `enter` was called for that one."""

    times = 0

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        assert info is not None
        return *super().__getitem__(index), info.id, self.times


def enter(_: int) -> None:
    """A `worker_init_fn`."""
    info: Any = get_worker_info()
    info.dataset.times += 1
