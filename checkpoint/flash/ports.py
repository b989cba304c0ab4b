"""Protocols of what a checkpointer may use beside its own memory and the disk: another job, and other hosts.

Saving and restoring know these protocols alone. `assembly.py` plugs in their implementations: `handover/` lets another
job go on with the training, `replica/` keeps copies in the memory of other hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.record.agreement import Replica
from hetstream.checkpoint.record.generation import Generation


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
