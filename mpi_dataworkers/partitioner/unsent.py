"""A leaf of a batch that data workers have not sent, because nothing reads it but operators that they run.

The program has an `UnsentLeaf` in its place. It knows its size, type and device, and can be moved; whoever reads more
of it gets the tensor, which is then made once more. Called by `provenance.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils import _pytree as pytree

_pytree: Any = pytree
_without_subclass: Any = torch._C.DisableTorchFunctionSubclass
_OfTensor: Any = torch.Tensor
# What only moves a tensor, or copies it.
MOVES = frozenset(
    [
        *(_OfTensor.to, _OfTensor.cuda, _OfTensor.cpu, _OfTensor.pin_memory, _OfTensor.contiguous),
        *(_OfTensor.clone, _OfTensor.detach, torch.clone, torch.detach),
    ]
)
# What says something of a tensor without reading it.
METADATA = frozenset(
    [
        *(_OfTensor.size, _OfTensor.dim, _OfTensor.numel, _OfTensor.stride, _OfTensor.is_contiguous, _OfTensor.__len__),
        *(_OfTensor.element_size, _OfTensor.is_floating_point, _OfTensor.is_pinned, _OfTensor.get_device),
        _OfTensor.record_stream,
    ]
)
# What gives away memory, which is then changed without a count of changes.
GIVES_MEMORY = frozenset(
    [
        *(_OfTensor.numpy, _OfTensor.__array__, _OfTensor.data_ptr, _OfTensor.untyped_storage, _OfTensor.__dlpack__),
        *(_OfTensor.data.__get__, _OfTensor.data.__set__, _OfTensor.set_),
    ]
)
_KNOWN_UNSENT = METADATA - {_OfTensor.is_pinned}


class UnsentLeaf(torch.Tensor):
    """See the module. Made by `unsent`.

    Attributes:
        _make: makes the tensor, as the leaf that it would have been.
        _made: that tensor, once somebody has read it.
        _of: the batch, and which leaf of it this is.
    """

    _make: Callable[[], torch.Tensor]
    _made: torch.Tensor | None
    _of: tuple[Any, int]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if args and type(args[0]) is UnsentLeaf and args[0]._made is None:
            is_known, result = _without_content(func, args[0], args[1:], kwargs)
            if is_known:
                return result
        args, kwargs = _pytree.tree_map(_made_of, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # What comes by another way than Python's functions, as in a collective operation.
        args, kwargs = _pytree.tree_map(_plain_of, (args, kwargs or {}))
        return func(*args, **(kwargs or {}))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain_of(self).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return repr(_plain_of(self))

    def __format__(self, form: str) -> str:
        return format(_plain_of(self), form)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _plain_of(self).__deepcopy__(memo)


def unsent(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    make: Callable[[], torch.Tensor],
    of: tuple[Any, int],
) -> UnsentLeaf:
    """A leaf without content.

    Args:
        shape, dtype, device: of the tensor.
        make: makes it.
        of: the batch, and which leaf of it this is.
    """
    leaf: UnsentLeaf = _OfTensor._make_wrapper_subclass(UnsentLeaf, shape, dtype=dtype, device=device)
    leaf._make, leaf._made, leaf._of = make, None, of
    return leaf


def made(leaf: UnsentLeaf) -> torch.Tensor:
    """The tensor itself, with all marks of a leaf."""
    if leaf._made is None:
        leaf._made = leaf._make()
    return leaf._made


def _made_of(value: Any) -> Any:
    return made(value) if type(value) is UnsentLeaf else value


def _plain_of(value: Any) -> Any:
    if type(value) is not UnsentLeaf:
        return value
    with _without_subclass():
        return made(value).as_subclass(torch.Tensor)


def _without_content(
    func: Callable[..., Any], leaf: UnsentLeaf, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """Whether a function needs no content, and its result then."""
    if func is _OfTensor.record_stream:
        return True, None
    if func in MOVES and "memory_format" not in kwargs:
        return _moved(func, leaf, args, kwargs)
    is_attribute = getattr(func, "__name__", "") == "__get__" and func not in GIVES_MEMORY
    if func in _KNOWN_UNSENT or is_attribute:
        with _without_subclass():
            result = func(leaf, *args, **kwargs)
        return not isinstance(result, torch.Tensor), result
    return False, None


def _moved(
    func: Callable[..., Any], leaf: UnsentLeaf, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[bool, Any]:
    """The leaf elsewhere, without a byte that moves; what becomes of a tensor without elements says where to."""
    with _without_subclass():
        shape, dtype, device = leaf.shape, leaf.dtype, leaf.device
    sample = torch.empty([0] * len(shape), dtype=dtype, device=device)
    result = func(sample, *args, **kwargs)
    if result.dtype != dtype:
        return False, None
    if result is sample:
        return True, leaf
    return True, unsent(tuple(shape), dtype, result.device, lambda: func(made(leaf), *args, **kwargs), leaf._of)
