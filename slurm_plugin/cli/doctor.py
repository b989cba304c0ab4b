"""`hetstream doctor`: what is wrong with the cluster's configuration, with the fix."""

from __future__ import annotations

import argparse
import glob
import os
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetstream.base.errors import HetstreamError
from hetstream.hetjob.gpu.config import DEFAULT_SOCKET
from hetstream.hetjob.site.address import site_value
from hetstream.slurm_plugin.cli.output import add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.client import pyslurm_backend
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.coordinator.look import look
from hetstream.slurm_plugin.install.doctor import LUA_PLUGINS, NUM_CHECKS, examine, lua_versions
from hetstream.slurm_plugin.install.doctor_gpus import read_gpus
from hetstream.slurm_plugin.install.doctor_packing import GRES, why_no_packing
from hetstream.slurm_plugin.install.findings import Facts, Finding, Level
from hetstream.slurm_plugin.install.lua_settings import (
    OPTIONS,
    asked_for,
    asks_for_lua,
    missing_files,
    missing_modules,
    modules_of,
)
from hetstream.slurm_plugin.install.node_scripts import RUN_DIR, SCRIPTS
from hetstream.slurm_plugin.render.report import Column, Report, Row, Section
from hetstream.slurm_plugin.render.table import RED, YELLOW

EPILOG = """\
A problem keeps a part of hetstream from working. With a warning it works badly. A note says which feature is off.
gres.conf and cgroup.conf are read from the directory of slurm.conf, if this user may read them.

examples:
  hetstream doctor
  hetstream doctor --json | jq '.findings[] | select(.level == "problem")'

exit codes:
  0  no problem was found; there may be warnings and notes
  1  Slurm could not be asked
  2  the command line is wrong
  3  problems were found
"""
EXIT_PROBLEMS = 3
# One lookup can take seconds where DNS is broken: a few hosts show it as well as all.
MAX_LOOKUPS = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Look for problems in the cluster's configuration, and say how to fix them. Changes nothing."
    parser.epilog = EPILOG
    add_output_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Gather the facts, and print what is found."""
    slurm = CommandSlurm()
    snapshot = slurm.seen()
    directory = Path(snapshot.config.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    hosts = [socket.gethostname(), *(node.address for node in snapshot.nodes if node.address)]
    facts = Facts(
        snapshot=snapshot,
        client_version=slurm.client_version(),
        gres_conf=_text_of(directory / "gres.conf"),
        cgroup_conf=_text_of(directory / "cgroup.conf"),
        unresolved=tuple(_unresolved(list(dict.fromkeys(hosts))[:MAX_LOOKUPS])),
        pyslurm=pyslurm_backend.installed(),
        lua=_lua(snapshot.config.get("PluginDir", "")),
        **_lua_files(directory, snapshot.config),
        **_sharing(snapshot),
    )
    found = examine(facts, read_gpus())
    emit(args, report_of(found, snapshot))
    return EXIT_PROBLEMS if any(finding.level is Level.PROBLEM for finding in found) else 0


def report_of(found: tuple[Finding, ...], snapshot: Snapshot) -> Report:
    """Put the findings into a table."""
    counts = {level.value: sum(finding.level is level for finding in found) for level in Level}
    line = f"{counts['problem']} problem(s), {counts['warning']} warning(s), {counts['note']} note(s)"
    rows = [
        {
            "level": finding.level.value,
            "check": finding.check,
            "seen": finding.seen,
            "text": finding.text,
            "fix": finding.fix,
        }
        for finding in found
    ]
    section = Section("findings", _COLUMNS, rows, empty="nothing to say")
    summary = {**counts, "num_checks": NUM_CHECKS}
    return Report(meta_of("doctor", snapshot), summary, [f"Slurm {snapshot.version}: {line}"], (section,))


def _text_of(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _lua(plugin_dirs: str) -> dict[str, tuple[str, ...]] | None:
    """What Slurm's Lua plugins name of Lua; PluginDir may be several directories, with colons."""
    directories = [Path(word) for word in plugin_dirs.split(":") if os.access(word, os.R_OK | os.X_OK)]
    found: dict[str, tuple[str, ...]] = {}
    for name in LUA_PLUGINS:
        for directory in directories:
            with suppress(OSError):
                found.setdefault(name, lua_versions((directory / f"{name}_lua.so").read_bytes()))
    return found if directories else None


def _lua_files(directory: Path, config: Mapping[str, str]) -> dict[str, Any]:
    """Of the hooks that the running configuration or slurm.conf asks for: what they need, and lack on this host."""
    running = "\n".join(f"{name}={value}" for name, value in config.items())
    names = asked_for(directory) | {name for name, option in OPTIONS.items() if asks_for_lua(running, option)}
    needed = {name: (str(directory / name), *modules_of(directory / name)) for name in sorted(names)}
    missing: dict[str, tuple[str, ...]] = {}
    idle: dict[str, tuple[str, ...]] = {}
    for name in needed:
        with suppress(OSError):  # what cannot be read here is not known
            if found := missing_files(directory / name):
                missing[name] = tuple(found)
            elif found := missing_modules(directory / name):
                idle[name] = tuple(found)
    return {"lua_needed": needed, "lua_missing": missing, "lua_idle": idle}


def _sharing(snapshot: Snapshot) -> dict[str, Any]:
    """What there is of sharing GPUs on this host."""
    config = snapshot.config
    here = {socket.gethostname(), socket.gethostname().partition(".")[0], os.environ.get("SLURMD_NODENAME", "")}
    path = Path(os.environ.get("HETSTREAM_GPU_SOCKET", DEFAULT_SOCKET))
    uid = site_value("HETSTREAM_GPU_COORDINATOR_UID", os.environ) or ""
    coordinator_uid = int(uid) if uid.isdecimal() else None
    return {
        "node_scripts": {option: _programs(config, option) for option in SCRIPTS},
        "has_gres_opp_plugin": _has_plugin(config, "gres_opp.so"),
        "is_gpu_node": any(
            node.name in here and any(gres.name == GRES for gres in node.gres) for node in snapshot.nodes
        ),
        "coordinator_socket": (str(path), _owner_of(path)),
        "coordinator_uid": coordinator_uid,
        "uncounted_gpus": _uncounted(path, coordinator_uid),
        "is_sharing_closed": (Path(RUN_DIR) / "grants-incomplete").exists(),
    }


def _uncounted(path: Path, coordinator_uid: int | None) -> tuple[str, ...]:
    """GPUs of this host that are shared, and whose driver does not say who holds their memory."""
    if _owner_of(path) is None:
        return ()
    try:
        rows = look(str(path), coordinator_uid).gpus
    except HetstreamError:  # it does not answer us, which is another finding
        return ()
    return tuple(row.gpu for row in rows if row.agentless_bytes is None and not row.is_lost)


def _owner_of(path: Path) -> int | None:
    """Whose a socket is; None if there is none."""
    try:
        return path.stat().st_uid if path.is_socket() else None
    except OSError:
        return None


def why_nobody_is_placed(snapshot: Snapshot) -> str:
    """Why opportunistic jobs cannot be placed in this cluster, as far as it is seen from here; empty if they can."""
    directory = Path(snapshot.config.get("SLURM_CONF", "/etc/slurm/slurm.conf")).parent
    has_plugin = _has_plugin(snapshot.config, "gres_opp.so")
    cgroup_conf = _text_of(directory / "cgroup.conf")
    return why_no_packing(snapshot.version, snapshot.config, cgroup_conf, has_gres_opp_plugin=has_plugin)


def _has_plugin(config: Mapping[str, str], name: str) -> bool | None:
    """Whether Slurm has a plugin; None where PluginDir, which may be several directories, cannot be read here."""
    directories = [Path(word) for word in config.get("PluginDir", "").split(":") if os.access(word, os.R_OK | os.X_OK)]
    return any((directory / name).exists() for directory in directories) if directories else None


def _programs(config: Mapping[str, str], option: str) -> dict[str, str | None]:
    """What Slurm runs by an option, which newer releases number, and what stands in it."""
    values = [value for name, value in config.items() if name.partition("[")[0] == option and value != "(null)"]
    paths = [found for value in values for found in sorted(glob.glob(value)) or [value]]
    return {path: _text_of(Path(path)) for path in paths}


def _unresolved(hosts: Iterable[str]) -> Iterable[str]:
    for host in hosts:
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            yield host


def _color(row: Row) -> str:
    return {"problem": RED, "warning": YELLOW}.get(row["level"], "")


_COLUMNS = (
    Column("level", "LEVEL", left=True, mark=_color),
    Column("check", "CHECK", left=True),
    Column("seen", "SEEN", left=True),
    Column("text", "MEANS", left=True),
    Column("fix", "FIX", left=True),
)
