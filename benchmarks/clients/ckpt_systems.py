"""What saves and restores a state: hetstream, torch.save, torch DCP in three modes; all bring it durably to disk.

Used by the checkpoint clients. Each system gets the same plain dict of CPU tensors and a folder of its own on the disk,
and keeps the newest checkpoint only.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import select
import shutil
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from benchmarks.clients.window import descendants

# A copy into buffers of this size in turn: larger than a cache, smaller than a state, so that states of any size fit.
_COPY_BYTES = 512 << 20
# One raw write.
_CHUNK_BYTES = 64 << 20

State = dict[str, torch.Tensor]


def make_state(num_tensors: int, num_bytes: int) -> State:
    """Make float32 tensors of equal size, so many bytes in all."""
    each = num_bytes // num_tensors // 4
    # Random in every page, and made quickly: what a disk or a file system would compress or join is not measured.
    block = torch.from_numpy(np.random.default_rng(0).standard_normal(min(each, 1 << 20), dtype=np.float32))
    tensors = {}
    for number in range(num_tensors):
        tensor = tensors[f"weight.{number}"] = torch.empty(each)
        for at in range(0, each, len(block)):
            part = tensor[at : at + len(block)]
            torch.add(block[: len(part)], number, out=part)
    return tensors


def bytes_of(state: State) -> int:
    """Size of a state."""
    return sum(tensor.nbytes for tensor in state.values())


class Copy:
    """The limit: a copy of every tensor, one after the other, by one thread into private memory that is there.

    Args:
        state: what is copied.
    """

    def __init__(self, state: State) -> None:
        into = np.ones(_COPY_BYTES, dtype=np.uint8)
        self._pieces: list[tuple[int, int, int]] = []
        at = 0
        for tensor in state.values():
            for begin in range(0, tensor.nbytes, _COPY_BYTES):
                num_bytes = min(_COPY_BYTES, tensor.nbytes - begin)
                if at + num_bytes > _COPY_BYTES:
                    at = 0
                self._pieces.append((into.ctypes.data + at, tensor.data_ptr() + begin, num_bytes))
                at += num_bytes
        self._alive = (into, state)

    def run(self) -> None:
        """Copy once."""
        for piece in self._pieces:
            ctypes.memmove(*piece)


class System(Protocol):
    """One way to save."""

    def save(self, step: int, state: State) -> None:
        """Return when the program may change the state."""

    def is_done(self) -> bool:
        """Whether the newest checkpoint is on disk."""

    def wait(self) -> None:
        """Wait until it is."""

    def close(self) -> None:
        """End, with all processes."""

    def helpers(self) -> list[int]:
        """The processes beside this one."""


def wait_for_memory() -> None:
    """Wait for what the checkpointer does in the background while the program goes on."""
    for thread in threading.enumerate():
        if thread.name == "checkpoint memory":
            thread.join()


class Hetstream:
    """FlashCheckpointer with its checkpoint writer."""

    def __init__(self, folder: Path, state: State) -> None:
        from hetstream import FlashCheckpointer, Retention

        self.checkpointer = FlashCheckpointer(folder, interval=1, keep=Retention(keep_last=1))
        self.checkpointer.prepare(state)
        wait_for_memory()  # a program trains meanwhile

    def save(self, step: int, state: State) -> None:
        """Copy into shared memory."""
        if not self.checkpointer.save(step, state):
            raise RuntimeError("hetstream: the save did not take place: there is too little shared memory")

    def is_done(self) -> bool:
        """Look into the checkpoint writer's report."""
        stats = self.checkpointer.stats()
        return stats.persisted == stats.saved

    def wait(self) -> None:
        """Wait for the commit."""
        if not self.checkpointer.wait(300):
            raise RuntimeError(f"hetstream: not on disk after 300 s: {self.checkpointer.stats()}")

    def close(self) -> None:
        """Take memory, checkpoint writer and files away."""
        self.checkpointer.close()

    def helpers(self) -> list[int]:
        """The checkpoint writer."""
        return descendants()


class TorchSave:
    """torch.save into a new file, fsync, rename."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def save(self, step: int, state: State) -> None:
        """All of it."""
        with open(self.folder / "new", "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        (self.folder / "new").rename(self.folder / f"{step}.pt")

    def is_done(self) -> bool:
        """It is."""
        return True

    def wait(self) -> None:
        """Remove what was before; this is not measured."""
        for old in sorted(self.folder.glob("*.pt"), key=lambda path: int(path.stem))[:-1]:
            old.unlink()

    def close(self) -> None:
        """Nothing is left to do."""

    def helpers(self) -> list[int]:
        """There are none."""
        return []


class RawWriter:
    """What any writer costs: a process of the least weight writes as many bytes past the page cache, and syncs them."""

    def __init__(self, folder: Path, state: State) -> None:
        folder.mkdir()
        self._memory = mmap.mmap(-1, bytes_of(state) // mmap.PAGESIZE * mmap.PAGESIZE)
        here, there = socket.socketpair()
        self._channel = here
        self._is_done = True
        self.process = os.fork()
        if self.process == 0:
            code = 1
            try:
                here.close()
                self._write_on(there, folder / "raw")
                code = 0
            finally:
                os._exit(code)  # whatever went wrong: the child never goes on in the program of its parent
        there.close()

    def _write_on(self, channel: socket.socket, path: Path) -> None:
        os.setsid()  # what follows is for a session: without its own, the measured program would get it too
        os.nice(19)
        with contextlib.suppress(OSError):
            Path("/proc/self/autogroup").write_text("19")
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # as the checkpoint writer does
        while channel.recv(1):
            write_raw(path, memoryview(self._memory), direct=True)
            path.unlink()
            channel.send(b"!")

    def save(self, step: int, state: State) -> None:  # noqa: ARG002
        """Copy and begin."""
        at = 0
        for tensor in state.values():
            num_bytes = min(tensor.nbytes, len(self._memory) - at)
            self._memory[at : at + num_bytes] = memoryview(tensor.view(torch.uint8).numpy())[:num_bytes]
            at += num_bytes
        self._channel.send(b"!")
        self._is_done = False

    def is_done(self) -> bool:
        """Look for the answer."""
        if not self._is_done and select.select([self._channel], [], [], 0)[0]:
            self.wait()
        return self._is_done

    def wait(self) -> None:
        """Wait for it."""
        if not self._is_done:
            if not self._channel.recv(1):
                raise RuntimeError("raw: the writer has ended")
            self._is_done = True

    def close(self) -> None:
        """End the process."""
        self._channel.close()
        os.waitpid(self.process, 0)

    def helpers(self) -> list[int]:
        """The process."""
        return [self.process]


class Dcp:
    """torch.distributed.checkpoint, as its documentation has it; with fsync, which is its default.

    Args:
        folder: of the checkpoints.
        mode: `sync`, `thread` or `process`.
        cached: keep the stager, and with it the memory of the copy, from save to save.
    """

    def __init__(self, folder: Path, mode: str, *, cached: bool = True) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        self.folder, self.mode = folder, mode
        folder.mkdir()
        self.future: Any = None
        self.stager: Any = None
        if mode == "process":
            os.environ["MASTER_ADDR"] = "127.0.0.1"
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
            # Each tensor in shared memory is a descriptor on its way to the other process.
            hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        if mode != "sync" and cached:
            # Neither pinned memory nor a stager's own thread exists without a GPU.
            self.stager = DefaultStager(StagingOptions(False, mode == "process", False, False))

    def save(self, step: int, state: State) -> None:
        """Stage, or all of it."""
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        where = str(self.folder / f"step-{step}")
        if self.mode == "sync":
            dcp.save(state, checkpoint_id=where, no_dist=True)
            return
        is_process = self.mode == "process"
        kind = AsyncCheckpointerType.PROCESS if is_process else AsyncCheckpointerType.THREAD
        self.future = dcp.async_save(
            state,
            checkpoint_id=where,
            async_checkpointer_type=kind,
            async_stager=self.stager,
            no_dist=not is_process,
        )

    def is_done(self) -> bool:
        """Ask the future."""
        return self.future is None or self.future.done()

    def wait(self) -> None:
        """Wait for it; then remove what was before, which is not measured."""
        if self.future is not None:
            self.future.result(300)
        for old in sorted(self.folder.glob("step-*"), key=lambda path: int(path.name[5:]))[:-1]:
            shutil.rmtree(old)

    def close(self) -> None:
        """The daemon stays, for the next case; `end` ends it."""
        if self.stager is not None:
            self.stager.close()

    def helpers(self) -> list[int]:
        """The daemon, and what multiprocessing starts beside it."""
        return descendants()


def make_system(name: str, folder: Path, state: State) -> System:
    """Make a system by its word on the command line."""
    if name == "hetstream":
        return Hetstream(folder, state)
    if name == "raw":
        return RawWriter(folder, state)
    if name == "torch-save":
        return TorchSave(folder)
    mode, _, cached = name.removeprefix("dcp-").partition("-")
    return Dcp(folder, mode, cached=cached == "cached")


@contextlib.contextmanager
def running(name: str, folder: str, state: State) -> Iterator[System]:
    """A system with a folder that is removed at the end."""
    own = Path(folder) / f"{name}-{os.getpid()}"
    system = make_system(name, own, state)
    try:
        yield system
    finally:
        system.close()
        shutil.rmtree(own, ignore_errors=True)


def end() -> None:
    """End this client with the daemon of DCP, whose threads would hold the interpreter up."""
    sys.stdout.flush()
    for process in descendants():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    os._exit(0)


def write_raw(path: Path, buffer: memoryview, *, direct: bool) -> None:
    """Write a new file from beginning to end, and fsync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, flags, 0o600)
    try:
        for at in range(0, len(buffer), _CHUNK_BYTES):
            part = buffer[at : at + _CHUNK_BYTES]
            if os.pwrite(descriptor, part, at) != len(part):
                raise OSError(f"{path}: the disk took a part only")
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def drop_cached(*files: Path) -> None:
    """Take files out of the page cache; they must be on disk."""
    for file in files:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
