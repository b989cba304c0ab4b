"""A rank's generations in shared memory, as its trainer sees them. The checkpoint writer's side is `view.py`.

A save takes a slot, copies into it and publishes it: `Store.begin`, `WritableSlot.payload`, `WritableSlot.publish`.
Overwritten is the oldest slot, never the newest complete one, and never one that somebody reads. With three slots there
is always one, so a save waits for nothing; with two it waits while the checkpoint writer writes the other to disk, and
says how long. `prepare` allocates the memory in its own thread. A store outlives its trainer: `store_recovery.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hetstream.base.errors import HetstreamError, OptionsError
from hetstream.checkpoint.errors import DamagedSegment, SharedMemoryFull, reach
from hetstream.checkpoint.locks import FileLock
from hetstream.checkpoint.memory.segment import Segment, State, file_bytes
from hetstream.checkpoint.memory.slots import Slot, SlotMemory, take_slots
from hetstream.checkpoint.memory.store_files import SHARED_MEMORY, SlotContent, StoreFiles, StoreIdentity, WriterStatus
from hetstream.checkpoint.memory.store_recovery import delete_without_writer, give_up, make_store, own_store
from hetstream.checkpoint.record.layout import MAX_NUMBER, Generation
from hetstream.checkpoint.record.lineage import Lineage

# A store that somebody deletes below its living trainer, and what is done to make it anew.
#
# Not every deletion is a mistake of somebody's: systemd-logind removes all that a user has in /dev/shm when he logs out
# of a host, and sites clean up /dev/shm after jobs. The trainer still has the memory mapped, with all that is in it,
# but no other process can reach it any more.

_log = logging.getLogger(__name__)

# Other threads go on between two of these.
_STRIDE_BYTES = 64 << 20


def is_whole(files: StoreFiles, lock: FileLock, slots: Iterable[Slot]) -> bool:
    """Return whether all files of a store are there that its trainer has open: a few microseconds."""
    return (
        lock.is_of(files.trainer_lock)
        and files.wake.exists()
        and all(slot.segment is None or slot.is_busy or slot.segment.is_of(slot.path) for slot in slots)
    )


def warn_of_deletion(path: Path) -> None:
    """Say what has happened, why it happens, and what can be done about it."""
    _log.warning(
        "%s: somebody has deleted this checkpoint store, or files of it, while it was in use. It is made anew, and "
        "training goes on. systemd-logind does so when a user logs out of a host (RemoveIPC), and so do jobs that "
        "clean up /dev/shm. To have it stay: loginctl enable-linger USER, or RemoveIPC=no in /etc/systemd/logind.conf",
        path,
    )


def copy_generation(former: Segment, slot: Slot, memory: SlotMemory) -> None:
    """Bring a complete generation from a slot whose file is gone into one of the new store.

    Raises:
        SharedMemoryFull: there is no room.
        DamagedSegment: it is not complete.
    """
    former.check_complete()
    header, source = former.header, former.payload
    memory.replace(slot, header.payload_bytes, header.metadata_bytes)
    assert slot.segment is not None
    slot.segment.begin(header.payload_bytes)
    with source, slot.segment.payload as target:
        for begin in range(0, header.payload_bytes, _STRIDE_BYTES):
            target[begin : begin + _STRIDE_BYTES] = source[begin : begin + _STRIDE_BYTES]
    reach("store.copied")
    slot.segment.publish(header.generation, header.serial, header.layout_digest, former.metadata)


def clear_away(files: StoreFiles) -> None:
    """Give up what the deletion has left of a store: nobody will look for it. For who had its trainer's lock."""
    with contextlib.suppress(OSError):
        if files.path.exists():
            give_up(files)


# The pipe in a store by which a trainer wakes its checkpoint writer.


class WakePipe:
    """The trainer's end; it is there without a checkpoint writer, too, and what is written then is not lost."""

    def __init__(self, files: StoreFiles) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(files.wake, 0o600)
        # Read and write: a pipe without a reader does not open for writing alone.
        self._descriptor = os.open(files.wake, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)

    def wake(self) -> None:
        """Make the checkpoint writer look."""
        with contextlib.suppress(BlockingIOError):  # it has not looked at what is in the pipe
            os.write(self._descriptor, b"\0")

    def close(self) -> None:
        """Let go of it."""
        os.close(self._descriptor)


# A slot while a save writes to it: `Store.begin` gives it, and it ends with `publish` or `abandon`.


class WritableSlot:
    """A slot that is being written; `Store.begin` makes it. As a context manager it abandons what was not published.

    Attributes:
        payload: the memory to copy into, in bytes.
        segment: the slot: the same object as long as its memory is the same.
        waited_s: how long the save waited for a free slot, in seconds.
        allocated_s: how long memory for it was allocated, by this save or by a thread that it waited for; later saves
            find it there.
    """

    def __init__(self, store: Store, slot: Slot, waited_s: float, allocated_s: float) -> None:
        assert slot.segment is not None
        self._store = store
        self._slot = slot
        self.segment = slot.segment
        self._is_open = True
        self.payload = self.segment.payload
        self.waited_s = waited_s
        self.allocated_s = allocated_s

    def publish(self, generation: Generation, metadata: bytes, layout_digest: str) -> None:
        """Make what was copied the newest generation, and wake the checkpoint writer.

        Args:
            generation: not older than the newest.
            metadata: see `segment.join_metadata`.
            layout_digest: `Layout.digest` of the payload.

        Raises:
            OptionsError: the generation is older, or the metadata is larger than was said to `begin`.
        """
        self._check_open()
        self._store._check_newest(generation)
        self.segment.publish(generation, self._store._next_serial(), layout_digest, metadata)
        reach("slot.complete")
        self._end()
        self._store.wake()
        reach("slot.published")
        self._store.renew_if_deleted()

    def abandon(self) -> None:
        """Give up what was copied: the slot is empty, and the other generations are as they were."""
        self._check_open()
        self.give_up()

    def give_up(self) -> None:
        """End it wherever it is: what is complete stays, anything else is given up. It may be called again."""
        try:
            if self._is_open and self.segment.header.state != State.COMPLETE:
                self.segment.abandon()
        except DamagedSegment as error:
            # An interrupt came while the header was written: the slot gets a new file before it is used again.
            _log.debug("a slot is given up: %s", error)
        self._end()

    def _check_open(self) -> None:
        if not self._is_open:
            raise OptionsError("this slot has been published or abandoned")

    def _end(self) -> None:
        self._is_open = False
        # An array over it keeps it; then the program must not write to it any more.
        with contextlib.suppress(BufferError):
            self.payload.release()
        self._store._end_writing(self._slot)

    def __enter__(self) -> WritableSlot:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_open:
            self.abandon()


MIN_SLOTS = 2
# Whoever looks whether a slot is what it was holds its lock for a moment.
_GRACE_S = 5.0
_POLL_S = 0.002
_SAY_WAITING_S = 5.0
_PREPARED_TIMEOUT_S = 60.0


class Store:
    """A rank's store; `open` makes or adopts it. A context manager that closes it.

    `prepare` and `wake` may be called in any thread; one save goes on at a time. Where somebody deletes its files it is
    made anew in another directory, by the next save or by `renew_if_deleted`, with the newest generation in it.

    Attributes:
        identity: whose it is.
        when_renewed: called, in order, each time that it has been made anew, in the thread that has noticed.
        is_left: it was closed, and nobody was there any more to bring to disk what is in it.
    """

    def __init__(
        self,
        identity: StoreIdentity,
        files: StoreFiles,
        lock: FileLock,
        num_slots: int,
        places: tuple[Path, Path | None],
    ) -> None:
        self.identity = identity
        self.when_renewed: list[Callable[[], None]] = []
        self.is_left = False
        self._files = files
        self._lock = lock
        self._places = places
        self._memory = SlotMemory(files, places[1])
        self._pid = os.getpid()
        self._is_open = True
        self._has_said_deleted = self._has_said_lost = False
        self._pipe = WakePipe(files)
        self._is_saving = False
        files.reserved.unlink(missing_ok=True)
        self._writing: WritableSlot | None = None
        self._taken: Slot | None = None
        self._changed = threading.Condition()
        self._slots = take_slots(files, num_slots)
        self._serial = max((content.header.serial for content in self.held()), default=0)

    @classmethod
    def open(
        cls,
        identity: StoreIdentity,
        num_slots: int = 3,
        shared_memory: Path = SHARED_MEMORY,
        fallback: Path | None = None,
    ) -> Store:
        """Adopt the store that a dead trainer of this identity has left, or make one. Allocates no slot.

        Args:
            identity: whose it is.
            num_slots: generations in memory, with the one that is being written; each takes the state's size.
            shared_memory: a directory in memory.
            fallback: a directory for what does not fit there.

        Raises:
            StoreInUse: a living process has the same identity.
            SharedMemoryFull: not even the directory fits, and there is no fallback.
            OSError: the directories cannot be written to.
        """
        if num_slots < MIN_SLOTS:
            raise OptionsError(f"num_slots={num_slots}: a save needs a slot beside the last good one, so at least 2")
        while True:
            files, lock = own_store(identity, shared_memory, fallback)
            try:
                store = cls(identity, files, lock, num_slots, (shared_memory, fallback))
                break
            except FileNotFoundError:
                # Somebody has just deleted it.
                lock.release()
                if files.path.exists():
                    raise
            except BaseException:
                lock.release()
                raise
        generations = ", ".join(str(content.header.generation) for content in store.held()) or "nothing"
        _log.info("checkpoint store %s is %s, with %s in it", identity, files.path, generations)
        return store

    @property
    def path(self) -> Path:
        """Its directory, for the checkpoint writer."""
        return self._files.path

    def held(self) -> list[SlotContent]:
        """Return the complete generations, newest first."""
        contents = [content for slot in self._slots if (content := slot.content())]
        return sorted(contents, key=lambda content: content.age, reverse=True)

    @contextlib.contextmanager
    def read(self, content: SlotContent) -> Iterator[Segment]:
        """A generation of `held`, in the memory that this process has mapped; no save overwrites it meanwhile.

        Raises:
            DamagedSegment: it is not there any more, or damaged.
        """
        with content.lock():
            segment = next(slot.segment for slot in self._slots if slot.path == content.path)
            if segment is None or segment.header.serial != content.header.serial:
                raise DamagedSegment(f"{content.path}: {content.header.generation} has been overwritten meanwhile")
            segment.check_complete()
            yield segment

    def forget(self, is_wanted: Callable[[Generation], bool]) -> None:
        """Give up the generations that are not wanted, of this rank and of others. Nobody must save meanwhile."""
        for slot in self._slots:
            content = slot.content()
            if content and not is_wanted(content.header.generation):
                _log.info("%s: %s is given up", self.path, content.header.generation)
                slot.forget()
        for path in self._files.replicas():
            replica = SlotContent.of(path)
            if replica and not is_wanted(replica.header.generation):
                path.unlink(missing_ok=True)

    def note_start(self, lineage: Lineage) -> None:
        """The job's start in the checkpoint directory, if it was not known when the store was opened.

        Raises:
            OSError: there is no room.
        """
        self.identity = dataclasses.replace(self.identity, lineage=lineage)
        if lineage.start_id != self._files.read_start_id():
            self._files.write_start_id(lineage.start_id)

    @property
    def persisted(self) -> Generation | None:
        """The newest generation that its checkpoint writers have seen committed, also before the last start."""
        status = self.status()
        return status.persisted if status else None

    def status(self) -> WriterStatus | None:
        """Return what the checkpoint writer last said; None before it has."""
        return self._files.read_status()

    def stop_reason(self) -> str:
        """Return why the job's checkpoint writer asks this trainer to save and to end; "" while it does not."""
        return self._files.stop_reason()

    def is_writer_alive(self) -> bool:
        """Return whether a checkpoint writer serves this store."""
        return self._files.is_writer_alive()

    def wake(self) -> None:
        """Make the checkpoint writer look, if there is one."""
        self._pipe.wake()

    def populate(self) -> None:
        """Enter the pages of what is held into this process's page tables, newest first.

        For a thread that runs while the program builds its model: then `read` is as fast as memory.
        """
        for content in self.held():
            slot = next((slot for slot in self._slots if slot.path == content.path), None)
            if slot and self._occupy(slot):
                try:
                    if slot.segment:
                        slot.segment.populate()
                finally:
                    self._free(slot)

    def announce(self, payload_bytes: int, metadata_bytes: int) -> None:
        """Say how much memory this rank cannot do without, before any rank of the host takes some.

        Args:
            payload_bytes: of the state.
            metadata_bytes: of the state, about.
        """
        self._memory.reserve(MIN_SLOTS * file_bytes(payload_bytes, metadata_bytes))

    def prepare(self, payload_bytes: int, metadata_bytes: int) -> None:
        """Allocate the slots and enter their pages into this process's page tables, so that no save has to.

        Complete generations stay; their slots are enlarged by the saves that overwrite them. The GIL is free nearly
        all the time.

        Args:
            payload_bytes: of the state.
            metadata_bytes: of the state, about.

        Raises:
            SharedMemoryFull: there is no room, not in the fallback either.
        """
        for slot in self._slots:
            if not self._occupy(slot):
                continue
            try:
                if slot.content() is None and not slot.fits(payload_bytes, metadata_bytes):
                    self._memory.replace(slot, payload_bytes, metadata_bytes)
                elif slot.segment:
                    slot.segment.populate()
            except SharedMemoryFull as error:
                if sum(other.fits(payload_bytes, metadata_bytes) for other in self._slots) < MIN_SLOTS:
                    raise
                self._give_up(slot, error)
            finally:
                self._free(slot)

    def begin(self, payload_bytes: int, metadata_bytes: int) -> WritableSlot:
        """Take a slot to write the next generation into.

        Args:
            payload_bytes: size of the payload.
            metadata_bytes: size of the metadata; some more will fit.

        Raises:
            SharedMemoryFull: the slot has to be made, and there is no room; what is in memory stays.
            OptionsError: another save has not ended.
            OSError: somebody has deleted the store, and it cannot be made anew.
        """
        with self._changed:
            self._check_usable()
            if self._is_saving:
                raise OptionsError("a save is under way: publish or abandon it before the next")
            self._is_saving = True
        try:
            while True:
                self._renew()
                try:
                    return self._begin(payload_bytes, metadata_bytes)
                except FileNotFoundError:
                    if is_whole(self._files, self._lock, self._slots):
                        raise
        except BaseException:
            self._is_saving = False
            raise

    def renew_if_deleted(self) -> bool:
        """Make the store anew, with the newest generation in it, if somebody has deleted it, or files of it.

        Nothing while a save is under way, which looks for itself; nor in a forked child, or once it is closed.

        Returns:
            Whether it was made anew. Where that fails the log says so, once, and the next save tries again.
        """
        with self._changed:
            if not self._is_open or self._is_saving or os.getpid() != self._pid:
                return False
            self._is_saving = True
        try:
            return self._renew()
        except (HetstreamError, OSError) as error:
            if not self._has_said_lost:
                self._has_said_lost = True
                _log.error("%s was deleted and cannot be made anew, no other process reaches it: %s", self.path, error)
            return False
        finally:
            self._is_saving = False

    def _renew(self) -> bool:
        """As `renew_if_deleted`, for who saves."""
        if is_whole(self._files, self._lock, self._slots):
            return False
        if not self._has_said_deleted:
            self._has_said_deleted = True
            warn_of_deletion(self.path)
        files, lock = make_store(self.identity, *self._places)
        with self._changed:
            # What prepares a slot of the old one goes on until it is ready, and then finds no more of them.
            self._changed.wait_for(lambda: not any(slot.is_busy for slot in self._slots), _PREPARED_TIMEOUT_S)
            former, self._files, self._lock = (self._files, self._lock, self._slots), files, lock
            self._pipe.close()
            self._pipe = WakePipe(files)
            newest = next(iter(self.held()), None)
            self._memory = self._memory.renewed(files)
            self._slots = [Slot(files.slot(index)) for index in range(len(former[2]))]
        kept = next((slot for slot in former[2] if newest and slot.path == newest.path), None)
        for slot in former[2]:
            if slot is not kept:
                slot.close()
        if kept and kept.segment:
            try:
                copy_generation(kept.segment, self._slots[0], self._memory)
            except (HetstreamError, OSError) as error:
                _log.error("%s: its newest generation is lost, the next save will be held: %s", self.path, error)
            kept.close()
        clear_away(former[0])
        former[1].release()
        reach("store.renewed")
        _log.info("checkpoint store %s is %s now", self.identity, self.path)
        for act in self.when_renewed:
            act()
        self.wake()
        return True

    def abandon(self) -> None:
        """Give up a save that was begun and not ended, as by an interrupt between two lines; without one, nothing."""
        writing, taken = self._writing, self._taken
        if writing:
            writing.give_up()
        elif taken:
            self._end_writing(taken)
        self._is_saving = False

    def mark_closed(self) -> None:
        """Tell the checkpoint writer that what is in memory may go once it is on disk and this process is gone.

        For a process that is about to be ended and has no time for `close`.
        """
        self._files.closed.touch(0o600)
        self.wake()

    def close(self, *, keep: bool = False, keep_unsaved: bool = False) -> None:
        """Let go of the store. A second time, and in a forked child, it does nothing.

        Args:
            keep: leave all as after a crash, for the trainer that comes next, if there is a generation, of this rank or
                of another. Else the checkpoint writer is told that what is in memory may go once it is on disk; without
                a living checkpoint writer it goes now.
            keep_unsaved: without one, what is not on disk stays for the next checkpoint writer.
        """
        with self._changed:
            if not self._is_open or os.getpid() != self._pid:
                return
            self._is_open = False
        self.abandon()
        with self._changed:
            # A thread that prepares a slot ends with it.
            self._changed.wait_for(lambda: not any(slot.is_busy for slot in self._slots), _PREPARED_TIMEOUT_S)
        reach("store.closing")
        keep = keep and bool(any(slot.content() for slot in self._slots) or self._files.replicas())
        try:
            if not keep:
                self._files.closed.touch(0o600)
                reach("store.closed")
                self.wake()
        except FileNotFoundError:
            keep = True
            _log.error(
                "%s: somebody has deleted this checkpoint store while it was being closed. What was not on disk by "
                "then is lost; hetstream ckpt ls says what is there",
                self.path,
            )
        finally:
            for slot in self._slots:
                slot.close()
            self._pipe.close()
            try:
                if not keep:
                    self.is_left = delete_without_writer(self._files, keep_unsaved=keep_unsaved)
            finally:
                self._lock.release()

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, payload_bytes: int, metadata_bytes: int) -> WritableSlot:
        began_s = time.monotonic()
        while True:
            slot, allocated_s = self._take(payload_bytes, metadata_bytes)
            waited_s = time.monotonic() - began_s
            try:
                if not slot.fits(payload_bytes, metadata_bytes):
                    slot.unlock()
                    self._memory.replace(slot, payload_bytes, metadata_bytes)
                    allocated_s += time.monotonic() - began_s - waited_s
                    # Somebody who meant the file before may hold the new one, for a moment.
                    slot.lock = FileLock.wait_exclusive(slot.path, _GRACE_S)
                assert slot.segment is not None
                slot.segment.begin(payload_bytes)
            except BaseException as error:
                slot.unlock()
                self._free(slot)
                self._taken = None
                if not isinstance(error, SharedMemoryFull) or not any(
                    other.fits(payload_bytes, metadata_bytes) for other in self._not_newest() if other is not slot
                ):
                    raise
                self._give_up(slot, error)
            else:
                reach("slot.begun")
                self._writing = WritableSlot(self, slot, waited_s, allocated_s)
                return self._writing

    def _take(self, payload_bytes: int, metadata_bytes: int) -> tuple[Slot, float]:
        """A slot to overwrite, busy from here on, and its file locked if it has one; and how long it was waited for one
        that is being prepared."""
        began_s, has_said = time.monotonic(), False
        prepared_s = 0.0
        with self._changed:
            while True:
                self._check_usable()
                others = self._not_newest()
                usable = [slot for slot in others if not slot.is_given_up] or others
                free = [slot for slot in usable if not slot.is_busy]
                if any(slot.is_busy for slot in self._slots):
                    # What is being prepared will be ready before what is begun now.
                    free = [slot for slot in free if slot.fits(payload_bytes, metadata_bytes)]
                for slot in sorted(free, key=lambda slot: slot.age(payload_bytes, metadata_bytes)):
                    self._taken, slot.is_busy = slot, True
                    slot.lock = FileLock.try_exclusive(slot.path) if slot.segment else None
                    if slot.lock or not slot.segment:
                        return slot, prepared_s
                    self._taken, slot.is_busy = None, False
                is_being_prepared = any(slot.is_busy for slot in self._slots)
                waits_s = time.monotonic()
                self._changed.wait(_POLL_S)
                prepared_s += time.monotonic() - waits_s if is_being_prepared else 0.0
                if not has_said and time.monotonic() > began_s + _SAY_WAITING_S:
                    has_said = True
                    _log.warning(
                        "a save has waited %g s for a slot of %s: all but the newest are being read or prepared; more "
                        "slots (num_slots=%d) need no waiting",
                        _SAY_WAITING_S,
                        self.path,
                        len(self._slots) + 1,
                    )

    def _not_newest(self) -> list[Slot]:
        newest = next(iter(self.held()), None)
        return [slot for slot in self._slots if newest is None or slot.path != newest.path]

    def _give_up(self, slot: Slot, error: SharedMemoryFull) -> None:
        slot.is_given_up = True
        _log.warning("checkpoints have a slot less, and saves may wait for the checkpoint writer: %s", error)

    def _next_serial(self) -> int:
        self._serial += 1
        return self._serial

    def _check_newest(self, generation: Generation) -> None:
        if not all(0 <= number <= MAX_NUMBER for number in generation):
            raise OptionsError(f"{generation}: attempt and step must be from 0 to {MAX_NUMBER}")
        newest = next(iter(self.held()), None)
        if newest and generation < newest.header.generation:
            raise OptionsError(
                f"{generation} is older than {newest.header.generation}, which is in memory: steps of an attempt grow"
            )

    def _check_usable(self) -> None:
        if os.getpid() != self._pid:
            raise OptionsError(f"{self.path}: a forked child cannot save; only process {self._pid} can")
        if not self._is_open:
            raise OptionsError(f"{self.path}: the store is closed")

    def _occupy(self, slot: Slot) -> bool:
        with self._changed:
            if slot.is_busy or not self._is_open or slot not in self._slots:
                return False
            slot.is_busy = True
            return True

    def _free(self, slot: Slot) -> None:
        with self._changed:
            slot.is_busy = False
            self._changed.notify_all()

    def _end_writing(self, slot: Slot) -> None:
        slot.unlock()
        self._is_saving = False
        self._writing = None
        self._free(slot)
        self._taken = None
