"""How features stand in a batch: tensors, and named tuples of tensors.

Every transport and `pin_memory` take named tuples apart. A user's own collate function may make them, too;
`transform.py` takes and gives them.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.graph import Input
from hetstream.mpi_dataworkers.features.operators import DTYPES
from hetstream.mpi_dataworkers.sources.tables import Column, Row, RowGroup

TORCH_DTYPES = {name: getattr(torch, name) for name in DTYPES}


class Jagged(NamedTuple):
    """A list in each row.

    Attributes:
        values: those of all rows, one row after the other.
        lengths: of each row, int64 or int32.
    """

    values: torch.Tensor
    lengths: torch.Tensor


class Nullable(NamedTuple):
    """A dense feature in which values are missing.

    Attributes:
        values: with anything where they are missing.
        valid: bool, of the same shape: whether they are there.
    """

    values: torch.Tensor
    valid: torch.Tensor


class JaggedBatch(NamedTuple):
    """Several jagged features together, in the layout of torchrec's KeyedJaggedTensor: all of one key, then the next.

    Attributes:
        keys: of the features.
        values: of all rows of the first key, of all rows of the second, and so on.
        lengths: of the lists in the same order, int64; as many as keys times rows.
    """

    keys: tuple[str, ...]
    values: torch.Tensor
    lengths: torch.Tensor

    def of(self, key: str) -> Jagged:
        """Return one of the features, without a copy.

        Raises:
            KeyError: there is none of that key.
        """
        if key not in self.keys:
            raise KeyError(f"{key!r} is none of {', '.join(self.keys)}")
        at, rows = self.keys.index(key), len(self.lengths) // len(self.keys)
        before = int(self.lengths[: at * rows].sum())
        lengths = self.lengths[at * rows : (at + 1) * rows]
        return Jagged(self.values[before : before + int(lengths.sum())], lengths)

    def to_torchrec(self) -> Any:
        """Return the same as torchrec's KeyedJaggedTensor, over the same memory.

        Raises:
            FeatureError: torchrec is not installed.
        """
        try:
            from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
        except ImportError as exc:
            raise FeatureError("a KeyedJaggedTensor needs torchrec: pip install torchrec") from exc
        return KeyedJaggedTensor(keys=list(self.keys), values=self.values, lengths=self.lengths)


# Rows of `sources.csv` and `sources.parquet` to a batch of columns: a loader's `collate_fn`.

Feature = torch.Tensor | Nullable | Jagged


def collate_rows(rows: Sequence[Row]) -> dict[str, Feature]:
    """Return the columns of some rows: a tensor each, `Nullable` where the type ends in `?`, `Jagged` where it is a
    list.

    It costs a call for each column and group of rows, whatever the number of rows.

    Args:
        rows: At least one, in the batch's order.

    Raises:
        FeatureError: They are no rows of these sources, or of datasets whose columns differ.
    """
    if not rows or not all(isinstance(row, Row) for row in rows):
        raise FeatureError("collate_rows takes rows of sources.csv and sources.parquet; use torch's default_collate")
    numbers: dict[RowGroup, int] = {}
    group_of = np.fromiter((numbers.setdefault(row.group, len(numbers)) for row in rows), np.int64, len(rows))
    places = np.fromiter((row.place for row in rows), np.int64, len(rows))
    if len(numbers) == 1:
        parts: list[tuple[RowGroup, npt.NDArray[np.int64]]] = [(rows[0].group, places)]
        order = None
    else:
        _check_alike(list(numbers))
        parts = [(group, places[group_of == number]) for group, number in numbers.items()]
        behind_each_other = np.argsort(group_of, kind="stable")
        order = torch.from_numpy(np.argsort(behind_each_other, kind="stable"))
    return {name: _column(name, parts, order) for name in rows[0].group.columns}


def _check_alike(groups: Sequence[RowGroup]) -> None:
    """Refuse to put columns together whose types differ, as those of two datasets in a ConcatDataset may."""
    first, *others = ({name: _type_of(column) for name, column in group.columns.items()} for group in groups)
    for other in others:
        if other != first:
            name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
            kinds = " and ".join(columns.get(name, "missing") for columns in (first, other))
            raise FeatureError(f"rows of one batch have other columns: {name} is {kinds}; give the datasets one type")


def _type_of(column: Column) -> str:
    """As a user writes it."""
    dtype = column.values.dtype.name
    return f"list<{dtype}>" if column.starts is not None else f"{dtype}{'?' if column.valid is not None else ''}"


def _column(name: str, parts: Sequence[tuple[RowGroup, npt.NDArray[np.int64]]], order: torch.Tensor | None) -> Feature:
    found = [(group.columns[name], places) for group, places in parts]
    first = found[0][0]
    if first.starts is not None:
        return _lists(name, parts, order)
    values = _ordered([column.values[places] for column, places in found], order)
    if first.valid is None:
        return values
    valid = [column.valid[places] for column, places in found if column.valid is not None]
    return Nullable(values, _ordered(valid, order))


def _ordered(pieces: Sequence[npt.NDArray[np.generic]], order: torch.Tensor | None) -> torch.Tensor:
    if order is None:
        return torch.from_numpy(pieces[0])
    return torch.from_numpy(np.concatenate(pieces))[order]


def _lists(name: str, parts: Sequence[tuple[RowGroup, npt.NDArray[np.int64]]], order: torch.Tensor | None) -> Jagged:
    all_values, all_starts, all_lengths, before = [], [], [], 0
    for group, places in parts:
        values, _, starts = group.columns[name]
        assert starts is not None
        all_values.append(torch.from_numpy(values))
        all_starts.append(starts[places] + before)
        all_lengths.append(starts[places + 1] - starts[places])
        before += len(values)
    lengths = _ordered(all_lengths, order)
    joined = all_values[0] if len(all_values) == 1 else torch.cat(all_values)
    return Jagged(joined[ranges(_ordered(all_starts, order), lengths, int(lengths.sum()))], lengths)


def ranges(starts: torch.Tensor, counts: torch.Tensor, total: int) -> torch.Tensor:
    """`start, start + 1, ...`, `count` numbers for each pair, one after the other; `total` is the sum of the counts."""
    before = torch.cumsum(counts, 0) - counts
    return repeated(starts - before, counts).add_(torch.arange(total, device="cpu"))


def repeated(values: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Repeat each value by its count. NumPy takes a third of the time of `torch.repeat_interleave`."""
    return torch.from_numpy(np.repeat(values.numpy(), counts.numpy()))


# The inputs of a feature graph out of a batch, checked against the graph's types.


class Values(NamedTuple):
    """A feature of the batch at hand.

    Attributes:
        values: of all rows, row by row; of any shape.
        lengths: int64, of the lists of a jagged feature.
        valid: where values are there, in one dimension; None where all are.
    """

    values: torch.Tensor
    lengths: torch.Tensor | None = None
    valid: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Columns:
    """The features of the batch at hand by name: the parts of `Values`, each in a dict of its own.

    A hundred features are then read and written by a few calls, and not by some for each.

    Attributes:
        values: of all features.
        lengths: of those that are jagged.
        valid: of those in which values are missing.
    """

    values: dict[str, torch.Tensor] = field(default_factory=dict)
    lengths: dict[str, torch.Tensor] = field(default_factory=dict)
    valid: dict[str, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, features: Mapping[str, Values]) -> Columns:
        """Of features one by one."""
        found = cls()
        for name, (values, lengths, valid) in features.items():
            found.values[name] = values
            if lengths is not None:
                found.lengths[name] = lengths
            if valid is not None:
                found.valid[name] = valid
        return found

    def __getitem__(self, name: str) -> Values:
        return Values(self.values[name], self.lengths.get(name), self.valid.get(name))

    def items(self) -> Iterator[tuple[str, Values]]:
        """Yield each feature with its name."""
        return ((name, self[name]) for name in self.values)

    def add(self, others: Columns) -> None:
        """Add other features."""
        self.values.update(others.values)
        self.lengths.update(others.lengths)
        self.valid.update(others.valid)


# Whether lists with these lengths, int64 and of one shape for all features, are as many values as each feature has.
AreLists = Callable[[Sequence[torch.Tensor], Sequence[int]], bool]


def are_lists(lengths: Sequence[torch.Tensor], sizes: Sequence[int]) -> bool:
    """Return whether no length is negative, and the sum of each feature's lengths is its number of values."""
    together = torch.stack(list(lengths))
    if together.numel() == 0:
        return not any(sizes)
    # As unsigned words negative lengths are the largest; NumPy takes a fifth of the time of torch's.
    if int(together.numpy().view(np.uint64).max()) > max(sizes):
        return False
    return bool(together.sum(1).tolist() == list(sizes))


class Reader:
    """Takes the inputs of a graph out of batches.

    Args:
        inputs: of the graph.
        lists: what looks at the lengths of lists.
    """

    def __init__(self, inputs: Sequence[Input], lists: AreLists = are_lists) -> None:
        self._inputs = inputs
        self._are_lists = lists
        self._dense = [node for node in inputs if not node.type.is_jagged]
        self._jagged = [node for node in inputs if node.type.is_jagged]
        self._widths = [node.type.width for node in self._dense]
        self._names = [node.name for node in (*self._dense, *self._jagged)]
        dtypes = [TORCH_DTYPES[node.type.dtype] for node in (*self._dense, *self._jagged)]
        self._kinds = [(dtype, *_IN_HOST_MEMORY) for dtype in (*dtypes, *[torch.int64] * len(self._jagged))]

    def __call__(self, batch: Mapping[str, Any]) -> tuple[int, Columns]:
        """The inputs, and the number of rows.

        Raises:
            FeatureError: The batch does not fit; the message names each feature.
        """
        return self._at_once(batch) or read_batch(self._inputs, batch)

    def _at_once(self, batch: Mapping[str, Any]) -> tuple[int, Columns] | None:
        """The inputs where all are what they usually are: tensors of the graph's types, and `Jagged` of those.

        A hundred features are looked at by a few calls, and not by some for each; None where one is something else.
        """
        if type(batch) is not dict:
            return None
        found = [*map(batch.get, self._names)]
        dense, jagged = found[: len(self._dense)], found[len(self._dense) :]
        if {*map(type, jagged)} - {Jagged}:
            return None
        values, lengths = zip(*jagged, strict=True) if jagged else ((), ())
        tensors = [*dense, *values, *lengths]
        if {*map(type, tensors)} != {torch.Tensor} or [*map(_kind_of, tensors)] != self._kinds:
            return None
        first = (*dense, *lengths)[0]
        rows = first.shape[0] if first.dim() else -1
        shapes = {width: (rows,) if width == 1 else (rows, width) for width in {*self._widths}}
        if [*map(_shape_of, dense)] != [*map(shapes.__getitem__, self._widths)]:
            return None
        if jagged:
            if {*map(_shape_of, lengths)} != {(rows,)} or {*map(torch.Tensor.dim, values)} != {1}:
                return None
            if not self._are_lists(lengths, [*map(torch.Tensor.numel, values)]):
                return None
        names = self._names[len(self._dense) :]
        features = zip(self._names, tensors, strict=False)  # the lengths are behind them
        return rows, Columns(dict(features), dict(zip(names, lengths, strict=True)))


_shape_of = attrgetter("shape")
_kind_of = attrgetter("dtype", "is_cpu", "layout", "is_nested")
# All but the dtype of what `_kind_of` gives.
_IN_HOST_MEMORY = (True, torch.strided, False)


def read_batch(inputs: Sequence[Input], batch: Mapping[str, Any]) -> tuple[int, Columns]:
    """Return the inputs of a graph out of a batch, and its number of rows.

    Raises:
        FeatureError: The batch does not fit; the message names each feature.
    """
    problems: list[str] = []
    features: dict[str, Values] = {}
    rows: dict[str, int] = {}
    if not isinstance(batch, Mapping):
        problems.append(f"it is a {type(batch).__name__}; it must be a dict of features (see collate_rows)")
        inputs = ()
    elif missing := [node.name for node in inputs if node.name not in batch]:
        has = ", ".join(map(str, list(batch)[:10])) or "nothing"
        problems.append(f"it has no {', '.join(map(repr, missing))}; it has {has}")
        inputs = [node for node in inputs if node.name in batch]
    for node in inputs:
        try:
            features[node.name], rows[node.name] = _read(node, batch)
        except FeatureError as error:
            problems.append(str(error))
    if len(set(rows.values())) > 1:
        counted = Counter(rows.values())
        usual = counted.most_common(1)[0][0]
        others = ", ".join(f"{name} has {count}" for name, count in rows.items() if count != usual)
        problems.append(f"features of one batch must have one number of rows, {usual} here: {others}")
    num_rows = next(iter(rows.values()), 0)
    row = -1
    if not problems:
        lists = {name: feature for name, feature in features.items() if feature.lengths is not None}
        problems, row = _problems_of_lists(lists, num_rows)
    if problems:
        text = "; ".join(dict.fromkeys(problems))
        raise FeatureError(f"the batch does not fit the feature graph: {text}", row, num_rows)
    return num_rows, Columns.of(features)


def _read(node: Input, batch: Mapping[str, Any]) -> tuple[Values, int]:
    found, valid, lengths = batch[node.name], None, None
    if node.type.is_jagged:
        if not (isinstance(found, tuple) and len(found) == 2):
            raise FeatureError(f"{node.name} is {_described(found)}; a jagged feature is Jagged(values, lengths)")
        found, lengths = (_tensor(node.name, part) for part in found)
    elif isinstance(found, tuple) and len(found) == 2:
        if not node.type.is_nullable:
            raise FeatureError(f"{node.name} has missing values; say dense({node.name!r}, ..., is_nullable=True)")
        found, valid = (_tensor(node.name, part) for part in found)
    values = _tensor(node.name, found)
    if values.dtype != TORCH_DTYPES[node.type.dtype]:
        raise FeatureError(f"{node.name} is {_described(values)}, and {node.type.dtype} in the graph")
    if lengths is not None:
        if values.dim() != 1 or lengths.dim() != 1 or lengths.dtype not in (torch.int64, torch.int32):
            raise FeatureError(f"{node.name}: values and lengths have one dimension, and lengths are int64 or int32")
        return Values(values, lengths.to(torch.int64)), len(lengths)
    shape = values.shape if node.type.width == 1 else values.shape[:-1]
    if len(shape) != 1 or (node.type.width > 1 and values.shape[-1] != node.type.width):
        wanted = "(rows,)" if node.type.width == 1 else f"(rows, {node.type.width})"
        raise FeatureError(f"{node.name} has the shape {tuple(values.shape)}, and {wanted} in the graph")
    if valid is not None:
        if valid.dtype != torch.bool or valid.shape != values.shape:
            raise FeatureError(f"{node.name}: valid is bool and has the shape of the values")
        valid = valid.reshape(-1)
    return Values(values, None, valid), shape[0]


def _tensor(name: str, found: Any) -> torch.Tensor:
    if isinstance(found, np.ma.MaskedArray):
        raise FeatureError(f"{name} is a masked array; give Nullable(x.data, ~np.ma.getmaskarray(x))")
    if isinstance(found, np.ndarray) and found.dtype.kind in "fiub" and found.dtype.itemsize <= 8:
        # Copied where torch does not take it: read-only, backwards (of one row too), of another byte order.
        found = np.require(found, found.dtype.newbyteorder("="), ["C", "W"])
        return torch.from_numpy(found.copy() if any(stride < 0 for stride in found.strides) else found)
    if not isinstance(found, torch.Tensor) or found.device.type != "cpu" or not _has_values(found):
        wanted = "a tensor in host memory, or a NumPy array of numbers of 8 bytes at most"
        raise FeatureError(f"{name} is {_described(found)}; it must be {wanted}")
    # torch would ask another class what its functions are to make of it.
    return found if type(found) is torch.Tensor else found.as_subclass(torch.Tensor)


def _has_values(found: torch.Tensor) -> bool:
    """Whether its values lie where it says.

    Those of a class with a dispatch of its own, such as a MaskedTensor, do not: native code would read at address 0.
    """
    has_own_dispatch = type(found).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return found.layout is torch.strided and not found.is_nested and not has_own_dispatch


def _described(found: Any) -> str:
    if isinstance(found, torch.Tensor):
        if not _has_values(found):
            if found.layout is torch.strided and not found.is_nested:
                return f"a {type(found).__name__}"
            return "nested" if found.is_nested else str(found.layout).removeprefix("torch.")
        return f"{str(found.dtype).removeprefix('torch.')} on {found.device}"
    kind = f" of {found.dtype}" if isinstance(found, np.ndarray) else ""
    return f"a {type(found).__name__}{kind}"


def _problems_of_lists(jagged: Mapping[str, Values], num_rows: int) -> tuple[list[str], int]:
    """What is wrong with lists, and the row at fault; -1 where it is none, or none alone."""
    lengths = {name: feature.lengths for name, feature in jagged.items() if feature.lengths is not None}
    sizes = [len(feature.values) for feature in jagged.values()]
    if not lengths or _are_right(torch.stack([*lengths.values()]), sizes):
        return [], -1
    fallen = {name: row for name, of in lengths.items() if (row := _first_negative(of)) >= 0}
    problems = [_falling(name, lengths[name], row) for name, row in fallen.items()]
    rows = set(fallen.values())
    for (name, of), num_values in zip(lengths.items(), sizes, strict=True):
        total = int(of.sum())
        if total != num_values:
            problems.append(f"{name} has {num_values} values, and its lengths are {total} together")
        elif num_rows and not fallen and int(of.max()) > num_values:
            row = int(of.argmax())
            rows.add(row)
            problems.append(f"{name} has a list that is longer than all of its values: row {row} has {int(of[row])}")
    return problems, rows.pop() if len(rows) == 1 else -1


def _are_right(lengths: torch.Tensor, sizes: Sequence[int]) -> bool:
    if lengths.sum(1).tolist() != sizes:
        return False
    if not lengths.numel():
        return True
    # Lengths whose sum is beyond int64 may come out as the number of values.
    return int(lengths.min()) >= 0 and all(map(int.__le__, lengths.amax(1).tolist(), sizes))


def _first_negative(lengths: torch.Tensor) -> int:
    rows = (lengths < 0).nonzero()
    return int(rows[0]) if len(rows) else -1


def _falling(name: str, lengths: torch.Tensor, row: int) -> str:
    """Where the borders between the rows of a feature fall: at a negative length."""
    border = int(lengths[:row].sum())
    fallen = f"from {border} to {border + int(lengths[row])}"
    return f"{name} has a negative length: row {row} has {int(lengths[row])}, so its borders fall {fallen}"


def forms_of(batch: Mapping[str, Any]) -> dict[str, tuple[str, str, int] | None]:
    """Of each column its form, dtype and width."""
    return {str(name): _form_of(value) for name, value in batch.items()}


def _form_of(found: Any) -> tuple[str, str, int] | None:
    """Of a column; None where only its step can say whether it fits."""
    form = "dense"
    if isinstance(found, tuple) and len(found) == 2:
        found, other = found
        if not isinstance(other, torch.Tensor | np.ndarray):
            return None
        form = "nullable" if _dtype_name(other.dtype) == "bool" else "jagged"
    if not isinstance(found, torch.Tensor | np.ndarray) or found.ndim > 2:
        return None
    return form, _dtype_name(found.dtype), int(found.shape[1]) if found.ndim == 2 else 1


@functools.cache
def _dtype_name(dtype: Any) -> str:
    return dtype.name if isinstance(dtype, np.dtype) else str(dtype).removeprefix("torch.")


def missing_columns(inputs: Sequence[Input], columns: str) -> list[str]:
    """Return what a graph needs and batches with these columns do not have, in words; [] where nothing is known of
    them.

    Args:
        inputs: of the graph.
        columns: what `forms_of` says, as JSON; "" where no batch has been seen.
    """
    if not columns:
        return []
    known = json.loads(columns)
    problems = []
    for node in inputs:
        if node.name not in known:
            problems.append(f"{node.name!r} is not among {', '.join([*known][:10]) or 'nothing'}")
            continue
        found = known[node.name]
        if found is None:
            continue
        form, dtype, width = found
        wanted = "jagged" if node.type.is_jagged else "dense"
        if form == "nullable" and not node.type.is_jagged and not node.type.is_nullable:
            problems.append(f"{node.name} has missing values; say dense({node.name!r}, ..., is_nullable=True)")
        elif (form == "jagged") != node.type.is_jagged or dtype != node.type.dtype:
            problems.append(f"{node.name} is {form} {dtype}, and {wanted} {node.type.dtype} in the graph")
        elif width != node.type.width and not node.type.is_jagged:
            problems.append(f"{node.name} has {width} values in a row, and {node.type.width} in the graph")
    return problems
