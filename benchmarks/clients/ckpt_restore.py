"""How long a state takes to come back into a program's own tensors: one client for all ways, in turns.

What is read from disk was taken out of the page cache before. A restore counts when every byte is in the program's
tensors, and is compared with what was saved.
"""

from __future__ import annotations

import io
import json
import logging
import mmap
import os
import shutil
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from benchmarks.clients.ckpt_systems import (
    Copy,
    State,
    bytes_of,
    drop_cached,
    make_state,
    wait_for_memory,
    write_raw,
)
from benchmarks.clients.window import Meter
from hetstream import FlashCheckpointer

_CHUNK_BYTES = 64 << 20


def read_raw(path: Path, buffer: memoryview) -> None:
    """Read a file from beginning to end, past the page cache."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    try:
        for at in range(0, len(buffer), _CHUNK_BYTES):
            os.preadv(descriptor, [buffer[at : at + _CHUNK_BYTES]], at)
    finally:
        os.close(descriptor)


class Ways:
    """The ways to restore; each method gives the seconds it took.

    Args:
        folder: for the checkpoints.
        state: what is saved, once in each way, and restored.
    """

    def __init__(self, folder: Path, state: State) -> None:
        self.folder, self.state = folder, state
        self.wanted = {name: tensor[:: 1 << 10].clone() for name, tensor in state.items()}
        self.copy = Copy(state)
        self.log = io.StringIO()
        logging.basicConfig(stream=self.log, level=logging.INFO, force=True)
        folder.mkdir()
        torch.save(state, folder / "state.pt")
        save_file(state, folder / "state.safetensors")
        dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
        os.sync()
        size = bytes_of(state) // mmap.PAGESIZE * mmap.PAGESIZE
        self.buffer = memoryview(mmap.mmap(-1, size))
        write_raw(folder / "raw", self.buffer, direct=True)
        self._save(keep_memory=False)

    def _save(self, *, keep_memory: bool) -> None:
        with FlashCheckpointer(self.folder / "hetstream") as checkpointer:
            checkpointer.save(1, self.state)
            checkpointer.wait()
            checkpointer.close(keep_memory=keep_memory)

    def _timed(self, load: Callable[[], object]) -> float:
        for tensor in self.state.values():
            tensor.zero_()
        drop_cached(*(file for file in self.folder.rglob("*") if file.is_file()))
        began_s = time.perf_counter()
        load()
        took_s = time.perf_counter() - began_s
        for name, tensor in self.state.items():
            if not torch.equal(tensor[:: 1 << 10], self.wanted[name]):
                raise ValueError(f"{name} is not what was saved")
        return took_s

    def _take(self, loaded: State) -> None:
        for name, tensor in self.state.items():
            tensor.copy_(loaded[name])

    def memcpy(self) -> float:
        """The limit of memory."""
        began_s = time.perf_counter()
        self.copy.run()
        return time.perf_counter() - began_s

    def hetstream(self, *, from_memory: bool) -> tuple[float, float]:
        """Open, and restore: the seconds of both, and of the restore alone."""
        if from_memory:
            self._save(keep_memory=True)
        alone_s = 0.0
        self.log.seek(0)
        self.log.truncate()

        def load() -> None:
            nonlocal alone_s
            checkpointer = FlashCheckpointer(self.folder / "hetstream")
            wait_for_memory()  # a program builds its model meanwhile
            began_s = time.perf_counter()
            if checkpointer.restore(self.state) != 1 or ("from memory" in self.log.getvalue()) != from_memory:
                raise ValueError(f"not what should be restored: {self.log.getvalue()}")
            alone_s = time.perf_counter() - began_s
            opened.append(checkpointer)

        opened: list[FlashCheckpointer] = []
        try:
            both_s = self._timed(load)
        finally:
            for checkpointer in opened:
                checkpointer.close()
        return both_s, alone_s

    def raw(self) -> float:
        """The limit of the disk."""
        began_s = time.perf_counter()
        read_raw(self.folder / "raw", self.buffer)
        return time.perf_counter() - began_s

    def torch_load(self, *, mapped: bool) -> float:
        """torch.load, then a copy."""
        return self._timed(lambda: self._take(torch.load(self.folder / "state.pt", mmap=mapped)))

    def safetensors(self) -> float:
        """safetensors, then a copy."""
        return self._timed(lambda: self._take(load_file(self.folder / "state.safetensors")))

    def dcp(self) -> float:
        """dcp.load, in place."""
        return self._timed(lambda: dcp.load(self.state, checkpoint_id=str(self.folder / "dcp"), no_dist=True))


def main() -> None:
    """Measure every case of the request."""
    request = json.loads(sys.argv[-1])
    for case, options in request["cases"].items():
        folder = Path(request["folder"]) / f"restore-{os.getpid()}"
        seconds: dict[str, list[float]] = {}
        try:
            ways = Ways(folder, make_state(options["tensors"], options["bytes"]))
            meter = Meter(os.sched_getaffinity(0))
            for _ in range(request["loads"]):
                turn: dict[str, float] = {"memory|memcpy": ways.memcpy()}
                both_s, alone_s = ways.hetstream(from_memory=True)
                turn |= {"memory|hetstream": alone_s, "memory|hetstream with its start": both_s}
                turn |= {"disk|raw read": ways.raw()}
                turn |= {"disk|hetstream": ways.hetstream(from_memory=False)[1]}
                turn |= {"disk|torch.load": ways.torch_load(mapped=False)}
                turn |= {"disk|torch.load, mmap": ways.torch_load(mapped=True)}
                turn |= {"disk|safetensors": ways.safetensors(), "disk|DCP": ways.dcp()}
                for name, value in turn.items():
                    seconds.setdefault(name, []).append(value)
            other_load = meter.read().other_load
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        for name, each in seconds.items():
            where, _, system = name.partition("|")
            sample = {"seconds": statistics.median(each), "other_load": other_load}
            print(json.dumps({"case": f"{case} from {where}|{system}", **sample}), flush=True)


if __name__ == "__main__":
    main()
