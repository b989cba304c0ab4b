"""Where a record is restored from: a slot in memory, or the files of a checkpoint, as the same `StoredPart`s.

Called by the checkpointer. What it gives may lie in shared memory or in a file, and only until it is closed. A restore
compares with tensors where they lie; what it gives to the program is a copy that the program owns.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
from torch.utils import _pytree

from hetstream.base.errors import HetstreamError
from hetstream.checkpoint.disk.directory import CheckpointDirectory, files_of_host, share_of
from hetstream.checkpoint.disk.rank_file import RankFile
from hetstream.checkpoint.errors import Damaged, DamagedCheckpoint, DamagedSegment, NoCheckpoint, StateMismatch
from hetstream.checkpoint.flash.ranks import Host
from hetstream.checkpoint.memory.segment import Header, Segment, split_metadata
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.record.layout import Entry, Generation, Layout, from_json
from hetstream.checkpoint.record.lineage import OfferedRecord
from hetstream.checkpoint.record.structure import Record, TensorRef, read_origin
from hetstream.checkpoint.record.tree import Foreign, Node, PlainObject, attributes_of, name_of
from hetstream.checkpoint.tensors.copy_plan import copy_in_memory
from hetstream.checkpoint.tensors.leaves import (
    DTYPES,
    Leaves,
    Move,
    bytes_as_tensor,
    dtype_of,
    is_whole,
    make_foreign,
    tensor_of,
    view_of,
)
from hetstream.checkpoint.tensors.shards import Box, Whole, cut, is_inside, names_of, open_parts, overlap_of

# The tensors of a record where they lie: in a slot's memory, or in a mapped file.
#
# A view is made when somebody asks for it: most tensors are copied from their addresses, and ten thousand views take
# longer than their bytes.


class Payload:
    """Memory, and what lies in it.

    Args:
        entries: the tensors.
        data: the memory that their offsets count from. It stays mapped as long as this object does.

    Attributes:
        entries: the tensors.
        begin: the address that their offsets count from.
    """

    def __init__(self, entries: Sequence[Entry], data: memoryview) -> None:
        self.entries = entries
        self._data = data
        self._whole = bytes_as_tensor(data)
        self.begin = self._whole.data_ptr()

    def view(self, index: int) -> torch.Tensor:
        """Return a tensor, uncopied; nobody must write to it."""
        entry = self.entries[index]
        return tensor_of(entry, self._data[entry.offset : entry.offset + entry.num_bytes])


class StoredTensor(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a record, where it lies. A struct, as there may be very many.

    Attributes:
        ref: what the record says of it.
        store: where it lies, and where `own` of it is to be had.
        shape: of the whole tensor, of which this may be one rank's part.
        dtype: as torch knows it.
        address: where its bytes begin, which lie there in row-major order; None: they do not, or are a part only.
    """

    ref: TensorRef
    store: TensorStore
    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int | None

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape} and {self.dtype}"

    @property
    def view(self) -> torch.Tensor:
        """Its values, row-major or strided; they may lie in shared memory."""
        return self.store.view_of(self.ref)

    def read(self, here: torch.Tensor) -> torch.Tensor:
        """Return the values of the part that this rank has of a tensor of the program, whoever saved them.

        Args:
            here: of the same (whole) shape; a DTensor, or a plain one that is all of it.

        Raises:
            StateMismatch: other ranks saved some of them, and their parts are out of reach.
        """
        view = self.view
        if self.ref.shard is None and not hasattr(here, "to_local"):
            return view
        box = _box_of(here)
        own = (self.ref.shard.offsets if self.ref.shard else (0,) * view.ndim), tuple(view.shape)
        if not math.prod(box[1]):
            return view.new_empty(box[1])
        if overlap_of(box, own) == box:
            return cut(view, [here - there for here, there in zip(box[0], own[0], strict=True)], box[1])
        whole = self.store.whole_of(self.ref)
        if whole is None:
            raise StateMismatch(
                f"this rank saved {own[1]} at {own[0]} of {tuple(self.shape)} and has {box[1]} at {box[0]}"
            )
        return whole.read(*box)


@dataclass(frozen=True)
class Values:
    """What an object's `load_state_dict` gets for a tensor that is sharded, here or in the checkpoint.

    Attributes:
        values: of this rank's part; they may lie in shared memory.
        like: the DTensor that they are a part of; None: they are all of it.
    """

    values: torch.Tensor
    like: Any = None

    def own(self) -> torch.Tensor:
        """In memory of the program's own."""
        mine = self.values.clone()
        if self.like is None:
            return mine
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            mine,
            self.like.device_mesh,
            self.like.placements,
            run_check=False,
            shape=self.like.shape,
            stride=self.like.stride(),
        )


class TensorStore:
    """The tensors of one payload, and copies of them.

    Args:
        payload: where they lie.
        whole_of: what all ranks saved of a sharded tensor; None where that is out of reach.

    Attributes:
        payload: where they lie.
    """

    def __init__(self, payload: Payload, *, whole_of: Callable[[TensorRef], Whole | None] = lambda _ref: None) -> None:
        self.payload = payload
        self.whole_of = whole_of
        self._own: dict[int, torch.Tensor] = {}
        self._made: dict[TensorRef, Any] = {}

    def stored(self, ref: TensorRef) -> Any:
        """Return the tensor of a reference, uncopied; byte strings as such.

        Raises:
            DamagedCheckpoint: the reference points outside.
        """
        if ref.kind in ("bytes", "pickle"):
            return self.own(ref)
        entry = self._entry(ref)
        if is_whole(ref) and ref.shard is None:
            return StoredTensor(ref, self, entry.shape, dtype_of(entry), self.payload.begin + entry.offset)
        view = self.view_of(ref)
        if ref.shard and not is_inside((ref.shard.offsets, tuple(view.shape)), ref.shard.global_shape):
            raise DamagedCheckpoint(
                f"the structure describes a part of tensor {entry.name!r} that is not inside it: {ref}"
            )
        return StoredTensor(
            ref, self, tuple(view.shape) if ref.shard is None else ref.shard.global_shape, view.dtype, None
        )

    def view_of(self, ref: TensorRef) -> torch.Tensor:
        """Return the tensor of a reference, uncopied.

        Raises:
            DamagedCheckpoint: the reference points outside.
        """
        return view_of(ref, self._entry(ref), self.payload.view(ref.entry))

    def own(self, ref: TensorRef) -> Any:
        """Return what the program saved, in memory of its own; tensors that shared memory share it again."""
        made = self._made.get(ref)
        if made is None:
            made = self._made[ref] = self._make(ref)
        return made

    def _entry(self, ref: TensorRef) -> Entry:
        entries = self.payload.entries
        if not 0 <= ref.entry < len(entries):
            raise DamagedCheckpoint(f"the structure refers to entry {ref.entry} of {len(entries)}")
        return entries[ref.entry]

    def _make(self, ref: TensorRef) -> Any:
        entry = self._entry(ref)
        if ref.entry not in self._own:
            self._own[ref.entry] = self.payload.view(ref.entry).clone()
        tensor = view_of(ref, entry, self._own[ref.entry])
        if ref.is_permuted and ref.strides is not None:
            tensor = torch.empty_strided(tensor.shape, ref.strides, dtype=tensor.dtype).copy_(tensor)
        if ref.kind in ("parameter", "frozen_parameter"):
            return torch.nn.Parameter(tensor, requires_grad=ref.kind == "parameter")
        if ref.kind == "numpy":
            return tensor.numpy()
        if ref.kind in ("bytes", "pickle"):
            return tensor.numpy().tobytes()
        return tensor.requires_grad_() if ref.kind == "grad" else tensor


@dataclass(frozen=True)
class StoredPart:
    """A record, or a part of one, with its tensors: what a slot or a file holds.

    Attributes:
        record: the structure.
        store: the tensors.
    """

    record: Record
    store: TensorStore

    def load(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """Return the state as plain values and tensors of the program's own.

        Raises:
            DamagedCheckpoint: the structure breaks its form.
            StateMismatch: it needs pickle, or a type that the program has not registered.
        """
        return self.record.decode(self.store.own, make_foreign(allow_pickle=allow_pickle))

    def saved(self, *, allow_pickle: bool = False, without: Collection[str] = ()) -> dict[str, Any]:
        """Return the state with tensors where they lie, for `StateComparison`; raises as `load`.

        Args:
            allow_pickle: see `load`.
            without: top-level keys that nobody needs.
        """
        make = make_foreign(allow_pickle=allow_pickle)
        # What is made of several tensors gets tensors of its own.
        return self.record.decode(
            self.store.stored, lambda tag, body, again: make(tag, body, lambda node: owned(again(node))), without
        )


def owned(value: Any, here: Any = None) -> Any:
    """Return what `StoredPart.saved` gave, with tensors of the program's own.

    Args:
        value: from a checkpoint, where all objects are plain data.
        here: what the program has in this place: an object with the same fields is made of its class. A file does not
            choose a class.
    """
    if isinstance(value, StoredTensor):
        return value.store.own(value.ref)
    if isinstance(value, Values):
        return value.own()
    if isinstance(value, Mapping):
        places = here if isinstance(here, Mapping) else {}
        entries = {key: owned(item, places.get(key)) for key, item in value.items()}
        keys = owned_items(value, places)
        if keys is None:
            return like_mapping(value, entries)
        return like_mapping(value, dict(zip(keys, entries.values(), strict=True)), only=())
    if isinstance(value, list):
        return [owned(*pair) for pair in _beside(value, here)]
    if isinstance(value, tuple):
        fields = getattr(type(value), "_fields", None)
        is_alike = fields is not None and isinstance(here, tuple) and getattr(type(here), "_fields", None) == fields
        return like_tuple(here if is_alike else value, [owned(*pair) for pair in _beside(value, here)])
    if isinstance(value, deque):
        return deque((owned(*pair) for pair in _beside(value, here)), value.maxlen)
    if isinstance(value, set | frozenset):
        items = owned_items(value, here if isinstance(here, set | frozenset) else ())
        return value if items is None else type(value)(items)
    return _owned_object(value, here) if isinstance(value, PlainObject) else value


def _beside(values: Iterable[Any], here: Any) -> Iterator[tuple[Any, Any]]:
    """Values, and what the program has in the place of each; behind its last one, that."""
    places = list(here) if isinstance(here, list | tuple | deque) else []
    for index, value in enumerate(values):
        yield value, places[min(index, len(places) - 1)] if places else None


def owned_items(values: Iterable[Any], here: Iterable[Any]) -> list[Any] | None:
    """Items of a set, or keys of a mapping: an object is made of the class that the program's items of its form have,
    if they are all of one class. None: there is nothing to be made, as is usual."""
    if not any(isinstance(value, PlainObject | tuple | frozenset) for value in values):
        return None
    samples: dict[Any, Any] = {}
    for item in here:
        form = _form_of(item)
        if type(samples.setdefault(form, item)) is not type(item):
            samples[form] = None
    return [owned(value, samples.get(_form_of(value))) for value in values]


def _form_of(value: Any) -> Any:
    """What two objects have in common that may be of one class."""
    fields = fields_of(value)
    if fields:
        return frozenset(fields)
    return getattr(type(value), "_fields", len(value)) if isinstance(value, tuple) else type(value)


def _owned_object(value: PlainObject, here: Any) -> Any:
    fields = fields_of(value)
    own = fields_of(here)
    if own and {*fields} == {*own}:
        return like_dataclass(here, {name: owned(item, own[name]) for name, item in fields.items()})
    children = children_of(value, here)
    if children is not None:
        node_type = _pytree.SUPPORTED_NODES[type(here)]
        places, context = node_type.flatten_fn(here)
        return node_type.unflatten_fn(owned(children, list(places)), owned(value.context, context))
    return PlainObject(**{name: owned(item) for name, item in fields.items()})


def fields_of(value: Any) -> dict[str, Any]:
    """Return the attributes of a dataclass, or of what was saved of one; none of anything else."""
    if isinstance(value, PlainObject):
        return vars(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return attributes_of(value)
    return {}


def children_of(saved: Any, here: Any) -> list[Any] | None:
    """Return the children of what was saved of a type that is registered with torch's pytree, if the program has an
    object of that type in this place; else None.
    """
    kind = type(here)
    if kind not in _pytree.SUPPORTED_NODES:
        return None
    if type(saved) is kind:
        return list(_pytree.SUPPORTED_NODES[kind].flatten_fn(saved)[0])
    fields = vars(saved) if isinstance(saved, PlainObject) else {}
    children = fields.get("children")
    is_alike = {*fields} == {"type", "context", "children"} and fields["type"] == name_of(kind)
    return children if is_alike and isinstance(children, list) else None


def like_mapping(like: Mapping[Any, Any], items: dict[Any, Any], only: Collection[Any] | None = None) -> Any:
    made: Any = copy.copy(like)
    for key in like if only is not None else ():
        if key not in only:  # type: ignore[operator]
            del made[key]
    for key, value in items.items():  # not `update`: a Counter's adds
        made[key] = value
    return made


def like_tuple(like: tuple[Any, ...], items: list[Any]) -> Any:
    return tuple.__new__(type(like), items) if hasattr(type(like), "_fields") else type(like)(items)


def like_dataclass(like: Any, fields: dict[str, Any]) -> Any:
    made = object.__new__(type(like))
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _box_of(here: Any) -> Box:
    """Which part of a tensor this rank has."""
    if not hasattr(here, "to_local"):
        return (0,) * here.ndim, tuple(here.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(here.shape, here.device_mesh, here.placements)
    return tuple(offsets), tuple(shape)


# What is to be copied into the tensors of a program, noted first and copied at once.

# Kinds of references whose values are made anew.
_NOT_TENSORS = ("numpy", "bytes", "pickle")
# dtype, shape, strides, offset and shard of a reference to an entry as it lies there, which is all of a tensor.
_WHOLE = {(None, None, None, 0, None)}
_MAIN_MEMORY = torch.device("cpu")


@dataclass
class Copies:
    """What is to be copied into the tensors of a program, once all of it is known."""

    _moves: list[Move] = field(default_factory=list)
    _moved: list[torch.Tensor] = field(default_factory=list)
    _copied: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, here: torch.Tensor, saved: torch.Tensor | StoredTensor) -> None:
        """Note a tensor of the program, and what it shall hold."""
        if not isinstance(saved, StoredTensor):
            self._copied.append((here, saved))
        elif saved.address is None or not _is_plain(here):
            self._copied.append((here, saved.view))
        else:
            self.add_move(here, (here.data_ptr(), saved.address, here.nbytes))

    def add_move(self, here: torch.Tensor, move: Move) -> None:
        """Note a tensor in main memory, row-major and without holes, and where its bytes come from."""
        self._moves.append(move)
        self._moved.append(here)

    def take(self, others: Copies) -> None:
        """Note all that others have noted."""
        self._moves += others._moves
        self._moved += others._moved
        self._copied += others._copied

    @torch.no_grad()
    def run(self) -> None:
        """Copy. Autograd is told that the tensors have changed."""
        in_memory: list[tuple[torch.Tensor, torch.Tensor]] = []
        elsewhere: list[tuple[torch.Tensor, torch.Tensor]] = []
        for here, saved in self._copied:
            if here.layout is not torch.strided:
                here.copy_(saved)  # itself: it may get more or fewer values
            elif here.numel() and any(
                stride == 0 and size > 1 for stride, size in zip(here.stride(), here.shape, strict=True)
            ):
                # An expanded tensor cannot be written to as it is; its memory can.
                index = tuple(0 if stride == 0 else slice(None) for stride in here.stride())
                here[index].copy_(saved[index])
            elif here.is_conj() or here.is_neg():
                here.copy_(saved)
            elif here.is_cpu and saved.is_cpu:
                in_memory.append((here.detach(), saved))
            else:
                elsewhere.append((here.detach(), saved))
        copy_in_memory([here for here, _ in in_memory], [saved for _, saved in in_memory], self._moves)
        torch.autograd.graph.increment_version([*self._moved, *(here for here, _ in in_memory)])
        if elsewhere:
            torch._foreach_copy_([here for here, _ in elsewhere], [saved for _, saved in elsewhere])


def copies_alike(keys: list[str], leaves: Leaves, part: StoredPart) -> Copies | None:
    """Return the copies below some top-level keys; None if they are not alike, or not as simple as that.

    Compared are lists, and not tensor by tensor: there may be very many.
    """
    texts = [msgspec.json.encode([tree[key] for key in keys]) for tree in (leaves.tree, part.record.tree)]
    numbers = [number for key in keys for number in leaves.plain[key]]
    # Equal texts hold equal numbers.
    if texts[0] != texts[1] or (numbers and max(numbers) >= len(part.record.tensors)):
        return None
    refs = [part.record.tensors[number] for number in numbers]
    known = part.store.payload.entries
    if any(ref.entry >= len(known) for ref in refs):
        return None
    here = leaves.signature
    views = {(ref.dtype, ref.shape, ref.strides, ref.offset_bytes, ref.shard) for ref in refs}
    kinds = {ref.kind for ref in refs} | {here.kinds[number] for number in numbers}
    if not views <= _WHOLE or not kinds.isdisjoint(_NOT_TENSORS):
        return None
    entries = [known[ref.entry] for ref in refs]
    dtypes, shapes = [here.dtypes[number] for number in numbers], [here.shapes[number] for number in numbers]
    if shapes != [entry.shape for entry in entries] or dtypes != [DTYPES.get(entry.dtype) for entry in entries]:
        return None
    begin = part.store.payload.begin
    tensors = [leaves.tensors[number] for number in numbers]
    moves = [
        (here.addresses[number], begin + entry.offset, entry.num_bytes)
        for number, entry in zip(numbers, entries, strict=True)
    ]
    if len({move[0] for move in moves}) < len({move[:2] for move in moves if move[2]}):
        return None  # tensors that share memory here, and did not when they were saved
    are_plain = [
        here.are_contiguous[number] and not here.are_lazy[number] and here.devices[number] == _MAIN_MEMORY
        for number in numbers
    ]
    if all(are_plain):
        return Copies(moves, tensors)
    copies = Copies()
    for is_plain, tensor, move, ref, entry, dtype in zip(are_plain, tensors, moves, refs, entries, dtypes, strict=True):
        if is_plain:
            copies.add_move(tensor, move)
        else:
            copies.add(tensor, StoredTensor(ref, part.store, entry.shape, dtype, move[1]))
    return copies


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values lie in main memory as they are, row-major and without holes."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


# One waits for the disk while another compares; many ranks of a host read at the same time.
_MAX_READERS = 8


class MemorySource:
    """The generations in a rank's own memory.

    Args:
        store: of the rank.
        host: whose other ranks may have what is equal on all.

    Attributes:
        host: see above; another one when a store of it has been made anew.
    """

    def __init__(self, store: Store, host: Host) -> None:
        self._store = store
        self.host = host
        self._read: tuple[Header, Layout, Record] | None = None

    def offered(self) -> tuple[list[OfferedRecord], list[str]]:
        """Return what this rank can restore from its memory, and what is there and cannot be used, in words."""
        found, problems = [], []
        for content in self._store.held():
            try:
                with self._store.read(content) as segment:
                    origin = read_origin(split_metadata(segment.metadata)[1])
            except Damaged as error:
                problems.append(str(error))
            else:
                if origin.rank == self._store.identity.rank:
                    found.append(OfferedRecord(content.header.generation, origin.world_size, origin.shared_elsewhere))
        return found, problems

    def read_ahead(self) -> None:
        """Read what the newest generation says of itself, for a thread that runs while the program builds its model."""
        content = next(iter(self._store.held()), None)
        if content:
            with contextlib.suppress(Damaged, OSError), self._store.read(content) as segment:
                self._read = segment.header, *_described(segment)

    @contextlib.contextmanager
    def open(self, generation: Generation, sharer: int | None = None) -> Iterator[list[StoredPart]]:
        """A generation; it is not overwritten meanwhile.

        Args:
            generation: which.
            sharer: the rank of this host that has the shared keys for this one.

        Raises:
            NoCheckpoint: it is not there.
            Damaged: it is not what was published.
        """
        content = next((found for found in self._store.held() if found.header.generation == generation), None)
        if content is None:
            raise NoCheckpoint(f"{self._store.path} has no {generation} any more")
        with contextlib.ExitStack() as held:
            segment = held.enter_context(self._store.read(content))
            # Equal headers have equal checksums of what was read, and `Store.read` has just compared them.
            ahead, self._read = self._read, None
            layout, record = ahead[1:] if ahead and ahead[0] == segment.header else _described(segment)
            parts = [StoredPart(record, TensorStore(Payload(layout.entries, segment.payload)))]
            if sharer is not None:
                parts.append(held.enter_context(_open_shared(StoreFiles(self.host.stores[sharer]), generation)))
            yield parts


@contextlib.contextmanager
def _open_shared(files: StoreFiles, generation: Generation) -> Iterator[StoredPart]:
    """The shared keys in the store of another rank, which may run or not."""
    try:
        files.check_owner()
    except HetstreamError as error:
        raise NoCheckpoint(f"{generation}: what is equal on all ranks is out of reach: {error}") from error
    content = next((found for found in files.complete() if found.header.generation == generation), None)
    if content is None:
        raise NoCheckpoint(f"{files.path} has no {generation} any more, which holds what is equal on all ranks")
    with content.open() as segment:
        layout, record = _described(segment)
        shared, indices = record.only(record.shared)
        yield StoredPart(shared, TensorStore(Payload([layout.entries[index] for index in indices], segment.payload)))


def _described(segment: Segment) -> tuple[Layout, Record]:
    layout_json, structure = split_metadata(segment.metadata)
    layout = from_json(layout_json)
    payload_bytes = segment.header.payload_bytes
    if layout.digest != segment.header.layout_digest or layout.payload_bytes > payload_bytes:
        raise DamagedSegment(f"{segment.path}: its layout is not that of the {payload_bytes} bytes of its payload")
    return layout, Record.read(structure)


class DiskSource:
    """The files of a checkpoint that one rank restores from. All ranks of a host compare them with their checksums
    together: `compare` on each of them, then `open`. The checkpoint is not removed meanwhile.

    Where the directory is read-only, nothing keeps the checkpoint, and each rank compares what it needs by itself.

    Args:
        directory: of checkpoints.
        generation: which.
        rank: of now. Where fewer ranks saved, it takes the part of one of those.
        num_ranks: how many there are now.
        num_saved: how many saved.
        readers: the ranks of this host that restore from disk, ascending.
        held: lets the checkpoint and its files go.
    """

    def __init__(
        self,
        directory: CheckpointDirectory,
        generation: Generation,
        rank: int,
        num_ranks: int,
        num_saved: int,
        readers: Sequence[int],
        held: contextlib.ExitStack,
    ) -> None:
        self._directory = directory
        self._generation = generation
        self._rank = rank
        self._own = rank % num_saved
        self._readers = readers
        self._held = held
        # What may be removed meanwhile has to be compared while it is copied, by each rank for itself.
        self._has_all = num_ranks != num_saved and not directory.read_only
        self._is_alone = directory.read_only or (len(readers) == 1 and num_ranks == num_saved)
        self._files = sorted({0, self._own}) if self._is_alone else files_of_host(readers, num_ranks, num_saved)
        self._checkpoint = held.enter_context(directory.hold(generation, self._files))

    def compare(self) -> None:
        """Compare this rank's share.

        Raises:
            Damaged: it is not what was written.
        """
        if not self._is_alone:
            counts = [(file, len(self._checkpoint.manifests[file].checksums)) for file in self._files]
            share = share_of(counts, self._readers.index(self._rank), len(self._readers))
            self._checkpoint.compare(share, _num_threads())

    def open(self) -> list[StoredPart]:
        """Return what this rank needs, when all have compared theirs.

        Raises:
            Damaged: it is not what was written.
        """
        own = self._open(self._own)
        whole_of = _wholes(self._directory, self._generation, own.record, self._held, is_compared=self._has_all)
        parts = [_part(own, own.record, whole_of=whole_of)]
        if self._own != 0:
            first = self._open(0)
            shared, indices = first.record.only(first.record.shared)
            parts.append(_part(first, shared, indices))
        return parts

    def _open(self, rank: int) -> RankFile:
        file = self._checkpoint.read(rank, num_threads=_num_threads(), is_compared=not self._is_alone)
        return self._held.enter_context(file)


def _num_threads() -> int:
    return min(_MAX_READERS, max(2, len(os.sched_getaffinity(0))))


WholeOf = Callable[[TensorRef], Whole | None]


def _wholes(
    directory: CheckpointDirectory,
    generation: Generation,
    record: Record,
    held: contextlib.ExitStack,
    *,
    is_compared: bool,
) -> WholeOf:
    """What all ranks saved of the sharded tensors of one; their files are opened when the first is asked for."""

    @functools.cache
    def found() -> dict[TensorRef, Whole]:
        path = directory.path / generation.directory_name
        parts = open_parts(path, read_only=directory.read_only, is_compared=is_compared)
        wholes = held.enter_context(parts).wholes
        names = names_of(record)
        return {
            ref: wholes[names[index]]
            for index, ref in enumerate(record.tensors)
            if ref.shard and names[index] in wholes
        }

    return lambda ref: found().get(ref)


def _part(
    file: RankFile, record: Record, indices: list[int] | None = None, whole_of: WholeOf = lambda _ref: None
) -> StoredPart:
    entries = file.entries if indices is None else [file.entries[index] for index in indices]
    return StoredPart(record, TensorStore(Payload(entries, file.data), whole_of=whole_of))


# Whether a rank's file can be restored: it is decoded as a restore decodes it. Called by `hetstream ckpt verify`.


def check_readable(file: RankFile) -> None:
    """Decode all that a restore decodes; its bytes are those that were written, and may say nothing sensible. What was
    pickled is not unpickled: that runs what it says.

    Raises:
        DamagedCheckpoint: it breaks its form.
    """
    make = make_foreign(allow_pickle=False)

    def foreign(tag: str, body: Node, again: Callable[[Node], Any]) -> Any:
        return Foreign(tag, body) if tag == "$pickle" else make(tag, body, lambda node: owned(again(node)))

    file.record.decode(TensorStore(Payload(file.entries, file.data)).stored, foreign)
