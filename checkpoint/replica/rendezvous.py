"""How checkpoint writers find each other and know each other: small files in the checkpoint directory, mode 0600.

    DIR/replicas/key-3              random key of attempt 3; rank 0 writes it before any other rank starts
    DIR/replicas/rank-00001.json    where the checkpoint writer of rank 1 listens, and in which attempt

Who can read the directory is the user who trains; others have no key and get nothing.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory
from hetstream.checkpoint.errors import ForeignOwner, ReplicaError

_FOLDER = "replicas"


_KEY_BYTES = 32


_MAX_FILE_BYTES = 4096


_TRIES = 3


class Endpoint(msgspec.Struct, frozen=True):
    """Where a checkpoint writer listens.

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
        OSError: the directory cannot be written to, or is not this user's alone.
    """
    key = secrets.token_hex(_KEY_BYTES).encode()
    for _ in range(_TRIES):
        # The last checkpoint writer of the attempt before may remove the folder meanwhile.
        with contextlib.suppress(FileNotFoundError), _folder(directory, make=True) as folder:
            for left_over in folder.names():
                folder.unlink(left_over, missing_ok=True)
            return folder.write_whole(_key_name(attempt), key)
    raise FileNotFoundError(f"{directory / _FOLDER} is removed again and again")


def read_key(directory: Path, attempt: int) -> bytes:
    """The key of an attempt.

    Raises:
        ReplicaError: there is none.
        ForeignOwner: it is another user's, or others can read it.
    """
    text = _read_private(directory, _key_name(attempt))
    key = bytes.fromhex(text.decode("ascii")) if text and len(text) == 2 * _KEY_BYTES else b""
    if len(key) != _KEY_BYTES:
        raise ReplicaError(
            f"{directory / _FOLDER / _key_name(attempt)} is missing or no key: the attempt has ended, or rank 0 has no "
            "replicas"
        )
    return key


def remove_key(directory: Path, attempt: int) -> None:
    """The attempt has ended. For rank 0."""
    _remove(directory, _key_name(attempt))


def publish(directory: Path, endpoint: Endpoint) -> None:
    """List a checkpoint writer.

    Raises:
        OSError: the directory cannot be written to.
    """
    with _folder(directory) as folder:
        folder.write_whole(_endpoint_name(endpoint.rank), msgspec.json.encode(endpoint))


def withdraw(directory: Path, endpoint: Endpoint) -> None:
    """Take a checkpoint writer off the list, unless another has taken its place."""
    with contextlib.suppress(ForeignOwner):
        is_listed = find(directory, endpoint.rank, endpoint.attempt) == endpoint
        _remove(directory, _endpoint_name(endpoint.rank) if is_listed else None)


def find(directory: Path, rank: int, attempt: int) -> Endpoint | None:
    """Where the checkpoint writer of a rank listens in this attempt; None while it does not.

    Raises:
        ForeignOwner: the file is another user's.
    """
    with contextlib.suppress(msgspec.MsgspecError):
        text = _read_private(directory, _endpoint_name(rank))
        endpoint = typed_json.decode(text, Endpoint) if text else None
        if endpoint and (endpoint.rank, endpoint.attempt) == (rank, attempt):
            return endpoint
    return None


def _key_name(attempt: int) -> str:
    return f"key-{attempt}"


def _endpoint_name(rank: int) -> str:
    return f"rank-{rank:05}.json"


@contextlib.contextmanager
def _folder(directory: Path, *, make: bool = False) -> Iterator[Directory]:
    """The folder of keys and endpoints, in a directory that is this user's alone."""
    with Directory.open(directory) as root:
        root.check_own()
        with root.make(_FOLDER) if make else root.enter(_FOLDER) as folder:
            folder.check_own()
            yield folder


def _remove(directory: Path, name: str | None) -> None:
    """Remove a file, and the folder with the last one."""
    with contextlib.suppress(OSError), Directory.open(directory) as root:
        root.check_own()
        if name is not None:
            with root.enter(_FOLDER) as folder:
                folder.unlink(name, missing_ok=True)
        os.rmdir(_FOLDER, dir_fd=root.descriptor)  # unless another checkpoint writer is still listed


def _read_private(directory: Path, name: str) -> bytes | None:
    path = directory / _FOLDER / name
    try:
        with Directory.open(directory) as root, root.enter(_FOLDER) as folder:
            status = folder.status(name)
            if status.st_uid != os.geteuid() or status.st_mode & 0o077:
                raise ForeignOwner(f"{path} belongs to user {status.st_uid} or is open to others; it is not used")
            return folder.read(name, _MAX_FILE_BYTES)
    except OSError:
        return None
