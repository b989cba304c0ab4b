"""From a record back into the program's own objects: everything is compared first, then everything is written.

Called by the checkpointer. A state that does not fit is refused with all its differences, and nothing of the program
is touched. Nothing that is given to the program lies in shared memory, unless it asks for that.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from hetstream.checkpoint.errors import DamagedCheckpoint, StateMismatch
from hetstream.checkpoint.flash.restore.payload import Payload
from hetstream.checkpoint.flash.restore.shards import Box, Whole, cut, is_inside, overlap_of
from hetstream.checkpoint.flash.restore.wrappers import advice
from hetstream.checkpoint.flash.save.device import copy_in_memory
from hetstream.checkpoint.flash.tensors import DTYPES, Leaves, Move, dtype_of, is_whole, make_foreign, view_of
from hetstream.checkpoint.record.layout import Entry
from hetstream.checkpoint.record.structure import Record, TensorRef

_log = logging.getLogger(__name__)

_MISSING, _UNEXPECTED = ": missing in the checkpoint", ": unexpected, only in the checkpoint"
# More of them would hide the cause.
_MAX_DIFFERENCES_TOLD = 40

Fill = Callable[[], Any]
# Kinds of references whose values are made anew.
_NOT_TENSORS = ("numpy", "bytes", "pickle")
# dtype, shape, strides, offset and shard of a reference to an entry as it lies there, which is all of a tensor.
_WHOLE = {(None, None, None, 0, None)}
_MAIN_MEMORY = torch.device("cpu")


class Stored(msgspec.Struct, frozen=True, gc=False):
    """A tensor of a record, where it lies. A struct, as there may be very many.

    Attributes:
        ref: what the record says of it.
        stock: where it lies, and where `own` of it is to be had.
        shape: of the whole tensor, of which this may be one rank's part.
        dtype: as torch knows it.
        address: where its bytes begin, which lie there in row-major order; None: they do not, or are a part only.
    """

    ref: TensorRef
    stock: TensorStore
    shape: tuple[int, ...]
    dtype: torch.dtype
    address: int | None

    def __str__(self) -> str:
        return f"a tensor of shape {self.shape} and {self.dtype}"

    @property
    def view(self) -> torch.Tensor:
        """Its values, row-major or strided; they may lie in shared memory."""
        return self.stock.view_of(self.ref)

    def read(self, here: torch.Tensor) -> torch.Tensor:
        """The values of the part that this rank has of a tensor of the program, whoever saved them.

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
        whole = self.stock.whole_of(self.ref)
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
        """The tensor of a reference, uncopied; byte strings as such.

        Raises:
            DamagedCheckpoint: the reference points outside.
        """
        if ref.kind in ("bytes", "pickle"):
            return self.own(ref)
        entry = self._entry(ref)
        if is_whole(ref) and ref.shard is None:
            return Stored(ref, self, entry.shape, dtype_of(entry), self.payload.begin + entry.offset)
        view = self.view_of(ref)
        if ref.shard and not is_inside((ref.shard.offsets, tuple(view.shape)), ref.shard.global_shape):
            raise DamagedCheckpoint(
                f"the structure describes a part of tensor {entry.name!r} that is not inside it: {ref}"
            )
        return Stored(ref, self, tuple(view.shape) if ref.shard is None else ref.shard.global_shape, view.dtype, None)

    def view_of(self, ref: TensorRef) -> torch.Tensor:
        """The tensor of a reference, uncopied.

        Raises:
            DamagedCheckpoint: the reference points outside.
        """
        return view_of(ref, self._entry(ref), self.payload.view(ref.entry))

    def own(self, ref: TensorRef) -> Any:
        """What the program saved, in memory of its own; tensors that shared memory share it again."""
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
class Part:
    """A record, or a part of one, with its tensors: what a slot or a file holds.

    Attributes:
        record: the structure.
        stock: the tensors.
    """

    record: Record
    stock: TensorStore

    def load(self, *, allow_pickle: bool = False) -> dict[str, Any]:
        """The state as plain values and tensors of the program's own.

        Raises:
            DamagedCheckpoint: the structure breaks its form.
            StateMismatch: it needs pickle, or a type that the program has not registered.
        """
        return self.record.decode(self.stock.own, make_foreign(allow_pickle=allow_pickle))

    def saved(self, *, allow_pickle: bool = False, without: Collection[str] = ()) -> dict[str, Any]:
        """The state with tensors where they lie, for `Restore`; raises as `load`.

        Args:
            allow_pickle: see `load`.
            without: top-level keys that nobody needs.
        """
        make = make_foreign(allow_pickle=allow_pickle)
        # What is made of several tensors gets tensors of its own.
        return self.record.decode(
            self.stock.stored, lambda tag, body, again: make(tag, body, lambda node: owned(again(node))), without
        )


def owned(value: Any) -> Any:
    """What `Part.saved` gave, with tensors of the program's own."""
    if isinstance(value, Stored):
        return value.stock.own(value.ref)
    if isinstance(value, Values):
        return value.own()
    if isinstance(value, Mapping):
        return _like_mapping(value, {key: owned(one) for key, one in value.items()})
    if isinstance(value, list):
        return [owned(one) for one in value]
    if isinstance(value, tuple):
        return _like_tuple(value, [owned(one) for one in value])
    if isinstance(value, deque):
        return deque((owned(one) for one in value), value.maxlen)
    if isinstance(value, SimpleNamespace):
        return SimpleNamespace(**{key: owned(one) for key, one in vars(value).items()})
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _like_dataclass(value, {one.name: owned(getattr(value, one.name)) for one in dataclasses.fields(value)})
    return value


def _told(differences: Sequence[str]) -> str:
    shown = differences[:_MAX_DIFFERENCES_TOLD]
    more = [f"and {len(differences) - len(shown)} more"] if len(differences) > len(shown) else []
    return (
        f"the checkpoint does not fit this program's state, {len(differences)} difference(s): "
        + "; ".join([*shown, *more])
        + ". Nothing was restored. Restore with strict=False to take what fits, or load() it and convert it"
        + advice(_ending_with(_MISSING, differences), _ending_with(_UNEXPECTED, differences))
    )


def _ending_with(ending: str, differences: Sequence[str]) -> set[str]:
    """The places of such differences."""
    return {one.removesuffix(ending) for one in differences if one.endswith(ending)}


def _like_mapping(like: Mapping[Any, Any], items: dict[Any, Any], only: Collection[Any] | None = None) -> Any:
    made: Any = copy.copy(like)
    for key in like if only is not None else ():
        if key not in only:  # type: ignore[operator]
            del made[key]
    for key, value in items.items():  # not `update`: a Counter's adds
        made[key] = value
    return made


def _like_tuple(like: tuple[Any, ...], items: list[Any]) -> Any:
    return tuple.__new__(type(like), items) if hasattr(type(like), "_fields") else type(like)(items)


def _like_dataclass(like: Any, fields: dict[str, Any]) -> Any:
    made = object.__new__(type(like))
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _has_tensor(value: Any) -> bool:
    if isinstance(value, Stored | torch.Tensor):
        return True
    if isinstance(value, Mapping):
        return any(_has_tensor(one) for one in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return any(_has_tensor(one) for one in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return any(_has_tensor(getattr(value, one.name)) for one in dataclasses.fields(value))
    return _is_stateful(value)


def _is_stateful(value: Any) -> bool:
    kind = type(value)
    return callable(getattr(kind, "state_dict", None)) and callable(getattr(kind, "load_state_dict", None))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, Mapping | list | tuple) and not value)


@dataclass
class Copies:
    """What is to be copied into the tensors of a program, once all of it is known."""

    _moves: list[Move] = field(default_factory=list)
    _moved: list[torch.Tensor] = field(default_factory=list)
    _copied: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def add(self, here: torch.Tensor, saved: torch.Tensor | Stored) -> None:
        """Note a tensor of the program, and what it shall hold."""
        if not isinstance(saved, Stored):
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
            if here.numel() and any(
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


@dataclass
class Restore:
    """One restore into a program's state: what differs, and what is to be done.

    `compare` it first, and `run` it if nothing differs, or if the rest shall be restored nevertheless.

    Attributes:
        differences: in words, one for each place.
    """

    differences: list[str] = field(default_factory=list)
    _copies: Copies = field(default_factory=Copies)
    _objects: list[tuple[str, Any, Any]] = field(default_factory=list)

    _fill: Fill = lambda: None

    def take_alike(self, state: Mapping[str, Any], leaves: Leaves, part: Part) -> set[str]:
        """Compare all that is equal but for the values of its tensors, by text and not value by value.

        Args:
            state: as it is given to `save`.
            leaves: the same taken apart.
            part: of what was saved.

        Returns:
            The top-level keys that `compare` may leave out.
        """
        keys = [key for key in state if key in leaves.plain and key in part.record.tree]
        return self._take_alike(keys, leaves, part)

    def _take_alike(self, keys: list[str], leaves: Leaves, part: Part) -> set[str]:
        if not keys:
            return set()
        copies = _copies_alike(keys, leaves, part)
        if copies is not None:
            self._copies.take(copies)
            return {*keys}
        if len(keys) == 1:
            return set()
        half = len(keys) // 2
        return self._take_alike(keys[:half], leaves, part) | self._take_alike(keys[half:], leaves, part)

    def compare(self, state: MutableMapping[str, Any], saved: Mapping[str, Any], alike: Collection[str] = ()) -> None:
        """Look where a state and what was saved of it differ. Changes nothing.

        Args:
            state: as it is given to `save`. Its tensors will keep their identity; objects get `load_state_dict`.
            saved: of `Part.saved`.
            alike: keys of the state that `take_alike` has compared.
        """
        self._fill = self.match_mapping("", state, saved, alike)

    def mismatch(self) -> StateMismatch | None:
        """The differences as an error, or None if there are none."""
        return StateMismatch(_told(self.differences)) if self.differences else None

    # Comparing

    def match(self, path: str, here: Any, saved: Any) -> Fill:
        """Compare one place; gives what its value will be when it is filled."""
        if isinstance(here, torch.Tensor):
            return self._match_tensor(path, here, saved)
        if _is_stateful(here):
            return self._match_object(path, here, saved)
        if isinstance(saved, Stored | np.ndarray) and isinstance(here, np.ndarray):
            return self._match_array(path, here, saved)
        if _is_empty(here):
            return lambda: owned(saved)
        if isinstance(here, MutableMapping) and isinstance(saved, Mapping):
            return self.match_mapping(path, here, saved)
        if isinstance(here, list | tuple) and isinstance(saved, list | tuple):
            return self._match_sequence(path, here, saved)
        if dataclasses.is_dataclass(here) and not isinstance(here, type):
            return self._match_dataclass(path, here, saved)
        if type(here) in _pytree.SUPPORTED_NODES and type(here) is type(saved):
            return self._match_node(path, here, saved)
        if _has_tensor(here) or (_has_tensor(saved) and not isinstance(here, np.ndarray)):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, {_kind(here)} here")
        return lambda: owned(saved)

    def match_mapping(
        self, path: str, here: MutableMapping[Any, Any], saved: Mapping[Any, Any], alike: Collection[Any] = ()
    ) -> Fill:
        """Compare two mappings key by key. Those without any tensor are plain data: what was saved replaces them."""
        prefix = f"{path}." if path else ""
        missing = [key for key in here if key not in saved and key not in alike]
        unexpected = [key for key in saved if key not in here]
        is_plain = (missing or unexpected) and path and not _has_tensor(here) and not _has_tensor(saved)
        if not is_plain:
            self.differences += [f"{prefix}{key}{_MISSING}" for key in missing]
            self.differences += [f"{prefix}{key}{_UNEXPECTED}" for key in unexpected]
        fills = {key: self.match(f"{prefix}{key}", here[key], saved[key]) for key in here if key in saved}

        def fill() -> Any:
            filled = {key: one() for key, one in fills.items()}
            if is_plain:
                filled = {key: filled[key] if key in filled else owned(saved[key]) for key in saved}
                here.clear()
            for key, value in filled.items():
                here[key] = value
            return here

        return fill

    def _match_sequence(self, path: str, here: Sequence[Any], saved: Sequence[Any]) -> Fill:
        if len(here) != len(saved):
            if _has_tensor(here) or _has_tensor(saved):
                self.differences.append(f"{path}: {len(saved)} item(s) in the checkpoint, {len(here)} here")
            return lambda: owned(saved)
        fills = [self.match(f"{path}.{index}", *pair) for index, pair in enumerate(zip(here, saved, strict=True))]

        def fill() -> Any:
            filled = [one() for one in fills]
            if isinstance(here, list):
                here[:] = filled
                return here
            is_same = all(new is old for new, old in zip(filled, here, strict=True))
            return here if is_same else _like_tuple(here, filled)  # type: ignore[arg-type]

        return fill

    def _match_dataclass(self, path: str, here: Any, saved: Any) -> Fill:
        names = [one.name for one in dataclasses.fields(here)]
        lacking = [name for name in names if not hasattr(saved, name)]
        if lacking:
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint has no {', '.join(lacking)}")
            return lambda: here
        fills = {name: self.match(f"{path}.{name}", getattr(here, name), getattr(saved, name)) for name in names}

        def fill() -> Any:
            filled = {name: one() for name, one in fills.items()}
            if all(filled[name] is getattr(here, name) for name in names):
                return here
            if here.__dataclass_params__.frozen:
                return _like_dataclass(here, filled)
            for name, value in filled.items():
                setattr(here, name, value)
            return here

        return fill

    def _match_node(self, path: str, here: Any, saved: Any) -> Fill:
        definition = _pytree.SUPPORTED_NODES[type(here)]
        children, context = definition.flatten_fn(here)
        old, _ = definition.flatten_fn(saved)
        fill = self._match_sequence(path, list(children), list(old))
        return lambda: definition.unflatten_fn(fill(), context)

    def _match_tensor(self, path: str, here: torch.Tensor, saved: Any) -> Fill:
        if isinstance(saved, torch.Tensor):  # made of parts, such as a sparse one
            if self._compare(path, here, saved.shape, saved.dtype):
                self._copies.add(here, saved)
            return lambda: here
        if not isinstance(saved, Stored):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, {_kind(here)} here")
            return lambda: here
        if self._compare(path, here, saved.shape, saved.dtype):
            self._copy(path, here, saved)
        return lambda: here

    def _copy(self, path: str, here: torch.Tensor, saved: Stored) -> None:
        """Note that a tensor is to be copied."""
        is_part = hasattr(here, "to_local")
        if saved.address is not None and not is_part:
            self._copies.add(here, saved)
            return
        values = self._read(path, here, saved)
        if values is not None:
            self._copies.add(here.to_local() if is_part else here, values)  # type: ignore[attr-defined]

    def _read(self, path: str, here: torch.Tensor, saved: Stored) -> torch.Tensor | None:
        try:
            return saved.read(here)
        except StateMismatch as error:
            self.differences.append(f"{path}: {error}")
            return None

    def _for_object(self, path: str, here: Any, saved: Any) -> Any:
        """What an object's `load_state_dict` gets for a tensor of its own."""
        is_part = isinstance(here, torch.Tensor) and hasattr(here, "to_local")
        if not isinstance(saved, Stored) or not (is_part or saved.ref.shard) or saved.shape != here.shape:
            return saved
        values = self._read(path, here, saved)
        return saved if values is None else Values(values, here if is_part else None)

    def _compare(self, path: str, here: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        if here.shape != shape:
            self.differences.append(f"{path}: shape {tuple(shape)} in the checkpoint, {tuple(here.shape)} here")
        if here.dtype != dtype:
            self.differences.append(f"{path}: dtype {dtype} in the checkpoint, {here.dtype} here")
        return here.shape == shape and here.dtype == dtype

    def _match_array(self, path: str, here: np.ndarray[Any, Any], saved: Stored | np.ndarray[Any, Any]) -> Fill:
        values = saved.view.numpy() if isinstance(saved, Stored) else saved
        if here.shape != values.shape or here.dtype != values.dtype:
            self.differences.append(
                f"{path}: array of shape {values.shape} and {values.dtype} in the checkpoint, {here.shape} and "
                f"{here.dtype} here"
            )
            return lambda: here
        if not here.flags.writeable:
            return lambda: owned(saved)

        def fill() -> Any:
            np.copyto(here, values)
            return here

        return fill

    def _match_object(self, path: str, here: Any, saved: Any) -> Fill:
        if isinstance(here, torch.nn.Module) and isinstance(saved, Mapping):
            fitting = self._compare_module(path, here, saved)
            now = here.state_dict()
            if _is_pristine(here):
                for key in fitting:
                    if isinstance(saved[key], Stored):
                        self._copy(f"{path}.{key}", now[key], saved[key])
            else:
                parts = {key: self._for_object(f"{path}.{key}", now[key], saved[key]) for key in fitting}
                self._objects.append((path, here, _like_mapping(saved, parts, only=fitting)))
        elif not isinstance(here, torch.optim.Optimizer):
            self._objects.append((path, here, saved))
        elif self._compare_optimizer(path, here, saved):
            self._objects.append((path, here, self._for_optimizer(path, here, saved)))
        return lambda: here

    def _for_optimizer(self, path: str, here: torch.optim.Optimizer, saved: Any) -> Any:
        """Its state, sharded as its parameters are now; its own state may be empty yet."""
        names = [name for group in saved["param_groups"] for name in group["params"]]
        params = dict(zip(names, (one for group in here.param_groups for one in group["params"]), strict=True))
        state = saved.get("state")
        if not isinstance(state, Mapping):
            return saved
        made = {
            name: _like_mapping(
                values,
                {key: self._for_object(f"{path}.state.{name}.{key}", params[name], one) for key, one in values.items()},
            )
            for name, values in state.items()
            if name in params and isinstance(values, Mapping)
        }
        return _like_mapping(saved, {"state": _like_mapping(state, made)})

    def _compare_module(self, path: str, here: torch.nn.Module, saved: Mapping[str, Any]) -> set[str]:
        """Which keys fit."""
        now = here.state_dict()
        self.differences += [f"{path}.{key}{_MISSING}" for key in now if key not in saved]
        self.differences += [f"{path}.{key}{_UNEXPECTED}" for key in saved if key not in now]
        return {key for key, tensor in now.items() if key in saved and self._fits(f"{path}.{key}", tensor, saved[key])}

    def _fits(self, path: str, here: Any, saved: Any) -> bool:
        if not isinstance(here, torch.Tensor) or is_lazy(here):
            return True
        if not isinstance(saved, Stored):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, {_kind(here)} here")
            return False
        return self._compare(path, here, saved.shape, saved.dtype)

    def _compare_optimizer(self, path: str, here: torch.optim.Optimizer, saved: Any) -> bool:
        groups = saved.get("param_groups") if isinstance(saved, Mapping) else None
        if not isinstance(groups, list):
            self.differences.append(f"{path}: {_kind(saved)} in the checkpoint, an optimizer here")
            return False
        sizes = [len(group["params"]) for group in groups]
        own = [len(group["params"]) for group in here.param_groups]
        if sizes != own:
            self.differences.append(f"{path}.param_groups: of {sizes} parameters in the checkpoint, of {own} here")
        return sizes == own

    # Writing

    def run(self) -> None:
        """Write everything that fits. Objects come first, as they may still refuse; then all get back what they had.

        Raises:
            StateMismatch: an object refused its state. Nothing is changed, unless an object refuses what it had, too.
        """
        backups: list[tuple[str, Any, Any]] = []
        optimizers = [here for _, here, _ in self._objects if isinstance(here, torch.optim.Optimizer)]
        held = [_tensors_of(one) for one in optimizers]
        for path, here, saved in sorted(self._objects, key=lambda one: _rank_of(one[1])):
            backups.append((path, here, _backup(here)))
            try:
                if isinstance(here, torch.nn.Module):
                    # What does not fit has been told; missing keys are no error any more.
                    here.load_state_dict(owned(saved), strict=not self.differences)
                else:
                    here.load_state_dict(owned(saved))
            except Exception as error:  # the object's own code
                changed = [one for one, *backup in reversed(backups) if not _put_back(*backup)]
                result = f"{', '.join(changed)} may be half restored" if changed else "Nothing was restored"
                raise StateMismatch(f"{path} refused its state: {error}. {result}") from error
        for optimizer, tensors in zip(optimizers, held, strict=True):
            _keep_tensors(optimizer, tensors)
        self._copies.run()
        self._fill()


def _copies_alike(keys: list[str], leaves: Leaves, part: Part) -> Copies | None:
    """The copies below some top-level keys; None if they are not alike, or not as simple as that.

    Compared are lists, and not tensor by tensor: there may be very many.
    """
    texts = [msgspec.json.encode([tree[key] for key in keys]) for tree in (leaves.tree, part.record.tree)]
    numbers = [number for key in keys for number in leaves.plain[key]]
    # Equal texts hold equal numbers.
    if texts[0] != texts[1] or (numbers and max(numbers) >= len(part.record.tensors)):
        return None
    refs = [part.record.tensors[number] for number in numbers]
    known = part.stock.payload.entries
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
    begin = part.stock.payload.begin
    tensors = [leaves.tensors[number] for number in numbers]
    moves = [
        (here.addresses[number], begin + entry.offset, entry.num_bytes)
        for number, entry in zip(numbers, entries, strict=True)
    ]
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
            copies.add(tensor, Stored(ref, part.stock, entry.shape, dtype, move[1]))
    return copies


def _rank_of(here: Any) -> int:
    """Objects whose fit could not be checked before come first, modules last."""
    return 2 if isinstance(here, torch.nn.Module) else 1 if isinstance(here, torch.optim.Optimizer) else 0


def _backup(here: Any) -> Any:
    state = here.state_dict()
    # An optimizer's load_state_dict replaces its tensors and does not write into them.
    if isinstance(here, torch.optim.Optimizer):
        return state
    if isinstance(here, torch.nn.Module):
        # What has no shape yet has no values, and torch copies no such buffers.
        shaped = {key: one for key, one in state.items() if not is_lazy(one)}
        state = _like_mapping(state, shaped, only=shaped)
    return copy.deepcopy(state)


def _places_of(optimizer: torch.optim.Optimizer) -> Iterator[tuple[tuple[Any, str], dict[str, Any]]]:
    """Where an optimizer has tensors: the place, and the dict that holds it."""
    for number, group in enumerate(optimizer.param_groups):
        yield from (((number, key), group) for key in group)
    for parameter, state in optimizer.state.items():
        if isinstance(state, dict):
            yield from (((parameter, key), state) for key in state)


def _tensors_of(optimizer: torch.optim.Optimizer) -> dict[tuple[Any, str], torch.Tensor]:
    return {
        place: holder[place[1]] for place, holder in _places_of(optimizer) if isinstance(holder[place[1]], torch.Tensor)
    }


@torch.no_grad()
def _keep_tensors(optimizer: torch.optim.Optimizer, before: Mapping[tuple[Any, str], torch.Tensor]) -> None:
    """Bring what an optimizer has loaded into the tensors that it had: a CUDA graph of its step works on these, and not
    on those that `load_state_dict` puts in their place."""
    taken: dict[int, torch.Tensor] = {}
    for place, holder in _places_of(optimizer):
        old, new = before.get(place), holder[place[1]]
        if old is None or not isinstance(new, torch.Tensor) or old is new:
            continue
        is_alike = (old.shape, old.dtype, old.device, type(old)) == (new.shape, new.dtype, new.device, type(new))
        # Memory that several had holds what all of them have now, or what the first has.
        first = (
            taken.setdefault(old.untyped_storage().data_ptr(), new) if is_alike and type(old) is torch.Tensor else None
        )
        if first is not None and first.data_ptr() == new.data_ptr():
            old.copy_(new)
            holder[place[1]] = old


def _put_back(here: Any, before: Any) -> bool:
    """Whether an object has taken what `_backup` gave of it."""
    try:
        if isinstance(here, torch.nn.Module):
            here.load_state_dict(before, strict=False)  # what had no shape keeps the one that it has got
        else:
            here.load_state_dict(before)
    except Exception as error:  # noqa: BLE001, the object's own code; it is told beside the error before
        _log.warning("%s does not take back what it had: %s", type(here).__name__, error)
        return False
    return True


def _box_of(here: Any) -> Box:
    """Which part of a tensor this rank has."""
    if not hasattr(here, "to_local"):
        return (0,) * here.ndim, tuple(here.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offsets = compute_local_shape_and_global_offset(here.shape, here.device_mesh, here.placements)
    return tuple(offsets), tuple(shape)


def _is_pristine(module: torch.nn.Module) -> bool:
    """Whether loading a state into the module is nothing but copying its tensors: then it is done all at once."""
    if type(module).load_state_dict is not torch.nn.Module.load_state_dict:
        return False
    return all(_is_plain_loader(one) for one in module.modules()) and all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
        for tensor in (*module.parameters(), *module.buffers())
    )


def _is_plain_loader(module: torch.nn.Module) -> bool:
    kind = type(module)
    load = kind._load_from_state_dict
    base = torch.nn.Module
    return (
        (load is base._load_from_state_dict or load is _NormBase._load_from_state_dict)
        and kind.state_dict is base.state_dict
        and kind._save_to_state_dict is base._save_to_state_dict
        and kind.get_extra_state is base.get_extra_state
        and not any(_hooks_of(module))
    )


def _hooks_of(module: torch.nn.Module) -> Iterator[Any]:
    for name in (
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
    ):
        yield getattr(module, name, None)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether its values lie in main memory as they are, row-major and without holes."""
    return tensor.is_cpu and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _kind(value: Any) -> str:
    if isinstance(value, Stored):
        return str(value)
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    return f"a {type(value).__name__}"
