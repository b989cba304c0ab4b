"""`FlashCheckpointer`: a training program's one object for saving and restoring.

A save takes the state apart, copies its tensors into a slot of the rank's store and publishes it; that is all that the
program waits for. The saver, another process, brings it to disk. Ranks talk when they start, when they restore, and
about once a second when they ask whether to save; never while they save. What each module does: `tensors.py` takes
apart, `slots.py` and `device.py` copy, `source.py` and `restore.py` bring back, `handover.py` lets another job go on.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch

from checkpoint import errors
from checkpoint.agreement import Choice, Held, Offer, agree
from checkpoint.checksum import checksum
from checkpoint.config import (
    directory_of_job,
    host_of_this_process,
    job_and_component,
    job_has_savers,
    takes_over,
)
from checkpoint.directory import CheckpointDirectory
from checkpoint.errors import CheckpointError, Damaged, NoCheckpoint, OptionsError
from checkpoint.faults import reach
from checkpoint.flash import rng
from checkpoint.flash.device import Copier
from checkpoint.flash.distributed import Communicator, communicator, gather
from checkpoint.flash.handover import Entry, Watch
from checkpoint.flash.options import Options
from checkpoint.flash.restore import Part, Restore, owned
from checkpoint.flash.slots import SlotViews
from checkpoint.flash.source import open_disk, open_memory
from checkpoint.flash.stop import StopRequest
from checkpoint.flash.tensors import Flattener, Leaves, Plan, Signature, make_plan
from checkpoint.generation import Generation
from checkpoint.ownership import Identity as JobIdentity
from checkpoint.policy.interval import Adaptive, Decision, Every, FailureHistory, Schedule
from checkpoint.policy.interval import agree as agree_interval
from checkpoint.policy.retention import Retention
from checkpoint.replica import rendezvous
from checkpoint.replica.trainer import TrainerReplicas, forget_replicas
from checkpoint.saver import spawn_saver
from checkpoint.segment import join_metadata, split_metadata
from checkpoint.store import Store, WritableSlot
from checkpoint.store_files import Identity, SaverStatus
from checkpoint.structure import Record, read_origin

_log = logging.getLogger(__name__)

# The key of the generators' states beside the program's own keys.
RNG = "_rng"
_POLL_S = 0.01
# A job's saver step starts with the job, and not always before its trainers.
_JOB_SAVER_TIMEOUT_S = 30.0
_WATCH_S = 0.5
_SAY_WAITING_S = 30.0
_ON_DISK = "on disk: "
_WHERE = {"memory": "in memory", "replica": "in the memory of another host", "disk": "on disk"}
# Rare dtypes and formats aside: JSON of a state's structure, before there is one.
_METADATA_BYTES_EACH = 256


@dataclass(frozen=True)
class Loaded:
    """A record as plain values.

    Attributes:
        step: of training.
        attempt: the start of the job that saved it.
        state: what `save` was given; objects are what their `state_dict` gave.
        sources: by rank, `memory`, `replica` or `disk`.
        notes: what was newer and could not be used, and why.
    """

    step: int
    attempt: int
    state: dict[str, Any]
    sources: Sequence[str]
    notes: Sequence[str]


@dataclass(frozen=True)
class Stats:
    """How it goes; a copy.

    Attributes:
        num_saves: generations that were taken in memory.
        num_failed: saves that were not, such as for want of memory.
        blocked_s: how long the last save held the program up, in seconds.
        copied_s: how much of it was the copy.
        waited_s: how much of it was waiting for a slot.
        num_bytes: size of the last generation.
        saved: newest generation in memory.
        persisted: newest generation on disk, committed.
        num_persisted: generations that the saver has written.
        num_skipped: generations that were replaced in memory before the saver came to them.
        persist_s: how long the saver took for the last one.
        saver_pid: of the saver that said all this; 0 before there was one.
        saver_alive: whether somebody brings generations to disk.
        saver_error: why the saver's last try failed; "" if it did not.
        replicated: newest generation that another host keeps.
        replica_error: why the last one did not get there; "" if it did.
        interval: what `should_save` goes by, in words.
    """

    num_saves: int = 0
    num_failed: int = 0
    blocked_s: float = 0.0
    copied_s: float = 0.0
    waited_s: float = 0.0
    num_bytes: int = 0
    saved: Generation | None = None
    persisted: Generation | None = None
    num_persisted: int = 0
    num_skipped: int = 0
    persist_s: float = 0.0
    saver_pid: int = 0
    saver_alive: bool = False
    saver_error: str = ""
    replicated: Generation | None = None
    replica_error: str = ""
    interval: str = ""


@dataclass
class _Counts:
    num_saves: int = 0
    num_failed: int = 0
    blocked_s: float = 0.0
    copied_s: float = 0.0
    waited_s: float = 0.0
    num_bytes: int = 0
    saved: Generation | None = None


@dataclass(frozen=True)
class _Taken:
    """A state that is about to be copied.

    Attributes:
        generation: what it will be.
        slot: where it goes.
        plan: how.
        metadata: of the generation.
        tensors: what is copied, one for each entry.
        stepped: of `Leaves`.
    """

    generation: Generation
    slot: WritableSlot
    plan: Plan
    metadata: bytes
    tensors: list[torch.Tensor]
    stepped: set[int]


@dataclass
class _Pending:
    """A copy in a thread.

    Attributes:
        taken: what is copied.
        checksums: of the tensors as they were, where they are compared.
        turn: taken by the thread that copies when it begins, or by who gives the save up before.
        is_done: set at the end of the thread. Thread.join would do, but Ctrl-C in it makes Python take the thread for
            ended (bpo-45274), and the slot would be unmapped below the copy.
        errors: what it ended with.
    """

    taken: _Taken
    checksums: list[int] = field(default_factory=list)
    turn: threading.Lock = field(default_factory=threading.Lock)
    is_done: threading.Event = field(default_factory=threading.Event)
    errors: list[Exception] = field(default_factory=list)


class _Answer(msgspec.Struct, frozen=True):
    """How a rank fared in something that all ranks do."""

    error: str = ""
    message: str = ""
    number: int = 0


class FlashCheckpointer:
    """Saves and restores the state of a training program; a context manager.

    Every rank makes one at the same point of the program, for the same directory.

    Args:
        directory: of the checkpoints on disk; one for each training. None: the one that the job's script names.
        shared: top-level keys of the state that are equal on every rank, such as "model" in data parallel training. On
            disk rank 0 writes them.
        interval: how often `should_save` says so: a number of steps, a rule, or None: as failures and costs suggest.
        keep: which checkpoints stay on disk; None: the newest two.
        ranks: how ranks talk; None: torch.distributed, where it is initialised.
        options: the rest.

    Raises:
        OptionsError: an option breaks its rule.
        DirectoryInUse: another job has the directory, and it is not the one that this job takes over.
        DirectoryNotWritable: it cannot be written to.
        ForeignOwner: it is another user's.
        StoreInUse: another living process is this rank of this job.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        shared: Collection[str] = (),
        interval: int | Every | Adaptive | None = None,
        keep: Retention | None = None,
        ranks: Communicator | None = None,
        options: Options = Options(),  # noqa: B008, it is frozen
    ) -> None:
        if isinstance(shared, str) or RNG in shared:
            raise OptionsError(f"shared={shared!r}: a collection of top-level keys, without {RNG!r}")
        self._options = options
        self._shared = tuple(shared)
        self._rule = Every(num_steps=interval) if isinstance(interval, int) else interval or Adaptive()
        self._ranks = ranks or communicator()
        path = directory_of_job() if directory is None else directory
        if path is None:
            raise OptionsError("no checkpoint directory: give one, or run in a job with #HETSTREAM --checkpoint=DIR")
        self._directory = CheckpointDirectory(path)
        self._fallback = (options.fallback or self._directory.path / ".memory").absolute()
        self._is_open = True
        self._flattener = Flattener(allow_pickle=options.allow_pickle)
        self._generators = rng.Generators()
        self._copier = Copier()
        self._views = SlotViews()
        self._signature: Signature | None = None
        self._plan: Plan | None = None
        self._pending: _Pending | None = None
        self._preparing: threading.Thread | None = None
        self._counts = _Counts()
        self._said_error = ""
        self._schedule: Schedule | None = None
        self._asked_step: int | None = None
        self._seen_persisted: Generation | None = None
        self._guards: list[Any] = []
        self._saver: subprocess.Popen[bytes] | None = None
        self._replicas: TrainerReplicas | None = None
        job, component = job_and_component()
        identity = JobIdentity.of_this_process(f"{job}+{component}" if component else job)
        self._entry = Entry(self._directory, identity, keep or Retention(), takes_over(), options.hand_over_timeout_s)
        self._watch = Watch(self._directory, self._ranks)
        self._last_step_s = 0.0
        with contextlib.ExitStack() as undo:
            # 0: a living job has the directory, until this one is initialised and takes it over.
            self._attempt = self._together(lambda: self._enter(is_ready=False))
            undo.callback(self._directory.release)
            self._store = self._open_store()
            undo.callback(self._store.close)
            if self._attempt:
                self._replicas = self._arrange_replicas()
            self._start_saver()
            undo.pop_all()
        # What an earlier start has left is mapped while the program makes its model.
        self._in_background(self._store.populate)
        self._stop = StopRequest(options.stop_signals, self._before_death)
        self._stop.install()
        atexit.register(self._at_exit)

    # Starting

    def _enter(self, *, is_ready: bool) -> int:
        if self._ranks.rank != 0:
            return 0
        attempt = self._entry.enter(is_ready=is_ready)
        if attempt and self._options.replica:
            try:
                rendezvous.make_key(self._directory.path, attempt)
            except BaseException:
                self._directory.release()
                raise
        return attempt

    def _take_over(self) -> None:
        """Wait for the job whose training this one takes over, now that the program is initialised."""
        if self._attempt:
            return
        while self._attempt == 0:
            self._attempt = self._together(lambda: self._enter(is_ready=True))
        self._replicas = self._arrange_replicas()

    def _note_taken_over(self, step: int) -> None:
        """Write down how long nobody trained."""
        if not self._entry.has_waited:
            return
        self._entry.has_waited = False
        event = self._directory.take_over(self._entry.identity)
        if event.pause_s is None:
            _log.warning("the job that was asked to hand over ended without: this one goes on from step %d", step)
            return
        _log.info("took over after step %d: nobody trained for %.2f s", step, event.pause_s)
        if event.step != step:
            _log.warning("step %s was handed over, and step %d is what could be restored", event.step, step)

    def _open_store(self) -> Store:
        job, component = job_and_component()
        options = self._options
        identity = Identity(job, component, self._ranks.rank, self._directory.path)
        stores: list[Store] = []

        def open_it() -> int:
            if options.fallback is None:
                self._fallback.mkdir(mode=0o700, exist_ok=True)
            stores.append(Store.open(identity, options.num_slots, options.shared_memory.absolute(), self._fallback))
            return 0

        try:
            self._together(open_it)
        except BaseException:
            for store in stores:
                store.close()
            raise
        return stores[0]

    def _arrange_replicas(self) -> TrainerReplicas | None:
        """Tell the saver who its peer is. All ranks know the hosts of all."""
        hosts = gather(self._ranks, host_of_this_process() if self._options.replica else "")
        if not any(hosts):
            forget_replicas(self._store.path)
            return None
        if not all(hosts):
            without = [rank for rank, host in enumerate(hosts) if not host]
            raise OptionsError(f"replica=True on some ranks, and not on rank(s) {without}: on every rank or on none")
        made: list[TrainerReplicas] = []

        def make() -> int:
            made.append(TrainerReplicas(self._store, self._directory.path, hosts, self._ranks.rank, self._attempt))
            return 0

        self._together(make)
        return made[0]

    def _start_saver(self) -> None:
        if not job_has_savers():
            self._spawn_saver()
            return

        def watch() -> None:
            # It may come late, and it may die: then nobody would bring anything to disk, and nobody would say so.
            seen_s = time.monotonic()
            while self._is_open:
                if self._store.is_saver_alive():
                    seen_s = time.monotonic()
                elif time.monotonic() > seen_s + _JOB_SAVER_TIMEOUT_S:
                    _log.warning(
                        "the job's checkpoint saver is not there since %g s: the trainer starts its own",
                        _JOB_SAVER_TIMEOUT_S,
                    )
                    self._spawn_saver()
                    return
                time.sleep(_WATCH_S)

        threading.Thread(target=watch, name="checkpoint saver watch", daemon=True).start()

    def _spawn_saver(self) -> None:
        try:
            self._saver = spawn_saver(self._store.path, self._directory.path)
        except CheckpointError as error:
            _log.error("checkpoints stay in memory: %s", error)

    def _together(self, act: Callable[[], int]) -> int:
        """Do something on every rank; rank 0's result, or the error of the first rank that failed, on all of them."""
        mine: Exception | None = None
        answer = _Answer()
        try:
            answer = _Answer(number=act())
        except Exception as error:  # noqa: BLE001, others wait for this rank: they hear of it, and it is raised below
            mine = error
            answer = _Answer(type(error).__name__, str(error))
        answers = gather(self._ranks, answer)
        if mine:
            raise mine
        for rank, one in enumerate(answers):
            if one.error:
                kind = getattr(errors, one.error, CheckpointError)
                raise kind(f"rank {rank}: {one.message}")
        return answers[0].number

    # Saving

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> bool:
        """Take the state; the program may change it as soon as this returns.

        Args:
            step: steps of training that are done; what `restore` will give.
            state: top-level key to anything that has `state_dict` and `load_state_dict`, or to trees of tensors and
                plain values. The states of the random number generators are added.
            metrics: for `keep_best`.

        Returns:
            Whether it is in memory. False: there is no room, as the log says; training can go on.

        Raises:
            UnsupportedState: something in the state cannot be stored.
            OptionsError: the step is older than one that was saved since the start, or the checkpointer is closed.
        """
        began_s = time.perf_counter()
        self.fence()
        taken = self._take(step, state, metrics)
        if taken:
            with taken.slot:
                self._copy(taken, range(len(taken.tensors)))
                self._publish(taken)
        self._counts.blocked_s = time.perf_counter() - began_s
        return taken is not None

    def save_async(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> bool:
        """Take the state in a thread beside the program; `fence` must come before an optimizer makes a step.

        Plain values and the tensors that are no module's parameters and in no optimizer are taken at once: only what
        an optimizer changes is copied later. `guard` calls `fence` before each step. Arguments, results and errors are
        those of `save`.
        """
        began_s = time.perf_counter()
        self.fence()
        taken = self._take(step, state, metrics, finds_stepped=True)
        if taken:
            pending = self._pending = _Pending(taken)
            later = [entry for entry, leaf in enumerate(taken.plan.sources) if leaf in taken.stepped]
            at_once = sorted({*range(len(taken.tensors))} - {*later})

            def work() -> None:
                if not pending.turn.acquire(blocking=False):
                    return
                try:
                    with taken.slot:
                        self._copy(taken, later)
                        self._check_unchanged(pending, later)
                        self._publish(taken)
                except Exception as error:  # noqa: BLE001, a thread's end: `fence` raises it
                    pending.errors.append(error)
                finally:
                    pending.is_done.set()

            try:
                pending.checksums = self._checksums(taken)
                self._copy(taken, at_once)
                threading.Thread(target=work, name="checkpoint copy").start()
            except BaseException:
                if pending.turn.acquire(blocking=False):
                    self._pending = None
                    taken.slot.abandon()
                raise
        self._counts.blocked_s = time.perf_counter() - began_s
        return taken is not None

    def fence(self) -> None:
        """Wait until the copy of `save_async` is done; without one, nothing.

        Raises:
            CheckpointError: a tensor was changed meanwhile (with `check_async`).
        """
        pending = self._pending
        if pending:
            began_s = time.perf_counter()
            pending.is_done.wait()
            # Not before: Ctrl-C may end the waiting, and who comes next has to wait again.
            self._pending = None
            self._counts.blocked_s += time.perf_counter() - began_s
            if pending.errors:
                raise pending.errors[0]

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `fence` before each step of an optimizer, until the checkpointer is closed."""
        self._guards.append(optimizer.register_step_pre_hook(lambda *_: self.fence()))

    def _take(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
        *,
        finds_stepped: bool = False,
    ) -> _Taken | None:
        """All of a save that comes before the copy; None: there is no slot for it."""
        self._check_open()
        self._check_owner()
        self._last_step_s = time.time()
        if not isinstance(step, int) or step < 0:
            raise OptionsError(f"step={step!r}: a number of steps, 0 or more")
        self._tell_saver_errors()
        leaves = self._flatten(state, finds_stepped=finds_stepped)
        plan = self._plan_of(leaves)
        metadata = self._metadata(leaves, plan, metrics or {})
        try:
            slot = self._store.begin(plan.layout.payload_bytes, len(metadata))
        except (errors.SharedMemoryFull, OSError) as error:
            self._counts.num_failed += 1
            _log.error("step %d is not saved, training goes on: %s", step, error)
            return None
        self._counts.waited_s = slot.waited_s
        self._counts.copied_s = 0.0
        try:
            tensors = plan.tensors_to_copy(leaves.tensors)
            self._copier.begin(tensors)
        except BaseException:
            slot.abandon()
            raise
        return _Taken(Generation(self._attempt, step), slot, plan, metadata, tensors, leaves.stepped)

    def _copy(self, taken: _Taken, entries: Sequence[int]) -> None:
        destinations = self._views.destinations(taken.slot.segment, taken.slot.payload, taken.plan)
        tensors = taken.tensors
        if len(entries) < len(tensors):
            destinations = [destinations[entry] for entry in entries]
            tensors = [tensors[entry] for entry in entries]
        began_s = time.perf_counter()
        self._copier.copy(destinations, tensors)
        self._counts.copied_s += time.perf_counter() - began_s

    def _publish(self, taken: _Taken) -> None:
        reach("save.copied")
        taken.slot.publish(taken.generation, taken.metadata, taken.plan.layout.digest)
        self._counts.num_saves += 1
        self._counts.num_bytes = taken.plan.layout.payload_bytes
        self._counts.saved = taken.generation

    def _flatten(self, state: Mapping[str, Any], *, finds_stepped: bool = False) -> Leaves:
        if not isinstance(state, Mapping) or not all(isinstance(key, str) and key for key in state):
            raise OptionsError(f"a state is a dict with names as keys, such as {{'model': model}}, not {_short(state)}")
        if RNG in state:
            raise OptionsError(f"the key {RNG!r} of the state is taken: the generators' states are saved under it")
        unknown = [key for key in self._shared if key not in state]
        if unknown:
            raise OptionsError(f"shared={self._shared}: the state has no {', '.join(unknown)}, only {', '.join(state)}")
        return self._flattener.flatten({**state, RNG: self._generators.capture()}, finds_stepped=finds_stepped)

    def _plan_of(self, leaves: Leaves) -> Plan:
        signature = Signature.of(leaves)
        former = self._signature
        if self._plan is None or former is None or signature != former:
            self._plan = make_plan(leaves, self._shared)
        elif signature.addresses != former.addresses and not self._plan.fits(signature.addresses):
            plan = make_plan(leaves, self._shared)
            # An equal plan is the same one, so that the slots' views stay.
            self._plan = self._plan if plan.is_like(self._plan) else plan
        self._signature = signature
        return self._plan

    def _metadata(self, leaves: Leaves, plan: Plan, metrics: Mapping[str, float]) -> bytes:
        numbers = {str(name): float(value) for name, value in metrics.items()}
        structure = Record.write_with(
            plan.encoded_refs,
            tree=leaves.tree,
            shared=self._shared,
            rank=self._ranks.rank,
            world_size=self._ranks.world_size,
            metrics=numbers,
            format=self._options.format,
        )
        return join_metadata(plan.layout.to_json(), structure)

    def _checksums(self, taken: _Taken) -> list[int]:
        if not self._options.check_async:
            return []
        with torch.no_grad():
            plain = (one.detach().cpu().resolve_conj().resolve_neg() for one in taken.tensors)
            rows = (one.clone(memory_format=torch.contiguous_format).reshape(-1) for one in plain)
            return [checksum(one.view(torch.uint8).numpy().tobytes()) for one in rows]

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

    # Preparing

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the memory for a state in the background, so that the first save is as fast as the others.

        `restore` does so by itself.
        """
        self._check_open()
        leaves = self._flatten(state)
        plan = self._plan_of(leaves)
        payload_bytes = plan.layout.payload_bytes + sum(map(_bytes_to_come, state.values()))
        metadata_bytes = len(self._metadata(leaves, plan, {})) + _METADATA_BYTES_EACH * len(leaves.tensors)
        self._in_background(lambda: self._store.prepare(payload_bytes, metadata_bytes))

    def _in_background(self, act: Callable[[], None]) -> None:
        """Do something with the memory beside the program, after what was begun before."""
        former = self._preparing

        def work() -> None:
            if former:
                former.join()
            try:
                act()
            except (CheckpointError, OSError) as error:
                _log.warning("there is no memory for checkpoints yet: %s", error)

        self._preparing = threading.Thread(target=work, name="checkpoint memory", daemon=True)
        self._preparing.start()

    # Restoring

    def restore(self, state: MutableMapping[str, Any], *, strict: bool = True) -> int | None:
        """Bring the newest generation that all ranks have into the state, in place, and set the generators.

        Every rank calls it. Tensors keep their identity, objects get `load_state_dict`. Memory is allocated for saves.
        A job that takes over from another asks it here to hand over, and waits: make everything else first.

        Args:
            state: as it is given to `save`.
            strict: every key and tensor must be on both sides; else what fits is restored, and the log says what not.

        Returns:
            Its step; None: there is nothing to restore.

        Raises:
            StateMismatch: the layout of the state has changed; every difference is named. Nothing is restored.
            NoCheckpoint: there are checkpoints on disk, and none of them can be used.
            DirectoryInUse: the job that this one takes over has not stopped in time, or another one takes it over.
        """
        self._check_open()
        self.fence()
        self._flatten(state)  # says what is wrong with it before anything happens
        self._take_over()
        done: list[tuple[Generation, Choice]] = []

        def attempt(parts: list[Part], choice: Choice) -> Iterator[None]:
            assert choice.generation is not None
            saved: dict[str, Any] = {}
            for part in parts:
                saved.update(part.saved(allow_pickle=self._options.allow_pickle))
            generators = saved.pop(RNG, None)
            task = Restore()
            task.compare(state, saved)
            mismatch = task.mismatch()
            if mismatch and strict:
                raise mismatch
            yield
            task.run()
            for difference in task.differences:
                _log.warning("not restored: %s", difference)
            self._restore_generators(generators, choice)
            done.append((choice.generation, choice))

        self._with_newest(attempt)
        step = done[0][0].step if done else None
        if done:
            _log.info("restored %s from %s", done[0][0], ", ".join(sorted({*done[0][1].sources})))
        self.prepare(state)
        self._begin_schedule(step or 0)
        self._note_taken_over(step or 0)
        return step

    def load(self) -> Loaded | None:
        """The newest generation that all ranks have, as plain values; None if there is none. Every rank calls it.

        Raises:
            NoCheckpoint: there are checkpoints on disk, and none of them can be used.
        """
        self._check_open()
        self.fence()
        self._take_over()
        done: list[Loaded] = []

        def attempt(parts: list[Part], choice: Choice) -> Iterator[None]:
            assert choice.generation is not None
            state: dict[str, Any] = {}
            for part in parts:
                state.update(part.load(allow_pickle=self._options.allow_pickle))
            state.pop(RNG, None)
            yield
            step, sources = choice.generation.step, tuple(choice.sources)
            done.append(Loaded(step, choice.generation.attempt, state, sources, tuple(choice.notes)))

        self._with_newest(attempt)
        self._note_taken_over(done[0].step if done else 0)
        return done[0] if done else None

    def _with_newest(self, attempt: Callable[[list[Part], Choice], Iterator[None]]) -> None:
        """Let all ranks try the newest generation, then the next one, until it is whole on all of them.

        Args:
            attempt: looks at a record up to its `yield`, and uses it behind it, when all ranks have got there.
        """
        offer = self._offer()
        said: set[str] = set()
        is_on_disk = any(gather(self._ranks, bool(offer.disk) or any(map(_is_of_disk, offer.problems))))
        while True:
            choice = agree(gather(self._ranks, offer))
            for note in choice.notes:
                if note not in said:
                    _log.warning("%s", note)
                    said.add(note)
            if choice.generation is None:
                if is_on_disk:
                    path = self._directory.path
                    raise NoCheckpoint(
                        f"none of the checkpoints in {path} can be used, and training does not begin anew without "
                        f"being told: {'; '.join(choice.notes)}. See hetstream ckpt verify {path}; to begin anew, give "
                        "another directory"
                    )
                return
            problem = self._try(choice, attempt)
            if problem is None:
                return
            offer = offer.without(choice.generation, choice.sources[self._ranks.rank], problem) if problem else offer

    def _try(self, choice: Choice, attempt: Callable[[list[Part], Choice], Iterator[None]]) -> str | None:
        """None: it is done. Text: this rank's source is not usable, and why; empty if it is another rank's."""
        generation, rank = choice.generation, self._ranks.rank
        assert generation is not None
        with contextlib.ExitStack() as held:
            problem = ""
            going: Iterator[None] = iter(())

            def look() -> int:
                nonlocal problem, going
                try:
                    if choice.sources[rank] == "replica" and self._replicas:
                        self._replicas.fetch(generation, choice.holders[rank])
                    if choice.sources[rank] == "disk":
                        parts = held.enter_context(open_disk(self._directory, generation, rank))
                    else:
                        parts = held.enter_context(open_memory(self._store, generation))
                    going = attempt(parts, choice)
                    next(going)
                except (Damaged, NoCheckpoint, errors.MissingRanks, OSError) as error:
                    problem = f"{generation} {_WHERE[choice.sources[rank]]} is not usable: {error}"
                    return 1
                return 0

            self._together(look)
            if any(gather(self._ranks, bool(problem))):
                return problem
            self._together(lambda: sum(1 for _ in going))
        return None

    def _offer(self) -> Offer:
        memory, problems = [], []
        for content in self._store.held():
            generation = content.header.generation
            try:
                with self._store.read(content) as segment:
                    origin = read_origin(split_metadata(segment.metadata)[1])
            except Damaged as error:
                problems.append(str(error))
            else:
                if origin.rank == self._ranks.rank:
                    memory.append(Held(generation, origin.world_size))
        disk = []
        for checkpoint in self._directory.scan():
            if checkpoint.problem:
                problems.append(f"{_ON_DISK}{checkpoint.generation} is not usable: {checkpoint.problem}")
            else:
                disk.append(Held(checkpoint.generation, checkpoint.world_size))
        return Offer(memory, disk, problems, self._replicas.offered() if self._replicas else [])

    def _restore_generators(self, states: Any, choice: Choice) -> None:
        if states is None:
            return
        if self._ranks.rank >= choice.world_size:
            _log.warning(
                "rank %d has no saved generators, as %d rank(s) saved: its random numbers go on as they are",
                self._ranks.rank,
                choice.world_size,
            )
            return
        for note in rng.restore(owned(states)):
            _log.warning("%s", note)

    # When to save, when to stop

    def should_save(self, step: int) -> bool:
        """Whether to save now: the same answer on every rank. Every rank asks after each step.

        Args:
            step: steps of training that are done.

        Once another job is to go on, it says so after every step, and `stopping` is true on all ranks after the same.
        """
        self._check_open()
        self._check_owner()
        now_s = time.monotonic()
        if self._schedule is None:
            self._begin_schedule(step - 1)
        assert self._schedule is not None
        schedule = self._schedule
        if self._asked_step is not None:
            self._note_persisted(schedule)
            decision = schedule.propose(self._asked_step, self._counts.blocked_s, now_s)
            if not isinstance(self._rule, Every) or self._rule.num_steps is None:
                decision = self._agreed(decision)
            schedule.adopt(decision, self._asked_step, now_s)
            self._asked_step = None
        is_asked = self._watch.is_asked(step)
        due = schedule.is_due(step, now_s, alone=self._ranks.world_size == 1) or is_asked
        if due:
            self._asked_step = step
        return due

    @property
    def stopping(self) -> bool:
        """Whether a signal, the job's saver, or a job that goes on in place of this one has asked this process to end.
        A program that looks here ends in its own time, and by then its newest generation is on disk. Look after
        `should_save`: of a hand-over it is that which tells all ranks at the same step."""
        return self._stop.is_set or self.stop_reason != ""

    @property
    def stop_reason(self) -> str:
        """Who has asked this process to end, beside signals; "" if nobody has."""
        return self._watch.reason or (self._store.stop_reason() if self._is_open else "")

    def _begin_schedule(self, step: int) -> None:
        history = FailureHistory()
        if self._ranks.rank == 0:
            history = FailureHistory.of(self._directory.past_attempts())
        history = gather(self._ranks, history)[0] if self._ranks.world_size > 1 else history
        self._schedule = Schedule(self._rule, step, time.monotonic(), history)
        self._asked_step = None

    def _agreed(self, decision: Decision) -> Decision:
        return agree_interval(gather(self._ranks, decision))

    def _note_persisted(self, schedule: Schedule) -> None:
        status = self._store.status()
        if status and status.persisted and status.persisted != self._seen_persisted:
            self._seen_persisted = status.persisted
            schedule.note_persist(status.persist_s)

    # Looking and ending

    def stats(self) -> Stats:
        """How it goes."""
        status = self._store.status() if self._is_open else None
        counts = {name: getattr(self._counts, name) for name in self._counts.__dataclass_fields__}
        return Stats(
            **counts,
            persisted=status.persisted if status else None,
            num_persisted=status.num_persisted if status else 0,
            num_skipped=status.num_skipped if status else 0,
            persist_s=status.persist_s if status else 0.0,
            saver_pid=status.pid if status else 0,
            saver_alive=self._is_open and self._store.is_saver_alive(),
            saver_error=status.error if status else "",
            replicated=status.replicated if status else None,
            replica_error=status.replica_error if status else "",
            interval=self._schedule.decision.reason if self._schedule else "",
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the newest generation is on disk; whether it is.

        Args:
            timeout_s: for how long; None: until it is, or nobody is there who could bring it to disk.
        """
        self._check_open()
        self.fence()
        wanted = self._counts.saved
        if wanted is None:
            return True
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        while not _has(self._store.status(), wanted):
            is_late = deadline_s is not None and time.monotonic() > deadline_s
            if is_late or (self._saver and self._saver.poll() is not None and not self._store.is_saver_alive()):
                return _has(self._store.status(), wanted)
            time.sleep(_POLL_S)
        return True

    def close(self, *, keep_memory: bool = False) -> None:
        """Bring the newest generation to disk and leave nothing behind. A second time, and in a forked child, nothing.

        Args:
            keep_memory: leave the generations in memory for the next start, as after a crash.
        """
        if not self._is_open or os.getpid() != self._stop.pid:
            return
        try:
            self.fence()
        except Exception as error:  # noqa: BLE001, of the copy's thread: the store is closed all the same
            _log.error("the last save_async is given up: %s", error)
        self._entry.withdraw()
        is_owner = self._attempt > 0 and not self._watch.reason
        if self._watch.taker and not keep_memory:
            self._hand_over(self._watch.taker)
        self._is_open = False
        atexit.unregister(self._at_exit)
        self._stop.remove()
        for guard in self._guards:
            guard.remove()
        if self._preparing:
            self._preparing.join()
        self._views.clear()
        if not keep_memory and not self._has_saver():
            _log.error("the newest generation stays in memory, as there is no saver: %s", self._store.path)
            keep_memory = True
        self._store.close(keep=keep_memory)
        self._await_saver()
        if self._replicas and self._ranks.rank == 0:
            rendezvous.remove_key(self._directory.path, self._attempt)
        self._directory.release()
        if is_owner:
            with contextlib.suppress(OSError):
                self._fallback.rmdir()  # unless it is used, or the user's

    def _hand_over(self, taker: JobIdentity) -> None:
        """Rank 0: give the directory up as soon as the newest generation of all ranks is on disk; the rest can wait."""
        saved = self._counts.saved
        if saved is None:
            return
        deadline_s = time.monotonic() + (self._options.close_timeout_s or self._options.hand_over_timeout_s)
        # What is committed: this rank's saver hears of it later where another one comes last.
        while (newest := self._directory.newest()) is None or newest < saved:
            if time.monotonic() > deadline_s or not self._has_saver():
                _log.error("%s is not on disk, and %s goes on without it", saved, taker)
                break
            time.sleep(_POLL_S)
        reach("handover.saved")
        self._directory.hand_over(taker, saved.step, self._last_step_s)
        _log.info(
            "handed over to %s, %.2f s after the end of step %d", taker, time.time() - self._last_step_s, saved.step
        )

    def _has_saver(self) -> bool:
        """Whether a saver will bring what is in memory to disk, once it has started; true if there is nothing."""
        if not self._store.held():
            return True
        for _ in range(2):
            while self._saver and self._saver.poll() is None and not self._store.is_saver_alive():
                time.sleep(_POLL_S)
            if self._store.is_saver_alive():
                return True
            self._spawn_saver()
        return False

    def _await_saver(self) -> None:
        """Wait for the saver of our own: at the end of a job step, all that runs is killed."""
        if self._saver is None:
            return
        began_s = time.monotonic()
        timeout_s = self._options.close_timeout_s
        while True:
            try:
                self._saver.wait(_SAY_WAITING_S if timeout_s is None else min(_SAY_WAITING_S, timeout_s))
            except subprocess.TimeoutExpired:
                waited_s = time.monotonic() - began_s
                _log.warning("the newest checkpoint is on its way to disk since %.0f s", waited_s)
                if timeout_s is not None and waited_s >= timeout_s:
                    return
            else:
                return

    def _at_exit(self) -> None:
        # Python sets it for an exception that ends the program: then memory is kept, as after any crash.
        self.close(keep_memory=hasattr(sys, "last_value") and not isinstance(sys.last_value, KeyboardInterrupt))

    def _before_death(self) -> None:
        """SIGTERM ends the process: the saver is told that the memory may go once it is on disk."""
        if self._is_open:
            with contextlib.suppress(OSError):
                self._store.mark_closed()

    def _tell_saver_errors(self) -> None:
        status = self._store.status()
        error = status.error if status else ""
        if self._saver and self._saver.poll() is not None and not self._store.is_saver_alive():
            _log.error("the checkpoint saver has ended with code %d: another is started", self._saver.returncode)
            self._spawn_saver()
        if error and error != self._said_error:
            _log.error("checkpoints do not get to disk, training goes on with those in memory: %s", error)
        self._said_error = error

    def _check_owner(self) -> None:
        if not self._attempt:
            raise OptionsError("restore() or load() comes first in a job that takes over from another")

    def _check_open(self) -> None:
        if not self._is_open:
            raise OptionsError("the checkpointer is closed")
        if os.getpid() != self._stop.pid:
            raise OptionsError(f"a forked child shares no checkpointer; only process {self._stop.pid} can use it")

    def __enter__(self) -> FlashCheckpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_crash = kind is not None and issubclass(kind, Exception)
        self.close(keep_memory=is_crash)


def _is_of_disk(problem: str) -> bool:
    return problem.startswith(_ON_DISK)


def _has(status: SaverStatus | None, wanted: Generation) -> bool:
    return status is not None and status.persisted is not None and status.persisted >= wanted


# How many tensors of its parameter's size an optimizer keeps, once it has made a step.
_NUM_MOMENTS = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "RMSprop": 1, "Adadelta": 2}


def _bytes_to_come(value: Any) -> int:
    """What the state of an optimizer will take beyond what it takes now."""
    if not isinstance(value, torch.optim.Optimizer) or value.state:
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
