"""What a feature is: its numbers, and how many of them a row has. Pure; torch is not needed."""

from __future__ import annotations

from dataclasses import dataclass

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
