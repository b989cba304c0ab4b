"""How savers find each other and know each other: small files in the checkpoint directory, mode 0600.

    DIR/replicas/key-3              random key of attempt 3; rank 0 writes it before any other rank starts
    DIR/replicas/rank-00001.json    where the saver of rank 1 listens, and in which attempt

Who can read the directory is the user who trains; others have no key and get nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path

import msgspec

from checkpoint import typed_json
from checkpoint.errors import ForeignOwner, ReplicaError
from checkpoint.files import write_whole

_FOLDER = "replicas"
_KEY_BYTES = 32
_MAX_FILE_BYTES = 4096
_TRIES = 3


class Endpoint(msgspec.Struct, frozen=True):
    """Where a saver listens.

    Attributes:
        attempt: of the job, when it began to.
        rank: of its trainer.
        address: name or number of the host.
        port: of TCP.
    """

    attempt: int
    rank: int
    address: str
    port: int


def make_key(directory: Path, attempt: int) -> None:
    """Write a new attempt's key; what earlier attempts left goes. For rank 0.

    Raises:
        OSError: the directory cannot be written to.
    """
    folder = directory / _FOLDER
    key = secrets.token_hex(_KEY_BYTES).encode()
    for _ in range(_TRIES):
        # The last saver of the attempt before may remove the folder meanwhile.
        with contextlib.suppress(FileNotFoundError):
            folder.mkdir(mode=0o700, exist_ok=True)
            for left_over in list(folder.iterdir()):
                left_over.unlink(missing_ok=True)
            return write_whole(_key_path(directory, attempt), key)
    raise FileNotFoundError(f"{folder} is removed again and again")


def read_key(directory: Path, attempt: int) -> bytes:
    """The key of an attempt.

    Raises:
        ReplicaError: there is none.
        ForeignOwner: it is another user's, or others can read it.
    """
    path = _key_path(directory, attempt)
    text = _read_private(path)
    key = bytes.fromhex(text.decode("ascii")) if text and len(text) == 2 * _KEY_BYTES else b""
    if len(key) != _KEY_BYTES:
        raise ReplicaError(f"{path} is missing or no key: the attempt has ended, or rank 0 has no replicas")
    return key


def remove_key(directory: Path, attempt: int) -> None:
    """The attempt has ended. For rank 0."""
    with contextlib.suppress(OSError):
        _key_path(directory, attempt).unlink(missing_ok=True)
        (directory / _FOLDER).rmdir()  # unless a saver is still listed; the last one removes it


def publish(directory: Path, endpoint: Endpoint) -> None:
    """List a saver.

    Raises:
        OSError: the directory cannot be written to.
    """
    write_whole(_endpoint_path(directory, endpoint.rank), msgspec.json.encode(endpoint))


def withdraw(directory: Path, endpoint: Endpoint) -> None:
    """Take a saver off the list, unless another has taken its place."""
    with contextlib.suppress(OSError, ForeignOwner):
        if find(directory, endpoint.rank, endpoint.attempt) == endpoint:
            _endpoint_path(directory, endpoint.rank).unlink(missing_ok=True)
        (directory / _FOLDER).rmdir()


def find(directory: Path, rank: int, attempt: int) -> Endpoint | None:
    """Where the saver of a rank listens in this attempt; None while it does not.

    Raises:
        ForeignOwner: the file is another user's.
    """
    with contextlib.suppress(msgspec.MsgspecError):
        text = _read_private(_endpoint_path(directory, rank))
        endpoint = typed_json.decode(text, Endpoint) if text else None
        if endpoint and (endpoint.rank, endpoint.attempt) == (rank, attempt):
            return endpoint
    return None


def _key_path(directory: Path, attempt: int) -> Path:
    return directory / _FOLDER / f"key-{attempt}"


def _endpoint_path(directory: Path, rank: int) -> Path:
    return directory / _FOLDER / f"rank-{rank:05}.json"


def _read_private(path: Path) -> bytes | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise ForeignOwner(f"{path} belongs to user {status.st_uid} or is open to others; it is not used")
        return file.read(_MAX_FILE_BYTES)
