"""Checkpoints for analysis tools: what was saved when, with which metrics, and where the data stood, as one HDF5 file.

Called by `hetstream ckpt convert`. It holds no weights: HDF5 is no format that survives a crash. What was written can
be read back exactly, to start a loader from it. The tables of the file are in docs/checkpoint.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import msgspec
import numpy as np

from hetstream.base import typed_json
from hetstream.base.installed import install_command
from hetstream.checkpoint.errors import DamagedCheckpoint, DamagedLayout
from hetstream.checkpoint.record.generation import Generation
from hetstream.checkpoint.record.layout import TensorSpec, lay_out
from hetstream.checkpoint.record.structure import Record, TensorRef
from hetstream.checkpoint.record.tree import MAX_DEPTH, TENSOR, Node

try:
    import h5py
except ImportError as exc:
    raise ImportError(f"HDF5 export and import need h5py: {install_command('hdf5')}") from exc

FORMAT, VERSION = "hetstream checkpoints", 1
# A loader's state has some hundreds of values. These keep a hostile file from filling the memory.
_MAX_NODES = 1_000_000
_MAX_DATASET_BYTES = 1 << 28
_MAX_BYTES = 1 << 30
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
        rows = [(one.generation.directory_name, *_numbers(one)) for one in saved]
        columns = [("name", text), *((name, "<f8" if name == "time_s" else "<i8") for name in _COLUMNS)]
        file.create_dataset("steps", data=np.array(rows, np.dtype(columns)))
        metrics = file.create_group("metrics", track_order=True)
        for name in sorted({name for one in saved for name in one.metrics}):
            metrics[_quoted(name)] = np.array([one.metrics.get(name, math.nan) for one in saved], np.float64)
        checkpoints = file.create_group("checkpoints", track_order=True)
        for one in saved:
            _write_checkpoint(checkpoints.create_group(one.generation.directory_name, track_order=True), one)


_COLUMNS = ("attempt", "step", "world_size", "num_bytes", "time_s")


def _numbers(one: SavedState) -> tuple[Any, ...]:
    return one.generation.attempt, one.generation.step, one.world_size, one.num_bytes, one.time_s


def _write_checkpoint(group: Any, one: SavedState) -> None:
    group.attrs.update(dict(zip(_COLUMNS, _numbers(one), strict=True)))
    text = h5py.string_dtype()
    rows = [
        (rank.rank, spec.name, spec.dtype, "x".join(map(str, spec.shape)), math.prod(spec.shape))
        for rank in one.ranks
        for spec in rank.table
    ]
    form = [("rank", "<i8"), ("name", text), ("dtype", text), ("shape", text), ("num_elements", "<i8")]
    group.create_dataset("layout", data=np.array(rows, np.dtype(form)))
    metrics = group.create_group("metrics", track_order=True)
    for name, value in one.metrics.items():
        metrics[_quoted(name)] = float(value)
    for rank in one.ranks:
        target = group.create_group(f"ranks/{rank.rank}", track_order=True)
        _Writer(rank).write(target, "state", rank.record.tree)
        target.create_dataset("shared", data=rank.record.shared, dtype=text)


class _Writer:
    """Nodes of a structure as groups and datasets; `_Reader` is its inverse."""

    def __init__(self, rank: RankState) -> None:
        self._rank = rank

    def write(self, parent: Any, name: str, node: Node) -> None:
        if isinstance(node, dict):
            group = parent.create_group(name, track_order=True)
            if len(node) == 1 and TENSOR in node:
                self._tensor(group, node[TENSOR])
                return
            for key, one in node.items():
                self.write(group, _quoted(key), one)
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


def _unquoted(name: str) -> str:
    return "" if name == "%" else unquote(name, errors="strict")


def read_hdf5(path: Path) -> list[SavedState]:
    """Read what `write_hdf5` wrote; of each rank's table nothing.

    Raises:
        DamagedCheckpoint: it is another file, of another version, or damaged.
    """
    try:
        with h5py.File(path, "r") as file:
            if file.attrs.get("format") != FORMAT or file.attrs.get("version") != VERSION:
                raise DamagedCheckpoint(
                    f"{path}: no export of hetstream, format {file.attrs.get('format')!r} of version "
                    f"{file.attrs.get('version')!r}; this release reads {FORMAT!r} of version {VERSION}"
                )
            reader = _Reader()
            return [
                _read_checkpoint(reader, name, group)
                for name, group in reader.members(reader.member(file, "checkpoints"))
            ]
    except DamagedCheckpoint:
        raise
    except FileNotFoundError:
        raise
    # h5py raises what its C library runs into: OSError, KeyError, RuntimeError, TypeError, ValueError ...
    except Exception as error:
        raise DamagedCheckpoint(f"{path}: cannot be read as HDF5: {type(error).__name__}: {error}") from error


def _read_checkpoint(reader: _Reader, name: str, group: Any) -> SavedState:
    attempt, step, world_size, num_bytes = (int(group.attrs[column]) for column in _COLUMNS[:4])
    generation = Generation.of_directory(name)
    if generation is None or generation[:2] != (attempt, step) or world_size < 1:
        raise DamagedCheckpoint(f"checkpoint {name!r} says {Generation(attempt, step)}, {world_size} rank(s)")
    metrics = {_unquoted(key): float(one[()]) for key, one in reader.members(reader.member(group, "metrics"))}
    ranks = [reader.rank(int(rank), one) for rank, one in reader.members(reader.member(group, "ranks"))]
    return SavedState(generation, world_size, num_bytes, float(group.attrs["time_s"]), metrics, ranks)


class _Reader:
    """Groups and datasets as nodes again. Follows no link out of the file, and takes no more than it may."""

    def __init__(self) -> None:
        self._num_nodes = 0
        self._num_bytes = 0
        self._refs: list[TensorRef] = []
        self._specs: list[TensorSpec] = []
        self._values: list[bytes] = []
        self._entries: dict[str, int] = {}

    def member(self, group: Any, name: str) -> Any:
        """An object of a group, which lies in this file."""
        if not isinstance(group.get(name, getlink=True), h5py.HardLink):
            raise DamagedCheckpoint(f"{group.name}/{name} is missing, or a link to elsewhere")
        return group[name]

    def members(self, group: Any) -> Iterator[tuple[str, Any]]:
        """Names and objects of a group, in their order."""
        for name in group:
            yield name, self.member(group, name)

    def rank(self, rank: int, group: Any) -> RankState:
        """One rank's state."""
        self._refs, self._specs, self._values, self._entries = [], [], [], {}
        tree = self._node(self.member(group, "state"), 0)
        if not isinstance(tree, dict):
            raise DamagedCheckpoint(f"{group.name}/state is no mapping")
        shared = [one.decode() for one in self._array(self.member(group, "shared"))]
        return RankState(rank, (), Record(tree, self._refs, shared), self._specs, self._values)

    def _node(self, one: Any, depth: int) -> Node:
        self._num_nodes += 1
        if depth > MAX_DEPTH or self._num_nodes > _MAX_NODES:
            raise DamagedCheckpoint(f"{one.name}: more than {MAX_DEPTH} levels or {_MAX_NODES} values")
        kind = one.attrs.get(_KIND, "")
        if isinstance(one, h5py.Group):
            if kind == "tensor":
                return self._tensor(one)
            if kind == "list":
                return [self._node(item, depth + 1) for _, item in self.members(one)]
            return {_unquoted(name): self._node(item, depth + 1) for name, item in self.members(one)}
        if kind == "none":
            return None
        values = self._array(one)
        if kind == "utf-8":
            return values.tobytes().decode()
        plain = [_text(value) for value in values] if values.dtype.hasobject else values.tolist()
        return plain if kind == "list" else _text(plain) if isinstance(plain, bytes) else plain

    def _array(self, one: Any) -> Any:
        if not isinstance(one, h5py.Dataset) or one.size is None or one.nbytes > _MAX_DATASET_BYTES:
            raise DamagedCheckpoint(f"{one.name} is no dataset of at most {_MAX_DATASET_BYTES} bytes")
        if one.external or one.is_virtual:
            raise DamagedCheckpoint(f"{one.name} lies in another file, which is not read")
        if one.chunks is not None or one.id.get_storage_size() < one.nbytes:
            raise DamagedCheckpoint(
                f"{one.name} has {one.nbytes} bytes and takes {one.id.get_storage_size()} in the file: what is in "
                "chunks, compressed or never written was not exported by hetstream"
            )
        self._num_bytes += one.nbytes
        if self._num_bytes > _MAX_BYTES:
            raise DamagedCheckpoint(f"{one.name}: more than {_MAX_BYTES} bytes of values")
        self._num_nodes += one.size
        if one.dtype.hasobject and self._num_nodes > _MAX_NODES:
            raise DamagedCheckpoint(f"{one.name}: more than {_MAX_NODES} values")
        return np.asarray(one[()])

    def _tensor(self, group: Any) -> Node:
        try:
            ref = typed_json.decode(group.attrs["ref"], TensorRef)
            spec = TensorSpec(*typed_json.decode(group.attrs["spec"], tuple[str, str, tuple[int, ...]]))
            lay_out([spec])
        except (msgspec.MsgspecError, DamagedLayout) as error:
            raise DamagedCheckpoint(f"{group.name}: {error}") from error
        data = self._array(self.member(group, "values")).tobytes()
        if len(data) != lay_out([spec]).entries[0].num_bytes:
            raise DamagedCheckpoint(f"{group.name}: {len(data)} bytes of values for {spec.dtype}{list(spec.shape)}")
        # Tied tensors have one entry, and so one name.
        entry = self._entries.setdefault(spec.name, len(self._specs))
        if entry == len(self._specs):
            self._specs.append(spec)
            self._values.append(data)
        self._refs.append(msgspec.structs.replace(ref, entry=entry))
        return {TENSOR: len(self._refs) - 1}


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
