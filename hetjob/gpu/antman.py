"""Orders and statistics in files, in the form that AntMan's public code has (alibaba/GPU-scheduler-for-deep-learning).

Whoever coordinates jobs by those files can coordinate these, too: one file says how much memory a process may hold and
what share of the time it may use, the other how it is. Reaction is slow: files are looked at once a second. A file that
is missing or cannot be read is no order, and without an order an opportunistic process pauses.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import msgspec

from hetstream.base.typed_json import decode, encode
from hetstream.hetjob.errors import GpuCoordinatorError
from hetstream.hetjob.gpu.orders import FULL_SHARE, NO_LIMIT, JobClass, Order, Statistics, Verdict

_LOOK_NS = 1_000_000_000
_MOST_BYTES = 1_000_000
# A share of a hundred is all of it.
_PERCENT = FULL_SHARE // 100
_FOREVER_NS = 2**62


class _GpuConfig(msgspec.Struct, frozen=True):
    maxDeviceMem: Annotated[int, msgspec.Meta(ge=0)] | None = None


class _Config(msgspec.Struct, frozen=True):
    gpuConfigInfo: dict[str, _GpuConfig] = {}
    perfControl: Annotated[int, msgspec.Meta(ge=0, le=100)] = 100


def order_of(text: bytes, pci_bus: str) -> Order:
    """What a configuration file says of one GPU.

    Args:
        text: the file.
        pci_bus: of the GPU: in lower case and without the domain, such as `3b:00.0`.

    Raises:
        GpuCoordinatorError: it has another form.
    """
    try:
        config = decode(text, _Config)
    except msgspec.MsgspecError as error:
        raise GpuCoordinatorError(f"the configuration is none of AntMan's: {error}") from error
    limit_bytes = config.gpuConfigInfo.get(pci_bus, _GpuConfig()).maxDeviceMem
    return Order(
        valid_until_ns=_FOREVER_NS,
        verdict=Verdict.RUN if config.perfControl else Verdict.PAUSE,
        limit_bytes=NO_LIMIT if limit_bytes is None else limit_bytes,
        share=config.perfControl * _PERCENT,
    )


def status_of(statistics: Statistics, pci_bus: str) -> bytes:
    """A status file. What it cannot know stands as AntMan writes it: -1, or the same number for both extremes."""
    on_gpu_bytes = max(0, statistics.peak_bytes - statistics.host_bytes)
    usage: dict[str, Any] = {
        "deviceMemUsedMax": on_gpu_bytes,
        "deviceMemUsedMin": on_gpu_bytes,
        "deviceMemPoolSize": statistics.held_bytes,
        "deviceMemStable": statistics.host_bytes == 0,
        "hostMemUsedMax": statistics.host_bytes,
        "hostMemUsedMin": statistics.host_bytes,
        "hostMemPoolSize": statistics.host_capacity_bytes,
        "swapReason": "OOM" if statistics.host_bytes else "",
        "deviceMemUsedNvidia": -1,
    }
    return encode({"gpuUsageInfo": {pci_bus: usage}, "miniBatchDuration": statistics.mini_batch_ns // 1000})


class FileChannel:
    """A channel of two files. A file has no other end that could go away: an old order stays in force.

    Args:
        config: read once a second.
        status: written once a second at most.
        pci_bus: of the GPU.
        clock: nanoseconds of CLOCK_MONOTONIC.
    """

    def __init__(
        self, config: Path, status: Path | None, pci_bus: str, clock: Callable[[], int] = time.monotonic_ns
    ) -> None:
        self._config, self._status, self._pci_bus, self._clock = config, status, pci_bus, clock
        self._looked_ns = self._written_ns = -_LOOK_NS
        self._order: Order | None = None

    @property
    def job_class(self) -> JobClass:
        """These files know of no upgrade."""
        return JobClass.OPPORTUNISTIC

    def busy_since_ns(self) -> int:
        """Nobody says it in a file."""
        return 0

    def say_busy(self, now_ns: int) -> None:
        """Nobody reads it in a file."""

    def look(self) -> bool:
        """A file is there as much as it ever was."""
        return True

    def wait(self, timeout_s: float) -> None:
        """As `Channel.wait`."""
        time.sleep(timeout_s)

    def order(self) -> Order | None:
        """As `Channel.order`."""
        now_ns = self._clock()
        if now_ns - self._looked_ns >= _LOOK_NS:
            self._looked_ns = now_ns
            try:
                # A pipe in its place must not hold up a training loop.
                descriptor = os.open(self._config, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                with open(descriptor, "rb") as file:
                    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
                    self._order = order_of(file.read(_MOST_BYTES), self._pci_bus) if is_file else None
            except (OSError, GpuCoordinatorError):
                self._order = None
        return self._order

    def report(self, statistics: Statistics, *, news: bool) -> None:
        """As `Channel.report`. Readers find the file before or the new one, whole; without a place for it, none."""
        now_ns = self._clock()
        if self._status is None or not news or now_ns - self._written_ns < _LOOK_NS:
            return
        self._written_ns = now_ns
        temporary = self._status.with_name(f".{self._status.name}.{os.getpid()}")
        try:
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:  # nothing that somebody has put there is written through
                file.write(status_of(statistics, self._pci_bus))
            temporary.replace(self._status)
        except OSError:
            self._status = None  # a full or missing directory must not hold up a training loop

    def close(self) -> None:
        """Nothing is open."""
