"""`hetstream convert`: print what an sbatch script becomes, and why."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from hetjob.errors import UsageError
from hetjob.sbatch_options import parse_words
from hetjob.spec import OPTIONS
from slurm_plugin.client.slurm import CommandSlurm
from slurm_plugin.conversion import Conversion, convert_script
from slurm_plugin.program import own_program

EPILOG = """\
The script goes to stdout, the explanation to stderr. Nothing is submitted and no file is changed.

examples:
  hetstream convert train.sbatch
  hetstream convert train.sbatch -- --data-workers=4 --time=2:00:00
  hetstream convert --json train.sbatch
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "convert",
        help=summary,
        description="Print the heterogeneous script that a script with #HETSTREAM lines becomes.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="%(prog)s [--json] SCRIPT [-- OPTIONS OF SBATCH AND HETSTREAM]",
    )
    parser.add_argument("--json", action="store_true", help="print components, changes and script as JSON")
    parser.add_argument("script", type=Path, help="the sbatch script")
    parser.add_argument("sbatch_options", nargs="*", help="as they would stand on sbatch's command line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the conversion."""
    options, rest = parse_words(args.sbatch_options, "command line", extra=OPTIONS)
    if rest:
        raise UsageError(f"{rest[0]!r} is not an option; script arguments do not change the conversion")
    try:
        body = args.script.read_bytes()
    except OSError as error:
        raise UsageError(f"{args.script} cannot be read: {error.strerror}") from error
    conversion = convert_script(body, args.script.name, options, os.environ, CommandSlurm(), own_program())
    if args.json:
        print(json.dumps(_as_json(conversion), indent=1))
    else:
        sys.stdout.flush()
        sys.stdout.buffer.write(conversion.script)
    for line in _explanation(conversion, args.script.name):
        print(line, file=sys.stderr)
    return 0


def _explanation(conversion: Conversion, name: str) -> list[str]:
    lines = [f"note: {note}" for note in conversion.notes]
    if conversion.plan is None:
        return [*lines, f"{name} has no #HETSTREAM line before its first command: unchanged"]
    return lines + [f"{change.change}\n    because {change.why}" for change in conversion.plan.changes]


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
