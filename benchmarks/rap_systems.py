"""The ways to preprocess that `rap.py` compares: each trains the same model on the same batches, and is timed."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.utils.data

from benchmarks.rap_cases import batches_of_one_size
from benchmarks.rap_model import ModelSize, Training
from benchmarks.rap_plans import PlanSize, make_plan
from hetstream import DataLoader
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, Output
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.arena import Packed, program_of, unpack
from hetstream.mpi_dataworkers.gpu_features.captured import CapturedCoRun
from hetstream.mpi_dataworkers.gpu_features.corun import CoRun
from hetstream.mpi_dataworkers.gpu_features.fused import Launch as RunKernel
from hetstream.mpi_dataworkers.gpu_features.fused import PackedByDataWorkers, triton_launch
from hetstream.mpi_dataworkers.gpu_features.launches import Launch, LaunchPlan, all_at_once
from hetstream.mpi_dataworkers.gpu_features.streams import CudaStreams, Streams

# So many batches are trained on in turn.
NUM_BATCHES = 4
# Steps of the captured systems before they are timed: nine run as they are, then three are captured.
_WARM_UP, _WARM_UP_CAPTURED = 6, 13
_BEGIN = "bottom.forward"


@dataclass
class Bench:
    """A plan on a device.

    Attributes:
        size, rows: of the plan, and of its batches.
        training: the model.
        batches: raw columns, in host memory.
        make_streams: gives the device's streams.
        run_kernel, tile: of the kernel.
        num_steps, warm_up: that are timed, and before them.
        plan: of our own way, once it is known.
    """

    size: PlanSize
    rows: int
    training: Training
    batches: list[dict[str, Any]]
    make_streams: Callable[[], Streams]
    run_kernel: RunKernel
    tile: int
    num_steps: int
    warm_up: int = _WARM_UP
    plan: LaunchPlan | None = None
    graph: FeatureGraph = field(init=False)

    def __post_init__(self) -> None:
        self.graph = make_plan(self.size)
        self.streams = self.make_streams()
        self.device = self.streams.device
        self.fused_plan = all_at_once(self.graph, _BEGIN, self.streams.num_multiprocessors)
        self.unfused_graph = with_all_steps(self.graph)
        chains = range(len(program_of(self.unfused_graph).chains))
        launches = tuple(Launch(_BEGIN, (at,), self.streams.num_multiprocessors) for at in chains)
        self.unfused_plan = LaunchPlan(launches, 0.0, "a launch for each operator")

    @classmethod
    def on_gpu(cls, size: PlanSize, rows: int, num_steps: int, *, tf32: bool, model: ModelSize | None = None) -> Bench:
        """On the GPU, with the paper's model unless another one is given."""
        batches = batches_of_one_size(size, rows, NUM_BATCHES)
        training = Training(make_plan(size), rows, torch.device("cuda"), model or ModelSize(), tf32=tf32)
        return cls(size, rows, training, batches, CudaStreams, triton_launch(), 256, num_steps)

    def packed(self, graph: FeatureGraph, plan: LaunchPlan) -> list[Packed]:
        """The batches as data workers pack them, from where the GPU copies them."""
        stage = PackedByDataWorkers(graph, plan, self.tile)
        found = [stage(batch) for batch in self.batches]
        if self.device.type == "cuda":
            return [packed._replace(words=packed.words.pin_memory()) for packed in found]
        return found

    def sync(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def timed(self, steps: Iterator[object], warm_up: int | None = None) -> float:
        """Seconds of a step, after some that do not count."""
        for _ in itertools.islice(steps, self.warm_up if warm_up is None else warm_up):
            pass
        self.sync()
        began = time.perf_counter()
        done = sum(1 for _ in itertools.islice(steps, self.num_steps))
        self.sync()
        if done != self.num_steps:
            raise RuntimeError(f"{done} steps of {self.num_steps}: there were no more batches")
        return (time.perf_counter() - began) / done

    def corun(self, graph: FeatureGraph, plan: LaunchPlan) -> CoRun:
        """Preprocessing beside training."""
        kernel = self.tile, self.run_kernel
        options = {"optimizer": self.training.optimizer, "streams": self.make_streams()}
        return CoRun(graph, plan, self.training.model, kernel=kernel, **options)

    def on_device(self, graph: FeatureGraph, plan: LaunchPlan, packed: Packed) -> dict[str, Any]:
        """Copy and compute a batch on the current stream, one launch after the other."""
        arena = packed.words.to(self.device, non_blocking=True)
        made = torch.empty(-(-packed.made_bytes // 8), dtype=torch.int64, device=self.device)
        constants = self._constants(graph)
        for number, launch in enumerate(plan.launches):
            if packed.num_tiles[number]:
                self.run_kernel((arena, made, constants), number, launch.num_programs, self.tile)
        return dict(unpack(graph, packed, arena, made))

    def _constants(self, graph: FeatureGraph) -> torch.Tensor:
        known: dict[str, torch.Tensor] = self.__dict__.setdefault("_known_constants", {})
        if graph.digest not in known:
            known[graph.digest] = torch.from_numpy(program_of(graph).constants).to(self.device)
        return known[graph.digest]


def with_all_steps(graph: FeatureGraph) -> FeatureGraph:
    """The same graph with what each operator makes among its outputs: a launch for each is as without fusion."""
    own = {name for output in graph.outputs for name in output.of}
    between = [step.name for step in graph.steps if step.name not in own]
    return FeatureGraph(graph.inputs, graph.steps, (*graph.outputs, *(Output(name, (name,)) for name in between)))


def interpreted_kernel() -> RunKernel:
    """The kernel without a GPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    launch = triton_launch()

    def run(arenas: tuple[torch.Tensor, torch.Tensor, torch.Tensor], number: int, num_programs: int, tile: int) -> None:
        with np.errstate(all="ignore"):
            launch(arenas, number, num_programs, tile)

    return run


def ideal(bench: Bench) -> float:
    """Features lie on the device: nothing is copied or computed."""
    plan = bench.fused_plan
    ready = [bench.on_device(bench.graph, plan, packed) for packed in bench.packed(bench.graph, plan)]
    return bench.timed(bench.training.step(features) for features in itertools.cycle(ready))


def sequential(bench: Bench) -> float:
    """Copied, computed with a launch for each operator, then trained."""
    return _sequential(bench, bench.unfused_graph, bench.unfused_plan)


def sequential_fused(bench: Bench) -> float:
    """Copied, computed with one launch, then trained."""
    return _sequential(bench, bench.graph, bench.fused_plan)


def _sequential(bench: Bench, graph: FeatureGraph, plan: LaunchPlan) -> float:
    packed = bench.packed(graph, plan)
    step = bench.training.step
    return bench.timed(step(bench.on_device(graph, plan, batch)) for batch in itertools.cycle(packed))


class _Whole(torch.utils.data.Dataset[Any]):
    """Whole batches as samples."""

    def __init__(self, batches: Sequence[dict[str, Any]], count: int) -> None:
        self._batches, self._count = batches, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self._batches[at % len(self._batches)]


def _only(batches: list[dict[str, Any]]) -> dict[str, Any]:
    return batches[0]


def cpu_data_workers(bench: Bench) -> float:
    """Computed by data workers on the other cores of this host, then copied while training goes on."""
    num_workers = max(1, len(os.sched_getaffinity(0)) - 1) if bench.device.type == "cuda" else 0
    # Each process makes some batches that do not count: in its first one it compiles.
    warm_up = 4 * num_workers + bench.warm_up
    dataset = _Whole(bench.batches, bench.num_steps + warm_up + 20 * _WARM_UP)
    with DataLoader(
        dataset,
        batch_size=1,
        shuffle=False,
        collate_fn=_only,
        batch_stage=FeatureTransform(bench.graph, native=bench.device.type == "cuda"),
        num_workers=num_workers,
        device=str(bench.device),
    ) as loader:
        return bench.timed((bench.training.step(features) for features in loader), warm_up)


def low_priority(bench: Bench) -> float:
    """All of the next batch on a stream of lower priority when a step begins, with a launch for each operator."""
    return _beside(bench, bench.unfused_graph, bench.unfused_plan)


def low_priority_fused(bench: Bench) -> float:
    """The same with one launch, on all multiprocessors."""
    return _beside(bench, bench.graph, bench.fused_plan)


def hetstream(bench: Bench) -> float:
    """Each feature beside the layer that has room for it, and on so many multiprocessors as it needs."""
    assert bench.plan is not None
    return _beside(bench, bench.graph, bench.plan)


def _beside(bench: Bench, graph: FeatureGraph, plan: LaunchPlan) -> float:
    with bench.corun(graph, plan) as corun:
        batches = corun(itertools.cycle(bench.packed(graph, plan)))
        return bench.timed(bench.training.step(features) for features in batches)


def ideal_captured(bench: Bench) -> float:
    """Features lie on the device, and a step is a CUDA graph."""
    plan, streams = bench.fused_plan, bench.streams
    features = bench.on_device(bench.graph, plan, bench.packed(bench.graph, plan)[0])
    with streams.first():
        bench.timed(bench.training.step(features) for _ in itertools.count())
        replay, _ = streams.capture(lambda: bench.training.step(features))
        return bench.timed((replay() for _ in itertools.count()), 1)


def hetstream_captured(bench: Bench) -> float:
    """A step and the next batch's launches beside its layers are a CUDA graph."""
    assert bench.plan is not None
    with CapturedCoRun(
        bench.graph,
        bench.plan,
        bench.training.model,
        bench.training.step,
        streams=bench.make_streams(),
        optimizer=bench.training.optimizer,
        kernel=(bench.tile, bench.run_kernel),
    ) as captured:
        found = bench.timed(captured(itertools.cycle(bench.packed(bench.graph, bench.plan))), warm_up=_WARM_UP_CAPTURED)
        if captured.num_replays < bench.num_steps:
            why = captured.refusal or "batches found no room in the slots, or had other sizes"
            raise RuntimeError(f"{captured.num_replays} steps of {bench.num_steps} were replayed: {why}")
        return found


SYSTEMS: dict[str, Callable[[Bench], float]] = {
    "ideal": ideal,
    "sequential": sequential,
    "sequential, fused": sequential_fused,
    "CPU data workers": cpu_data_workers,
    "low-priority stream": low_priority,
    "low-priority stream, fused": low_priority_fused,
    "hetstream": hetstream,
    "ideal, captured": ideal_captured,
    "hetstream, captured": hetstream_captured,
}


def alone_s(bench: Bench, *, is_fused: bool) -> float:
    """How long preprocessing of a batch takes on the GPU by itself, without its copy."""
    graph, plan = (bench.graph, bench.fused_plan) if is_fused else (bench.unfused_graph, bench.unfused_plan)
    packed = bench.packed(graph, plan)[0]
    arena = packed.words.to(bench.device)
    made = torch.empty(-(-packed.made_bytes // 8), dtype=torch.int64, device=bench.device)
    arenas = arena, made, bench._constants(graph)

    def run() -> Iterator[None]:
        while True:
            for number, launch in enumerate(plan.launches):
                if packed.num_tiles[number]:
                    bench.run_kernel(arenas, number, launch.num_programs, bench.tile)
            yield

    return bench.timed(run(), 2)
