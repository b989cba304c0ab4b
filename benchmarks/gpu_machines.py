"""Where `benchmarks.gpu_sharing` runs: one emulated GPU of this machine's last core, or one real one.

The programs are the same on both (`clients/gpu_training.py`); their sizes are such that the larger one needs about
90 % of the memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from benchmarks.running import ROOT
from hetstream.base.errors import HetstreamError
from hetstream.hetjob.gpu import environment
from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.hetjob.job.processes import before_exec

MIB = 2**20
CLIENTS = ROOT / "benchmarks/clients"
_CLIENT_S = 120.0
NO_ENVIRONMENT: Mapping[str, str] = {}
_end_s = math.inf


class OutOfTime(Exception):
    """The run, or one of its experiments, has taken as long as it may."""


@dataclass(frozen=True)
class Run:
    """How to measure.

    Attributes:
        quick: shortly, to see that it runs.
        out: folder for what an experiment records.
        seconds: that the experiment is to take; infinite: as long as it does.
    """

    quick: bool
    out: Path
    seconds: float = math.inf

    def scale(self, planned_s: float, most: float) -> float:
        """How much longer or shorter than planned everything is to be, at most so much."""
        return min(most, self.seconds / planned_s) if math.isfinite(self.seconds) else 1.0


@dataclass(frozen=True)
class Sizes:
    """What the programs of one machine compute, and what is asked of it.

    Attributes:
        capacity_bytes: of the GPU, as far as it is used.
        large, small: requests of a job that needs nearly all of the memory, and of one that needs little.
        small_bytes: what the small one needs.
        guaranteed, beside: of jobs that share the GPU's time.
        waits_ms: that the guaranteed one waits for data before each step.
        host_mib: memory of the host that may stand in.
        guaranteed_at_most: of its time alone, that the guaranteed job's may come to in table 2.
        opportunistic_at_most: the same of the other one; None: there is no goal.
        shrink_ms, grow_ms: goals of what it takes to give memory back and to take it again; None: there are none.
        shrink_p99_ms: the same of the 99th percentile.
    """

    capacity_bytes: int
    large: Mapping[str, Any]
    small: Mapping[str, Any]
    small_bytes: int
    guaranteed: Mapping[str, Any]
    beside: Mapping[str, Any]
    waits_ms: tuple[int, ...]
    host_mib: int
    guaranteed_at_most: float
    opportunistic_at_most: float | None = None
    shrink_ms: float | None = None
    grow_ms: float | None = None
    shrink_p99_ms: float | None = None


# Of the GPU's memory the one needs about 90 %, most of it activations, and the other 13 %: both do not fit. What the
# other one keeps between its mini-batches does, as in AntMan's table 2 ("Job-B uses 30 GB GPU memory and Job-A uses the
# 2 GB left over, and 1.5 GB host memory"): nobody moves what is in use. Parts of a kernel's length are what a
# guaranteed job can lose at the end of a gap.
ON_CPU = Sizes(
    capacity_bytes=64 * MIB,
    large={"width": 512, "rows": 2700, "layers": 5},
    small={"width": 256, "rows": 640, "layers": 4},
    small_bytes=12 * MIB,
    guaranteed={"width": 512, "rows": 128, "layers": 6},
    beside={"width": 256, "rows": 64, "layers": 4},
    waits_ms=(70, 30, 13),
    host_mib=1024,
    guaranteed_at_most=1.03,
)
# 32 GiB of the GPU, as AntMan's V100 has: the rest is held by nobody who computes.
ON_CUDA = Sizes(
    capacity_bytes=32 * 1024 * MIB,
    large={"width": 4096, "rows": 84_000, "layers": 10, "device": "cuda"},
    small={"width": 4096, "rows": 8192, "layers": 10, "device": "cuda"},
    small_bytes=4096 * MIB,
    guaranteed={"width": 4096, "rows": 4096, "layers": 8, "device": "cuda"},
    beside={"width": 1024, "rows": 512, "layers": 8, "device": "cuda"},
    waits_ms=(140, 60, 26),
    host_mib=16 * 1024,
    guaranteed_at_most=1.01,
    opportunistic_at_most=1.03,
    shrink_ms=17.0,
    grow_ms=60.0,
    shrink_p99_ms=40.0,
)


@dataclass
class Training:
    """A training program that runs, or has run."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    def steps(self) -> list[tuple[int, int]]:
        """When each step ended, and how long it computed."""
        steps = (line.split() for line in self._lines() if line[:1].isdigit())
        return [(int(ended_ns), int(busy_ns)) for ended_ns, busy_ns in steps]

    def said(self, word: str) -> str | None:
        """What stands behind a word at the beginning of a line; None: there is no such line."""
        return next((line[len(word) :].strip() for line in self._lines() if line.startswith(word)), None)

    def _lines(self) -> list[str]:
        return self.out.read_text().split("\n")[:-1]

    def last_words(self) -> str:
        """The end of what it said."""
        return self.err.read_text().strip()[-500:]

    def finish(self) -> float | None:
        """Wait for its end. How long it took from its first step on; None if it failed."""
        until(lambda: self.process.poll() is not None)
        steps = self.steps()
        return (steps[-1][0] - steps[0][0] + steps[0][1]) / 1e9 if self.process.returncode == 0 and steps else None


class Machine(Protocol):
    """One GPU and what runs on it."""

    sizes: Sizes
    socket: Path
    folder: Path
    is_real: bool

    @property
    def gpu(self) -> str:
        """What jobs call it."""

    def resize(self, capacity_bytes: int) -> None:
        """Let jobs have no more than this."""

    def held_bytes(self, pid: int) -> int:
        """What a process holds."""

    @contextlib.contextmanager
    def coordinator(self) -> Iterator[subprocess.Popen[bytes]]:
        """A coordinator, as long as the context."""

    @contextlib.contextmanager
    def train(
        self, job_class: JobClass | None, request: Mapping[str, Any], host_mib: int | None = None,
        extra: Mapping[str, str] = NO_ENVIRONMENT,
    ) -> Iterator[Training]:  # fmt: skip
        """A training program, as long as the context.

        Args:
            job_class: of the program; None: it has no agent, as far as that can be.
            request: of `clients/gpu_training.py`.
            host_mib: memory of the host that may stand in; None: as much as the machine's sizes say.
            extra: variables of its environment.
        """


class _Programs:
    """Starts programs that share a GPU."""

    def __init__(self, folder: Path, sizes: Sizes) -> None:
        self.folder, self.sizes = folder, sizes
        self.socket = folder / "gpu.sock"
        self._count = 0

    @contextlib.contextmanager
    def _coordinated(self, gpu: str) -> Iterator[subprocess.Popen[bytes]]:
        argv = [sys.executable, "-m", "hetstream", "internal", "coordinator", "--own-jobs"]
        argv += ["--gpu", gpu, "--socket", str(self.socket)]
        with subprocess.Popen(argv, stderr=subprocess.PIPE, preexec_fn=_ends_with_this()) as process:
            assert process.stderr is not None
            said = b""
            try:
                for line in process.stderr:  # it says when it listens
                    said += line
                    if line.startswith(b"coordinating"):
                        break
                else:
                    raise HetstreamError(f"the coordinator did not start: {said.decode()[-500:]}")
                yield process
            finally:
                process.terminate()

    @contextlib.contextmanager
    def _train(self, settings: Mapping[str, str], request: Mapping[str, Any]) -> Iterator[Training]:
        self._count += 1
        out, err = self.folder / f"{self._count}.out", self.folder / f"{self._count}.err"
        argv = [sys.executable, str(CLIENTS / "gpu_training.py"), json.dumps(dict(request))]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            environ = {**os.environ, **settings}
            process = subprocess.Popen(argv, stdout=stdout, stderr=stderr, env=environ, preexec_fn=_ends_with_this())
        try:
            yield Training(process, out, err)
        finally:
            process.kill()
            process.wait()

    def _shared(self, gpu: str, job_class: JobClass, host_mib: int, socket: Path) -> dict[str, str]:
        return environment(
            {
                "HETSTREAM_GPU": gpu,
                "HETSTREAM_JOB_CLASS": job_class.value,
                "HETSTREAM_GPU_SOCKET": str(socket),
                "HETSTREAM_GPU_HOST_BYTES": str(host_mib * MIB),
            }
        )


class EmulatedMachine(_Programs):
    """One emulated GPU on the last core; all else runs on the others."""

    is_real = False

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ON_CPU)
        self._file = folder / "gpu0"
        cores = sorted(os.sched_getaffinity(0))
        self.core = cores[-1]
        os.sched_setaffinity(0, cores[:-1] or cores)
        self.resize(self.sizes.capacity_bytes)

    @property
    def gpu(self) -> str:
        """As `Machine.gpu`."""
        return f"emulation:{self._file}"

    def resize(self, capacity_bytes: int) -> None:
        """As `Machine.resize`."""
        self._file.unlink(missing_ok=True)
        EmulatedGpuFile.create(
            self._file, capacity_bytes=capacity_bytes, core=self.core, segment_bytes=MIB, bus_bytes_per_s=512 * MIB
        )

    def held_bytes(self, pid: int) -> int:
        """As `Machine.held_bytes`."""
        with contextlib.closing(EmulatedGpuFile(self._file)) as seen:
            return seen.held_by(pid)

    @contextlib.contextmanager
    def coordinator(self) -> Iterator[subprocess.Popen[bytes]]:
        """As `Machine.coordinator`."""
        with self._coordinated(self.gpu) as process:
            yield process

    @contextlib.contextmanager
    def train(
        self, job_class: JobClass | None, request: Mapping[str, Any], host_mib: int | None = None,
        extra: Mapping[str, str] = NO_ENVIRONMENT,
    ) -> Iterator[Training]:  # fmt: skip
        """As `Machine.train`."""
        host_mib = self.sizes.host_mib if host_mib is None else host_mib
        # Kernels of the emulation are the agent's: without one is as alone, with a coordinator that nobody ever finds.
        socket = self.folder / "nobody.sock" if job_class is None else self.socket
        settings = self._shared(self.gpu, job_class or JobClass.GUARANTEED, host_mib, socket)
        with self._train({**settings, **extra}, request) as made:
            yield made


class CudaMachine(_Programs):
    """The first real GPU. Memory above the capacity is held by a process that does nothing else.

    Nothing of it has run on a GPU yet.
    """

    gpu = "GPU-of-this-benchmark"
    is_real = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, ON_CUDA)
        import torch

        self._cuda = torch.cuda
        free_bytes, self._total_bytes = torch.cuda.mem_get_info()
        self._capacity_bytes = min(self.sizes.capacity_bytes, free_bytes)
        self._ballast: Any = None
        self._torch = torch
        self.resize(self._capacity_bytes)

    def resize(self, capacity_bytes: int) -> None:
        """As `Machine.resize`."""
        self._ballast = None
        self._cuda.empty_cache()
        free_bytes, _ = self._cuda.mem_get_info()
        self._capacity_bytes = capacity_bytes
        num_bytes = max(0, free_bytes - capacity_bytes)
        self._ballast = self._torch.empty(num_bytes, dtype=self._torch.uint8, device="cuda")
        self._idle_bytes = self._used_bytes()

    def held_bytes(self, pid: int) -> int:  # noqa: ARG002
        """What all programs hold: only one that trains is there when this is asked."""
        return self._used_bytes() - self._idle_bytes

    def _used_bytes(self) -> int:
        free_bytes, total_bytes = self._cuda.mem_get_info()
        return int(total_bytes - free_bytes)

    @contextlib.contextmanager
    def coordinator(self) -> Iterator[subprocess.Popen[bytes]]:
        """As `Machine.coordinator`."""
        with self._coordinated(f"{self.gpu}={self._capacity_bytes}") as process:
            yield process

    @contextlib.contextmanager
    def train(
        self, job_class: JobClass | None, request: Mapping[str, Any], host_mib: int | None = None,
        extra: Mapping[str, str] = NO_ENVIRONMENT,
    ) -> Iterator[Training]:  # fmt: skip
        """As `Machine.train`."""
        host_mib = self.sizes.host_mib if host_mib is None else host_mib
        if job_class is None:
            settings, request = {}, {"host_bytes": host_mib * MIB, **request}
        else:
            settings = self._shared(self.gpu, job_class, host_mib, self.socket)
        with self._train({**settings, **extra}, request) as made:
            yield made


def _ends_with_this() -> Callable[[], None]:
    """A program ends with the benchmark, also if that is killed: else it would keep the GPU."""
    return before_exec(os.getpid(), signal.SIGKILL)


def why_no_gpu() -> str:
    """Why no real GPU can be used; empty if one can."""
    try:
        import torch
    except ImportError as error:
        return f"there is no torch: {error}"
    return "" if torch.cuda.is_available() else "no CUDA device; --cpu runs on an emulated one"


def client(name: str, request: Mapping[str, Any], extra: Mapping[str, str] = NO_ENVIRONMENT) -> str:
    """Run another program of `clients` to its end. What it printed.

    Raises:
        HetstreamError: it failed.
        OutOfTime: the run has taken as long as it may.
    """
    argv = [sys.executable, str(CLIENTS / name), json.dumps(dict(request))]
    environ, left_s = {**os.environ, **extra}, max(1.0, left())
    limit_s = min(_CLIENT_S, left_s)
    try:
        done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        if left_s < _CLIENT_S:
            raise OutOfTime from error
        raise HetstreamError(f"{name} had not ended after {limit_s:.0f} s") from error
    if done.returncode:
        raise HetstreamError(f"{name} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout


def wait_for_steps(training: Training, steps: int) -> None:
    """Wait until a program has made so many steps."""
    until(lambda: len(training.steps()) >= steps or training.process.poll() is not None)
    if len(training.steps()) < steps:
        raise HetstreamError(f"a training program ended early: {training.last_words()}")


def wait_until_ready(*jobs: Training, word: str = "ready") -> None:
    """Wait until programs have all but begun their first step, or have said another word."""
    for job in jobs:
        until(lambda job=job: job.said(word) is not None or job.process.poll() is not None)
        if job.said(word) is None:
            raise HetstreamError(f"a training program ended early: {job.last_words()}")


def until(condition: Callable[[], object]) -> None:
    """Wait for something.

    Raises:
        OutOfTime: the run has taken as long as it may.
    """
    while not condition():
        if time.monotonic() > _end_s:
            raise OutOfTime
        time.sleep(0.001)


def end_by(limit_s: float) -> None:
    """Let the whole run take no longer than this from now on."""
    global _end_s
    _end_s = time.monotonic() + limit_s


def left() -> float:
    """Seconds that are left of that."""
    return _end_s - time.monotonic()
