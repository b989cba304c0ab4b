"""Random generators that a dataset or a collate function holds itself, as in `self.rng = np.random.default_rng()`.

torch's worker processes each have a copy of them, so what they draw depends on how many processes there are and on what
each made before. Here they are seeded before each sample, as the global generators are: a sample then does not depend
on who makes it. In a program that only knows torch the seed follows from the generator's own state (see `origins`), so
the program's seeds keep their meaning, and two generators of one state draw the same numbers, as they do there.

Found are generators of `random`, NumPy and torch, and objects with `set_random_state(seed=...)` (MONAI's transforms),
wherever `reachable` looks, in the classes of what is there, and in globals of the program that its code names.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import random
from collections.abc import Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any

import numpy as np
import torch

from hetstream.mpi_dataworkers.ops.origins import digest_of_state
from hetstream.mpi_dataworkers.ops.own_code import is_programs
from hetstream.mpi_dataworkers.ops.reachable import reachable
from hetstream.mpi_dataworkers.ops.reached import names_in
from hetstream.mpi_dataworkers.order.sharding import derive_seed


class OwnGenerators:
    """The generators that some objects hold.

    Args:
        *roots: where to look; what is attached to them later is not found.
    """

    def __init__(self, *roots: Any) -> None:
        found: dict[int, Any] = {}
        looked: set[int] = set()

        def note(held: Any) -> bool:
            if _is_generator(held) or _is_randomizable(held):
                found.setdefault(id(held), held)
                return True
            for generator in _beside(held, looked):
                found.setdefault(id(generator), generator)
            return False

        for _ in reachable(roots, note):
            pass
        self._found = list(found.values())

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._found)

    def seed(self, seed: int, origins: Sequence[int] | None = None) -> None:
        """Seed each of them, for one sample.

        Args:
            seed: 64 bits.
            origins: of each, see `Origins.own`.
        """
        for place, generator in enumerate(self._found):
            own = derive_seed(seed, place) if origins is None else derive_seed(seed ^ origins[place])
            _seed(generator, own)

    def states(self) -> list[Any]:
        """The states that they have now, for `restore` and `digests`."""
        return [_state_of(generator) for generator in self._found]

    def restore(self, states: Sequence[Any]) -> None:
        """Give each the state back that it had."""
        for generator, state in zip(self._found, states, strict=True):
            _restore(generator, state)

    def digests(self) -> list[int]:
        """Of the state of each, with its kind."""
        return [digest_of_state((type(generator).__name__, _state_of(generator))) for generator in self._found]

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Give them the states back that they had."""
        states = self.states()
        try:
            yield
        finally:
            self.restore(states)


def _beside(held: Any, looked: set[int]) -> Iterator[Any]:
    """Generators in the classes of an object, and in globals and closures that its code names.

    Args:
        held: the object, or a function.
        looked: ids of classes and of code that was looked at before.
    """
    functions: list[Any] = [held]
    for kind in type(held).__mro__:
        if id(kind) not in looked and kind is not object:
            looked.add(id(kind))
            for value in vars(kind).values():
                if _is_generator(value):
                    yield value
                functions.append(value)
    with contextlib.suppress(Exception):  # a proxy asks for its object, and there is none
        functions += vars(held).values()
    for value in functions:
        yield from _named_by(function_of(value), looked)


def _named_by(function: FunctionType | None, looked: set[int]) -> Iterator[Any]:
    if function is None or id(function.__code__) in looked or not is_programs(function):
        return
    looked.add(id(function.__code__))
    named = [function.__globals__.get(name) for name in names_in(function.__code__)]
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            named.append(cell.cell_contents)
    for value in named:
        if _is_generator(value):
            yield value
        else:
            yield from _named_by(function_of(value), looked)


def function_of(value: Any) -> FunctionType | None:
    """The function that a method, a property or a partial is made of."""
    for _ in range(8):  # a partial of a partial
        if isinstance(value, FunctionType):
            return value
        if isinstance(value, staticmethod | classmethod | MethodType):
            value = value.__func__
        elif isinstance(value, property):
            value = value.fget
        elif isinstance(value, functools.partial):
            value = value.func
        else:
            break
    return None


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
    if isinstance(generator, np.random.RandomState | torch.Generator):
        return generator.get_state()
    return {name: _state_of(held) for name, held in _held_by(generator).items()}


def _restore(generator: Any, state: Any) -> None:
    if isinstance(generator, random.Random):
        generator.setstate(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState | torch.Generator):
        generator.set_state(state)
    else:
        for name, held in _held_by(generator).items():
            # Not to a generator of its class, which other objects draw from: it was not seeded here.
            if name in getattr(generator, "__dict__", ()) and name in state:
                _restore(held, state[name])


def _held_by(randomizable: Any) -> dict[str, Any]:
    """The generators of an object with `set_random_state`, by attribute: its own, or as MONAI's its class's until it is
    seeded."""
    places = [*map(vars, reversed(type(randomizable).__mro__)), getattr(randomizable, "__dict__", {})]
    return {name: value for place in places for name, value in place.items() if _is_generator(value)}
