"""Whether this start of the job owns its checkpoint directory, and the attempt and lineage that all its ranks use.

Called by the checkpointer of every rank; rank 0 is the one that owns it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable

import msgspec

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.errors import DirectoryReplaced
from hetstream.checkpoint.flash.distributed import Communicator, from_rank_0, gather, together
from hetstream.checkpoint.flash.ports import OtherHosts, Succession
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.record.generation import Generation
from hetstream.checkpoint.record.lineage import Lineage

_log = logging.getLogger(__name__)


class _Seen(msgspec.Struct, frozen=True):
    """The newest checkpoint that a rank's checkpoint writers have seen committed."""

    persisted: Generation | None


class DirectoryOwnership:
    """The ownership of the checkpoint directory by one start of the job.

    Args:
        directory: of the checkpoints.
        ranks: of the job.
        succession: rank 0's way into the directory.
        others: hosts that keep what this one saves; None: without.

    Attributes:
        attempt: the start's number, on every rank; 0: a living job has the directory, until this one takes it over.
        lineage: of the directory, as rank 0 has read it: the same on every rank.
    """

    def __init__(
        self, directory: CheckpointDirectory, ranks: Communicator, succession: Succession, others: OtherHosts | None
    ) -> None:
        self.attempt = 0
        self.lineage = Lineage()
        self._directory = directory
        self._ranks = ranks
        self._succession = succession
        self._others = others

    def begin(self, above: int) -> None:
        """Take the directory, unless a living job has it that this one takes over once it is initialised.

        Args:
            above: the newest attempt that this rank's memory holds something of.
        """
        above = max(gather(self._ranks, above))
        self.attempt = self._acquire(above, is_ready=False)
        self._agree_on(self._directory.lineage)

    def take_over(self, store: Store) -> None:
        """Wait for the job whose training this one takes over, now that the program is initialised; then `settle`."""
        above = max(
            gather(self._ranks, max((content.header.generation.attempt for content in store.held()), default=0))
        )
        while self.attempt == 0:
            self.attempt = self._acquire(above, is_ready=True)
        self._agree_on(self._directory.lineage)
        together(self._ranks, lambda: store.note_start(self.lineage))
        self.settle(store)

    def settle(self, store: Store) -> None:
        """Give up what memory holds of records that were left behind, those included that come after a checkpoint which
        somebody has deleted. Before a checkpoint writer can write them. Then other hosts keep what is saved.

        Raises:
            OptionsError: some ranks want replicas, and others do not.
        """
        if self.attempt == 0:
            return
        seen = [answer.persisted for answer in gather(self._ranks, _Seen(store.persisted)) if answer.persisted]
        self._agree_on(lambda: self._directory.notice_removed(seen))
        store.forget(self.lineage.holds)
        self._arrange_others(store)

    def check_directory(self) -> None:
        """Refuse checkpoints of another training, whose directory has taken the place of this one's.

        Raises:
            DirectoryReplaced: on all ranks.
        """
        together(self._ranks, self._directory.check_start)

    def go_back(self, start: Generation, store: Store, *, has_saved: bool) -> None:
        """Training goes on from a record that is not the newest: what is newer is left behind, and given up in memory.

        Args:
            start: the record.
            store: of this rank.
            has_saved: some rank has saved in this attempt; then another one begins.
        """
        if has_saved:
            before, self.attempt = self.attempt, from_rank_0(self._ranks, self._renumber, int)
            _log.info("attempt %d goes on as attempt %d", before, self.attempt)
        self._agree_on(lambda: self._directory.go_back(start))
        store.forget(self.lineage.holds)
        if has_saved:
            self._arrange_others(store)

    def _agree_on(self, read: Callable[[], Lineage]) -> None:
        """Have the lineage that rank 0 reads, or writes, on all ranks."""
        self.lineage = from_rank_0(self._ranks, read, Lineage)

    def _renumber(self) -> int:
        before = self.attempt
        attempt = self._directory.renumber()
        if self._others:
            self._others.admit(attempt)
            self._others.dismiss(before)
        return attempt

    def _arrange_others(self, store: Store) -> None:
        others = self._others
        hosts = gather(self._ranks, others.host if others else "")
        if others is None and not any(hosts):
            StoreFiles(store.path).forget_others()
            return
        if others is None or not all(hosts):
            without = [rank for rank, host in enumerate(hosts) if not host]
            raise OptionsError(f"replica=True on some ranks, and not on rank(s) {without}: on every rank or on none")
        together(self._ranks, lambda: others.arrange(store, hosts, self.attempt))

    def end(self) -> None:
        """Give the directory up, if it was not handed over."""
        if self._others and self.attempt and self._ranks.rank == 0:
            with contextlib.suppress(DirectoryReplaced, OSError):
                self._directory.check_start()
                self._others.dismiss(self.attempt)
        self._directory.release()

    def _acquire(self, above: int, *, is_ready: bool) -> int:
        """The attempt's number on all ranks; 0: not yet."""
        return from_rank_0(self._ranks, lambda: self._acquire_here(above, is_ready=is_ready), int)

    def _acquire_here(self, above: int, *, is_ready: bool) -> int:
        attempt = self._succession.acquire(above, is_ready=is_ready)
        if attempt and self._others:
            try:
                self._others.admit(attempt)
            except BaseException:
                self._directory.release()
                raise
        return attempt
