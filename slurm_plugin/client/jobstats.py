"""What jobstats has written into a job's AdminComment: how busy its GPUs were, and its CPU time. Pure; reads only.

jobstats (Princeton's) puts `JS1:` and a compressed JSON document there when a job ends; operators alone can write it.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass

import msgspec

from hetstream.base import typed_json

_MARK = "JS1:"
# A job of a thousand nodes has less; what unpacks to more is none of it.
_MAX_BYTES = 4 << 20


class _Node(msgspec.Struct):
    total_time: float = 0.0
    gpu_utilization: dict[str, float] = msgspec.field(default_factory=dict)


class _Document(msgspec.Struct):
    nodes: dict[str, _Node]


@dataclass(frozen=True)
class Told:
    """What was measured.

    Attributes:
        gpu_share: how busy the job's GPUs were on average, 0 to 1; None if it had none.
        cpu_used_s: CPU time of its processes.
    """

    gpu_share: float | None
    cpu_used_s: float


def told_by_jobstats(comment: str) -> Told | None:
    """Read an AdminComment; None for what is not jobstats', or was too short to measure (`JS1:Short`, `JS1:None`)."""
    if not comment.startswith(_MARK):
        return None
    try:
        unpack = zlib.decompressobj(wbits=31)  # gzip
        text = unpack.decompress(base64.b64decode(comment.removeprefix(_MARK), validate=True), _MAX_BYTES)
        if not unpack.eof:
            return None
        nodes = typed_json.decode(text, _Document).nodes.values()
    except (binascii.Error, ValueError, zlib.error, msgspec.DecodeError):
        return None
    busy = [percent for node in nodes for percent in node.gpu_utilization.values()]
    share = min(1.0, max(0.0, sum(busy) / len(busy) / 100)) if busy else None
    return Told(share, sum(node.total_time for node in nodes))
