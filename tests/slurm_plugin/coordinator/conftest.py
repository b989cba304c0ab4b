"""A coordinator, and training programs that share an emulated GPU: all of them real processes."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from hetstream.slurm_plugin.coordinator.table import ProcessRow, look
from tests.conftest import WaitUntil

TRAIN = Path(__file__).with_name("programs") / "train.py"
TRAIN_RANKS = TRAIN.with_name("train_ranks.py")
HETSTREAM = [sys.executable, "-m", "hetstream"]
MIB = 2**20


def ranks_alone(directory: Path, steps: int) -> list[list[str]]:
    """Losses of each of two ranks that nobody disturbs; without torchrun, as srun starts them."""
    directory.mkdir(exist_ok=True)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HETSTREAM_"))}
    argv = [sys.executable, str(TRAIN_RANKS), str(steps), "64", "0", str(directory / "alone")]
    started = [
        subprocess.Popen(argv, env={**environ, "SLURM_PROCID": str(rank), "SLURM_NTASKS": "2"}) for rank in (0, 1)
    ]
    try:
        assert [process.wait(120) for process in started] == [0, 0]
    finally:
        for process in started:
            process.kill()
            process.wait()
    return [(directory / f"alone.{rank}").read_text().split() for rank in (0, 1)]


@dataclass
class Program:
    """A training program that runs."""

    process: subprocess.Popen[bytes]
    out: Path
    err: Path

    @property
    def losses(self) -> list[str]:
        """One for each step so far."""
        return self.out.read_text().splitlines()

    @property
    def said(self) -> str:
        return self.err.read_text()


@dataclass
class Node:
    """A machine with one emulated GPU, or several."""

    directory: Path
    wait_until: WaitUntil
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    log: Path = Path()  # of the newest coordinator
    num_gpus: int = 1

    @property
    def gpu_file(self) -> Path:
        return self.directory / "gpu0"

    @property
    def gpu(self) -> str:
        return f"emulation:{self.gpu_file}"

    @property
    def gpus(self) -> list[str]:
        return [f"emulation:{self.directory}/gpu{number}" for number in range(self.num_gpus)]

    @property
    def socket(self) -> Path:
        return self.directory / "gpu.sock"

    def emulate(self, *, memory_mib: int = 256) -> None:
        cores = sorted(os.sched_getaffinity(0))
        for number in range(self.num_gpus):
            (self.directory / f"gpu{number}").unlink(missing_ok=True)
            argv = [
                *HETSTREAM,
                "internal",
                "gpu-emulate",
                str(self.directory / f"gpu{number}"),
                "--memory-mib",
                str(memory_mib),
            ]
            core = cores[-1 - number % len(cores)]
            subprocess.run([*argv, "--segment-kib", "256", "--core", str(core)], check=True, capture_output=True)

    def fault(self, point: str, action: str, count: int = 1) -> dict[str, str]:
        """Variables with which a process dies or stops there; and then `is_struck`."""
        return {"HETSTREAM_GPU_FAULT": f"{point}:{count}:{action}:{self.directory / f'struck-{point}-{action}'}"}

    def is_struck(self, point: str, action: str) -> bool:
        return (self.directory / f"struck-{point}-{action}").exists()

    def coordinate(self, *who: str, faults: Mapping[str, str] = {}) -> subprocess.Popen[bytes]:
        """Start a coordinator, and wait until it listens."""
        self.log = self.directory / f"coordinator-{len(self.processes)}.err"
        argv = [
            *HETSTREAM,
            "internal",
            "coordinator",
            "--socket",
            str(self.socket),
            *(f"--gpu={gpu}" for gpu in self.gpus),
        ]
        with self.log.open("wb") as log:
            process = subprocess.Popen([*argv, *(who or ("--own-jobs",))], stderr=log, env={**os.environ, **faults})
        self.processes.append(process)
        self.wait_until(lambda: "coordinating" in self.log.read_text(), 60, "the coordinator's line")
        return process

    def train(
        self,
        job_class: str,
        *,
        steps: int = 100_000,
        width: int = 256,
        wait_ms: float = 0,
        faults: Mapping[str, str] = {},
    ) -> Program:
        """Start a training program."""
        argv = [sys.executable, str(TRAIN), str(steps), str(width), str(wait_ms)]
        return self.share(job_class, self.gpu, argv, faults)

    def share(self, job_class: str, gpus: str, argv: Sequence[str], environ: Mapping[str, str] = {}) -> Program:
        """Start a program that shares these GPUs."""
        begin = [*HETSTREAM, "gpu", "run", f"--class={job_class}", f"--gpu={gpus}", "--socket", str(self.socket)]
        return self.run(job_class, [*begin, *argv], environ)

    def run(self, name: str, argv: Sequence[str], environ: Mapping[str, str] = {}) -> Program:
        """Start any program."""
        name = f"{name}-{len(self.processes)}"
        out, err = self.directory / f"{name}.out", self.directory / f"{name}.err"
        argv = ["setpriv", "--pdeathsig=KILL", *argv]
        with out.open("wb") as stdout, err.open("wb") as stderr:
            process = subprocess.Popen(argv, stdout=stdout, stderr=stderr, env={**os.environ, **environ})
        self.processes.append(process)
        return Program(process, out, err)

    def shows(self, job_class: str) -> ProcessRow:
        """What the coordinator's table says of the one process of a class, as soon as there is one."""
        found: list[ProcessRow] = []

        def is_there() -> bool:
            rows = look(str(self.socket)).gpus
            found.extend(one for row in rows for one in row.processes if one.job_class == job_class)
            return bool(found)

        self.wait_until(is_there, 60, f"a process of class {job_class}")
        return found[0]

    def goes_on(self, program: Program, steps: int, timeout_s: float = 60) -> None:
        """Wait for so many more steps."""
        target = len(program.losses) + steps
        self.wait_until(
            lambda: len(program.losses) >= target or program.process.poll() is not None,
            timeout_s,
            f"{steps} more steps",
        )
        assert len(program.losses) >= target, program.said

    def stop(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture
def node(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Node]:
    """A machine with an emulated GPU of 256 MiB, and nothing on it."""
    node = Node(tmp_path, wait_until)
    node.emulate()
    try:
        yield node
    finally:
        node.stop()
