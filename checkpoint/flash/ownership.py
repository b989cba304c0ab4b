"""Whether this start of the job owns its checkpoint directory, and the attempt and lineage that all its ranks use.

Called by the checkpointer of every rank; rank 0 is the one that owns it.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from hetstream.base.errors import OptionsError
from hetstream.checkpoint.config import takes_over
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.errors import DirectoryReplaced
from hetstream.checkpoint.flash.handover import JobHandover
from hetstream.checkpoint.flash.options import CheckpointOptions
from hetstream.checkpoint.flash.ranks import Communicator, from_rank_0, gather, together
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.policy.retention import Retention
from hetstream.checkpoint.record.agreement import Replica
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage

# Protocols of what a checkpointer may use beside its own memory and the disk: another job, and other hosts.
#
# Saving and restoring know these protocols alone. `ownership.py` plugs in their implementations: `handover.py`
# lets another job go on with the training, `replica/` keeps copies in the memory of other hosts.


class Succession(Protocol):
    """How one job goes on in place of another: how a start gets the directory, and how its owner gives it away.

    Rank 0 acquires and gives; on the other ranks there is nothing to do.
    """

    @property
    def successor(self) -> JobIdentity | None:
        """Who goes on in place of this job, once it has asked."""

    def acquire(self, above: int, *, is_ready: bool) -> int:
        """Become the owner of the directory; waits for a moment.

        Args:
            above: the newest attempt that any rank's memory holds something of.
            is_ready: the program is initialised: then its predecessor may stop.

        Returns:
            The attempt's number; 0: not yet, call again.

        Raises:
            DirectoryInUse: another job has it, and not for this one.
        """

    def withdraw(self) -> None:
        """Stop asking for the directory."""

    def note_restored(self, step: int) -> None:
        """Training can go on from a step."""

    def asked(self) -> str:
        """Why to stop: another job asks to go on; "" while none does."""

    def hand_over(
        self, saved: Generation, last_step_s: float, timeout_s: float, has_writer: Callable[[], bool]
    ) -> None:
        """Give the directory to the successor as soon as the newest generation of all ranks is on disk.

        Args:
            saved: the newest generation.
            last_step_s: when training ended here, in seconds since 1970.
            timeout_s: how long to wait for the disk.
            has_writer: whether somebody brings it there.
        """


class RecordsElsewhere(Protocol):
    """Where a restore finds records that are not in this rank's memory, and not on disk."""

    def offered(self) -> list[Replica]:
        """What this host could give to other ranks."""

    def fetch(self, generation: Generation, holders: Sequence[int]) -> None:
        """Bring a generation of this rank into its store, from the first holder that gives it whole.

        Raises:
            NoCheckpoint: none does.
        """


class OtherHosts(RecordsElsewhere, Protocol):
    """The memory of other hosts: told how attempts begin and end, and asked at a restore."""

    @property
    def host(self) -> str:
        """The name under which other hosts reach this one."""

    def admit(self, attempt: int) -> None:
        """An attempt begins, and no rank but this one, rank 0, knows it yet."""

    def dismiss(self, attempt: int) -> None:
        """For rank 0: an attempt has ended."""

    def arrange(self, store: Store, hosts: Sequence[str], attempt: int) -> None:
        """All ranks know the attempt, and the hosts of all.

        Raises:
            OSError: the store has no room for what its checkpoint writer must know.
        """

    def on_renewed(self) -> None:
        """The store has been made anew."""


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


# Plugs `handover/` and `replica/` into a checkpointer; nothing else on the trainer's side knows them.


def succession_of(job: str, directory: CheckpointDirectory, keep: Retention, options: CheckpointOptions) -> Succession:
    """How a job comes to its directory, and gives it to the next.

    Args:
        job: Slurm's id, with the component.
        directory: of the checkpoints.
        keep: which of them stay.
        options: of the checkpointer.
    """
    return JobHandover(directory, JobIdentity.of_this_process(job), keep, takes_over(), options.hand_over_timeout_s)


def other_hosts_of(directory: CheckpointDirectory, rank: int, options: CheckpointOptions) -> OtherHosts | None:
    """Who else keeps what a rank saves; None: nobody.

    Args:
        directory: of the checkpoints.
        rank: of this process.
        options: of the checkpointer.
    """
    if not options.replica:
        return None
    # Here, so that a program without replicas does not load what talks with other hosts.
    from hetstream.checkpoint.replica.trainer import TrainerReplicas

    return TrainerReplicas(directory.path, rank)
