"""Three ways to read samples of one HDF5 file, in turns within one process. The request names layouts and sizes."""

from __future__ import annotations

import json
import math
import operator
import os
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset

Read = Callable[[list[int]], Sequence[Any]]
BATCH_SIZE = 256


class Plain:
    """A dataset as programs have it: one read of h5py for each sample."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitem__(self, index: int) -> Any:
        return self.dataset[index]


def each_chunk_once(dataset: h5py.Dataset, path: Path) -> Read:
    """What reading takes at least: read the bytes of each needed chunk once, inflate them once; without HDF5."""
    shape, chunks, dtype = dataset.shape, dataset.chunks, dataset.dtype
    if chunks is None:
        memory = np.memmap(path, dtype, "r", dataset.id.get_offset(), shape)
        return lambda indices: memory[indices]
    num_bytes = math.prod(chunks) * dtype.itemsize
    chunk_at: dict[int, list[tuple[tuple[int, ...], int, int]]] = {}
    dataset.id.chunk_iter(
        lambda info: chunk_at.setdefault(info.chunk_offset[0], []).append(
            (info.chunk_offset[1:], info.byte_offset, info.size)
        )
    )
    file, is_compressed, is_whole = dataset.file.id.get_vfd_handle(), bool(dataset.compression), chunks[1:] == shape[1:]

    def read(indices: list[int]) -> Sequence[Any]:
        in_block: dict[int, list[int]] = {}
        for index in indices:
            in_block.setdefault(index - index % chunks[0], []).append(index)
        rows: dict[int, Any] = {} if is_whole else {index: np.empty(shape[1:], dtype) for index in indices}
        for block in sorted(in_block):
            for start, at, size in chunk_at[block]:
                raw = os.pread(file, size, at)
                data = zlib.decompress(raw, bufsize=num_bytes) if is_compressed else raw
                chunk = np.frombuffer(data, dtype).reshape(chunks)
                for index in in_block[block]:
                    if is_whole:
                        rows[index] = chunk[index - block]
                    else:
                        target = rows[index][tuple(map(slice, start, map(operator.add, start, chunks[1:])))]
                        target[...] = chunk[index - block][tuple(map(slice, target.shape))]
        return [rows[index] for index in indices]

    return read


def row_by_row(dataset: Any, _path: Path) -> Read:
    """As programs do it."""
    plain = Plain(dataset.asstr() if h5py.check_string_dtype(dataset.dtype) else dataset)
    return lambda indices: [plain[index] for index in indices]


def cpu_s(system: str, path: Path, name: str, batches: list[list[int]]) -> float:
    """What one way takes, with the file open for it alone: a process has one cache of chunks for all that open it."""
    if system == "hetstream":
        with closing(Hdf5Dataset(path, name)) as own:
            return _timed(own.__getitems__, batches)
    with h5py.File(path) as file:
        return _timed({"plain h5py": row_by_row, "each chunk once": each_chunk_once}[system](file[name], path), batches)


def _timed(read: Read, batches: list[list[int]]) -> float:
    read(batches[-1][:1])
    began_s = time.process_time()
    for batch in batches:
        read(batch)
    return time.process_time() - began_s


def write(path: Path, layouts: dict[str, dict[str, Any]], rows: int) -> None:
    """A dataset of random numbers, or of text, in each layout."""
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        for name, layout in layouts.items():
            if layout["shape"] is None:
                data: Any = [f"word {number}" for number in range(rows)]
            else:
                data = random.integers(0, 40, (rows, *layout["shape"]), layout["dtype"])
            chunks = tuple(layout["chunks"]) if isinstance(layout["chunks"], list) else layout["chunks"]
            file.create_dataset(name, data=data, chunks=chunks, compression=layout["compression"])


def main() -> None:
    """Measure every case of the request."""
    request = json.loads(sys.argv[-1])
    cases: dict[str, dict[str, Any]] = request["cases"]
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        path = Path(folder, "data.h5")
        write(path, {case.replace("/", "-"): layout for case, layout in cases.items()}, request["rows"])
        for case, layout in cases.items():
            order = np.arange(request["rows"])
            if layout["shuffled"]:
                np.random.default_rng(1).shuffle(order)
            batches = [order[at : at + BATCH_SIZE].tolist() for at in range(0, layout["samples"], BATCH_SIZE)]
            least: dict[str, float] = {}
            systems = ["plain h5py", "hetstream", *(["each chunk once"] if layout["shape"] is not None else [])]
            for turn in range(request["turns"]):
                # Whoever comes later finds more of the file in the processor's caches: each comes first in its turn.
                for system in systems[turn % len(systems) :] + systems[: turn % len(systems)]:
                    took_s = cpu_s(system, path, case.replace("/", "-"), batches)
                    least[system] = min(least.get(system, math.inf), took_s)
            for system, took_s in least.items():
                sample = {"cpu_us": took_s / (len(batches) * BATCH_SIZE) * 1e6}
                print(json.dumps({"case": f"{case}|{system}", **sample}), flush=True)


if __name__ == "__main__":
    main()
