"""The files by which embedding servers say where they are: `embedding-servers/NAME.json` beside the address file."""

from __future__ import annotations

import contextlib
from pathlib import Path

import msgspec

from hetstream.base.files import Directory

# Below the folder of the address file.
REGISTRY = "embedding-servers"
_SUFFIX = ".json"
_MAX_BYTES = 1 << 20


class Registration(msgspec.Struct, frozen=True):
    """What one server says of itself, about once a second.

    Attributes:
        name: of the server, also after it was started again.
        start: anew for each start of its process.
        addresses: where trainers connect, the best transport first.
        log: its directory.
        draining: it is about to end, and wants its parts taken away.
        rows, bytes: that it has in memory.
        limit_bytes: of its memory; 0 without one.
        reads: rows that were read since its start.
        written_s: when it said so, by the clock of the file system, in seconds since 1970.
    """

    name: str
    start: str
    addresses: list[str]
    log: str
    draining: bool = False
    rows: int = 0
    bytes: int = 0
    limit_bytes: int = 0
    reads: int = 0
    written_s: float = 0.0

    def reads_per_s(self, before: Registration) -> float | None:
        """Return how many rows were read each second since another look; None if that was of another start, or is as
        old.
        """
        if before.start != self.start or before.written_s >= self.written_s:
            return None
        return (self.reads - before.reads) / (self.written_s - before.written_s)


def read_registrations(folder: Path) -> dict[str, Registration]:
    """Return all servers that have registered, by name; a file that cannot be read says nothing.

    Args:
        folder: `REGISTRY` beside the address file.
    """
    found = {}
    with contextlib.suppress(OSError), Directory.open(folder) as directory:
        for name in directory.names():
            with contextlib.suppress(OSError, msgspec.MsgspecError):
                if name.endswith(_SUFFIX):
                    written_s = directory.status(name).st_mtime
                    said = msgspec.json.decode(directory.read(name, _MAX_BYTES), type=Registration)
                    found[said.name] = msgspec.structs.replace(said, written_s=written_s)
    return found
