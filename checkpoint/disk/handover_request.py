"""The request for a checkpoint directory that a living job has, as files beside its owner's.

    DIR/handover.json      who asks whom; appears whole
    DIR/.handover.lock     locked by who asks for as long as it wants the directory: its sign of life

A request whose lock is free counts for nothing, so one that died needs no cleaning up. What follows from a request is
decided in `policy/handover.py`.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.base.errors import HetstreamError
from hetstream.base.files import Directory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.errors import DirectoryInUse
from hetstream.checkpoint.faults import reach
from hetstream.checkpoint.locks import FileLock, is_locked

_REQUEST = "handover.json"
_LOCK = ".handover.lock"
_MAX_REQUEST_BYTES = 64 << 10
# Whoever looks whether a successor lives holds its lock for a moment.
_GRACE_S = 1.0


class Request(msgspec.Struct, frozen=True):
    """A job wants the directory of another.

    Attributes:
        attempt: that is asked to stop.
        successor: who asks.
        time_s: when, in seconds since 1970.
    """

    attempt: int
    successor: JobIdentity
    time_s: float


def read_request(path: Path) -> Request | None:
    """The newest request; None if there is none. Cheap: an owner looks about once a second."""
    try:
        with Directory.open(path) as root:
            return typed_json.decode(root.read(_REQUEST, _MAX_REQUEST_BYTES), Request)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def living_request(path: Path) -> Request | None:
    """The request of a living process."""
    request = read_request(path)
    if request is None:
        return None
    with Directory.open(path) as root:
        return request if is_locked(path / _LOCK, root) else None


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
                self._lock = FileLock.wait_exclusive(path / _LOCK, _GRACE_S, root)
        except HetstreamError as error:
            other = read_request(path)
            named = other.successor if other else "another process"
            raise DirectoryInUse(f"{path} is being handed over to {named}: a training has one successor") from error
        reach("handover.claimed")

    def ask(self, attempt: int, now_s: float) -> None:
        """Ask an owner, in place of any that was asked before."""
        with Directory.open(self._path) as root:
            root.check_own()
            root.write_whole(_REQUEST, msgspec.json.encode(Request(attempt, self._successor, now_s)))
        reach("handover.asked")

    def withdraw(self) -> None:
        """Give the claim up, or have no more need of it. A second time does nothing."""
        if self._lock.is_held:
            with contextlib.suppress(OSError), Directory.open(self._path) as root:
                root.unlink(_REQUEST, missing_ok=True)
        self._lock.release()
