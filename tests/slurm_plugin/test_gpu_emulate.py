"""`hetstream internal gpu-emulate`: what it makes, and what it leaves alone."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
from hetstream.slurm_plugin.cli import main
from tests.hetjob.gpu.test_emulated_memory import HOLDER

MIB = 2**20


def test_it_says_the_one_name_of_what_it_has_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "link")
    assert main(["internal", "gpu-emulate", "./gpu0", "--memory-mib", "3"]) == 0
    assert capsys.readouterr().out == f"emulated GPU: emulation:{tmp_path}/gpu0\n"
    with closing(EmulatedGpuFile(tmp_path / "gpu0")) as gpu:
        assert gpu.capacity_bytes == 3 * MIB


def left_alone(path: Path, capsys: pytest.CaptureFixture[str], advice: str) -> None:
    before = path.read_bytes() if path.exists() else None
    assert main(["internal", "gpu-emulate", str(path)]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"hetstream internal gpu-emulate: {path} is there, and is not overwritten. {advice}"
    ]
    assert (path.read_bytes() if path.exists() else None) == before


def test_a_coordinator_of_a_gpu_that_is_not_there_says_what_makes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gpu = f"emulation:{tmp_path}/gpu0"
    assert main(["internal", "coordinator", "--own-jobs", "--socket", f"{tmp_path}/gpu.sock", "--gpu", gpu]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("Make one: hetstream internal gpu-emulate FILE")


def test_a_gpu_that_is_there_stays_with_what_it_holds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu0"
    EmulatedGpuFile.create(path, capacity_bytes=7 * MIB, core=0, segment_bytes=1, bus_bytes_per_s=1)
    left_alone(path, capsys, "It is an emulated GPU of 7 MiB that nobody uses now: take it, or remove it first")
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        used = f"It is an emulated GPU of 7 MiB that processes {holder.pid} use: take it, or remove it first"
        left_alone(path, capsys, used)
        holder.kill()


@pytest.mark.shows("a GPU under two spellings, or a file in its place, is found")
@pytest.mark.parametrize("what", ["file", "link to nothing", "pipe", "directory"])
def test_what_is_no_gpu_stays_as_it_is(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu0"
    if what == "file":
        path.write_text("results of a year")
    elif what == "pipe":
        os.mkfifo(path)
    elif what == "directory":
        path.mkdir()
    else:
        path.symlink_to("elsewhere")
    assert main(["internal", "gpu-emulate", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(f"{path} is there, and is not overwritten. It is no emulated GPU: give another name")
    assert what != "file" or path.read_text() == "results of a year"
    assert not (tmp_path / "elsewhere").exists()


def test_a_full_disk_leaves_no_half_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It would be in the way when there is room again."""
    most, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        assert main(["internal", "gpu-emulate", str(tmp_path / "gpu0")]) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    assert "cannot be made: File too large" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["missing/gpu0"], "missing/gpu0 cannot be made: No such file or directory. Name a file in a directory"),
        (["gpu0", "--memory-mib", "0"], "--memory-mib, --segment-kib and --bus-mib-per-s are from 1 to"),
        (["gpu0", "--memory-mib", str(2**60)], "--memory-mib, --segment-kib and --bus-mib-per-s are from 1 to"),
        (["gpu0", "--core", "100000"], "--core 100000: this process may run on"),
    ],
)
def test_what_cannot_be_made_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["internal", "gpu-emulate", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert problem in line
    assert list(tmp_path.iterdir()) == []
