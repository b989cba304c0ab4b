"""What a forward may read, each with a change in mid-run: a factor of its values.

`STATES` has of each kind what the model is given at first, how its forward reads the factor, and the change.
`CONSTANTS` has the same of what torch.compile takes for constant, and `WAYS` the ways to change a batch in place.
"""

from __future__ import annotations

import abc
import array
import collections
import contextvars
import copy
import dataclasses
import functools
import itertools
import multiprocessing
import os
import random
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import state_settings
import torch
from torch import nn

Change = Callable[[Any], object]
Read = Callable[[Any], Any]
NAME = "HETSTREAM_TESTS_FACTOR"


@dataclasses.dataclass(slots=True)
class Slots:
    gain: float = 1.0


@dataclasses.dataclass(frozen=True)
class Frozen:
    gain: float = 1.0


class Settings:
    scale = 1.0
    mean = torch.ones(4)


class Meta(type):
    factor = 1.0


class OfMeta(metaclass=Meta):
    pass


class Gain:
    """An object whose functions a program replaces."""

    def value(self) -> float:
        return 1.0

    @property
    def attribute(self) -> float:
        return 1.0

    @staticmethod
    def fixed() -> float:
        return 1.0

    @classmethod
    def of_class(cls) -> float:
        return 1.0


class Below(Gain):
    """Has what `Gain` has, until a program gives it its own."""


class Heir(Gain):
    """Gets another class above it."""


class Threefold(Gain):
    def value(self) -> float:
        return 3.0


@functools.lru_cache
def cached() -> float:
    return state_settings.cfg.gain


def shifted(values: torch.Tensor, mean: torch.Tensor = torch.ones(4)) -> torch.Tensor:  # noqa: B008
    return values * mean


KIND = abc.ABCMeta("KIND", (), {})  # with which a class is registered
LOCAL = contextvars.ContextVar("LOCAL", default=1.0)


def imported(_: Any) -> float:
    from state_settings import SCALE

    return SCALE


def numpy_inside(_: Any) -> float:
    import numpy

    return 2.0 if numpy.random.rand() < 0.1 else 1.0


def stepping(model: Any) -> torch.Tensor:
    model.state += 0.37
    return torch.full((1,), 1.1) ** model.state


def setting(owner: Any, name: str, value: Any) -> Change:
    return lambda _: setattr(owner, name, value)


def unchanged(_: Any) -> None:
    """It changes by itself, in each step."""


STATES: dict[str, tuple[Callable[[], Any], Read, Change]] = {
    "types of two objects": (
        lambda: [Gain(), Gain()],
        lambda m: 3.0 if type(m.state[0]) is type(m.state[1]) else 1.0,
        lambda m: m.state.__setitem__(1, Threefold()),
    ),
    "classes of two objects": (
        lambda: [Gain(), Gain()],
        lambda m: 3.0 if m.state[0].__class__ is m.state[1].__class__ else 1.0,
        lambda m: m.state.__setitem__(1, Threefold()),
    ),
    "type that an attribute names": (
        lambda: [Gain, Gain()],
        lambda m: 3.0 if type(m.state[1]) is m.state[0] else 1.0,
        lambda m: m.state.__setitem__(0, Threefold),
    ),
    "slots": (Slots, lambda m: m.state.gain, lambda m: setattr(m.state, "gain", 3.0)),
    "frozen dataclass": (Frozen, lambda m: m.state.gain, lambda m: object.__setattr__(m.state, "gain", 3.0)),
    "class attribute of a global class": (int, lambda _: Settings.scale, setting(Settings, "scale", 3.0)),
    "object in a module": (int, lambda _: state_settings.cfg.gain, lambda _: setattr(state_settings.cfg, "gain", 3.0)),
    "class in a module": (int, lambda _: state_settings.Cfg.scale, setting(state_settings.Cfg, "scale", 3.0)),
    "value in a module": (int, lambda _: state_settings.SCALE, setting(state_settings, "SCALE", 3.0)),
    "import inside": (int, imported, setting(state_settings, "SCALE", 3.0)),
    "function in a module": (int, lambda _: state_settings.gain(), setting(state_settings, "gain", lambda: 3.0)),
    "class tensor in place": (int, lambda _: Settings.mean, lambda _: Settings.mean.add_(1)),
    "class tensor bound anew": (int, lambda _: Settings.mean, setting(Settings, "mean", torch.full((4,), 3.0))),
    "tensor in a list": (
        lambda: [torch.ones(4)],
        lambda m: m.state[0],
        lambda m: m.state.__setitem__(0, torch.full((4,), 3.0)),
    ),
    "tensor in an object in place": (
        lambda: SimpleNamespace(mean=torch.ones(4)),
        lambda m: m.state.mean,
        lambda m: m.state.mean.add_(1),
    ),
    "tensor in an object bound anew": (
        lambda: SimpleNamespace(mean=torch.ones(4)),
        lambda m: m.state.mean,
        lambda m: setattr(m.state, "mean", torch.full((4,), 3.0)),
    ),
    "tensor attribute in place": (lambda: torch.ones(4), lambda m: m.state, lambda m: m.state.add_(1)),
    "tensor attribute bound anew": (
        lambda: torch.ones(4),
        lambda m: m.state,
        lambda m: setattr(m, "state", torch.full((4,), 3.0)),
    ),
    "tensor uncounted": (lambda: torch.ones(4), lambda m: m.state, lambda m: m.state.data.numpy().fill(3.0)),
    "default of a function": (int, lambda m: shifted(torch.ones(4)), lambda _: shifted.__defaults__[0].fill_(3.0)),
    "ndarray": (lambda: np.ones(1), lambda m: float(m.state[0]), lambda m: m.state.__setitem__(0, 3.0)),
    "array": (
        lambda: array.array("d", [1.0]),
        lambda m: m.state[0],
        lambda m: m.state.__setitem__(0, 3.0),
    ),
    "multiprocessing value": (
        lambda: multiprocessing.Value("d", 1.0, lock=False),
        lambda m: m.state.value,
        lambda m: setattr(m.state, "value", 3.0),
    ),
    "deque": (lambda: collections.deque([1.0]), lambda m: m.state[0], lambda m: m.state.appendleft(3.0)),
    "counter of itertools": (lambda: itertools.count(1), lambda m: 1.0 + next(m.state) // 10, unchanged),
    "context variable": (int, lambda _: LOCAL.get(), lambda _: LOCAL.set(3.0)),
    "autocast": (
        int,
        lambda _: 3.0 if torch.is_autocast_enabled("cpu") else 1.0,
        lambda _: torch.set_autocast_enabled("cpu", True),
    ),
    "type of autocast": (
        int,
        lambda _: 3.0 if torch.get_autocast_dtype("cpu") == torch.float16 else 1.0,
        lambda _: torch.set_autocast_dtype("cpu", torch.float16),
    ),
    "deterministic": (
        int,
        lambda _: 3.0 if torch.are_deterministic_algorithms_enabled() else 1.0,
        lambda _: torch.use_deterministic_algorithms(True),
    ),
    "numpy generator": (
        lambda: np.random.default_rng(12),
        lambda m: 2.0 if m.state.random() < 0.2 else 1.0,
        unchanged,
    ),
    "numpy inside": (int, numpy_inside, unchanged),
    "torch generator": (
        lambda: torch.Generator().manual_seed(3),
        lambda m: torch.rand(1, generator=m.state),
        unchanged,
    ),
    "generator of Python": (lambda: random.Random(3), lambda m: m.state.random(), unchanged),
    "random numbers of Python": (int, lambda _: random.random(), unchanged),
    "attribute that each step changes": (lambda: 1.0, stepping, unchanged),
}
CONSTANTS: dict[str, tuple[Callable[[], Any], Read, Change]] = {
    "environment": (
        int,
        lambda _: float(os.environ.get(NAME, "1")),
        lambda _: os.environ.__setitem__(NAME, "3"),
    ),
    "method": (Gain, lambda m: m.state.value(), setting(Gain, "value", lambda _: 3.0)),
    "property": (Gain, lambda m: m.state.attribute, setting(Gain, "attribute", property(lambda _: 3.0))),
    "static method": (Gain, lambda m: m.state.fixed(), setting(Gain, "fixed", staticmethod(lambda: 3.0))),
    "class method": (Gain, lambda m: m.state.of_class(), setting(Gain, "of_class", classmethod(lambda _: 3.0))),
    "method of a class below": (Below, lambda m: m.state.value(), setting(Below, "value", lambda _: 3.0)),
    "class method of a class below": (
        Below,
        lambda m: m.state.of_class(),
        setting(Below, "of_class", classmethod(lambda _: 3.0)),
    ),
    "class above": (Heir, lambda m: m.state.value(), setting(Heir, "__bases__", (Threefold,))),
    "registered class": (
        lambda: type("Fresh", (), {})(),
        lambda m: 3.0 if isinstance(m.state, KIND) else 1.0,
        lambda m: KIND.register(type(m.state)),
    ),
    "module replaced": (int, imported, lambda _: sys.modules.__setitem__("state_settings", SimpleNamespace(SCALE=3.0))),
    "attribute of a metaclass": (int, lambda _: OfMeta.factor, setting(Meta, "factor", 3.0)),
    "method of tensors": (int, lambda _: torch.ones(1).tanh(), setting(torch.Tensor, "tanh", lambda one: one * 3)),
    "forward of a layer's class": (
        nn.Softplus,
        lambda m: m.state(torch.ones(1)),
        setting(nn.Softplus, "forward", lambda _, one: one * 3),
    ),
    "limit of recursions": (int, lambda _: sys.getrecursionlimit() / 1e3, lambda _: sys.setrecursionlimit(3000)),
    "kept results": (int, lambda _: cached(), lambda _: setattr(state_settings.cfg, "gain", 3.0)),
    "hook of all modules": (
        nn.Softplus,
        lambda m: m.state(torch.ones(1)),
        lambda _: HOOKS.append(nn.modules.module.register_module_forward_hook(_threefold)),
    ),
}
HOOKS: list[Any] = []


def _threefold(module: nn.Module, _: Any, output: Any) -> Any:
    return output * 3 if isinstance(module, nn.Softplus) else None


def _jit_adds(values: torch.Tensor) -> None:
    values.add_(1.0)


def _in_inference_mode(values: torch.Tensor) -> None:
    with torch.inference_mode():
        values.add_(1.0)


def _as_parameter(values: torch.Tensor) -> None:
    with torch.no_grad():
        nn.Parameter(values).add_(1.0)


WAYS: dict[str, Callable[[torch.Tensor], Any]] = {
    "add_": lambda values: values.add_(1.0),
    "out": lambda values: torch.add(values, 1.0, out=values),
    "foreach": lambda values: torch._foreach_add_([values], 1.0),
    "numpy": lambda values: values.numpy().fill(0.5),
    "asarray": lambda values: np.asarray(values).fill(0.5),
    "data": lambda values: values.data.fill_(0.5),
    "storage": lambda values: values.untyped_storage().copy_(torch.ones_like(values).untyped_storage()),
    "typed storage": lambda values: values._typed_storage().fill_(0.5),
    "to_dlpack": lambda values: torch.from_dlpack(torch.utils.dlpack.to_dlpack(values)).fill_(0.5),
    "numpy of dlpack": lambda values: np.from_dlpack(values).fill(0.5),
    "memoryview": lambda values: memoryview(values.numpy()).cast("B").cast("f").__setitem__(0, 0.5),
    "view": lambda values: values.unbind(0)[0].detach().numpy().fill(0.1),
    "set_": lambda values: values.set_(torch.ones_like(values)),
    "parameter": _as_parameter,
    "subclass": lambda values: values.as_subclass(torch.Tensor).add_(1.0),
    "jit": lambda values: torch.jit.script(_jit_adds)(values),
    "inference mode": _in_inference_mode,
}


class Reads(nn.Module):
    """Cleans its numbers, by a factor that its forward reads."""

    def __init__(self, make: Callable[[], Any], read: Read) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.state = make()
        self.read = read

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        clean = torch.nan_to_num(values).clamp(0, 50).log1p() - 0.5
        return self.layer(clean * self.read(self))


def put_back() -> Callable[[], None]:
    """Notes what programs of this module change, and gives a function that makes it as it was."""
    owners: list[Any] = [Settings, Gain, Below, Meta, state_settings, state_settings.Cfg]
    tables: list[tuple[Any, dict[str, Any]]] = [(owner, dict(vars(owner))) for owner in owners]
    tensors = [Settings.mean, (shifted.__defaults__ or ())[0]]
    values = copy.deepcopy(tensors)
    functions = torch.Tensor.tanh, nn.Softplus.forward, sys.getrecursionlimit()

    def restore() -> None:
        Heir.__bases__ = (Gain,)
        sys.modules["state_settings"] = state_settings
        for owner, names in tables:
            for name in vars(owner).keys() - names.keys():
                delattr(owner, name)
            for name, value in names.items():
                if not name.startswith("__") and (isinstance(owner, ModuleType) or vars(owner).get(name) is not value):
                    setattr(owner, name, value)
        for tensor, value in zip(tensors, values, strict=True):
            tensor.data.copy_(value)
        state_settings.cfg.gain = 1.0
        torch.Tensor.tanh, nn.Softplus.forward = functions[:2]  # type: ignore[method-assign]
        sys.setrecursionlimit(functions[2])
        LOCAL.set(1.0)
        cached.cache_clear()
        os.environ.pop(NAME, None)
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", torch.bfloat16)
        torch.use_deterministic_algorithms(False)
        while HOOKS:
            HOOKS.pop().remove()

    return restore
