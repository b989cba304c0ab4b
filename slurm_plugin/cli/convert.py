"""`hetstream convert`: print what an sbatch script becomes, and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.text import printable
from hetstream.hetjob.convert import script_options
from hetstream.hetjob.directives import Directive, from_command_line, is_own, read_directives
from hetstream.hetjob.jobs_dir import IN_SUBMIT_DIR, JOBS_DIR, for_user, setting
from hetstream.hetjob.sbatch_options import SbatchOption, SbatchOptions, parse_words
from hetstream.hetjob.spec import OPTIONS
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.conversion import Conversion, convert_script, note_on_arguments
from hetstream.slurm_plugin.insight.proposals import as_directives, for_script, remember
from hetstream.slurm_plugin.program import own_program

HELP = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the conversion."""
    options, unread = parse_words(args.words, "command line", extra=OPTIONS)
    if any(option.name == "help" for option in options):
        print(HELP, end="")
        return 0
    if not unread:
        raise UsageError("no script is named. Write: hetstream convert SCRIPT")
    script, arguments = Path(unread[0]), unread[1:]
    as_json = "json" in (option.name for option in options)
    if arguments[:1] == ["--json"]:
        as_json, arguments = True, arguments[1:]
    if arguments[:1] == ["--"]:
        more, arguments = parse_words(arguments[1:], "command line", extra=OPTIONS)
        options += more
        if arguments:
            raise UsageError(f"{arguments[0]!r} is not an option; script arguments do not change the conversion")
    auto = "auto" in (option.name for option in options)
    options = [option for option in options if option.name not in ("json", "auto")]
    try:
        body = script.read_bytes()
    except OSError as error:
        raise UsageError(f"{script} cannot be read: {error.strerror}") from error
    proposed, why = _from_history(body, script.name, options) if auto else ([], [])
    conversion = convert_script(body, script.name, options, os.environ, CommandSlurm(), own_program(), proposed)
    notes = (*why, *conversion.notes, *note_on_arguments(script.name, arguments))
    conversion = replace(conversion, notes=notes)
    if as_json:
        print(json.dumps(_as_json(conversion), indent=1))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(conversion.script)
    for line in _explanation(conversion, script.name):
        print(printable(line), file=sys.stderr)
    return 0


def _from_history(body: bytes, name: str, options: Sequence[SbatchOption]) -> tuple[list[Directive], list[str]]:
    """Directives that past jobs propose for a script, and what to say about them."""
    text = body.decode(errors="surrogateescape")
    places = [Path.cwd() / IN_SUBMIT_DIR]
    pattern = setting(JOBS_DIR, os.environ)
    history = remember([*places, *([for_user(pattern)] if pattern else [])], os.environ, time.time())
    explanation = [f"--auto: {note}" for note in history.notes]
    if history.problem or not history.jobs:
        return [], explanation
    asked = SbatchOptions((*script_options(text, name), *(option for option in options if not is_own(option.name))))
    proposal = for_script(history, name, asked)
    if proposal is None:
        return [], [
            *explanation,
            f"--auto: none of {len(history.jobs)} past job(s) is like {name}: nothing is proposed from history",
        ]
    if not proposal.options:
        return [], [*explanation, f"--auto: no data workers are proposed: {proposal.reason}"]
    found = as_directives(proposal, [*read_directives(text, name), *from_command_line(options)])
    options_text = (
        " ".join(f"--{option.name}={option.value}" for option in found) or "nothing that the script does not say itself"
    )
    return found, [*explanation, f"--auto: {options_text}", f"    because of {proposal.reason}"]


def _explanation(conversion: Conversion, name: str) -> list[str]:
    lines = [f"note: {note}" for note in conversion.notes]
    if conversion.plan is None:
        return [*lines, f"{name} has no #HETSTREAM line before its first command: unchanged"]
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
