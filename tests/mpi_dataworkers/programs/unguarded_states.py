"""What a forward may read that torch.compile has no guard for, each with a change in mid-run: a factor of its values.

`COMPARED` has what is compared with how it was, and `REFUSED` what is not captured, with a part of the reason: of each
kind what the model is given at first, how its forward reads the factor, and the change.
"""

from __future__ import annotations

import builtins
import collections
import enum
import math
import sys
from collections.abc import Callable
from contextlib import suppress as quietly
from typing import Any

import state_settings
import torch
from state_programs import Change, Read
from torch import nn

Kind = tuple[Callable[[], Any], Read, Change]
UNDO: list[Callable[[], object]] = []


def giving(owner: Any, name: str, value: Any) -> Change:
    """Gives an owner an attribute, until `put_back` is called."""

    def change(_: Any) -> None:
        UNDO.append(lambda: delattr(owner, name))
        setattr(owner, name, value)

    return change


def becoming(value: Any) -> Change:
    return lambda model: setattr(model, "state", value)


def put_back() -> None:
    while UNDO:
        UNDO.pop()()


def function():  # type: ignore[no-untyped-def]
    pass


def least() -> float:
    return min(1.0, 2.0)


def shadow(_: Any) -> None:
    UNDO.append(lambda: globals().pop("min"))
    globals()["min"] = lambda *_: 3.0


def more_digits(_: Any) -> None:
    before = sys.get_int_max_str_digits()
    UNDO.append(lambda: sys.set_int_max_str_digits(before))
    sys.set_int_max_str_digits(2 * before)


def flush(_: Any) -> None:
    UNDO.append(lambda: torch.set_flush_denormal(False))
    torch.set_flush_denormal(True)


class Level(enum.IntEnum):
    LOW = 1
    HIGH = 3


def annotate(_: Any) -> None:
    UNDO.append(function.__annotations__.clear)
    function.__annotations__["late"] = int


class Softplus(nn.Softplus):
    pass


class Proto:
    pass


class Answers(type):
    """Classes that say themselves what is one of theirs."""

    yes = False

    def __instancecheck__(cls, one: Any) -> bool:
        return cls.yes


class Answering(metaclass=Answers):
    pass


KINDS = (Answering,)
Other = Answering
MISSING = AttributeError


class Drops:
    """Drops what is raised in it."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> bool:
        return True


class Finds:
    """Finds attributes that it does not have."""

    def __getattr__(self, name: str) -> float:
        return 1.0


def caught(model: Any) -> Any:
    try:
        return model.state.late
    except AttributeError:
        return 1.0


def all_caught(model: Any) -> Any:
    try:
        return model.state.late
    except:  # noqa: E722
        return 1.0


def caught_by_another_name(model: Any) -> Any:
    try:
        return model.state.late
    except (KeyError, MISSING):
        return 1.0


def suppressed(model: Any) -> Any:
    factor = 1.0
    with quietly(MISSING):
        factor = model.state.late
    return factor


def dropped(model: Any) -> Any:
    factor = 1.0
    with Drops():
        factor = model.state.late
    return factor


def matched(model: Any) -> float:
    match model.state:
        case Other():
            return 3.0
    return 1.0


def pair() -> list[object]:
    return [object(), object()]


COMPARED: dict[str, Kind] = {
    "builtin that a global hides": (int, lambda _: least(), shadow),
    "attribute of builtins": (
        int,
        lambda _: 3.0 if hasattr(builtins, "late") else 1.0,
        giving(builtins, "late", 1),
    ),
    "attribute of a function": (int, lambda _: getattr(function, "late", 1.0), giving(function, "late", 3.0)),
    "attribute of a module": (
        int,
        lambda _: getattr(state_settings, "late", 1.0),
        giving(state_settings, "late", 3.0),
    ),
    "attribute of a module, asked for": (
        int,
        lambda _: 3.0 if hasattr(state_settings, "late") else 1.0,
        giving(state_settings, "late", 3.0),
    ),
    "name among a module's": (
        int,
        lambda _: 3.0 if "late" in vars(state_settings) else 1.0,
        giving(state_settings, "late", 3.0),
    ),
    "call of a layer's class": (
        Softplus,
        lambda m: m.state(torch.ones(4)),
        giving(Softplus, "__call__", lambda _, one: one * 3),
    ),
    "order of a dictionary": (
        lambda: collections.OrderedDict(first=1.0, second=3.0),
        lambda m: next(iter(m.state.values())),
        lambda m: m.state.move_to_end("first"),
    ),
    "negative zero": (lambda: 0.0, lambda m: 2 + math.copysign(1, m.state), becoming(-0.0)),
    "negative zero in a tuple": (lambda: (0.0,), lambda m: 2 + math.copysign(1, m.state[0]), becoming((-0.0,))),
    "type of a number in a tuple": (lambda: (1,), lambda m: 1.0 + isinstance(m.state[0], float), becoming((1.0,))),
    "type of a number in a set": (lambda: {1}, lambda m: 1.0 + isinstance(next(iter(m.state)), bool), becoming({True})),
    "type of a number in a frozen set": (
        lambda: frozenset({1}),
        lambda m: 1.0 + isinstance(next(iter(m.state)), bool),
        becoming(frozenset({True})),
    ),
    "denormal numbers": (lambda: torch.full((4,), 1e-39), lambda m: m.state * 1e30 * 1e9, flush),
}
if hasattr(sys, "get_int_max_str_digits"):
    COMPARED["digits of a number"] = int, lambda _: sys.get_int_max_str_digits() / 4300, more_digits
REFUSED: dict[str, tuple[str, Kind]] = {
    "attribute that hides what is found": (
        "found by __getattr__",
        (Finds, lambda m: m.state.late, lambda m: vars(m.state).update(late=3.0)),
    ),
    "attribute that is not there": (
        "the forward catches AttributeError",
        (Proto, caught, lambda m: setattr(m.state, "late", 3.0)),
    ),
    "attribute that is not there, with except alone": (
        "the forward catches all exceptions",
        (Proto, all_caught, lambda m: setattr(m.state, "late", 3.0)),
    ),
    "attribute that is not there, by another name": (
        "the forward catches AttributeError",
        (Proto, caught_by_another_name, lambda m: setattr(m.state, "late", 3.0)),
    ),
    "attribute that is not there, suppressed": (
        "the forward catches AttributeError",
        (Proto, suppressed, lambda m: setattr(m.state, "late", 3.0)),
    ),
    "attribute that is not there, in a context": (
        "the forward catches exceptions in a context manager of its own",
        (Proto, dropped, lambda m: setattr(m.state, "late", 3.0)),
    ),
    "attribute that a class has not": (
        "the forward catches AttributeError",
        (Proto, caught, giving(Proto, "late", 3.0)),
    ),
    "names of a class": (
        "the forward reads dir",
        (int, lambda _: 3.0 if "late" in dir(Proto) else 1.0, giving(Proto, "late", 3.0)),
    ),
    "annotations": (
        "the forward reads __annotations__",
        (int, lambda _: 1.0 + len(function.__annotations__), annotate),
    ),
    "class that answers itself": (
        "Answering answers itself",
        (int, lambda m: 3.0 if isinstance(m.state, Answering) else 1.0, giving(Answering, "yes", True)),
    ),
    "class that answers itself, by another name": (
        "Answering answers itself",
        (int, lambda m: 3.0 if isinstance(m.state, Other) else 1.0, giving(Answering, "yes", True)),
    ),
    "class that answers itself, in a tuple": (
        "Answering answers itself",
        (int, lambda m: 3.0 if isinstance(m.state, KINDS) else 1.0, giving(Answering, "yes", True)),
    ),
    "class that answers itself, as an attribute": (
        "Answering answers itself",
        (lambda: Answering, lambda m: 3.0 if isinstance(1, m.state) else 1.0, giving(Answering, "yes", True)),
    ),
    "class that answers itself, in a pattern": (
        "Answering answers itself",
        (int, matched, giving(Answering, "yes", True)),
    ),
    "version of a tensor": (
        "the forward reads _version",
        (lambda: torch.ones(4), lambda m: 1.0 + m.state._version, lambda m: m.state.add_(0)),
    ),
    "identity": (
        "whether two objects are the same",
        (
            pair,
            lambda m: 3.0 if m.state[0] is m.state[1] else 1.0,
            lambda m: m.state.__setitem__(1, m.state[0]),
        ),
    ),
    "whole number with a name, as an index": (
        "torch.compile cannot trace it, and says",
        (lambda: Level.LOW, lambda m: [1.0, 2.0, 3.0, 4.0][m.state], becoming(Level.HIGH)),
    ),
    "torch.func": (
        "torch.func",
        (
            lambda: torch.ones(4),
            lambda m: torch.func.vmap(lambda one: one * m.state[0])(torch.ones(4)),
            lambda m: m.state.fill_(3.0),
        ),
    ),
}
