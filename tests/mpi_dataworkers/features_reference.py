"""The eleven operators on one row after another, with NumPy's scalars: what `transform.py` is compared with.

Called by tests and by whoever wants to know what an operator does to a value; it is as plain as it can be, and slow.
A row is a list of scalars of the feature's dtype, of one value or more where the feature is dense; None is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.operators import RANGES

Row = Sequence[Any]
_64_BITS = 2**64 - 1


def apply(operator: ops.Operator, rows: Sequence[Row]) -> list[list[Any]]:
    """What an operator makes of a feature."""
    with np.errstate(all="ignore"):
        if type(operator) in _OF_ROWS:
            return [_OF_ROWS[type(operator)](operator, row) for row in rows]
        return [[_OF_VALUES[type(operator)](operator, value) for value in row] for row in rows]


def logit(operator: ops.Logit, value: Any) -> Any:
    x, low = np.float32(value), np.float32(operator.eps)
    high = np.float32(1) - low
    t = low if x < low else high if x > high else x
    return np.log(t / (np.float32(1) - t))


def box_cox(operator: ops.BoxCox, value: Any) -> Any:
    x = np.float64(value)
    if not x > 0:
        return np.float32(value)
    exponent = operator.lmbda * np.log(x)
    return np.float32(np.log(x) if operator.lmbda == 0 else np.expm1(exponent) / operator.lmbda)


def onehot(operator: ops.Onehot, row: Row) -> list[Any]:
    classes = [np.float32(0)] * operator.num_classes
    chosen = 0
    if len(row):
        place = (np.float32(row[0]) - np.float32(operator.lower)) / np.float32(operator.step)
        if 0 <= place < operator.num_classes:
            chosen = int(place)
    classes[chosen] = np.float32(1)
    return classes


def sigrid_hash(operator: ops.SigridHash, value: Any) -> Any:
    hashed = hash_128_to_64(operator.salt & _64_BITS, twang_mix64(int(value) & _64_BITS))
    signed = hashed - 2**64 if hashed >= 2**63 else hashed
    return np.int64(signed % operator.max_value)  # Python's % has the divisor's sign


def twang_mix64(key: int) -> int:
    """Thomas Wang's mix of a 64-bit word."""
    key = (~key + (key << 21)) & _64_BITS
    key ^= key >> 24
    key = (key + (key << 3) + (key << 8)) & _64_BITS
    key ^= key >> 14
    key = (key + (key << 2) + (key << 4)) & _64_BITS
    key ^= key >> 28
    return (key + (key << 31)) & _64_BITS


def hash_128_to_64(upper: int, lower: int) -> int:
    """CityHash's way to make one 64-bit word of two."""
    factor = 0x9DDFEA08EB382D69
    a = (lower ^ upper) * factor & _64_BITS
    a ^= a >> 47
    b = (upper ^ a) * factor & _64_BITS
    b ^= b >> 47
    return b * factor & _64_BITS


def first_x(operator: ops.FirstX, row: Row) -> list[Any]:
    return list(row[: operator.n])


def clamp(operator: ops.Clamp, value: Any) -> Any:
    kind = type(value)
    if operator.lower is not None and value < kind(operator.lower):
        return kind(operator.lower)
    if operator.upper is not None and value > kind(operator.upper):
        return kind(operator.upper)
    return value


def bucketize(operator: ops.Bucketize, value: Any) -> Any:
    borders = [type(value)(border) for border in operator.borders]
    if np.isnan(value):
        return np.int32(len(borders) > 1)
    below = sum(border < value for border in borders)
    return np.int32(below + (borders.count(value) == 2))


def ngram(operator: ops.Ngram, row: Row) -> list[Any]:
    size = min(operator.n, len(row))
    return [row[start + place] for start in range(len(row) - size + 1) for place in range(size)]


def map_id(operator: ops.MapId, value: Any) -> Any:
    return np.int64(operator.table[value] if 0 <= value < len(operator.table) else 0)


def fill_null(operator: ops.FillNull, value: Any) -> Any:
    return operator.value if value is None or (operator.nan and np.isnan(value)) else value


def cast_value(operator: ops.Cast, value: Any) -> Any:
    if operator.dtype not in RANGES:
        return np.dtype(operator.dtype).type(value)
    low, high = RANGES[operator.dtype]
    if np.isnan(value):
        whole = 0
    elif np.isinf(value):
        whole = high if value > 0 else low
    else:
        whole = int(value)
    return np.dtype(operator.dtype).type(min(max(whole, low), high))


_OF_VALUES: dict[type[ops.Operator], Callable[[Any, Any], Any]] = {
    ops.Logit: logit,
    ops.BoxCox: box_cox,
    ops.SigridHash: sigrid_hash,
    ops.Clamp: clamp,
    ops.Bucketize: bucketize,
    ops.MapId: map_id,
    ops.FillNull: fill_null,
    ops.Cast: cast_value,
}
_OF_ROWS: dict[type[ops.Operator], Callable[[Any, Row], list[Any]]] = {
    ops.Onehot: onehot,
    ops.FirstX: first_x,
    ops.Ngram: ngram,
}
