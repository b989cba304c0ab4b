"""How long a start of the job has its checkpoint directory: from its predecessor up to its successor, if there is one.

Called by the checkpointer of every rank; rank 0 is the one that has it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable

import msgspec

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.config import host_of_this_process
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import Identity
from hetstream.checkpoint.errors import DirectoryReplaced
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.flash.distributed import Communicator, gather, together
from hetstream.checkpoint.flash.handover.acquisition import DirectoryAcquisition
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.policy.lineage import Lineage
from hetstream.checkpoint.record.generation import Generation
from hetstream.checkpoint.replica import rendezvous
from hetstream.checkpoint.replica.trainer import TrainerReplicas, forget_replicas

_log = logging.getLogger(__name__)

_POLL_S = 0.01


class _Seen(msgspec.Struct, frozen=True):
    """The newest checkpoint that a rank's checkpoint writers have seen committed."""

    persisted: Generation | None


class DirectoryOwnership:
    """Of one start of the job.

    Args:
        directory: of the checkpoints.
        ranks: of the job.
        acquisition: rank 0's way into the directory.
        replica: other hosts keep replicas.

    Attributes:
        attempt: the start's number, on every rank; 0: a living job has the directory, until this one takes it over.
        lineage: of the directory, as rank 0 has read it: the same on every rank.
    """

    def __init__(
        self, directory: CheckpointDirectory, ranks: Communicator, acquisition: DirectoryAcquisition, *, replica: bool
    ) -> None:
        self.attempt = 0
        self.lineage = Lineage()
        self._directory = directory
        self._ranks = ranks
        self._acquisition = acquisition
        self._replica = replica

    def begin(self, above: int) -> None:
        """Take the directory, unless a living job has it that this one takes over once it is initialised.

        Args:
            above: the newest attempt that this rank's memory holds something of.
        """
        above = max(gather(self._ranks, above))
        self.attempt = together(self._ranks, lambda: self._acquire(above, is_ready=False))
        self._agree_on(self._directory.lineage)

    def take_over(self, store: Store) -> None:
        """Wait for the job whose training this one takes over, now that the program is initialised; then `settle`."""
        above = max(gather(self._ranks, max((one.header.generation.attempt for one in store.held()), default=0)))
        while self.attempt == 0:
            self.attempt = together(self._ranks, lambda: self._acquire(above, is_ready=True))
        self._agree_on(self._directory.lineage)

        def note() -> int:
            store.note_start(self.lineage)
            return 0

        together(self._ranks, note)
        self.settle(store)

    def settle(self, store: Store) -> None:
        """Give up what memory holds of records that were left behind, those included that come after a checkpoint which
        somebody has deleted. Before a checkpoint writer can write them."""
        if self.attempt == 0:
            return
        seen = [one.persisted for one in gather(self._ranks, _Seen(store.persisted)) if one.persisted]
        self._agree_on(lambda: self._directory.notice_removed(seen))
        store.forget(self.lineage.holds)

    def check_directory(self) -> None:
        """Refuse checkpoints of another training, whose directory has taken the place of this one's.

        Raises:
            DirectoryReplaced: on all ranks.
        """

        def check() -> int:
            self._directory.check_start()
            return 0

        together(self._ranks, check)

    def go_back(self, start: Generation, store: Store, *, has_saved: bool) -> bool:
        """Training goes on from a record that is not the newest: what is newer is left behind, and given up in memory.

        Args:
            start: the record.
            store: of this rank.
            has_saved: some rank has saved in this attempt; then another one begins.

        Returns:
            Whether another attempt has begun.
        """
        if has_saved:
            before, self.attempt = self.attempt, together(self._ranks, self._renumber)
            _log.info("attempt %d goes on as attempt %d", before, self.attempt)
        self._agree_on(lambda: self._directory.go_back(start))
        store.forget(self.lineage.holds)
        return has_saved

    def _agree_on(self, read: Callable[[], Lineage]) -> None:
        """Have the lineage that rank 0 reads, or writes, on all ranks."""
        found = Lineage()

        def act() -> int:
            nonlocal found
            if self._ranks.rank == 0:
                found = read()
            return 0

        together(self._ranks, act)
        self.lineage = gather(self._ranks, found)[0]

    def _renumber(self) -> int:
        if self._ranks.rank != 0:
            return 0
        before = self.attempt
        attempt = self._directory.renumber()
        if self._replica:
            rendezvous.make_key(self._directory.path, attempt)
            rendezvous.remove_key(self._directory.path, before)
        return attempt

    def note_restored(self, step: int) -> None:
        """Write down how long nobody trained, if this start took over."""
        if not self._acquisition.has_waited:
            return
        self._acquisition.has_waited = False
        event = self._directory.take_over(self._acquisition.identity)
        if event.pause_s is None:
            _log.warning("the job that was asked to hand over ended without: this one goes on from step %d", step)
            return
        _log.info("took over after step %d: nobody trained for %.2f s", step, event.pause_s)
        if event.step != step:
            _log.warning("step %s was handed over, and step %d is what could be restored", event.step, step)

    def arrange_replicas(self, store: Store) -> TrainerReplicas | None:
        """Tell the checkpoint writer of each rank who its peer is; None without replicas. All ranks know the hosts of
        all.

        Raises:
            OptionsError: some ranks want replicas, and others do not.
        """
        hosts = gather(self._ranks, host_of_this_process() if self._replica else "")
        if not any(hosts):
            forget_replicas(store.path)
            return None
        if not all(hosts):
            without = [rank for rank, host in enumerate(hosts) if not host]
            raise OptionsError(f"replica=True on some ranks, and not on rank(s) {without}: on every rank or on none")
        made: list[TrainerReplicas] = []

        def make() -> int:
            made.append(TrainerReplicas(store, self._directory.path, hosts, self._ranks.rank, self.attempt))
            return 0

        together(self._ranks, make)
        return made[0]

    def withdraw(self) -> None:
        """Ask no other job for the directory any more."""
        self._acquisition.withdraw()

    def hand_over(
        self,
        successor: Identity,
        saved: Generation,
        last_step_s: float,
        timeout_s: float,
        has_writer: Callable[[], bool],
    ) -> None:
        """Rank 0: give the directory up as soon as the newest generation of all ranks is on disk; the rest can wait.

        Args:
            successor: the job that goes on.
            saved: the newest generation.
            last_step_s: when training ended here, in seconds since 1970.
            timeout_s: how long to wait for the disk.
            has_writer: whether somebody brings it there.
        """
        deadline_s = time.monotonic() + timeout_s
        # What is committed: this rank's checkpoint writer hears of it later where another one comes last.
        while (newest := self._directory.newest()) is None or newest < saved:
            if time.monotonic() > deadline_s or not has_writer():
                _log.error("%s is not on disk, and %s goes on without it", saved, successor)
                break
            time.sleep(_POLL_S)
        reach("handover.saved")
        self._directory.hand_over(successor, saved.step, last_step_s)
        _log.info(
            "handed over to %s, %.2f s after the end of step %d", successor, time.time() - last_step_s, saved.step
        )

    def end(self) -> None:
        """Give the directory up, if it was not handed over."""
        if self._replica and self.attempt and self._ranks.rank == 0:
            with contextlib.suppress(DirectoryReplaced, OSError):
                self._directory.check_start()
                rendezvous.remove_key(self._directory.path, self.attempt)
        self._directory.release()

    def _acquire(self, above: int, *, is_ready: bool) -> int:
        if self._ranks.rank != 0:
            return 0
        attempt = self._acquisition.acquire(above, is_ready=is_ready)
        if attempt and self._replica:
            try:
                rendezvous.make_key(self._directory.path, attempt)
            except BaseException:
                self._directory.release()
                raise
        return attempt
