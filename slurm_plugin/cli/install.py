"""`hetstream install`: place the Lua plugins, systemd units, man pages and completion."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import re
import stat
import sys
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.hetjob.gpu import STARTUP_DIRECTORY
from hetstream.slurm_plugin.install.installation import (
    HOOKS,
    LUA_DIR,
    SETTINGS_OF_USR,
    Action,
    as_json,
    hook_lines,
    hook_text,
    install,
    put_below,
    site_name,
)
from hetstream.slurm_plugin.install.manual import bash_completion, man_pages, verbs_of
from hetstream.slurm_plugin.install.node_scripts import PACKING_ENVIRONMENT, SCRIPTS, node_script
from hetstream.slurm_plugin.install.unit import (
    DAEMON_ENVIRONMENT,
    EXPORTER_ENVIRONMENT,
    daemon_unit,
    exporter_unit,
    sharing_units,
)
from hetstream.slurm_plugin.program import own_program

EPILOG = """\
Below DIR: share/hetstream/lua (the modules), etc/hetstream/policy.lua (the site's rules, all commented out; for /usr
it is /etc/hetstream/policy.lua),
lib/systemd/system/hetstream-exporter.service and hetstreamd.service with etc/hetstream/exporter.env and daemon.env,
share/hetstream/prolog (scripts for nodes whose GPUs are shared), hetstream-gpu.service, hetstream-gpu-report.service
and hetstream-packer.service with etc/hetstream/packing.env,
share/man/man1, share/bash-completion. No service is started.
With --slurm-dir, cli_filter.lua and job_submit.lua there load the modules. A site's own file of that name is moved to
NAME.site.lua, which the new one loads first; uninstall moves it back.

What hetstream did not place, or somebody changed since, stays as it is. slurm.conf is yours: install says which lines
the plugins need.

examples:
  hetstream install --prefix /usr/local --dry-run
  hetstream install --prefix /usr/local --slurm-dir /etc/slurm
  hetstream uninstall --prefix /usr/local
"""
_SLURM_CONF = {"cli_filter.lua": "CliFilterPlugins=lua", "job_submit.lua": "JobSubmitPlugins=lua"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "Place the Lua plugins, the site's policy, systemd units, man pages and bash completion."
    parser.epilog = EPILOG
    add_place_arguments(parser)
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--slurm-dir", type=Path, metavar="DIR", help="where slurm.conf is: place the two hooks there")
    place.add_argument(
        "--destdir", type=Path, metavar="DIR", help="for whoever makes a package: put all below DIR, without a record"
    )
    parser.set_defaults(run=run)


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare what `install` and `uninstall` share."""
    parser.add_argument("--prefix", type=Path, required=True, metavar="DIR", help="such as /usr/local")
    parser.add_argument("-n", "--dry-run", action="store_true", help="only say what would be done")
    parser.add_argument("--json", action="store_true", help="one JSON document, with the version of its form in meta")


def run(args: argparse.Namespace) -> int:
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
    notes = [*_notes(prefix, args.slurm_dir, actions), *closed_notes([Path(own_program()[0]), Path(sys.base_prefix)])]
    report("install", actions, notes, args)
    return 0


def planned(
    prefix: Path, slurm_dir: Path | None, program: str, startup: str = STARTUP_DIRECTORY
) -> tuple[dict[Path, str], dict[Path, tuple[str, str]]]:
    """What an installation consists of: files, and the hooks without and with a site's own file.

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
    """Man pages and completion of every verb."""
    from hetstream.slurm_plugin.cli import VERBS, build_parser

    parser = build_parser()
    help_texts = {verb: _own_help(verb) for verb, sub in verbs_of(parser).items() if not sub.add_help}
    pages = man_pages(parser, VERBS, help_texts, version("hetstream"))
    return {
        **{prefix / "share/man/man1" / name: text for name, text in pages.items()},
        prefix / "share/bash-completion/completions/hetstream": bash_completion(parser, help_texts),
    }


def report(verb: str, actions: list[Action], notes: list[str], args: argparse.Namespace) -> None:
    """Print what was done, or would be."""
    if args.json:
        print(as_json(verb, actions, notes, dry_run=args.dry_run))
        return
    would = "would " if args.dry_run else ""
    for action in actions:
        if action.what in ("keep", "leave") and not action.why:
            continue
        print(f"{would}{action.what} {action.path}{f' ({action.why})' if action.why else ''}")
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
    """What to say of files that every user's jobs need and that other users cannot reach."""
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


def _own_help(verb: str) -> str:
    """What a verb that reads its own words says to --help."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        importlib.import_module(f"hetstream.slurm_plugin.cli.{verb}").run(argparse.Namespace(words=["--help"]))
    return out.getvalue()
