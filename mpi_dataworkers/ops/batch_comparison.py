"""Whether two batches are the same to a program: values, types and forms, and what of them is one object or one memory.

There is no list of types that are known: tensors and arrays are compared byte by byte, and every other object by what
Python writes down to make it anew (`object.__reduce_ex__`). What cannot be written down is not compared, and named.
"""

from __future__ import annotations

import itertools
import types
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.sharedctypes import SynchronizedBase
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.process.handlers import others, suppressed_others

# Compared by their values.
_PLAIN = (
    *(int, str, bytes, bytearray, bool, type(None), range, type(Ellipsis)),
    *(torch.Size, torch.dtype, torch.device, torch.layout),
)
# Compared by their names: nobody makes them anew.
_NAMED = (type, types.BuiltinFunctionType, types.FunctionType, types.ModuleType)
_LONGEST_TEXT = 80
# From where to where a tensor's values lie.
_Span = tuple[int, int]


@dataclass(frozen=True)
class Difference:
    """Where two batches differ.

    Attributes:
        path: to the value, as Python has it: `batch[0]['image']`.
        found, expected: both values, or what of them differs, on one line.
    """

    path: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.path}: {self.found} in place of {self.expected}"

    @property
    def field(self) -> str:
        """The path of the tensor, array or other value, with nothing of which element it is."""
        return self.path.partition(".flatten()")[0]


@dataclass
class Comparison:
    """A comparison of two batches.

    Attributes:
        differences: all of them, in the order of the batch: of some it may turn out that they say nothing.
        not_compared: paths and types of what could not be compared.
    """

    differences: list[Difference] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)


def compare(found: Any, expected: Any) -> Comparison:
    """Compare two batches. They may hold each other's memory; the `__reduce_ex__` of objects of user code is called."""
    pair = _Pair()
    differences: list[Difference] = []
    try:
        differences += pair.differences(found, expected, "batch")
        differences += pair.of_memory()
    except RecursionError:
        pair.not_compared.append("a batch that is nested too deeply")
    return Comparison(differences, pair.not_compared)


class _Pair:
    """Two batches while they are compared."""

    def __init__(self) -> None:
        self.not_compared: list[str] = []
        self._counterparts: dict[int, Any] = {}  # of each object of one batch that of the other
        self._kept: list[Any] = []  # so that no id is used twice
        self._memories: list[tuple[str, _Span, _Span]] = []

    def differences(self, found: Any, expected: Any, path: str) -> Iterator[Difference]:
        """How two values differ, and all that they hold."""
        kind = type(found)
        if kind is not type(expected):
            yield Difference(path, _name(kind), _name(type(expected)))
        elif kind in (float, complex):  # by their bits: NaN is NaN, and -0.0 is not 0.0
            if np.asarray(found).tobytes() != np.asarray(expected).tobytes():
                yield _values(path, found, expected)
        elif kind in _PLAIN:
            if found != expected:
                yield _values(path, found, expected)
        elif isinstance(found, _NAMED):
            if found is not expected and _name(found) != _name(expected):
                yield Difference(path, _name(found), _name(expected))
        elif self._counterparts.keys() & {id(found), id(expected)}:
            is_same = self._counterparts.get(id(found)) is expected and self._counterparts.get(id(expected)) is found
            if not is_same and _can_change(found):
                yield Difference(path, *(self._met(value) for value in (found, expected)))
            elif not is_same:  # one object or two, nobody can tell
                yield from self._within(found, expected, path)
        else:
            self._counterparts |= {id(found): expected, id(expected): found}
            self._kept += [found, expected]
            yield from self._within(found, expected, path)

    def _met(self, value: Any) -> str:
        return "an object that is there before" if id(value) in self._counterparts else "an object of its own"

    def _within(self, found: Any, expected: Any, path: str) -> Iterator[Difference]:
        try:
            yield from self._by_kind(found, expected, path)
        except RecursionError:
            raise
        except others():  # a class of user code refuses what is done with it here
            self.not_compared.append(f"{path} of {_name(type(found))}")

    def _by_kind(self, found: Any, expected: Any, path: str) -> Iterator[Difference]:
        if isinstance(found, torch.UntypedStorage | torch.TypedStorage):
            yield from self.differences(_bytes_in(found), _bytes_in(expected), path)
        elif isinstance(found, SynchronizedBase):  # a lock is nobody's value
            here: Any = found.get_obj()
            yield from self.differences(bytes(here), bytes(expected.get_obj()), path)
        elif isinstance(found, torch.Tensor) and not _is_made_of_others(found):
            yield from self._tensors(found, expected, path)
            yield from self.differences(vars(found), vars(expected), path)
        elif isinstance(found, np.ndarray) and not found.dtype.hasobject:
            yield from self._arrays(found, expected, path)
            yield from self.differences(_own_state(found), _own_state(expected), path)
        elif isinstance(found, np.generic) and type(found) is found.dtype.type and found.dtype == expected.dtype:
            if len(_places_that_differ(np.asarray(found).reshape(1), np.asarray(expected).reshape(1))):
                yield _values(path, found, expected)
        elif type(found) in (list, tuple):
            yield from self._sequences(found, expected, path)
        elif type(found) is dict:
            yield from self._mappings(found, expected, path)
        elif type(found) in (set, frozenset):  # their order says nothing
            yield from self._sets(found, expected, path)
        else:
            yield from self._objects(found, expected, path)

    def _sequences(self, found: Sequence[Any], expected: Sequence[Any], path: str) -> Iterator[Difference]:
        if len(found) != len(expected):
            yield Difference(path, f"length {len(found)}", f"length {len(expected)}")
        for number, (here, there) in enumerate(zip(found, expected, strict=False)):
            yield from self.differences(here, there, f"{path}[{number}]")

    def _mappings(self, found: Mapping[Any, Any], expected: Mapping[Any, Any], path: str) -> Iterator[Difference]:
        yield from self.differences([*found], [*expected], f"{path}.keys()")
        for (key, here), there in zip(found.items(), expected.values(), strict=False):
            yield from self.differences(here, there, f"{path}[{_text(key)}]")

    def _sets(self, found: Any, expected: Any, path: str) -> Iterator[Difference]:
        if any(_can_change(value) for value in found):
            self.not_compared.append(f"{path} of {_name(type(found))}")
            return
        # Two elements that are equal may be of two types, and one that is not equal to itself may be in both.
        own, theirs = (Counter((type(value), _safe_repr(value)) for value in values) for values in (found, expected))
        if own != theirs:
            yield _values(path, found, expected)

    def _objects(self, found: Any, expected: Any, path: str) -> Iterator[Difference]:
        try:
            here, there = found.__reduce_ex__(4), expected.__reduce_ex__(4)
        except others():  # user code, which may refuse to be written down in any way
            self.not_compared.append(f"{path} of {_name(type(found))}")
            return
        if isinstance(here, str) or isinstance(there, str):  # the name of a global value
            if here != there:
                yield _values(path, here, there)
            return
        # What makes it, with which arguments; its state; the elements that are added to it.
        for part, (a, b) in enumerate(itertools.zip_longest(here, there)):
            own, theirs = ([*value] if isinstance(value, Iterator) else value for value in (a, b))
            if part == 2 and isinstance(own, dict) and isinstance(theirs, dict):
                yield from self._attributes(own, theirs, path)
            else:
                yield from self.differences(own, theirs, path)

    def _attributes(self, found: dict[str, Any], expected: dict[str, Any], path: str) -> Iterator[Difference]:
        for name in dict.fromkeys([*found, *expected]):
            if (name in found) != (name in expected):
                yield Difference(
                    f"{path}.{name}", *("there" if name in names else "not there" for names in (found, expected))
                )
            else:
                yield from self.differences(found[name], expected[name], f"{path}.{name}")

    def _tensors(self, found: torch.Tensor, expected: torch.Tensor, path: str) -> Iterator[Difference]:
        for what in ("dtype", "device", "shape", "requires_grad"):
            here, there = getattr(found, what), getattr(expected, what)
            if here != there:
                yield Difference(path, f"{what} {_text(here)}", f"{what} {_text(there)}")
                return
        if _steps_of(found.shape, found.stride()) != _steps_of(expected.shape, expected.stride()):
            yield Difference(path, f"strides {found.stride()}", f"strides {expected.stride()}")
            return
        if found.is_meta:  # it has no values
            return
        with torch.no_grad():
            own, theirs = (_bytes_of(value.detach()) for value in (found, expected))
            if not torch.equal(own, theirs):
                places = (own != theirs).reshape(found.numel(), -1).any(1).nonzero()
                yield _elements(
                    path, found.detach().reshape(-1), expected.detach().reshape(-1), places.reshape(-1).numpy()
                )
        self._memories.append((path, _span_of_tensor(found), _span_of_tensor(expected)))

    def _arrays(self, found: Any, expected: Any, path: str) -> Iterator[Difference]:
        for what in ("dtype", "shape"):
            here, there = getattr(found, what), getattr(expected, what)
            if here != there:
                yield Difference(path, f"{what} {_text(here)}", f"{what} {_text(there)}")
                return
        if _steps_of(found.shape, found.strides) != _steps_of(expected.shape, expected.strides):
            yield Difference(path, f"strides {found.strides}", f"strides {expected.strides}")
            return
        if len(places := _places_that_differ(np.ravel(found), np.ravel(expected))):
            yield _elements(path, np.ravel(found), np.ravel(expected), places)
        self._memories.append((path, _span_of_array(found), _span_of_array(expected)))

    def of_memory(self) -> Iterator[Difference]:
        """Tensors and arrays that lie in one memory in one of the batches alone: what is written to one is in both."""
        paths = [path for path, _, _ in self._memories]
        found = _together([span for _, span, _ in self._memories])
        expected = _together([span for _, _, span in self._memories])
        for path, here, there in zip(paths, found, expected, strict=True):
            if here != there:
                yield Difference(path, *(f"in one memory with {paths[first]}" for first in (here, there)))


def _can_change(value: Any) -> bool:
    """Whether it matters if an object is there once or twice: what has a hash by its value does not change."""
    its_hash = getattr(type(value), "__hash__", None)
    if its_hash is None or its_hash is object.__hash__:
        return True
    try:
        hash(value)
    except others():  # user code; a tuple that holds a list has a hash that raises
        return type(value) is not tuple  # itself it does not change, and what it holds is met, too
    return isinstance(value, torch.Tensor | torch.nn.Module)


def _steps_of(shape: Sequence[int], strides: Sequence[int]) -> list[int]:
    """The strides by which elements are found: those of dimensions of one element, and of no element, say nothing."""
    return [stride for size, stride in zip(shape, strides, strict=True) if size > 1] if 0 not in shape else []


def _places_that_differ(found: Any, expected: Any) -> Any:
    """Where two arrays of one dimension and dtype differ in their bits, but for those that belong to no value."""
    if found.dtype.names is not None:
        of_fields = (_places_that_differ(found[name], expected[name]) for name in found.dtype.names)
        return np.unique(np.concatenate([np.empty(0, np.intp), *of_fields]))
    if found.ndim > 1:  # of a field that is an array itself
        differ = [len(_places_that_differ(*rows)) > 0 for rows in zip(found, expected, strict=True)]
        return np.flatnonzero(np.asarray(differ, bool))
    own, theirs = (
        np.frombuffer(value.tobytes(), np.uint8).reshape(len(value), found.itemsize) for value in (found, expected)
    )
    differ = (own != theirs).any(axis=1)
    if found.dtype.char in "gG" and differ.any():  # 10 of 16 bytes are the value
        parts = ((found.real, expected.real), (found.imag, expected.imag))
        same = [(a == b) & (np.signbit(a) == np.signbit(b)) | np.isnan(a) & np.isnan(b) for a, b in parts]
        differ = ~np.logical_and(*same)
    return np.flatnonzero(differ)


def _together(spans: Sequence[_Span]) -> list[int]:
    """For each span the number of the first one that it has memory in common with, directly or through others."""
    first_of = [*range(len(spans))]
    group: list[int] = []
    group_stop = 0
    for number in sorted(first_of, key=spans.__getitem__):
        start, stop = spans[number]
        if start == stop:  # it has no memory
            continue
        if start >= group_stop:
            _name_group(first_of, group)
            group = []
        group.append(number)
        group_stop = max(group_stop, stop)
    _name_group(first_of, group)
    return first_of


def _name_group(first_of: list[int], group: Sequence[int]) -> None:
    first = min(group, default=0)
    for number in group:
        first_of[number] = first


def _span(address: int, shape: Sequence[int], strides_bytes: Sequence[int], item_bytes: int) -> _Span:
    """From where to where elements lie in memory."""
    if 0 in shape:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(shape, strides_bytes, strict=True)]
    below, above = sum(min(0, length) for length in reach), sum(max(0, length) for length in reach)
    return address + below, address + above + item_bytes


def _span_of_tensor(tensor: torch.Tensor) -> _Span:
    item_bytes = tensor.element_size()
    return _span(tensor.data_ptr(), tensor.shape, [stride * item_bytes for stride in tensor.stride()], item_bytes)


def _span_of_array(array: Any) -> _Span:
    return _span(array.__array_interface__["data"][0], array.shape, array.strides, array.itemsize)


def _bytes_in(storage: Any) -> torch.Tensor:
    typed: Any = storage
    untyped = typed.untyped() if isinstance(storage, torch.TypedStorage) else storage
    return torch.tensor([], dtype=torch.uint8).set_(untyped)


def _is_made_of_others(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no memory of its own in strides, as a sparse one."""
    return tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    resolved = tensor.resolve_conj().resolve_neg()
    try:
        dense = resolved.contiguous()
    except NotImplementedError:  # torch copies no numbers of less than a byte
        place = resolved.untyped_storage(), resolved.storage_offset(), resolved.shape, resolved.stride()
        dense = torch.empty(0, dtype=torch.uint8).set_(*place).contiguous()
    # What torch calls contiguous has any stride where there is one element.
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


def _own_state(array: Any) -> Any:
    """What a subclass of an array has beside the values; None of a plain one."""
    return None if type(array) is np.ndarray else getattr(array, "__dict__", None)


def _elements(path: str, found: Any, expected: Any, places: Any) -> Difference:
    """The first of the elements that differ, and how many there are."""
    first = int(places[0])
    more = f" ({len(places)} of {len(found)} elements differ)" if len(found) > 1 else ""
    place = f"{path}.flatten()[{first}]" if len(found) > 1 else path
    return Difference(place, _text(found[first]), _text(expected[first]) + more)


def _values(path: str, found: Any, expected: Any) -> Difference:
    return Difference(path, _text(found), _text(expected))


def _safe_repr(value: Any) -> str:
    try:
        return repr(value)
    except others():  # of user code, and of dtypes that torch itself cannot print
        return f"a value of {_name(type(value))}"


def _text(value: Any) -> str:
    with suppressed_others():  # a dtype that Python has no number for is shown as a tensor
        value = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
    line = " ".join(_safe_repr(value).split()).encode(errors="replace").decode()
    return line if len(line) <= _LONGEST_TEXT else f"{line[:_LONGEST_TEXT]}..."


def _name(value: Any) -> str:
    return f"{getattr(value, '__module__', None) or ''}.{getattr(value, '__qualname__', repr(value))}".removeprefix(
        "builtins."
    )
