"""A process of a job's step tells what Slurm sends to all of the step from what is meant for it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetstream.base.process import FATAL, STOP_OF_PARENT

HOLDING = """
import os, sys, time
from hetstream.base.process import stop_requests
ask = stop_requests()
print("ready", flush=True)
while not ask():
    time.sleep(0.02)
print("asked", flush=True)
"""
PASSING_OVER = """
import subprocess, sys, signal
from hetstream.base.process import pass_over_warnings
pass_over_warnings()
print("ready", flush=True)
sys.stdin.readline()
print(subprocess.run([sys.executable, "-c", "import signal; print(signal.getsignal(10) is signal.SIG_DFL)"],
                     capture_output=True, text=True).stdout.strip(), flush=True)
"""
BECOMING = """
import os, signal, sys
from hetstream.base.process import hold_warnings, pass_over_warnings
if len(sys.argv) == 1:
    hold_warnings()
    print("ready", flush=True)
    os.execv(sys.executable, [sys.executable, "-c", sys.orig_argv[2], "again"])
sys.stdin.readline()
pass_over_warnings()
print("alive", flush=True)
"""
SLEEPING = """
import signal, threading, time
from hetstream.base.process import sleep_in_parts
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
print("ready", flush=True)
sleep_in_parts(600)
"""
KEEPING = """
import sys
from pathlib import Path
from hetstream.hetjob.master.server import keep
child = "import signal, time; signal.signal(15, lambda *_: exit(0)); print('ready', flush=True); time.sleep(600)"
sys.exit(keep([sys.executable, "-c", child], lambda: Path(sys.argv[1]).exists()))
"""


@pytest.fixture
def slurmstepd(tmp_path: Path) -> Iterator[Callable[[int, int], None]]:
    """A function that sends a signal from a process that is called slurmstepd, and lives to the end of the test."""
    program = tmp_path / "slurmstepd"
    shutil.copy(shutil.which("bash") or "/bin/bash", program)
    senders: list[subprocess.Popen[str]] = []

    def send(number: int, pid: int) -> None:
        argv = [str(program), "-c", f"kill -{number:d} {pid}; echo sent; read"]
        sender = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        senders.append(sender)
        assert sender.stdout is not None
        assert sender.stdout.readline() == "sent\n"

    yield send
    for sender in senders:
        sender.communicate()


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """A function that starts Python with a program, and waits until it is ready."""
    started: list[subprocess.Popen[str]] = []

    def run(program: str, *arguments: str) -> subprocess.Popen[str]:
        argv = [sys.executable, "-c", program, *arguments]
        process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


def is_pending(number: int, pid: int) -> bool:
    """Whether a signal is on its way to a process, which has not taken it yet."""
    found = re.search(r"^ShdPnd:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(found and int(found[1], 16) >> (number - 1) & 1)


def test_only_the_parent_ends_a_process_below_the_steps_task(
    start: Callable[..., subprocess.Popen[str]],
    slurmstepd: Callable[[int, int], None],
    wait_until: Callable[..., None],
) -> None:
    process = start(HOLDING)
    for number in FATAL - {signal.SIGINT, signal.SIGTERM, STOP_OF_PARENT}:
        process.send_signal(number)
    for number in (signal.SIGTERM, signal.SIGINT):
        slurmstepd(number, process.pid)
        wait_until(lambda: not is_pending(number, process.pid))  # noqa: B023, or the parent's would be one with it
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.2)
    process.terminate()
    assert process.wait(20) == 0
    assert process.stdout is not None
    assert process.stdout.read() == "asked\n"


def test_a_data_worker_passes_warnings_over_and_what_it_starts_does_not(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start(PASSING_OVER)
    for number in FATAL - {signal.SIGINT, signal.SIGTERM}:
        process.send_signal(number)
    out, _ = process.communicate("go\n", timeout=30)
    assert (out, process.returncode) == ("True\n", 0)


def test_a_data_worker_that_begins_anew_passes_over_what_comes_meanwhile(
    start: Callable[..., subprocess.Popen[str]],
) -> None:
    process = start(BECOMING)
    for number in FATAL - {signal.SIGINT, signal.SIGTERM}:
        process.send_signal(number)
    out, _ = process.communicate("go\n", timeout=30)
    assert (out, process.returncode) == ("alive\n", 0)


def test_the_keeper_goes_on_while_the_job_runs_and_hands_on_what_ends_it(
    start: Callable[..., subprocess.Popen[str]], slurmstepd: Callable[[int, int], None], tmp_path: Path
) -> None:
    runs = tmp_path / "runs"
    runs.touch()
    process = start(KEEPING, str(runs))
    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP):
        slurmstepd(number, process.pid)
    assert process.poll() is None
    runs.unlink()
    slurmstepd(signal.SIGTERM, process.pid)
    assert process.wait(20) == 0


def test_the_keeper_ends_by_whoever_is_not_slurm(start: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    (tmp_path / "runs").touch()
    process = start(KEEPING, str(tmp_path / "runs"))
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(20) == 0


def test_a_signal_that_does_not_wake_a_sleep_is_heard_soon() -> None:
    """It comes to another thread, as one that comes just before the system call comes to none that sleeps."""
    with subprocess.Popen([sys.executable, "-c", SLEEPING], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.stderr.read()
        assert process.wait(60) == -signal.SIGINT
