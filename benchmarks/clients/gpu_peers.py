"""How a training program is held back by other systems than hetstream, and what a benchmark tells it while it runs.

A `Control` reads one file, which is written anew at each change: `pause`, the `gaps_s` after the bursts of a step, and
`pacing`: empty, `antman` or `tgs`. AntMan's own file, `antman`, has `perfControl`, and is looked at once a second, as
its public code does. The rate of `tgs`, `rate_per_s`, is in the control file. Laws are in `benchmarks/gpu_laws.py`.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu_laws import antman_idle_s

_PAUSED_LOOK_S = 0.001
_RATE_LOOK_S = 0.01
_ANTMAN_LOOK_S = 1.0
_ANTMAN_SUSPENDED_S = 100e-6
# Shorter sleeps last longer than they are to: they are put together.
_LEAST_SLEEP_S = 0.0005


class Control:
    """What a program is told.

    Args:
        path: of the file; it is there.
        bursts: of a step.
    """

    def __init__(self, path: str, bursts: int) -> None:
        self._path, self._bursts = path, bursts
        self._seen: tuple[int, int] | None = None
        self._told: dict[str, Any] = {}
        self.gaps: list[float] = [0.0] * bursts
        self._pacer: AntMan | Tgs | None = None
        self._launches: Launches | None = None

    def begin_step(self) -> None:
        """Take over what the file says; come back when it does not say `pause`."""
        self._read()
        while self._told.get("pause"):
            time.sleep(_PAUSED_LOOK_S)
            self._read()
        self.gaps = self._told.get("gaps_s") or [0.0] * self._bursts
        pacing = self._told.get("pacing", "")
        if pacing != (self._pacer.name if self._pacer else ""):
            self._hold_back_by(pacing)

    def end_step(self, took_s: float) -> None:
        """A step has ended."""
        if isinstance(self._pacer, AntMan):
            self._pacer.end_step(took_s)

    def told(self) -> dict[str, Any]:
        """What the file says now."""
        self._read()
        return self._told

    def _hold_back_by(self, pacing: str) -> None:
        if self._launches:
            self._launches.__exit__(None, None, None)
            self._launches = self._pacer = None
        if pacing == AntMan.name:
            self._pacer = AntMan(Path(self._told["antman"]), self.told)
        elif pacing == Tgs.name:
            self._pacer = Tgs(self.told)
        if self._pacer:
            self._launches = Launches(self._pacer.before_launch)
            self._launches.__enter__()

    def _read(self) -> None:
        found = os.stat(self._path)
        if (found.st_ino, found.st_mtime_ns) != self._seen:
            self._seen = found.st_ino, found.st_mtime_ns
            self._told = json.loads(Path(self._path).read_text())


class AntMan:
    """Sleeps as AntMan's public code does, spread over the launches of a mini-batch.

    Args:
        config: its file.
        told: what the control file says now.
        clock: seconds.
        sleep: for so many.
    """

    name = "antman"

    def __init__(
        self,
        config: Path,
        told: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._config, self._told, self._clock, self._sleep = config, told, clock, sleep
        self._looked_s = -_ANTMAN_LOOK_S
        self._percent = 0
        self._launches, self._slept_s, self._owed_s, self._idle_s_per_launch = 0, 0.0, 0.0, 0.0

    def before_launch(self) -> None:
        """Sleep this launch's part."""
        while self._share() == 0:
            self._sleep(_ANTMAN_SUSPENDED_S)
        self._launches += 1
        self._owed_s += self._idle_s_per_launch
        if self._owed_s >= _LEAST_SLEEP_S and not self._told().get("pause"):
            began_s = self._clock()
            self._sleep(self._owed_s)
            slept_s = self._clock() - began_s
            self._slept_s += slept_s
            self._owed_s -= slept_s

    def end_step(self, took_s: float) -> None:
        """A mini-batch has ended; so long is the next one to sleep for it."""
        percent = self._share()
        idle_s = antman_idle_s(max(0.0, took_s - self._slept_s), percent) if percent else 0.0
        self._idle_s_per_launch = idle_s / max(1, self._launches)
        self._launches, self._slept_s = 0, 0.0

    def _share(self) -> int:
        now_s = self._clock()
        if now_s - self._looked_s >= _ANTMAN_LOOK_S:
            self._looked_s = now_s
            self._percent = int(json.loads(self._config.read_text())["perfControl"])
        return self._percent


class Tgs:
    """Launches no more often than it may.

    Args:
        told: what the control file says now.
        clock: seconds.
        sleep: for so many.
    """

    name = "tgs"

    def __init__(
        self,
        told: Callable[[], dict[str, Any]],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._told, self._clock, self._sleep = told, clock, sleep
        self._looked_s = -_RATE_LOOK_S
        self._rate_per_s = 1.0
        self._due_s = clock()

    def before_launch(self) -> None:
        """Wait until it is due."""
        now_s = self._clock()
        if now_s - self._looked_s >= _RATE_LOOK_S:
            self._look(now_s)
        self._due_s = max(self._due_s, now_s - _LEAST_SLEEP_S) + 1 / self._rate_per_s
        while self._due_s - now_s >= _LEAST_SLEEP_S:
            self._sleep(min(_RATE_LOOK_S, self._due_s - now_s))
            now_s = self._clock()
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        """Take over another rate; who is told to pause ends his step at once."""
        told, self._looked_s = self._told(), now_s
        if told.get("pause"):
            self._due_s = 0.0
        self._rate_per_s = math.inf if told.get("pause") else float(told["rate_per_s"])


class Launches(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Calls a function before each operator."""

    def __init__(self, before: Callable[[], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "profiler":
            self._before()
        return func(*args, **kwargs or {})
