"""`FlashCheckpointer`: a training program's one object for saving and restoring.

A save takes the state apart, copies its tensors into a slot of the rank's store and publishes it; that is all that the
program waits for. The checkpoint writer, another process, brings it to disk. Ranks talk when they start, when they
restore, and about once a second when they ask whether to save; never while they save.

This module has the order of things. The others do them:

* a save: `capture.py` takes a state apart, `copy_plan.py` plans the copy, `saving.py` makes it;
* the way to disk: `writer_link.py` has a checkpoint writer;
* a restore: `candidates.py` chooses a generation, `source.py` opens it, `destinations.py` says where it goes;
* what all ranks go by: `timing.py` when to save, `ownership.py` whose directory it is, `stop_agreement.py` when to end;
* `assembly.py` plugs in what lets another job go on (`handover/`), and copies on other hosts (`replica/`).
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import logging
import os
import sys
import time
from collections.abc import Collection, Mapping, MutableMapping
from typing import Any

import torch

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.config import directory_of_job, job_and_component, job_has_writers
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import UnsupportedState
from hetstream.checkpoint.flash import collector
from hetstream.checkpoint.flash.assembly import other_hosts_of, succession_of
from hetstream.checkpoint.flash.background import Background
from hetstream.checkpoint.flash.distributed import Communicator, communicator, from_rank_0, gather, together
from hetstream.checkpoint.flash.host import find_host
from hetstream.checkpoint.flash.options import CheckpointOptions, check_arguments, checked_step
from hetstream.checkpoint.flash.ownership import DirectoryOwnership
from hetstream.checkpoint.flash.restore.candidates import RestoreCandidates
from hetstream.checkpoint.flash.restore.destinations import LoadedCheckpoint, RestoreRequest, load_values, restore_state
from hetstream.checkpoint.flash.restore.source import MemorySource
from hetstream.checkpoint.flash.restore.trial import Sources
from hetstream.checkpoint.flash.save.capture import Capture
from hetstream.checkpoint.flash.save.saving import Saving
from hetstream.checkpoint.flash.slurm_task import warn_of_wrapper
from hetstream.checkpoint.flash.stats import CheckpointStats
from hetstream.checkpoint.flash.stop import StopRequest
from hetstream.checkpoint.flash.stop_agreement import StopAgreement
from hetstream.checkpoint.flash.timing import Timing
from hetstream.checkpoint.flash.writer_link import WriterLink
from hetstream.checkpoint.memory.adoption import newest_attempt
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import FALLBACK, StoreIdentity, make_fallback
from hetstream.checkpoint.policy.interval import Adaptive, Every
from hetstream.checkpoint.policy.retention import Retention
from hetstream.checkpoint.record.generation import Generation
from hetstream.checkpoint.record.lineage import Lineage
from hetstream.checkpoint.tensors.leaves import Leaves

_log = logging.getLogger(__name__)

# How often to see whether somebody has deleted the store, beside each save.
_LOOK_S = 1.0


class FlashCheckpointer:
    """Saves and restores the state of a training program; a context manager.

    Every rank makes one at the same point of the program, for the same directory.

    Args:
        directory: of the checkpoints on disk; one for each training. None: the one that the job's script names.
        shared: top-level keys of the state that are equal on every rank, such as "model" in data parallel training. In
            memory one rank of each host has them, on disk rank 0. A key that holds sharded tensors (DTensors, as FSDP2
            makes them) is every rank's own all the same.
        interval: how often `should_save` says so: a number of steps, a rule, or None: as failures and costs suggest.
        keep: which checkpoints stay on disk; None: the newest two.
        ranks: how ranks talk; None: torch.distributed or Horovod, where it is initialised.
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
        options: CheckpointOptions = CheckpointOptions(),  # noqa: B008, it is frozen
    ) -> None:
        check_arguments(shared, interval, keep, ranks, options)
        path = directory_of_job() if directory is None else directory
        if path is None:
            raise OptionsError("no checkpoint directory: give one, or run in a job with #HETSTREAM --checkpoint=DIR")
        self._options = options
        self._ranks = ranks or communicator()
        self._directory = CheckpointDirectory(path)
        self._fallback = (options.fallback or self._directory.path / FALLBACK).absolute()
        self._is_open = True
        self._background = Background()
        self._guards: list[Any] = []
        self._last_step_s = self._looked_s = 0.0
        self._last: Generation | None = None
        rule = Every(num_steps=interval) if isinstance(interval, int) else interval or Adaptive()
        self._timing = Timing(rule, self._directory, self._ranks)
        job, component = job_and_component()
        job_id = f"{job}+{component}" if component else job
        self._succession = succession_of(job_id, self._directory, keep or Retention(), options)
        self._others = other_hosts_of(self._directory, self._ranks.rank, options)
        self._ownership = DirectoryOwnership(self._directory, self._ranks, self._succession, self._others)
        identity = StoreIdentity(job, component, self._ranks.rank, self._directory.path)
        with contextlib.ExitStack() as undo:
            self._ownership.begin(newest_attempt(identity, (options.shared_memory.absolute(), self._fallback)))
            undo.callback(self._directory.release)
            lineage = self._ownership.lineage
            self._store = self._open_store(dataclasses.replace(identity, lineage=lineage))
            undo.callback(self._store.close)
            self._writer = WriterLink(self._store, self._directory.path)
            if self._others:
                self._store.when_renewed.append(self._others.on_renewed)
            self._ownership.settle(self._store)
            self._host = find_host(self._ranks, self._store, self._directory.path)
            self._writer.start(job_has_writer=job_has_writers())
            undo.pop_all()
        self._capture = Capture(
            tuple(shared),
            self._ranks.rank,
            self._ranks.world_size,
            options,
            holds_shared=self._host.holds_shared,
        )
        self._saving = Saving(self._store, self._capture, check_async=options.check_async)
        self._memory = MemorySource(self._store, self._host)
        self._background.start(self._look_ahead)
        self._stop = StopRequest(options.stop_signals, self._before_death)
        self._stop.install()
        self._stop_agreement = StopAgreement(self._ranks, self._asked_here, self._succession.asked)
        if self._ranks.rank == 0:
            warn_of_wrapper()
        atexit.register(self._at_exit)

    def _look_ahead(self) -> None:
        """Map and read what an earlier start of the job left in memory, while the program makes its model."""
        self._store.populate()
        self._memory.read_ahead()

    def _open_store(self, identity: StoreIdentity) -> Store:
        options = self._options

        def open_here() -> Store:
            if options.fallback is None:
                make_fallback(self._directory.path)
            return Store.open(identity, options.num_slots, options.shared_memory.absolute(), self._fallback)

        return together(self._ranks, open_here, undo=Store.close)

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
        return self._saving.save(self._begin_save(step), state, metrics or {})

    def save_async(self, step: int, state: Mapping[str, Any], *, metrics: Mapping[str, float] | None = None) -> bool:
        """Take the state in a thread beside the program; `fence` must come before an optimizer makes a step.

        Plain values and the tensors that are no module's parameters and in no optimizer are taken at once: only what
        an optimizer changes is copied later. `guard` calls `fence` before each step. Arguments, results and errors are
        those of `save`.
        """
        return self._saving.save_async(self._begin_save(step), state, metrics or {})

    def fence(self) -> None:
        """Wait until the copy of `save_async` is done; without one, nothing.

        Raises:
            CheckpointError: a tensor was changed meanwhile (with `check_async`).
        """
        self._saving.fence()

    def guard(self, optimizer: torch.optim.Optimizer) -> None:
        """Call `fence` before each step of an optimizer, until the checkpointer is closed.

        The replay of a CUDA graph calls no hooks: call `fence` before it.
        """
        self._guards.append(optimizer.register_step_pre_hook(lambda *_: self.fence()))

    def _begin_save(self, step: int) -> Generation:
        self._check_open()
        self._check_owner()
        self._last_step_s = time.time()
        number = checked_step(step)
        self._writer.tell_errors()
        generation = Generation(self._ownership.attempt, number)
        if self._last and generation[:2] < self._last[:2]:
            # Before it is noted: what is saved behind it would be taken for what came before it.
            raise OptionsError(f"{generation} is older than {self._last}, which was saved: steps of an attempt grow")
        if self._last and self._last[:2] == generation[:2]:
            generation = self._last._replace(repeat=self._last.repeat + 1)
        self._last = generation
        return generation

    # Preparing

    def prepare(self, state: Mapping[str, Any]) -> None:
        """Allocate the memory for a state in the background, so that the first save is as fast as the others.

        `restore` does so by itself. For lazy modules without shapes nothing is allocated.
        """
        self._check_open()
        with collector.held_off():
            leaves = self._capture.flatten(state)
            self._store.announce(*self._capture.expected_bytes(state, leaves))
            self._prepare(state, leaves)

    def _prepare(self, state: Mapping[str, Any], leaves: Leaves) -> None:
        if not leaves.shapeless:
            self._background.start_planned(self._store.prepare, self._capture.prepare(state, leaves))

    # Restoring

    def restore(self, state: MutableMapping[str, Any], *, step: int | None = None, strict: bool = True) -> int | None:
        """Bring the newest generation that all ranks have into the state, in place, and set the generators.

        Every rank calls it. Tensors keep their identity, objects get `load_state_dict`. Memory is allocated for saves.
        A job that takes over from another asks it here to hand over, and waits: make everything else first.

        Args:
            state: as it is given to `save`.
            step: the one to go back to, from memory or disk; None: the newest. Later saves come behind it, and what
                was saved after it is left behind: no later `restore` takes it unless its step is given.
            strict: every key and tensor must be on both sides; else what fits is restored, and the log says what not.

        Returns:
            Its step; None: there is nothing to restore.

        Raises:
            StateMismatch: the layout of the state has changed; every difference is named. Nothing is restored.
            NoCheckpoint: there are checkpoints on disk, and none of them can be used; or there is none of this step:
                the message lists those that there are.
            OptionsError: the ranks give different steps.
            DirectoryInUse: the job that this one takes over has not stopped in time, or another one takes it over.
            DirectoryReplaced: another directory has taken the place of the one that this training began in.
        """
        self._check_open()
        step = None if step is None else checked_step(step)
        self.fence()
        with collector.held_off():
            leaves = self._capture.flatten(state)  # says what is wrong with it before anything happens
        self._store.announce(*self._capture.expected_bytes(state, leaves))
        self._become_owner()
        candidates = self._candidates()
        with collector.held_off():
            request = RestoreRequest(step, strict, self._options.allow_pickle)
            restored = restore_state(candidates, state, leaves, request)
        if restored.generation and (step is not None or self._is_behind(restored.generation)):
            self._go_back(restored.generation)
        self._timing.begin(restored.step or 0)
        self._succession.note_restored(restored.step or 0)
        with collector.held_off():
            # Last, as it goes on in a thread, and each look at a file would wait for that.
            try:
                self._prepare(state, leaves if restored.keeps_leaves else self._capture.flatten(state))
            except UnsupportedState as error:  # the restore is done, here and on the other ranks; a save raises it
                _log.warning("what was restored cannot be saved: %s", error)
        return restored.step

    def load(self, *, step: int | None = None) -> LoadedCheckpoint | None:
        """The newest generation that all ranks have, as plain values; None if there is none. Every rank calls it.

        A job that takes over from another asks it here to hand over, and waits, as `restore` does: what is loaded is
        what training goes on from. A program that only looks uses `CheckpointReader`.

        Args:
            step: as for `restore`. Nothing is left behind by loading it.

        Raises:
            NoCheckpoint: there are checkpoints on disk, and none of them can be used; or there is none of this step.
            OptionsError: the ranks give different steps.
            DirectoryInUse: the job that this one takes over has not stopped in time, or another one takes it over.
            DirectoryReplaced: another directory has taken the place of the one that this training began in.
        """
        self._check_open()
        step = None if step is None else checked_step(step)
        self.fence()
        self._become_owner()
        loaded = load_values(self._candidates(), RestoreRequest(step, allow_pickle=self._options.allow_pickle))
        self._succession.note_restored(loaded.step if loaded else 0)
        return loaded

    def all_steps(self) -> list[int]:
        """The steps that `restore` can bring back, in memory or on disk, ascending; the same on every rank.

        Every rank calls it, and it changes nothing. A job that is to take over from another, and has not done so yet,
        is told what is on disk, as a `CheckpointReader` is; the other job trains on. Steps that were left behind are
        not among them: see `hetstream ckpt ls`.

        Raises:
            DirectoryReplaced: another directory has taken the place of the one that this training began in.
        """
        self._check_open()
        self.fence()
        if self._ownership.attempt:
            return self._candidates().all_steps()[0]
        lineage = from_rank_0(self._ranks, self._directory.lineage, Lineage)
        return RestoreCandidates(self._ranks, Sources(self._directory), lineage).all_steps()[0]

    def _become_owner(self) -> None:
        """Own the directory, and have a store that nobody has deleted. In a job that takes over from another, this
        asks that job to stop, and waits until it has."""
        self._store.renew_if_deleted()
        if not self._ownership.attempt:
            self._ownership.take_over(self._store)
        # Other ranks of the host look into this rank's store, which may be another one than at the start.
        self._memory.host = self._host = find_host(self._ranks, self._store, self._directory.path)

    def _candidates(self) -> RestoreCandidates:
        """What the owner of the directory can restore from."""
        self._ownership.check_directory()
        sources = Sources(self._directory, self._memory, self._others, self._host)
        return RestoreCandidates(self._ranks, sources, self._ownership.lineage)

    def _is_behind(self, generation: Generation) -> bool:
        """Whether any rank has saved what is newer, in this attempt: not all have it, and steps are made once more."""
        return any(gather(self._ranks, self._last is not None and generation < self._last))

    def _go_back(self, start: Generation) -> None:
        """Saves come behind a generation from now on; all that is newer is left behind."""
        self._background.wait()
        has_saved = any(gather(self._ranks, self._last is not None))
        self._ownership.go_back(start, self._store, has_saved=has_saved)
        self._last = self._saving.stats.saved = None

    # When to save, when to stop

    def should_save(self, step: int) -> bool:
        """Whether to save now: the same answer on every rank. Every rank asks after each step.

        Args:
            step: steps of training that are done.

        Once the program is to end, it says so after every step, and `stopping` is true on all ranks after the same.
        """
        self._check_open()
        self._check_owner()
        if time.monotonic() > self._looked_s + _LOOK_S:
            self._looked_s = time.monotonic()
            self._store.renew_if_deleted()
            self._writer.tell_errors(between_saves=True)
        is_due = self._timing.is_due(step, self._saving.stats, self._store.status)
        is_due = self._stop_agreement.is_asked(step) or is_due
        if is_due:
            self._timing.note_due(step)
        return is_due

    @property
    def stopping(self) -> bool:
        """Whether a signal, the job's checkpoint writer, or a job that goes on in place of this one has asked the
        program to end. A program that looks here ends in its own time, and by then its newest generation is on disk.

        Of several ranks it is true on all of them after the same step, whichever was asked: look after `should_save`,
        which is where they agree, about once a second. In a program that saves without asking `should_save`, each rank
        knows only what it was asked itself."""
        self._stop.promise()
        is_stopping = self.stop_reason != ""
        if is_stopping:
            self._stop.note_asked()
        return is_stopping

    @property
    def stop_reason(self) -> str:
        """Why `stopping` is true, in words; "" while it is not."""
        is_agreed = self._ranks.world_size > 1 and (self._stop_agreement.has_looked or self._last is None)
        return self._stop_agreement.reason or ("" if is_agreed else self._asked_here())

    def _asked_here(self) -> str:
        """Why this rank was asked to end; "" if it was not."""
        return self._stop.reason or (self._store.stop_reason() if self._is_open else "")

    # Looking and ending

    def stats(self) -> CheckpointStats:
        """How the saves of this rank go, and what the checkpoint writer says of them."""
        return self._saving.stats.with_writer_status(
            self._store.status() if self._is_open else None,
            writer_alive=self._is_open and self._store.is_writer_alive(),
            interval=self._timing.reason,
        )

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until the newest generation is on disk; whether it is.

        Args:
            timeout_s: for how long; None: until it is, or nobody is there who could bring it to disk.
        """
        self._check_open()
        self.fence()
        wanted = self._saving.stats.saved
        return wanted is None or self._writer.wait_for(wanted, timeout_s)

    def close(self, *, keep_memory: bool = False) -> None:
        """Bring the newest generation to disk and leave nothing behind. A second time, and in a forked child, nothing.

        Args:
            keep_memory: leave the generations in memory for the next start, as after a crash.
        """
        if not self._is_open or os.getpid() != self._stop.pid:
            return
        try:
            self._close(keep_memory=keep_memory)
        finally:
            # Last: a request to end that comes again ends nothing that is ending in order.
            self._stop.remove()

    def _close(self, *, keep_memory: bool) -> None:
        try:
            self.fence()
        except Exception as error:  # noqa: BLE001, of the copy's thread: the store is closed all the same
            _log.error("the last save_async is given up: %s", error)
        self._succession.withdraw()
        is_owner = self._ownership.attempt > 0 and not self._stop_agreement.hands_over
        saved, successor = self._saving.stats.saved, self._succession.successor
        if successor and saved and not keep_memory:
            timeout_s = self._options.close_timeout_s or self._options.hand_over_timeout_s
            self._succession.hand_over(saved, self._last_step_s, timeout_s, self._writer.has_writer)
        self._is_open = False
        self._writer.end()
        atexit.unregister(self._at_exit)
        for guard in self._guards:
            guard.remove()
        self._background.wait()
        self._saving.forget_slots()
        self._store.renew_if_deleted()
        if not keep_memory and not self._writer.has_writer():
            _log.error("the newest generation stays in memory, as there is no checkpoint writer: %s", self._store.path)
            keep_memory = True
        if saved and not successor and not keep_memory:
            self._writer.await_job_writer(saved, self._options.close_timeout_s)
        self._store.close(keep=keep_memory, keep_unsaved=True)
        self._writer.await_end(self._options.close_timeout_s)
        self._ownership.end()
        if is_owner:
            with contextlib.suppress(OSError):
                self._fallback.rmdir()  # unless it is used, or the user's

    def _at_exit(self) -> None:
        # Python sets it for an exception that ends the program: then memory is kept, as after any crash.
        self.close(keep_memory=hasattr(sys, "last_value") and not isinstance(sys.last_value, KeyboardInterrupt))

    def _before_death(self) -> None:
        """SIGTERM ends the process: the checkpoint writer is told that the memory may go once it is on disk."""
        if self._is_open:
            with contextlib.suppress(OSError):
                self._store.mark_closed()

    def _check_owner(self) -> None:
        if not self._ownership.attempt:
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
