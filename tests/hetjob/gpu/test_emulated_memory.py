"""Memory of emulated GPUs: the rules of PyTorch's allocator, and what becomes of a dead process's."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hetstream.hetjob.gpu.devices.allocator import Allocator, Place
from hetstream.hetjob.gpu.devices.base import MemoryUse
from hetstream.hetjob.gpu.devices.emulated_file import EmulatedGpuFile

HOLDER = """
import sys
from hetstream.hetjob.gpu.devices.emulated_file import EmulatedGpuFile
print(EmulatedGpuFile(sys.argv[1]).take(70), flush=True)
sys.stdin.read()
"""


class Gpu:
    """All of its memory in one number."""

    def __init__(self, free_bytes: int) -> None:
        self.free_bytes = free_bytes

    def take(self, num_bytes: int) -> bool:
        if num_bytes > self.free_bytes:
            return False
        self.free_bytes -= num_bytes
        return True

    def give(self, num_bytes: int) -> None:
        self.free_bytes += num_bytes


@pytest.fixture
def gpu() -> Gpu:
    return Gpu(100)


def test_what_is_freed_stays_cached_and_is_used_again_past_any_limit(gpu: Gpu) -> None:
    allocator = Allocator(gpu.take, gpu.give, 10, 0)
    assert allocator.allocate(45) is Place.DEVICE
    allocator.free(45, Place.DEVICE)
    assert gpu.free_bytes == 50
    assert allocator.allocate(50) is Place.DEVICE
    allocator.set_limit(20)  # it is in use: nothing can be given back
    assert gpu.free_bytes == 50


def test_a_lower_limit_gives_back_what_is_cached_at_once(gpu: Gpu) -> None:
    allocator = Allocator(gpu.take, gpu.give, 10, 100)
    allocator.allocate(15)
    place = allocator.allocate(60)
    allocator.free(60, place)
    allocator.set_limit(30)
    assert gpu.free_bytes == 70
    assert allocator.allocate(20) is Place.HOST
    assert allocator.memory() == MemoryUse(30, 75, 20, 100)
    allocator.begin_mini_batch()
    assert allocator.memory().peak_bytes == 35


def test_a_higher_limit_has_new_tensors_on_the_gpu_again(gpu: Gpu) -> None:
    allocator = Allocator(gpu.take, gpu.give, 10, 100)
    allocator.set_limit(0)
    assert allocator.allocate(10) is Place.HOST
    allocator.set_limit(50)
    assert allocator.allocate(10) is Place.DEVICE


def test_without_memory_of_the_host_a_program_fails_as_ever(gpu: Gpu) -> None:
    allocator = Allocator(gpu.take, gpu.give, 10, 5)
    with pytest.raises(MemoryError, match=r"out of memory: 101 bytes asked for"):
        allocator.allocate(101)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    EmulatedGpuFile.create(tmp_path / "gpu0", capacity_bytes=100, core=0, segment_bytes=1, bus_bytes_per_s=1)
    return tmp_path / "gpu0"


@pytest.fixture
def holder(path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds 70 of 100 bytes."""
    argv = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


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
