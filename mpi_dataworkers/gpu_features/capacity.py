"""How much of a GPU each layer of a model leaves, in two resources, by what a probe beside it does to it. Pure.

    layers = capacities(device)  # for `Problem`, `plan_launches` and `decide`

As RAP measures overlapping capacity (its section 5.1), with two probes in the place of its operator: one takes traffic
to memory, one arithmetic (`probes.py`). A probe of some programs begins with the layer and is made to last, alone, as
long as the layer. The most programs that slow the layer down by no more than 3 % say what it leaves: their work, in
seconds of the whole GPU. This measures on a GPU; `fake_gpu.py` of the tests is one with a law of contention.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import itertools
import logging
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer, check_callable, check_is, check_number, check_whole
from hetstream.mpi_dataworkers.gpu_features.streams import CudaStreams, Stream
from hetstream.mpi_dataworkers.gpu_features.triton_cache import prepare_triton


class Resource(enum.Enum):
    """What a probe takes."""

    MEMORY = "memory"
    ARITHMETIC = "arithmetic"


@dataclass(frozen=True)
class Probe:
    """A probe, and beside which layer it begins.

    Attributes:
        num_rounds: of each of its programs.
    """

    resource: Resource
    layer: str
    num_programs: int
    num_rounds: int


@dataclass(frozen=True)
class LayerTime:
    """A layer of a training step.

    Attributes:
        name: as `LayerHooks` calls it.
        seconds: until the next layer begins; the median of some steps.
    """

    name: str
    seconds: float

    def __post_init__(self) -> None:
        check_number(f"layer {self.name}: seconds", self.seconds)


class Probing(Protocol):
    """A device on which a model is trained and probes run.

    Attributes:
        num_multiprocessors: programs of a probe that run at once.
    """

    num_multiprocessors: int

    def step(self, probe: Probe | None) -> Sequence[LayerTime]:
        """Return the layers' times in training steps with a probe, or with none."""

    def alone_s(self, resource: Resource, num_programs: int, num_rounds: int) -> float:
        """Return how long a probe takes with nothing beside it."""


@dataclass(frozen=True)
class Rules:
    """How it is measured.

    Attributes:
        most_growth: of a layer's time, for which a probe counts as fitting; RAP's figure 5 bends at about as much.
        least_s: what a layer must last to be probed: shorter ones are over before a probe has begun, and leave nothing.
        calibration_s: how long a probe alone must last for its speed to be known.
        tries: how often a layer is measured again whose own time has changed meanwhile by more than most_growth.
        unsteady_leaves_nothing: whether a layer whose time changes each time leaves nothing, and is no error.
        warm_up_s: steps are run before anything is measured, until some in a row take as long as each other, and at
            most for so long: the clocks of a GPU that was idle rise for seconds.

    Raises:
        FeatureError: a number is negative, infinite or NaN, a calibration takes no time, or there is no try.
    """

    most_growth: float = 0.03
    least_s: float = 2e-5
    calibration_s: float = 1e-3
    tries: int = 3
    unsteady_leaves_nothing: bool = False
    warm_up_s: float = 10.0

    def __post_init__(self) -> None:
        check_number("Rules: most_growth", self.most_growth)
        check_number("Rules: least_s", self.least_s)
        check_number("Rules: calibration_s", self.calibration_s, is_above=True)
        check_whole("Rules: tries", self.tries, 1)
        check_number("Rules: warm_up_s", self.warm_up_s)


_log = logging.getLogger(__name__)
_MOST_ROUNDS = 1 << 24
# So many steps in a row, whose times are at most this far apart, are steady.
_STEADY_STEPS, _STEADY_GROWTH = 4, 0.02


def capacities(
    device: Probing, rules: Rules | None = None, *, clock: Callable[[], float] = time.monotonic
) -> tuple[Layer, ...]:
    """Return the layers of a training step, with what each leaves of both resources.

    Args:
        device: where it is measured.
        rules: how.
        clock: seconds.

    Raises:
        FeatureError: a layer's time changes by itself, a probe has no speed, or something is of another type.
    """
    rules = _checked(device, rules)
    warm_up(device, rules, clock)
    speeds = {resource: _Speed(device, resource, rules) for resource in Resource}
    found = []
    for layer_time in device.step(None):
        if layer_time.seconds < rules.least_s:
            found.append(Layer(layer_time.name, layer_time.seconds, 0.0, 0.0))
            continue
        left_s = {resource: _left_s(device, layer_time.name, speeds[resource], rules) for resource in Resource}
        found.append(Layer(layer_time.name, layer_time.seconds, left_s[Resource.MEMORY], left_s[Resource.ARITHMETIC]))
    return tuple(found)


def warm_up(device: Probing, rules: Rules, clock: Callable[[], float]) -> int:
    """Run steps until they are steady, or it is time. How many."""
    recent: collections.deque[float] = collections.deque(maxlen=_STEADY_STEPS)
    end_s, count = clock() + rules.warm_up_s, 0
    while clock() < end_s:
        recent.append(sum(layer.seconds for layer in device.step(None)))
        count += 1
        if len(recent) == _STEADY_STEPS and max(recent) <= (1 + _STEADY_GROWTH) * min(recent):
            break
    return count


def round_s(device: Probing, resource: Resource, rules: Rules | None = None) -> float:
    """Return what a round of one program takes of the whole GPU; `probes.py` says what such a round does.

    Raises:
        FeatureError: a probe has no speed, or something is of another type.
    """
    check_is("resource", resource, Resource, "a Resource, such as Resource.MEMORY")
    return _Speed(device, resource, _checked(device, rules)).round_s


def _checked(device: object, rules: Rules | None) -> Rules:
    """Rules, where these are some; raises FeatureError where nothing can be measured."""
    hint = "a GpuProbing, or what else has num_multiprocessors, step and alone_s"
    for name in ("step", "alone_s"):
        check_callable(f"device={device!r}: {name}", getattr(device, name, None), hint)
    check_whole(f"device={device!r}: num_multiprocessors", getattr(device, "num_multiprocessors", None), 1)
    if rules is not None:
        check_is("rules", rules, Rules, "Rules, such as Rules(tries=5)")
    return rules or Rules()


class _Speed:
    """How fast a probe is: of all programs, and of some.

    Attributes:
        resource: of the probe.
        round_s: what a round of one program takes of the whole GPU.
    """

    def __init__(self, device: Probing, resource: Resource, rules: Rules) -> None:
        self.resource = resource
        self._device = device
        self._rules = rules
        self._rounds_per_s: dict[int, float] = {}
        most = device.num_multiprocessors
        self.round_s = 1 / (self.rounds_per_s(most) * most)

    def rounds_per_s(self, num_programs: int) -> float:
        """Rounds per second of each program, if this number of them runs."""
        if num_programs not in self._rounds_per_s:
            num_rounds, seconds = 1, 0.0
            while seconds < self._rules.calibration_s:
                if num_rounds > _MOST_ROUNDS:
                    raise FeatureError(f"{num_rounds} rounds of the {self.resource.value} probe take {seconds} s")
                num_rounds *= 4
                seconds = self._device.alone_s(self.resource, num_programs, num_rounds)
                check_number(f"{num_rounds} rounds of the {self.resource.value} probe: seconds", seconds)
            self._rounds_per_s[num_programs] = num_rounds / seconds
        return self._rounds_per_s[num_programs]


def _left_s(device: Probing, layer: str, speed: _Speed, rules: Rules) -> float:
    """What a layer leaves of a resource, in seconds of the whole GPU."""
    before_s = after_s = 0.0
    for _ in range(rules.tries):
        before_s = _seconds_of(device, layer, None)
        num_programs, num_rounds = _most_that_fits(device, layer, speed, before_s, rules)
        after_s = _seconds_of(device, layer, None)
        if abs(after_s - before_s) <= rules.most_growth * before_s:
            return min(before_s, num_programs * num_rounds * speed.round_s)
    unsteady = (
        f"layer {layer}: without a probe it took {before_s * 1e6:.1f} us and then {after_s * 1e6:.1f} us, "
        f"{rules.tries} times more than {rules.most_growth:.0%} apart: is the GPU busy with something else?"
    )
    if not rules.unsteady_leaves_nothing:
        raise FeatureError(unsteady)
    _log.warning("hetstream: features: it leaves nothing of %s: %s", speed.resource.value, unsteady)
    return 0.0


def _most_that_fits(device: Probing, layer: str, speed: _Speed, alone_s: float, rules: Rules) -> tuple[int, int]:
    """The most programs that do not slow the layer down, and their rounds."""

    def rounds(num_programs: int) -> int:
        return max(1, int(alone_s * speed.rounds_per_s(num_programs)))

    def fits(num_programs: int) -> bool:
        probe = Probe(speed.resource, layer, num_programs, rounds(num_programs))
        return _seconds_of(device, layer, probe) <= (1 + rules.most_growth) * alone_s

    low, high = 0, device.num_multiprocessors
    if fits(high):
        return high, rounds(high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return (low, rounds(low)) if low else (0, 0)


def _seconds_of(device: Probing, layer: str, probe: Probe | None) -> float:
    seconds = {each.name: each.seconds for each in device.step(probe)}
    if layer not in seconds:
        raise FeatureError(f"layer {layer} was in one step and not in the next, which had {', '.join(seconds)}")
    return seconds[layer]


# When the layers of a model begin, in forward and backward, by hooks of its modules.
#
# A training step is a row of layers: each lasts until the next one begins, the last until the step's end. So the layers
# together are the whole step, with the loss and the optimizer in the last ones. Whoever wants the optimizer as a layer
# of its own gives it, too.

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
        """Return whether `seconds` would not have to wait for it."""


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


# Measure a model's layers with probes on the GPU: `Probing` for `capacity.capacities`.
#
#     with GpuProbing(model, train_step) as device:
#         layers = capacities(device)
#
# Nobody else may use the GPU meanwhile. A step of training is run some hundred times for each layer, so it must bear to
# be repeated, on one batch: parameters change.

# Steps of which the median counts.
_STEPS = 7
# Four times the largest cache of a GPU (50 MB on an H100).
_SOURCE_BYTES = 1 << 28


class GpuProbing:
    """A model that is trained on a GPU, with probes beside it; in its context training comes first, as in `CoRun`'s.

    Args:
        model: The model.
        train_step: A whole step: forward, backward, optimizer.
        layers, optimizer: As in `CoRun`.
        device: The GPU.

    Raises:
        FeatureError: there is no GPU, no Triton, or something is of another type.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        train_step: Callable[[], object],
        *,
        layers: Mapping[str, torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        device: str = "cuda",
    ) -> None:
        check_callable("train_step", train_step, "a function that trains on one batch")
        if why := prepare_triton():
            raise FeatureError(f"probes on a GPU are compiled by Triton: {why}")
        try:
            from hetstream.mpi_dataworkers.gpu_features import probes
        except ImportError as exc:
            raise FeatureError("probes on a GPU need Triton: pip install 'hetstream[triton]'") from exc
        self._probes: Any = probes
        self._streams = CudaStreams(device)
        self.num_multiprocessors = self._streams.num_multiprocessors
        self._train_step = train_step
        self._probe: Probe | None = None
        self._source = torch.zeros(_SOURCE_BYTES // 4, device=self._streams.device)
        most_values = self.num_multiprocessors * max(probes.MEMORY_BLOCK, probes.ARITHMETIC_BLOCK)
        self._made = torch.empty(most_values, device=self._streams.device)
        self._times = LayerTimes(CudaClock(), self._layer_begins)
        self._context = contextlib.ExitStack()
        hooks = LayerHooks(model, self._times.layer_begins, layers=layers, optimizer=optimizer)
        self._context.callback(hooks.close)

    def step(self, probe: Probe | None) -> Sequence[LayerTime]:
        """As `Probing`."""
        self._streams.follow()
        self._probe = probe
        self._times.of(self._one_step, 1)
        return self._times.of(self._one_step, _STEPS)

    def alone_s(self, resource: Resource, num_programs: int, num_rounds: int) -> float:
        """As `Probing`."""
        clock, seconds = CudaClock(), []
        for _ in range(_STEPS):
            first = clock.mark()
            self._launch(Probe(resource, "", num_programs, num_rounds))
            seconds.append(clock.seconds(first, clock.mark()))
        return statistics.median(seconds[1:])

    def close(self) -> None:
        """Take the hooks off the model; safe to call twice."""
        self._context.close()

    def __enter__(self) -> GpuProbing:
        self._context.enter_context(self._streams.first())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _one_step(self) -> None:
        """A step, and the end of a probe that outlasts it: the next step begins with nothing beside it."""
        self._train_step()
        self._streams.wait(Stream.TRAINING, self._streams.record(Stream.PREPROCESSING))

    def _layer_begins(self, name: str) -> None:
        probe = self._probe
        if probe is None or probe.layer != name:
            return
        self._streams.wait(Stream.PREPROCESSING, self._streams.record(Stream.TRAINING))
        self._streams.launch(lambda: self._launch(probe), [], [])

    def _launch(self, probe: Probe) -> None:
        if probe.resource is Resource.MEMORY:
            self._probes.launch_memory(self._source, self._made, probe.num_programs, probe.num_rounds)
        else:
            self._probes.launch_arithmetic(self._made, probe.num_programs, probe.num_rounds)
