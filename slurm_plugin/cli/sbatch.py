"""`hetstream sbatch`: what sbatch does, with the script converted on the way.

Its output and exit code are sbatch's. A script that does not ask for data workers goes to sbatch untouched.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.text import printable
from hetstream.hetjob.convert import AlreadyHeterogeneous
from hetstream.hetjob.directives import is_own
from hetstream.hetjob.sbatch_options import SbatchOption, SbatchOptions, words_of
from hetstream.hetjob.spec import OPTIONS, written
from hetstream.hetjob.temporary import temporary_directory
from hetstream.slurm_plugin.client.run import become
from hetstream.slurm_plugin.client.slurm import CommandSlurm, run_sbatch
from hetstream.slurm_plugin.conversion import (
    Conversion,
    convert_script,
    note_on_arguments,
    options_behind,
    parse_command_line,
    read_script,
)
from hetstream.slurm_plugin.program import own_program

HELP = """\
usage: hetstream sbatch [--dry-run] [OPTIONS OF SBATCH AND HETSTREAM] SCRIPT [ARGUMENTS OF THE SCRIPT]

Submit a script as sbatch does. #HETSTREAM lines in it, or the same options here, add data workers:
{options}
Options may also stand behind a script that does not use its arguments.
--dry-run prints the script that would be submitted, and the command. All other options: sbatch --help
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Submit, and return sbatch's exit code."""
    arguments: list[str] = args.words
    options, unread = parse_command_line(arguments, os.environ)
    components = unread[:1] == [":"]
    while unread[:1] == [":"]:
        _, unread = parse_command_line(unread[1:], os.environ)
    given = SbatchOptions(tuple(options))
    if given.has("help") and not unread:
        lines = (f"  {written(name):<34}{option.meaning}" for name, option in OPTIONS.items())
        print(HELP.format(options="\n".join(lines)), end="")
        return 0
    body, name = _read_script(unread, given)
    if body is not None and (behind := options_behind(body, unread[1:])):
        options, unread = [*options, *behind], unread[:1]
        arguments = [*words_of(options), *unread]
    dry_run = any(option.name == "dry-run" for option in options)
    options = [option for option in options if option.name != "dry-run"]
    if body is None:
        if any(is_own(option.name) for option in options):
            raise UsageError(f"{name} cannot be read, so no data workers can be added. Check the script's name")
        become(["sbatch", *arguments])  # sbatch has the words for it
    conversion = convert_script(body, name, options, os.environ, CommandSlurm(), own_program())
    for note in [*conversion.notes, *note_on_arguments(name, unread[1:])]:
        print(f"hetstream: {printable(note)}", file=sys.stderr)
    if conversion.plan is not None and components:
        raise AlreadyHeterogeneous(
            "':' on the command line starts a component, but hetstream adds the data workers as component 1 itself. "
            "Remove it, or use sbatch itself"
        )
    if dry_run:
        return _dry_run(conversion, options, unread)
    if conversion.plan is None and unread:
        become(["sbatch", *arguments])
    return _submit(conversion, name, options, unread[1:])


def _read_script(unread: Sequence[str], given: SbatchOptions) -> tuple[bytes | None, str]:
    """The script that sbatch would take, and its name; None when there is none that could be read."""
    if given.has("wrap"):
        # Converted, it would only be refused: the bytes do not matter.
        return (b"#!/bin/sh\n", "--wrap") if any(is_own(option.name) for option in given.items) else (None, "--wrap")
    if not unread:
        return read_script(
            sys.stdin.buffer, "the script"
        ), "sbatch"  # the name that sbatch gives to a script from its standard input
    path: str | None = unread[0]
    if not Path(unread[0]).is_file() and "/" not in unread[0]:
        path = shutil.which(unread[0], mode=os.R_OK)
    try:
        if path is None:
            return None, Path(unread[0]).name
        with open(path, "rb") as file:
            return read_script(file, path), Path(unread[0]).name
    except OSError:
        return None, unread[0]


def _submit(conversion: Conversion, name: str, options: Sequence[SbatchOption], arguments: Sequence[str]) -> int:
    """Give the script to sbatch under its own name, from a directory that only lives as long as sbatch runs."""
    with temporary_directory() as directory:
        path = directory / name
        path.write_bytes(conversion.script)
        plan = conversion.plan
        if plan is None:
            return run_sbatch([*words_of(options), str(path)], os.environ)
        environ = conversion.environ_of_sbatch(os.environ)
        return run_sbatch([*plan.sbatch_options, str(path), *arguments], environ)


def _dry_run(conversion: Conversion, options: Sequence[SbatchOption], unread: Sequence[str]) -> int:
    sys.stdout.flush()
    sys.stdout.buffer.write(conversion.script)
    plan = conversion.plan
    submitted = list(plan.sbatch_options) if plan else words_of(options)
    command = shlex.join([*conversion.words_to_unset(), "sbatch", *submitted, *unread])
    print(f"would run, on the script above: {command}{'' if unread else ' < SCRIPT'}", file=sys.stderr)
    return 0
