"""Operators as plain values that travel: a list of calls, from which a process makes one Python function.

What a data worker gets is this list and some tensors, so it needs no module of the user's program.
"""

from __future__ import annotations

import enum
import functools
import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch


@dataclass(frozen=True)
class Ref:
    """A value of the program, in the arguments of a call."""

    name: str


@dataclass(frozen=True)
class Call:
    """One operator.

    Attributes:
        name: of its value.
        module, path: where the function is found, as `torch` and `log1p`; of a method, `METHOD` and its name.
        args, kwargs: plain values, with a `Ref` for each value of the program.
        function: of one that has no such place: it runs only where it is.
    """

    name: str
    module: str
    path: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    function: Any = None


METHOD = "method"
# Where functions are that do not know their module.
_PLACES = ("torch", "torch.nn.functional", "torch._C._nn", "torch.special", "torch.linalg", "torch.fft")
_KNOWN_MODULES = frozenset(("torch", "_operator", "operator", "builtins", "math"))


def place_of(function: Any) -> tuple[str, str] | None:
    """Return where other processes find a function; None where they do not."""
    if isinstance(function, torch._ops.OpOverload):
        return ("torch.ops", str(function)) if function.namespace in ("aten", "prims") else None
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None)
    if not isinstance(name, str):
        return None
    module = getattr(function, "__module__", None)
    places = [(module, name)] if isinstance(module, str) and module.split(".")[0] in _KNOWN_MODULES else []
    if (place := next((place for place in places if _is_at(function, *place)), None)) is not None:
        return place
    return _names().get(id(function))


@functools.cache
def _names() -> dict[int, tuple[str, str]]:
    """Functions of torch that do not know their own place, by identity."""
    modules = [(place, importlib.import_module(place)) for place in reversed(_PLACES)]
    return {
        id(value): (place, name) for place, module in modules for name, value in vars(module).items() if callable(value)
    }


def _is_at(function: Any, module: str, path: str) -> bool:
    try:
        return _find(module, path) is function
    except (ImportError, AttributeError):
        return False


def _find(module: str, path: str) -> Any:
    root = torch.ops if module == "torch.ops" else importlib.import_module(module)
    return attrgetter(path)(root)


def called(call: Call) -> Callable[..., Any]:
    """Return what a call calls."""
    if call.function is not None:
        function: Callable[..., Any] = call.function
        return function
    if call.module == METHOD:
        return lambda value, *args, **kwargs: getattr(value, call.path)(*args, **kwargs)
    found: Callable[..., Any] = _find(call.module, call.path)
    return found


def replace_in(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return an argument with everything that is no container replaced by what `change` makes of it."""
    if isinstance(value, tuple | list):
        return type(value)(replace_in(item, change) for item in value)
    if isinstance(value, dict):
        return {key: replace_in(item, change) for key, item in value.items()}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return slice(*(replace_in(part, change) for part in parts))
    return change(value)


@dataclass(frozen=True)
class OperatorProgram:
    """Calls, what goes in and what comes out.

    Attributes:
        inputs: names of the values that are given, in order.
        calls: in the order in which they run.
        outputs: names of the values that come out, or plain values.
        constants: tensors that belong to it, by name.
        bounded: names of the values whose calls must have no tensor of `torch`'s grain size; see `TooLarge`.
    """

    inputs: tuple[str, ...]
    calls: tuple[Call, ...]
    outputs: tuple[Any, ...]
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    bounded: frozenset[str] = frozenset()

    @functools.cached_property
    def function(self) -> Callable[..., list[Any]]:
        """All of it as one function of the inputs, which returns the outputs; drops each value after its last use."""
        return _Writer(self).function()

    def __call__(self, *inputs: Any) -> list[Any]:
        return self.function(*inputs)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "function"}


# Elements from which on torch cuts an operator into one piece for each thread.
GRAIN_SIZE = 32768


class TooLarge(ValueError):
    """An operator has so many elements that its last bits depend on the number of threads. Internal to this package."""


def _check_size(*values: Any) -> None:
    if any(isinstance(value, torch.Tensor) and value.numel() >= GRAIN_SIZE for value in values):
        raise TooLarge


class _Writer:
    """Writes a program as Python's source: a third of the cost of going through the list for each batch."""

    def __init__(self, program: OperatorProgram) -> None:
        self._program = program
        self._names: dict[str, str] = {}
        self._globals: dict[str, Any] = {}

    def function(self) -> Callable[..., list[Any]]:
        program = self._program
        lines = [f"def run({', '.join(self._name(name) for name in program.inputs)}):"]
        for name, tensor in program.constants.items():
            self._names[name] = self._constant(tensor)
        last_uses = self._last_uses()
        for place, call in enumerate(program.calls):
            arguments = [self._text(value) for value in call.args]
            arguments += [f"{key}={self._text(value)}" for key, value in call.kwargs.items()]
            function = f"{arguments.pop(0)}.{call.path}" if call.module == METHOD else self._constant(called(call))
            line = f"    {self._name(call.name)} = {function}({', '.join(arguments)})"
            if call.name in program.bounded:
                values = [self._name(name) for name in (*references((call.args, call.kwargs)), call.name)]
                line += f"; {self._constant(_check_size)}({', '.join(values)})"
            done = [self._name(name) for name in last_uses.get(place, ())]
            lines.append(line + (f"; {' = '.join(done)} = None" if done else ""))
        lines.append(f"    return [{', '.join(self._text(value) for value in program.outputs)}]")
        exec(compile("\n".join(lines), "<operators of a forward>", "exec"), self._globals)
        made: Callable[..., list[Any]] = self._globals["run"]
        return made

    def _last_uses(self) -> dict[int, list[str]]:
        last: dict[str, int] = {}
        for place, call in enumerate(self._program.calls):
            last[call.name] = place
            for name in references((call.args, call.kwargs)):
                last[name] = place
        kept = {*references(self._program.outputs), *self._program.constants}
        found: dict[int, list[str]] = {}
        for name, place in last.items():
            if name not in kept:
                found.setdefault(place, []).append(name)
        return found

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, f"v{len(self._names)}")

    def _constant(self, value: Any) -> str:
        name = f"g{len(self._globals)}"
        self._globals[name] = value
        return name

    def _text(self, value: Any) -> str:
        if isinstance(value, Ref):
            return self._name(value.name)
        if value is None or isinstance(value, bool | int | str):
            return repr(value)
        if isinstance(value, tuple):
            return f"({''.join(f'{self._text(item)}, ' for item in value)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._text, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key!r}: {self._text(item)}" for key, item in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._text, (value.start, value.stop, value.step)))})"
        return self._constant(value)


def references(value: Any) -> list[str]:
    """Return names of the values that arguments refer to."""
    found: list[str] = []

    def note(item: Any) -> Any:
        if isinstance(item, Ref):
            found.append(item.name)
        return item

    replace_in(value, note)
    return found


# A forward as plain values: its operators in the order in which they run. Needs no torch; tests write it by hand.


class Kind(enum.Enum):
    """What gives a value of the graph."""

    LEAF = "leaf"  # a tensor of the batch, as the loader gave it
    PLAIN = "plain"  # an argument that is no tensor, or a tensor that is no leaf of the batch
    PARAMETER = "parameter"
    BUFFER = "buffer"
    OPERATOR = "operator"


@dataclass(frozen=True)
class Operator:
    """A value of the graph, and what makes it.

    Attributes:
        name: of the value, unique in the graph.
        target: what is called, as `aten.log.default`; for an input what it is, as `weight`.
        inputs: names of the values that it takes.
        kind: what gives it.
        writes: those of its inputs that it changes in place.
        shares: those of its inputs whose memory its value may share.
        several: whether its value is several ones, of which each has an operator that takes it.
        random: whether it draws random numbers.
        keeps: why it cannot run in a data worker, whatever its inputs are; "" when it can.
        line: where the program calls it, as `train.py:12`; "" where that is not known.
        source: the text of that line.
    """

    name: str
    target: str
    inputs: tuple[str, ...] = ()
    kind: Kind = Kind.OPERATOR
    writes: tuple[str, ...] = ()
    shares: tuple[str, ...] = ()
    several: bool = False
    random: bool = False
    keeps: str = ""
    line: str = ""
    source: str = ""


@dataclass(frozen=True)
class ForwardGraph:
    """The operators of a forward.

    Attributes:
        operators: inputs first, each before what takes its value.
        outputs: names of the values that the forward returns.
    """

    operators: tuple[Operator, ...]
    outputs: tuple[str, ...]

    def __post_init__(self) -> None:
        known: set[str] = set()
        for operator in self.operators:
            if unknown := {*operator.inputs, *operator.writes, *operator.shares} - known:
                raise ValueError(f"{operator.name} takes {sorted(unknown)}, which no operator before it makes")
            if operator.name in known:
                raise ValueError(f"two operators are called {operator.name}")
            known.add(operator.name)
        if unknown := set(self.outputs) - known:
            raise ValueError(f"the forward returns {sorted(unknown)}, which no operator makes")

    def by_name(self) -> dict[str, Operator]:
        """Return the operators by their names."""
        return {operator.name: operator for operator in self.operators}
