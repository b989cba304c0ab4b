"""How much of a GPU each layer of a model leaves, in two resources, by what a probe beside it does to it. Pure.

    layers = capacities(device)  # for `Problem`, `plan_launches` and `decide`

As RAP measures overlapping capacity (its section 5.1), with two probes in the place of its operator: one takes traffic
to memory, one arithmetic (`probes.py`). A probe of some programs begins with the layer and is made to last, alone, as
long as the layer. The most programs that slow the layer down by no more than 3 % say what it leaves: their work, in
seconds of the whole GPU. `probing.py` measures on a GPU, and `fake_gpu.py` is one with a law of contention.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.checks import check_callable, check_is, check_number, check_whole
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer


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
        num_multiprocessors: so many programs of a probe run at once.
    """

    num_multiprocessors: int

    def step(self, probe: Probe | None) -> Sequence[LayerTime]:
        """The layers' times in training steps with a probe, or with none."""

    def alone_s(self, resource: Resource, num_programs: int, num_rounds: int) -> float:
        """How long a probe takes with nothing beside it."""


@dataclass(frozen=True)
class Rules:
    """How it is measured.

    Attributes:
        most_growth: of a layer's time, for which a probe counts as fitting; RAP's figure 5 bends at about as much.
        least_s: what a layer must last to be probed: shorter ones are over before a probe has begun, and leave nothing.
        calibration_s: how long a probe alone must last for its speed to be known.
        tries: how often a layer is measured again whose own time has changed meanwhile by more than most_growth.
        unsteady_leaves_nothing: whether a layer whose time changes each time leaves nothing, and is no error.

    Raises:
        FeatureError: a number is negative, infinite or NaN, a calibration takes no time, or there is no try.
    """

    most_growth: float = 0.03
    least_s: float = 2e-5
    calibration_s: float = 1e-3
    tries: int = 3
    unsteady_leaves_nothing: bool = False

    def __post_init__(self) -> None:
        check_number("Rules: most_growth", self.most_growth)
        check_number("Rules: least_s", self.least_s)
        check_number("Rules: calibration_s", self.calibration_s, is_above=True)
        check_whole("Rules: tries", self.tries, 1)


_log = logging.getLogger(__name__)
_MOST_ROUNDS = 1 << 24


def capacities(device: Probing, rules: Rules | None = None) -> tuple[Layer, ...]:
    """The layers of a training step, with what each leaves of both resources.

    Args:
        device: where it is measured.
        rules: how.

    Raises:
        FeatureError: a layer's time changes by itself, a probe has no speed, or something is of another type.
    """
    rules = _checked(device, rules)
    speeds = {resource: _Speed(device, resource, rules) for resource in Resource}
    found = []
    for time in device.step(None):
        if time.seconds < rules.least_s:
            found.append(Layer(time.name, time.seconds, 0.0, 0.0))
            continue
        left_s = {resource: _left_s(device, time.name, speeds[resource], rules) for resource in Resource}
        found.append(Layer(time.name, time.seconds, left_s[Resource.MEMORY], left_s[Resource.ARITHMETIC]))
    return tuple(found)


def round_s(device: Probing, resource: Resource, rules: Rules | None = None) -> float:
    """What a round of one program takes of the whole GPU; `probes.py` says what such a round does.

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
        """Rounds of each of so many programs in a second."""
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
    seconds = {time.name: time.seconds for time in device.step(probe)}
    if layer not in seconds:
        raise FeatureError(f"layer {layer} was in one step and not in the next, which had {', '.join(seconds)}")
    return seconds[layer]
