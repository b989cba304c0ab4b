"""What layers of a model leave of a GPU, by probes: on a fake with a law of contention; layers are timed for real."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from offline_compile import compile_offline

from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.capacity import (
    GpuProbing,
    HostClock,
    LayerHooks,
    LayerTime,
    LayerTimes,
    Probe,
    Resource,
    Rules,
    capacities,
    round_s,
    warm_up,
)
from hetstream.mpi_dataworkers.gpu_features.schedule import Problem
from tests.mpi_dataworkers.gpu_features.fake_gpu import FakeGpu, FakeLayer

pytestmark = pytest.mark.usefixtures("interpreted")

EMBEDDING = FakeLayer("embedding.forward", 9e-4, memory=0.85, arithmetic=0.05)
MLP = FakeLayer("mlp.forward", 2e-3, memory=0.2, arithmetic=0.9)
IDLE = FakeLayer("exchange", 1e-3, memory=0.0, arithmetic=0.0)


@pytest.mark.shows("probes measure what layers leave of a GPU's two resources")
def test_a_layer_leaves_of_each_resource_what_it_does_not_take() -> None:
    """Up to the 3 % that it may become slower, and one program more or less."""
    gpu = FakeGpu([EMBEDDING, MLP, IDLE])
    for layer, law in zip(capacities(gpu), (EMBEDDING, MLP, IDLE), strict=True):
        assert layer.name == law.name
        assert layer.duration_s == law.seconds
        for left_s, taken in ((layer.memory_s, law.memory), (layer.compute_s, law.arithmetic)):
            expected = min(1.0, 1 - taken + 0.03)
            assert left_s / law.seconds == pytest.approx(expected, abs=0.02)
    assert gpu.num_steps < 100
    Problem((), capacities(gpu), 5e-6)  # they are what schedules take


def test_a_busy_or_short_layer_leaves_nothing() -> None:
    busy, short = FakeLayer("busy", 1e-3, 1.05, 1.2), FakeLayer("short", 1e-5, 0.0, 0.0)
    found = capacities(FakeGpu([busy, short]))
    assert [(layer.memory_s, layer.compute_s) for layer in found] == [(0.0, 0.0), (0.0, 0.0)]


def test_a_time_that_changes_by_itself_is_an_error_and_a_little_noise_is_none() -> None:
    draw = random.Random(1)
    little = FakeGpu([MLP], noise=lambda: draw.uniform(0.998, 1.002))
    [layer] = capacities(little)
    assert layer.memory_s / layer.duration_s == pytest.approx(0.83, abs=0.03)
    with pytest.raises(FeatureError, match=r"layer mlp.forward: without a probe it took .* is the GPU busy"):
        capacities(FakeGpu([MLP], noise=lambda: draw.uniform(0.5, 2)))


def test_a_gpu_that_was_idle_is_warm_before_it_is_measured() -> None:
    """Its clocks rise for seconds, which would look like layers whose times change by themselves."""
    cold, now_s = FakeGpu([MLP], cold_steps=40), itertools.count()
    with pytest.raises(FeatureError, match="is the GPU busy with something else"):
        capacities(cold, Rules(warm_up_s=0, tries=1))
    cold = FakeGpu([MLP], cold_steps=40)
    assert capacities(cold, clock=lambda: next(now_s) / 1000) == capacities(FakeGpu([MLP]))
    never, now_s = FakeGpu([MLP], noise=lambda: random.uniform(0.9, 1.1)), itertools.count()
    assert warm_up(never, Rules(warm_up_s=10), lambda: float(next(now_s))) == 9, "what is never steady has its time"


def test_a_layer_that_is_never_steady_may_leave_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Of two layers one; what the other leaves is as without it."""
    draw = random.Random(1)

    class Shaky(FakeGpu):
        def step(self, probe: Probe | None) -> list[LayerTime]:
            first, second = super().step(probe)
            return [LayerTime(first.name, first.seconds * draw.uniform(0.5, 2)), second]

    other = FakeLayer("shaky", MLP.seconds, 0.1, 0.1)
    shaky, steady = capacities(Shaky([other, MLP]), Rules(unsteady_leaves_nothing=True))
    assert (shaky.memory_s, shaky.compute_s) == (0, 0)
    assert steady == capacities(FakeGpu([other, MLP]))[1]
    assert "it leaves nothing of memory: layer shaky: without a probe it took" in caplog.text


class NoSpeed(FakeGpu):
    """Its probes take no time: a kernel that does nothing, as with a broken driver."""

    def alone_s(self, resource: Resource, num_programs: int, num_rounds: int) -> float:
        return 0.0


class OtherLayers(FakeGpu):
    """Its second step has another layer."""

    def step(self, probe: object) -> list[LayerTime]:
        self.num_steps += 1
        return [LayerTime(f"layer {self.num_steps}", 1e-3)]


@pytest.mark.shows("wrong types and senseless numbers are refused at every entry of GPU features")
def test_what_measures_nothing_is_refused_in_words() -> None:
    gpu = FakeGpu([MLP])
    device, nan = FakeGpu([MLP], num_multiprocessors=0), float("nan")
    for made, words in (
        (lambda: capacities(3), "device=3: step=None: give a GpuProbing"),  # type: ignore[arg-type]
        (lambda: capacities(device), "num_multiprocessors=0: give a whole number, at least 1"),
        (lambda: capacities(gpu, {"tries": 3}), "rules={'tries': 3}: give Rules"),  # type: ignore[arg-type]
        (lambda: round_s(gpu, "memory"), "resource='memory': give a Resource"),  # type: ignore[arg-type]
        (lambda: Rules(most_growth=nan), "Rules: most_growth=nan: give a finite number, at least 0"),
        (lambda: Rules(least_s=-1.0), "Rules: least_s=-1.0"),
        (lambda: Rules(calibration_s=0.0), "Rules: calibration_s=0.0: give a finite number, above 0"),
        (lambda: Rules(calibration_s=nan), "Rules: calibration_s=nan"),
        (lambda: Rules(tries=0), "Rules: tries=0: give a whole number, at least 1"),
        (lambda: Rules(tries=1.5), "Rules: tries=1.5"),  # type: ignore[arg-type]
        (lambda: capacities(FakeGpu([MLP], noise=lambda: nan)), "layer mlp.forward: seconds=nan"),
        (lambda: LayerHooks(3, print), "model=3: give the torch.nn.Module"),  # type: ignore[arg-type]
        (lambda: LayerTimes(HostClock()).of(lambda: None, 0), "steps=0: give a whole number, at least 1"),
        (lambda: LayerTimes(HostClock()).of(3, 1), "train_step=3: give a function"),  # type: ignore[arg-type]
        (lambda: GpuProbing(torch.nn.Linear(1, 1), 3), "train_step=3: give a function"),  # type: ignore[arg-type]
    ):
        with pytest.raises(FeatureError, match=words):
            made()


def test_what_cannot_be_measured_is_one_error() -> None:
    with pytest.raises(FeatureError, match=r"rounds of the memory probe take 0\.0 s"):
        capacities(NoSpeed([MLP]))
    with pytest.raises(FeatureError, match=r"layer layer \d+ was in one step and not in the next"):
        capacities(OtherLayers([MLP]), Rules(tries=1))
    if not torch.cuda.is_available():
        with pytest.raises(FeatureError, match="there is no GPU here"):
            GpuProbing(torch.nn.Linear(1, 1), lambda: None)


class Sleepy(torch.nn.Module):
    """A layer that takes its time in forward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        found: torch.Tensor = self.linear(values)
        return found


def timed(model: torch.nn.Module, train_step: Callable[[], object], steps: int = 5) -> tuple[LayerTime, ...]:
    times = LayerTimes(HostClock())
    hooks = LayerHooks(model, times.layer_begins)
    try:
        return times.of(train_step, steps)
    finally:
        hooks.close()


def test_layers_of_a_real_model_on_the_cpu_are_timed_and_are_the_whole_step() -> None:
    model = torch.nn.Sequential()
    model.add_module("short", Sleepy(0.0))
    model.add_module("long", Sleepy(0.01))
    values = torch.ones(8, 4)
    began = time.perf_counter()
    found = timed(model, lambda: model(values).sum().backward())
    spent_s = time.perf_counter() - began
    assert [layer.name for layer in found] == ["short.forward", "long.forward", "long.backward", "short.backward"]
    seconds = {layer.name: layer.seconds for layer in found}
    assert seconds["long.forward"] >= 0.01
    assert sum(seconds.values()) < spent_s
    with pytest.raises(FeatureError, match="no layer begins in a step"):
        timed(model, lambda: None)
    ways: Iterator[Callable[[], object]] = iter([lambda: model(values), lambda: None])
    with pytest.raises(FeatureError, match="steps have different layers"):
        timed(model, lambda: next(ways)(), steps=2)


@pytest.mark.shows("probes measure what layers leave of a GPU's two resources")
def test_probes_compute_what_they_should_in_the_interpreter() -> None:
    from hetstream.mpi_dataworkers.gpu_features import probes

    source, made = torch.arange(8 * 16, dtype=torch.float32), torch.full((3 * 16,), float("nan"))
    probes.launch_memory(source, made, 3, 2, block=16)
    blocks = source.view(2, 4, 16).sum(1)
    # Groups of four blocks in turn: programs 0 and 2 begin with the first, and go on by three.
    assert made.view(3, 16).tolist() == [(blocks[0] + blocks[1]).tolist()] * 3
    made.fill_(float("nan"))
    probes.launch_arithmetic(made, 2, 1, block=16)
    value = np.arange(16, dtype=np.float32) / 16
    for _ in range(probes.STEPS_OF_A_ROUND):
        value = value * np.float32(0.5) + np.float32(0.25)
    np.testing.assert_allclose(made.view(3, 16)[:2].numpy(), [value, value])
    assert made.view(3, 16)[2].isnan().all()


@pytest.mark.shows("probes measure what layers leave of a GPU's two resources")
@pytest.mark.parametrize("architecture", [80, 90])
def test_probes_are_compiled_for_gpus_that_are_not_here(architecture: int, tmp_path: object) -> None:
    """Without spills; memory is read in vectors, and nothing of a probe is left out as of no use."""
    found = json.loads(
        compile_offline(
            f"""
import json
from tests.mpi_dataworkers.gpu_features.offline import compile_probes
print(json.dumps([vars(each) for each in compile_probes({architecture})]))
""",
            str(tmp_path),
        )
    )
    assert [each["spilled_bytes"] for each in found] == [0, 0]
    memory, arithmetic = (each["ptx"] for each in found)
    assert memory.count("ld.global.v4") >= 4
    assert arithmetic.count("fma.rn.f32") >= 64
