"""Whether this start of the job owns its checkpoint directory, and how one job goes on in place of another.

Called by the checkpointer of every rank; rank 0 is the one that owns the directory. A start takes it, or is handed it
by the job whose training it takes over (seamless migration):

    the successor                                            the owner
    starts, imports, makes its model                     trains
    restore(): asks, and waits for the directory's lock  sees it in should_save, which says True: the last save
                                                         stopping is True; the loop ends; close(): on disk, lock free
    has the lock, restores what was handed over          ends
    trains

The successor asks only when its program is initialised, and the owner stops only for a successor that lives. `decide`
and `answer` say what each does; the files are those of `checkpoint/disk/ownership.py`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

import msgspec

from hetstream.base.errors import OptionsError
from hetstream.base.text import list_words
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import Claim, JobIdentity, living_request, read_request
from hetstream.checkpoint.errors import DirectoryInUse, DirectoryReplaced, reach
from hetstream.checkpoint.flash.options import CheckpointOptions
from hetstream.checkpoint.flash.ranks import Communicator, from_rank_0, gather, together
from hetstream.checkpoint.memory.store import Store
from hetstream.checkpoint.memory.store_files import StoreFiles
from hetstream.checkpoint.policy import Retention
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage, Replica

_log = logging.getLogger(__name__)

# What both sides of a hand-over decide. Pure.


@dataclass(frozen=True)
class AskedHandover:
    """A request, as the owner finds it.

    Attributes:
        attempt: the owner that is asked.
        successor: who asks, in words.
        is_live: whether who asks still lives.
    """

    attempt: int
    successor: str
    is_live: bool


@dataclass(frozen=True)
class OwnerAnswer:
    """What the owner does.

    Attributes:
        hands_over: stop after the next save; else go on.
        reason: why.
    """

    hands_over: bool
    reason: str


def answer(attempt: int, asked: AskedHandover | None) -> OwnerAnswer:
    """Return what an owner says to a request.

    Args:
        attempt: of the owner.
        asked: the request; None if there is none.
    """
    if asked is None:
        return OwnerAnswer(False, "nobody asks")
    if asked.attempt != attempt:
        return OwnerAnswer(False, f"{asked.successor} asks attempt {asked.attempt}, this is attempt {attempt}")
    if not asked.is_live:
        return OwnerAnswer(False, f"{asked.successor} asked and has died since, or gave up")
    return OwnerAnswer(True, f"hand-over to {asked.successor}")


@dataclass(frozen=True)
class StartProgress:
    """How far a start is.

    Attributes:
        takes_over: the job whose training it takes over; "" if it is a start like any other.
        is_ready: its program is initialised.
        asked_attempt: the owner that it has asked; 0 before.
        waited_s: how long it has waited since it asked first.
        timeout_s: how long it waits.
    """

    takes_over: str
    is_ready: bool = False
    asked_attempt: int = 0
    waited_s: float = 0.0
    timeout_s: float = 0.0


@dataclass(frozen=True)
class FoundDirectory:
    """A checkpoint directory that a start could not take, as it finds it.

    Attributes:
        owner_job: Slurm's id of the newest owner's job, without its component; "" if nobody says.
        owner: the newest owner in words.
        owner_attempt: its attempt; 0 if nobody says.
        other_successor: another living job that has asked for the directory, in words; "" if there is none.
    """

    owner_job: str = ""
    owner: str = ""
    owner_attempt: int = 0
    other_successor: str = ""


class Action(Enum):
    """What a start does."""

    LATER = "go on with the program and come back when it is initialised"
    ASK = "ask the owner"
    WAIT = "wait for the owner"
    REFUSE = "fail: it is somebody else's"
    GIVE_UP = "fail: the owner does not answer"


@dataclass(frozen=True)
class StartDecision:
    """What a start does and why."""

    action: Action
    reason: str


def decide(taking: StartProgress, seen: FoundDirectory) -> StartDecision:
    """Return what a start does about a directory that it could not take."""
    if seen.other_successor:
        # Also when it is free: it was handed over to the other one, or its owner died while the other one waited.
        return StartDecision(Action.REFUSE, f"it is being handed over to {seen.other_successor}")
    owner = seen.owner or "a process that does not say who it is"
    if not taking.takes_over:
        return StartDecision(Action.REFUSE, f"it is in use by {owner}")
    if seen.owner_job != taking.takes_over:
        return StartDecision(Action.REFUSE, f"it is in use by {owner}, and not by job {taking.takes_over}")
    if not taking.is_ready:
        return StartDecision(Action.LATER, f"{owner} trains until this job is initialised")
    if taking.asked_attempt and taking.waited_s >= taking.timeout_s:
        return StartDecision(Action.GIVE_UP, f"{owner} was asked {taking.waited_s:.0f} s ago and still has it")
    if taking.asked_attempt != seen.owner_attempt:
        return StartDecision(Action.ASK, f"{owner} has it")
    return StartDecision(Action.WAIT, f"{owner} was asked {taking.waited_s:.0f} s ago")


_ACQUISITION_POLL_S, _DISK_POLL_S = 0.02, 0.01
# So long one call of `acquire` waits: then the other ranks, which wait in a collective operation, are told so.
_MAX_WAIT_S = 1.0
_SAY_WAITING_S = 10.0
_ADVICE = "two jobs cannot share a checkpoint directory: end that job (scancel), or choose another directory"


class JobHandover:
    """Rank 0's way into a checkpoint directory, which another job may still have, and its way out.

    Args:
        directory: of the checkpoints.
        identity: of this process.
        keep: which checkpoints stay.
        takes_over: Slurm's id of the job whose training this one takes over; "" if none.
        timeout_s: how long to wait for that job, once asked.

    Attributes:
        has_waited: the directory came from a living job.
        successor: to whom to hand over, once somebody asks.
    """

    def __init__(
        self, directory: CheckpointDirectory, identity: JobIdentity, keep: Retention, takes_over: str, timeout_s: float
    ) -> None:
        self.has_waited = False
        self.identity = identity
        self.successor: JobIdentity | None = None
        self._directory = directory
        self._keep = keep
        self._takes_over = takes_over
        self._timeout_s = timeout_s
        self._claim: Claim | None = None
        self._asked_attempt = 0
        self._asked_s = self._said_s = 0.0
        self._said_not = ""  # why the last request was not heard

    def acquire(self, above: int, *, is_ready: bool) -> int:
        """Become the owner, or ask the one that this job takes over; waits for a moment.

        Args:
            above: the newest attempt that any rank's memory holds something of.
            is_ready: the program is initialised: then its predecessor may stop.

        Returns:
            The attempt's number; 0: not yet, call again.

        Raises:
            DirectoryInUse: it is another job's than that which is taken over, which also did not stop in time.
        """
        until_s = time.monotonic() + _MAX_WAIT_S
        while True:
            refused = ""
            other = self._other_successor()
            if not other:
                try:
                    attempt = self._directory.acquire(self.identity, self._keep, above)
                except DirectoryInUse as error:
                    refused = str(error)
                else:
                    self.withdraw()
                    return attempt
            try:
                waits = self._waits(other, refused, is_ready=is_ready)
            except BaseException:
                self.withdraw()
                raise
            if not waits or time.monotonic() > until_s:
                return 0
            time.sleep(_ACQUISITION_POLL_S)

    def withdraw(self) -> None:
        """Ask no more: the directory is ours, or this job ends."""
        if self._claim:
            self._claim.withdraw()
        self._claim = None

    def _other_successor(self) -> str:
        request = living_request(self._directory.path)
        return str(request.successor) if request and request.successor != self.identity else ""

    def _waits(self, other: str, refused: str, *, is_ready: bool) -> bool:
        """Do what is to be done about a directory that could not be taken; whether to try again at once."""
        owner, path, now_s = self._directory.owner(), self._directory.path, time.monotonic()
        decision = decide(
            StartProgress(
                self._takes_over,
                is_ready,
                self._asked_attempt,
                now_s - self._asked_s if self._asked_attempt else 0.0,
                self._timeout_s,
            ),
            FoundDirectory(
                owner.identity.job.partition("+")[0] if owner else "",
                str(owner.identity) if owner else "",
                owner.attempt if owner else 0,
                other,
            ),
        )
        if decision.action is Action.REFUSE:
            named = other or self._takes_over
            raise DirectoryInUse(f"{path}: {decision.reason}; {_ADVICE}" if named else refused)
        if decision.action is Action.GIVE_UP:
            raise DirectoryInUse(
                f"{path}: {decision.reason}. Its program must call should_save after each step and end when stopping "
                "is true; and what it saved last must get to disk. It trains on; see its log"
            )
        if decision.action is Action.ASK:
            assert owner is not None
            self._claim = self._claim or Claim(path, self.identity)
            self._claim.ask(owner.attempt, time.time())
            self._asked_attempt, self.has_waited = owner.attempt, True
            self._asked_s = self._asked_s or now_s
            self._said_s = now_s
            _log.info("%s: this job is initialised and asks for the hand-over: %s", path, decision.reason)
        if decision.action is Action.LATER:
            _log.info("%s: %s; then it is asked for the hand-over", path, decision.reason)
        if now_s > self._said_s + _SAY_WAITING_S and is_ready:
            self._said_s = now_s
            _log.info("%s: %s, of %.0f s at most", path, decision.reason, self._timeout_s)
        return is_ready

    def note_restored(self, step: int) -> None:
        """Write down how long nobody trained, if this start took over."""
        if not self.has_waited:
            return
        self.has_waited = False
        event = self._directory.take_over(self.identity)
        if event.pause_s is None:
            _log.warning(
                "the job that was asked to hand over ended without saving: this one goes on from step %d", step
            )
            return
        _log.info("took over after step %d: nobody trained for %.2f s", step, event.pause_s)
        if event.step != step:
            _log.warning("step %s was handed over, and step %d is what could be restored", event.step, step)

    def asked(self) -> str:
        """Return why to stop: another job asks to go on; "" while none does."""
        path = self._directory.path
        request = read_request(path)
        if request is None:
            return ""
        is_live = living_request(path) is not None
        found = answer(self._directory.attempt, AskedHandover(request.attempt, str(request.successor), is_live))
        if found.hands_over:
            reach("handover.heard")
            self.successor = request.successor
            _log.info("%s: the next save is the last one here: %s", path, found.reason)
            return found.reason
        if found.reason != self._said_not:
            self._said_not = found.reason
            _log.info("%s is not handed over: %s", path, found.reason)
        return ""

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
        assert self.successor is not None
        deadline_s = time.monotonic() + timeout_s
        # What is committed: this rank's checkpoint writer hears of it later where another one comes last.
        while (newest := self._directory.newest()) is None or newest < saved:
            if time.monotonic() > deadline_s or not has_writer():
                _log.error("%s is not on disk, and %s goes on without it", saved, self.successor)
                break
            time.sleep(_DISK_POLL_S)
        reach("handover.saved")
        self._directory.hand_over(self.successor, saved.step, last_step_s)
        pause_s = time.time() - last_step_s
        _log.info("handed over to %s, %.2f s after the end of step %d", self.successor, pause_s, saved.step)


class OtherHosts(Protocol):
    """The memory of other hosts: told how attempts begin and end, and asked at a restore.

    Saving and restoring know this protocol alone; `replica/` keeps it.
    """

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

    def offered(self) -> list[Replica]:
        """Return what this host could give to other ranks."""

    def fetch(self, generation: Generation, holders: Sequence[int]) -> None:
        """Bring a generation of this rank into its store, from the first holder that gives it whole.

        Raises:
            NoCheckpoint: none does.
        """


def other_hosts_of(directory: CheckpointDirectory, rank: int, options: CheckpointOptions) -> OtherHosts | None:
    """Return who else keeps what a rank saves; None: nobody.

    Args:
        directory: of the checkpoints.
        rank: of this process.
        options: of the checkpointer.
    """
    if not options.replica:
        return None
    # Here, so that a program without replicas does not load what talks with other hosts.
    from hetstream.checkpoint.replica.service import TrainerReplicas

    return TrainerReplicas(directory.path, rank)


class _LastSeen(msgspec.Struct, frozen=True):
    """The newest checkpoint that a rank's checkpoint writers have seen committed."""

    persisted: Generation | None


class DirectoryOwnership:
    """The ownership of the checkpoint directory by one start of the job.

    Args:
        directory: of the checkpoints.
        ranks: of the job.
        handover: rank 0's way into the directory.
        others: hosts that keep what this one saves; None: without.

    Attributes:
        attempt: the start's number, on every rank; 0: a living job has the directory, until this one takes it over.
        lineage: of the directory, as rank 0 has read it: the same on every rank.
    """

    def __init__(
        self, directory: CheckpointDirectory, ranks: Communicator, handover: JobHandover, others: OtherHosts | None
    ) -> None:
        self.attempt = 0
        self.lineage = Lineage()
        self._directory = directory
        self._ranks = ranks
        self._handover = handover
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
        seen = [answer.persisted for answer in gather(self._ranks, _LastSeen(store.persisted)) if answer.persisted]
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
            raise OptionsError(
                f"replica=True on some ranks, and not on {list_words('rank', without)}: on every rank or on none"
            )
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
        attempt = self._handover.acquire(above, is_ready=is_ready)
        if attempt and self._others:
            try:
                self._others.admit(attempt)
            except BaseException:
                self._directory.release()
                raise
        return attempt
