"""Compute a feature graph on the trainer's GPU beside the layers of its model, batch n + 1 while batch n is trained.

    plan = plan_launches(graph, Batches(rows=4096), device, layers, num_multiprocessors=132)
    with CoRun(graph, plan, model) as corun:
        for features in corun(loader):  # a loader of raw columns
            loss = model(features)
            ...

`Interleaving` decides what is done when; `CoRun` carries it out on the streams of `streams.py`. A batch for
which the GPU has no memory is computed in host memory, and from then on data workers compute all, until there is memory
again (`Fallback`): none is lost.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hetstream.base.errors import HetstreamError
from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.batches import Reader
from hetstream.mpi_dataworkers.features.cut import CutGraph, DataWorkersPart, HandedOver
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.arena import (
    Packed,
    Packer,
    check_packed,
    fingerprint_of,
    program_of,
    raw_of,
    unpack,
)
from hetstream.mpi_dataworkers.gpu_features.capacity import LayerHooks
from hetstream.mpi_dataworkers.gpu_features.fused import (
    Computed,
    ComputedByDataWorkers,
    Launch,
    PackedByDataWorkers,
    check_raw,
    memory_bytes,
    moved,
    triton_launch,
    try_launch,
)
from hetstream.mpi_dataworkers.gpu_features.launches import LaunchPlan, check_plan, without_layers
from hetstream.mpi_dataworkers.gpu_features.schedule import check_callable, check_is, check_tile
from hetstream.mpi_dataworkers.gpu_features.streams import CudaStreams, Stream, Streams

# When a GPU that had no memory for a batch is tried again: (what happened, now) -> Try with its reason. Pure.
#
#     shortage = fell_short(shortage, now)  # the GPU had no memory: data workers compute the graph
#     if next_try(shortage, now).is_due:
#         shortage = came_back(shortage, now) if there_is_memory else fell_short(shortage, now)
#
# Both ways back and forth have batches made again, so tries become rarer and end. `CoRun` and
# `loader/features.py` carry it out.

# After a shortage it is tried again after this long, then twice as long, and so on.
RETRY_S, LONGEST_RETRY_S = 10.0, 600.0
# So many shortages and tries in vain in a row, in somewhat more than an hour, and the GPU is not tried again.
MOST_IN_A_ROW = 12
# A shortage after this long on the GPU is the first one again.
STEADY_S = 600.0


@dataclass(frozen=True)
class Shortage:
    """What is known of the GPU's memory.

    Attributes:
        is_short: whether data workers compute the graph now.
        num_in_a_row: shortages and tries in vain.
        changed_at: when it was last found short, or came back.
    """

    is_short: bool = False
    num_in_a_row: int = 0
    changed_at: float = 0.0


@dataclass(frozen=True)
class Try:
    """Whether to look for memory now.

    Attributes:
        reason: one line for the user.
    """

    is_due: bool
    reason: str


def fell_short(shortage: Shortage, now: float) -> Shortage:
    """There was no memory for a batch, or none when it was tried again."""
    is_new = not shortage.is_short and now - shortage.changed_at >= STEADY_S
    return Shortage(True, 1 if is_new else shortage.num_in_a_row + 1, now)


def came_back(shortage: Shortage, now: float) -> Shortage:
    """There is memory: the GPU computes the graph again."""
    return replace(shortage, is_short=False, changed_at=now)


def next_try(shortage: Shortage, now: float) -> Try:
    """Return whether the GPU is looked at now."""
    if not shortage.is_short:
        return Try(False, "the GPU has memory")
    if shortage.num_in_a_row > MOST_IN_A_ROW:
        return Try(False, f"the GPU had no memory {shortage.num_in_a_row} times in a row, and is not tried again")
    wait_s = min(LONGEST_RETRY_S, RETRY_S * 2.0 ** (shortage.num_in_a_row - 1))
    left_s = shortage.changed_at + wait_s - now
    if left_s > 0:
        return Try(False, f"the GPU is tried again in {left_s:.0f} s")
    return Try(True, f"the GPU is tried again {wait_s:.0f} s after it had no memory")


# Who computes a feature graph where the trainer's GPU cannot: data workers, until it can again.
#
# `Shortage` says when the GPU is tried again; here the loader is told, and the user.

_log = logging.getLogger(__name__)


class Fallback:
    """Of one graph.

    Args:
        graph: the whole one.

    Attributes:
        missing: why the GPU can never compute; "" where it can.
        now: seconds, never going back.
    """

    def __init__(self, graph: FeatureGraph) -> None:
        self.missing = ""
        self.now: Callable[[], float] = time.monotonic
        self._graph = graph
        self._shortage = Shortage()
        self._short_of = "", 0  # of a batch that had no memory: why, and of how many bytes; until that is carried out
        self._needed_bytes = 0
        self._has_said_so = False
        # Of loaders whose data workers compute the graph, because the GPU could not: the stage by which they do.
        self._stages: weakref.WeakKeyDictionary[Any, ComputedByDataWorkers] = weakref.WeakKeyDictionary()

    @property
    def is_away(self) -> bool:
        """Whether batches are not the GPU's now."""
        return bool(self.missing) or self._shortage.is_short

    def begin(self, loader: Iterable[Any]) -> None:
        """A loader is iterated from here on."""
        if self.is_away:
            self._leave_to_data_workers(loader, self.missing or "the GPU has no memory")
        else:
            self._take_back(loader)

    def note_shortage(self, reason: str, num_bytes: int) -> None:
        """A batch found no memory; `num_bytes` is 0 where it is not known how much it needs."""
        self._short_of = reason, num_bytes

    def look(self, loader: Iterable[Any], has_room: Callable[[int], bool]) -> None:
        """A batch had no room: data workers compute the next ones, or without such it is tried again.

        Where data workers compute the graph, they give it back when there is room.

        Args:
            loader: that is iterated.
            has_room: whether the GPU has memory for a number of bytes.
        """
        reason, num_bytes = self._short_of
        self._short_of = "", 0
        if self.missing:
            return
        if reason and not self._shortage.is_short:
            if self._leave_to_data_workers(loader, reason):
                self._needed_bytes = num_bytes
                self._shortage = fell_short(self._shortage, self.now())
        elif next_try(self._shortage, self.now()).is_due:
            if not has_room(self._needed_bytes):
                self._shortage = fell_short(self._shortage, self.now())
                return
            self._shortage = came_back(self._shortage, self.now())
            self._take_back(loader)
            self._has_said_so = False
            _log.warning("hetstream: features: the GPU has memory again, and computes its part of the graph")

    def close(self) -> None:
        """Give loaders the stages that they had: who iterates them next wants other batches, or says so again."""
        for loader in [*self._stages]:
            with contextlib.suppress(HetstreamError):  # one that is closed, say, needs none
                self._take_back(loader)

    def _take_back(self, loader: Iterable[Any]) -> None:
        if not hasattr(loader, "set_batch_stage") or loader not in self._stages:
            return
        stage = self._stages.pop(loader)
        now = getattr(loader, "batch_stage", None)
        if now is stage:  # else the program has changed it
            loader.set_batch_stage(stage.before)

    def _leave_to_data_workers(self, loader: Iterable[Any], reason: str) -> bool:
        """Have data workers compute the graph from the next step on, and say so once; whether they will."""
        # A stage of the program's own would be gone.
        own = getattr(loader, "batch_stage", None)
        if own is not None and hasattr(loader, "set_batch_stage") and self._stages.get(loader) is own:
            return True
        if isinstance(own, ComputedByDataWorkers):  # of an older CoRun that was not closed
            own = own.before
        can = hasattr(loader, "set_batch_stage") and (
            own is None or isinstance(own, PackedByDataWorkers | DataWorkersPart)
        )
        if can:
            stage = ComputedByDataWorkers(self._graph, own)
            loader.set_batch_stage(stage)  # type: ignore[attr-defined]
            self._stages[loader] = stage
        if not self._has_said_so:
            who = "data workers compute the whole graph" if can else "computed by the trainer's CPU"
            _log.warning("hetstream: features: %s: %s", who, reason)
            self._has_said_so = True
        return can


# What is done next for which batch: batch n + 2 is copied, n + 1 is computed, n is trained. Pure.
#
#     state = layer_begins(plan, state, "mlp.forward")
#     while action := next_action(plan, state):
#         state = after(state, action, there_was_one)
#
# RAP's interleaving of batches (its section 6.3). `CoRun` carries it out. A layer that never begins loses nothing:
# what was to run beside it runs when the loop wants the batch.

# Batches that are under way beside the one that is trained: one is computed, one is copied.
AHEAD = 2


@dataclass(frozen=True)
class Interleaving:
    """Where everything is.

    Attributes:
        trained: the batch that the loop has; -1 before the first.
        prepared: batches that have been taken from the loader, and whose copies have begun.
        launched: launches of batch `trained + 1` that are under way or done.
        due: those of them that are to be launched now: their layer has begun.
        is_wanted: whether the loop waits for batch `trained + 1`.
        end: how many batches there are, once that is known.
    """

    trained: int = -1
    prepared: int = 0
    launched: frozenset[int] = frozenset()
    due: frozenset[int] = frozenset()
    is_wanted: bool = False
    end: int | None = None


@dataclass(frozen=True)
class Prepare:
    """Take this batch from the loader, and begin to copy it."""

    batch: int


@dataclass(frozen=True)
class Run:
    """Launch some features of this batch, behind what the training stream has reached."""

    batch: int
    launch: int


@dataclass(frozen=True)
class HandOver:
    """Give the loop this batch."""

    batch: int


@dataclass(frozen=True)
class Stop:
    """There is no further batch."""


Action = Prepare | Run | HandOver | Stop


def batch_wanted(state: Interleaving) -> Interleaving:
    """Note that the loop asks for its next batch."""
    return replace(state, is_wanted=True)


def layer_begins(plan: LaunchPlan, state: Interleaving, layer: str) -> Interleaving:
    """Note that a layer of the batch that is trained begins; a second time in one step it changes nothing."""
    if state.trained + 1 >= state.prepared:
        return state
    due = {at for at, launch in enumerate(plan.launches) if launch.layer == layer} - state.launched
    return replace(state, due=state.due | due)


def next_action(plan: LaunchPlan, state: Interleaving) -> Action | None:
    """Return what is to be done next; None where nothing is until the next event."""
    batch = state.trained + 1
    if state.due:
        return Run(batch, min(state.due))
    if state.is_wanted:
        if state.end is not None and batch >= state.end:
            return Stop()
        if batch >= state.prepared:
            return Prepare(batch)
        left = set(range(len(plan.launches))) - state.launched
        return Run(batch, min(left)) if left else HandOver(batch)
    if state.end is None and state.trained >= 0 and state.prepared <= state.trained + AHEAD:
        return Prepare(state.prepared)
    return None


def after(state: Interleaving, action: Action, there_was_one: bool = True) -> Interleaving:
    """Return what holds when an action has been carried out; `there_was_one` says it of a batch that was to be
    taken.
    """
    if isinstance(action, Prepare):
        return replace(state, prepared=action.batch + 1) if there_was_one else replace(state, end=action.batch)
    if isinstance(action, Run):
        return replace(state, launched=state.launched | {action.launch}, due=state.due - {action.launch})
    if isinstance(action, HandOver):
        return replace(state, trained=action.batch, launched=frozenset(), due=frozenset(), is_wanted=False)
    return replace(state, is_wanted=False)


_END = object()


@dataclass
class _Batch:
    """A batch that is under way.

    Attributes:
        raw: as the loader gave it.
        state: the loader's, behind this batch.
        error: raised when the loop comes to it.
        packed, arena, made: what is on the device; None where it was computed elsewhere.
        copied, done: the events of the ends of its copy, and of all that was launched of it.
        features: the outputs, where it was computed elsewhere.
        needed_bytes: of the device; 0 where that is not known.
    """

    raw: Any = None
    state: Any = None
    error: Exception | None = None
    packed: Packed | None = None
    arena: torch.Tensor | None = None
    made: torch.Tensor | None = None
    copied: Any = None
    done: Any = None
    features: dict[str, Any] | None = None
    needed_bytes: int = 0


# Where a batch is on the device: gets streams, the batch's number and the batch; gives its arena, whose copy has begun,
# and memory for its results, or raises OutOfMemoryError.
TakeMemory = Callable[[Streams, int, Packed], tuple[torch.Tensor, torch.Tensor]]


def own_memory(streams: Streams, _: int, packed: Packed) -> tuple[torch.Tensor, torch.Tensor]:
    """Return memory of a batch's own, so that a program may keep it."""
    return streams.copy(packed.words), streams.empty(-(-packed.made_bytes // 8))


@dataclass(frozen=True)
class Captured:
    """A training step as a graph.

    Attributes:
        replay: runs it.
        result: what the step gave, which each replay gives again in the same memory.
        launched: launches of the next batch that it has.
    """

    replay: Callable[[], None]
    result: Any
    launched: frozenset[int]


class CoRun:
    """A feature graph that is computed on the trainer's GPU while the batch before is trained.

    Copies, kernels and training are on three streams, and the host waits for none of them. What is done in its context
    comes before preprocessing. Results are those of `FusedTransform`. Where there is no GPU or no Triton, data workers
    compute the graph, and a line in the log says so.

    Args:
        graph: What to compute; of a cut graph the trainer's part, where the loader's data workers do theirs:
            `DataLoader(..., batch_stage=DataWorkersPart(cut))`. The outputs are then the whole graph's.
        plan: Which features beside which layer; of a cut graph, those of `cut.trainer`.
        model: The model that is trained; its modules say when a layer begins.
        layers: Modules by the names that the plan has for them; default: the model's children.
        optimizer: The model's; its step is a layer, too.
        streams: Of the device; default: those of the current GPU.
        kernel: Values that a program works on at once, as in `FusedTransform`, and what runs it; default: Triton.

    Attributes:
        graph: What is computed here.
        plan: The plan.
        streams: Of the device, where there is one.
        take_memory: Gives each batch its memory; default: of its own.
        fallback: Who computes where the GPU cannot.

    Raises:
        FeatureError: the plan is none, leaves out features or has some twice, or knows no layer of the model; a cut
            graph leaves the trainer nothing; a tile cannot be; something is of another type.
    """

    def __init__(
        self,
        graph: FeatureGraph | CutGraph,
        plan: LaunchPlan,
        model: torch.nn.Module,
        *,
        layers: Mapping[str, torch.nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        streams: Streams | None = None,
        kernel: tuple[int, Launch | None] = (256, None),
    ) -> None:
        check_is("graph", graph, FeatureGraph | CutGraph, "a FeatureGraph, or a CutGraph")
        tile, launch = _checked_kernel(kernel)
        if streams is not None:
            check_is("streams", getattr(streams, "device", streams), torch.device, "Streams, such as CudaStreams()")
        self._cut = graph if isinstance(graph, CutGraph) else None
        self._whole = graph.graph if isinstance(graph, CutGraph) else graph
        own = graph.trainer if isinstance(graph, CutGraph) else graph
        if own is None:
            raise FeatureError(f"{graph}: nothing is left for the trainer to compute")
        self.graph: FeatureGraph = own
        self._program = program_of(own)
        check_plan(plan, len(self._program.chains))
        launches = [each.chains for each in plan.launches]
        self._fingerprint = fingerprint_of(own, launches, tile, plan.is_padded)
        self._in_host_memory = FeatureTransform(own)
        self._read = Reader(own.inputs)
        self._tile = tile
        self.fallback = Fallback(self._whole)
        self._loader_state: Any = None
        self._begin()
        self.take_memory: TakeMemory = own_memory
        self._is_capturing = False
        self._device = torch.device("cpu")
        self._context = contextlib.ExitStack()
        self._hooks = LayerHooks(model, self.layer_begins, layers=layers, optimizer=optimizer)
        self._context.callback(self._hooks.close)
        try:
            self.plan = without_layers(plan, self._hooks.names)
        except FeatureError:
            self.close()
            raise
        try:
            self.streams = CudaStreams() if streams is None else streams
            self._device = self.streams.device
            self._launch = launch or triton_launch()
            self._pack = Packer(
                own,
                self._program,
                self._tile,
                launches=launches,
                is_padded=plan.is_padded,
                pinned=self._device.type == "cuda",
                most_bytes=memory_bytes(self._device),
            )
            self._constants = torch.from_numpy(self._program.constants).to(self._device)
            try_launch(self._launch, self._constants, self._tile)
        except (FeatureError, torch.OutOfMemoryError) as error:
            self.fallback.missing = str(error).partition("\n")[0]

    def __call__(self, loader: Iterable[Any]) -> Iterator[dict[str, Any]]:
        """The batches of an iteration over a loader of raw columns, computed.

        Two batches are taken ahead. `state_dict` has the loader's position behind the batch that the loop has.

        Raises:
            FeatureError: this cannot be iterated.
        """
        check_is("loader", loader, Iterable, "a loader of raw columns")
        if self._cut is None:
            check_raw(loader, self._whole)
        self.fallback.begin(loader)
        self._loader_state = _state_of(loader)
        iteration = _Iteration(self, loader)
        self._begin(iteration)
        return iteration

    def _begin(self, iteration: _Iteration | None = None) -> None:
        self._state: Interleaving = Interleaving()
        self._batches: dict[int, _Batch] = {}
        self._handed: _Batch | None = None  # to the loop, which does not have it yet
        self._iteration = iteration

    def next_of(self, iteration: _Iteration) -> dict[str, Any]:
        """Return the next batch of an iteration; called by that.

        Raises:
            StopIteration: there is none.
            FeatureError: another iteration has begun, or this CoRun was closed: what it had taken ahead is gone.
        """
        if self._iteration is None:
            raise FeatureError("this CoRun was closed: iterate within its `with`")
        if self._iteration is not iteration:
            raise FeatureError("another iteration over this CoRun has begun: a CoRun has one at a time")
        if not self.fallback.missing:
            self.streams.follow()
        if self._handed is None:  # else the program was interrupted (Ctrl-C), and goes on
            self._state = batch_wanted(self._state)
        return self._carry_out(iteration)

    def layer_begins(self, name: str) -> None:
        """A layer of the model begins; called by the hooks, or by a program that has a layer without a module."""
        self._state = layer_begins(self.plan, self._state, name)
        self._run_next()

    def capture(self, step: Callable[[], Any]) -> Captured:
        """Capture a step on the batch that the loop has, with what the next batch is to be launched beside it."""
        before = self._state

        def joined() -> Any:
            result = step()
            if self._state.launched != before.launched:
                self.streams.wait(Stream.TRAINING, self.streams.record(Stream.PREPROCESSING))
            return result

        with self._by_graph():
            replay, result = self.streams.capture(joined)
            launched = self._state.launched - before.launched
        return Captured(replay, result, launched)

    def replay(self, captured: Captured, *, has_next: bool) -> None:
        """Replay a step; `has_next` says whether the next batch is in the memory that the graph knows."""
        with self._by_graph() as batch:
            captured.replay()
        if batch is not None and batch.packed is not None and has_next:
            batch.done = self.streams.record(Stream.TRAINING)
            self._state = replace(self._state, launched=self._state.launched | captured.launched)

    @contextlib.contextmanager
    def _by_graph(self) -> Iterator[_Batch | None]:
        """The next batch is launched by a graph, which waits for no event of another stream: training does before."""
        batch, state = self._batches.get(self._state.trained + 1), self._state
        done = None if batch is None else batch.done
        if batch is not None and batch.copied is not None:
            self.streams.wait(Stream.TRAINING, batch.copied)
        self._is_capturing = True
        try:
            yield batch
        finally:
            self._is_capturing = False
            self._state = state
            if batch is not None:
                batch.done = done

    @property
    def number(self) -> int:
        """Of the batch that the loop has, from 0 in each iteration; -1 before the first."""
        return self._state.trained

    def state_dict(self) -> Any:
        """Return the loader's state behind the batch that the loop has; None of a loader that has none."""
        return self._loader_state

    def close(self) -> None:
        """Take the hooks off the model, and give loaders their stages back; safe to call twice."""
        self._context.close()
        self._begin()
        self.fallback.close()

    def __enter__(self) -> CoRun:
        if not self.fallback.missing:
            self._context.enter_context(self.streams.first())
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Carrying out

    def _carry_out(self, iteration: _Iteration) -> dict[str, Any]:
        """What is to be done until the loop has its batch, and behind that."""
        while (action := next_action(self.plan, self._state)) is not None:
            there_was_one = True
            if isinstance(action, Prepare):
                there_was_one = self._prepare(action, iteration)
            elif isinstance(action, Run):
                self._run_next()
                continue
            elif isinstance(action, HandOver):
                self._handed = self._batches.pop(action.batch)
            self._state = after(self._state, action, there_was_one)
            if isinstance(action, Stop):
                raise StopIteration
            if isinstance(action, HandOver):
                self.fallback.look(iteration.loader, self._has_room)
        handed, self._handed = self._handed, None
        assert handed is not None
        self._loader_state = handed.state
        return self._handed_over(handed)

    def _prepare(self, action: Prepare, iteration: _Iteration) -> bool:
        """Take a batch and begin to copy it; whether there was one."""
        # One that is there was taken before the program was interrupted.
        batch = self._batches.setdefault(action.batch, _Batch())
        try:
            batch.raw = next(iteration.batches, _END) if batch.raw is None else batch.raw
            if batch.raw is _END:
                del self._batches[action.batch]
                return False
            batch.state = _state_of(iteration.loader)
            try:
                self._begin_copy(action.batch, batch)
            except torch.OutOfMemoryError as error:
                self._compute_elsewhere(batch, error)
        except StopIteration as error:  # not the loader's own: what a batch is made of must not look like the end
            batch.error = FeatureError(f"batch {action.batch}: StopIteration was raised while it was taken: {error}")
        except Exception as error:  # noqa: BLE001, raised when the loop comes to it
            batch.error = error
        return True

    def _begin_copy(self, number: int, batch: _Batch) -> None:
        if isinstance(batch.raw, Computed):
            if batch.raw.digest != self._whole.digest:
                raise FeatureError(f"batch {number}: data workers computed another graph than this CoRun's")
            batch.features = batch.raw.features
        elif self.fallback.is_away:
            batch.features = self._computed(batch.raw)
        else:
            columns = self._columns(batch.raw)
            packed = columns if isinstance(columns, Packed) else self._pack(*self._read(columns))
            check_packed(packed, self._fingerprint)
            batch.needed_bytes = packed.num_bytes
            batch.arena, batch.made = self.take_memory(self.streams, number, packed)
            self._pad(batch.made, packed)
            batch.copied = batch.done = self.streams.record(Stream.COPYING)
            batch.packed = packed

    def _pad(self, made: torch.Tensor, packed: Packed) -> None:
        """Put zeros behind the lists; what waits for the copy waits for them, too."""
        places = packed.padding
        if not places:
            return
        num_bytes = made.view(torch.int8)

        def clear() -> None:
            for begin, end in places:
                num_bytes[begin:end].zero_()

        self.streams.launch(clear, (), [made])
        self.streams.wait(Stream.COPYING, self.streams.record(Stream.PREPROCESSING))

    def _run_next(self) -> None:
        """Carry out the launches that are next, which are all of one batch."""
        state, runs = self._state, []
        while isinstance(action := next_action(self.plan, state), Run):
            runs.append(action)
            state = after(state, action)
        self._run(runs)
        self._state = state

    def _run(self, actions: Sequence[Run]) -> None:
        """Launch some features of a batch, behind what the training stream has reached."""
        if not actions or (batch := self._batches[actions[0].batch]).packed is None:
            return
        num_tiles = batch.packed.num_tiles
        numbers = [each.launch for each in actions if num_tiles[each.launch] or self._is_capturing]
        if not numbers:
            return
        assert batch.arena is not None
        assert batch.made is not None
        arenas = batch.arena, batch.made, self._constants

        def launch_all() -> None:
            for number in numbers:
                self._launch(arenas, number, self.plan.launches[number].num_programs, self._tile)

        try:
            self.streams.wait(Stream.PREPROCESSING, self.streams.record(Stream.TRAINING))
            if not self._is_capturing:  # else training has waited for it
                self.streams.wait(Stream.PREPROCESSING, batch.copied)
            self.streams.launch(launch_all, [batch.arena], [batch.made])
            batch.done = self.streams.record(Stream.PREPROCESSING)
        except torch.OutOfMemoryError as error:
            self._compute_elsewhere(batch, error)

    def _handed_over(self, batch: _Batch) -> dict[str, Any]:
        """The outputs of a batch, for the training stream from here on."""
        if batch.error is not None:
            raise batch.error
        if batch.packed is None:
            assert batch.features is not None
            return {name: moved(value, self._device) for name, value in batch.features.items()}
        assert batch.arena is not None
        assert batch.made is not None
        assert batch.done is not None
        self.streams.wait(Stream.TRAINING, batch.done)
        self.streams.use([batch.arena, batch.made], Stream.TRAINING)
        return self._outputs(batch.raw, dict(unpack(self.graph, batch.packed, batch.arena, batch.made)))

    # Without room

    def _compute_elsewhere(self, batch: _Batch, error: torch.OutOfMemoryError) -> None:
        self.fallback.note_shortage(str(error).partition("\n")[0], batch.needed_bytes)
        batch.packed = batch.arena = batch.made = batch.copied = None
        try:
            batch.features = self._computed(batch.raw)
        except FeatureError as wrong:
            batch.error = wrong

    def _has_room(self, num_bytes: int) -> bool:
        try:
            self.streams.empty(-(-num_bytes // 8))
        except torch.OutOfMemoryError:
            return False
        return True

    def _columns(self, raw: Any) -> Any:
        """What is to be computed of a batch: columns, or what was packed of them."""
        if self._cut is None:
            return raw
        if not isinstance(raw, HandedOver) or raw.fingerprint != self._cut.fingerprint:
            raise FeatureError(
                f"this batch is not of the data workers' part: batch_stage=DataWorkersPart of {self._cut}"
            )
        return raw.features

    def _outputs(self, raw: Any, made: dict[str, Any]) -> dict[str, Any]:
        """All outputs of the graph, of which data workers may have finished some."""
        if self._cut is None:
            return made
        names = [output.name for output in self._whole.outputs]
        return {name: made[name] if name in made else moved(raw.features[name], self._device) for name in names}

    def _computed(self, raw: Any) -> dict[str, Any]:
        """The outputs of a batch, in host memory."""
        columns = self._columns(raw)
        if isinstance(columns, Packed):
            check_packed(columns, self._fingerprint)
            columns = raw_of(self.graph, self._program, columns)
        return self._outputs(raw, self._in_host_memory(columns))


class _Iteration(Iterator[dict[str, Any]]):
    """An iteration over a loader; after an exception it goes on with the next batch."""

    def __init__(self, corun: CoRun, loader: Iterable[Any]) -> None:
        self._corun = corun
        self.loader = loader
        self.batches = iter(loader)

    def __next__(self) -> dict[str, Any]:
        return self._corun.next_of(self)


def _checked_kernel(kernel: object) -> tuple[int, Launch | None]:
    """Values in a tile, and what runs the kernel."""
    if not isinstance(kernel, tuple) or len(kernel) != 2:
        raise FeatureError(f"kernel={kernel!r}: give a tile and what runs the kernel, such as (256, None)")
    tile, launch = kernel
    check_tile(tile)
    if launch is not None:
        check_callable("kernel[1]", launch, "what runs the kernel, or None for Triton")
    return tile, launch


def _state_of(loader: Iterable[Any]) -> Any:
    """The state of a loader that has one."""
    state_dict: Callable[[], Any] | None = getattr(loader, "state_dict", None)
    return None if state_dict is None else state_dict()
