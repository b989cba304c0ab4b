"""Random generators that a dataset or a collate function holds itself, as in `self.rng = np.random.default_rng()`.

torch's worker processes each have a copy of them, so what they draw depends on how many processes there are and on what
each made before. Here they are seeded before each sample, as the global generators are: a sample then does not depend
on who makes it. Found are generators of `random`, NumPy and torch, and objects with `set_random_state(seed=...)`
(MONAI's transforms), wherever `reachable` looks.
"""

from __future__ import annotations

import contextlib
import inspect
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.ops.reachable import reachable
from hetstream.mpi_dataworkers.order.sharding import derive_seed


class OwnGenerators:
    """The generators that some objects hold.

    Args:
        *roots: where to look; what is attached to them later is not found.
    """

    def __init__(self, *roots: Any) -> None:
        self._found = list(reachable(roots, lambda generator: _is_generator(generator) or _is_randomizable(generator)))

    def __bool__(self) -> bool:
        return bool(self._found)

    def seed(self, seed: int) -> None:
        """Seed each of them, for one sample; the seed has 64 bits."""
        for place, generator in enumerate(self._found):
            _seed(generator, derive_seed(seed, place))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Give generators the states back that they had; not to objects that only have `set_random_state`."""
        states = [_state_of(generator) for generator in self._found]
        try:
            yield
        finally:
            for generator, state in zip(self._found, states, strict=True):
                _restore(generator, state)


def _is_generator(value: Any) -> bool:
    return isinstance(value, random.Random | np.random.Generator | np.random.RandomState | torch.Generator)


def _is_randomizable(value: Any) -> bool:
    method = getattr(type(value), "set_random_state", None)
    if not inspect.isfunction(method):
        return False
    return "seed" in inspect.signature(method).parameters


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.Generator):
        kind: Any = type(generator.bit_generator)
        generator.bit_generator.state = kind(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed & 0xFFFFFFFF)
    elif isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    else:
        generator.set_random_state(seed=seed & 0xFFFFFFFF)


def _state_of(generator: Any) -> Any:
    if isinstance(generator, random.Random):
        return generator.getstate()
    if isinstance(generator, np.random.Generator):
        return generator.bit_generator.state
    return generator.get_state() if isinstance(generator, np.random.RandomState | torch.Generator) else None


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState | torch.Generator):
        generator.set_state(state)
