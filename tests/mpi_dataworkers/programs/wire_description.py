"""What a program can see of a batch, so that one batch can be compared on both sides of a wire.

Used by `test_like_torch.py`.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import types
from typing import Any

import numpy as np
import torch


@dataclasses.dataclass
class Seen:
    """What a program can see of a batch.

    Attributes:
        words: types, dtypes, shapes, strides, gradients, what is one object, plain values.
        memories: for each tensor and array that has numbers the first one whose memory it overlaps.
        digests: of the numbers of each.
        forms: of each what else there is to it, by name: how it lies in its storage, and whether it is a view.
        residues: of each tensor with numbers, its address modulo 64, on which kernels that compute with it depend.
        array_residues: the same of arrays.
    """

    words: list[str]
    memories: list[int]
    digests: list[str]
    forms: list[dict[str, Any]]
    residues: list[int]
    array_residues: list[int]


def describe(batch: object) -> Seen:
    """What a program can see of a batch."""
    return _Description().of(batch)


def sharing(memories: list[int]) -> set[tuple[int, int]]:
    """Which two lie in one memory."""
    return {(a, b) for b in range(len(memories)) for a in range(b) if memories[a] == memories[b]}


def _content(value: Any) -> Any:
    """What an image or a part of a table holds."""
    if hasattr(value, "tobytes"):
        return value.mode, value.size, value.getpalette(), value.info, value.tobytes()
    return str(getattr(value, "schema", getattr(value, "type", ""))), getattr(value, "to_pylist", value.__repr__)()


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=6).hexdigest()


class _Description:
    """Gives objects and memory numbers, in the order in which they are met."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}
        self._alive: list[Any] = []
        self._extents: list[tuple[int, int]] = []
        self._digests: list[str] = []
        self._forms: list[dict[str, Any]] = []
        self._residues: list[int] = []
        self._array_residues: list[int] = []

    def of(self, batch: object) -> Seen:
        words = self._any(batch).split(", ")
        first: dict[int, int] = {}
        group, reach = 0, 0
        for index in sorted(range(len(self._extents)), key=self._extents.__getitem__):
            start, stop = self._extents[index]
            if start >= reach:
                group = index
            reach = max(reach, stop)
            first[index] = group
        memories = [first[index] for index in range(len(first))]
        return Seen(words, memories, self._digests, self._forms, self._residues, self._array_residues)

    def _memory(self, start: int, num_bytes: int) -> None:
        if num_bytes:
            self._extents.append((start, start + num_bytes))

    def _any(self, value: Any) -> str:
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if value is None or kind in (bool, int, float, complex, str, bytes):
            return repr(value)
        if id(value) in self._numbers:
            return f"object {self._numbers[id(value)]}"
        self._numbers[id(value)] = len(self._numbers)
        self._alive.append(value)
        if isinstance(value, torch.Tensor):
            try:
                return f"{name}({self._tensor(value)})"
            except RuntimeError as error:  # what torch's worker processes have broken
                return f"{name} of which torch says {str(error)[:80]!r}"
        if isinstance(value, torch.UntypedStorage):
            self._memory(value.data_ptr(), value.nbytes())
            self._digests.append(_bytes(torch.empty(0, dtype=torch.uint8).set_(value)))
            return f"{name}({value.nbytes()})"
        if isinstance(value, torch.storage.TypedStorage):
            return f"{name}({value.dtype}, {self._any(value._untyped_storage)})"
        if isinstance(value, np.ndarray):
            return f"{name}({self._array(value)}) with {self._any(getattr(value, 'note', None))}"
        if isinstance(value, np.generic):
            self._digests.append(_of_numbers(np.asarray(value)))
            return f"{name}({value.dtype})"
        if kind.__module__.startswith(("PIL.", "pyarrow.")):  # whose words show addresses, or leave out rows
            return f"{name}({self._any(_content(value))})"
        inside = getattr(value, "__dict__", None)
        attributes = f" with {self._all(inside.items())}" if inside and not isinstance(value, type) else ""
        if isinstance(value, dict):
            return f"{name}{{{self._all(value.items())}}}{attributes}"
        if isinstance(value, list | tuple | collections.deque):
            return f"{name}[{self._all(value)}]{attributes}"
        if isinstance(value, BaseException):
            return f"{name}[{self._all(value.args)}]{attributes}"
        slots = [slot for base in kind.__mro__ for slot in getattr(base, "__slots__", ()) if hasattr(value, slot)]
        if slots and _is_programs(kind):
            attributes += f" with {self._all((slot, getattr(value, slot)) for slot in slots)}"
        if attributes and not isinstance(value, types.FunctionType):
            return name + attributes
        if isinstance(value, torch.Generator):
            return f"{name}({self._any(value.get_state())})"
        return f"{name}({value!r})"

    def _all(self, values: Any) -> str:
        return ", ".join(
            f"{self._any(value[0])}: {self._any(value[1])}"
            if type(value) is tuple and len(value) == 2
            else self._any(value)
            for value in values
        )

    def _tensor(self, tensor: torch.Tensor) -> str:
        words = [str(tensor.dtype), str(tensor.layout), str(tensor.device)]
        if not tensor.is_nested:
            words.append(str(tuple(tensor.shape)))
        is_strided = tensor.layout is torch.strided and not tensor.is_nested
        if is_strided:
            words.append(f"strides {tensor.stride()}")
        if is_strided and tensor.device.type == "cpu":
            steps = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            num_bytes = (steps + 1) * tensor.element_size() if tensor.numel() else 0
            self._memory(tensor.data_ptr(), num_bytes)
            self._residues += [tensor.data_ptr() % 64] * bool(num_bytes)
            self._forms.append(_form_of_tensor(tensor))
        words += [f"gradient, leaf {tensor.is_leaf}"] * tensor.requires_grad
        words += [f"scheme {tensor.qscheme()}"] if tensor.is_quantized else []
        words += ["conjugate"] * (tensor.is_complex() and tensor.is_conj()) + ["negative"] * tensor.is_neg()
        words += [f"coalesced {tensor.is_coalesced()}"] if tensor.layout is torch.sparse_coo else []
        words += [f"attributes {self._all(vars(tensor).items())}"] if _is_programs(type(tensor)) else []
        self._digests.append(_bytes(tensor))
        return ", ".join(words)

    def _array(self, numbers: np.ndarray[Any, Any]) -> str:
        if numbers.dtype.kind in "OT":
            content = self._all(numbers.reshape(-1).tolist())
        else:
            content = ""
            self._digests.append(_of_numbers(numbers))
        self._memory(numbers.__array_interface__["data"][0], numbers.nbytes if numbers.flags.forc else 0)
        if numbers.nbytes and numbers.flags.aligned and numbers.flags.forc and numbers.dtype.kind != "O":
            self._array_residues.append(numbers.__array_interface__["data"][0] % 64)
        if numbers.size:
            self._forms.append({"flags.owndata": numbers.flags.owndata, "flags.aligned": numbers.flags.aligned})
        seen = f"{numbers.dtype!r} {numbers.dtype.metadata}, {numbers.shape}, {numbers.strides}"
        return f"{seen}, writeable {numbers.flags.writeable}, {content}"


def _form_of_tensor(tensor: torch.Tensor) -> dict[str, Any]:
    if tensor.numel() == 0:
        return {"_is_view": tensor._is_view()}
    storage = tensor.untyped_storage()
    return {
        "_is_view": tensor._is_view(),
        "is_inference": tensor.is_inference(),
        "is_shared": tensor.is_shared(),
        "storage_offset": tensor.storage_offset(),
        "storage.nbytes": storage.nbytes(),
        "storage.resizable": storage.resizable(),
        "vars": sorted(vars(tensor)),
    }


def _is_programs(kind: type) -> bool:
    return kind.__module__.endswith("wire_cases")


def _of_numbers(numbers: np.ndarray[Any, Any]) -> str:
    mask = _hash(np.ma.getmaskarray(numbers).tobytes()) if isinstance(numbers, np.ma.MaskedArray) else ""
    if numbers.dtype.names or numbers.dtype.char in "gG":  # what is between their numbers is nobody's
        return _hash(repr(numbers.tolist()).encode()) + mask
    return _hash(numbers.tobytes()) + mask


@torch.no_grad()
def _bytes(tensor: torch.Tensor) -> str:
    """A digest of the numbers of a tensor of any layout."""
    if tensor.device.type != "cpu":
        return "no bytes"
    if tensor.is_nested:
        return "+".join(_bytes(part) for part in tensor.detach().unbind())
    if tensor.layout is torch.sparse_coo:
        return _bytes(tensor._indices()) + _bytes(tensor._values())
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return _bytes(tensor.crow_indices()) + _bytes(tensor.col_indices()) + _bytes(tensor.values())
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return _bytes(tensor.ccol_indices()) + _bytes(tensor.row_indices()) + _bytes(tensor.values())
    if tensor.layout is not torch.strided:
        return _bytes(tensor.to_dense())
    if tensor.is_quantized:
        return _bytes(tensor.int_repr())
    plain = tensor.detach().as_subclass(torch.Tensor).resolve_conj().resolve_neg()
    # Not by `contiguous`, for which some types have no code: each as a number of its size.
    number = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}[
        plain.element_size()
    ]
    same = torch.empty(0, dtype=number).set_(
        plain.untyped_storage(), plain.storage_offset(), plain.shape, plain.stride()
    )
    return _hash(same.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
