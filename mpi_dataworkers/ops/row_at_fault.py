"""Which sample of a step is at fault, where what was raised names a row: a feature graph's or a source's error.

Called by `pipeline.py`, which then leaves out that sample alone, if it leaves any out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hetstream.mpi_dataworkers.errors import FeatureError, SourceError


def place_at_fault(error: BaseException | None, samples: Sequence[Any], make: Callable[[Any], Any]) -> int:
    """Where the sample at fault stands among those of a step; -1 where nobody knows.

    Args:
        error: what was raised for all of them.
        samples: they, or their indices.
        make: does the same with a part of them; raises such an error again, or one with it as its cause.
    """
    if not isinstance(error, FeatureError | SourceError) or not 0 <= error.row < len(samples):
        return -1
    places = [error.row]
    if isinstance(error, FeatureError):
        if error.num_rows != len(samples):
            return -1
        # A collate function may sort, so that the row is another sample's.
        places += [place for place in range(len(samples)) if place != error.row]
    return next((place for place in places if _fails(type(error), make, samples[place : place + 1])), -1)


def named(error: BaseException | None, sample: Any) -> None:
    """Say of what was raised for a sample which row of which file it is, if it is a `sources.table.Row`."""
    if error is not None and isinstance(origin := getattr(sample, "origin", None), str):
        error.args = (f"{error}; it is {origin}",)


def _fails(kind: type[FeatureError | SourceError], make: Callable[[Any], Any], sample: Any) -> bool:
    """Whether one sample alone is at fault, as the only row."""
    try:
        make(sample)
    except Exception as error:  # noqa: BLE001, user code
        return any(isinstance(each, kind) and each.row == 0 for each in (error, error.__cause__))
    return False
