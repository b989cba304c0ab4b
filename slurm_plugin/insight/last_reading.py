"""The last reading of the cluster on its way from the site daemon to the commands that only look. Pure.

The daemon packs it, `slurm_plugin/cli/reading.py` unpacks it. `hidden_by` says whether every user of the site may see
all of it: Slurm shows users less where the site asks for that, and nobody learns more from the daemon than from Slurm.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
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
    "AccountingStorageEnforce", "AccountingStorageType", "ClusterName", "MCSPlugin", "MinJobAge", "PrivateData",
    "SelectType", "SelectTypeParameters", "TopologyPlugin",
)  # fmt: skip
# Words of PrivateData about what slurmdbd and the event log say, and `cloud`, which shows more instead of less:
# https://slurm.schedmd.com/slurm.conf.html#OPT_PrivateData
_HIDES_NOTHING_HERE = frozenset({"", "none", "accounts", "cloud", "events", "usage", "users"})
_NO_PLUGIN = frozenset({"", "(null)", "none", "mcs/none"})


def pack(snapshot: Snapshot) -> bytes:
    """A snapshot as compressed JSON, with the settings that commands look at."""
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


def hidden_by(config: Mapping[str, str]) -> str:
    """The setting by which Slurm hides jobs, nodes, partitions or reservations from some users; empty if none does."""
    private = config.get("PrivateData", "none")
    if set(private.lower().split(",")) - _HIDES_NOTHING_HERE:
        return f"PrivateData={private}"
    labels = config.get("MCSPlugin", "")
    return "" if labels.lower() in _NO_PLUGIN else f"MCSPlugin={labels}"
