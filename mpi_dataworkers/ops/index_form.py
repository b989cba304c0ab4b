"""In which form a program's sampler gives indices, so that the dataset is asked in the same one on data workers.

A dataset may call `index.item()`, or have a way of its own for tensors. Indices travel as numbers, behind a number that
stands for their form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.order.sharding import Indices

# What holds a step's indices; a step that is not batched has one index: "one", or a list that is one index.
_CONTAINERS = ("list", "tuple", "array", "tensor", "one")
_NUMPY = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_TORCH = ("uint8", "int8", "int16", "int32", "int64")
_ELEMENTS = ("int", *(f"numpy {name}" for name in _NUMPY), *(f"torch {name}" for name in _TORCH))


@dataclass(frozen=True)
class IndexForm:
    """The form of one step's indices.

    Attributes:
        container: what holds them, of `_CONTAINERS`.
        element: what each is, of `_ELEMENTS`.
    """

    container: str
    element: str

    def given(self, indices: Indices) -> Any:
        """The indices as the sampler gave them."""
        numbers = indices.reshape(-1)
        kind, _, name = self.element.partition(" ")
        each: Any = numbers.tolist()
        if kind == "numpy":
            each = numbers.astype(name)
        elif kind == "torch":
            each = torch.from_numpy(numbers.copy()).to(getattr(torch, name))
        if self.container == "one":
            return each[0]
        if self.container in ("array", "tensor"):
            return each
        return tuple(each) if self.container == "tuple" else list(each)


INTS = IndexForm("list", "int")


def form_of(drawn: Any, batched: bool) -> IndexForm:
    """The form of what a sampler gave for a step; indices that differ among each other in their types are `int`.

    Args:
        drawn: whole numbers.
        batched: they are one for each sample; else they are one index.
    """
    kind = type(drawn)
    if not batched and kind is not list:
        return IndexForm("one", _element_of({kind}, [drawn]))
    if kind in (np.ndarray, torch.Tensor):
        element = _element_of({kind}, [drawn])
        return IndexForm("list" if element == "int" else "array" if kind is np.ndarray else "tensor", element)
    if kind is list and type(drawn[0]) is int:  # most samplers' batches
        return INTS
    return IndexForm("tuple" if kind is tuple else "list", _element_of(set(map(type, drawn)), drawn))


def _element_of(kinds: set[type], values: Sequence[Any]) -> str:
    """What each of some indices is, or an array or tensor of them; their types are `kinds`."""
    kind, *others = kinds
    if not others and issubclass(kind, np.generic | np.ndarray | torch.Tensor):
        library = "torch" if issubclass(kind, torch.Tensor) else "numpy"
        names = {f"{library} {str(value.dtype).removeprefix('torch.')}" for value in values}
        if len(names) == 1 and names.issubset(_ELEMENTS):
            return names.pop()
    return "int"


def pack_indices(indices: Indices, form: IndexForm) -> bytes:
    """A step's indices as they travel: int64, little-endian, behind the number of their form.

    Args:
        indices: one for each sample; or, with the shape (1, n), one index that is a list.
        form: theirs.
    """
    number = _CONTAINERS.index(form.container) * len(_ELEMENTS) + _ELEMENTS.index(form.element)
    return number.to_bytes(8, "little") + indices.astype("<i8").tobytes()


def unpack_indices(numbers: Indices, batched: bool) -> tuple[Indices, IndexForm]:
    """What `pack_indices` packed, from its numbers; `batched` when a step has an index for each of its samples."""
    container, element = divmod(int(numbers[0]), len(_ELEMENTS))
    form = IndexForm(_CONTAINERS[container], _ELEMENTS[element])
    is_list = not batched and form.container != "one"
    return numbers[np.newaxis, 1:] if is_list else numbers[1:], form
