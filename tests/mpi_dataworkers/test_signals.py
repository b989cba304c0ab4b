"""Ctrl-C and SIGTERM end training programs, data workers and the dispatcher within 2 s, whatever they wait for."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.processes import children_of

PROGRAMS = Path(__file__).with_name("programs")
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
LIMIT_S = 2.0
# Whatever takes seconds is tried with one of the two in the short suite.
INTERRUPTED, TERMINATED = (
    pytest.mark.parametrize("number", [first, pytest.param(second, marks=pytest.mark.slow)], ids=lambda one: one.name)
    for first, second in ((signal.SIGINT, signal.SIGTERM), (signal.SIGTERM, signal.SIGINT))
)

# Says "ready" where it is in the phase, and stays there until it is told to end.
TRAINING = """
import logging, os, sys, time
logging.basicConfig(level=logging.INFO)
from hetstream import DataLoader
from sample_datasets import Augmented, Hanging
phase = sys.argv[1]
data = Hanging(4_000_000, 8, "sleeps") if phase == "waits" else Augmented(4_000_000)
loader = DataLoader(data, batch_size=4, shuffle=False, job_name=f"{phase}-{os.getpid()}")
for number, batch in enumerate(loader):
    if phase == "waits" and number == 1 or phase != "waits" and number == 3:
        print("ready", flush=True)
    time.sleep(0.005)
"""


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Let the programs see SIGINT also where the tests run in the background, whose children a shell lets ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Program:
    """A process under test, and what it says."""

    def __init__(self, words: list[str], directory: Path, name: str, **variables: str) -> None:
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HETSTREAM_", "SLURM_"))}
        paths = f"{PROGRAMS}:{os.environ.get('PYTHONPATH', '')}"
        self.log = directory / f"{name}.log"
        with self.log.open("wb") as stream:
            self.process = subprocess.Popen(
                words,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                env=environment | {"PYTHONPATH": paths} | variables,
                cwd=directory,
            )

    def says(self, text: str) -> Callable[[], bool]:
        return lambda: text in self.log.read_text()

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()


@pytest.fixture
def start(tmp_path: Path, wait_until: Any) -> Iterator[Callable[..., Program]]:
    """A function that starts a program; all are gone after the test."""
    with ExitStack() as undo:

        def start_one(words: list[str], name: str, **variables: str) -> Program:
            program = Program(words, tmp_path, name, **variables)
            undo.callback(program.kill)
            return program

        yield start_one


def training(phase: str) -> list[str]:
    return [sys.executable, "-c", TRAINING, phase]


def end(number: signal.Signals, **programs: subprocess.Popen[bytes]) -> dict[str, int]:
    """Signal the processes at the same time; return their exit codes, if they all ended in time."""
    before = {name: children_of(one.pid) for name, one in programs.items()}
    hangs_on = {name: sockets_of(one.pid) for name, one in programs.items()}
    started = time.monotonic()
    for one in programs.values():
        one.send_signal(number)
    codes = {}
    for name, one in programs.items():
        try:
            codes[name] = one.wait(timeout=30)
        finally:
            took_s = time.monotonic() - started
        assert took_s < limit_s(), f"{name} took {took_s:.2f} s to end"
    for name, pids in before.items():
        left = [pid for pid in pids if Path(f"/proc/{pid}").exists() and state_of(pid) != "Z"]
        assert not left, f"{name} left processes {left}"
    bound = Path("/proc/net/unix").read_text()
    assert [path for paths in hangs_on.values() for path in paths if path in bound] == [], "Unix sockets are left"
    # Stores of checkpoints are other programs': nothing here makes one.
    assert not [one for one in os.listdir("/dev/shm") if "hetstream" in one and "hetstream-ckpt-" not in one]
    return codes


def limit_s() -> float:
    """The limit, on a machine that others keep busy in proportion."""
    return LIMIT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def state_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def socket_inodes(pid: int) -> set[str]:
    targets = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.add(os.readlink(descriptor))
    return {target[8:-1] for target in targets if target.startswith("socket:[")}


def sockets_of(pid: int) -> list[str]:
    """Names of the Unix sockets that a process has bound."""
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    inodes = socket_inodes(pid)
    return [line[7] for line in lines if len(line) > 7 and line[6] in inodes and "hetstream" in line[7]]


def expected_of_program(number: signal.Signals) -> int:
    """Python ends by SIGINT itself after a KeyboardInterrupt; SIGTERM has its default action."""
    return -number


@pytest.mark.shows("an iteration may be left early and begun again, and `close()` may be called twice")
@INTERRUPTED
def test_a_training_program_ends_in_every_phase(
    service: Any, start: Any, number: signal.Signals, tmp_path: Path, wait_until: Any
) -> None:
    here = {"HETSTREAM_SERVICE": service.name}
    nowhere = {"HETSTREAM_SERVICE": f"file:{tmp_path / 'nowhere'}"}
    service.start_workers(2)
    absent = start(training("absent"), "absent", **nowhere)
    middle = start(training("middle"), "middle", **here)
    frozen = start(training("frozen"), "frozen", **here)
    connects = start(training("connects"), "connects", **nowhere)
    for one in (middle, frozen):
        wait_until(one.says("ready"), 60, "mid-epoch")
    waits = start(training("waits"), "waits", **here)
    for one in (absent, connects):
        wait_until(one.says("waiting up to"), 60, "waiting for the address file")
    wait_until(waits.says("ready"), 60, "a batch that does not come")
    try:
        codes = end(number, absent=absent.process, middle=middle.process, waits=waits.process)
        service.dispatcher.send_signal(signal.SIGSTOP)
        # It finds the file of a dispatcher that does not answer.
        (tmp_path / "nowhere").write_bytes(service.address_file.read_bytes())
        (tmp_path / "nowhere").chmod(0o600)
        wait_until(lambda: has_connection(connects.process.pid, service), 20, "connecting")
        codes |= end(number, frozen=frozen.process, connects=connects.process)
    finally:
        service.dispatcher.send_signal(signal.SIGCONT)
        service.workers[0].kill()  # one of its processes hangs in user code
    assert codes == dict.fromkeys(codes, expected_of_program(number))
    if number == signal.SIGINT:
        for one in (absent, middle, waits, frozen, connects):
            said = one.log.read_text()
            assert said.rstrip().endswith("KeyboardInterrupt"), said
            assert said.count("Traceback") == 1, said


def has_connection(pid: int, service: Any) -> bool:
    port = int(json.loads(service.address_file.read_text())["address"].rpartition(":")[2])
    table = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(fields[2].endswith(f":{port:04X}") and fields[9] in socket_inodes(pid) for fields in table)


HANGING = """
import sys
from pathlib import Path
from hetstream import DataLoader
from sample_datasets import HangingWithFlag
how, flag = sys.argv[1:]
for batch in DataLoader(HangingWithFlag(100, 40, how, Path(flag)), batch_size=4, job_name=how):
    pass
"""


@TERMINATED
@pytest.mark.usefixtures("commands")
def test_a_data_worker_ends_in_every_phase(
    service: Any, start: Any, number: signal.Signals, tmp_path: Path, wait_until: Any
) -> None:
    absent = start([HETSTREAM, "internal", "worker", "--service", f"file:{tmp_path / 'nowhere'}"], "absent")
    busy = [service.start_workers(2), service.start_workers(2)]
    for how in ("sleeps", "holds"):
        flag = tmp_path / f"{how}.flag"
        start([sys.executable, "-c", HANGING, how, str(flag)], how, HETSTREAM_SERVICE=service.name)
    idle = service.start_workers(1)
    wait_until(absent.says("waiting up to"), 60, "waiting for the address file")
    wait_until(lambda: all((tmp_path / f"{how}.flag").exists() for how in ("sleeps", "holds")), 60, "the hangs")
    service.dispatcher.send_signal(signal.SIGSTOP)
    try:
        codes = end(number, absent=absent.process, idle=idle, first=busy[0], second=busy[1])
    finally:
        service.dispatcher.send_signal(signal.SIGCONT)
    # Before it is at work, the signal's own meaning; then an orderly end.
    assert codes == {"absent": 130 if number == signal.SIGINT else -number, "idle": 0, "first": 0, "second": 0}


FEEDING = """
import logging, sys
logging.basicConfig(level=logging.INFO)
from hetstream import DataLoader
from sample_datasets import Heavy
for batch in DataLoader(Heavy(4_000_000), batch_size=1, job_name=sys.argv[1]):
    print("ready", flush=True)
"""
# The rule's time is proved in `test_shutdown.py`; here, that nothing of seconds is waited for on a busy machine.
GENEROUS_S = 4.5


@pytest.mark.shows("an iteration may be left early and begun again, and `close()` may be called twice")
@pytest.mark.slow
@pytest.mark.usefixtures("commands")
@pytest.mark.parametrize(
    ("transport", "point", "number"),
    [
        ("tcp", "held back", signal.SIGTERM),
        ("tcp", "held back", signal.SIGINT),
        ("ipc", "held back", signal.SIGTERM),
        ("tcp", "handshake", signal.SIGTERM),
        ("shm,ipc,tcp", "handshake", signal.SIGINT),
    ],
)
def test_a_data_worker_ends_while_its_trainer_is_stopped(
    service: Any, start: Any, wait_until: Any, transport: str, point: str, number: signal.Signals
) -> None:
    """The trainer takes nothing off the connection, or has not even answered on it; the other one trains on."""
    worker = service.start_workers(1)
    (process,) = children_of(worker.pid)
    variables = {
        "HETSTREAM_SERVICE": service.name,
        "HETSTREAM_TRANSPORT": transport,
        "HETSTREAM_BUFFER_BYTES": str(64 << 20),
    }
    if point == "handshake":
        os.kill(process, signal.SIGSTOP)
    before = socket_inodes(process)
    trainer = start([sys.executable, "-c", FEEDING, "stopped"], "stopped", **variables)
    if point == "handshake":
        # Nobody delivers, so it makes its own; its session is open then.
        wait_until(trainer.says("ready"), 60, "a batch")
        trainer.process.send_signal(signal.SIGSTOP)
        os.kill(process, signal.SIGCONT)
        wait_until(lambda: socket_inodes(process) - before, 60, "a connection to the trainer")
    else:
        wait_until(trainer.says("ready"), 60, "a batch")
        trainer.process.send_signal(signal.SIGSTOP)
        wait_until(lambda: waits(process), 60, "batches that wait")
    started = time.monotonic()
    worker.send_signal(number)
    assert worker.wait(timeout=30) == 0
    took_s = time.monotonic() - started
    assert took_s < GENEROUS_S, f"it took {took_s:.2f} s to end"
    assert state_of(process) == "Z"
    wait_until(lambda: "left" in service.log("dispatcher"), 10, "the data worker's goodbye")


def waits(pid: int) -> bool:
    """Whether a process has begun nothing for a while."""
    before = ticks_of(pid)
    time.sleep(0.2)
    return ticks_of(pid) == before


def ticks_of(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


@TERMINATED
def test_the_dispatcher_ends_while_its_peers_are_stopped(
    service: Any, start: Any, number: signal.Signals, wait_until: Any
) -> None:
    service.start_workers(1)
    trainer = start(training("middle"), "middle", HETSTREAM_SERVICE=service.name)
    wait_until(trainer.says("ready"), 60, "mid-epoch")
    stopped = [trainer.process.pid, *children_of(service.workers[0].pid)]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert end(number, dispatcher=service.dispatcher) == {"dispatcher": 0}
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    assert (service.directory / "work" / "summary.json").exists()
