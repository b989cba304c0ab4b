"""Trainers of a test: real processes, some of which are killed, and what they leave in memory and on disk."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Container
from pathlib import Path
from typing import Any

from hetstream.checkpoint.memory.view import FoundStore, StoreView, find_stores

SIGKILL = -9


class Trainers:
    """Starts trainers of one test.

    Attributes:
        path: for their directories and results.
        memory: where their stores are.
    """

    def __init__(self, zygote: subprocess.Popen[str], path: Path, memory: Path) -> None:
        self._zygote = zygote
        self.path = path
        self.memory = memory

    def run(self, *jobs: tuple[list[str], dict[str, str]]) -> list[int]:
        """Run some side by side; their exit codes."""
        assert self._zygote.stdin
        assert self._zygote.stdout
        jobs = tuple(([*argv, "--shared-memory", str(self.memory)], environ) for argv, environ in jobs)
        print(json.dumps(jobs), file=self._zygote.stdin, flush=True)
        codes: list[int] = json.loads(self._zygote.stdout.readline())
        return codes

    def one(self, name: str, *more: str, **environ: str) -> int:
        """Run one with a directory and results of this name."""
        argv = [str(self.path / name), str(self.path / f"{name}-out"), *more]
        return self.run((argv, environ))[0]

    def group(self, name: str, size: int, *more: str, faults: dict[int, str] | None = None) -> list[int]:
        """Run a group of ranks, some with a fault."""
        meeting = str(self.path / f"meeting-{random.random()}")
        own = [str(self.path / name), str(self.path / f"{name}-out")]
        return self.run(
            *(
                (
                    [*own, "--group", meeting, str(rank), str(size), *more],
                    {"HETSTREAM_CKPT_FAULT": (faults or {}).get(rank, "")},
                )
                for rank in range(size)
            )
        )

    def done(self, name: str, rank: int = 0) -> Any:
        """What a rank has come to."""
        return json.loads((self.path / f"{name}-out.{rank}.done").read_text())

    def starts(self, name: str, rank: int = 0) -> list[int]:
        """The steps that it began at."""
        lines = (self.path / f"{name}-out.{rank}.steps").read_text().splitlines()
        return [int(line.split()[1]) for line in lines if line.startswith("start")]

    def ledger(self, name: str, rank: int = 0) -> list[Any]:
        """The samples of each step, as the last start that did the step had them."""
        steps: dict[int, Any] = {}
        for line in (self.path / f"{name}-out.{rank}.steps").read_text().splitlines():
            if not line.startswith("start"):
                step, samples = json.loads(line)
                assert steps.setdefault(step, samples) == samples, f"step {step} had other samples before"
        return [steps[step] for step in sorted(steps)]


def forget_memory(trainers: Trainers, wait_until: Any, ranks: Container[int] | None = None) -> None:
    """As if the host had been started anew, once all that was in memory is on disk."""
    wait_for_disk(trainers, wait_until)
    for found in find_stores([trainers.memory]):
        if ranks is None or found.holder.rank in ranks:
            with StoreView(found.path) as view:
                assert view.remove()


def wait_for_disk(trainers: Trainers, wait_until: Any) -> None:
    """Until the checkpoint writers of killed trainers have done what they can."""
    wait_until(lambda: all(map(_is_settled, find_stores([trainers.memory]))), 60, "the end of all checkpoint writers")


def _is_settled(found: FoundStore) -> bool:
    is_saved = bool(found.persisted and found.generations and found.persisted >= found.generations[0])
    return is_saved and not found.writer_alive and not found.trainer_alive
