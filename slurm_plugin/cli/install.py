"""`hetstream site install`: place the Lua plugins, systemd units, man pages and completion."""

from __future__ import annotations

import argparse
import glob
import os
import re
import socket
import stat
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.base.text import count_words
from hetstream.hetjob.gpu import STARTUP_DIRECTORY
from hetstream.hetjob.gpu.config import DEFAULT_SOCKET
from hetstream.hetjob.site.site_file import site_value
from hetstream.slurm_plugin.cli.completion import SHELLS, completion, installed_man_pages, man_pages
from hetstream.slurm_plugin.cli.output import add_output_arguments, emit, meta_of
from hetstream.slurm_plugin.client import pyslurm_backend
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.coordinator.table import look
from hetstream.slurm_plugin.install.doctor import (
    GRES,
    LUA_PLUGINS,
    NUM_CHECKS,
    OPTIONS,
    Facts,
    Finding,
    Level,
    asked_for,
    asks_for_lua,
    examine,
    lua_versions,
    missing_files,
    missing_modules,
    modules_of,
    read_gpus,
    why_no_packing,
)
from hetstream.slurm_plugin.install.installation import (
    HOOKS,
    LUA_DIR,
    SETTINGS_OF_USR,
    WAS_THERE,
    Action,
    as_json,
    hook_lines,
    hook_text,
    install,
    put_below,
    site_name,
    uninstall,
)
from hetstream.slurm_plugin.install.units import (
    DAEMON_ENVIRONMENT,
    EXPORTER_ENVIRONMENT,
    PACKING_ENVIRONMENT,
    RUN_DIR,
    SCRIPTS,
    daemon_unit,
    exporter_unit,
    node_script,
    sharing_units,
)
from hetstream.slurm_plugin.render.tables import RED, YELLOW, Column, Report, Row, Section
from hetstream.slurm_plugin.submit.program import own_program

INSTALL_EPILOG = """\
Below DIR: share/hetstream/lua (the modules), etc/hetstream/policy.lua (the site's rules, all commented out; for /usr
it is /etc/hetstream/policy.lua),
lib/systemd/system/hetstream-exporter.service and hetstreamd.service with etc/hetstream/exporter.env and daemon.env,
share/hetstream/prolog (scripts for nodes whose GPUs are shared), hetstream-gpu.service, hetstream-gpu-report.service
and hetstream-packer.service with etc/hetstream/packing.env,
share/bash-completion, share/zsh, share/fish and share/man/man1. No service is started.
With --slurm-dir, cli_filter.lua and job_submit.lua there load the modules. A site's own file of that name is moved to
NAME.site.lua, which the new one loads first; uninstall moves it back.

What hetstream did not place, or somebody changed since, stays as it is. slurm.conf is yours: install says which lines
the plugins need.

examples:
  hetstream site install --prefix /usr/local --dry-run
  hetstream site install --prefix /usr/local --slurm-dir /etc/slurm
  hetstream site uninstall --prefix /usr/local
"""
_SLURM_CONF = {"cli_filter.lua": "CliFilterPlugins=lua", "job_submit.lua": "JobSubmitPlugins=lua"}


def add_install_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Place the Lua plugins, the site's policy, systemd units, man pages and completion."
    parser.epilog = INSTALL_EPILOG
    add_place_arguments(parser)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--slurm-dir", type=Path, metavar="DIR", help="where slurm.conf is: place the two hooks there")
    place.add_argument(
        "--destdir", type=Path, metavar="DIR", help="for whoever makes a package: put all below DIR, without a record"
    )
    parser.set_defaults(run=run_install)


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `install` and `uninstall` share."""
    parser.add_argument("--prefix", type=Path, required=True, metavar="DIR", help="such as /usr/local")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--json", action="store_true", help="one JSON document, with the version of its form in meta")


def run_install(args: argparse.Namespace) -> int:
    """Place the files."""
    prefix, program = args.prefix.absolute(), own_program()[0]
    if args.destdir is not None:
        destdir = args.destdir.absolute()
        program, startup = (
            f"/{Path(path).relative_to(destdir)}" if Path(path).is_relative_to(destdir) else path
            for path in (program, STARTUP_DIRECTORY)
        )
        files, _ = planned(prefix, None, program, startup)
        report("install", put_below(destdir, files, dry_run=args.dry_run), [], args)
        return 0
    files, hooks = planned(prefix, args.slurm_dir.absolute() if args.slurm_dir else None, program)
    actions = install(prefix, files, hooks, dry_run=args.dry_run)
    has_pages = any(path.suffix == ".1" for path in files)
    notes = [] if has_pages else ["no man pages were made: pip install argparse-manpage, and install again"]
    notes += [*_notes(prefix, args.slurm_dir, actions), *closed_notes([Path(own_program()[0]), Path(sys.base_prefix)])]
    report("install", actions, notes, args)
    return 0


def planned(
    prefix: Path, slurm_dir: Path | None, program: str, startup: str = STARTUP_DIRECTORY
) -> tuple[dict[Path, str], dict[Path, tuple[str, str]]]:
    """Return what an installation consists of: files, and the hooks without and with a site's own file.

    Raises:
        UsageError: the directory of Slurm's files does not exist, or a path cannot stand in a Lua file.
    """
    if slurm_dir is not None and not slurm_dir.is_dir():
        raise UsageError(f"--slurm-dir={slurm_dir}: no such directory. Give the one that slurm.conf is in")
    lua_dir, policy = _places(prefix)
    files = {lua_dir / name: (LUA_DIR / name).read_text() for name in HOOKS}
    files[policy] = (LUA_DIR / "policy.lua").read_text()
    for unit, text, environment, content in (
        ("hetstream-exporter", exporter_unit, policy.with_name("exporter.env"), EXPORTER_ENVIRONMENT),
        ("hetstreamd", daemon_unit, policy.with_name("daemon.env"), DAEMON_ENVIRONMENT),
    ):
        files[environment] = content
        files[prefix / f"lib/systemd/system/{unit}.service"] = text(program, environment)
    packing = policy.with_name("packing.env")
    files[packing] = PACKING_ENVIRONMENT
    for unit, content in sharing_units(program, packing).items():
        files[prefix / f"lib/systemd/system/{unit}.service"] = content
    for option, name in SCRIPTS.items():
        files[prefix / "share/hetstream/prolog" / name] = node_script(option, packing, startup=startup)
    files |= documents(prefix)
    hooks = {
        slurm_dir / name: (
            hook_text(name, lua_dir, policy, program, None),
            hook_text(name, lua_dir, policy, program, site_name(slurm_dir / name)),
        )
        for name in (HOOKS if slurm_dir else ())
        if slurm_dir is not None
    }
    return files, hooks


def documents(prefix: Path) -> dict[Path, str]:
    """Completion for each shell, and the man pages: those of the wheel, or made here where this is a checkout."""
    files = {prefix / path: completion(shell) + "\n" for shell, path in SHELLS.items()}
    pages = installed_man_pages()
    if not pages:
        with suppress(ModuleNotFoundError):
            pages = man_pages()
    return files | {prefix / "share/man/man1" / name: text for name, text in pages.items()}


def report(verb: str, actions: list[Action], notes: list[str], args: argparse.Namespace) -> None:
    """Print what was done, or would be."""
    if args.json:
        print(as_json(verb, actions, notes, dry_run=args.dry_run))
        return
    would = "would " if args.dry_run else ""
    were_there = [action.path for action in actions if action.why == WAS_THERE]
    if were_there:
        print(f"{would}keep {count_words(len(were_there), 'file')} of the same text, such as {were_there[0]}")
    for action in actions:
        if action.why == WAS_THERE or (action.what in ("keep", "leave") and not action.why):
            continue
        print(f"{would}{action.what} {action.path}{f' ({action.why})' if action.why else ''}")
    if verb == "install" and all(action.what == "keep" and not action.why for action in actions):
        print("all is in its place")
    sys.stdout.flush()
    for note in notes:
        print(f"hetstream: {note}", file=sys.stderr)


def _places(prefix: Path) -> tuple[Path, Path]:
    settings = SETTINGS_OF_USR if prefix == Path("/usr") else prefix / "etc/hetstream"
    return prefix / "share/hetstream/lua", settings / "policy.lua"


def _notes(prefix: Path, slurm_dir: Path | None, actions: list[Action]) -> list[str]:
    lua_dir, policy = _places(prefix)
    notes = []
    kept = {action.path for action in actions if action.what == "keep" and action.why}
    conf = slurm_dir / "slurm.conf" if slurm_dir else None
    text = conf.read_text(errors="replace") if conf and conf.is_file() else ""
    for name, setting in _SLURM_CONF.items():
        if slurm_dir is None or str(slurm_dir.absolute() / name) in kept:
            lines = "\n  ".join(hook_lines(name, lua_dir, policy, own_program()[0]))
            notes.append(
                f"{name} was not placed. Yours loads the module with these lines before its return:\n  {lines}"
            )
        option = setting.partition("=")[0]
        if not re.search(rf"^\s*{option}\s*=.*\blua\b", text, re.MULTILINE | re.IGNORECASE):
            notes.append(f"slurm.conf needs {setting}{' (then restart slurmctld)' if 'Submit' in setting else ''}")
    return notes


def closed_notes(paths: Iterable[Path]) -> list[str]:
    """Return what to say of files that every user's jobs need and that other users cannot reach."""
    closed: dict[Path, Path] = {}
    for path in paths:
        real = Path(os.path.realpath(path))
        if parent := next(
            (folder for folder in (real, *real.parents) if not folder.stat().st_mode & stat.S_IXOTH), None
        ):
            closed.setdefault(parent, path)
    return [
        f"users other than root cannot reach {path}: {parent} is closed to them (mode "
        f"{stat.S_IMODE(parent.stat().st_mode):o}). Their jobs would run without data workers, and the services would "
        "not start. Install hetstream with a Python that everybody can run, for instance below /opt"
        for parent, path in closed.items()
    ]


# `hetstream site uninstall`: take away what `hetstream site install` placed, and put back what it moved.


def add_uninstall_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Take away what hetstream site install placed. A site's own Lua files are byte for byte what they were; "
        "files that were changed since they were placed stay. Refused as long as slurm.conf asks for a hook that would "
        "be gone: without it every sbatch and srun would fail."
    )
    add_place_arguments(parser)
    parser.add_argument("--force", action="store_true", help="remove also hooks that slurm.conf still asks for")
    parser.set_defaults(run=run_uninstall)


def run_uninstall(args: argparse.Namespace) -> int:
    """Remove and restore."""
    prefix = args.prefix.absolute()
    actions = uninstall(prefix, dry_run=args.dry_run, force=args.force)
    report("uninstall", actions, [] if actions else [f"nothing is installed below {prefix}"], args)
    return 0


# `hetstream doctor`: what is wrong with the cluster's configuration, with the fix.

DOCTOR_EPILOG = """\
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


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Look for problems in the cluster's configuration, and say how to fix them. Changes nothing."
    parser.epilog = DOCTOR_EPILOG
    add_output_arguments(parser)
    parser.set_defaults(run=run_doctor)


def run_doctor(args: argparse.Namespace) -> int:
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
    emit(args, doctor_report(found, snapshot))
    return EXIT_PROBLEMS if any(finding.level is Level.PROBLEM for finding in found) else 0


def doctor_report(found: tuple[Finding, ...], snapshot: Snapshot) -> Report:
    """Put the findings into a table."""
    counts = {level.value: sum(finding.level is level for finding in found) for level in Level}
    line = ", ".join(count_words(number, level) for level, number in counts.items())
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
    """Return why opportunistic jobs cannot be placed in this cluster, as far as it is seen from here; empty if they
    can.
    """
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
    Column("check", "CHECK", left=True, wraps=True),
    Column("seen", "SEEN", left=True, wraps=True),
    Column("text", "MEANS", left=True, below=True),
    Column("fix", "FIX", left=True, below=True),
)
