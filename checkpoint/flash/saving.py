"""Saves: copy a captured state into a slot of the rank's store, at once or in a thread beside the program.

Called by the checkpointer. Nothing here talks to other ranks, and a save that fails leaves the newest generation as it
was.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hetstream.base.errors import OptionsError
from hetstream.base.text import count_words, is_unicode
from hetstream.checkpoint.disk.safetensors import check_structure
from hetstream.checkpoint.errors import CheckpointError, SharedMemoryFull, UnsupportedState, reach
from hetstream.checkpoint.flash import rng
from hetstream.checkpoint.flash.options import CheckpointOptions, CheckpointStats
from hetstream.checkpoint.flash.read_back import read_back
from hetstream.checkpoint.flash.storage import Background
from hetstream.checkpoint.memory.segment import Segment, join_metadata
from hetstream.checkpoint.memory.store import Store, WritableSlot
from hetstream.checkpoint.record.layout import Generation, checksum
from hetstream.checkpoint.record.structure import RNG, Record, written_metrics
from hetstream.checkpoint.tensors.copy_plan import Plan, copy_in_memory, make_plan, settle
from hetstream.checkpoint.tensors.leaves import Flattener, Leaves, Move, Signature, bytes_as_tensor

# The copy of a save: tensors of any device into a slot.
#
# Tensors in main memory are copied as `tensors/copy_plan.py` does. Tensors of a GPU are copied on a stream of
# their own into pinned memory; the slot is pinned once, when it is first used. Tensors of any other device are left to
# torch, one after the other: their addresses mean nothing here.

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def cycles_held_off() -> Iterator[None]:
    """Hold off Python's collector of cycles while a state is taken apart or put together.

    That makes many objects at once, and no cycles. The collector would look at each object of the program several times
    meanwhile, torch's too, which takes longer than all else for a state of many small tensors. It is for the program's
    own thread: two at a time would not know of each other.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Copier:
    """Copies tensors; keeps one stream for each device."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Order what `copy` will do behind what the GPUs have been given to do so far.

        Args:
            tensors: what will be copied.
        """
        for device in _devices_of(tensors):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self._streams[device].wait_stream(torch.cuda.current_stream(device))

    def copy(self, destinations: list[torch.Tensor], tensors: list[torch.Tensor], moves: Sequence[Move] = ()) -> None:
        """Copy each tensor to its destination; when it returns, all bytes are there. The GIL is free meanwhile.

        Args:
            destinations: in main memory.
            tensors: of the same shapes and dtypes, on any device.
            moves: more, in main memory.
        """
        devices = _devices_of(tensors)
        with torch.no_grad():
            if not devices:
                self._copy_without_streams(destinations, tensors, moves)
                return
            try:
                for device in devices:
                    chosen = [index for index, tensor in enumerate(tensors) if tensor.device == device]
                    with torch.cuda.stream(self._streams[device]):
                        torch._foreach_copy_(
                            [destinations[index] for index in chosen],
                            [tensors[index] for index in chosen],
                            non_blocking=True,
                        )
                here = [index for index, tensor in enumerate(tensors) if tensor.device.type != "cuda"]
                self._copy_without_streams(
                    [destinations[index] for index in here], [tensors[index] for index in here], moves
                )
            finally:
                # After an error too: who gives the slot up gives it to the next save.
                settle([self._streams[device].synchronize for device in devices])

    @staticmethod
    def _copy_without_streams(
        destinations: list[torch.Tensor], tensors: list[torch.Tensor], moves: Sequence[Move]
    ) -> None:
        pairs = [*zip(destinations, tensors, strict=True)]
        for destination, tensor in pairs:
            if not tensor.is_cpu:
                destination.copy_(tensor.cpu())
        in_memory = [pair for pair in pairs if pair[1].is_cpu]
        copy_in_memory([source for source, _ in in_memory], [target for _, target in in_memory], moves)


def pin(memory: torch.Tensor) -> Callable[[], object] | None:
    """Register a slot's memory with CUDA, so that copies run at full speed and beside the program.

    Without CUDA, nothing; where CUDA refuses, copies are slower, and it is logged.

    Args:
        memory: of the slot, as bytes.

    Returns:
        What undoes it, to be called before the memory is unmapped; None if nothing was done.
    """
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address = memory.data_ptr()
    code = runtime.cudaHostRegister(address, memory.nbytes, 0)
    if int(code) != 0:
        _log.warning("a slot of %d bytes cannot be pinned (%s): saves from the GPU are slower", memory.nbytes, code)
        return None
    return functools.partial(runtime.cudaHostUnregister, address)


def _devices_of(tensors: Sequence[torch.Tensor]) -> list[torch.device]:
    """The GPUs that tensors are on."""
    if not torch.cuda.is_available():
        return []
    return list({tensor.device: None for tensor in tensors if tensor.is_cuda})


# The memory of slots that saves copy into, known once for each slot and layout, and kept while the slot is.
#
# Views are made for what torch has to copy alone, and once: that takes longer than small copies.


class SlotViews:
    """The views of every slot in use."""

    def __init__(self) -> None:
        # A slot that is replaced is given up with its views, and so its memory is freed at once.
        self._of_slots: weakref.WeakKeyDictionary[Segment, Views] = weakref.WeakKeyDictionary()

    def of(self, segment: Segment, payload: memoryview, plan: Plan) -> Views:
        """Return where the tensors of a plan are copied to.

        Args:
            segment: the slot.
            payload: its memory, for a payload of the plan's layout.
        """
        views = self._of_slots.get(segment)
        if views is None or (views.plan is not plan and not views.plan.is_like(plan)):
            views = self._of_slots[segment] = Views(payload, plan, views)
        return views

    def clear(self) -> None:
        """Let go of all slots."""
        self._of_slots.clear()


class Views:
    """The memory of one slot.

    Args:
        payload: it.
        plan: what is copied.
        former: what was known of the same slot for another plan.

    Attributes:
        plan: what is copied.
        begin: its address.
    """

    def __init__(self, payload: memoryview, plan: Plan, former: Views | None) -> None:
        self.plan = plan
        self._memory = bytes_as_tensor(payload)
        self.begin = self._memory.data_ptr()
        self._made: dict[int, torch.Tensor] = {}
        if former is not None:
            former.unpin()
        undo = pin(self._memory) if plan.layout.payload_bytes else None
        self._undo = weakref.finalize(self, undo) if undo else None

    def destination(self, entry: int) -> torch.Tensor:
        """Return where torch copies an entry of the plan."""
        made = self._made.get(entry)
        if made is None:
            made = self._made[entry] = self.plan.destination(entry, self._memory)
        return made

    def unpin(self) -> None:
        """Give the memory back to be pinned anew, with another layout."""
        if self._undo:
            self._undo()


# A state taken apart for a save: which tensors are copied where, and the metadata that tells what they are.
#
# Called by the checkpointer. The plan of one save serves the next as long as the layout of the state is the same.

# Rare dtypes and formats aside: JSON of a state's structure, before there is one.
_METADATA_BYTES_EACH = 256
# How many tensors of its parameter's size an optimizer keeps, once it has made a step.
_NUM_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adadelta": 2}


@dataclass(frozen=True)
class Captured:
    """A state that is about to be copied.

    Attributes:
        plan: where its tensors go.
        metadata: of the generation.
        leaves: the tensors as they were found.
        addresses: of the tensors.
        read_back: where nothing like it was read back yet: does so, from the payload that it was copied to. With its
            values, unless the program may have changed some.
    """

    plan: Plan
    metadata: bytes
    leaves: Leaves
    addresses: list[int]
    read_back: Callable[[memoryview, bool], None] | None


class Capture:
    """Takes states apart.

    Args:
        shared: top-level keys that are equal on every rank, but for the parts that a rank has of sharded tensors.
        rank: of this process.
        world_size: number of ranks.
        options: of the checkpointer.
        holds_shared: this rank has the shared keys in memory; else another rank of the host has them for it.
    """

    def __init__(
        self,
        shared: tuple[str, ...],
        rank: int,
        world_size: int,
        options: CheckpointOptions,
        *,
        holds_shared: bool = True,
    ) -> None:
        self._shared = shared
        self._holds_shared = holds_shared
        self._rank = rank
        self._world_size = world_size
        self._options = options
        self._flattener = Flattener(allow_pickle=options.allow_pickle)
        self._generators = rng.Generators()
        self._signature: Signature | None = None
        self._plan: Plan | None = None
        self._planned: threading.Event | None = None
        # What was read back: the plan, and the kinds of values.
        self._known: tuple[Plan | None, Set[object]] = None, frozenset()

    def take(self, state: Mapping[str, Any], metrics: Mapping[str, float], *, finds_stepped: bool = False) -> Captured:
        """Take a state apart; the generators' states are added.

        Args:
            state: top-level key to objects and trees.
            metrics: for `Retention.keep_best`.
            finds_stepped: find out which tensors an optimizer changes.

        Raises:
            UnsupportedState: something in the state cannot be stored.
            OptionsError: it is no state.
        """
        leaves = self.flatten(state, finds_stepped=finds_stepped)
        if leaves.shapeless:
            raise UnsupportedState(
                f"{leaves.shapeless[0]} has no shape yet, so there is nothing to save: lazy modules get shapes in "
                "their first forward pass, or when they are restored"
            )
        self._await_plan()
        own = self._own(leaves)
        plan = self._plan_of(own)
        metadata = self._metadata(own, plan, metrics)
        read_back = self._reader(state, own, plan, metadata)
        return Captured(plan, metadata, own, own.signature.addresses, read_back)

    def _reader(
        self, state: Mapping[str, Any], own: Leaves, plan: Plan, metadata: bytes
    ) -> Callable[[memoryview, bool], None] | None:
        """`Captured.read_back`. Where the plan and the kinds of values are known, only bytes have changed."""
        forms = self._flattener.forms
        if self._known[0] is plan and forms <= self._known[1]:
            return None
        seen = plan, frozenset(forms)

        def reader(payload: memoryview, with_values: bool) -> None:
            read_back(
                state,
                own.states,
                own.generators,
                metadata,
                payload,
                allow_pickle=self._options.allow_pickle,
                with_values=with_values,
            )
            self._known = seen

        return reader

    def prepare(self, state: Mapping[str, Any], leaves: Leaves) -> Callable[[], tuple[int, int]]:
        """Plan saves of a state, beside the program.

        Args:
            state: top-level key to objects and trees.
            leaves: the same, as `flatten` takes it apart.

        Returns:
            To be called in a thread: `take` waits for it. It gives the bytes of payload and metadata that saves will
            need, also once optimizers have made a step.
        """
        self._await_plan()
        own = self._own(leaves)
        _ = own.signature  # the program may change its tensors from now on
        bytes_to_come = self._bytes_to_come(state, own)
        planned = self._planned = threading.Event()

        def plan_saves() -> tuple[int, int]:
            try:
                plan = self._plan_of(own)
                metadata_bytes = len(self._metadata(own, plan, {})) + _METADATA_BYTES_EACH * len(own.tensors)
                return plan.layout.payload_bytes + bytes_to_come, metadata_bytes
            finally:
                planned.set()

        return plan_saves

    def expected_bytes(self, state: Mapping[str, Any], leaves: Leaves) -> tuple[int, int]:
        """About what the plan of `prepare` will give, at once and before there is one; 0 for lazy modules."""
        if leaves.shapeless:
            return 0, 0
        own = self._own(leaves)
        num_bytes = sum(tensor.nbytes for tensor in own.tensors) + self._bytes_to_come(state, own)
        return num_bytes, _METADATA_BYTES_EACH * len(own.tensors)

    @staticmethod
    def _bytes_to_come(state: Mapping[str, Any], own: Leaves) -> int:
        """What optimizers will take beyond what they take now."""
        return sum(_bytes_to_come(value) for key, value in state.items() if key in own.tree or _is_sharded(value))

    def _await_plan(self) -> None:
        if self._planned:
            self._planned.wait()  # after an error the plan is made anew, and it comes again
            self._planned = None

    def flatten(self, state: Mapping[str, Any], *, finds_stepped: bool = False, asks_all: bool = True) -> Leaves:
        """Return the tensors of a state, and the tree without them; see `take` and `Flattener.flatten`."""
        if not isinstance(state, Mapping) or not all(isinstance(key, str) and key for key in state):
            raise OptionsError(f"a state is a dict with names as keys, such as {{'model': model}}, not {_short(state)}")
        if RNG in state:
            raise OptionsError(f"the key {RNG!r} of the state is taken: the generators' states are saved under it")
        unknown = [key for key in self._shared if key not in state]
        if unknown:
            raise OptionsError(f"shared={self._shared}: the state has no {', '.join(unknown)}, only {', '.join(state)}")
        generators = self._generators.capture()
        leaves = self._flattener.flatten({**state, RNG: generators}, finds_stepped=finds_stepped, asks_all=asks_all)
        leaves.generators = generators
        return leaves

    def _own(self, leaves: Leaves) -> Leaves:
        """What this rank has in memory of a state."""
        return leaves if self._holds_shared else leaves.without(leaves.equal_keys(self._shared))

    def _plan_of(self, leaves: Leaves) -> Plan:
        signature, former = leaves.signature, self._signature
        if self._plan is None or former is None or signature != former:
            self._plan = make_plan(leaves, self._shared_in(leaves))
        elif signature.addresses != former.addresses and not self._plan.fits(signature.addresses):
            plan = make_plan(leaves, self._shared_in(leaves))
            # An equal plan is the same one, so that the slots' views stay.
            self._plan = self._plan if plan.is_like(self._plan) else plan
        self._signature = signature
        return self._plan

    def _shared_in(self, leaves: Leaves) -> tuple[str, ...]:
        return tuple(key for key in self._shared if key in leaves.tree)

    def _metadata(self, leaves: Leaves, plan: Plan, metrics: Mapping[str, float]) -> bytes:
        try:
            numbers = {str(name): float(value) for name, value in metrics.items()}
            if not all(map(is_unicode, numbers)):
                raise ValueError("a name is no text")
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise OptionsError(f"metrics={_short(metrics)}: a dict of names and numbers: {error}") from error
        structure = Record.write_with(
            plan.encoded_refs,
            tree=leaves.tree,
            shared=plan.shared,
            rank=self._rank,
            world_size=self._world_size,
            metrics=written_metrics(numbers),
            shared_elsewhere=len(self._shared_in(leaves)) < len(self._shared),
        )
        check_structure(plan.layout, structure)
        return join_metadata(plan.layout.to_json(), structure)


def _is_sharded(value: Any) -> bool:
    """Whether an optimizer will have sharded tensors, once it has made a step."""
    return isinstance(value, torch.optim.Optimizer) and any(
        hasattr(parameter, "to_local") for group in value.param_groups for parameter in group["params"]
    )


def _bytes_to_come(value: Any) -> int:
    """What the state of an optimizer will take beyond what it takes now."""
    # Around another one, an optimizer may have no state of its own.
    if not isinstance(value, torch.optim.Optimizer) or getattr(value, "state", True):
        return 0
    num_moments = next(
        (_NUM_MOMENTS[kind.__name__] for kind in type(value).__mro__ if kind.__name__ in _NUM_MOMENTS), 0
    )
    num_bytes = 0
    for group in value.param_groups:
        here = num_moments + bool(group.get("amsgrad")) + bool(group.get("momentum")) + bool(group.get("centered"))
        for parameter in group["params"]:
            # Each with its count of steps; all at multiples of 64 bytes.
            num_bytes += here * (parameter.numel() * parameter.element_size() + 64) + 64
    return num_bytes


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


@dataclass(frozen=True)
class _Taken:
    """A state that is about to be copied.

    Attributes:
        generation: what it will be.
        slot: where it goes.
        plan: how.
        metadata: of the generation.
        tensors: what is copied, one for each entry.
        addresses: of the tensors of the state.
        stepped: of `Leaves`.
        read_back: of `Captured`.
    """

    generation: Generation
    slot: WritableSlot
    plan: Plan
    metadata: bytes
    tensors: list[torch.Tensor]
    addresses: list[int]
    stepped: set[int]
    read_back: Callable[[memoryview, bool], None] | None


@dataclass
class _Pending:
    """A copy in a thread.

    Attributes:
        taken: what is copied.
        checksums: of the tensors as they were, where they are compared.
        begun: taken by the thread that copies when it begins, or by who gives the save up before.
        is_done: set at the end of the thread. Thread.join would do, but Ctrl-C in it makes Python take the thread for
            ended (bpo-45274), and the slot would be unmapped below the copy.
        errors: what it ended with.
    """

    taken: _Taken
    checksums: list[int] = field(default_factory=list)
    begun: threading.Lock = field(default_factory=threading.Lock)
    is_done: threading.Event = field(default_factory=threading.Event)
    errors: list[Exception] = field(default_factory=list)


class Saving:
    """The saves of one rank, one at a time.

    Args:
        store: of this rank.
        capture: takes states apart.
        check_async: compare tensors before and after each `save_async`.

    Attributes:
        stats: how they went; what the checkpoint writer says is not in it, see `CheckpointStats.with_writer_status`.
        newest: the generation that was begun last, whether or not there was room for it; None before the first one.
        last_step_s: when that was, in seconds since 1970.
        background: makes memory ready beside the program.
    """

    def __init__(self, store: Store, capture: Capture, *, check_async: bool) -> None:
        self.stats = CheckpointStats()
        self.newest: Generation | None = None
        self.last_step_s = 0.0
        self.background = Background()
        self._store = store
        self._capture = capture
        self._check_async = check_async
        self._copier = Copier()
        self._views = SlotViews()
        self._pending: _Pending | None = None

    def announce(self, state: Mapping[str, Any]) -> Leaves:
        """Take a state apart, and tell the checkpoint writer how large its saves will be. Objects of the program's own
        classes are not asked.

        Raises:
            UnsupportedState: something in the state cannot be stored.
            OptionsError: it is no state.
        """
        with cycles_held_off():
            leaves = self._capture.flatten(state, asks_all=False)
            self._store.announce(*self._capture.expected_bytes(state, leaves))
        return leaves

    def flatten(self, state: Mapping[str, Any]) -> Leaves:
        """Take a state apart, with all its objects.

        Raises:
            UnsupportedState: something in the state cannot be stored.
        """
        return self._capture.flatten(state)

    def prepare(self, state: Mapping[str, Any], leaves: Leaves | None = None) -> None:
        """Allocate the memory for saves of a state, in the background. For lazy modules without shapes nothing is, nor
        where objects were not asked for their state.

        Args:
            state: top-level key to objects and trees.
            leaves: the same taken apart; None: it has other tensors now.

        Raises:
            UnsupportedState: something in the state cannot be stored.
        """
        with cycles_held_off():
            leaves = self._capture.flatten(state) if leaves is None else leaves
            if not leaves.shapeless and not leaves.unasked:
                self.background.start_planned(self._store.prepare, self._capture.prepare(state, leaves))

    def begin(self, attempt: int, step: int) -> Generation:
        """Return the generation that is about to be saved.

        Args:
            attempt: this start of the training.
            step: steps of training that are done.

        Raises:
            OptionsError: it is older than the newest one.
        """
        self.last_step_s = time.time()
        generation, newest = Generation(attempt, step), self.newest
        if newest and generation[:2] < newest[:2]:
            # Before it is noted: what is saved behind it would be taken for what came before it.
            raise OptionsError(f"{generation} is older than {newest}, which was saved: steps of an attempt grow")
        if newest and newest[:2] == generation[:2]:
            generation = newest._replace(repeat=newest.repeat + 1)
        self.newest = generation
        return generation

    def begin_anew(self) -> None:
        """Training goes on from an older generation: what was saved here is left behind."""
        self.newest = self.stats.saved = None

    def save(self, generation: Generation, state: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """Take a state; see `FlashCheckpointer.save`."""
        began_s = time.perf_counter()
        self.fence()
        with cycles_held_off():
            taken = self._take(generation, state, metrics)
            if taken:
                with taken.slot:
                    self._copy(taken, range(len(taken.tensors)))
                    if taken.read_back:
                        taken.read_back(taken.slot.payload, True)
                    self._publish(taken)
        self.stats.blocked_s = time.perf_counter() - began_s
        return taken is not None

    def save_async(self, generation: Generation, state: Mapping[str, Any], metrics: Mapping[str, float]) -> bool:
        """Take a state, what an optimizer changes in a thread; see `FlashCheckpointer.save_async`."""
        began_s = time.perf_counter()
        self.fence()
        with cycles_held_off():
            taken = self._take(generation, state, metrics, finds_stepped=True)
        if taken:
            self._begin_copy(taken)
        self.stats.blocked_s = time.perf_counter() - began_s
        return taken is not None

    def _begin_copy(self, taken: _Taken) -> None:
        """Copy at once what no optimizer changes, and begin a thread for the rest."""
        later = [entry for entry, leaf in enumerate(taken.plan.sources) if leaf in taken.stepped]
        at_once = sorted({*range(len(taken.tensors))} - {*later})
        pending = _Pending(taken)
        try:
            self._pending = pending
            pending.checksums = self._checksums(taken)
            self._copy(taken, at_once)
            if taken.read_back:
                taken.read_back(taken.slot.payload, False)
            threading.Thread(target=self._finish_copy, args=(pending, later), name="checkpoint copy").start()
        except BaseException:
            if pending.begun.acquire(blocking=False):
                self._pending = None
                taken.slot.abandon()
            raise

    def _finish_copy(self, pending: _Pending, entries: Sequence[int]) -> None:
        """Copy the rest, in a thread, and publish the generation."""
        if not pending.begun.acquire(blocking=False):
            return
        try:
            with pending.taken.slot:
                self._copy(pending.taken, entries)
                self._check_unchanged(pending, entries)
                self._publish(pending.taken)
        except Exception as error:  # noqa: BLE001, a thread's end: `fence` raises it
            pending.errors.append(error)
        finally:
            pending.is_done.set()

    def fence(self) -> None:
        """Wait until the copy of `save_async` is done; see `FlashCheckpointer.fence`."""
        pending = self._pending
        if pending:
            began_s = time.perf_counter()
            pending.is_done.wait()
            # Not before: Ctrl-C may end the waiting, and who comes next has to wait again.
            self._pending = None
            self.stats.blocked_s += time.perf_counter() - began_s
            if pending.errors:
                raise pending.errors[0]

    def close(self) -> None:
        """Let go of the store's memory, which is about to be unmapped."""
        self.background.wait()
        self._views.clear()

    def _take(
        self,
        generation: Generation,
        state: Mapping[str, Any],
        metrics: Mapping[str, float],
        *,
        finds_stepped: bool = False,
    ) -> _Taken | None:
        """All of a save that comes before the copy; None: there is no slot for it."""
        captured = self._capture.take(state, metrics, finds_stepped=finds_stepped)
        plan, metadata, leaves = captured.plan, captured.metadata, captured.leaves
        self._store.abandon()
        try:
            slot = self._store.begin(plan.layout.payload_bytes, len(metadata))
        except (SharedMemoryFull, OSError) as error:
            self.stats.num_failed += 1
            _log.error("step %d is not saved, training goes on: %s", generation.step, error)
            return None
        self.stats.waited_s = slot.waited_s
        self.stats.allocated_s = slot.allocated_s
        self.stats.copied_s = 0.0
        try:
            tensors = plan.tensors_to_copy(leaves.tensors)
            self._copier.begin(tensors)
        except BaseException:
            slot.abandon()
            raise
        read_back = captured.read_back
        return _Taken(generation, slot, plan, metadata, tensors, captured.addresses, leaves.stepped, read_back)

    def _copy(self, taken: _Taken, entries: Sequence[int]) -> None:
        plan, began_s = taken.plan, time.perf_counter()
        views = self._views.of(taken.slot.segment, taken.slot.payload, plan)  # pins memory that is new
        self.stats.allocated_s += time.perf_counter() - began_s
        began_s = time.perf_counter()
        chosen = np.array(entries, np.int64)
        are_plain = plan.are_plain[chosen]
        others = chosen[~are_plain].tolist()
        self._copier.copy(
            [views.destination(entry) for entry in others],
            [taken.tensors[entry] for entry in others],
            plan.moves(taken.addresses, views.begin, chosen[are_plain]),
        )
        self.stats.copied_s += time.perf_counter() - began_s

    def _publish(self, taken: _Taken) -> None:
        reach("save.copied")
        taken.slot.publish(taken.generation, taken.metadata, taken.plan.layout.digest)
        self.stats.num_saves += 1
        self.stats.num_bytes = taken.plan.layout.payload_bytes
        self.stats.saved = taken.generation

    def _checksums(self, taken: _Taken) -> list[int]:
        if not self._check_async:
            return []
        with torch.no_grad():
            plain = (tensor.detach().cpu().resolve_conj().resolve_neg() for tensor in taken.tensors)
            rows = (tensor.clone(memory_format=torch.contiguous_format).reshape(-1) for tensor in plain)
            return [checksum(row.view(torch.uint8).numpy().tobytes()) for row in rows]

    def _check_unchanged(self, pending: _Pending, entries: Sequence[int]) -> None:
        if not pending.checksums:
            return
        now = self._checksums(pending.taken)
        names = [
            pending.taken.plan.layout.entries[entry].name for entry in entries if now[entry] != pending.checksums[entry]
        ]
        if names:
            raise CheckpointError(
                f"{count_words(len(names), 'tensor')} changed while save_async copied them: {', '.join(names[:5])}. "
                "The save was given up. Call fence() before anything changes the state: guard(optimizer) does so for "
                "each step"
            )
