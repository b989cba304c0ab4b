"""Datasets that do to their process, when loaded or read, what a fork server or a supervisor may stumble over."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from large_datasets import Words
from torch.utils.data import Dataset


class TakesChildren(Words):
    """Loading it has whoever ends waited for, as some libraries do."""

    def loaded(self) -> None:
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)


class WaitsForAFile(Words):
    """Loading it takes until there is a file beside its note."""

    @property
    def may_go_on(self) -> Path:
        return self.note.with_suffix(".go")

    def loaded(self) -> None:
        while not self.may_go_on.exists():
            time.sleep(0.01)


class SampleWaits(Words):
    """The first sample makes a file beside the note, and takes until there is another one."""

    @property
    def began(self) -> Path:
        return self.note.with_suffix(".began")

    @property
    def may_go_on(self) -> Path:
        return self.note.with_suffix(".go")

    def __getitem__(self, index: int) -> tuple[int, int]:
        if index == 0:
            self.began.touch()
            while not self.may_go_on.exists():
                time.sleep(0.01)
        return super().__getitem__(index)


class ForksSlowly(Words):
    """Loading it takes 2.5 s, and each fork from then on 1.2 s: a process of 10 GB."""

    def loaded(self) -> None:
        time.sleep(2.5)
        os.register_at_fork(before=lambda: time.sleep(1.2))


class ClosesItsOutput(Words):
    """The first sample closes what a process says its last words to."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        sys.stdout.close()
        sys.stderr = None  # type: ignore[assignment]  # as pythonw and some daemons have it
        return super().__getitem__(index)


class Prints(Words):
    """Each sample prints."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        print(f"printed {index}")
        return super().__getitem__(index)


class ForkGoesOn(Dataset[Any]):
    """The first sample forks a process that comes back with another sample, later than the process itself.

    Args:
        until: file that it waits for.
    """

    def __init__(self, until: Path) -> None:
        self.until = until

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 0 and not os.fork():
            self.until.with_suffix(".pid").write_text(str(os.getpid()))
            while not self.until.exists():
                time.sleep(0.01)
            return 1000
        return index


class ForkRaises(Dataset[Any]):
    """Each sample is the exit code of a process that it forks, which raises an error that is its own cause."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, index: int) -> int:
        pid = os.fork()
        if not pid:
            try:
                raise ValueError("of the forked process alone")
            except ValueError as error:
                raise error from error
        for _ in range(500):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.01)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        return -1
