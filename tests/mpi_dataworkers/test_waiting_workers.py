"""A loader that goes local has torch's workers as they were when its pass began, whatever the program did since."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.hook import environment
from hetstream.mpi_dataworkers.loader.local_workers import forks

PROGRAM = Path(__file__).parent / "programs" / "begun.py"


@pytest.mark.parametrize(("part", "local"), [("fresh", 1), ("kept", 1), ("grown", 1), ("left", 0)])
def test_what_a_program_changes_since_its_pass_began_is_not_seen_by_its_workers(
    part: str, local: int, three: Any, tmp_path: Path, run_program: Any
) -> None:
    source = PROGRAM.read_text()
    plain = run_program(source, tmp_path, part)
    found = run_program(source, tmp_path, part, **environment(three.name, {}))
    assert found.stdout.splitlines() == plain.stdout.splitlines(), found.stderr
    assert found.returncode == plain.returncode, found.stderr
    assert found.stderr.count("stays local") == local, found.stderr


WAITING = """
import os, signal, sys, time
import multiprocessing
from hetstream.mpi_dataworkers.loader.local_workers import Start

score = open("/proc/self/oom_score_adj").read()

def work():
    print(type(multiprocessing.current_process()).__module__, open("/proc/self/oom_score_adj").read() == score)

start = Start()
workers = [start.context().Process(target=work, daemon=True) for _ in range(2)]
for worker in workers:
    worker.start()
sys.stdout.flush()
holds = os.fork()  # a process that was forked since, and holds the pipe
if not holds:
    os.closerange(0, 3)
    time.sleep(10)
    os._exit(0)
print(*(worker.pid for worker in workers), flush=True)
if sys.argv[1] == "given":
    start.give()
elif sys.argv[1] == "closed":
    start.close()
else:
    os.kill(os.getpid(), signal.SIGKILL)
began = time.monotonic()
for worker in workers:
    worker.join()
os.kill(holds, signal.SIGKILL)
print(time.monotonic() - began < 4)
print([worker.exitcode for worker in workers] == [0, 0])
"""


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("given", ["multiprocessing.context True", "multiprocessing.context True", "True", "True"]),
        ("closed", ["True", "True"]),
        ("killed", []),
    ],
)
def test_processes_that_wait_begin_or_end(what: str, says: list[str], wait_until: Any) -> None:
    done = subprocess.run([sys.executable, "-c", WAITING, what], capture_output=True, text=True, timeout=60)
    pids, *lines = done.stdout.splitlines()
    assert (lines, done.stderr) == (says, "")
    assert done.returncode == (-signal.SIGKILL if what == "killed" else 0)
    for pid in map(int, pids.split()):
        wait_until(lambda pid=pid: not _runs(pid), 20, "it ends with its parent")


def _runs(pid: int) -> bool:
    command = Path(f"/proc/{pid}/cmdline")
    return command.exists() and "hetstream" in command.read_text()


def test_processes_that_are_not_forked_do_not_wait() -> None:
    import multiprocessing

    assert forks(multiprocessing.get_context("fork"))
    assert not forks(multiprocessing.get_context("spawn"))
