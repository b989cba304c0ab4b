"""`FlashCheckpointer`: a training program's one object for saving and restoring.

A save takes the state apart and copies its tensors into a slot of the rank's store, in shared memory. The program waits
for no more than that: another process, the checkpoint writer, brings the copy to disk. What all ranks save at one step
is a *generation*.

Ranks talk when they start, when they restore, and about once a second when they ask whether to save. They never talk
while they save.

This module is what a program calls. The work is done by

* `storage.py`: the store in memory, the directory on disk, and the checkpoint writer between them;
* `saving.py`: takes a state apart, plans its copy (`tensors/copy_plan.py`) and makes it;
* `candidates.py`, `sources.py` and `destinations.py`: choose a generation, open it, copy it into the state;
* `policy.py` and `stopping.py`: when all ranks save, and when they end;
* `ownership.py`: plugs in the handover to another job, and copies on other hosts (`replica/`).

docs/architecture.md follows one save through these files.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import logging
import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, MutableMapping
from typing import Any

import torch

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.config import directory_of_job
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import NotOnDisk, UnsupportedState
from hetstream.checkpoint.flash.destinations import LoadedCheckpoint, RestoreRequest, load_values, restore_state
from hetstream.checkpoint.flash.options import (
    CheckpointOptions,
    CheckpointStats,
    check_arguments,
    checked_step,
    requested_step,
)
from hetstream.checkpoint.flash.ranks import Communicator, communicator, gather
from hetstream.checkpoint.flash.saving import Capture, Saving, cycles_held_off
from hetstream.checkpoint.flash.stopping import Stopping, warn_of_wrapper
from hetstream.checkpoint.flash.storage import CheckpointStorage
from hetstream.checkpoint.memory.store_files import WriterStatus
from hetstream.checkpoint.policy import (
    Adaptive,
    Every,
    FailureHistory,
    IntervalDecision,
    Retention,
    Schedule,
    agree_on_interval,
    rounded_duration,
)
from hetstream.checkpoint.record.layout import Generation

# When to save: the schedule of `policy.py` with the clock, the costs and the other ranks.
#
# Called by `FlashCheckpointer.should_save`. Ranks exchange their decisions once after each save, and never in a save.

_log = logging.getLogger(__name__)


class Timing:
    """The schedule of all ranks, on one of them.

    Args:
        rule: how often.
        directory: of the checkpoints; its history of attempts says how often they failed.
        ranks: the ranks that have to agree.
    """

    def __init__(self, rule: Every | Adaptive, directory: CheckpointDirectory, ranks: Communicator) -> None:
        self._rule = rule
        self._directory = directory
        self._ranks = ranks
        self._schedule: Schedule | None = None
        self._due_step: int | None = None
        self._seen_persisted: Generation | None = None

    @property
    def reason(self) -> str:
        """Why the ranks save as often as they do, in words; "" before training."""
        return self._schedule.decision.reason if self._schedule else ""

    def begin(self, step: int) -> None:
        """Count from here on. Every rank calls it.

        Args:
            step: steps of training that are done.
        """
        history = FailureHistory()
        if self._ranks.rank == 0:
            history = FailureHistory.of(self._directory.past_attempts())
        history = gather(self._ranks, history)[0] if self._ranks.world_size > 1 else history
        self._schedule = Schedule(self._rule, step, time.monotonic(), history)
        self._due_step = None

    def is_due(self, step: int, stats: CheckpointStats, read_status: Callable[[], WriterStatus | None]) -> bool:
        """Return whether to save after this step: the same answer on every rank. Every rank asks after each step.

        Args:
            step: steps of training that are done.
            stats: of the saves so far.
            read_status: what the checkpoint writer says.
        """
        now_s = time.monotonic()
        if self._schedule is None:
            self.begin(step - 1)
        assert self._schedule is not None
        schedule = self._schedule
        if self._due_step is not None:
            status = read_status()
            if status and status.persisted and status.persisted != self._seen_persisted:
                self._seen_persisted = status.persisted
                schedule.note_persist(status.persist_s)
            decision = schedule.propose(self._due_step, stats.blocked_s, now_s, stats.allocated_s)
            if not isinstance(self._rule, Every) or self._rule.num_steps is None:
                decision = agree_on_interval(gather(self._ranks, decision))
            if schedule.decision.bound_by == "first" and self._ranks.rank == 0:
                self._say_chosen(decision)
            schedule.adopt(decision, self._due_step, now_s)
            self._due_step = None
        return schedule.is_due(step, now_s, alone=self._ranks.world_size == 1)

    def _say_chosen(self, decision: IntervalDecision) -> None:
        """Say once how often there will be saves: the program did not, or only in seconds. Why is in `stats()`."""
        often = "step" if decision.num_steps == 1 else f"{decision.num_steps} steps"
        lasts = "" if decision.interval_s is None else f" ({rounded_duration(decision.interval_s)})"
        _log.warning("hetstream: a checkpoint every %s%s; FlashCheckpointer(interval=) changes that", often, lasts)

    def note_due(self, step: int) -> None:
        """The program is told to save after this step: the next `is_due` takes account of what that cost."""
        self._due_step = step


# Restores: bring a generation that all ranks have into the program's state; later saves follow that generation.
#
# Called by the checkpointer of every rank. `candidates.py` finds the generation, `destinations.py` copies it.


class Restoring:
    """The restores of one rank.

    Args:
        ranks: that have to agree.
        storage: what they restore from.
        saving: goes on behind what was restored.
        timing: counts from there.
        allow_pickle: unpickle what was pickled.
    """

    def __init__(
        self, ranks: Communicator, storage: CheckpointStorage, saving: Saving, timing: Timing, *, allow_pickle: bool
    ) -> None:
        self._ranks = ranks
        self._storage = storage
        self._saving = saving
        self._timing = timing
        self._allow_pickle = allow_pickle

    def restore(self, state: MutableMapping[str, Any], step: int | None, *, strict: bool) -> int | None:
        """Bring a generation into a state, in place; see `FlashCheckpointer.restore`."""
        leaves = self._saving.announce(state)  # says what is wrong with it before anything happens
        self._storage.become_owner()
        candidates = self._storage.candidates()
        with cycles_held_off():
            whole = functools.partial(self._saving.flatten, state) if leaves.unasked else lambda: leaves
            restored = restore_state(candidates, state, whole, RestoreRequest(step, strict, self._allow_pickle))
        if restored.generation and (step is not None or self._is_behind(restored.generation)):
            self._go_back(restored.generation)
        self._timing.begin(restored.step or 0)
        self._storage.handover.note_restored(restored.step or 0)
        try:
            # Last, as it goes on in a thread, and each look at a file would wait for that.
            is_known = restored.keeps_leaves and not (leaves.unasked and restored.generation)
            self._saving.prepare(state, leaves if is_known else None)
        except UnsupportedState as error:  # the restore is done, here and on the other ranks; a save raises it
            _log.warning("what was restored cannot be saved: %s", error)
        return restored.step

    def load(self, step: int | None) -> LoadedCheckpoint | None:
        """Return a generation as plain values; see `FlashCheckpointer.load`."""
        self._storage.become_owner()
        loaded = load_values(self._storage.candidates(), RestoreRequest(step, allow_pickle=self._allow_pickle))
        self._storage.handover.note_restored(loaded.step if loaded else 0)
        return loaded

    def all_steps(self) -> list[int]:
        """Return the steps that can be restored; see `FlashCheckpointer.all_steps`."""
        storage = self._storage
        candidates = storage.candidates() if storage.attempt else storage.candidates_on_disk()
        return candidates.all_steps()[0]

    def _is_behind(self, generation: Generation) -> bool:
        """Whether any rank has saved a newer one in this attempt: not all have it, and its steps are made again."""
        newest = self._saving.newest
        return any(gather(self._ranks, newest is not None and generation < newest))

    def _go_back(self, start: Generation) -> None:
        """Have later saves follow a generation; all that is newer is left behind."""
        self._saving.background.wait()
        has_saved = any(gather(self._ranks, self._saving.newest is not None))
        self._storage.go_back(start, has_saved=has_saved)
        self._saving.begin_anew()


# The exit code of a program whose exit handlers fail: Python says 0 whatever they raise.
#
# Called by the checkpointer, whose own handler brings the last state to disk.

_has_failed = False


def fail_at_exit() -> None:
    """Have the program end with 1."""
    global _has_failed
    _has_failed = True


def _end() -> None:
    # Handlers run in the opposite order: what programs have registered since this module was imported is behind us.
    if _has_failed:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)


atexit.register(_end)


class FlashCheckpointer:
    """Saves and restores the state of a training program; a context manager.

    Every rank makes one at the same point of the program, for the same directory.

    Args:
        directory: of the checkpoints on disk; one for each training. None: the one that the job's script names.
        shared: top-level keys of the state that are equal on every rank, such as "model" in data parallel training.
            One rank of each host keeps them in memory, and rank 0 on disk. A key with sharded tensors (DTensors, as
            FSDP2 makes them) may be named, too: every rank still keeps its own shards.
        interval: how often `should_save` is true: a number of steps, or a rule. None: as often as failures and
            the cost of saves suggest.
        keep: which checkpoints stay on disk; None: the newest two.
        ranks: how ranks talk; None: by torch.distributed or Horovod, if one is initialised.
        options: those that few programs need.

    Raises:
        OptionsError: an option breaks its rule.
        DirectoryInUse: another job has the directory, and it is not the one that this job takes over from.
        DirectoryNotWritable: the directory cannot be written to.
        ForeignOwner: the directory is another user's.
        StoreInUse: another living process has the store of this rank of this job.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        shared: Collection[str] = (),
        interval: int | Every | Adaptive | None = None,
        keep: Retention | None = None,
        ranks: Communicator | None = None,
        options: CheckpointOptions = CheckpointOptions(),  # noqa: B008, it is frozen
    ) -> None:
        check_arguments(shared, interval, keep, ranks, options)
        path = directory_of_job() if directory is None else directory
        if path is None:
            raise OptionsError(
                "no checkpoint directory: give one, or run in a job with #HETSTREAM --checkpoint=DIR (a job that is "
                "submitted from such a job's script names its own)"
            )
        rule = Every(num_steps=interval) if isinstance(interval, int) else interval or Adaptive()
        self._pid = os.getpid()
        self._options = options
        self._optimizer_hooks: list[torch.utils.hooks.RemovableHandle] = []
        ranks = ranks or communicator()
        storage = self._storage = CheckpointStorage(path, keep or Retention(), ranks, options)
        capture = Capture(tuple(shared), ranks.rank, ranks.world_size, options, holds_shared=storage.host.holds_shared)
        self._saving = Saving(storage.store, capture, check_async=options.check_async)
        self._timing = Timing(rule, storage.directory, ranks)
        self._restoring = Restoring(ranks, storage, self._saving, self._timing, allow_pickle=options.allow_pickle)
        self._stopping = Stopping(ranks, storage, options.stop_signals)
        self._saving.background.start(storage.populate)
        if ranks.rank == 0:
            warn_of_wrapper()
        atexit.register(self._at_exit)

    # Saving

    def save(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> bool:
        """Copy the state into memory; the program may change it as soon as this returns.

        Args:
            step: steps of training that are done; `restore` will return it.
            state: maps top-level keys to objects with `state_dict` and `load_state_dict`, or to trees of tensors and
                plain values. The states of the random number generators are added.
            metrics: by name, for `Retention.keep_best`.

        Returns:
            Whether the state is in memory. False: there was no room; the log says why, and training can go on.

        Raises:
            UnsupportedState: something in the state cannot be stored.
            OptionsError: the step is older than one that was saved since the start, or the checkpointer is closed.
        """
        return self._saving.save(self._begin_save(step), state, metrics or {})

    def save_async(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> bool:
        """Copy the state in a thread beside the program; `fence` must be called before an optimizer's next step.

        Only what an optimizer changes is copied later: parameters and the optimizer's own tensors. All else is copied
        at once. `guard` has `fence` called before each step. Arguments, results and errors are those of `save`.
        """
        return self._saving.save_async(self._begin_save(step), state, metrics or {})

    def fence(self) -> None:
        """Wait until the copy of `save_async` is done, if one is being made.

        Raises:
            CheckpointError: a tensor was changed meanwhile (only with `check_async`).
        """
        self._saving.fence()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Have `fence` called before each step of an optimizer, until the checkpointer is closed.

        The replay of a CUDA graph calls no hooks: the program has to call `fence` before it.
        """
        self._optimizer_hooks.append(optimizer.register_step_pre_hook(lambda *_: self.fence()))

    def _begin_save(self, step: int) -> Generation:
        self._check_open()
        self._storage.check_owner()
        number = checked_step(step)
        self._storage.writer.check()
        return self._saving.begin(self._storage.attempt, number)

    # Preparing

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the memory for a state in the background, so that the first save is as fast as the others.

        `restore` does so by itself. Nothing is allocated while a lazy module has no shapes.
        """
        self._check_open()
        self._saving.prepare(state, self._saving.announce(state))

    # Restoring

    def restore(self, state: MutableMapping[str, Any], *, step: int | None = None, strict: bool = True) -> int | None:
        """Bring the newest generation that all ranks have into the state, in place.

        Every rank calls it. Tensors are overwritten, objects get `load_state_dict`, and the random number generators
        are set. Memory for later saves is allocated in the background.

        A job that takes over from another asks that job here to stop, and waits until it has. So make the model and
        all else before.

        Args:
            state: as it is given to `save`.
            step: the step to go back to, from memory or disk; None: the newest. Training goes on from there: what was
                saved after it is left behind, and only a `restore` with its step finds it.
            strict: every key and tensor must be on both sides. False: what fits is restored, and the log names what
                does not.

        Returns:
            The step of the generation; None: there is nothing to restore.

        Raises:
            StateMismatch: the layout of the state has changed; every difference is named. Nothing is restored.
            NoCheckpoint: no checkpoint on disk can be used, although there are some; or there is none of this step, and
                the message lists those that there are.
            OptionsError: the ranks give different steps.
            DirectoryInUse: the job that this one takes over has not stopped in time, or another one takes it over.
            DirectoryReplaced: another directory has taken the place of the one that this training began in.
        """
        self._check_open()
        wanted = requested_step(step)
        self.fence()
        return self._restoring.restore(state, wanted, strict=strict)

    def load(self, *, step: int | None = None) -> LoadedCheckpoint | None:
        """Return the newest generation that all ranks have, as plain values; None if there is none. Every rank calls
        it.

        Training goes on from what is loaded. So a job that takes over from another waits here for that job to stop, as
        in `restore`. A program that does not train uses `CheckpointReader`.

        Args:
            step: as for `restore`, but what was saved after it is not left behind.

        Raises:
            NoCheckpoint: there are checkpoints on disk, and none of them can be used; or there is none of this step.
            OptionsError: the ranks give different steps.
            DirectoryInUse: the job that this one takes over has not stopped in time, or another one takes it over.
            DirectoryReplaced: another directory has taken the place of the one that this training began in.
        """
        self._check_open()
        wanted = requested_step(step)
        self.fence()
        return self._restoring.load(wanted)

    def all_steps(self) -> list[int]:
        """Return the steps that `restore` can bring back, in memory or on disk, ascending; the same on every rank.

        Every rank calls it, and it changes nothing. Before a job has taken over from another, it sees only the steps on
        disk, and the other job trains on. Steps that a `restore` left behind are not listed: `hetstream ckpt ls` shows
        them.

        Raises:
            DirectoryReplaced: another directory has taken the place of the one that this training began in.
        """
        self._check_open()
        self.fence()
        return self._restoring.all_steps()

    # When to save, when to stop

    def should_save(self, step: int) -> bool:
        """Return whether to save now: the same answer on every rank. Every rank asks after each step.

        Once the program is asked to end, the answer is yes after every step. `stopping` becomes true on all ranks after
        the same step.

        Args:
            step: steps of training that are done.
        """
        self._check_open()
        self._storage.check_owner()
        self._storage.check_health()
        is_due = self._timing.is_due(step, self._saving.stats, self._storage.store.status)
        is_due = self._stopping.is_asked(step) or is_due
        if is_due:
            self._timing.note_due(step)
        return is_due

    @property
    def stopping(self) -> bool:
        """Whether the program is asked to end, by a signal, the job's checkpoint writer, or the job that takes over.

        A program that looks here ends in its own time: SIGTERM no longer ends it, and `close` brings its newest
        generation to disk.

        Ask `should_save` first: there the ranks agree, about once a second, and then all of them end after the same
        step, whichever was asked. Without `should_save`, each rank knows only what it was asked itself.
        """
        return self._stopping.must_end(has_saved=self._saving.newest is not None)

    @property
    def stop_reason(self) -> str:
        """Why `stopping` is true, in words; "" while it is not."""
        return self._stopping.reason(has_saved=self._saving.newest is not None)

    # Looking and ending

    def stats(self) -> CheckpointStats:
        """Return counts, sizes and times of this rank's saves, and of what the checkpoint writer made of them."""
        storage = self._storage
        return self._saving.stats.with_writer_status(
            storage.store.status() if storage.is_open else None,
            writer_alive=storage.is_open and storage.store.is_writer_alive(),
            interval=self._timing.reason,
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the newest generation is on disk.

        Args:
            timeout_s: for how long; None: until it is there, or no checkpoint writer is left that could write it.

        Returns:
            Whether it is on disk.
        """
        self._check_open()
        self.fence()
        wanted = self._saving.stats.saved
        return wanted is None or self._storage.writer.wait_for(wanted, timeout_s)

    def close(self, *, keep_memory: bool = False) -> None:
        """Bring the newest generation to disk, and free the memory. Safe to call twice; a forked child does nothing.

        A program that does not call it does so at its exit, whose code then is 1 where the newest generation could not
        be written.

        Args:
            keep_memory: leave the generations in memory for the next start, as after a crash.

        Raises:
            NotOnDisk: the newest generation could not be written, on a full disk, say. All else is closed.
        """
        if not self._storage.is_open or os.getpid() != self._pid:
            return
        try:
            self._close(keep_memory=keep_memory)
        finally:
            # Last: until then, a SIGTERM that comes again does not cut short a program that ends in order.
            self._stopping.remove()

    def _close(self, *, keep_memory: bool) -> None:
        try:
            self.fence()
        except Exception as error:  # noqa: BLE001, of the copy's thread: the store is closed all the same
            _log.error("the last save_async is given up: %s", error)
        storage, saved = self._storage, self._saving.stats.saved
        storage.handover.withdraw()
        hands_over, successor = self._stopping.hands_over, storage.handover.successor
        if successor and saved and not keep_memory:
            timeout_s = self._options.close_timeout_s or self._options.hand_over_timeout_s
            storage.handover.hand_over(saved, self._saving.last_step_s, timeout_s, storage.writer.has_writer)
        storage.begin_closing()
        atexit.unregister(self._at_exit)
        for hook in self._optimizer_hooks:
            hook.remove()
        self._saving.close()
        storage.close(None if successor else saved, keep_memory=keep_memory, hands_over=hands_over)

    def _at_exit(self) -> None:
        # Python sets sys.last_value when an exception ends the program: then memory is kept, as after any crash.
        try:
            self.close(keep_memory=hasattr(sys, "last_value") and not isinstance(sys.last_value, KeyboardInterrupt))
        except NotOnDisk as error:
            _log.error("%s", error)
            fail_at_exit()

    def _check_open(self) -> None:
        if not self._storage.is_open:
            raise OptionsError("the checkpointer is closed")
        if os.getpid() != self._pid:
            raise OptionsError(f"a forked child shares no checkpointer; only process {self._pid} can use it")

    def __enter__(self) -> FlashCheckpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        is_crash = kind is not None and issubclass(kind, Exception)
        self.close(keep_memory=is_crash)
