"""The file of an emulated GPU: what becomes of a dead process's memory."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from hetstream.hetjob.gpu.devices.emulated_file import EmulatedGpuFile

HOLDER = """
import sys
from hetstream.hetjob.gpu.devices.emulated_file import EmulatedGpuFile
print(EmulatedGpuFile(sys.argv[1]).take(70), flush=True)
sys.stdin.read()
"""


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
