"""Checkpoints with weights from one format to another: ours, torch.distributed.checkpoint's, torch.save's, safetensors.

Called by `hetstream ckpt convert`. In the middle stands one tree: the state of all ranks, sharded tensors whole, where
ranks differ rank 0's values. Files of others are read with torch's weights_only loader, and the metadata of
torch.distributed.checkpoint, which are a pickle, with one that knows their classes and no others. That loader knows
fewer types than a state may have; the table in docs/checkpoint-formats.md says what becomes of the others.
"""

from __future__ import annotations

import codecs
import contextlib
import dataclasses
import enum
import errno
import io
import mmap
import os
import pickle
import shutil
import tempfile
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from hetstream.base.errors import OptionsError
from hetstream.base.files import Directory, temporary_name
from hetstream.checkpoint.convert.dcp import Kind, Source, attempt_on, choose
from hetstream.checkpoint.disk.commit import commit, write_part
from hetstream.checkpoint.disk.rank_file import PartSpec, write_file
from hetstream.checkpoint.disk.safetensors import STRUCTURE, FilePlan, plan_part, read_header, structure_in
from hetstream.checkpoint.errors import CheckpointError, DamagedCheckpoint, NotEnoughSpace, UnsupportedState, first_line
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.structure import Record, written_metrics
from hetstream.checkpoint.record.tree import MAX_INLINE_BYTES
from hetstream.checkpoint.tensors.copy_plan import make_plan
from hetstream.checkpoint.tensors.leaves import Flattener, bytes_as_tensor, tensor_of
from hetstream.checkpoint.tensors.shards import Clash, Parts, open_parts, part_of

# NumPy's words for the numbers that torch has too.
_NUMPY_CHARS = "?bBhHiIqQlLefdFD"
# NumPy's arrays of numbers are rebuilt by these; elements of other kinds go through the same loader.
_ARRAY_GLOBALS = [
    np.zeros(1).__reduce__()[0],
    np.float64(0).__reduce__()[0],
    np.ndarray,
    np.dtype,
    *{type(np.dtype(word)) for word in _NUMPY_CHARS},
]
# The loader takes no longer integers.
_MAX_INTEGER_BYTES = 255
_LOADABLE = (
    *(type(None), bool, int, float, complex, str, bytearray),
    *(torch.dtype, torch.layout, torch.device, torch.Size),
)


def load_torch(path: Path) -> Any:
    """Read a file of torch.save with the weights_only loader; its tensors are mapped.

    Raises:
        UnsupportedState: it holds objects that only code of its own could make. None of it was run.
        DamagedCheckpoint: it is damaged.
    """
    return load_weights_only(path, str(path), mmap=True)


def load_weights_only(file: Any, name: str, **options: Any) -> Any:
    """Read what torch.save wrote.

    Args:
        file: a path, or an open file.
        name: of it, for messages.
        options: of torch.load.

    Raises:
        UnsupportedState: it holds objects that only code of its own could make. None of it was run.
        DamagedCheckpoint: it is damaged.
    """
    try:
        with torch.serialization.safe_globals(_ARRAY_GLOBALS):
            return torch.load(file, map_location="cpu", weights_only=True, **options)
    except pickle.UnpicklingError as error:
        lines = str(error).splitlines() or ["unknown"]
        reason = next((line.strip() for line in lines if "GLOBAL" in line), lines[0])
        raise UnsupportedState(
            f"{name} holds what torch's weights_only loader does not take, and nothing of it was run: {reason}"
        ) from error
    except FileNotFoundError:
        raise
    # The loader raises whatever a damaged file leads it to.
    except Exception as error:
        raise DamagedCheckpoint(f"{name} cannot be read by torch.load: {first_line(error)}") from error


def save_torch(state: Mapping[str, Any], descriptor: int) -> None:
    """Write a state with torch.save, and bring it to disk.

    Args:
        state: top-level key to tree.
        descriptor: of a new file.

    Raises:
        UnsupportedState: it holds a value that the weights_only loader does not take.
        OSError: as from write(2); what was written so far stays.
    """
    with open(descriptor, "wb", closefd=False) as file:
        try:
            torch.save(_Loadable().tree(state), file)
        except RuntimeError as error:
            # torch closes its archive when a write has failed, and raises what that runs into.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
    os.fsync(descriptor)


def plain(value: Any) -> Any:
    """Return a tree of the types that any program has: what is of a program's own classes becomes dict, list or
    tuple.
    """
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, list | deque):
        return [plain(item) for item in value]
    if isinstance(value, tuple) and not isinstance(value, torch.Size):
        return tuple(plain(item) for item in value)
    if isinstance(value, SimpleNamespace):
        return plain(vars(value))
    if isinstance(value, range):
        # torch would write it down number by number.
        return (value.start, value.stop, value.step)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return value


class _Loadable:
    """Makes a tree of what the weights_only loader takes."""

    def __init__(self) -> None:
        self._dtypes: dict[int, torch.dtype] = {}

    def tree(self, value: Any) -> Any:
        """Return a value, and all that is in it, as its nearest type that the loader knows."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic):
            return _of_numpy(value)
        if isinstance(value, bytes | io.BytesIO):
            return _of_bytes(value if isinstance(value, bytes) else value.getvalue())
        if isinstance(value, Mapping):
            return self._mapping(value)
        if isinstance(value, list | deque):
            return [self.tree(item) for item in value]
        if isinstance(value, set):
            return {self.tree(item) for item in value}
        if isinstance(value, tuple | frozenset) and not isinstance(value, torch.Size):
            return tuple(self.tree(item) for item in value)
        if isinstance(value, slice):
            return (value.start, value.stop, value.step)
        if isinstance(value, torch.memory_format):
            return str(value).removeprefix("torch.")
        if isinstance(value, int) and value.bit_length() // 8 >= _MAX_INTEGER_BYTES:
            raise UnsupportedState(
                f"the state holds an integer of {value.bit_length()} bits, and torch's weights_only loader takes at "
                f"most {_MAX_INTEGER_BYTES} bytes: convert it to safetensors or flash"
            )
        if isinstance(value, _LOADABLE):
            return value
        simpler = plain(value)
        if simpler is value:
            raise UnsupportedState(f"the state holds a {type(value)}, which torch's weights_only loader does not take")
        return self.tree(simpler)

    def _mapping(self, value: Mapping[Any, Any]) -> dict[Any, Any]:
        kind = type(value) if isinstance(value, OrderedDict | Counter) else dict
        made = kind({self.tree(key): self.tree(item) for key, item in value.items()})
        if isinstance(value, OrderedDict):  # of a module, with versions of its parts
            vars(made).update(self.tree(vars(value)))
        return made

    def _tensor(self, value: torch.Tensor) -> torch.Tensor:
        """A copy where one storage is seen as two dtypes, which torch.save refuses."""
        if value.layout is not torch.strided or not value.numel():
            return value
        known = self._dtypes.setdefault(value.untyped_storage().data_ptr(), value.dtype)
        return value if known is value.dtype else value.clone()


class _NoBytes:
    """Becomes b"" when it is loaded: pickle writes that down as a call of `bytes`, which the loader does not make."""

    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return codecs.encode, ("", "latin1")


def _of_bytes(value: bytes) -> Any:
    """Many as a tensor: pickle's protocol 2 writes them as text."""
    if len(value) > MAX_INLINE_BYTES:
        return torch.frombuffer(bytearray(value), dtype=torch.uint8)
    return value or _NoBytes()


def _of_numpy(value: Any) -> Any:
    """An array as a tensor, a scalar as a number of Python; what torch does not have as its bytes."""
    if value.dtype.char not in _NUMPY_CHARS:
        return {"dtype": _dtype(value.dtype), "shape": list(value.shape), "bytes": value.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    return torch.from_numpy(np.array(value, value.dtype.newbyteorder("=")))


def _dtype(dtype: Any) -> Any:
    """What `numpy.dtype` makes it of again: a name, or of records a list of fields.

    NumPy has no such list where fields overlap or are out of order, and one with more fields where there are gaps
    between them. There it is a dict, which has their offsets.
    """
    if dtype.subdtype:
        base, shape = dtype.subdtype
        return (_dtype(base), shape)
    if not dtype.names:
        return dtype.str
    with contextlib.suppress(ValueError):
        if np.dtype(dtype.descr) == dtype:
            return dtype.descr
    fields = [dtype.fields[name] for name in dtype.names]
    formats, offsets = [_dtype(field[0]) for field in fields], [field[1] for field in fields]
    return {"names": list(dtype.names), "formats": formats, "offsets": offsets, "itemsize": dtype.itemsize}


# A state straight to disk, without shared memory and without a checkpoint writer: for conversions, where nobody waits.
#
# The file is the one that the checkpoint writer would have written.


def write_state(
    directory: Path,
    part: PartSpec,
    state: Mapping[str, Any],
    *,
    shared: Iterable[str] = (),
    keys: Iterable[str] | None = None,
    allow_pickle: bool = False,
) -> None:
    """Write one rank's part of a checkpoint; `commit.commit` makes a checkpoint of all parts.

    Args:
        directory: of checkpoints.
        part: whose, of which generation.
        state: top-level key to anything that `save` takes.
        shared: top-level keys that are equal on every rank.
        keys: those that this rank writes; None: all.
        allow_pickle: pickle what has no other form.

    Raises:
        UnsupportedState: something in the state cannot be stored.
        NotEnoughSpace: the disk is full; nothing was written.
    """
    plan, payload = plan_state(state, part, directory, shared=shared, keys=keys, allow_pickle=allow_pickle)
    write_part(directory, part, plan, payload)


def plan_state(
    state: Mapping[str, Any],
    part: PartSpec,
    scratch: Path,
    *,
    shared: Iterable[str] = (),
    keys: Iterable[str] | None = None,
    allow_pickle: bool = False,
) -> tuple[FilePlan, memoryview]:
    """Return a rank's file and the payload that it is made of, which lies in a nameless file of `scratch`: a state may
    be larger than memory.

    Raises:
        UnsupportedState: something in the state cannot be stored.
        NotEnoughSpace: `scratch` has no room.
    """
    leaves = Flattener(allow_pickle=allow_pickle).flatten(state)
    plan = make_plan(leaves)
    with tempfile.TemporaryFile(dir=scratch) as file:
        num_bytes = max(plan.layout.payload_bytes, mmap.PAGESIZE)
        try:
            # Not truncate: where there is no room, writing to the mapping would end the process.
            os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            free_bytes = shutil.disk_usage(scratch).free
            raise NotEnoughSpace(
                f"{scratch} has no room for the {num_bytes} bytes of the state: {free_bytes} are free, and nothing was "
                "written; what is written next to them takes as much again"
            ) from error
        payload = memoryview(mmap.mmap(file.fileno(), 0))[: plan.layout.payload_bytes]
    with torch.no_grad():
        memory = bytes_as_tensor(payload)
        for index, tensor in enumerate(plan.tensors_to_copy(leaves.tensors)):
            plan.destination(index, memory).copy_(tensor.detach())
    metrics = written_metrics({name: float(value) for name, value in part.metrics.items()})
    record = Record(leaves.tree, plan.refs, list(shared), part.rank, part.world_size, metrics)
    return plan_part(plan.layout.entries, record, keys), payload


_NO_PATH = ""
# What torch.distributed.checkpoint's metadata are made of. Nothing else is made, and nothing is called, for a file.
_METADATA_MODULES: dict[str, Mapping[str, Any]] = {
    metadata.__name__: {
        name: getattr(metadata, name)
        for name in (
            *("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata"),
            *("BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING"),
        )
    },
    filesystem.__name__: {"_StorageInfo": filesystem._StorageInfo},
    "torch": {"Size": torch.Size},
    "torch.serialization": {"_get_layout": torch.serialization._get_layout},
    "collections": {"OrderedDict": OrderedDict},
    # Where it was saved: a path, which is not looked at, and never put together from its parts.
    "pathlib": dict.fromkeys(
        ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"), lambda *_: _NO_PATH
    ),
}
_METADATA_MODULES["pathlib._local"] = _METADATA_MODULES["pathlib"]
# Longer lists hold no tensors each of their own.
_MAX_ITEMS = 1 << 20
_MAX_DEPTH = 200
# Of a million pieces of tensors.
_MAX_METADATA_BYTES = 1 << 30
# Elements of two ranks' tensors that are compared for a note to the user.
_MAX_COMPARED = 1 << 20


@dataclass
class Content:
    """What a source holds.

    Attributes:
        state: top-level key to tree; tensors may lie in mapped files.
        step: of training, where the source knows it.
        metrics: what `save` was given, where the source knows it.
        notes: what does not go along, for the user.
    """

    state: dict[str, Any]
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the state."""
        return list(_tensors_of(self.state))


def _tensors_of(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors_of(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors_of(item)


@contextlib.contextmanager
def reading(source: Source, step: int | None = None, under: str = "") -> Iterator[Content]:
    """Read a source; its tensors may be used until the block ends.

    Args:
        source: what is read.
        step: of a directory of checkpoints, which; None: the newest good one.
        under: put what the source holds under this top-level key.

    Raises:
        NoCheckpoint: there is none.
        DamagedCheckpoint: a file is damaged.
        UnsupportedState: it holds what can be had only by running it.
    """
    with contextlib.ExitStack() as stack:
        if source.kind == "flash":
            content = _of_checkpoint(source, step, stack)
        elif source.kind == "dcp":
            content = Content(read_dcp(source.path))
        elif source.kind == "torch":
            value = load_torch(source.path)
            content = Content(value if under else _as_state(value, source.path))
        else:
            content = Content(load_safetensors(source.path))
        if under:
            content.state = {under: content.state}
        yield content


def _of_checkpoint(source: Source, step: int | None, stack: contextlib.ExitStack) -> Content:
    checkpoint = choose(source, step)
    parts = stack.enter_context(open_parts(checkpoint.path))
    clashes: list[Clash] = []
    state = parts.tree(lambda whole: whole.read((0,) * len(whole.shape), whole.shape), clashes)
    differ = sorted({clash.name.partition(".")[0] for clash in clashes if _differ(clash.taken, clash.other)})
    notes = [f"the ranks differ in {', '.join(differ)}: rank 0's values go along, the others' do not"] if differ else []
    return Content(state, checkpoint.generation.step, checkpoint.metrics, notes)


def _differ(left: Any, right: Any) -> bool:
    """Whether two values are not the same; of large tensors it is assumed."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if left.layout is not right.layout:
            return True
        if left.layout is torch.sparse_coo:
            return left.shape != right.shape or _differ(
                [left._indices(), left._values()], [right._indices(), right._values()]
            )
        return max(left.numel(), right.numel()) > _MAX_COMPARED or not torch.equal(left, right)
    if isinstance(left, np.ndarray) or isinstance(right, np.ndarray):
        return not np.array_equal(left, right)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) != len(right) or any(map(_differ, left, right))
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() != right.keys() or any(_differ(left[key], right[key]) for key in left)
    return type(left) is not type(right) or bool(left != right)


def _as_state(value: Any, path: Path) -> dict[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    raise UnsupportedState(f"{path} holds a {type(value).__name__}, not a dict with names as keys, as a state is")


def load_safetensors(path: Path) -> dict[str, Any]:
    """Map a safetensors file: nested as it was where we wrote it, else flat, by its names.

    Raises:
        DamagedCheckpoint: it is damaged.
    """
    if not path.stat().st_size:
        raise DamagedCheckpoint(f"{path} is empty")
    with path.open("rb") as file:
        # A private mapping: torch wants memory that it may write to, and nobody may change the file.
        whole = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    entries, extra, begin = read_header(whole, str(path))
    data = [whole[begin + entry.offset : begin + entry.offset + entry.num_bytes] for entry in entries]
    if STRUCTURE not in extra:
        return {entry.name: tensor_of(entry, view) for entry, view in zip(entries, data, strict=True)}
    record = structure_in(extra, str(path))
    return Parts([part_of(0, record, entries, data, str(path))]).tree(lambda whole: whole.pieces[0].tensor)


# torch.distributed.checkpoint


def _member_of(kind: Any, name: Any) -> Any:
    """The member of an enum, where a pickle asks for an attribute."""
    if not isinstance(kind, enum.EnumMeta) or not isinstance(name, str) or name not in kind.__members__:
        raise pickle.UnpicklingError(f"it names the attribute {name!r} of {kind!r}")
    return kind.__members__[name]


class _MetadataUnpickler(pickle.Unpickler):
    """Reads metadata and nothing else: no name outside the table above is ever looked up."""

    def find_class(self, module: str, name: str) -> Any:
        found = _METADATA_MODULES.get(module, {}).get(name)
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _member_of  # how Python 3.11.0 to 3.11.3 pickle the member of an enum
        if found is None and module == "torch":
            # dtypes and layouts are written by their names.
            found = getattr(torch, name, None)
            found = found if isinstance(found, torch.dtype | torch.layout) else None
        if found is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return found


class _Reader(filesystem.FileSystemReader):
    """torch's reader, with metadata that cannot run anything."""

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        path = Path(self.path) / ".metadata"
        with Directory.open(path.parent) as directory:
            data = directory.read(path.name, _MAX_METADATA_BYTES)
        try:
            found = _MetadataUnpickler(io.BytesIO(data)).load()
            names = {info.relative_path for info in found.storage_data.values()}
            tensors = [tensor for tensor in found.state_dict_metadata.values() if hasattr(tensor, "size")]
            is_right = all(isinstance(tensor.size, torch.Size) for tensor in tensors) and isinstance(
                found, metadata.Metadata
            )
        except FileNotFoundError:
            raise
        # An unpickler raises whatever a damaged stream leads it to.
        except Exception as error:
            raise DamagedCheckpoint(f"{path} cannot be read, and nothing of it was run: {first_line(error)}") from error
        if not is_right or any(not isinstance(name, str) or os.path.basename(name) != name for name in names):
            raise DamagedCheckpoint(f"{path} names files outside its directory, or is no metadata at all")
        with Directory.open(path.parent) as directory:
            for name in sorted(names):
                with contextlib.suppress(FileNotFoundError):  # torch names it
                    os.close(directory.open_file(name))
        return found  # type: ignore[no-any-return]


class _Planner(DefaultLoadPlanner):
    """Takes values as the weights_only loader gives them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = load_weights_only(value, name)


def read_dcp(path: Path) -> dict[str, Any]:
    """Read all of a directory of torch.distributed.checkpoint into memory.

    Raises:
        DamagedCheckpoint: it is damaged.
        UnsupportedState: it holds objects that only code of its own could make. None of it was run.
    """
    reader = _Reader(path)
    found = reader.read_metadata()
    flat: dict[str, Any] = {}
    try:
        for name, stored in found.state_dict_metadata.items():
            if isinstance(stored, metadata.TensorStorageMetadata):
                flat[name] = torch.empty(stored.size, dtype=stored.properties.dtype)
            else:
                flat[name] = None
        with _alone():
            dcp_load(flat, storage_reader=reader, planner=_Planner())
    except CheckpointException as error:
        cause = _cause_of(error)
        if isinstance(cause, DamagedCheckpoint | UnsupportedState):
            raise cause from error
        raise DamagedCheckpoint(f"{path} cannot be read: {first_line(cause)}") from error
    except (AttributeError, TypeError) as error:  # a pickle may leave out, or misname, what its classes have
        raise DamagedCheckpoint(f"{path}: its metadata lack what they should have: {first_line(error)}") from error
    except (RuntimeError, MemoryError) as error:
        raise DamagedCheckpoint(f"{path}: its tensors do not fit the memory: {error}") from error
    state: dict[str, Any] = {}
    paths = found.planner_data if isinstance(found.planner_data, Mapping) else {}
    for name, value in flat.items():
        _put(state, paths.get(name, (name,)), value)
    return {key: _with_parameter_numbers(value) for key, value in state.items()}


def _cause_of(error: CheckpointException) -> BaseException:
    """What happened on the one rank that there is."""
    cause: BaseException = next(iter(error.failures.values()))[0]
    return cause


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Without torch's word that one process does it all, which is what a conversion wants."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is")
        yield


def _put(state: dict[str, Any], path: tuple[str | int, ...], value: Any) -> None:
    """Put a value at its place in a tree of dicts and lists: numbers are places in lists."""
    here: Any = state
    for place, after in zip(path, (*path[1:], None), strict=True):
        if not _is_place(here, place) or len(path) > _MAX_DEPTH:
            raise DamagedCheckpoint(f"the metadata name a value {path}, which is no place in a state")
        if isinstance(place, int):
            if not 0 <= place < _MAX_ITEMS:
                raise DamagedCheckpoint(f"the metadata name a value {path}: a list has at most {_MAX_ITEMS} items")
            here.extend([None] * (place + 1 - len(here)))
        else:
            here.setdefault(place)
        if after is None:
            here[place] = value
        elif here[place] is None:
            here[place] = [] if isinstance(after, int) else {}
        here = here[place]


def _is_place(here: Any, place: str | int) -> bool:
    return isinstance(here, list) if isinstance(place, int) else isinstance(here, dict)


def _with_parameter_numbers(value: Any) -> Any:
    """A state where the states of optimizers have numbers as keys again, if their groups name parameters by numbers:
    torch.distributed.checkpoint makes text of all keys.
    """
    if isinstance(value, list):
        return [_with_parameter_numbers(item) for item in value]
    if not isinstance(value, dict):
        return value
    made = {key: _with_parameter_numbers(item) for key, item in value.items()}
    groups, states = made.get("param_groups"), made.get("state")
    if isinstance(groups, list) and isinstance(states, dict):
        params = [param for group in groups if isinstance(group, dict) for param in group.get("params", [])]
        if params and all(isinstance(param, int) for param in params) and all(key.isdecimal() for key in states):
            made["state"] = {int(key): item for key, item in states.items()}
    return made


# Writing


def write(content: Content, kind: Kind, target: Path, *, step: int | None = None) -> Path:
    """Write what was read. The target appears whole or not at all.

    Args:
        content: what was read.
        kind: what the target becomes.
        target: a file, or a directory.
        step: for `flash`, of training; None: the source's.

    Returns:
        What was written; for `flash` the directory of the checkpoint.

    Raises:
        UnsupportedState: the target's format cannot hold something of it.
        NotEnoughSpace: the disk is full. Nothing is left there.
    """
    try:
        return _write(content, kind, target, step)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise NotEnoughSpace(_no_room(target, str(error.strerror))) from error


def _no_room(target: Path, problem: str) -> str:
    free_bytes = shutil.disk_usage(target.absolute().parent).free
    return (
        f"{target} is not written: {problem}, {free_bytes} bytes are free; a conversion to torch or dcp needs the "
        "state's size, one to safetensors or flash twice as much"
    )


def _write(content: Content, kind: Kind, target: Path, step: int | None) -> Path:
    if kind == "dcp":
        _write_dcp(content.state, target)
    elif kind == "flash":
        check_step(content, kind, step)
        return _write_checkpoint(content, target, (content.step or 0) if step is None else step)
    elif kind == "torch":
        with _new_file(target) as descriptor:
            save_torch(content.state, descriptor)
    else:
        part = PartSpec(Generation(1, content.step or 0), 0, 1)
        plan, payload = plan_state(content.state, part, target.absolute().parent, shared=content.state)
        with _new_file(target) as descriptor:
            write_file(descriptor, plan, payload)
    return target


@contextlib.contextmanager
def _new_file(target: Path) -> Iterator[int]:
    with Directory.open(target.absolute().parent) as parent, parent.replacing(target.name) as descriptor:
        yield descriptor


def check_step(content: Content, kind: Kind, step: int | None) -> None:
    """Refuse to make a checkpoint of no step; arguments as of `write`.

    Raises:
        OptionsError: neither the source nor the caller says which step it is of.
    """
    if kind == "flash" and step is None and content.step is None:
        raise OptionsError("the source does not say which step of training it is of: give it with --as-step N")


def _write_checkpoint(content: Content, target: Path, step: int) -> Path:
    with attempt_on(target, "local") as attempt:
        generation = Generation(attempt, step)
        # Written as by a single rank, all of it equal on every rank: any number of ranks can restore it.
        part = PartSpec(generation, 0, 1, metrics=content.metrics)
        write_state(target, part, content.state, shared=content.state)
        commit(target, generation, 1)
    return target / generation.directory_name


def _write_dcp(state: dict[str, Any], target: Path) -> None:
    temporary = target.with_name(temporary_name(target.name))
    temporary.mkdir(mode=0o700)
    try:
        with _alone():
            dcp_save(plain(state), checkpoint_id=temporary)
        os.rename(temporary, target)
    except CheckpointException as error:  # no Exception; it says in many lines what its own code called
        problem = _no_room(target, f"torch.distributed.checkpoint failed: {first_line(_cause_of(error))}")
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(problem) from error
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    with Directory.open(target.absolute().parent) as parent:
        parent.sync()
