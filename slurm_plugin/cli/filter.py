"""`hetstream internal filter`: plan the conversion of an sbatch for the plugin `slurm_plugin/lua/cli_filter.lua`.

It submits nothing. What it prints is the shell command that submits, and then removes the script that was made here;
any exit code but 0 lets the plain submission go on. The command stands between two lines with the plugin's nonce: other
things may print in this process, as a user's `sitecustomize` does.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.files import temporary_place
from hetstream.base.text import printable
from hetstream.hetjob.convert.directives import OPTIONS, read_directives
from hetstream.hetjob.convert.sbatch_options import SbatchOption, SbatchOptions, parse_words
from hetstream.hetjob.errors import ConversionError
from hetstream.slurm_plugin.submit.request import notes_on_lines, parse_command_line, read_script, requested

# A word of the plugin's, in the two lines between which it looks for the plan.
NONCE = "HETSTREAM_FILTER_NONCE"
# The plugin is silent about it: most jobs are not ours.
EXIT_NOTHING_TO_CONVERT = 3

HELP = """\
usage: hetstream internal filter DIRECTIVES SCRIPT WORDS OF SBATCH

Called by the cli_filter plugin. DIRECTIVES are the site's for scripts that have none (an empty word: none), SCRIPT is
the file that sbatch has found, and the words are those that it was called with. Prints, between two lines that hold
HETSTREAM_FILTER_NONCE, the shell command that submits the converted script with the sbatch in $sbatch and removes it.

exit codes: 0 convert, 3 nothing to convert, anything else: trouble. Unless it is 0, sbatch goes on as it was called.
"""


def add_filter_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.add_argument("words", nargs=argparse.REMAINDER)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the plan, if there is something to convert."""
    if args.words[:1] in (["--help"], ["-h"]):
        print(HELP, end="")
        return 0
    if len(args.words) < 2:
        raise UsageError(
            "no sbatch command line was given. The cli_filter plugin calls this; users run: hetstream sbatch"
        )
    nonce = os.environ.pop(NONCE, "")
    if not nonce.isalnum():
        raise UsageError(f"no {NONCE}: cli_filter.lua is of another release. Tell the site's administrator")
    directives, script, *arguments = args.words
    options, unread = parse_command_line(arguments, os.environ, ())
    if not unread or unread[0] == ":" or SbatchOptions(tuple(options)).has("wrap", "help", "usage", "version"):
        return EXIT_NOTHING_TO_CONVERT
    name = Path(script).name
    with open(script, "rb") as file:
        body = read_script(file, name)
    text = body.decode(errors="surrogateescape")
    is_asked_for = bool(read_directives(text, name))
    if not is_asked_for:
        default, more = parse_words(_split(directives), "site policy", extra=OPTIONS)
        if more:
            raise UsageError(f"site policy: {more[0]!r} is not an option of hetstream. Tell the site's administrator")
        options = [*default, *options]
    if not requested(text, name, options, os.environ):
        _show(notes_on_lines(text, name))
        return EXIT_NOTHING_TO_CONVERT
    return _convert(body, name, options, unread[1:], nonce, is_asked_for)


def _convert(
    body: bytes, name: str, options: Sequence[SbatchOption], arguments: Sequence[str], nonce: str, is_asked_for: bool
) -> int:
    # What a script that is not ours does not wait for.
    from hetstream.slurm_plugin.client.slurm import CommandSlurm
    from hetstream.slurm_plugin.submit.conversion import convert_script
    from hetstream.slurm_plugin.submit.program import own_program

    try:
        conversion = convert_script(body, name, options, os.environ, CommandSlurm(), own_program())
    except ConversionError:
        if is_asked_for:
            raise
        return EXIT_NOTHING_TO_CONVERT  # an array, a Python script: nobody asked for data workers in it
    _show(conversion.notes)
    if conversion.plan is None:
        return EXIT_NOTHING_TO_CONVERT
    directory = Path(tempfile.mkdtemp(prefix="hetstream-", dir=temporary_place()))
    path = directory / name
    try:
        path.write_bytes(conversion.script)
    except OSError:
        shutil.rmtree(directory)
        raise
    command = shlex.join([*conversion.plan.sbatch_options, str(path), *arguments])
    made = shlex.quote(str(path)), shlex.quote(str(directory))
    plan = (
        "trap : INT TERM",  # what a terminal sends ends sbatch, and the script is removed all the same
        f'{shlex.join(conversion.words_to_unset())} "$sbatch" {command}'.lstrip(),
        "code=$?",
        f"rm -f -- {made[0]}; rmdir -- {made[1]}",
        "exit $code",
    )
    text = "\n".join(("", f"hetstream-plan-{nonce}", *plan, f"hetstream-end-{nonce}", ""))
    # As bytes: words of a command line need be no text, and are not for a reader's eyes.
    sys.stdout.flush()
    sys.stdout.buffer.write(os.fsencode(text))
    sys.stdout.buffer.flush()
    return 0


def _show(notes: Iterable[str]) -> None:
    for note in notes:
        print(f"hetstream: {printable(note)}", file=sys.stderr)  # the plugin shows such lines


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UsageError(f"site policy: {error} in {text!r}. Tell the site's administrator") from error
