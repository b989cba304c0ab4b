"""The file of an emulated GPU: what becomes of a dead process's memory."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
from tests.base.users import STRANGER, needs_root

HOLDER = """
import sys
from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
print(EmulatedGpuFile(sys.argv[1]).take(70), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def path() -> Iterator[Path]:
    """A GPU's file that every user can reach."""
    with tempfile.TemporaryDirectory(prefix="emulated-") as directory:
        path = Path(directory, "gpu0")
        path.parent.chmod(0o755)
        EmulatedGpuFile.create(path, capacity_bytes=100, core=0, segment_bytes=1, bus_bytes_per_s=1)
        path.chmod(0o666)
        yield path


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds 70 of 100 bytes."""
    argv = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


@pytest.mark.shows("a shared GPU has three devices: CUDA, a virtual clock, and a live emulation")
def test_processes_share_one_memory_and_the_dead_hold_none(path: Path, holder: subprocess.Popen[str]) -> None:
    with closing(EmulatedGpuFile(path)) as gpu:
        assert not gpu.take(40)
        assert gpu.take(30)
        assert gpu.held_by(holder.pid) == 70
        holder.send_signal(signal.SIGKILL)
        holder.wait()
        assert gpu.take(70)
        assert gpu.held_by(holder.pid) == 0


def test_another_file_is_no_gpu(tmp_path: Path) -> None:
    (tmp_path / "gpu0").write_text("hello")
    with pytest.raises(ValueError, match="is no emulated GPU"):
        EmulatedGpuFile(tmp_path / "gpu0")


def accuse(path: Path, victim: int, written: int) -> None:
    """Write that another process holds much, and keep the lock."""
    descriptor = os.open(path, os.O_RDWR)
    place = struct.Struct("<qq")
    start = struct.calcsize("<8sqqqq") + 5 * place.size
    fcntl.lockf(descriptor, fcntl.LOCK_EX, 1, 0)
    fcntl.lockf(descriptor, fcntl.LOCK_EX, place.size, start)
    os.pwrite(descriptor, place.pack(victim, 1 << 60), start)
    os.write(written, b"!")
    signal.pause()


@pytest.fixture
def accuser(path: Path, holder: subprocess.Popen[str]) -> Iterator[int]:
    """Another user's process, which accuses `holder`."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(STRANGER)
            os.setuid(STRANGER)
            accuse(path, holder.pid, writing)
        finally:
            os._exit(1)
    os.close(writing)
    try:
        assert os.read(reading, 1) == b"!"
        yield child
    finally:
        os.close(reading)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


@needs_root
def test_nobody_says_what_another_process_holds_or_holds_up_who_looks(
    path: Path, holder: subprocess.Popen[str], accuser: int
) -> None:
    with closing(EmulatedGpuFile(path)) as gpu:
        assert gpu.held() == {holder.pid: 70, accuser: 100}, "as the kernel knows, and no more than there is"


@needs_root
def test_a_lock_that_is_not_given_back_is_an_error(path: Path, accuser: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetstream.hetjob.gpu.emulated_file._WAIT_S", 0.05)
    with closing(EmulatedGpuFile(path)) as gpu, pytest.raises(OSError, match=f"process {accuser} does not give"):
        gpu.take(1)


def test_sizes_that_no_gpu_has_and_a_file_that_ends_early(path: Path) -> None:
    with closing(EmulatedGpuFile(path)) as gpu:
        head = path.read_bytes()[:40]
        path.write_bytes(head)
        assert gpu.held_by(1) == 0
    path.write_bytes(head[:32] + bytes(8))  # the bus
    with pytest.raises(ValueError, match="not above 0"):
        EmulatedGpuFile(path)
