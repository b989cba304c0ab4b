"""Takes a process off its GPU and puts it back, by the driver: the last resort, when a job does not give memory back.

The driver copies the process's memory of the GPU to the host and frees it; the process waits at its next call to CUDA
until it is put back. Who calls this needs the rights over the process that a debugger has: its own user, or root; the
coordinator has them not. Driver 570 and later; nothing of this runs without a GPU.
"""

from __future__ import annotations

import ctypes
import enum
from typing import Any

from hetstream.base.errors import HetstreamError

_SUCCESS = 0
_FUNCTIONS = ("Lock", "Checkpoint", "Restore", "Unlock")


class ProcessState(enum.IntEnum):
    """Of a process, by the driver: `CUprocessState` in cuda.h."""

    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3


def driver() -> Any:
    """The driver's library, which has what it takes.

    Raises:
        HetstreamError: there is none, or it is too old.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise HetstreamError(f"no process can be taken off a GPU here: {error}") from error
    if not hasattr(library, "cuCheckpointProcessLock"):
        raise HetstreamError("no process can be taken off a GPU here: that needs NVIDIA's driver 570 or later")
    _check("cuInit", library.cuInit(0))
    return library


def suspend(pid: int, library: Any = None) -> None:
    """Take a process off its GPUs; one that is off stays off.

    Raises:
        HetstreamError: the driver cannot, or will not. Then the process runs as before.
    """
    library = library or driver()
    if _state(pid, library) is ProcessState.CHECKPOINTED:
        return
    if _state(pid, library) is ProcessState.RUNNING:
        _call(library, "Lock", pid)
    try:
        _call(library, "Checkpoint", pid)
    except HetstreamError:
        _call(library, "Unlock", pid)
        raise


def resume(pid: int, library: Any = None) -> None:
    """Put it back; one that is there stays there.

    Raises:
        HetstreamError: the driver cannot: the memory that it needs may be in use. It can be tried again.
    """
    library = library or driver()
    if _state(pid, library) is ProcessState.CHECKPOINTED:
        _call(library, "Restore", pid)
    if _state(pid, library) is ProcessState.LOCKED:
        _call(library, "Unlock", pid)


def _state(pid: int, library: Any) -> ProcessState:
    state = ctypes.c_int()
    failed = library.cuCheckpointProcessGetState(pid, ctypes.byref(state))
    _check(f"the state of process {pid}", failed)
    return ProcessState(state.value)


def _call(library: Any, what: str, pid: int) -> None:
    assert what in _FUNCTIONS
    _check(f"{what.lower()} of process {pid}", getattr(library, f"cuCheckpointProcess{what}")(pid, None))


def _check(what: str, failed: int) -> None:
    if failed != _SUCCESS:
        raise HetstreamError(f"{what}: NVIDIA's driver says CUDA error {failed}. It needs its own user, or root")
