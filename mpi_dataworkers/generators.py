"""The random generators of the sample that is being made: for datasets whose samples several threads make at once.

The global generators of `random`, NumPy and torch belong to the process; those here belong to the sample, and give the
same numbers whoever makes it: a data worker's threads, the loader in process, torch's own worker processes.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import MethodType
from typing import Any, Protocol

import numpy as np

from hetstream.mpi_dataworkers.errors import PipelineError

# The global generators are seeded with the seed itself; these streams have nothing in common with theirs.
_APART = 0x5EED_0F_5A_3B1E


class FrontCache(Protocol):
    """Where the deterministic fronts of samples are kept: `ops.prefix_cache.PrefixCache`."""

    def value(self, front: Any, name: str, make: Callable[..., Any], args: Sequence[Any], keywords: Any) -> Any:
        """What a front makes of its arguments, kept or made now."""


class making_sample:
    """This thread makes a sample, or with one seed a step; the 64-bit seed is that of the global generators.

    Args:
        seed: see above.
        cache: of the fronts of samples, where there is one.
    """

    # Written out: a generator as context takes four times as long, of the time for each sample.
    __slots__ = ("_before", "cache", "numpy", "python", "seed")

    def __init__(self, seed: int, cache: FrontCache | None = None) -> None:
        self.seed = seed ^ _APART
        self.cache = cache
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


def states_of_sample() -> tuple[Any, ...]:
    """The states of the current sample's generators."""
    sample = _current.sample
    if sample is None:
        return ()
    python = None if sample.python is None else sample.python.getstate()
    return python, None if sample.numpy is None else str(sample.numpy.bit_generator.state)


@contextlib.contextmanager
def uncached() -> Iterator[None]:
    """A front is being made: what is deterministic in it is part of it."""
    sample = _current.sample
    if sample is None:
        yield
        return
    cache, sample.cache = sample.cache, None
    try:
        yield
    finally:
        sample.cache = cache


def current_cache() -> FrontCache | None:
    """Where the front of the current sample is kept; None where it is not."""
    return None if _current.sample is None else _current.sample.cache


class deterministic:
    """Say of a function that its value depends on its arguments alone, and on the files that paths among them name.

    With `cache=` the value is kept, and made again when a file, the function's code or an installed package changes.
    Without it the function is called as always. Put it on the function or method that reads and decodes a sample, and
    augment behind it:

        @hetstream.deterministic
        def load(path):
            return Image.open(path).convert("RGB").resize((256, 256))

    What a method reads of its object is looked at once in each process. The value is made of plain values, lists,
    dictionaries, NumPy arrays, tensors and PIL images.

    Args:
        function: it.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        cache = current_cache()
        if cache is None:
            return self.function(*args, **keywords)
        return cache.value(self, self.name, self.function, args, keywords)

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(getattr(self.function, "__name__", type(self.function).__name__))

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        # By its name, as a function; one of the script, and one that is not found there, travels itself.
        name, module = getattr(self.function, "__qualname__", ""), getattr(self.function, "__module__", None)
        found: Any = None if module in ("__main__", "__mp_main__") else sys.modules.get(module or "")
        for part in name.split("."):
            found = getattr(found, part, None)
        return name if found is self else (deterministic, (self.function,))


def _current_sample(name: str) -> making_sample:
    sample = _current.sample
    if sample is None:
        raise PipelineError(
            f"{name}() outside of a sample: it works only in the dataset's methods and its transform, while the loader "
            "calls them, and in the thread in which it calls them. Draw from `random` elsewhere; hand the generator to "
            "threads of your own."
        )
    return sample
