"""A directory of checkpoints, and one of them, as trainers, the command line and retention see it.

Rank 0 of a job acquires the directory; every rank may read it; checkpoint writers write to it through `commit.py`.
Nothing here keeps a list: what is there is what the directory says, so a restart, another host or a person with `rm`
changes nothing. A checkpoint's files are read while it is held.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import HetstreamError, OptionsError
from hetstream.base.files import Directory, UntrustedFile
from hetstream.base.text import count_words, list_words, printable, shortened
from hetstream.checkpoint.disk import commit, ownership
from hetstream.checkpoint.disk.commit import target_of_latest
from hetstream.checkpoint.disk.ownership import (
    Event,
    JobIdentity,
    Owner,
    check_start,
    lineage_of,
    read_lineage,
    write_lineage,
)
from hetstream.checkpoint.disk.rank_file import Compare, Manifest, RankFile, compare_chunks, open_file, ranks_of_name
from hetstream.checkpoint.errors import (
    MAX_DAMAGE,
    DamagedCheckpoint,
    ForeignOwner,
    MissingRanks,
    NoCheckpoint,
    OtherRelease,
    reach,
)
from hetstream.checkpoint.locks import FileLock
from hetstream.checkpoint.policy import Attempt, Retention, RetentionDecision, Saved, judge
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage, is_newest_removed

# In a checkpoint whose bytes were found to be wrong: retention does not count it as good.
DAMAGED = "damaged.txt"
MAX_REASON_BYTES = 64 << 10


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint.

    Attributes:
        path: its directory.
        generation: which record it is.
        manifests: one per rank, in order; empty if `problem` says that they cannot be read.
        problem: what is wrong with it; "" if nothing is known.
        is_of_other_release: the problem is that another release of hetstream wrote it.
    """

    path: Path
    generation: Generation
    manifests: tuple[Manifest, ...]
    problem: str = ""
    is_of_other_release: bool = False

    @property
    def world_size(self) -> int:
        """Ranks that saved it."""
        return len(self.manifests)

    @property
    def num_bytes(self) -> int:
        """Size of all ranks' files."""
        return sum(manifest.num_bytes for manifest in self.manifests)

    @property
    def metrics(self) -> Mapping[str, float]:
        """What rank 0's `save` was given."""
        return self.manifests[0].metrics if self.manifests else {}

    @property
    def time_s(self) -> float:
        """When the last part was whole on disk, in seconds since 1970."""
        return max((manifest.time_s for manifest in self.manifests), default=0.0)


@dataclass(frozen=True)
class HeldCheckpoint:
    """A checkpoint that is kept from being removed.

    Attributes:
        generation: which.
        place: its open directory.
        manifests: of the ranks that are wanted.
        read_only: see `CheckpointDirectory`; then it is not kept.
    """

    generation: Generation
    place: Directory
    manifests: Mapping[int, Manifest]
    read_only: bool = False

    def read(self, rank: int, *, num_threads: int = 1, is_compared: bool = False) -> RankFile:
        """Map a rank's file.

        Args:
            rank: one that was wanted.
            num_threads: how many compare it with its checksums.
            is_compared: `compare` has done so, here or in another process of this host.

        Raises:
            DamagedCheckpoint: the file is not what was written; the checkpoint is marked, so that the next one to ask
                passes it over.
        """
        with self._marking():
            compare: Compare = "nothing" if is_compared else "all"
            return open_file(self.place, self.manifests[rank], num_threads, compare=compare, copies=self.read_only)

    def compare(self, chunks: Iterable[tuple[int, Sequence[int]]], num_threads: int) -> None:
        """Compare some chunks of files with their checksums.

        Args:
            chunks: rank, and numbers of chunks of its file.
            num_threads: how many compare.

        Raises:
            DamagedCheckpoint: as from `read`.
        """
        with self._marking():
            for rank, numbers in chunks:
                compare_chunks(self.place, self.manifests[rank], numbers, num_threads)

    @contextlib.contextmanager
    def _marking(self) -> Iterator[None]:
        try:
            yield
        except DamagedCheckpoint as error:
            if not self.read_only and not isinstance(error, OtherRelease):
                mark(self.place.path.parent, self.generation, str(error))
            raise


@dataclass(frozen=True)
class Partial:
    """A checkpoint that is not committed, or not yet.

    Attributes:
        path: its directory.
        generation: which record it is.
        ranks: whose parts are there.
        world_size: how many there will be; None while there is none.
    """

    path: Path
    generation: Generation
    ranks: tuple[int, ...]
    world_size: int | None


def mark(directory: Path, generation: Generation, problem: str) -> None:
    """Write down what is wrong with a checkpoint, or that nothing is; nothing where the directory cannot be written to,
    or is not this user's alone."""
    with contextlib.suppress(OSError), Directory.open(directory, group_reads=True) as root:
        root.check_own()
        with root.enter(generation.directory_name) as place:
            if problem:
                place.write_whole(DAMAGED, problem.encode(errors="replace")[:MAX_REASON_BYTES])
            else:
                place.unlink(DAMAGED, missing_ok=True)


_log = logging.getLogger(__name__)

KEEP_ALL = Retention(keep_last=None)


def local_path(path: str | os.PathLike[str]) -> Path:
    """Return an absolute path from what a program gives as one; "~" is a home directory.

    Raises:
        OptionsError: it is a URL, which would be taken for a directory of that name.
    """
    text = os.fsdecode(path)
    if scheme := re.match(r"([A-Za-z][A-Za-z0-9+.-]+):/", text):
        raise OptionsError(
            f"{text}: checkpoints lie in a directory of a file system, and not at a URL ({scheme[1]}:). Give a path "
            "that all nodes of the job have"
        )
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError as error:
        raise OptionsError(f"{text}: there is no such home directory") from error


class CheckpointDirectory:
    """A directory of checkpoints.

    Args:
        path: the directory; `acquire` makes it if it is missing.
        read_only: nothing is written to it, also no damage that is found, and nothing in it is locked: a checkpoint may
            be removed while it is read.
    """

    def __init__(self, path: str | os.PathLike[str], *, read_only: bool = False) -> None:
        self.path = local_path(path)
        self.read_only = read_only
        self.attempt = 0
        self._lock: FileLock | None = None
        self._start_id = ""

    def acquire(self, identity: JobIdentity, keep: Retention = KEEP_ALL, above: int = 0) -> int:
        """Become the owner: once per job, by its rank 0. The lock ends with this process.

        Args:
            identity: who this is.
            keep: which checkpoints stay; rank 0's checkpoint writer removes the others.
            above: the newest attempt that any rank's memory holds something of.

        Returns:
            The number of this attempt, which no earlier one had.

        Raises:
            DirectoryInUse: another living job has it.
            DirectoryNotWritable: it cannot be written to.
            ForeignOwner: it belongs to another user.
        """
        ownership.prepare_directory(self.path)

        def seen() -> Iterator[tuple[Generation, float]]:
            # Only for who has the lock: one that waits for it asks again and again.
            yield from ((checkpoint.generation, checkpoint.time_s) for checkpoint in self.scan())

        self._lock, self.attempt = ownership.take(self.path, identity, keep, seen(), time.time(), above)
        self._start_id = self.lineage().start_id
        return self.attempt

    def check_own(self) -> None:
        """Refuse to change a directory that is not this user's alone to write to.

        Raises:
            ForeignOwner: it is another user's, or others can write to it, or let its path lead elsewhere.
        """
        ownership.refuse_unsafe_way(self.path)
        with Directory.open(self.path) as root:
            reason = root.strangers()
        if reason:
            raise ForeignOwner(f"{reason}. Nothing of it is changed: let its owner do so (sudo -u)")

    def check_start(self) -> None:
        """Refuse what has taken the directory's place since `acquire`; a directory that is gone is none.

        Raises:
            DirectoryReplaced: another directory has its name.
        """
        with contextlib.suppress(FileNotFoundError), Directory.open(self.path) as root:
            check_start(root, self._start_id)

    def release(self) -> None:
        """End the attempt in order; without `acquire`, nothing."""
        lock, self._lock = self._lock, None
        if lock:
            with lock:
                try:
                    self.check_start()
                    ownership.end(self.path, self.attempt, time.time())
                except (OSError, HetstreamError) as error:
                    _log.warning(
                        "%s: the end of attempt %d could not be written down: %s", self.path, self.attempt, error
                    )

    def hand_over(self, to: JobIdentity, step: int, last_step_s: float) -> None:
        """End the attempt for another job to go on; see `ownership.hand_over`. Without `acquire`, nothing."""
        lock, self._lock = self._lock, None
        if lock:
            with lock:
                ownership.hand_over(self.path, self.attempt, to, step, last_step_s)
            reach("handover.released")

    def take_over(self, identity: JobIdentity) -> Event:
        """Write down that this attempt can train now, in place of one that has ended for it."""
        return ownership.take_over(self.path, self.attempt, identity, time.time())

    def lineage(self) -> Lineage:
        """Return the directory's id, and where its training went back; an empty one if there is none.

        Raises:
            CheckpointError: there is one, and it cannot be read.
        """
        return lineage_of(self.path)

    def notice_removed(self, known: Iterable[Generation]) -> Lineage:
        """Go back to what is there, if somebody has deleted the newest checkpoint of the line. For the owner.

        Args:
            known: what ranks' checkpoint writers have seen committed.
        """
        lineage, there = self.lineage(), commit.committed(self.path)
        pointed = target_of_latest(self.path)
        known = [*known, *([pointed] if pointed else [])]
        if not is_newest_removed(lineage, there, known):
            return lineage
        removed, newest = lineage.newest(known), lineage.newest(there)
        _log.warning(
            "%s: the checkpoint of %s is not there any more: somebody has deleted it. Training %s, and what is in "
            "memory and newer is given up",
            self.path,
            removed,
            f"goes back to {newest}" if newest else "begins anew",
        )
        return self.go_back(newest)

    def go_back(self, start: Generation | None) -> Lineage:
        """Write down that the running attempt goes on from a record, whatever is newer; None: from the beginning. For
        the owner."""
        with Directory.open(self.path, group_reads=True) as root:
            root.check_own()
            lineage = read_lineage(root).gone_back(self.attempt, start)
            write_lineage(root, lineage)
        reach("lineage.written")
        commit.move_latest(self.path)
        return lineage

    def renumber(self) -> int:
        """Give the running attempt the next number, as one that goes back behind what it has saved; the number."""
        self.attempt = ownership.renumber(self.path, self.attempt, time.time())
        return self.attempt

    def has(self, generation: Generation) -> bool:
        """Return whether a checkpoint is there, whatever is wrong with it."""
        return os.path.isdir(self.path / generation.directory_name)

    def newest(self) -> Generation | None:
        """Return the newest committed checkpoint, whatever is wrong with it."""
        try:
            return next(iter(commit.committed(self.path)), None)
        except FileNotFoundError:
            return None

    def owner(self) -> Owner | None:
        """Return the newest attempt, which may have ended."""
        return ownership.read_owner(self.path)

    def past_attempts(self) -> list[Attempt]:
        """Return how the attempts before the running one went, for the time between failures."""
        return ownership.past_attempts(self.path)

    def scan(self) -> list[Checkpoint]:
        """Return every committed checkpoint with what is wrong with it, newest first; bytes of tensors are not read."""
        try:
            found = commit.committed(self.path)
        except FileNotFoundError:
            return []
        return [checkpoint for checkpoint in map(self._look_at, found) if checkpoint]

    def checkpoints(self) -> list[Checkpoint]:
        """Return the committed checkpoints that nothing is known against, newest first. The others are logged."""
        scanned = self.scan()
        for checkpoint in scanned:
            if checkpoint.problem:
                _log.warning("checkpoint %s is passed over: %s", checkpoint.generation, checkpoint.problem)
        return [checkpoint for checkpoint in scanned if not checkpoint.problem]

    def partials(self) -> list[Partial]:
        """Checkpoints that are not committed, newest first."""
        found = []
        for generation in commit.announced(self.path):
            path = commit.partial_path(self.path, generation)
            there = [ranks for name in commit.manifests_in(self.path, path.name) if (ranks := ranks_of_name(name))]
            world_size = max((ranks[1] for ranks in there), default=None)
            found.append(Partial(path, generation, tuple(ranks[0] for ranks in there), world_size))
        return found

    def complete_partials(self) -> list[Generation]:
        """Commit what dead checkpoint writers left complete and remove what can no longer become one.

        Returns:
            What was committed here, newest first.
        """
        return commit.complete(self.path)

    def left_over(self) -> list[Path]:
        """Directories of checkpoints that were being removed when whoever did so died; `complete_partials` removes
        them."""
        return [self.path / name for name in commit.left_over(self.path)]

    @contextlib.contextmanager
    def hold(self, generation: Generation, ranks: Collection[int] | None = None) -> Iterator[HeldCheckpoint]:
        """Keep a checkpoint from being removed while it is read, unless this is read-only.

        Args:
            generation: which.
            ranks: whose manifests are wanted, and no others are read; None: all.

        Raises:
            NoCheckpoint: it is not there.
            MissingRanks: one of these ranks has no part in it.
            DamagedCheckpoint: its manifests or files are not what was committed, or not what this user may trust.
        """
        with contextlib.ExitStack() as stack:
            try:
                place = stack.enter_context(commit.holding(self.path, generation, locks=not self.read_only))
            except UntrustedFile as error:
                raise DamagedCheckpoint(str(error)) from error
            if place is None:
                raise NoCheckpoint(f"{self.path} has no {generation}: hetstream ckpt ls {self.path}")
            try:
                if ranks is None:
                    manifests = dict(enumerate(self._manifests(place, generation)))
                else:
                    manifests = commit.read_parts(place, generation, ranks)
            except OSError as error:
                raise DamagedCheckpoint(f"{place.path} cannot be read: {error}") from error
            lacking = [rank for rank in ranks or () if rank not in manifests]
            if lacking:
                raise MissingRanks(f"{place.path} has no part of {list_words('rank', lacking)}")
            yield HeldCheckpoint(generation, place, manifests, read_only=self.read_only)

    def read(self, generation: Generation, rank: int, *, num_threads: int = 1) -> RankFile:
        """Map a rank's file after every byte was compared with its checksum. Hold the checkpoint meanwhile.

        Raises:
            NoCheckpoint: it is not there.
            MissingRanks: it has no such rank.
            DamagedCheckpoint: the file is not what was written; the checkpoint is marked, so that the next one to ask
                passes it over.
        """
        with self.hold(generation) as held:
            if rank not in held.manifests:
                saved_by = count_words(len(held.manifests), "rank")
                raise MissingRanks(f"{held.place.path} was saved by {saved_by}, there is no rank {rank}")
            return held.read(rank, num_threads=num_threads)

    def verify(
        self,
        generation: Generation,
        progress: Callable[[int], None] | None = None,
        check: Callable[[RankFile], None] = lambda _file: None,
    ) -> list[str]:
        """Compare every byte of a checkpoint; what is wrong, and nothing if all is well. Marks it accordingly, if it
        lies in a directory of this user's.

        Args:
            generation: which.
            progress: told how many more bytes have been compared.
            check: looks at each file that is whole; raises DamagedCheckpoint where it cannot be used nevertheless.
        """
        problems = []
        is_marked = True
        with contextlib.ExitStack() as stack:
            try:
                place = stack.enter_context(commit.holding(self.path, generation))
            except UntrustedFile as error:
                return [str(error)]
            if place is None:
                raise NoCheckpoint(f"{self.path} has no {generation}: hetstream ckpt ls {self.path}")
            try:
                manifests = self._manifests(place, generation)
            except (HetstreamError, OSError) as error:
                is_marked = not isinstance(error, OtherRelease)
                problems.append(str(error))
                manifests = ()
            for manifest in manifests:
                try:
                    with open_file(place, manifest, progress=progress) as file:
                        check(file)
                except DamagedCheckpoint as error:
                    problems.append(str(error))
        if is_marked:
            mark(self.path, generation, "; ".join(problems))
        return problems

    def retain(self, rule: Retention) -> list[RetentionDecision]:
        """Remove what a rule does not keep, except what is being read; one verdict each, oldest first. What was left
        behind is not counted and stays: `remove_left_behind`. So does what another release wrote."""
        lineage = self.lineage()
        counted = (checkpoint for checkpoint in self.scan() if not checkpoint.is_of_other_release)
        saved = [_saved(checkpoint) for checkpoint in counted if lineage.holds(checkpoint.generation)]
        verdicts = judge(saved, rule)
        for verdict in verdicts:
            if not verdict.keep:
                name = Generation(verdict.saved.attempt, verdict.saved.step, verdict.saved.repeat).directory_name
                try:
                    removed = commit.remove(self.path, name)
                except UntrustedFile as error:
                    _log.warning("checkpoint %s stays: %s", name, error)
                    continue
                _log.info("checkpoint %s %s: %s", name, "removed" if removed else "stays, it is read", verdict.reason)
        return verdicts

    def left_behind(self) -> dict[Generation, str]:
        """Return the checkpoints that were left behind and are of no more use, as the line has a newer one; each with
        the reason.
        """
        lineage = self.lineage()
        scanned = self.scan()
        newest = lineage.newest(checkpoint.generation for checkpoint in scanned if not checkpoint.problem)
        left = ((checkpoint.generation, lineage.left_by(checkpoint.generation)) for checkpoint in scanned)
        return {
            generation: f"{branch}, and has saved since"
            for generation, branch in left
            if branch and newest and newest.attempt >= branch.attempt
        }

    def remove_left_behind(self) -> list[Generation]:
        """Remove what `left_behind` names, except what is being read; what is gone."""
        gone = []
        for generation in self.left_behind():
            try:
                if commit.remove(self.path, generation.directory_name):
                    gone.append(generation)
            except UntrustedFile as error:
                _log.warning("checkpoint %s stays: %s", generation, error)
        return gone

    def _look_at(self, generation: Generation) -> Checkpoint | None:
        path = self.path / generation.directory_name
        problem = ""
        try:
            with Directory.open(self.path) as root, root.enter(generation.directory_name) as place:
                manifests = self._manifests(place, generation)
                with contextlib.suppress(FileNotFoundError):
                    problem = place.read(DAMAGED, MAX_REASON_BYTES).decode(errors="replace")
                    problem = shortened(printable(problem), MAX_DAMAGE)
        except FileNotFoundError:
            return None
        except HetstreamError as error:
            return Checkpoint(path, generation, (), str(error), isinstance(error, OtherRelease))
        except OSError as error:
            return Checkpoint(path, generation, (), f"{path} cannot be read: {error}")
        return Checkpoint(path, generation, manifests, problem)

    def _manifests(self, place: Directory, generation: Generation) -> tuple[Manifest, ...]:
        parts = commit.read_parts(place, generation)
        world_size = next(iter(parts.values())).world_size if parts else 1
        missing = world_size - len(parts)
        if missing:
            if not self.path.joinpath(generation.directory_name).is_dir():
                raise FileNotFoundError(place.path)
            first = list(itertools.islice((rank for rank in range(world_size) if rank not in parts), 11))
            raise MissingRanks(f"{place.path} lacks the parts of {list_words('rank', first)} of {world_size}")
        return tuple(parts[rank] for rank in range(world_size))


def _saved(checkpoint: Checkpoint) -> Saved:
    generation = checkpoint.generation
    return Saved(
        generation.attempt, generation.step, not checkpoint.problem, checkpoint.metrics, repeat=generation.repeat
    )


# Which rank of a host compares which bytes of a checkpoint with their checksums, so that each is read once. Pure.
#
# The ranks of a host read the same files: all of them that of rank 0, with what is equal everywhere, and after a change
# of the number of ranks many more. What one has read and found right lies in the page cache for all.


def files_of(rank: int, num_ranks: int, num_saved: int) -> list[int]:
    """Return the ranks whose files a rank restores from.

    Args:
        rank: of now.
        num_ranks: how many there are now.
        num_saved: how many saved.
    """
    if num_ranks == num_saved:
        return sorted({0, rank})
    return [*range(num_saved)]  # any of them may have a piece of a sharded tensor


def files_of_host(ranks: Iterable[int], num_ranks: int, num_saved: int) -> list[int]:
    """As `files_of`, for all ranks of a host that restore from disk."""
    return sorted({file for rank in ranks for file in files_of(rank, num_ranks, num_saved)})


def share_of(counts: Sequence[tuple[int, int]], number: int, num_shares: int) -> list[tuple[int, list[int]]]:
    """Return one rank's share of the chunks: a run of them, as disks like it.

    Args:
        counts: file, and number of its chunks.
        number: which share.
        num_shares: how many ranks there are to share.

    Returns:
        File, and numbers of chunks of it.
    """
    total = sum(count for _, count in counts)
    begin, end = (total * share // num_shares for share in (number, number + 1))
    found = []
    at = 0
    for file, count in counts:
        mine = [*range(max(0, begin - at), min(count, end - at))]
        if mine:
            found.append((file, mine))
        at += count
    return found
