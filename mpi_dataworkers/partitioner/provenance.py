"""Proves that a tensor is a leaf of a batch, as the loader gave it, up to moves between devices.

User code stands between the loader and the forward. So the loader's tensors come as `BatchLeaf`: what only moves one
(`.to(device)`, `.pin_memory()`) gives a leaf again, and everything else gives a plain tensor. What arrives in the
forward as a leaf that nothing has changed in place is what the loader gave, in each step anew.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from hetstream.mpi_dataworkers.partitioner.leaves import flatten
from hetstream.mpi_dataworkers.partitioner.unsent import GIVES_MEMORY, METADATA, MOVES, UnsentLeaf, made, unsent

_pytree: Any = pytree
_without_subclass: Any = torch._C.DisableTorchFunctionSubclass
_OfTensor: Any = torch.Tensor
_GET_BASE: Any = _OfTensor._base.__get__


# The size of a leaf that was not sent, and what makes it.
Unsent = tuple[tuple[int, ...], Callable[[], torch.Tensor]]


class _Memory:
    """Of a leaf and of all that shares its storage; whether the program has it in hands that count no changes."""

    def __init__(self) -> None:
        self.is_given_away = False


class Delivery:
    """One batch, as it came to the training loop.

    Attributes:
        cut: the values that data workers have computed for it; None when they have computed none.
        generation: of the partition that they are of.
        was_checked: a forward of it was run both ways, so its later ones are, too: they may be recomputations.
        was_used: a forward had the values.
        read: numbers of the leaves whose content something else has read; of several batches together.
        step: of its loader, counted from when that was first followed.
    """

    def __init__(
        self,
        cut: Sequence[torch.Tensor] | None = None,
        generation: int = 0,
        read: set[int] | None = None,
        step: int = 0,
    ) -> None:
        self.cut = cut
        self.generation = generation
        self.was_checked = self.was_used = False
        self.read: set[int] = set() if read is None else read
        self.step = step
        self._versions = [value._version for value in cut or ()]

    def has_changed_cut(self) -> bool:
        """Whether the program has changed such a value in place: it may be an output of an earlier call."""
        return any(value._version != then for value, then in zip(self.cut or (), self._versions, strict=True))

    def tag(self, batch: Any, wanted: frozenset[int] | None = None, spared: Mapping[int, Unsent] | None = None) -> Any:
        """The batch with its tensors as leaves.

        Args:
            batch: tensors in lists, tuples and dictionaries.
            wanted: numbers of the leaves to tag; None for all.
            spared: the leaves that were not sent, by number, in whose places there are tensors without elements.
        """
        leaves, spec = flatten(batch)
        if all(not isinstance(leaf, torch.Tensor) for leaf in leaves):
            return batch
        tagged = [
            self._unsent(spared[index], leaf.dtype, index)
            if spared and index in spared
            else self._leaf(leaf, index)
            if type(leaf) is torch.Tensor and (wanted is None or index in wanted)
            else leaf
            for index, leaf in enumerate(leaves)
        ]
        return _pytree.tree_unflatten(tagged, spec)

    def _unsent(self, spared: Unsent, dtype: torch.dtype, number: int) -> UnsentLeaf:
        shape, make = spared

        def leaf() -> BatchLeaf:
            return self._leaf(make(), number)

        return unsent(shape, dtype, torch.device("cpu"), leaf, (self, number))

    def _leaf(self, tensor: torch.Tensor, number: int) -> BatchLeaf:
        return _as_leaf(tensor, self, number, _Memory())


class BatchLeaf(torch.Tensor):
    """A tensor of a batch as the loader gave it, or (`_is_part`) a view of one, through which it may be changed."""

    _delivery: Delivery
    _number: int
    _version_then: int
    _memory: _Memory
    _is_part: bool

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():  # torch.compile looks at the leaf, or (the second) traces what stands here
            if func == _GET_BASE and not torch.compiler.is_dynamo_compiling():
                compiled_functions.read(args[0])
            with _without_subclass():
                return func(*args, **kwargs)
        with _without_subclass():
            if func in MOVES and args and type(args[0]) is BatchLeaf:
                return _moved(func, args[0], args[1:], kwargs)
            result = func(*args, **kwargs)
            is_attribute = getattr(func, "__name__", "") == "__get__" and not isinstance(result, torch.Tensor)
            if func not in METADATA and not is_attribute:
                _note_read(args, kwargs)
            leaves = [value for value in args if type(value) is BatchLeaf]
            if func in GIVES_MEMORY:
                for leaf in leaves:
                    leaf._memory.is_given_away = True
            elif leaves and not is_attribute:
                return _with_parts(result, leaves[0])
            return result

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _without_subclass():
            tensor: Any = plain(self)
            return tensor.__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(plain(self))

    def __format__(self, form: str) -> str:
        return format(plain(self), form)  # torch formats a number as such only for its own type

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _without_subclass():
            tensor: Any = plain(self)
            return tensor.__deepcopy__(memo)


class _CompiledFunctions:
    """Functions of the program that torch.compile has compiled, and that get leaves themselves.

    Attributes:
        reads: whether one of them reads a leaf. Its later calls are not seen, so nothing is left unsent then.
    """

    def __init__(self) -> None:
        self.reads = False

    def read(self, leaf: BatchLeaf) -> None:
        """torch.compile makes a graph that takes this leaf."""
        self.reads = True
        leaf._delivery.read.add(leaf._number)
        wrappers: Any = sys.modules.get("torch._functorch._aot_autograd.runtime_wrappers")
        handled = getattr(wrappers, "HANDLED_TYPES", None)
        if handled is not None and BatchLeaf not in handled:
            # Its check of custom operators, in a graph's first call, else refuses all operators that get a leaf.
            wrappers.HANDLED_TYPES = (*handled, BatchLeaf)


compiled_functions = _CompiledFunctions()


def _as_leaf(
    tensor: torch.Tensor, delivery: Delivery, number: int, memory: _Memory, is_part: bool = False
) -> BatchLeaf:
    leaf: BatchLeaf = tensor.as_subclass(BatchLeaf)
    leaf._delivery, leaf._number, leaf._memory, leaf._is_part = delivery, number, memory, is_part
    with _without_subclass():
        leaf._version_then = leaf._version
    return leaf


def _moved(func: Callable[..., Any], leaf: BatchLeaf, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    result = func(plain(leaf), *args, **kwargs)
    is_same = result.dtype == leaf.dtype and result.shape == leaf.shape
    if not is_same or not is_unchanged(leaf) or result.requires_grad or leaf._is_part:
        leaf._delivery.read.add(leaf._number)
        return _with_parts(result, leaf)
    return _as_leaf(result, leaf._delivery, leaf._number, leaf._memory if _shares(result, leaf) else _Memory())


def _with_parts(result: Any, leaf: BatchLeaf) -> Any:
    """A result, in which what shares the memory of a leaf is marked as a part of it: `x[0].numpy()` changes x, too."""
    if type(result) in (tuple, list):
        return type(result)(_with_parts(item, leaf) for item in result)
    if type(result) is not torch.Tensor or not _shares(result, leaf):
        return result
    return _as_leaf(result, leaf._delivery, leaf._number, leaf._memory, is_part=True)


def _shares(tensor: torch.Tensor, leaf: BatchLeaf) -> bool:
    if tensor.layout is not torch.strided or leaf.layout is not torch.strided:
        return False
    return bool(tensor.untyped_storage()._cdata == leaf.untyped_storage()._cdata)


def _note_read(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if type(value) is BatchLeaf:
            value._delivery.read.add(value._number)
        elif isinstance(value, list | tuple):
            _note_read(tuple(value), {})


def is_unchanged(leaf: BatchLeaf) -> bool:
    """Whether nothing has changed it in place, or may have done so uncounted."""
    with _without_subclass():
        is_counted = not leaf._memory.is_given_away
        return is_counted and leaf._version == leaf._version_then and not leaf.requires_grad


def plain(leaf: torch.Tensor) -> torch.Tensor:
    """The tensor itself, which shares its memory and its count of changes."""
    if type(leaf) is not BatchLeaf:
        return leaf
    with _without_subclass():
        tensor: torch.Tensor = leaf.as_subclass(torch.Tensor)
        return tensor


def whole(value: Any) -> Any:
    """A tensor as the program's own forward takes it, with its content."""
    if type(value) is UnsentLeaf:
        value = made(value)
    return plain(value) if isinstance(value, torch.Tensor) else value


def origin(value: Any) -> tuple[Delivery, int] | None:
    """The batch that a value is a leaf of, and which; None when it is no leaf, or was changed."""
    if type(value) is UnsentLeaf:
        return value._of if value._made is None else origin(value._made)
    if type(value) is not BatchLeaf or value._is_part or not is_unchanged(value):
        return None
    return value._delivery, value._number
