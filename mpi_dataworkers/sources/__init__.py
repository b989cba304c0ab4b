"""Datasets over files: `sources.hdf5`, `sources.parquet` and `sources.csv` (rows); photographs are in `images/`.

Most modules need a library of their own (an extra of the distribution), so this package imports none of them: write
`from hetstream.mpi_dataworkers.sources.hdf5 import Hdf5Dataset`. The classes are map-style datasets by protocol
(`__len__`, `__getitem__`, `__getitems__`), return numpy arrays and Python scalars (those of rows a mapping of them),
and never import torch: torch's own DataLoader takes them as they are, and a data worker that serves them need not load
torch for their sake.

Those that read the samples of a batch at once, and transform them one by one, each with its own seed, carry a mark.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

_MARK = "_hetstream_reads_apart"
_Method = TypeVar("_Method", bound=Callable[..., Any])


def transforms_what_it_reads(getitems: _Method) -> _Method:
    """Say of a `__getitems__` that it is `self.transform` over `self.read_samples(indices)`, and nothing else."""
    setattr(getitems, _MARK, True)
    return getitems


def reads_apart(dataset: object) -> bool:
    """Whether a loader may call `read_samples` and `transform` in the place of `__getitems__`.

    A subclass with a `__getitems__` of its own, and a program's class that has a method called `read_samples`, are
    asked as torch asks them.
    """
    return hasattr(getattr(type(dataset), "__getitems__", None), _MARK)
