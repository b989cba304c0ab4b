"""MUNGE credentials: who wrote something, by the word of this cluster's munged. Used by both sides over TCP.

It runs the commands `munge` and `unmunge`. A credential is encrypted for one reader, names its writer's user id, and is
good for five minutes and, at one munged, once.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hetstream.hetjob.errors import SiteError

# munged answers within a millisecond or so; it is on the same host.
_TIMEOUT_S = 5.0


class Munge:
    """The munged of this host.

    Args:
        socket: where it listens; None for the usual place.
    """

    def __init__(self, socket: Path | None = None) -> None:
        self._options = [f"--socket={socket}"] if socket else []

    def encode(self, payload: bytes, reader_uid: int, timeout_s: float = _TIMEOUT_S) -> bytes:
        """Write a credential that only processes of one user can read.

        Raises:
            SiteError: munged does not answer, or MUNGE is not installed.
        """
        argv = ["munge", *self._options, f"--restrict-uid={reader_uid}"]
        return _run(argv, payload, timeout_s).strip()

    def check(self) -> None:
        """Refuse a host whose munged does not do what both sides need.

        Raises:
            SiteError: MUNGE is not installed, not running, or does not know its own credentials.
        """
        self.decode(self.encode(b"", os.geteuid()))

    def decode(self, credential: bytes) -> tuple[int, bytes]:
        """Who wrote a credential, and what.

        Raises:
            SiteError: it is none, was read before, is too old, or is for another reader.
        """
        said = _run(["unmunge", *self._options, "--keys=STATUS,UID"], credential, _TIMEOUT_S)
        head, _, payload = said.partition(b"\n\n")  # the head comes first, whatever the payload looks like
        uid = re.search(rb"^UID:\s.*\((\d+)\)$", head, re.MULTILINE)
        if uid is None:
            raise SiteError(f"unmunge names no user: {head[:200]!r}. Check: munge -n | unmunge")
        return int(uid[1]), payload


def _run(argv: Sequence[str], data: bytes, timeout_s: float) -> bytes:
    try:
        done = subprocess.run(argv, input=data, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise SiteError(f"{argv[0]} did not answer within {timeout_s:g} s. Check: munge -n | unmunge") from error
    except OSError as error:
        raise SiteError(f"{argv[0]}: {error.strerror}. The site daemon is reached over TCP with MUNGE") from error
    if done.returncode:
        # Of a credential that is one, and does not count, unmunge says why as STATUS.
        status = re.search(rb"\ASTATUS:\s+(.*)$", done.stdout, re.MULTILINE)
        said = (done.stderr.strip() or (status[1] if status else b"nothing")).decode(errors="replace")
        raise SiteError(f"{argv[0]} exited with {done.returncode}: {said!r}. Check: munge -n | unmunge")
    return done.stdout
