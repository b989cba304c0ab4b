"""`make bench-ckpt_kill`: a training is killed at random, 500 times. Is a restored state ever torn, mixed or old?

Real processes: a trainer with FlashCheckpointer, its checkpoint writer. Killed is one of them, or both, or both with
the memory, as when a host is lost. With `--folder` an interrupted run goes on.
docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import harness, machine, running
from benchmarks.harness import Row
from benchmarks.processes import all_processes, children_of, command_line, is_alive
from hetstream.checkpoint.memory.store_files import SHARED_MEMORY, list_stores, stores_prefix
from hetstream.checkpoint.memory.view import StoreView

TRAINER, WRITER, BOTH, HOST = "trainer", "writer", "trainer and checkpoint writer", "both, and the memory"
VICTIMS = (TRAINER, WRITER, BOTH, TRAINER, BOTH, HOST)
INTERVAL = 5
# One in so many kills comes while the trainer starts and restores.
EARLY_ONE_IN = 5
PATIENCE_S = 240.0


@dataclass
class Tally:
    """What was found so far; written to the folder after each kill."""

    kills: Counter[str] = field(default_factory=Counter)
    restores: int = 0
    from_start: int = 0
    torn: int = 0
    mixed: int = 0
    diverged: int = 0
    most_lost: int = 0
    most_lost_with_memory: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, path: Path) -> Tally:
        """What an earlier run has left."""
        if not path.exists():
            return cls()
        found = json.loads(path.read_text())
        return cls(Counter(found.pop("kills")), **found)

    def write(self, path: Path) -> None:
        """Replace the file."""
        new = path.with_suffix(".new")
        new.write_text(json.dumps(self.__dict__))
        new.rename(path)


class Chaos:
    """The training under fire.

    Args:
        folder: of its checkpoints and events.
        zygote: what forks trainers.
        seed: of the kills.
    """

    def __init__(self, folder: Path, zygote: subprocess.Popen[str], seed: int) -> None:
        self.folder = folder
        self.directory = folder / "checkpoints"
        self.tally = Tally.of(folder / "tally.json")
        self.chance = random.Random(seed + sum(self.tally.kills.values()))
        self._zygote = zygote
        self._known: dict[int, dict[str, str]] = {}
        self._steps_of: dict[str, set[int]] = {}
        self._read_bytes = self._judged_bytes = 0
        # By process: the step that a trainer began with.
        self._restored: dict[int, int] = {}
        self._without_memory = True
        self.newest_step = 0
        if not (folder / "position").exists():
            (folder / "position").write_bytes(bytes(8))
        with open(folder / "position", "r+b") as file:
            self._position = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")

    def start(self, folder: Path | None = None, until: int | None = None) -> int:
        """Start a trainer; its process id."""
        assert self._zygote.stdin is not None
        assert self._zygote.stdout is not None
        self._zygote.stdin.write(json.dumps([str(folder or self.folder), INTERVAL, until]) + "\n")
        self._zygote.stdin.flush()
        return int(self._zygote.stdout.readline())

    def shoot(self, trainer: int) -> int:
        """Kill something once; the process id of the trainer that is there then."""
        victim = self.chance.choice(VICTIMS)
        if self.chance.randrange(EARLY_ONE_IN) == 0:
            time.sleep(self.chance.random())
        else:
            begin = self.wait_for_restore(trainer)
            goal = begin + self.chance.randint(1, 12 * INTERVAL)
            self._wait(trainer, lambda: self._position[0] >= goal)
            time.sleep(self.chance.random() * 0.02)
        writers = self.writers()
        order = [trainer, *writers] if self.chance.random() < 0.5 else [*writers, trainer]
        for process in {WRITER: writers, TRAINER: [trainer]}.get(victim, order):
            _kill(process)
        if victim == HOST:
            for process in (*self.writers(), trainer):
                _kill(process)
                _wait_for_end(process)
            self.read_events()  # this trainer may have restored from the memory
            self._remove_memory()
            self._without_memory = True
        self.tally.kills[victim] += 1
        if victim != WRITER:
            _wait_for_end(trainer)
            self.read_events()
            trainer = self.start()
        return trainer

    def wait_for_restore(self, trainer: int) -> int:
        """Wait until this trainer has restored; its step."""

        def has_restored() -> bool:
            self.read_events()
            return trainer in self._restored

        self._wait(trainer, has_restored)
        return self._restored[trainer]

    def _wait(self, trainer: int, is_true: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_true():
            if time.monotonic() > deadline_s or not is_alive(trainer):
                what = "does not get on" if is_alive(trainer) else "has ended by itself"
                raise RuntimeError(f"the trainer {what}: see {self.folder / 'log'}")
            time.sleep(0.002)

    def read_events(self) -> None:
        """Compare what trainers have said of their states."""
        with open(self.folder / "events", "ab+") as file:
            file.seek(self._read_bytes)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_bytes += len(line)
                self._judge(json.loads(line))

    def _judge(self, event: dict[str, Any]) -> None:
        step, parts = event["step"], event["parts"]
        known = self._known.get(step)
        self.newest_step = max(self.newest_step, step)
        is_new = self._read_bytes > self._judged_bytes
        if event["event"] == "restored":
            self._restored[event["pid"]] = step
            if is_new:
                self.tally.restores += 1
                self.tally.from_start += step == 0
                if self._without_memory:
                    self.tally.most_lost_with_memory = max(self.tally.most_lost_with_memory, event["lost"])
                else:
                    self.tally.most_lost = max(self.tally.most_lost, event["lost"])
                self._without_memory = False
        if known is None:
            self._known[step] = parts
            for part in parts.values():
                self._steps_of.setdefault(part, set()).add(step)
        elif known != parts and is_new:
            wrong = [part for key, part in parts.items() if known[key] != part]
            if event["event"] != "restored":
                self.tally.diverged += 1
            elif any(self._steps_of.get(part) for part in wrong):
                self.tally.mixed += 1
            else:
                self.tally.torn += 1

    def resume(self) -> None:
        """Take in what an earlier run has judged."""
        self._judged_bytes = (self.folder / "events").stat().st_size if (self.folder / "events").exists() else 0
        self.read_events()
        self._judged_bytes = 0

    def writers(self) -> list[int]:
        """The checkpoint writers of this training: that of the trainer, and what is left of those before."""
        word = f"--directory={self.directory}".encode()
        return [
            process
            for process in all_processes()
            if b"hetstream.checkpoint.persist.writer" in (line := command_line(process)) and word in line
        ]

    def end(self) -> None:
        """Leave nothing behind."""
        for process in self.writers():
            _kill(process)
            _wait_for_end(process)
        self._remove_memory()

    def _remove_memory(self) -> None:
        for store in list_stores(SHARED_MEMORY, stores_prefix()):
            with contextlib.suppress(Exception):
                if Path(StoreView(store.path).holder.directory) != self.directory:
                    continue
            with contextlib.suppress(FileNotFoundError):
                shutil.rmtree(store.path)

    def twin_differs(self) -> int:
        """Train undisturbed up to the newest step: 1 if the state is another one."""
        own = self.folder / "undisturbed"
        shutil.rmtree(own, ignore_errors=True)
        own.mkdir()
        (own / "position").write_bytes(bytes(8))
        twin = self.start(own, self.newest_step)
        while is_alive(twin):
            time.sleep(0.05)
        last = json.loads((own / "events").read_bytes().splitlines()[-1])
        return int(last["event"] != "ends" or last["parts"] != self._known[self.newest_step])


def _kill(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, signal.SIGKILL)


def _wait_for_end(process: int) -> None:
    while is_alive(process):
        time.sleep(0.002)


def run(folder: Path, args: argparse.Namespace) -> Tally:
    """Kill until there were enough."""
    with open(folder / "log", "ab") as log:
        zygote = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.clients.ckpt_kill"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=running.ROOT,
        )
    chaos = Chaos(folder, zygote, args.seed)
    chaos.resume()
    tally, began_s = chaos.tally, time.monotonic()
    before_s = tally.seconds
    try:
        trainer = chaos.start()
        while sum(tally.kills.values()) < args.kills:
            trainer = chaos.shoot(trainer)
            tally.seconds = before_s + time.monotonic() - began_s
            tally.write(folder / "tally.json")
            if sum(tally.kills.values()) % 10 == 0:
                harness.say(
                    f"  {sum(tally.kills.values())} kills in {tally.seconds:.0f} s, {tally.restores} restores: "
                    f"{tally.torn} torn, {tally.mixed} mixed, {tally.diverged} diverged, at most {tally.most_lost} "
                    f"steps lost; step {chaos.newest_step}"
                )
        chaos.wait_for_restore(trainer)
        os.kill(trainer, signal.SIGTERM)
        _wait_for_end(trainer)
        chaos.read_events()
        tally.diverged += chaos.twin_differs()
    finally:
        for process in children_of(zygote.pid):
            _kill(process)
            _wait_for_end(process)
        zygote.kill()
        zygote.communicate()
        chaos.end()
    return tally


def rows_of(tally: Tally) -> list[Row]:
    """The table."""
    case = f"{sum(tally.kills.values())} SIGKILLs"

    def goal(what: str, value: int, most: int) -> Row:
        return Row(case, "hetstream", value, what, target=f"<= {most}", met=value <= most)

    return [
        *(Row(case, victim, count, "kills") for victim, count in sorted(tally.kills.items())),
        Row(case, "hetstream", tally.restores, "restores"),
        goal("torn", tally.torn, 0),
        goal("mixed", tally.mixed, 0),
        goal("other than undisturbed", tally.diverged, 0),
        goal("steps lost at most", tally.most_lost, INTERVAL),
        Row(case, "hetstream", tally.most_lost_with_memory, "steps lost at most with the memory"),
    ]


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("Random SIGKILLs of trainer and checkpoint writer.", repeats=1)
    parser.add_argument("--kills", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="on a disk; an interrupted run of this folder goes on")
    args = parser.parse_args()
    args.kills = 12 if args.quick else args.kills
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hetstream-kill-")))
        folder.mkdir(parents=True, exist_ok=True)
        tally = run(folder.absolute(), args)
    context = {
        "machine": machine.describe(),
        "versions": machine.versions("torch"),
        "notes": [
            f"A save every {INTERVAL} steps, as fast as the trainer can. Kills come at random moments, one in "
            f"{EARLY_ONE_IN} while the trainer starts or restores.",
            "Torn: a restored part has bits that no save gave it. Mixed: it is that of another step. Parts: model, "
            "optimizer, scheduler, the loader's position, the generators of Python, NumPy and torch.",
            "Other than undisturbed: at a save or the end, something differs from before or from a run without kills.",
            "Kills that take the memory along restore from disk: lost there is what was not on it yet.",
            f"{tally.seconds:.0f} s.",
        ],
    }
    return harness.finish("ckpt_kill", args.out, rows_of(tally), {}, context)


if __name__ == "__main__":
    sys.exit(main())
