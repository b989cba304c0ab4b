"""The random generators of the sample that is being made: for datasets whose samples several threads make at once.

The global generators of `random`, NumPy and torch belong to the process; those here belong to the sample, and give the
same numbers whoever makes it: a data worker's threads, the loader in process, torch's own worker processes.
"""

from __future__ import annotations

import random
import threading

import numpy as np

from hetstream.mpi_dataworkers.errors import PipelineError

# The global generators are seeded with the seed itself; these streams have nothing in common with theirs.
_APART = 0x5EED_0F_5A_3B1E


class making_sample:
    """This thread makes a sample, or with one seed a step; the 64-bit seed is that of the global generators."""

    # Written out: a generator as context takes four times as long, of the time for each sample.
    __slots__ = ("_before", "numpy", "python", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed ^ _APART
        self.python: random.Random | None = None
        self.numpy: np.random.Generator | None = None

    def __enter__(self) -> None:
        self._before = _current.sample
        _current.sample = self

    def __exit__(self, *_: object) -> None:
        _current.sample = self._before


class _Current(threading.local):
    """What this thread makes."""

    sample: making_sample | None = None


_current = _Current()


def sample_generator() -> random.Random:
    """Return the generator of the current sample; each call gives the same one, where the last draw left it.

    Raises:
        PipelineError: this thread makes no sample.
    """
    sample = _current_sample("sample_generator")
    if sample.python is None:
        sample.python = random.Random(sample.seed)
    return sample.python


def numpy_sample_generator() -> np.random.Generator:
    """Return the same as a NumPy generator, with numbers of its own.

    Raises:
        PipelineError: this thread makes no sample.
    """
    sample = _current_sample("numpy_sample_generator")
    if sample.numpy is None:
        sample.numpy = np.random.default_rng(sample.seed)
    return sample.numpy


def makes_sample() -> bool:
    """Return whether this thread makes a sample for hetstream; not, say, when a program reads its dataset itself."""
    return _current.sample is not None


def _current_sample(name: str) -> making_sample:
    sample = _current.sample
    if sample is None:
        raise PipelineError(
            f"{name}() outside of a sample: it works only in the dataset's methods and its transform, while the loader "
            "calls them, and in the thread in which it calls them. Draw from `random` elsewhere; hand the generator to "
            "threads of your own."
        )
    return sample
