"""What `hetstream doctor` looks at, and what it finds. Pure data."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetstream.slurm_plugin.client.model import Snapshot


class Level(enum.Enum):
    """How bad a finding is."""

    PROBLEM = "problem"  # something of hetstream does not work
    WARNING = "warning"  # it works badly, or could surprise
    NOTE = "note"  # a feature is off


@dataclass(frozen=True)
class Facts:
    """What is examined.

    Attributes:
        snapshot: the cluster.
        client_version: of Slurm's commands here.
        gres_conf, cgroup_conf: those files; None if they cannot be read here.
        unresolved: host names that have no address here.
        lua_needed: of each Lua file that the configuration asks for, itself and what it loads.
        lua_missing: of the same, which files that it needs are not here.
        lua_idle: of the same, which of hetstream's modules are not here.
        node_scripts: of each of Slurm's `Prolog`, `Epilog` and `TaskProlog` that is set, the text of the program, by
            its path; None for one that is not here or cannot be read.
        has_gres_opp_plugin: whether gres_opp.so is in PluginDir; None if that cannot be read here.
        is_gpu_node: whether this host is a node with shared GPUs.
        coordinator_socket: where a coordinator listens on such a node, and the user who does; None: nobody.
        coordinator_uid: the user that jobs here trust as a coordinator, beside root.
        uncounted_gpus: shared here, of which nobody counts which process holds how much memory.
        is_sharing_closed: whether the Prolog has closed this node for sharing.
        lua: of each of Slurm's Lua plugins that is here, the versions of Lua that it names; None if PluginDir cannot be
            read here.
        pyslurm: its version in this Python; None: it is not installed.
    """

    snapshot: Snapshot
    client_version: str
    gres_conf: str | None
    cgroup_conf: str | None
    unresolved: tuple[str, ...] = ()
    lua: Mapping[str, tuple[str, ...]] | None = None
    lua_needed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lua_missing: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    lua_idle: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    node_scripts: Mapping[str, Mapping[str, str | None]] = field(default_factory=dict)
    has_gres_opp_plugin: bool | None = None
    is_gpu_node: bool = False
    coordinator_socket: tuple[str, int | None] = ("", None)
    coordinator_uid: int | None = None
    uncounted_gpus: tuple[str, ...] = ()
    is_sharing_closed: bool = False
    pyslurm: str | None = None


@dataclass(frozen=True)
class Finding:
    """One thing that was found.

    Attributes:
        check: its name, stable.
        seen: the value seen.
        text: what it means.
        fix: what to change or run.
    """

    level: Level
    check: str
    seen: str
    text: str
    fix: str
