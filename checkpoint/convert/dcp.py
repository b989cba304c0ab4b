"""Our checkpoints for torch.distributed.checkpoint: `dcp.load(state, storage_reader=FlashStorageReader(directory))`.

The planners are torch's own: DTensors (tensor parallel, FSDP2), plain tensors and objects are loaded in place, on any
number of ranks. Nothing in our files is unpickled; objects go through torch.save in memory because that is how a
planner takes them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from typing import Any

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

from hetstream.checkpoint.errors import UnsupportedState
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
        """What the checkpoint holds, under the names that torch's planners give.

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
            if any(isinstance(leaf, torch.Tensor) for leaf in _tensors_in(value)):
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
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
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
        """Whether this is a directory."""
        return os.path.isdir(checkpoint_id)


def _tensors_in(value: Any) -> Iterator[Any]:
    return (leaf for _, leaf in walk("", value))
