"""How other programs of the node ask the coordinator who is on its GPUs: one message, and the table comes as a file.

Root and the coordinator's own user see all processes, everybody else his own. The table is a sealed memory file, so
that its size does not matter to a coordinator that waits for nobody.
"""

from __future__ import annotations

import fcntl
import os

import msgspec

from hetstream.base.typed_json import decode, encode
from hetstream.hetjob.errors import GpuJobRefused
from hetstream.hetjob.gpu.introduction import ask
from hetstream.hetjob.gpu.pages import VERSION
from hetstream.slurm_plugin.coordinator.table import GpuTable, read_table

_MOST_BYTES = 2**24
_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class Look(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="ask", tag="look"):
    """Asks for the table.

    Attributes:
        version: of the messages of the coordinator's socket.
    """

    version: int


def asks_to_look(message: bytes) -> bool:
    """Whether the first message of a connection asks for the table.

    Raises:
        GpuJobRefused: it does, and is of another version.
    """
    try:
        version = decode(message, Look).version
    except msgspec.MsgspecError:
        return False
    if version != VERSION:
        raise GpuJobRefused(f"its hetstream speaks protocol {version}, and this coordinator protocol {VERSION}")
    return True


def sealed_file(text: bytes) -> int:
    """A descriptor of a memory file with this text, which nobody can change."""
    descriptor = os.memfd_create("hetstream-gpu-table", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        written = 0
        while written < len(text):
            written += os.pwrite(descriptor, text[written:], written)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def look(path: str, coordinator_uid: int | None = None) -> GpuTable:
    """Ask the coordinator that listens at a path.

    Args:
        path: of its socket.
        coordinator_uid: user that it may run as, beside root and this user; None: nobody else.

    Raises:
        GpuCoordinatorError: nobody answers there, or a user who is not the coordinator's listens.
        GpuJobRefused: it is of another version.
        HetstreamError: so is its table.
    """
    connection, _, descriptors = ask(path, encode(Look(VERSION)), coordinator_uid, num_descriptors=1)
    connection.close()
    with open(descriptors[0], "rb") as file:
        return read_table(file.read(_MOST_BYTES))
