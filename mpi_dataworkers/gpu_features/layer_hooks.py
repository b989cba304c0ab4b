"""When the layers of a model begin, in forward and backward, by hooks of its modules.

A training step is a row of layers: each lasts until the next one begins, the last until the step's end. So the layers
together are the whole step, with the loss and the optimizer in the last ones. Whoever wants the optimizer as a layer of
its own gives it, too.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.capacity import LayerTime
from hetstream.mpi_dataworkers.gpu_features.checks import check_callable, check_is, check_whole

OPTIMIZER = "optimizer"


class LayerHooks:
    """Calls a function with the name of each layer when it begins: `mlp.forward`, `mlp.backward`, `optimizer`.

    A model that is compiled as a whole has no layers; each of its modules may be compiled by itself.

    Args:
        model: the model.
        begins: the function.
        layers: modules by their names; default: the model's children, or itself where it has none.
        optimizer: its step is a layer, too.

    Attributes:
        names: of all layers that can begin.

    Raises:
        FeatureError: a layer is no module of the model, or something is of another type.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        begins: Callable[[str], None],
        *,
        layers: Mapping[str, torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        check_is("model", model, torch.nn.Module, "the torch.nn.Module that is trained")
        if layers is not None:
            check_is("layers", layers, Mapping, "a dict of the model's modules by their names")
        if optimizer is not None:
            check_is("optimizer", optimizer, torch.optim.Optimizer, "the model's torch.optim.Optimizer")
        chosen = dict(layers if layers is not None else model.named_children()) or {"model": model}
        own = set(model.modules())
        for name, module in chosen.items():
            if not isinstance(module, torch.nn.Module) or module not in own:
                raise FeatureError(f"layer {name!r} is no module of the model: {str(module)[:60]}")
        self.names = tuple(f"{name}.{way}" for name in chosen for way in ("forward", "backward"))
        self._handles: list[Any] = []
        for name, module in chosen.items():
            self._handles += [
                module.register_forward_pre_hook(_caller(begins, f"{name}.forward")),
                module.register_forward_hook(_watching_output(begins, f"{name}.backward")),
            ]
        if optimizer is not None:
            self.names += (OPTIMIZER,)
            self._handles.append(optimizer.register_step_pre_hook(_caller(begins, OPTIMIZER)))

    def close(self) -> None:
        """Take the hooks away; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def _caller(begins: Callable[[str], None], name: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        # Else torch.compile would make what begins here a part of the model, as it is at that moment.
        if not torch.compiler.is_compiling():
            begins(name)

    return hook


def _watching_output(begins: Callable[[str], None], name: str) -> Callable[..., None]:
    """A layer's backward begins when the first of its outputs has its gradient.

    A backward hook of the module would say so, too, but warns where no input of it needs a gradient, as of a table.
    """

    def hook(_: torch.nn.Module, __: object, output: Any) -> None:
        tensors = [] if torch.compiler.is_compiling() else [each for each in _tensors(output) if each.requires_grad]
        if tensors:
            torch.autograd.graph.register_multi_grad_hook(tensors, _caller(begins, name), mode="any")

    return hook


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, Mapping):
        output = list(output.values())
    return [tensor for item in output for tensor in _tensors(item)] if isinstance(output, tuple | list) else []


class Clock(Protocol):
    """Marks points of time on the device."""

    def mark(self) -> Any:
        """Now, or on a GPU when what was launched before is done."""

    def seconds(self, first: Any, second: Any) -> float:
        """Between two marks; waits until both are over."""

    def is_over(self, mark: Any) -> bool:
        """Whether `seconds` would not have to wait for it."""


class HostClock:
    """The time of a model that runs on the CPU."""

    def mark(self) -> int:
        """As `Clock`."""
        return time.perf_counter_ns()

    def seconds(self, first: int, second: int) -> float:
        """As `Clock`."""
        return (second - first) / 1e9

    def is_over(self, mark: int) -> bool:  # noqa: ARG002
        """As `Clock`."""
        return True


class CudaClock:
    """The time of a model that runs on a GPU's current stream."""

    def mark(self) -> Any:
        """As `Clock`."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, first: Any, second: Any) -> float:
        """As `Clock`."""
        second.synchronize()
        return float(first.elapsed_time(second)) / 1e3

    def is_over(self, mark: Any) -> bool:
        """As `Clock`."""
        return bool(mark.query())


class LayerTimes:
    """Takes the times of a training step's layers.

    Args:
        clock: of the device.
        begins: called with each layer's name, behind its mark; such as what launches something beside it.
    """

    def __init__(self, clock: Clock, begins: Callable[[str], None] | None = None) -> None:
        self._clock = clock
        self._begins = begins
        self._marks: list[tuple[str, Any]] = []
        self._is_timing = False

    def layer_begins(self, name: str) -> None:
        """To be called by `LayerHooks`."""
        if not self._is_timing:
            return
        self._marks.append((name, self._clock.mark()))
        if self._begins is not None:
            self._begins(name)

    def of(self, train_step: Callable[[], object], steps: int) -> tuple[LayerTime, ...]:
        """Run some steps; the layers in the order in which they begin, with the medians of their times.

        Nobody waits for the device between two steps, as in training. A layer that begins several times in a step
        counts once, with all of its time.

        Raises:
            FeatureError: no layer begins, steps are not alike, or there is none.
        """
        check_callable("train_step", train_step, "a function that trains on one batch")
        check_whole("steps", steps, 1)
        times: dict[str, list[float]] = {}
        of_steps = [self._one_step(train_step) for _ in range(steps)]
        for number, marks in enumerate(of_steps):
            sums = self._sums(marks)
            if number and [*sums] != [*times]:
                raise FeatureError(f"steps have different layers: {', '.join(times)}; then {', '.join(sums)}")
            for name, seconds in sums.items():
                times.setdefault(name, []).append(seconds)
        if not times:
            raise FeatureError("no layer begins in a step: hooks of modules are not called in a compiled model")
        return tuple(LayerTime(name, statistics.median(seconds)) for name, seconds in times.items())

    def _one_step(self, train_step: Callable[[], object]) -> Sequence[tuple[str, Any]]:
        """Run a step; when its layers began, and its end."""
        self._marks.clear()
        self._is_timing = True
        try:
            train_step()
        finally:
            self._is_timing = False
        return [*self._marks, ("", self._clock.mark())]

    def _sums(self, marks: Sequence[tuple[str, Any]]) -> dict[str, float]:
        """The time of each layer."""
        sums: dict[str, float] = {}
        for (name, first), (_, second) in itertools.pairwise(marks):
            sums[name] = sums.get(name, 0.0) + self._clock.seconds(first, second)
        return sums
