"""Run a feature graph on a GPU, all of its features and operators in one kernel: `FeatureTransform` for a trainer.

Called by programs on batches of raw columns, as `collate_rows` makes them and a loader gives them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.batches import Jagged, JaggedBatch, Reader
from hetstream.mpi_dataworkers.features.cut import CutGraph, DataWorkersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.arena import LAUNCHES_AT, Packed, Packer, program_of, unpack
from hetstream.mpi_dataworkers.gpu_features.launches import LaunchPlan, check_plan
from hetstream.mpi_dataworkers.gpu_features.schedule import (
    check_callable,
    check_graph,
    check_number,
    check_programs,
    check_tile,
)
from hetstream.mpi_dataworkers.gpu_features.streams import device_of
from hetstream.mpi_dataworkers.gpu_features.triton_cache import prepare_triton

_log = logging.getLogger(__name__)
# As `kernel.launch`.
Launch = Callable[[tuple[torch.Tensor, torch.Tensor, torch.Tensor], int, int, int], None]


class FusedTransform:
    """A feature graph as a function of batches in host memory, whose results are on a GPU.

        transform = FusedTransform(graph, num_programs=16)
        for batch in loader:  # of raw columns
            features = transform(batch)

    The batch is packed into one piece of memory, copied once, and computed by one kernel on the current stream. All
    results of a batch are in one piece of memory, too, which lasts as long as any of them: clone what you keep. They
    are those of `FeatureTransform(graph)`, on the device: integers the same bits, floating point within 1e-5.

    A batch for which there is no memory, or that is larger than `arena_bytes`, is computed in host memory and its
    results are copied; a line in the log says so once.

    Args:
        graph: What to compute.
        device: Where; the results are there.
        num_programs: Of the kernel's grid: at most so many multiprocessors are taken. Default: all there are.
        arena_bytes: The largest batch that is computed on the GPU, with its results; default: any that fits.
        tile: Values that a program works on at once, a power of two, at most 512: registers have room for so many.
        launch: What runs the kernel; default: Triton, which must be installed.
        on_shortage: Called for each batch that is computed in host memory, with the reason and the bytes that it needs,
            0 where they are not known; default: log it once.

    Raises:
        FeatureError: when it is made: there is no GPU or no Triton, the kernel does not run, or num_programs,
            arena_bytes or tile cannot be; when it is called: the batch does not fit the graph, and the message names
            each feature.
    """

    def __init__(
        self,
        graph: FeatureGraph,
        *,
        device: str | torch.device = "cuda",
        num_programs: int | None = None,
        arena_bytes: int | None = None,
        tile: int = 256,
        launch: Launch | None = None,
        on_shortage: Callable[[str, int], None] | None = None,
    ) -> None:
        if not isinstance(graph, FeatureGraph):
            raise FeatureError(
                f"graph is a {type(graph).__name__}; give a FeatureGraph, such as the `trainer` of a CutGraph"
            )
        if num_programs is not None:
            check_programs("num_programs", num_programs)
        if arena_bytes is not None:
            check_number("arena_bytes", arena_bytes, may_be_infinite=True)
        check_tile(tile)
        for name, function in (("launch", launch), ("on_shortage", on_shortage)):
            if function is not None:
                check_callable(name, function, "a function, or None")
        self.graph = graph
        self._device = device_of(device)
        if self._device.type == "cuda" and not torch.cuda.is_available():
            raise FeatureError(f"device={str(device)!r}: there is no GPU here; FeatureTransform needs none")
        self._launch, self._tile = launch or triton_launch(), tile
        program = program_of(graph)
        self._read = Reader(graph.inputs)
        most_bytes = memory_bytes(self._device) if arena_bytes is None else arena_bytes
        self._pack = Packer(graph, program, tile, pinned=self._device.type == "cuda", most_bytes=most_bytes)
        self._constants = torch.from_numpy(program.constants).to(self._device)
        self._num_programs = num_programs or _multiprocessors(self._device)
        try_launch(self._launch, self._constants, tile)
        self._in_host_memory = FeatureTransform(graph)
        self._on_shortage = on_shortage
        self._has_said_so = False

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        num_rows, features = self._read(batch)
        num_bytes = 0
        with torch.no_grad():
            try:
                packed = self._pack(num_rows, features)
                num_bytes = packed.num_bytes
                return self._on_device(packed)
            except torch.OutOfMemoryError as error:
                return self._elsewhere(batch, str(error).partition("\n")[0], num_bytes)

    def _on_device(self, packed: Packed) -> dict[str, Any]:
        arena = packed.words.to(self._device, non_blocking=True)
        made = torch.empty(-(-packed.made_bytes // 8), dtype=torch.int64, device=self._device)
        if packed.num_tiles[0]:
            with torch.cuda.device_of(made):  # type: ignore[no-untyped-call]
                self._launch((arena, made, self._constants), 0, self._num_programs, self._tile)
        return dict(unpack(self.graph, packed, arena, made))

    def _elsewhere(self, batch: Mapping[str, Any], reason: str, num_bytes: int) -> dict[str, Any]:
        if self._on_shortage is not None:
            self._on_shortage(reason, num_bytes)
        elif not self._has_said_so:
            _log.warning("features: computed in host memory instead of on %s: %s", self._device, reason)
            self._has_said_so = True
        return {name: moved(value, self._device) for name, value in self._in_host_memory(batch).items()}


def triton_launch() -> Launch:
    """Return what runs the kernel with Triton.

    Raises:
        FeatureError: it is not installed, or somebody else could change what it compiles and loads.
    """
    if why := prepare_triton():
        raise FeatureError(f"features on a GPU are compiled by Triton: {why}")
    try:
        from hetstream.mpi_dataworkers.gpu_features.kernel import launch
    except ImportError as exc:
        raise FeatureError("features on a GPU need Triton: pip install 'hetstream[triton]'") from exc
    return launch


def try_launch(launch: Launch, constants: torch.Tensor, tile: int) -> None:
    """Run the kernel on nothing, so that it is compiled before the first step, and what is missing is told then.

    At its first launch Triton has a C compiler make a module for Python of this host.

    Raises:
        FeatureError: it does not run here.
    """
    try:
        nothing = torch.zeros(LAUNCHES_AT + 2, dtype=torch.int64, device=constants.device)
        with torch.cuda.device_of(constants):  # type: ignore[no-untyped-call]
            launch((nothing, nothing, constants), 0, 1, tile)
    except torch.OutOfMemoryError:
        pass  # batches will say so, one by one
    except Exception as error:  # of Triton, of a compiler that it runs, or of CUDA: each has types of its own
        said = str(error).strip().partition("\n")[0]
        raise FeatureError(
            f"the kernel does not run on {constants.device}: {type(error).__name__}: {said}. Triton needs a C compiler "
            "(gcc or clang, or CC=) and the headers of this Python"
        ) from error


def memory_bytes(device: torch.device) -> int | None:
    """Return how much memory a GPU has; None of what is none."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def has_memory(device: torch.device, num_bytes: int) -> bool:
    """Return whether a device has this number of bytes: they are taken and given back."""
    try:
        torch.empty(max(1, num_bytes), dtype=torch.uint8, device=device)
    except torch.OutOfMemoryError:
        return False
    return True


def _multiprocessors(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def moved(value: Any, device: torch.device) -> Any:
    """Return an output of a graph on another device."""
    if isinstance(value, JaggedBatch):
        return JaggedBatch(value.keys, value.values.to(device), value.lengths.to(device))
    if isinstance(value, Jagged):
        return Jagged(value.values.to(device), value.lengths.to(device))
    return value.to(device)


# What data workers do of a batch for `corun.py`: pack it, or compute all of it where the trainer's GPU cannot.


class Computed(NamedTuple):
    """A batch that data workers have computed.

    Attributes:
        features: the graph's outputs.
        digest: of the graph.
    """

    features: dict[str, Any]
    digest: str


class ComputedByDataWorkers:
    """A batch stage: the whole graph in data workers, marked so that nobody computes it again. It can be pickled.

    Args:
        graph: the graph.
        before: the loader's stage in whose place this one is; it does not go to data workers.
    """

    def __init__(self, graph: FeatureGraph, before: Any = None) -> None:
        self.graph = graph
        self.before = before
        self._transform = FeatureTransform(graph, native="exact")

    def __reduce__(self) -> tuple[object, ...]:
        return ComputedByDataWorkers, (self.graph,)

    def __call__(self, batch: Mapping[str, Any]) -> Computed:
        return Computed(self._transform(batch), self.graph.digest)


class PackedByDataWorkers:
    """A batch stage that packs raw columns for a plan, so that the trainer only copies them. It can be pickled.

        loader = DataLoader(..., collate_fn=collate_rows, batch_stage=PackedByDataWorkers(graph, plan))

    Raises:
        FeatureError: when it is made: the plan is none or another graph's, or the tile cannot be; when it is called:
            the batch does not fit the graph, and the message names each feature.
    """

    def __init__(self, graph: FeatureGraph, plan: LaunchPlan, tile: int = 256) -> None:
        check_graph("PackedByDataWorkers", graph)
        check_tile(tile)
        check_plan(plan, len(program_of(graph).chains))
        self._made_of = graph, plan, tile
        self._read = Reader(graph.inputs)
        launches = [each.chains for each in plan.launches]
        self._pack = Packer(graph, program_of(graph), tile, launches=launches, is_padded=plan.is_padded)

    def __reduce__(self) -> tuple[object, ...]:
        return PackedByDataWorkers, self._made_of

    def __call__(self, batch: Mapping[str, Any]) -> Packed:
        return self._pack(*self._read(batch))


def check_raw(loader: Iterable[Any], graph: FeatureGraph) -> None:
    """Raise FeatureError where a loader's batches have the graph's outputs already: it would be computed of those."""
    stage = getattr(loader, "batch_stage", None)
    stage = stage.cut if isinstance(stage, DataWorkersPart) else stage
    if isinstance(stage, CutGraph | FeatureTransform) and stage.graph.digest == graph.digest:
        raise FeatureError(
            "the loader's batches have this graph's outputs already, and CoRun needs raw columns: leave out the "
            "loader's features= or batch_stage="
        )
