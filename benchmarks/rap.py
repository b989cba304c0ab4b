"""`make bench-rap`: preprocessing in one GPU's leftover capacity; RAP's plans 0 to 3, and plan 4 of many ids.

Where there is no GPU it says so, and runs its whole course once on a device that is not there, so that it stays whole:
nothing of that is a figure. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks import harness, machine
from benchmarks.harness import Row, System, row_of, say
from benchmarks.rap_cases import NO_GPU, batches_of_one_size
from benchmarks.rap_model import ModelSize, Training
from benchmarks.rap_mps import MPS, mps_missing, mps_step_s
from benchmarks.rap_plans import PLANS, PlanSize, make_plan
from benchmarks.rap_systems import SYSTEMS, Bench, alone_s, interpreted_kernel
from hetstream.mpi_dataworkers.gpu_features.capacity import (
    GpuProbing,
    HostClock,
    LayerHooks,
    LayerTimes,
    Probing,
    Resource,
    Rules,
    capacities,
    round_s,
)
from hetstream.mpi_dataworkers.gpu_features.launches import operations_of_features, plan_launches
from hetstream.mpi_dataworkers.gpu_features.operations import Batches, Device
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer
from tests.mpi_dataworkers.gpu_features.fake_gpu import FakeGpu, FakeLayer
from tests.mpi_dataworkers.gpu_features.fake_streams import FakeStreams

# Rows of a batch: as in the paper; of plan 4 fewer, since its lists have dozens of ids in 104 features.
ROWS, ROWS_OF_MANY_IDS = 4096, 1024
STEPS, QUICK_STEPS = 100, 10
LAUNCH_S = 5e-6
GOAL_GAP, GOAL_GAP_OF_MANY_IDS, GOAL_OVER_STREAM = 3.24, 5.0, 1.3
WORTH_HIDING = 0.5
DRY_PLAN = PlanSize("dry run", (1000, 50), 1, 1, 6, list_length=(0, 3))
_OWN, _IDEAL, _STREAM, _SEQUENTIAL = "hetstream", "ideal", "low-priority stream", "sequential"
_CAPTURED = ", captured"


@dataclass
class Measured:
    """What a plan came to.

    Attributes:
        step_s: of each system, by repeat.
        alone_s, fused_alone_s: preprocessing by itself, with a launch for each operator and with one.
        layers: with what each leaves.
        missing, failures: systems that cannot run, and that failed, and why.
        note: what was planned.
    """

    step_s: dict[str, list[float]] = field(default_factory=dict)
    alone_s: float = 0.0
    fused_alone_s: float = 0.0
    layers: tuple[Layer, ...] = ()
    missing: dict[str, str] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    note: str = ""


def plan_numbers(text: str) -> list[int]:
    """Of `PLANS`.

    Raises:
        ArgumentTypeError: they are no such numbers.
    """
    if not all(number.strip() in map(str, range(len(PLANS))) for number in text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}: give numbers of 0 to {len(PLANS) - 1} with commas, such as 0,4")
    return [int(number) for number in text.split(",")]


def main() -> int:
    """Run the benchmark."""
    own = harness.parser("Preprocessing beside training on one GPU.", repeats=3)
    own.add_argument("--plans", type=plan_numbers, default="0,1,2,3,4", help="which plans (default: %(default)s)")
    own.add_argument("--tf32", action="store_true", help="matrix products may round to TF32; the paper's do not")
    own.add_argument("--seconds", type=float, default=math.inf, help="what is not begun by then is left out")
    args = own.parse_args()
    end_s = time.monotonic() + args.seconds
    names = [system.name for system in harness.chosen([System(name) for name in (*SYSTEMS, MPS)], args.systems)]
    context: dict[str, Any] = {"machine": machine.describe(), "versions": machine.versions("torch", "triton")}
    if not torch.cuda.is_available():
        context |= {"notes": [NO_GPU], "dry_run": dry_run(names)}
        return harness.finish(
            "rap", args.out, [Row(PLANS[at].name, _OWN, None, "ms", note=NO_GPU) for at in args.plans], {}, context
        )
    context["notes"] = _notes(tf32=args.tf32)
    context["gpu"] = torch.cuda.get_device_name()
    rows: list[Row] = []
    failures: dict[str, str] = {}
    context["layers"] = {}
    for number in args.plans:
        size = PLANS[number]
        try:
            measured = measured_on_gpu(size, names, 0 if args.quick else args.repeats, tf32=args.tf32, end_s=end_s)
        except Exception as error:  # noqa: BLE001, whatever a GPU says: the other plans go on, and it is told at the end
            failures[size.name] = one_line(error)
            continue
        finally:
            gc.collect()  # hooks and what they call hold the model in circles
            torch.cuda.empty_cache()
        case = f"{size.name}, {'TF32' if args.tf32 else 'fp32'}"
        rows += report(case, size, measured)
        context["layers"][case] = [vars(layer) for layer in measured.layers]
        failures |= {f"{size.name}: {name}": why for name, why in measured.failures.items()}
    return harness.finish("rap", args.out, rows, failures, context)


def measured_on_gpu(
    size: PlanSize, names: Sequence[str], repeats: int, *, tf32: bool, end_s: float = math.inf
) -> Measured:
    """Measure a plan on the GPU; with no repeats once, and shortly."""
    bench = Bench.on_gpu(size, rows_of(size), STEPS if repeats else QUICK_STEPS, tf32=tf32)
    with GpuProbing(bench.training.model, _step_of(bench), optimizer=bench.training.optimizer) as probing:
        measured = prepare(bench, probing)
    measure(bench, measured, names, max(1, repeats), end_s)
    return measured


def one_line(error: BaseException) -> str:
    """An error for a report."""
    return f"{type(error).__name__}: {str(error).strip()}".partition("\n")[0]


def rows_of(size: PlanSize) -> int:
    """Of a batch of a plan."""
    return ROWS_OF_MANY_IDS if size.list_length[1] > 1 else ROWS


def prepare(bench: Bench, probing: Probing) -> Measured:
    """Find out what preprocessing takes and what layers leave, and plan."""
    # First, as it warms the GPU up.
    measured = Measured(layers=capacities(probing, Rules(unsteady_leaves_nothing=True)))
    measured.alone_s, measured.fused_alone_s = (alone_s(bench, is_fused=is_fused) for is_fused in (False, True))
    measured.note = _plan(bench, probing, measured)
    say(f"  {bench.size.name}: {measured.note}")
    return measured


def measure(bench: Bench, measured: Measured, names: Sequence[str], repeats: int, end_s: float = math.inf) -> None:
    """Time all systems in turn. When it is `end_s`, no repeat is begun, and of the first no system."""
    chosen = _with_what_is_compared(names)
    if MPS in chosen and (why := mps_missing()):
        measured.missing[MPS] = why
    for repeat in range(repeats):
        if repeat and time.monotonic() > end_s:
            break
        for name in chosen:
            if not repeat and time.monotonic() > end_s:
                measured.missing.setdefault(name, "there was no time left for it")
            if name in {*measured.missing, *measured.failures}:
                continue
            try:
                left_s = max(1.0, end_s - time.monotonic())
                seconds = mps_step_s(bench, left_s) if name == MPS else SYSTEMS[name](bench)
            except Exception as error:  # noqa: BLE001, such as no memory: the others go on, and it is told at the end
                measured.failures[name] = one_line(error)
                measured.step_s.pop(name, None)
                continue
            measured.step_s.setdefault(name, []).append(seconds)
            say(f"  {bench.size.name}, repeat {repeat + 1}: {name} {seconds * 1e3:.3f} ms a step")


def _with_what_is_compared(names: Sequence[str]) -> list[str]:
    """Systems in order, with the ideal, which all are compared with."""
    return [name for name in (*SYSTEMS, MPS) if name in {*names, _IDEAL, _IDEAL + _CAPTURED}]


def _plan(bench: Bench, probing: Probing, measured: Measured) -> str:
    """Plan the launches for this device, as it was measured; in words."""
    device = device_of(probing)
    batches = Batches(bench.rows, sum(bench.size.list_length) / 2)
    operations = operations_of_features(bench.graph, batches, device)
    modelled_s = max(sum(each.memory_s for each in operations), sum(each.compute_s for each in operations))
    factor = max(1e-3, (measured.fused_alone_s - device.launch_s) / modelled_s)
    num = bench.streams.num_multiprocessors
    bench.plan = plan_launches(bench.graph, batches, device, measured.layers, num_multiprocessors=num, factor=factor)
    launches = ", ".join(f"{each.layer} {len(each.chains)} on {each.num_programs}" for each in bench.plan.launches)
    return f"{bench.plan.exposed_s * 1e6:.0f} us predicted, factor {factor:.2f}; features on programs: {launches}"


def device_of(probing: Probing) -> Device:
    """A device by the speeds of its probes, in whose seconds layers say what they leave."""
    from hetstream.mpi_dataworkers.gpu_features import probes

    bytes_of_round = probes.BLOCKS_OF_A_ROUND * probes.MEMORY_BLOCK * 4
    steps_of_round = probes.STEPS_OF_A_ROUND * probes.ARITHMETIC_BLOCK
    bytes_per_s = bytes_of_round / round_s(probing, Resource.MEMORY)
    return Device("measured", LAUNCH_S, bytes_per_s, steps_of_round / round_s(probing, Resource.ARITHMETIC))


def report(case: str, size: PlanSize, measured: Measured) -> list[Row]:
    """The rows of a plan."""
    rows = [
        row_of(case, name, [each * 1e3 for each in seconds], "ms a step") for name, seconds in measured.step_s.items()
    ]
    rows += [Row(case, name, None, "ms a step", note=why) for name, why in measured.missing.items()]
    rows.append(Row(case, "preprocessing alone, a launch for each operator", measured.alone_s * 1e3, "ms"))
    rows.append(Row(case, "preprocessing alone, one launch", measured.fused_alone_s * 1e3, "ms", note=measured.note))
    goal = GOAL_GAP_OF_MANY_IDS if size.list_length[1] > 1 else GOAL_GAP
    for name in (_OWN, _OWN + _CAPTURED):
        ideal_s = measured.step_s.get(_IDEAL + name.removeprefix(_OWN), [])
        if name in measured.step_s and ideal_s:
            gaps = [100 * (mine / best - 1) for mine, best in zip(measured.step_s[name], ideal_s, strict=True)]
            rows.append(row_of(case, f"{name}: longer than ideal", gaps, "%", at_most=goal))
    rows += _ratios(case, measured)
    return rows


def _ratios(case: str, measured: Measured) -> list[Row]:
    """How much faster than others, and than how much nothing on one GPU can be."""
    own_s = measured.step_s.get(_OWN)
    if not own_s or _IDEAL not in measured.step_s:
        return []
    ideal_s = statistics.median(measured.step_s[_IDEAL])
    is_worth_hiding = measured.alone_s >= WORTH_HIDING * ideal_s
    rows = []
    for name, seconds in measured.step_s.items():
        if name.startswith((_OWN, _IDEAL)):
            continue
        ratios = [other / mine for other, mine in zip(seconds, own_s, strict=True)]
        goal = GOAL_OVER_STREAM if name == _STREAM and is_worth_hiding else None
        rows.append(row_of(case, f"{name} / {_OWN}", ratios, "x", at_least=goal))
    bound = (ideal_s + measured.alone_s) / max(ideal_s, measured.fused_alone_s)
    note = "a step and preprocessing one after the other / the longer of the two, fused"
    rows.append(Row(case, f"{_SEQUENTIAL} / {_OWN}: at most on one GPU", bound, "x", note=note))
    return rows


def _step_of(bench: Bench) -> functools.partial[torch.Tensor]:
    """A training step on a batch that lies on the device."""
    plan = bench.fused_plan
    features = bench.on_device(bench.graph, plan, bench.packed(bench.graph, plan)[0])
    return functools.partial(bench.training.step, features)


def _notes(*, tf32: bool) -> list[str]:
    return [
        f"One GPU, batches of {ROWS} rows (plan 4: {ROWS_OF_MANY_IDS}), the model of RAP's Table 2 in "
        f"{'TF32' if tf32 else 'fp32'}; tables are scaled down to 40 million rows where the dataset's are larger.",
        "Batches are packed and page-locked beforehand, as data workers hand them over, for all but CPU data workers.",
        "A launch for each operator begins with the feature's input, so it computes what is before it once more.",
        "Steps have as many ids each, since CUDA graphs are captured for one size.",
    ]


def dry_run(names: Sequence[str]) -> Mapping[str, Any]:
    """The whole course on streams that are not there, with the kernel interpreted and a law of contention."""
    torch.set_num_threads(1)
    rows = 5
    graph = make_plan(DRY_PLAN)
    training = Training(graph, rows, torch.device("cpu"), ModelSize(4, (5,), (6,), 40))
    batches = batches_of_one_size(DRY_PLAN, rows, 2)
    bench = Bench(DRY_PLAN, rows, training, batches, FakeStreams, interpreted_kernel(), 32, num_steps=1, warm_up=1)
    times = LayerTimes(HostClock())
    hooks = LayerHooks(training.model, times.layer_begins, optimizer=training.optimizer)
    try:
        layers = times.of(_step_of(bench), 2)
    finally:
        hooks.close()
    probing = FakeGpu([FakeLayer(layer.name, max(layer.seconds, 1e-4), 0.5, 0.5) for layer in layers], 4)
    measured = prepare(bench, probing)
    measure(bench, measured, names, 1)
    if measured.failures:
        raise RuntimeError(f"the dry run failed: {measured.failures}")
    shown = report("dry run", DRY_PLAN, measured)
    say("the dry run went through; none of its times is a figure")
    return {"systems": [*measured.step_s], "missing": measured.missing, "rows": [row.system for row in shown]}


if __name__ == "__main__":
    sys.exit(main())
