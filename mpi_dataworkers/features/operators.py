"""The eleven operators of a feature graph: what each computes, exactly. Pure; torch is not needed.

The set is Table 1 of RAP (Wang et al., ASPLOS 2024). SigridHash, Bucketize, FirstX, Clamp, FillNull and Cast follow
TorchArrow's functions of those names (https://pytorch.org/torcharrow, release 0.2.0); Logit, BoxCox, Onehot, Ngram and
MapId follow RAP's additions to it. Where those leave a case open the docstring decides it and says so.

An operator takes one feature. Where it takes values, it takes those of dense features and of jagged ones alike, one by
one. Nothing here is checked when an operator is made: `FeatureGraph` does that, for all of its steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import numpy as np

# What a feature is: its numbers, and how many of them a row has. Pure; torch is not needed.

FLOATS = ("float32", "float64")
INTEGERS = ("int32", "int64")
DTYPES = (*FLOATS, *INTEGERS)
# Smallest and largest value.
RANGES = {"int32": (-(2**31), 2**31 - 1), "int64": (-(2**63), 2**63 - 1)}


@dataclass(frozen=True)
class FeatureType:
    """The type of a feature.

    Attributes:
        dtype: of its values: `float32`, `float64`, `int32` or `int64`.
        is_jagged: whether each row has a list of its own length; else it has `width` values.
        width: values in a row, of a dense feature.
        is_nullable: whether values may be missing. FillNull ends that; no other operator takes such a feature.
    """

    dtype: str
    is_jagged: bool = False
    width: int = 1
    is_nullable: bool = False

    @property
    def is_float(self) -> bool:
        """Whether its values are floating-point numbers."""
        return self.dtype in FLOATS

    def __str__(self) -> str:
        form = "jagged" if self.is_jagged else "dense" if self.width == 1 else f"dense (width {self.width})"
        return f"{form} {self.dtype}{', nullable' if self.is_nullable else ''}"


@dataclass(frozen=True)
class Operator:
    """One operator with its parameters.

    Attributes:
        takes: dtypes of the features that it takes.
        takes_dense: whether it takes features that are not jagged.
    """

    takes: ClassVar[Sequence[str]] = DTYPES
    takes_dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            object.__setattr__(self, field.name, _of_python(value))

    @property
    def name(self) -> str:
        """As it stands in JSON and in messages."""
        return type(self).__name__

    def problems(self) -> Iterator[str]:
        """Yield what is wrong with its parameters, whatever the feature."""
        yield from ()

    def refusal(self, given: FeatureType) -> str:
        """Return why it does not take such a feature; "" if it does."""
        if given.is_nullable:
            return "values may be missing: put FillNull before it"
        if given.dtype not in self.takes:
            return f'it takes {" or ".join(self.takes)}: put Cast("{self.takes[0]}") before it'
        if not given.is_jagged and not self.takes_dense:
            return "it takes jagged features only"
        return ""

    def result(self, given: FeatureType) -> FeatureType:
        """Return the type of what it makes of a feature that it takes."""
        return given


@dataclass(frozen=True)
class Logit(Operator):
    """log(t / (1 - t)), where t is the value clamped to [eps, 1 - eps]; in float32.

    NaN stays NaN.

    Args:
        eps: Larger than 0 and smaller than 0.5; 1 - eps is smaller than 1 in float32.
    """

    takes = FLOATS
    eps: float = 1e-6

    def problems(self) -> Iterator[str]:
        if not 0 < self.eps < 0.5 or np.float32(1) - np.float32(self.eps) == 1:
            yield f"eps={self.eps}: between 0 and 0.5, and 1 - eps below 1 in float32"

    def result(self, given: FeatureType) -> FeatureType:
        return replace(given, dtype="float32")


@dataclass(frozen=True)
class BoxCox(Operator):
    """log(x) if lmbda is 0, else (x**lmbda - 1) / lmbda, for values above 0; others stay as they are.

    The result is float32, of a float64 computation: in float32 x**lmbda - 1 loses its digits where lmbda is small.
    SciPy's function of the name refuses values that are not positive. NaN stays NaN.

    Args:
        lmbda: The exponent (`lambda` is a word of Python).
    """

    takes = FLOATS
    lmbda: float = 0.0

    def problems(self) -> Iterator[str]:
        if not math.isfinite(self.lmbda):
            yield f"lmbda={self.lmbda}: a finite number"

    def result(self, given: FeatureType) -> FeatureType:
        return replace(given, dtype="float32")


@dataclass(frozen=True)
class Onehot(Operator):
    """A row of `num_classes` zeros with a one at the class of the row's first value.

    The class is trunc((x - lower) / step) with step = (upper - lower) / num_classes, all in float32. It is 0 where that
    is no class: below `lower`, from `upper` on (not the last class), for NaN and infinity. Decided here: a row without
    values has class 0. The result is dense float32 with a width of `num_classes`.

    Args:
        lower, upper: Of the values that are told apart; lower < upper.
        num_classes: How many, 1 to 2**24: float32 tells no more whole numbers apart. A row takes 4 bytes for each.
    """

    lower: float = 0.0
    upper: float = 1.0
    num_classes: int = 2

    def problems(self) -> Iterator[str]:
        if not (math.isfinite(self.lower) and math.isfinite(self.upper) and self.lower < self.upper):
            yield f"lower={self.lower}, upper={self.upper}: finite, lower < upper"
        if not 1 <= self.num_classes <= 2**24:
            yield f"num_classes={self.num_classes}: at least 1 and at most 2**24: float32 tells no more apart"
        elif math.isfinite(self.upper - self.lower) and not 0 < self.step < math.inf:
            yield f"lower={self.lower}, upper={self.upper}: too near or too far apart for float32"

    @property
    def step(self) -> float:
        """Width of a class, rounded to float32."""
        with np.errstate(over="ignore", under="ignore"):
            return float((np.float32(self.upper) - np.float32(self.lower)) / np.float32(self.num_classes))

    def result(self, given: FeatureType) -> FeatureType:  # noqa: ARG002, it is the same for all
        return FeatureType("float32", width=self.num_classes)


@dataclass(frozen=True)
class SigridHash(Operator):
    """An id's hash in 0 .. max_value - 1: hash(salt, mix(x)) mod max_value, with the sign of max_value.

    `mix` is Thomas Wang's 64-bit mix (folly's twang_mix64) and `hash` the step of CityHash that makes one 64-bit word
    of two (folly's hash_128_to_64 with the salt as the upper one); it is read as a signed number. As TorchArrow's
    `sigrid_hash`. With max_value 1 every id becomes 0.

    Args:
        salt: Any int64.
        max_value: How many ids there are afterwards, at least 1: the rows of an embedding table.
    """

    takes = ("int64",)
    salt: int = 0
    max_value: int = 1

    def problems(self) -> Iterator[str]:
        if not 0 < self.max_value <= RANGES["int64"][1]:
            yield f"max_value={self.max_value}: 1 to 2**63 - 1"
        if not RANGES["int64"][0] <= self.salt <= RANGES["int64"][1]:
            yield f"salt={self.salt}: an int64"


@dataclass(frozen=True)
class FirstX(Operator):
    """The first n values of each list, or all of a shorter one; nothing is padded.

    Args:
        n: At least 0.
    """

    takes_dense = False
    n: int = 1

    def problems(self) -> Iterator[str]:
        if self.n < 0:
            yield f"n={self.n}: at least 0"


@dataclass(frozen=True)
class Clamp(Operator):
    """Each value, or the nearest bound where it is outside; NaN stays NaN.

    Args:
        lower, upper: The bounds, lower <= upper; None for no bound. Integers within the dtype for integer features.
    """

    lower: float | int | None = None
    upper: float | int | None = None

    def problems(self) -> Iterator[str]:
        bounds = [bound for bound in (self.lower, self.upper) if bound is not None]
        if not all(map(_is_finite, bounds)):
            yield f"lower={self.lower}, upper={self.upper}: finite, or None for no bound"
        elif len(bounds) == 2 and bounds[0] > bounds[1]:
            yield f"lower={self.lower}, upper={self.upper}: lower <= upper"
        elif not bounds:
            yield "it has neither lower nor upper"

    def refusal(self, given: FeatureType) -> str:
        wrong = [bound for bound in (self.lower, self.upper) if bound is not None and not fits(bound, given.dtype)]
        return super().refusal(given) or (f"bound {wrong[0]} is no {given.dtype}" if wrong else "")


@dataclass(frozen=True)
class Bucketize(Operator):
    """The number of borders below a value (a lower bound), as int32.

    Two cases follow TorchArrow and not `torch.bucketize(right=False)`: a value equal to a border that stands there
    twice lies between the two; NaN is in bucket 1 where there are several borders. Decided here: it is in bucket 0
    where there is one. Values and borders are compared in the feature's dtype.

    Args:
        borders: Finite, none smaller than the one before it, none more than twice. At least one.
    """

    takes = FLOATS
    borders: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "borders", _in_order(self.borders))

    def problems(self) -> Iterator[str]:
        if not isinstance(self.borders, tuple):
            yield f"borders={self.borders}: numbers in their order"
            return
        if not self.borders:
            yield "borders is empty: at least one"
        for at, border in enumerate(self.borders):
            if not math.isfinite(border):
                yield f"borders[{at}]={border}: a finite number"
            elif at and border < self.borders[at - 1]:
                yield f"borders[{at}]={border} is below borders[{at - 1}]={self.borders[at - 1]}: they may not decrease"

    def refusal(self, given: FeatureType) -> str:
        if said := super().refusal(given):
            return said
        with np.errstate(over="ignore"):
            compared = np.asarray(self.borders, dtype=given.dtype)
        if not np.isfinite(compared).all():
            return f"a border is no {given.dtype}"
        thrice = np.flatnonzero(compared[2:] == compared[:-2])
        if len(thrice):
            at = thrice[0]
            return f"borders[{at}]={self.borders[at]} stands there three times in {given.dtype}: twice at most"
        return ""

    def result(self, given: FeatureType) -> FeatureType:
        return replace(given, dtype="int32")


@dataclass(frozen=True)
class Ngram(Operator):
    """All windows of n values that follow one another in a list, one after the other; ids are not hashed or mixed.

    A list of 3 with n=2, (a, b, c), becomes (a, b, b, c). A list that is shorter than n is one window; an empty one
    stays empty. With m = min(n, length) the result has (length - m + 1) * m values. RAP's text has n-grams over several
    features; its program does this.

    Args:
        n: At least 1.
    """

    takes_dense = False
    n: int = 2

    def problems(self) -> Iterator[str]:
        if self.n < 1:
            yield f"n={self.n}: at least 1"


@dataclass(frozen=True)
class MapId(Operator):
    """table[x], as int64; 0 where the table has no such place. Decided here: 0 for negative ids, too.

    Args:
        table: What the ids 0, 1, 2, ... become; at least one.
    """

    takes = INTEGERS
    table: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "table", _in_order(self.table))

    def problems(self) -> Iterator[str]:
        if not isinstance(self.table, tuple):
            yield f"table={self.table}: what the ids 0, 1, 2, ... become, in this order"
            return
        if not self.table:
            yield "table is empty: at least one value"
        if not all(fits(value, "int64") for value in self.table):
            yield "table: a value is no int64"

    def result(self, given: FeatureType) -> FeatureType:
        return replace(given, dtype="int64")


@dataclass(frozen=True)
class FillNull(Operator):
    """The value, or `value` where there is none.

    Missing is what the source says is missing (see `Nullable`). NaN is a number that is not one, and stays, unless
    `nan` says otherwise.

    Args:
        value: For what is missing; an integer within the dtype for integer features.
        nan: Whether NaN counts as missing, in floating-point features.
    """

    value: float | int = 0
    nan: bool = False

    def problems(self) -> Iterator[str]:
        if not _is_finite(self.value):
            yield f"value={self.value}: a finite number"

    def refusal(self, given: FeatureType) -> str:
        if not fits(self.value, given.dtype):
            return f"value {self.value} is no {given.dtype}"
        return "" if given.is_float or not self.nan else f"nan=True, and no {given.dtype} is NaN"

    def result(self, given: FeatureType) -> FeatureType:
        return replace(given, is_nullable=False)


@dataclass(frozen=True)
class Cast(Operator):
    """The value in another dtype.

    Decided here, because engines differ: from floating point to integers it truncates towards zero; what is outside
    becomes the smallest or largest integer, and NaN becomes 0. From int64 to int32, likewise. To floating point it
    rounds to the nearest.

    Args:
        dtype: `float32`, `float64`, `int32` or `int64`.
    """

    dtype: str = "float32"

    def problems(self) -> Iterator[str]:
        if self.dtype not in DTYPES:
            yield f"dtype={self.dtype!r}: one of {', '.join(DTYPES)}"

    def result(self, given: FeatureType) -> FeatureType:
        return replace(given, dtype=self.dtype)


OPERATORS: tuple[type[Operator], ...] = (
    *(Logit, BoxCox, Onehot, SigridHash, FirstX, Clamp),
    *(Bucketize, Ngram, MapId, FillNull, Cast),
)


def _of_python(value: Any) -> Any:
    """JSON, digests and equality are those of Python's numbers, where -0.0 equals 0.0: so it becomes 0.0."""
    value = value.item() if isinstance(value, np.generic) else value
    return 0.0 if isinstance(value, float) and value == 0 else value


def _in_order(values: Any) -> Any:
    """Numbers that follow one another, as a tuple; anything else as it is, which a graph refuses.

    A dict would be taken for its keys, and a set has no order.
    """
    if isinstance(values, Mapping | Set) or not isinstance(values, Iterable):
        return values
    return tuple(map(_of_python, values))


def _is_finite(number: float | int) -> bool:
    """Whether it is a number that float64 has, of a kind that `math.isfinite` refuses, too."""
    return abs(number) <= float(np.finfo(np.float64).max)


def fits(value: float | int, dtype: str) -> bool:
    """Return whether a number is one of a dtype: integers within its range, finite floating-point numbers."""
    if dtype in RANGES:
        return isinstance(value, int) and RANGES[dtype][0] <= value <= RANGES[dtype][1]
    return abs(value) <= float(np.finfo(dtype).max)
