"""Saves: copy a captured state into a slot of the rank's store, at once or in a thread beside the program.

Called by the checkpointer. Nothing here talks to other ranks, and a save that fails leaves the newest generation as it
was.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.errors import CheckpointError, SharedMemoryFull
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.flash import collector
from hetstream.checkpoint.flash.background import Background
from hetstream.checkpoint.flash.save.capture import Capture
from hetstream.checkpoint.flash.save.device import Copier
from hetstream.checkpoint.flash.save.slots import SlotViews
from hetstream.checkpoint.flash.stats import CheckpointStats
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.writable_slot import WritableSlot
from hetstream.checkpoint.record.checksum import checksum
from hetstream.checkpoint.record.generation import Generation
from hetstream.checkpoint.tensors.copy_plan import Plan
from hetstream.checkpoint.tensors.leaves import Leaves

_log = logging.getLogger(__name__)


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
        with collector.held_off():
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
        with collector.held_off():
            leaves = self._capture.flatten(state) if leaves is None else leaves
            if not leaves.shapeless and not leaves.unasked:
                self.background.start_planned(self._store.prepare, self._capture.prepare(state, leaves))

    def begin(self, attempt: int, step: int) -> Generation:
        """The generation that is about to be saved.

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
        with collector.held_off():
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
        with collector.held_off():
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
                f"{len(names)} tensor(s) changed while save_async copied them: {', '.join(names[:5])}. The save was "
                "given up. Call fence() before anything changes the state: guard(optimizer) does so for each step"
            )
