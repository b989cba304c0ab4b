"""A checkpoint writer's work on one store: bring its generations to disk.

Called by the loop of `writer.py`. `PersistDecision` says what to write; `commit.py` writes and commits it, and the
trainer is told in the store's `status.json`. `replica/` has copies on other hosts.
Never changes a generation, and never waits for another rank.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from hetstream.base.errors import HetstreamError
from hetstream.base.text import list_words
from hetstream.checkpoint.disk import commit
from hetstream.checkpoint.disk.commit import problem_of_latest
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.rank_file import PartSpec
from hetstream.checkpoint.disk.safetensors import FilePlan, plan_part
from hetstream.checkpoint.errors import DamagedCheckpoint, DamagedSegment, DirectoryReplaced, reach
from hetstream.checkpoint.memory.segment import Segment, split_metadata
from hetstream.checkpoint.memory.slots import MappedSlots
from hetstream.checkpoint.memory.store_files import SlotContent, WriterStatus
from hetstream.checkpoint.memory.view import StoreView
from hetstream.checkpoint.record.layout import Generation, from_json
from hetstream.checkpoint.record.structure import Record

# Which generation a checkpoint writer writes next, so that ranks which nobody synchronises write the same ones. Pure.
#
# Each rank's checkpoint writer writes when it can, and a checkpoint needs a part from every rank. Left alone, each
# would take the newest of its own trainer, and with ranks a step apart no set would ever be complete. So the first to
# begin announces its generation (its directory on disk is the announcement), the others join it, and nobody begins
# another before that one is committed. A checkpoint writer that has lost what was announced, because its trainer
# overwrote it, announces a newer one, and the others follow.


@dataclass(frozen=True)
class PersistDecision:
    """What to do next.

    Attributes:
        generation: to write; None: nothing now.
        reason: why.
    """

    generation: Generation | None
    reason: str


def decide_persist(
    held: Collection[Generation],
    written: Collection[Generation],
    announced: Collection[Generation],
    committed: Generation | None,
    *,
    last_chance: bool,
) -> PersistDecision:
    """Decide.

    Args:
        held: complete generations of this rank in memory.
        written: generations whose part of this rank is on disk.
        announced: generations that some rank has begun and that are not committed.
        committed: the newest committed one.
        last_chance: no newer one will come into memory, or there is no time left to wait for it.
    """
    useful = {generation for generation in held if committed is None or generation > committed}
    if not useful:
        return PersistDecision(None, "all that is in memory is on disk, or older than what is")
    newest = max(useful)
    begun = sorted(
        (generation for generation in announced if committed is None or generation > committed), reverse=True
    )
    for generation in begun:
        if generation in written:
            if not last_chance:
                return PersistDecision(None, f"{generation} waits for other ranks' parts")
        elif generation in useful:
            return PersistDecision(generation, "other ranks have begun it")
        elif generation > newest:
            if not last_chance:
                return PersistDecision(None, f"other ranks have begun {generation}, which is still to come here")
        elif not last_chance:
            break  # it was overwritten in memory; so will be those before it
    if newest in written:
        return PersistDecision(None, f"{newest} waits for other ranks' parts")
    return PersistDecision(newest, "it is the newest")


_log = logging.getLogger(__name__)

# After a failure, doubling up to the limit.
_RETRY_S, _RETRY_LIMIT_S = 5.0, 60.0
_REPORT_S = 5.0
# Told to end, ranks do not end at the same instant: what is missing before is no news.
_QUIET_S = 2.0


class StoreWriter:
    """The checkpoint writer of one store.

    Args:
        view: the store; this is its only checkpoint writer.
        directory: of the checkpoints.
        is_ending: whether this process is about to end.

    Attributes:
        is_waiting: something in memory is not committed: look again soon.
        since_s: when it last got on, or a living trainer could still help.
        replicas: sends and keeps copies of other hosts, as the trainer wants.
    """

    def __init__(self, view: StoreView, directory: Path, is_ending: Callable[[], bool]) -> None:
        # Here, as trainers import this to start a checkpoint writer, and do not talk with other hosts.
        from hetstream.checkpoint.replica.service import ReplicaServing

        self.view = view
        self.directory = directory
        self._is_ending = is_ending
        self.rank = view.holder.rank
        self.is_waiting = False
        self.since_s = time.monotonic()
        self._status = WriterStatus(pid=os.getpid(), persisted=view.persisted)
        self._serial = 0
        self._seen_newest: Generation | None = None
        self._mine: set[Generation] = set()
        self._damaged: set[Generation] = set()
        self._unreadable: set[SlotContent] = set()
        self._looked_at: list[SlotContent] = []
        self._retry_s = 0.0
        self._not_before_s = 0.0
        self._slots = MappedSlots()
        self._reporting = threading.Lock()
        self._is_orphaned = False
        self._is_clean = True
        self._said_of_latest = ""
        self._said_s = 0.0
        self._report()
        self.replicas = ReplicaServing(view.files, directory, self._report_replica)

    def __str__(self) -> str:
        return f"rank={self.rank} directory={self.directory}"

    def advance(self, *, last_chance: bool) -> bool:
        """Do the next thing there is to do, if any.

        Args:
            last_chance: no newer generation will come, or there is no time to wait for it.

        Returns:
            Whether something was done; then there may be more.
        """
        self._slots.drop_replaced()
        generations = self.view.generations()
        self._looked_at = generations[:1]
        found = [content for content in generations if content not in self._unreadable]
        held = {content.header.generation: content for content in reversed(found)}
        self.is_waiting = bool(held)
        if not held or time.monotonic() < self._not_before_s:
            return False
        try:
            newest = self._newest_seen(self._commit_written(held))
            self._clean_up()
            written = set(commit.written_by(self.directory, self.rank)) - self._damaged
            announced = set(commit.announced(self.directory)) - self._damaged
            decision = decide_persist(held, written, announced, newest, last_chance=last_chance)
            self.is_waiting = newest is None or max(held) > newest
            if decision.generation is None:
                return False
            reach("writer.chosen")
            _log.debug("%s generation=%s: %s", self, decision.generation, decision.reason)
            try:
                with self._slots.open(held[decision.generation]) as segment:
                    self._persist(segment)
                    reach("writer.written")
                    self._commit_written(held)
            except DamagedSegment as error:
                return self._pass_over(held[decision.generation], error)
            self._clean_up()
        except (OSError, HetstreamError) as error:
            self._is_orphaned = isinstance(error, DirectoryReplaced)
            self._fail(error)
            return False
        self._retry_s = 0.0
        self._is_orphaned = False
        self.since_s = time.monotonic()
        return True

    def let_go(self) -> None:
        """The store is about to go, or to be left: end all transfers, and unmap it."""
        self.replicas.close()
        self.unmap()

    def unmap(self) -> None:
        """Unmap the slots; the next generation is mapped anew."""
        self._slots.close()

    def _report_replica(self, replicated: Generation | None, error: str) -> None:
        if replicated:
            num_replicated = self._status.num_replicated + 1
            self._report(replicated=replicated, num_replicated=num_replicated, replica_error="")
        else:
            self._report(replica_error=error)

    def hurry(self) -> None:
        """Try at once what failed before, and count the time from now."""
        self._not_before_s = self._retry_s = 0.0
        self.since_s = time.monotonic()
        self._said_s = self.since_s + _QUIET_S - _REPORT_S

    def unsaved(self) -> Generation | None:
        """Return the newest generation in memory, if it is in no committed checkpoint and in none that is newer, and
        was not; None also where it is of no use, as the directory is another one now.
        """
        newest = next((content.header.generation for content in self.view.generations()), None)
        if self._is_orphaned:
            return None
        with contextlib.suppress(OSError):
            committed = self._newest_seen(next(iter(commit.committed(self.directory)), None))
            if newest and committed and committed >= newest:
                return None
        return newest

    def has_more(self) -> bool:
        """Return whether something has come into memory since `advance` last looked."""
        return self.view.generations()[:1] != self._looked_at

    def _newest_seen(self, committed: Generation | None) -> Generation | None:
        """The newest checkpoint that there is or was: what somebody has deleted is not written again."""
        return max((generation for generation in (committed, self._status.persisted) if generation), default=None)

    def is_hopeless(self, linger_s: float) -> bool:
        """Return whether waiting for the other ranks is of no more use."""
        if time.monotonic() < self.since_s + linger_s:
            return False
        try:
            if any(
                commit.is_being_written(self.directory, generation) for generation in commit.announced(self.directory)
            ):
                self.since_s = time.monotonic()
                return False
        except (OSError, HetstreamError) as error:
            _log.warning("%s: %s", self, error)
        return True

    def tell_waiting(self) -> None:
        """Log every few seconds what is not on disk yet: who told this process to end may kill it at any moment."""
        if time.monotonic() > self._said_s + _REPORT_S:
            self._said_s = time.monotonic()
            missing = self._missing("is not on disk yet")
            if missing:
                _log.warning("%s", missing)

    def tell_missing(self) -> None:
        """Log what did not get to disk."""
        missing = self._missing("did not get to disk: there was no time")
        if missing:
            _log.error("%s", missing)

    def _missing(self, unwritten: str) -> str:
        """What of the newest generation is not on disk; "" if it is committed.

        Args:
            unwritten: what to say if not even this rank's part is written, and no error is known.
        """
        unsaved = self.unsaved()
        if unsaved is None:
            return ""
        try:
            written = commit.written_by(self.directory, self.rank)
            newest = next(iter(commit.committed(self.directory)), None)
        except OSError as error:
            return f"{self} generation={unsaved} is in this memory alone: {error}"
        if unsaved in written:
            missing = commit.missing_ranks(self.directory, unsaved, written[unsaved])
            what = f"is not committed: the parts of {list_words('rank', missing)} of {written[unsaved]} are missing"
        else:
            what = f"did not get to disk: {self._status.error}" if self._status.error else unwritten
        return f"{self} generation={unsaved} {what}; the newest checkpoint is {newest or 'none'}"

    def _commit_written(self, held: Iterable[Generation]) -> Generation | None:
        """Commit what is complete; the newest checkpoint there is then."""
        before = next(iter(commit.committed(self.directory)), None)
        for generation, world_size in commit.written_by(self.directory, self.rank).items():
            if generation in self._damaged or (before and generation <= before):
                continue
            try:
                if not commit.commit(self.directory, generation, world_size):
                    reach("writer.committed")
                    break
            except DamagedCheckpoint as error:
                self._damaged.add(generation)
                _log.error("%s generation=%s cannot be committed, the next one will be: %s", self, generation, error)
        newest = next(iter(commit.committed(self.directory)), None)
        if newest and newest != self._seen_newest:
            self._seen_newest = newest
            if newest in self._mine or newest in held:
                self._report(persisted=newest)
                _log.info("%s generation=%s is committed", self, newest)
            self._mine = {generation for generation in self._mine if generation > newest}
            self._is_clean = False
        return newest

    def _pass_over(self, content: SlotContent, error: DamagedSegment) -> bool:
        """Whether a generation that could not be read is damaged, so that an older one has to do.

        If it is not, the trainer was faster, and there is a newer one.
        """
        is_spoilt = _is_spoilt(content)
        if is_spoilt:
            self._unreadable.add(content)
        _log.log(logging.WARNING if is_spoilt else logging.DEBUG, "%s: %s", self, error)
        return is_spoilt

    def _persist(self, segment: Segment) -> None:
        began_s = time.monotonic()
        part, plan = _plan_part(segment)
        if self._is_ending():
            _log.info("%s generation=%s: the last %d bytes go to disk", self, part.generation, plan.num_bytes)
        start_id = self.view.files.read_start_id()
        commit.write_part(self.directory, part, plan, segment.payload, self._progress(plan.num_bytes), start_id)
        serial = segment.header.serial
        self._mine.add(part.generation)
        persist_s = time.monotonic() - began_s
        skipped = max(0, serial - self._serial - 1) if self._serial else 0
        self._serial = serial
        self._report(
            num_persisted=self._status.num_persisted + 1,
            num_skipped=self._status.num_skipped + skipped,
            error="",
            is_lost=False,
            persist_s=persist_s,
        )
        _log.info(
            "%s generation=%s written: %d bytes in %.2f s, %.2f GB/s",
            self,
            part.generation,
            plan.num_bytes,
            persist_s,
            plan.num_bytes / max(persist_s, 1e-9) / 1e9,
        )

    def _progress(self, num_bytes: int) -> Callable[[int], None]:
        """Says while the process is about to end how much is still missing: it may be killed at any moment."""
        said_s = time.monotonic()

        def note(written_bytes: int) -> None:
            nonlocal said_s
            if self._is_ending() and time.monotonic() > said_s + _REPORT_S:
                said_s = time.monotonic()
                _log.warning("%s: %d of %d bytes are not on disk yet", self, num_bytes - written_bytes, num_bytes)

        return note

    def _clean_up(self) -> None:
        """Remove what the newest checkpoint makes superfluous, once for each."""
        if self.rank or self._is_clean:
            return
        self._is_clean = True
        directory = CheckpointDirectory(self.directory)
        problem = problem_of_latest(self.directory)
        if problem and not self._said_of_latest:
            _log.error("%s", problem)
        self._said_of_latest = problem
        try:
            commit.clean_up(self.directory)
            owner = directory.owner()
            if owner and owner.keep.keep_last is not None:
                directory.retain(owner.keep)
        except (OSError, HetstreamError) as error:
            _log.warning("%s: old checkpoints stay for now: %s", self, error)

    def _fail(self, error: Exception) -> None:
        self._retry_s = min(_RETRY_LIMIT_S, 2 * self._retry_s or _RETRY_S)
        self._not_before_s = time.monotonic() + self._retry_s
        self.is_waiting = True
        _log.error("%s: nothing was written, next try in %g s: %s", self, self._retry_s, error)
        is_lost = self._is_orphaned or not self.directory.is_dir()
        num_failed = self._status.num_failed + 1
        self._report(num_failed=num_failed, error=str(error), is_lost=is_lost)

    def _report(self, **changes: object) -> None:
        with self._reporting:  # replicas report in threads
            self._status = msgspec.structs.replace(self._status, **changes)
            with contextlib.suppress(OSError):  # the store's memory is full; the trainer learns of it by itself
                self.view.report(self._status)


def _plan_part(segment: Segment) -> tuple[PartSpec, FilePlan]:
    """What a rank's file holds of a generation: of what is equal everywhere only rank 0's has anything."""
    header = segment.header
    layout_json, structure = split_metadata(segment.metadata)
    layout, record = from_json(layout_json), Record.read(structure)
    part = PartSpec(header.generation, record.rank, record.world_size, header.layout_digest, record.metric_values)
    keys = None if record.rank == 0 else record.own
    return part, plan_part(layout.entries, record, keys)


def _is_spoilt(content: SlotContent) -> bool:
    """Whether a generation that could not be read is there, unwritten to, and cannot be read."""
    with contextlib.suppress(DamagedSegment), content.lock():
        if SlotContent.of(content.path) != content:
            return False
        try:
            Segment.open(content.path).close()
        except DamagedSegment:
            return True
    return False
