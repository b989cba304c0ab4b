"""Our checkpoints for torch.distributed.checkpoint: `dcp.load(state, storage_reader=FlashStorageReader(directory))`.

The planners are torch's own: DTensors (tensor parallel, FSDP2), plain tensors and objects are loaded in place, on any
number of ranks. Nothing in our files is unpickled; objects go through torch.save in memory because that is how a
planner takes them.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.disk.directory import Checkpoint, CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.errors import NoCheckpoint, UnsupportedState
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.tensors.shards import CheckpointPath, Parts, Piece, Whole, open_parts, walk


class FlashStorageReader(StorageReader):
    """Reads a checkpoint, written by any number of ranks, for `torch.distributed.checkpoint.load`.

    Args:
        source: directory of one checkpoint (DIR/step-0000000120.2), or its parts.
        own_rank: whose values to take for what each rank has for itself, such as states of generators; torch's own
            reader knows one value for all.
        allow_pickle: unpickle what was saved with allow_pickle=True.
    """

    def __init__(self, source: CheckpointPath | Parts, own_rank: int = 0, *, allow_pickle: bool = False) -> None:
        super().__init__()
        self._own_rank = own_rank
        self._allow_pickle = allow_pickle
        self._parts = source if isinstance(source, Parts) else None
        self._path = "" if isinstance(source, Parts) else os.fspath(source)
        self._pieces: dict[MetadataIndex, tuple[Whole, Piece]] = {}
        self._objects: dict[str, Any] = {}

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The directory; torch names it in its messages."""
        return self._path

    def close(self) -> None:
        """Let the checkpoint go, which was held since its metadata were read; after a load it is."""
        if self._parts and self._path:
            self._parts.close()
            self._parts = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of `checkpoint_id` if that is given."""
        if checkpoint_id:
            self._path, self._parts = os.fspath(checkpoint_id), None

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return what the checkpoint holds, under the names that torch's planners give.

        Raises:
            UnsupportedState: it holds a value that torch.distributed.checkpoint cannot load.
        """
        if self._parts is None:
            self._parts = open_parts(self._path, self._own_rank, allow_pickle=self._allow_pickle)
        wholes: dict[int, Whole] = {}

        def stand_in(whole: Whole) -> torch.Tensor:
            made = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
            wholes[id(made)] = whole
            return made

        flat, paths = flatten_state_dict(self._parts.tree(stand_in))
        found: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._pieces, self._objects = {}, {}
        for name, value in flat.items():
            whole = wholes.get(id(value))
            if whole is not None:
                found[name] = self._chunks(name, whole)
                continue
            if any(isinstance(leaf, torch.Tensor) for _, leaf in walk("", value)):
                kind = type(value).__name__
                raise UnsupportedState(
                    f"{name} is a {kind} that holds tensors; torch.distributed.checkpoint loads those of dicts and "
                    "lists alone. Load it with FlashCheckpointer.load()"
                )
            found[name] = BytesStorageMetadata()
            self._objects[name] = value
        return Metadata(found, planner_data=paths, storage_meta=StorageMeta())

    def _chunks(self, name: str, whole: Whole) -> TensorStorageMetadata:
        chunks = []
        for piece in whole.pieces:
            offsets = torch.Size(piece.offsets)
            self._pieces[MetadataIndex(name, offsets)] = whole, piece
            chunks.append(ChunkStorageMetadata(offsets, piece.tensor.shape))
        return TensorStorageMetadata(TensorProperties(dtype=whole.dtype), torch.Size(whole.shape), chunks)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing is left to be done."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Give the planner what it asks for.

        Raises:
            DamagedCheckpoint: a file that is needed is damaged.
        """
        for item in plan.items:
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, self._object(item))
                continue
            target = planner.resolve_tensor(item).detach()
            target.copy_(self._values(item))
            planner.commit_tensor(item, target)
        self.close()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _object(self, item: ReadItem) -> io.BytesIO:
        buffer = io.BytesIO()
        torch.save(self._objects[item.storage_index.fqn], buffer)
        buffer.seek(0)
        return buffer

    def _values(self, item: ReadItem) -> torch.Tensor:
        whole, piece = self._pieces[item.storage_index]
        begin = [offset + start for offset, start in zip(piece.offsets, item.storage_offsets, strict=True)]
        return whole.read(begin, item.lengths)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this is a directory."""
        return os.path.isdir(checkpoint_id)


# What a conversion starts from and where it goes, found out without torch.
#
# Called by `hetstream ckpt convert`. The conversions are in `weights.py`.

Kind = Literal["flash", "dcp", "torch", "safetensors"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_ZIP = b"PK\x03\x04"


@dataclass(frozen=True)
class Source:
    """What is converted.

    Attributes:
        path: a file, a directory of torch.distributed.checkpoint, or a directory of checkpoints.
        kind: which of these.
        generation: of a directory of checkpoints, the one that was meant; None: none in particular.
    """

    path: Path
    kind: Kind
    generation: Generation | None = None


def detect(path: Path) -> Source:
    """Find out what a path holds by what is in it.

    Raises:
        FileNotFoundError: nothing.
        NoCheckpoint: something else.
    """
    if path.is_dir():
        place = path.resolve()
        generation = Generation.of_directory(place.name)
        if generation:
            return Source(place.parent, "flash", generation)
        if os.path.lexists(path / ".metadata"):
            return Source(path, "dcp")
        if any(Generation.of_directory(name) for name in os.listdir(path)):
            return Source(path, "flash")
        raise NoCheckpoint(
            f"{path} is no checkpoint: neither a directory of hetstream's (with step-0000000120.2 or the like in it) "
            "nor one of torch.distributed.checkpoint (with .metadata)"
        )
    # Without waiting for the other end of a pipe, and without reading a device.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise NoCheckpoint(f"{path} is neither a directory nor a regular file")
        begin = file.read(9)
    if begin.startswith(_ZIP):
        return Source(path, "torch")
    # Eight bytes of length, then JSON.
    if len(begin) == 9 and begin[8:] == b"{":
        return Source(path, "safetensors")
    raise NoCheckpoint(f"{path} begins with {begin!r}: neither of torch.save nor safetensors")


def choose(source: Source, step: int | None) -> Checkpoint:
    """Return the checkpoint of a directory that is meant: that of a step, or the newest good one of the line.

    Raises:
        NoCheckpoint: there is none.
    """
    directory = CheckpointDirectory(source.path)
    lineage = directory.lineage()
    # Of several of one step that of the line.
    for checkpoint in sorted(directory.checkpoints(), key=lambda checkpoint: not lineage.holds(checkpoint.generation)):
        is_named = source.generation == checkpoint.generation or step == checkpoint.generation.step
        if (
            source.generation in (None, checkpoint.generation)
            and step in (None, checkpoint.generation.step)
            and (is_named or lineage.holds(checkpoint.generation))
        ):
            return checkpoint
    meant = source.generation or ("good checkpoint" if step is None else f"good checkpoint of step {step}")
    raise NoCheckpoint(f"{source.path} has no {meant}. See: hetstream ckpt ls {source.path}")


def check_target(path: Path, kind: str) -> None:
    """Refuse to write over something.

    Raises:
        OptionsError: the target exists, and is not a directory of checkpoints that one more goes into.
    """
    if path.exists() and not (kind == "flash" and path.is_dir() and not (path / ".metadata").exists()):
        raise OptionsError(f"{path} exists: a conversion overwrites nothing. Name another target, or remove it")
    if not path.absolute().parent.is_dir():
        raise OptionsError(f"{path.absolute().parent} is no directory: make it, or name another target")


@contextlib.contextmanager
def attempt_on(path: Path, job: str) -> Iterator[int]:
    """An attempt of its own on a directory of checkpoints, so that what is written is newer than all that is there.

    Raises:
        DirectoryInUse: a running job has it.

    After an error in the block a directory that this made is gone again.
    """
    is_new = not os.path.lexists(path)
    directory = CheckpointDirectory(path)
    try:
        yield directory.acquire(JobIdentity.of_this_process(job))
    except BaseException:
        directory.release()
        if is_new:
            shutil.rmtree(path, ignore_errors=True)
        raise
    finally:
        directory.release()
