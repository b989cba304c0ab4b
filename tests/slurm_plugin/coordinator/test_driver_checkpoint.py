"""A process is taken off a GPU and put back, by a driver that the test is."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from hetstream.base.errors import HetstreamError
from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.coordinator.gpus import ProcessState, driver, resume, suspend

INVALID_VALUE, OUT_OF_MEMORY = 1, 2
# From which state each call leads where.
MOVES = {
    "Lock": (ProcessState.RUNNING, ProcessState.LOCKED),
    "Checkpoint": (ProcessState.LOCKED, ProcessState.CHECKPOINTED),
    "Restore": (ProcessState.CHECKPOINTED, ProcessState.LOCKED),
    "Unlock": (ProcessState.LOCKED, ProcessState.RUNNING),
}


class FakeDriver:
    """One process, and the calls that fail."""

    code = OUT_OF_MEMORY

    def __init__(self, *fails: str) -> None:
        self.state, self.fails = ProcessState.RUNNING, fails
        self.called: list[str] = []

    def cuCheckpointProcessGetState(self, pid: int, state: Any) -> int:
        ctypes.cast(state, ctypes.POINTER(ctypes.c_int))[0] = self.state
        return 0 if pid == 7 else INVALID_VALUE

    def __getattr__(self, name: str) -> Callable[[int, None], int]:
        what = name.removeprefix("cuCheckpointProcess")
        before, after = MOVES[what]

        def call(pid: int, options: Any) -> int:
            assert pid == 7
            if what == "Lock":  # else the driver waits for ever: unsigned timeoutMs, reserved0; cuuint64_t reserved1[7]
                words = (ctypes.c_uint * 16).from_buffer_copy(
                    bytes(ctypes.cast(options, ctypes.POINTER(ctypes.c_ubyte * 64))[0])
                )
                assert list(words) == [10_000] + [0] * 15
            else:
                assert options is None
            self.called.append(what)
            if self.state is not before:
                return INVALID_VALUE
            if what in self.fails:
                return self.code
            self.state = after
            return 0

        return call


@pytest.mark.shows("jobs that are alone on a GPU, arrive there or are suspended share it")
def test_a_process_is_taken_off_and_put_back_and_a_second_time_changes_nothing() -> None:
    fake = FakeDriver()
    for _ in range(2):
        suspend(7, fake)
        assert fake.state is ProcessState.CHECKPOINTED
    for _ in range(2):
        resume(7, fake)
        assert fake.state is ProcessState.RUNNING
    assert fake.called == ["Lock", "Checkpoint", "Restore", "Unlock"]


def test_what_the_driver_will_not_do_leaves_the_process_as_it_was() -> None:
    fake = FakeDriver("Checkpoint")
    with pytest.raises(HetstreamError, match="checkpoint of process 7: NVIDIA's driver says CUDA error 2"):
        suspend(7, fake)
    assert fake.state is ProcessState.RUNNING
    fake = FakeDriver("Restore")
    fake.state = ProcessState.CHECKPOINTED
    with pytest.raises(HetstreamError, match="restore of process 7"):
        resume(7, fake)
    assert fake.state is ProcessState.CHECKPOINTED  # to be tried again
    with pytest.raises(HetstreamError, match="the state of process 8"):
        suspend(8, fake)


def test_a_virtual_machine_that_cannot_do_it_and_a_process_that_does_not_rest_are_told_in_words() -> None:
    fake = FakeDriver("Lock")
    for code, says in ((801, "this driver or virtual machine cannot do that"), (600, "did not come to rest in time")):
        fake.code = code
        with pytest.raises(HetstreamError, match=f"lock of process 7: NVIDIA's driver says CUDA error {code} .*{says}"):
            suspend(7, fake)
        assert fake.state is ProcessState.RUNNING
    assert fake.called == ["Lock", "Lock"], "nothing else is tried"


def test_without_a_driver_there_is_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        driver()
    except HetstreamError:
        assert main(["gpu", "suspend", "7"]) == 1
        assert "no process can be taken off a GPU here" in capsys.readouterr().err
    else:
        pytest.skip("there is a driver")
