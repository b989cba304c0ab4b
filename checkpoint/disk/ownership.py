"""Which job writes to a checkpoint directory, how often it was started, how these starts ended, who asks for the
directory, and where its training went back.

Rank 0 of the running attempt holds the lock; who it is stands beside it, for messages. The history says what the time
between failures is. Nothing here looks at checkpoints except to tell when a dead attempt was last alive.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.base.access import unsafe_above
from hetstream.base.errors import HetstreamError
from hetstream.base.files import Directory, UntrustedFile, is_temporary
from hetstream.base.text import printable
from hetstream.checkpoint.config import NO_JOB
from hetstream.checkpoint.errors import (
    CheckpointError,
    DamagedLineage,
    DirectoryInUse,
    DirectoryNotWritable,
    DirectoryReplaced,
    ForeignOwner,
    first_line,
    reach,
)
from hetstream.checkpoint.locks import FileLock, is_locked
from hetstream.checkpoint.policy import Attempt, Retention
from hetstream.checkpoint.record.layout import MAX_NUMBER, Generation
from hetstream.checkpoint.record.lineage import Lineage

_log = logging.getLogger(__name__)

_LOCK = ".lock"
_OWNER = "owner.json"
_HISTORY = "history.jsonl"
# A line for each start and each end.
_MAX_OWNER_BYTES, _MAX_HISTORY_BYTES = 64 << 10, 16 << 20
_ENDS = ("ended", "died", "handed over")
# A job that is started again knows that its earlier start is over. Its lock may last: a killed process gives back its
# memory first, and the file server of a node that is gone waits for the end of its lease (NFS: 90 s).
_PATIENCE_S = 120.0
_POLL_S = 0.05


class JobIdentity(msgspec.Struct, frozen=True):
    """Who uses a directory.

    Attributes:
        job: Slurm job id, or "local".
        host: of rank 0.
        pid: of rank 0.
    """

    job: str
    host: str
    pid: int

    @staticmethod
    def of_this_process(job: str) -> JobIdentity:
        """This process, as a part of `job`."""
        return JobIdentity(job, os.uname().nodename, os.getpid())

    def is_gone(self) -> bool:
        """Return whether it was a process of this host, and has ended."""
        if self.host != os.uname().nodename:
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except (OSError, OverflowError):
            return False  # another user's
        return False

    def __str__(self) -> str:
        return f"job {self.job} on {self.host}, process {self.pid}"


class Owner(msgspec.Struct, frozen=True):
    """The newest attempt. Its process may be dead: the lock says.

    Attributes:
        attempt: its number.
        identity: who made it.
        keep: which checkpoints stay; rank 0's checkpoint writer acts on it.
    """

    attempt: int
    identity: JobIdentity
    keep: Retention = Retention(keep_last=None)


class Event(msgspec.Struct, frozen=True):
    """A line of the history.

    Attributes:
        event: an attempt `started`, `ended` by itself, was found to have `died`; or it was `handed over`, and another
            `took over`.
        attempt: which.
        time_s: when, in seconds since 1970. Of `handed over` when the last step ended, of `took over` when the first
            one could begin.
        identity: who started; of a hand-over, who goes on.
        step: of a hand-over, the last one that was trained before it.
        pause_s: of `took over`, how long nobody trained, by the clocks of both hosts.
    """

    event: str
    attempt: int
    time_s: float
    identity: JobIdentity | None = None
    step: int | None = None
    pause_s: float | None = None


def prepare_directory(path: Path) -> None:
    """Make a directory for checkpoints, or check that it is ours to write to.

    Raises:
        ForeignOwner: it belongs to another user, or others can write to it, and so could put a checkpoint there.
        DirectoryNotWritable: it cannot be made or written to.
    """
    try:
        refuse_unsafe_way(path)  # nothing is made at the end of another user's link
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        refuse_unsafe_way(path)
        with Directory.open(path) as root:
            owner, strangers = root.owner, root.strangers()
    except OSError as error:
        why = str(error)
        if path.is_symlink() and not path.exists():
            why = f"it is a link to {os.readlink(path)}, which is not there"
        elif path.exists() and not path.is_dir():
            why = "it is a file"
        raise DirectoryNotWritable(f"{path} cannot be made a checkpoint directory: {why}") from error
    if owner != os.geteuid():
        raise ForeignOwner(
            f"{path} belongs to user {owner}, this is user {os.geteuid()}; a checkpoint directory belongs to the user "
            "who trains: choose another one"
        )
    if strangers:
        raise _untrusted(strangers)
    if not os.access(path, os.W_OK | os.X_OK) or os.statvfs(path).f_flag & os.ST_RDONLY:
        raise DirectoryNotWritable(f"{path} cannot be written to (ls -ld {path}; findmnt -T {path})")


def refuse_unsafe_way(path: Path) -> None:
    """Refuse a path that others could let lead elsewhere: to another training of this user, whose checkpoints retention
    would remove.

    Raises:
        ForeignOwner: they could.
        OSError: something on the way cannot be entered.
    """
    if reason := unsafe_above(path, of_colleagues=True, own_links=True):
        raise _untrusted(reason)


def _untrusted(reason: str) -> ForeignOwner:
    return ForeignOwner(
        f"{reason}. What others can write to, or put another one in the place of, holds no "
        "checkpoints that can be trusted: change the mode, or choose another directory"
    )


def take(
    path: Path,
    identity: JobIdentity,
    keep: Retention,
    seen: Iterable[tuple[Generation, float]],
    now_s: float,
    above: int = 0,
) -> tuple[FileLock, int]:
    """Become the owner of a directory.

    Args:
        path: a directory that `prepare_directory` let pass.
        identity: the new owner.
        keep: which checkpoints stay.
        seen: committed checkpoints, and when each was written.
        now_s: seconds since 1970.
        above: an attempt that the directory may not know of; the new one gets a larger number.

    Returns:
        The lock, to be held while the attempt runs, and the attempt's number.

    Raises:
        DirectoryInUse: a living process owns it.
        DirectoryNotWritable: it cannot be written to.
    """
    try:
        lock = _lock(path, identity)
    except OSError as error:
        raise DirectoryNotWritable(f"{path} cannot be locked: {error}") from error
    if lock is None:
        raise _in_use(path)
    try:
        with Directory.open(path) as root:
            for name in root.names():
                if is_temporary(name, _OWNER):  # made with this lock only: whoever began it is dead
                    root.unlink(name, missing_ok=True)
        events = history(path)
        last_seen = dict(sorted((generation.attempt, time_s) for generation, time_s in seen))  # the newest time of each
        owner = read_owner(path)
        with Directory.open(path, group_reads=True) as root:
            root.check_own()
            lineage = begin_start(root, is_new=not last_seen and not root.has(_OWNER))
            branches = (branch.attempt for branch in lineage.branches)
            known = [above, owner.attempt if owner else 0, *(event.attempt for event in events), *last_seen, *branches]
            attempt = _attempt_after(max(known), path)
            reach("owner.numbered")
            # On disk before anybody uses it: no other attempt may have the same.
            root.write_whole(_OWNER, msgspec.json.encode(Owner(attempt, identity, keep)))
        reach("owner.written")
        _append(path, [*_died(events, last_seen), Event("started", attempt, now_s, identity)])
    except OSError as error:
        lock.release()
        raise DirectoryNotWritable(f"{path} cannot be written to: {error}") from error
    except BaseException:
        lock.release()
        raise
    return lock, attempt


def _in_use(path: Path) -> DirectoryInUse:
    owner = read_owner(path)
    named = owner.identity if owner else "a process that does not say who it is"
    if owner and owner.identity.is_gone():
        return DirectoryInUse(
            f"{path} is locked, and not by its last owner, which is gone ({named}). Who holds the lock: fuser -v "
            f"{path / _LOCK}. It may be a process of that job, or somebody who could read the file: end that process"
        )
    return DirectoryInUse(
        f"{path} is in use by {named}; two jobs cannot share a checkpoint directory: end that job (scancel), "
        "or choose another directory"
    )


def _attempt_after(known: int, path: Path) -> int:
    if known >= MAX_NUMBER:
        raise DirectoryNotWritable(
            f"{path}: something in it is of attempt {known}, and attempts are counted to {MAX_NUMBER}: "
            f"take away what no training has put there (hetstream ckpt ls {path}; {_OWNER}; {_HISTORY})"
        )
    return known + 1


def _lock(path: Path, identity: JobIdentity) -> FileLock | None:
    """The owner's lock; None while another job holds it, or this job all the time that it is waited for."""
    deadline_s = time.monotonic() + _PATIENCE_S
    has_said = False
    while True:
        with Directory.open(path) as root:
            lock = FileLock.try_exclusive(path / _LOCK, root)
        owner = None if lock else read_owner(path)
        if owner is None or owner.identity.job != identity.job or owner.identity.job == NO_JOB:
            return lock
        if time.monotonic() > deadline_s:
            return None
        if not has_said:
            has_said = True
            _log.warning(
                "%s is still locked by an earlier start of this job (%s): waiting up to %g s until it is gone",
                path,
                owner.identity,
                _PATIENCE_S,
            )
        time.sleep(_POLL_S)


def renumber(path: Path, attempt: int, now_s: float) -> int:
    """Let the running attempt end and begin the next one, by the same owner, who keeps the lock; its number."""
    owner = read_owner(path)
    if owner is None or owner.attempt != attempt:
        raise DirectoryReplaced(
            f"{path} does not say any more that attempt {attempt} has it: somebody has changed owner.json, or deleted "
            "the directory. End this training, and start it again"
        )
    with Directory.open(path, group_reads=True) as root:
        root.check_own()
        root.write_whole(_OWNER, msgspec.json.encode(msgspec.structs.replace(owner, attempt=attempt + 1)))
    _append(path, [Event("ended", attempt, now_s), Event("started", attempt + 1, now_s, owner.identity)])
    return attempt + 1


def end(path: Path, attempt: int, now_s: float) -> None:
    """Write down that an attempt ended by itself."""
    _append(path, [Event("ended", attempt, now_s)])


def hand_over(path: Path, attempt: int, to: JobIdentity, step: int, last_step_s: float) -> None:
    """Write down that an attempt has ended for another to go on.

    Args:
        path: the directory.
        attempt: that ends.
        to: who goes on.
        step: the last one that was trained.
        last_step_s: when it ended, in seconds since 1970.
    """
    _append(path, [Event("handed over", attempt, last_step_s, to, step)])


def take_over(path: Path, attempt: int, identity: JobIdentity, now_s: float) -> Event:
    """Write down that an attempt goes on where another one has ended for it; what is written.

    Args:
        path: the directory.
        attempt: that goes on.
        identity: who it is.
        now_s: when its first step can begin, in seconds since 1970.
    """
    handed = next(
        (event for event in reversed(history(path)) if event.event == "handed over" and event.identity == identity),
        None,
    )
    pause_s = now_s - handed.time_s if handed else None
    event = Event("took over", attempt, now_s, identity, handed.step if handed else None, pause_s)
    _append(path, [event])
    return event


def read_owner(path: Path) -> Owner | None:
    """Return the newest attempt; None if there was none, or its file is no longer to be read."""
    try:
        with Directory.open(path) as root:
            return typed_json.decode(root.read(_OWNER, _MAX_OWNER_BYTES), Owner)
    except (FileNotFoundError, UntrustedFile, msgspec.MsgspecError, ValueError, RecursionError):
        return None


def past_attempts(path: Path) -> list[Attempt]:
    """Return how long the attempts before the newest one ran and how they ended, as far as the history knows."""
    started: dict[int, float] = {}
    attempts = []
    for event in history(path):
        if event.event == "started":
            started[event.attempt] = event.time_s
        elif event.event in _ENDS and event.attempt in started:
            attempts.append(Attempt(started.pop(event.attempt), event.time_s, event.event == "died"))
    return attempts


def _died(events: Iterable[Event], last_seen: dict[int, float]) -> list[Event]:
    """The ends that attempts could not write down themselves; at the time of their newest checkpoint."""
    open_starts: dict[int, Event] = {}
    for event in events:
        if event.event == "started":
            open_starts[event.attempt] = event
        elif event.event in _ENDS:
            open_starts.pop(event.attempt, None)
    return [
        Event("died", start.attempt, max(start.time_s, last_seen.get(start.attempt, start.time_s)))
        for start in open_starts.values()
    ]


def history(path: Path) -> list[Event]:
    """Return the lines of the history; a crash may have cut one off, and the one behind it begins a line of its own."""
    try:
        with Directory.open(path) as root:
            lines = root.read(_HISTORY, _MAX_HISTORY_BYTES).splitlines()
    except FileNotFoundError:
        return []
    except UntrustedFile as error:
        _log.warning("the time between failures is not known: %s", error)
        return []
    events = []
    for line in lines:
        try:
            events.append(typed_json.decode(line, Event))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            continue
    return events


def _append(path: Path, events: Iterable[Event]) -> None:
    with Directory.open(path) as root:
        descriptor = root.open_file(_HISTORY, os.O_RDWR | os.O_APPEND | os.O_CREAT)
        with open(descriptor, "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            file.write(b"\n" * torn + b"".join(msgspec.json.encode(event) + b"\n" for event in events))
            os.fsync(descriptor)
        root.sync()


# The request for a checkpoint directory that a living job has, as files beside its owner's.
#
#     DIR/handover.json      who asks whom; appears whole
#     DIR/.handover.lock     locked by who asks for as long as it wants the directory: its sign of life
#
# A request whose lock is free counts for nothing, so one that died needs no cleaning up. What follows from a request is
# decided in `flash/ownership.py`.

_REQUEST = "handover.json"
_HANDOVER_REQUEST_LOCK = ".handover.lock"
_MAX_REQUEST_BYTES = 64 << 10
# Whoever looks whether a successor lives holds its lock for a moment.
_GRACE_S = 1.0


class HandoverRequest(msgspec.Struct, frozen=True):
    """A job wants the directory of another.

    Attributes:
        attempt: that is asked to stop.
        successor: who asks.
        time_s: when, in seconds since 1970.
    """

    attempt: int
    successor: JobIdentity
    time_s: float


def read_request(path: Path) -> HandoverRequest | None:
    """Return the newest request; None if there is none. Cheap: an owner looks about once a second."""
    try:
        with Directory.open(path) as root:
            return typed_json.decode(root.read(_REQUEST, _MAX_REQUEST_BYTES), HandoverRequest)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def living_request(path: Path) -> HandoverRequest | None:
    """Return the request of a living process."""
    request = read_request(path)
    if request is None:
        return None
    with Directory.open(path) as root:
        return request if is_locked(path / _HANDOVER_REQUEST_LOCK, root) else None


class Claim:
    """A successor's claim to a directory, from its first request to `withdraw`.

    Args:
        path: the directory.
        successor: this process.

    Raises:
        DirectoryInUse: another living process has asked for it.
    """

    def __init__(self, path: Path, successor: JobIdentity) -> None:
        self._path = path
        self._successor = successor
        try:
            with Directory.open(path) as root:
                self._lock = FileLock.wait_exclusive(path / _HANDOVER_REQUEST_LOCK, _GRACE_S, root)
        except HetstreamError as error:
            other = read_request(path)
            named = other.successor if other else "another process"
            raise DirectoryInUse(f"{path} is being handed over to {named}: a training has one successor") from error
        reach("handover.claimed")

    def ask(self, attempt: int, now_s: float) -> None:
        """Ask an owner, in place of any that was asked before."""
        with Directory.open(self._path) as root:
            root.check_own()
            root.write_whole(_REQUEST, msgspec.json.encode(HandoverRequest(attempt, self._successor, now_s)))
        reach("handover.asked")

    def withdraw(self) -> None:
        """Give the claim up, or have no more need of it. A second time does nothing."""
        if self._lock.is_held:
            with contextlib.suppress(OSError), Directory.open(self._path) as root:
                root.unlink(_REQUEST, missing_ok=True)
        self._lock.release()


# The file that tells a directory of checkpoints from any other, and says where its training went back.
#
#     DIR/.lineage.json    the directory's random id, its starts, and its branches, see `record/lineage.py`
#
# Memory outlives a directory that somebody deletes, and is newer than one that somebody rolls back, or puts a copy in
# the place of. A store in memory knows the directory and the start of the job that it was saved for, so what is in it
# is used for a directory with this start alone. Rank 0 writes the file, with the directory's lock held; every
# checkpoint writer looks into it before it writes a part.

_LINEAGE = ".lineage.json"
_MAX_LINEAGE_BYTES = 1 << 20
# Going back is what people do, by hand. More of it than this is a program's mistake, and what is older is forgotten.
_MAX_BRANCHES = 1000
_ID_BYTES = 16
_START_BYTES = 8
# Starts that are remembered: memory of an older one is not used any more.
_MAX_STARTS = 100


def read_lineage(root: Directory) -> Lineage:
    """Return the lineage of an open directory; an empty one where there is none.

    Raises:
        DamagedLineage: there is one, and it is not to be used.
    """
    try:
        return typed_json.decode(root.read(_LINEAGE, _MAX_LINEAGE_BYTES), Lineage)
    except FileNotFoundError:
        return Lineage()
    except (UntrustedFile, msgspec.MsgspecError, ValueError, RecursionError) as error:
        path = root.path / _LINEAGE
        raise DamagedLineage(
            f"{path} says where this training went back, and so which checkpoints count, and cannot be used: "
            f"{first_line(error)}. Put the file back from a backup; or remove it: then all checkpoints count, the "
            "newest first, and what memory holds is given up"
        ) from error


def lineage_of(path: Path) -> Lineage:
    """Return the lineage of a directory; an empty one if it has none, or is not there.

    Raises:
        DamagedLineage: there is one, and it is not to be used.
        CheckpointError: it cannot be read.
    """
    try:
        with Directory.open(path) as root:
            return read_lineage(root)
    except FileNotFoundError:
        return Lineage()
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. It says where training went back to an earlier step, and so which "
            "checkpoints count. "
            "Each start of the training writes this file anew, for its owner alone: chmod g+r"
        ) from error


def write_lineage(root: Directory, lineage: Lineage) -> None:
    """Replace the lineage of a directory. For who has its lock."""
    branches, starts = lineage.branches[:_MAX_BRANCHES], lineage.starts[:_MAX_STARTS]
    kept = msgspec.structs.replace(lineage, branches=branches, starts=starts)
    root.write_whole(_LINEAGE, msgspec.json.encode(kept))


def begin_start(root: Directory, *, is_new: bool) -> Lineage:
    """Write down another start of the job in a directory, which gets an id unless it has one. For who has its lock.

    Args:
        root: the directory.
        is_new: nothing of a training is in it, whatever it is called: it gets another id, and its lineage ends.
    """
    lineage = read_lineage(root)
    if is_new or not lineage.directory_id:
        lineage = Lineage(secrets.token_hex(_ID_BYTES))
    path = printable(os.path.realpath(root.path))
    if lineage.path not in ("", path):
        _log.warning(
            "%s holds the training that was last started as %s: it was renamed, moved or copied, or somebody has put "
            "it in the place of another one. This training goes on from its checkpoints, and removes old ones; if it "
            "should not, end it and give it another directory",
            path,
            printable(lineage.path),
        )
    starts = (secrets.token_hex(_START_BYTES), *lineage.starts)
    lineage = msgspec.structs.replace(lineage, starts=starts, path=path)
    write_lineage(root, lineage)
    return lineage


def check_start(root: Directory, start_id: str) -> None:
    """Refuse a directory that is not the one that a store was made for.

    Args:
        root: the directory.
        start_id: of the start of the job that made the store; "": any directory will do.

    Raises:
        DirectoryReplaced: it is another.
    """
    if start_id and not read_lineage(root).knows(start_id):
        raise DirectoryReplaced(
            f"{root.path} is not the directory that this training began in: somebody has deleted or emptied that one, "
            "or has put a copy from before in its place. Nothing is written to it. End this training; what starts "
            "there next goes on from what is there"
        )
