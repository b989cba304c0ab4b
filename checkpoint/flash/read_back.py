"""What a save has made of a state, decoded as a restore decodes it, beside the state: once for each layout.

No list of what can be stored is complete, so nothing is believed that was not read back. A state that would not come
back as it is is refused at its first save, while the program is there to be told, and not at its next start.
"""

from __future__ import annotations

import dataclasses
import io
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree

from hetstream.checkpoint.errors import DamagedCheckpoint, StateMismatch, UnsupportedState
from hetstream.checkpoint.flash.sources import Payload, StoredPart, StoredTensor, TensorStore, children_of, fields_of
from hetstream.checkpoint.memory.segment import split_metadata
from hetstream.checkpoint.record.layout import from_json
from hetstream.checkpoint.record.structure import RNG, Record
from hetstream.checkpoint.record.tree import PlainObject

# Of as many bytes as a number has: floats that are equal may have other bits, and NaN equals nothing.
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# Types whose values are looked into; one of another type that comes back was pickled.
_PLAIN = {
    *(dict, OrderedDict, Counter, defaultdict, list, tuple, torch.Size, deque, set, frozenset, PlainObject),
    *(bool, int, float, complex, str, bytes, bytearray, range, slice, torch.device, io.BytesIO),
    *(np.ndarray, torch.Tensor, torch.nn.Parameter, torch.nn.Buffer),
}


class _Differs(Exception):
    """A value does not come back; the message says where, and as what it does."""


def read_back(
    state: Mapping[str, Any],
    states: Mapping[tuple[str, int], Any],
    generators: Mapping[str, Any],
    metadata: bytes,
    payload: memoryview,
    *,
    allow_pickle: bool,
    with_values: bool,
) -> None:
    """Decode what was saved, and compare it with the state.

    Args:
        state: top-level key to objects and trees.
        states: what each object's `state_dict` gave, as `Leaves.states` has it.
        generators: their states.
        metadata: of the generation, see `segment.join_metadata`.
        payload: the memory that the tensors were copied to.
        allow_pickle: what has no other form was pickled.
        with_values: compare the values of tensors, too. Not where the program may have changed some since.

    Raises:
        UnsupportedState: something in the state would not come back as it is.
    """
    try:
        layout_json, structure = split_metadata(metadata)
        record = Record.read(structure)
        store = TensorStore(Payload(from_json(layout_json).entries, payload))
        saved = StoredPart(record, store).saved(allow_pickle=allow_pickle)
        comparison = _Comparison(states, with_values=with_values)
        whole = {**state, RNG: generators}
        for key, value in saved.items():
            comparison.compare(key, whole[key], value)
    except (DamagedCheckpoint, StateMismatch) as error:
        raise UnsupportedState(
            f"the state could be saved and not be restored: {error}. Store plain values instead; nothing was saved"
        ) from error
    except _Differs as error:
        raise UnsupportedState(f"{error}. Store plain values instead; nothing was saved") from error


class _Comparison:
    def __init__(self, states: Mapping[tuple[str, int], Any], *, with_values: bool) -> None:
        self._states, self._with_values = states, with_values

    def compare(self, path: str, was: Any, back: Any) -> None:
        """Compare one place.

        Raises:
            _Differs: it is another value.
        """
        was = self._states.get((path, id(was)), was)
        if type(was) in _pytree.SUPPORTED_NODES and _is_node(back):  # before what else it may be, such as a dataclass
            children = children_of(back, was)
            _require(children is not None, path, was, back)
            own, context = _pytree.SUPPORTED_NODES[type(was)].flatten_fn(was)
            self.compare(f"{path}[context]", context, back.context)
            self.compare(path, list(own), children)
        elif type(back) is type(was) and type(was) not in _PLAIN and not isinstance(was, np.generic):
            pass  # it was pickled: its type has to do
        elif isinstance(was, torch.Tensor):
            self._tensor(path, was, back)
        elif isinstance(was, np.ndarray):
            self._array(path, was, back)
        elif isinstance(was, np.generic):
            _require(type(back) is type(was) and _alike(was, back), path, was, back)
        elif dataclasses.is_dataclass(was) and not isinstance(was, type):
            self._fields(path, was, back)
        elif type(was) is PlainObject:
            _require(type(back) is PlainObject, path, was, back)
            self._named(path, vars(was), vars(back))
        elif isinstance(was, tuple) and hasattr(was, "_fields"):
            _require(getattr(back, "_fields", None) == was._fields, path, was, back)
            self._each(path, zip(was._fields, was, back, strict=True))
        else:
            _require(type(back) is type(was), path, was, back)
            self._plain(path, was, back)

    def _plain(self, path: str, was: Any, back: Any) -> None:
        """Values of one type."""
        if isinstance(was, Mapping):
            _require(len(was) == len(back), path, was, back)
            for key, key_back in zip(was, back, strict=True):
                if _has_tensor(key):
                    raise _Differs(f"{path} has a tensor as a key, which nobody would find again: it is another object")
                self.compare(f"{path}[key]", key, key_back)
                self.compare(f"{path}.{key}", was[key], back[key_back])
            if isinstance(was, defaultdict):
                _require(was.default_factory is back.default_factory, path, was, back)
            metadata = getattr(was, "_metadata", None)
            if metadata is not None:
                self.compare(f"{path}._metadata", metadata, getattr(back, "_metadata", None))
        elif isinstance(was, list | tuple | deque):
            _require(len(was) == len(back), path, was, back)
            _require(getattr(was, "maxlen", None) == getattr(back, "maxlen", None), path, was, back)
            self._each(path, zip(range(len(was)), was, back, strict=True))
        elif isinstance(was, set | frozenset):
            # What is not equal to itself, such as NaN, is found by what it is called.
            is_same = was == back or sorted(map(_called, was)) == sorted(map(_called, back))
            _require(is_same and len(was) == len(back), path, was, back)
        elif isinstance(was, float):
            _require(_is_same_number(was, back), path, was, back)
        elif isinstance(was, complex):
            is_same = _is_same_number(was.real, back.real) and _is_same_number(was.imag, back.imag)
            _require(is_same, path, was, back)
        elif isinstance(was, io.BytesIO):
            _require((was.getvalue(), was.tell()) == (back.getvalue(), back.tell()), path, was, back)
        elif isinstance(was, int | str | bytes | bytearray | range | slice | torch.device):
            _require(was == back, path, was, back)
        # Of what is left there is one, such as a dtype. Equal types have to do.

    def _each(self, path: str, places: Iterable[tuple[Any, Any, Any]]) -> None:
        for name, was, back in places:
            self.compare(f"{path}.{name}", was, back)

    def _named(self, path: str, was: Mapping[str, Any], back: Mapping[str, Any]) -> None:
        _require(was.keys() == back.keys(), path, list(was), list(back))
        self._each(path, ((name, was[name], back[name]) for name in was))

    def _fields(self, path: str, was: Any, back: Any) -> None:
        for base in (dict, list, set, frozenset, tuple, deque, int, float, str, bytes):
            if isinstance(was, base):
                raise _Differs(f"{path} is a dataclass that is a {base.__name__}, too: only its fields would come back")
        _require(type(back) is PlainObject, path, was, back)
        self._named(path, fields_of(was), vars(back))

    def _tensor(self, path: str, was: torch.Tensor, back: Any) -> None:
        if was.layout is not torch.strided or not isinstance(back, StoredTensor):
            is_right = isinstance(back, torch.Tensor) and (back.layout, back.shape, back.dtype) == (
                was.layout,
                was.shape,
                was.dtype,
            )
            _require(is_right, path, was, back)
            return
        _require((back.shape, back.dtype) == (tuple(was.shape), was.dtype), path, was, back)
        is_parameter = isinstance(was, torch.nn.Parameter)
        kind = "parameter" if is_parameter else "tensor"
        if was.requires_grad != is_parameter:
            kind = "frozen_parameter" if is_parameter else "grad"
        _require(back.ref.kind == kind, path, was, back.ref.kind)
        local = was.to_local() if hasattr(was, "to_local") else was
        others_write = local.is_cpu and local.is_shared()
        if self._with_values and not others_write:
            _require(_have_same_bytes(local, back.view), path, was, f"{back} with other values")

    def _array(self, path: str, was: np.ndarray[Any, Any], back: Any) -> None:
        if was.dtype.hasobject:
            _require(type(back) is type(was) and back.shape == was.shape, path, was, back)
            return
        if isinstance(back, StoredTensor):
            _require(back.ref.kind == "numpy", path, was, back)
            if not self._with_values:
                _require((back.shape, back.view.numpy().dtype) == (was.shape, was.dtype), path, was, back)
                return
            back = back.view.numpy()
        _require(type(back) is type(was) and back.shape == was.shape and _alike(was, back), path, was, back)


def _is_node(back: Any) -> bool:
    """Whether this was saved of a type that is registered with torch's pytree."""
    return type(back) is PlainObject and {*vars(back)} == {"type", "context", "children"}


def _has_tensor(key: Any) -> bool:
    return isinstance(key, torch.Tensor) or (isinstance(key, tuple) and any(map(_has_tensor, key)))


def _called(value: Any) -> str:
    """What a value of a set is called: what was pickled may be known by its type alone."""
    kind: Any = type(value)
    return kind.__qualname__ if kind.__repr__ is object.__repr__ else repr(value)


def _is_same_number(was: float, back: float) -> bool:
    """Whether two numbers have the same bits, but for those by which one that is none says why."""
    if math.isnan(was) and math.isnan(back):
        return math.copysign(1, was) == math.copysign(1, back)
    return struct.pack("d", was) == struct.pack("d", back)


def _alike(was: Any, back: Any) -> bool:
    """Whether two of NumPy's values have the same type and bytes, but for those between the fields of a record."""
    if was.dtype != back.dtype or was.dtype.isalignedstruct != back.dtype.isalignedstruct:
        return False
    if was.dtype.names:
        return all(_alike(was[name], back[name]) for name in was.dtype.names)
    return bool(was.tobytes() == back.tobytes())


@torch.no_grad()
def _have_same_bytes(was: torch.Tensor, back: torch.Tensor) -> bool:
    if not was.is_cpu or was.is_conj() or was.is_neg():
        was = was.cpu().resolve_conj().resolve_neg()
    integer = _INTEGERS.get(was.dtype.itemsize)
    if integer is None:  # complex numbers of two doubles
        was, back, integer = torch.view_as_real(was), torch.view_as_real(back), torch.int64
    return torch.equal(was.view(integer), back.view(integer))


def _require(is_right: bool, path: str, was: Any, back: Any) -> None:
    if not is_right:
        raise _Differs(f"{path} is {_short(was)}, and would come back as {_short(back)}")


def _short(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and {value.dtype}"
    text = f"{type(value).__name__} {value!r}" if not isinstance(value, str | StoredTensor) else str(value)
    if isinstance(value, np.ndarray | np.generic):
        text = f"{type(value).__name__} of {value.dtype}"
    return text if len(text) <= 120 else text[:117] + "..."
