"""The last reading of the cluster on its way from the site daemon to the commands that only look. Pure.

The daemon packs it, `slurm_plugin/cli/cluster_source.py` unpacks it. Where Slurm shows some users less
(`client/read.py`) the daemon keeps it to itself: nobody learns more from it than from Slurm.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import msgspec

from hetstream.base import typed_json
from hetstream.hetjob.errors import SiteError
from hetstream.slurm_plugin.client.model import Snapshot

# What `Snapshot.source` is then.
SOURCE = "site daemon"
# 5,000 jobs on 2,000 nodes are 0.4 MB.
MAX_PACKED_BYTES = 2 << 20
# About ten times as much, for such texts; a reading that says it is far larger is none.
_MAX_BYTES = 64 << 20
# The settings that commands look at in a reading which they need not make themselves.
_SETTINGS = (
    "AccountingStorageEnforce", "AccountingStorageType", "ClusterName", "JobAcctGatherType", "MCSPlugin", "MinJobAge",
    "PreemptParameters", "PreemptType", "PrivateData", "SchedulerParameters", "SchedulerType", "SelectType",
    "SelectTypeParameters", "SlurmUser", "TopologyPlugin",
)  # fmt: skip


def pack(snapshot: Snapshot) -> bytes:
    """Return a snapshot as compressed JSON, with the settings that commands look at."""
    settings = {name: snapshot.config[name] for name in _SETTINGS if name in snapshot.config}
    return zlib.compress(typed_json.encode(replace(snapshot, config=settings)), 1)


def unpack(data: bytes) -> Snapshot:
    """Read what `pack` wrote; its source is the site daemon.

    Raises:
        SiteError: it is none.
    """
    try:
        unpacking = zlib.decompressobj()
        text = unpacking.decompress(data, _MAX_BYTES)
        if not unpacking.eof:
            raise SiteError(f"a reading of the site daemon is cut, or has more than {_MAX_BYTES} bytes")
        return replace(typed_json.decode(text, Snapshot), source=SOURCE)
    except (zlib.error, msgspec.MsgspecError) as error:
        raise SiteError(f"a reading of the site daemon is of another form: {error}") from error
