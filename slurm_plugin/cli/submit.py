"""`hetstream sbatch`: what sbatch does, with the script converted on the way.

Its output and exit code are sbatch's. A script that does not ask for data workers goes to sbatch untouched.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.base.text import count_words, printable
from hetstream.hetjob.convert.convert import AlreadyHeterogeneous, NoSuchNode, script_options
from hetstream.hetjob.convert.directives import OPTIONS, Directive, from_command_line, is_own, read_directives, written
from hetstream.hetjob.convert.sbatch_options import SbatchOption, SbatchOptions, words_of
from hetstream.hetjob.errors import DataWorkersMissing
from hetstream.hetjob.job.job import JOBS_DIR, places, setting
from hetstream.hetjob.job.processes import temporary_directory
from hetstream.hetjob.ports import NodeSize, SlurmClient
from hetstream.slurm_plugin.client.run import become
from hetstream.slurm_plugin.client.slurm import CommandSlurm, run_sbatch
from hetstream.slurm_plugin.insight.proposals import as_directives, for_script, remember
from hetstream.slurm_plugin.past_jobs import within_nodes
from hetstream.slurm_plugin.submit.conversion import (
    Conversion,
    ask_cluster,
    clusters_of,
    convert_script,
    note_on_arguments,
    options_behind,
)
from hetstream.slurm_plugin.submit.program import own_program
from hetstream.slurm_plugin.submit.request import parse_command_line, read_script

SBATCH_HELP = """\
usage: hetstream sbatch [--dry-run] [OPTIONS OF SBATCH AND HETSTREAM] SCRIPT [ARGUMENTS OF THE SCRIPT]

Submit a script as sbatch does. #HETSTREAM lines in it, or the same options here, add data workers:
{options}
Options may also stand behind a script that does not use its arguments.
--dry-run prints the script that would be submitted, and the command. All other options: sbatch --help
"""


def add_sbatch_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run_sbatch_verb)


def run_sbatch_verb(args: argparse.Namespace) -> int:
    """Submit, and return sbatch's exit code."""
    arguments: list[str] = args.words
    options, unread = parse_command_line(arguments, os.environ)
    components = unread[:1] == [":"]
    while unread[:1] == [":"]:
        _, unread = parse_command_line(unread[1:], os.environ)
    given = SbatchOptions(tuple(options))
    if given.has("help") and not unread:
        lines = (f"  {written(name):<34}{option.meaning}" for name, option in OPTIONS.items())
        print(SBATCH_HELP.format(options="\n".join(lines)), end="")
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


# `hetstream convert`: print what an sbatch script becomes, and why.

CONVERT_HELP = """\
usage: hetstream convert [--json] [--auto] [OPTIONS OF SBATCH AND HETSTREAM] SCRIPT [-- MORE OPTIONS]

Print the heterogeneous script that a script with #HETSTREAM lines becomes. --json prints components, changes and script
as JSON. --auto takes from your past jobs what neither the script nor the command line says: the most data workers,
their CPUs and memory, the trainer's CPUs. The other options are those of hetstream sbatch: hetstream sbatch --help

The script goes to stdout, the explanation to stderr. Nothing is submitted and no file is changed.

examples:
  hetstream convert train.sbatch
  hetstream convert --data-workers=4 --time=2:00:00 train.sbatch
  hetstream convert train.sbatch -- --data-workers=4 --time=2:00:00
  hetstream convert --json train.sbatch
  hetstream convert --auto train.sbatch > converted.sbatch
"""

# It decides the CPUs of data workers, too.
_THREADS = "data-worker-threads"


def add_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run_convert)


def run_convert(args: argparse.Namespace) -> int:
    """Print the conversion."""
    options, unread = parse_command_line(args.words, os.environ)
    if any(option.name == "help" for option in options):
        print(CONVERT_HELP, end="")
        return 0
    if not unread:
        raise UsageError("no script is named. Write: hetstream convert SCRIPT")
    script, arguments = Path(unread[0]), unread[1:]
    as_json = "json" in (option.name for option in options)
    if arguments[:1] == ["--json"]:
        as_json, arguments = True, arguments[1:]
    if arguments[:1] == ["--"]:
        more, arguments = parse_command_line(arguments[1:], os.environ)
        options += more
        if arguments:
            raise UsageError(f"{arguments[0]!r} is not an option; script arguments do not change the conversion")
    auto = "auto" in (option.name for option in options)
    options = [option for option in options if option.name not in ("json", "auto")]
    try:
        with script.open("rb") as file:
            body = read_script(file, str(script))
    except OSError as error:
        raise UsageError(f"{script} cannot be read: {error.strerror}") from error
    client = CommandSlurm()
    proposed, why = _from_history(body, script.name, options, client) if auto else ([], [])
    try:
        conversion = _convert(body, script.name, options, client, proposed if auto else None)
    except HetstreamError:
        _say(f"note: {note}" for note in why)  # they may be what explains the error
        raise
    notes = (*why, *conversion.notes, *note_on_arguments(script.name, arguments))
    conversion = replace(conversion, notes=notes)
    if as_json:
        print(json.dumps(_as_json(conversion), indent=1))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(conversion.script)
    _say(_explanation(conversion, script.name))
    return 0


def _say(lines: Iterable[str]) -> None:
    for line in lines:
        print(printable(line), file=sys.stderr)


def _convert(
    body: bytes,
    name: str,
    options: Sequence[SbatchOption],
    client: SlurmClient,
    proposed: Sequence[Directive] | None,
) -> Conversion:
    """Convert a script, with what past jobs propose.

    Where a number of data workers is left to past jobs and they propose none, the script stays as it is.

    Args:
        body, name: of the script.
        options: of the command line.
        client: asked for the cluster.
        proposed: by past jobs; None where they were not asked.
    """
    try:
        return convert_script(body, name, options, os.environ, client, own_program(), proposed)
    except DataWorkersMissing as error:
        return Conversion(body, None, (f"{error}. Past jobs propose none: {name} stays as it is",))
    except NoSuchNode as error:
        sizes = [option for option in proposed or () if option.name in ("data-worker-cpus", "data-worker-mem")]
        if not sizes:
            raise
        text = " and ".join(f"--{option.name}={option.value}" for option in sizes)
        raise NoSuchNode(
            f"{error}. Of that, {text} comes from past jobs (--auto): give it yourself if they are not like this one"
        ) from error


def _from_history(
    body: bytes, name: str, options: Sequence[SbatchOption], client: SlurmClient
) -> tuple[list[Directive], list[str]]:
    """Directives that past jobs propose for a script, and what to say about them."""
    text = body.decode(errors="surrogateescape")
    where = places([Path.cwd()], setting(JOBS_DIR, os.environ))
    history = remember(where, os.environ, time.time(), Path.cwd())
    explanation = [f"--auto: {note}" for note in history.notes]
    if history.problem or not history.jobs:
        return [], explanation
    asked = SbatchOptions((*script_options(text, name), *(option for option in options if not is_own(option.name))))
    proposal = for_script(history, name, text, asked)
    if proposal is None:
        return [], [
            *explanation,
            f"--auto: of {count_words(len(history.jobs), 'past job')} none is like {name}: nothing is proposed from "
            "history",
        ]
    if not proposal.options:
        return [], [*explanation, f"--auto: no data workers are proposed: {proposal.reason}"]
    given = [*read_directives(text, name), *from_command_line(options)]
    clusters = clusters_of(os.environ, script_options(text, name), options)
    proposal = within_nodes(proposal, _nodes(given, client, clusters))
    found = as_directives(proposal, given)
    # As `hetstream advise` says it, and then what of it the script decides itself.
    proposed = " ".join(f"--{option}={value}" for option, value in proposal.options.items())
    own = {f"--{option.name}={option.value}" for option in given if option.name in (*proposal.options, _THREADS)}
    if own and len(found) < len(proposal.options):
        proposed += f", but what the script says itself holds: {' '.join(sorted(own))}"
    return found, [*explanation, f"--auto: {proposed}", f"    because of {proposal.reason}"]


def _nodes(given: Sequence[Directive], client: SlurmClient, clusters: str) -> list[NodeSize]:
    """The nodes that data workers of a proposed size must fit; none where they are not known, or the size is given."""
    if not {"data-worker-cpus", "data-worker-threads", "data-worker-mem"}.isdisjoint(option.name for option in given):
        return []
    cluster, _ = ask_cluster(client, clusters)  # whoever converts asks again, and says why it is not known
    chosen = [directive.value for directive in given if directive.name == "data-worker-partition"]
    partitions = (chosen[-1] if chosen else cluster.default_partition) or ""
    return [node for limit in cluster.limits_of(partitions) for node in limit.nodes]


def _explanation(conversion: Conversion, name: str) -> list[str]:
    lines = [f"note: {note}" for note in conversion.notes]
    if conversion.plan is None:
        has_lines = bool(read_directives(conversion.script.decode(errors="surrogateescape"), name))
        return lines if has_lines else [*lines, f"{name} has no #HETSTREAM line before its first command: unchanged"]
    changes = conversion.plan.changes
    return lines + [line for change in changes for line in (change.change, f"    because {change.why}")]


def _as_json(conversion: Conversion) -> dict[str, object]:
    plan = conversion.plan
    return {
        "meta": {"version": 1},
        "components": [
            {"het_job_offset": part.het_job_offset, "role": part.role, "options": list(part.options)}
            for part in (plan.components if plan else ())
        ],
        "changes": [{"change": change.change, "why": change.why} for change in (plan.changes if plan else ())],
        "notes": list(conversion.notes),
        "sbatch_options": list(plan.sbatch_options) if plan else [],
        "script": conversion.script.decode(errors="replace"),
    }
