"""Real GPUs through a library that the test is: pynvml's functions, and its errors."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from hetstream.base.errors import UsageError
from hetstream.slurm_plugin.coordinator import gpus
from hetstream.slurm_plugin.coordinator.gpus import NvmlGpu, open_gpu
from tests.conftest import WaitUntil

GIB = 2**30
WHOLE, DIVIDED, INSTANCE = "GPU-1a2b", "GPU-3c4d", "MIG-5e6f"


class NVMLError(Exception):
    """As pynvml's."""


class FakeNvml:
    """Two GPUs, one of which MIG divides."""

    NVMLError = NVMLError

    def __init__(self) -> None:
        self.busy = 40
        self.is_lost = False
        self.pid = 70
        self.samples = [(70, 1, 30), (71, 2, 0)]

    def nvmlDeviceGetHandleByUUID(self, name: str) -> str:
        if name not in (WHOLE, DIVIDED, INSTANCE):
            raise NVMLError("Not Found")
        return name

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if handle == WHOLE:
            raise NVMLError("Not Supported")
        return 1, 1

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> SimpleNamespace:
        self._answer()
        return SimpleNamespace(total=(10 if handle == INSTANCE else 80) * GIB, used=7 * GIB)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=self.pid, usedGpuMemory=None if handle == INSTANCE else 5 * GIB)]

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> SimpleNamespace:
        if handle == INSTANCE:
            raise NVMLError("Not Supported")
        return SimpleNamespace(gpu=self.busy, memory=1)

    def nvmlDeviceGetProcessUtilization(self, handle: str, since_us: int) -> list[SimpleNamespace]:
        samples = [
            SimpleNamespace(pid=pid, timeStamp=at_us, smUtil=busy)
            for pid, at_us, busy in self.samples
            if at_us > since_us
        ]
        if handle == INSTANCE or not samples:
            raise NVMLError("Not Found")
        return samples

    def _answer(self) -> None:
        if self.is_lost:
            raise NVMLError("GPU is lost")


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


@contextmanager
def opened(name: str, nvml: FakeNvml, now_s: list[float]) -> Iterator[NvmlGpu]:
    gpu = NvmlGpu(name, nvml, lambda: now_s[0])
    try:
        yield gpu
    finally:
        gpu.close()
        gpu._thread.join()


def test_a_gpu_says_who_holds_what_and_how_busy_it_was_for_ten_seconds(nvml: FakeNvml) -> None:
    now_s = [0.0]
    with opened(WHOLE, nvml, now_s) as gpu:
        assert gpu.capacity_bytes == 80 * GIB
        assert (gpu.reading().held_by(70), gpu.reading().held_by(71)) == (5 * GIB, 0)
        assert (gpu.reading().used_bytes, gpu.reading().utilisation) == (7 * GIB, 0.4)
        nvml.busy = 100
        now_s[0] = 20.0
        assert gpu.read().utilisation == 1.0


def test_a_gpu_says_who_has_computed_since_the_last_reading(nvml: FakeNvml) -> None:
    with opened(WHOLE, nvml, [0.0]) as gpu:
        gpu.close()
        assert gpu.read().computing == frozenset()
        nvml.samples += [(72, 3, 1), (70, 4, 0)]
        assert gpu.read().computing == {72}
        assert gpu.read().computing == frozenset()
    with opened(INSTANCE, nvml, [0.0]) as gpu:
        assert gpu.reading().computing == frozenset()


@pytest.mark.shows("a GPU that vanishes, or is a part of one, is told")
def test_a_gpu_that_vanishes_is_lost_and_so_is_one_whose_driver_hangs(nvml: FakeNvml, wait_until: WaitUntil) -> None:
    now_s = [0.0]
    with opened(WHOLE, nvml, now_s) as gpu:
        nvml.is_lost = True
        wait_until(lambda: gpu.reading().is_lost, 10)
        assert gpu.reading().why_lost == "GPU is lost"
        nvml.is_lost = False
        wait_until(lambda: not gpu.reading().is_lost, 10)
        gpu.close()
        now_s[0] = 6.0  # nothing was read since
        assert gpu.reading().is_lost


def test_of_a_divided_gpu_the_instances_are_shared(nvml: FakeNvml) -> None:
    with pytest.raises(UsageError, match=f"--gpu {DIVIDED}: MIG divides it\\. Name its instances: nvidia-smi -L"):
        NvmlGpu(DIVIDED, nvml)
    with opened(INSTANCE, nvml, [0.0]) as gpu:
        assert gpu.capacity_bytes == 10 * GIB
        assert gpu.reading().held_by(70) is None
        assert gpu.reading().utilisation is None


@pytest.mark.shows("in a container whose numbers are not the driver's, nobody is accused by them")
def test_in_a_container_with_other_numbers_nobody_counts_and_that_is_said_once(
    nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place = tmp_path / "pid"
    monkeypatch.setattr(gpus, "_NAMESPACE", place)
    nvml.pid = 2**22 + 1  # there is no such process, and cannot be
    with opened(WHOLE, nvml, [0.0]) as gpu:
        assert gpu.read().held_by(70) == 0, "where nobody can say, numbers are the host's"
        place.symlink_to("pid:[4026531836]")
        assert gpu.read().held_by(70) == 0, "on the host it has just ended"
        place.unlink()
        place.symlink_to("pid:[4026532201]")
        for _ in range(2):
            reading = gpu.read()
            assert (reading.held_by(70), reading.used_bytes) == (None, 7 * GIB)
            assert not reading.computing
        nvml.pid = os.getpid()  # this container's driver says its own numbers
        assert gpu.read().held_by(os.getpid()) == 5 * GIB
    assert caplog.text.count("GPU counted by numbers of the host") == 1


def test_a_gpu_that_is_not_there_is_refused_with_its_name(nvml: FakeNvml) -> None:
    with pytest.raises(UsageError, match=r"--gpu GPU-9: Not Found\. Names are in: nvidia-smi -L"):
        NvmlGpu("GPU-9", nvml)


@pytest.mark.parametrize("text", ["", "=5", "GPU-1a2b=", "GPU-1a2b=-1", "a100"])
def test_what_names_no_gpu_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write a UUID of nvidia-smi -L"):
        open_gpu(text)
