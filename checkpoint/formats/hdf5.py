"""Checkpoints for analysis tools: what was saved when, with which metrics, and where the data stood, as one HDF5 file.

Called by `hetstream ckpt convert`. It holds no weights: HDF5 is no format that survives a crash. The tables of the file
are in docs/checkpoint.md.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import msgspec
import numpy as np

from hetstream.base.installed import install_command
from hetstream.checkpoint.record.layout import Generation, TensorSpec
from hetstream.checkpoint.record.structure import Record
from hetstream.checkpoint.record.tree import TENSOR, Node

try:
    import h5py
except ImportError as exc:
    raise ImportError(f"HDF5 export needs h5py: {install_command('hdf5')}") from exc

FORMAT, VERSION = "hetstream checkpoints", 1
_KIND = "kind"
# Dtypes that HDF5 and its readers know; others are written as bytes.
_NUMPY = {
    "BOOL": "?",
    "U8": "u1",
    "I8": "i1",
    "U16": "<u2",
    "I16": "<i2",
    "U32": "<u4",
    "I32": "<i4",
    "U64": "<u8",
    "I64": "<i8",
    "F16": "<f2",
    "F32": "<f4",
    "F64": "<f8",
}


@dataclass(frozen=True)
class RankState:
    """What an export holds of one rank.

    Attributes:
        rank: which.
        table: every tensor of its file, for the table of the layout.
        record: structure of the data-side keys alone.
        specs: tensors of that record, by number of entry.
        values: their bytes.
    """

    rank: int
    table: Sequence[TensorSpec]
    record: Record
    specs: Sequence[TensorSpec] = ()
    values: Sequence[bytes | memoryview] = ()


@dataclass(frozen=True)
class SavedState:
    """What an export holds of one checkpoint.

    Attributes:
        generation: which.
        world_size: ranks that saved it.
        num_bytes: size of its files.
        time_s: when it was whole on disk, in seconds since 1970.
        metrics: what `save` was given.
        ranks: one for each rank.
    """

    generation: Generation
    world_size: int
    num_bytes: int
    time_s: float
    metrics: Mapping[str, float]
    ranks: Sequence[RankState]


def write_hdf5(path: Path, source: str, saved: Sequence[SavedState]) -> None:
    """Write a new file.

    Args:
        path: must not exist.
        source: what the checkpoints were read from, for the reader of the file.
        saved: in the order of the tables.
    """
    with h5py.File(path, "x", libver="v110") as file:
        file.attrs.update({"format": FORMAT, "version": VERSION, "source": source})
        text = h5py.string_dtype()
        rows = [(checkpoint.generation.directory_name, *_numbers(checkpoint)) for checkpoint in saved]
        columns = [("name", text), *((name, "<f8" if name == "time_s" else "<i8") for name in _COLUMNS)]
        file.create_dataset("steps", data=np.array(rows, np.dtype(columns)))
        metrics = file.create_group("metrics", track_order=True)
        for name in sorted({name for checkpoint in saved for name in checkpoint.metrics}):
            metrics[_quoted(name)] = np.array(
                [checkpoint.metrics.get(name, math.nan) for checkpoint in saved], np.float64
            )
        checkpoints = file.create_group("checkpoints", track_order=True)
        for checkpoint in saved:
            _write_checkpoint(
                checkpoints.create_group(checkpoint.generation.directory_name, track_order=True), checkpoint
            )


_COLUMNS = ("attempt", "step", "world_size", "num_bytes", "time_s")


def _numbers(checkpoint: SavedState) -> tuple[Any, ...]:
    return (
        checkpoint.generation.attempt,
        checkpoint.generation.step,
        checkpoint.world_size,
        checkpoint.num_bytes,
        checkpoint.time_s,
    )


def _write_checkpoint(group: Any, checkpoint: SavedState) -> None:
    group.attrs.update(dict(zip(_COLUMNS, _numbers(checkpoint), strict=True)))
    text = h5py.string_dtype()
    rows = [
        (rank.rank, spec.name, spec.dtype, "x".join(map(str, spec.shape)), math.prod(spec.shape))
        for rank in checkpoint.ranks
        for spec in rank.table
    ]
    form = [("rank", "<i8"), ("name", text), ("dtype", text), ("shape", text), ("num_elements", "<i8")]
    group.create_dataset("layout", data=np.array(rows, np.dtype(form)))
    metrics = group.create_group("metrics", track_order=True)
    for name, value in checkpoint.metrics.items():
        metrics[_quoted(name)] = float(value)
    for rank in checkpoint.ranks:
        target = group.create_group(f"ranks/{rank.rank}", track_order=True)
        _Writer(rank).write(target, "state", rank.record.tree)
        target.create_dataset("shared", data=rank.record.shared, dtype=text)


class _Writer:
    """Nodes of a structure as groups and datasets."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank

    def write(self, parent: Any, name: str, node: Node) -> None:
        if isinstance(node, dict):
            group = parent.create_group(name, track_order=True)
            if len(node) == 1 and TENSOR in node:
                self._tensor(group, node[TENSOR])
                return
            for key, child in node.items():
                self.write(group, _quoted(key), child)
        elif isinstance(node, list):
            self._list(parent, name, node)
        elif node is None:
            parent.create_dataset(name, data=h5py.Empty("u1")).attrs[_KIND] = "none"
        elif isinstance(node, str) and "\0" in node:
            # A string of HDF5 ends there.
            parent.create_dataset(name, data=np.frombuffer(node.encode(), np.uint8)).attrs[_KIND] = "utf-8"
        else:
            parent.create_dataset(name, data=node, dtype=_scalar_dtype(node))

    def _list(self, parent: Any, name: str, items: list[Node]) -> None:
        kinds = {type(item) for item in items}
        if len(kinds) == 1 and kinds <= {int, float, bool, str} and not any("\0" in str(item) for item in items):
            parent.create_dataset(name, data=items, dtype=_scalar_dtype(items[0])).attrs[_KIND] = "list"
            return
        group = parent.create_group(name, track_order=True)
        group.attrs[_KIND] = "list"
        for index, item in enumerate(items):
            self.write(group, str(index), item)

    def _tensor(self, group: Any, number: int) -> None:
        ref = self._rank.record.tensors[number]
        spec = self._rank.specs[ref.entry]
        values = np.frombuffer(self._rank.values[ref.entry], _NUMPY.get(spec.dtype, "u1"))
        group.attrs[_KIND] = "tensor"
        group.attrs["ref"] = msgspec.json.encode(ref).decode()
        group.attrs["spec"] = msgspec.json.encode([spec.name, spec.dtype, spec.shape]).decode()
        group.create_dataset("values", data=values.reshape(spec.shape) if spec.dtype in _NUMPY else values)


def _scalar_dtype(value: bool | int | float | str) -> Any:
    if isinstance(value, bool):
        return np.bool_
    return h5py.string_dtype() if isinstance(value, str) else np.int64 if isinstance(value, int) else np.float64


def _quoted(name: str) -> str:
    """A key as the name of a link: HDF5 reserves "/" and "."."""
    return "%" if not name else "%2E" if name == "." else quote(name, safe=" $@!*()[]{}<>:;,=+-_.~^&|'\"#?")
