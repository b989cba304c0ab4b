"""What is asked of hetstream for one script: its lines, the words of the command line, and the environment.

The commands that submit begin here, and so does the filter, which an sbatch waits for: this file loads neither Slurm's
client nor the conversion, as most scripts need none.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import BinaryIO

from hetstream.base.errors import UsageError
from hetstream.hetjob.convert.directives import (
    WITH_VALUE,
    Directive,
    from_command_line,
    is_own,
    late_directives,
    near_misses,
    read_directives,
)
from hetstream.hetjob.convert.sbatch_options import SbatchOption, parse_words

# Slurm takes 4 MB unless the site allows more (max_script_size in slurm.conf(5)).
_MOST_SCRIPT_BYTES = 64 << 20
# Of hetstream's commands with a command line of sbatch.
_OWN_FLAGS = ("dry-run", "json", "auto", "no-wait")
# The class of a job that says nothing of it.
CLASS_VARIABLE = "HETSTREAM_JOB_CLASS"


def read_script(file: BinaryIO, name: str) -> bytes:
    """Return a whole script, from a file or a pipe.

    Raises:
        UsageError: it is too large, or has no end.
        OSError: it cannot be read.
    """
    body = file.read(_MOST_SCRIPT_BYTES + 1)
    if len(body) > _MOST_SCRIPT_BYTES:
        raise UsageError(f"{name}: more than {_MOST_SCRIPT_BYTES:,} bytes are no batch script. Check its name")
    return body


def parse_command_line(
    arguments: Sequence[str], environ: Mapping[str, str], extra: Collection[str] = WITH_VALUE
) -> tuple[list[SbatchOption], list[str]]:
    """Return the options of a command line of sbatch, and what follows them; see `parse_words`.

    Of an option that is in no table sbatch itself is asked whether the next word is its value.
    """

    def is_value(index: int) -> bool:
        name = arguments[index - 1].removeprefix("--")
        if name in _OWN_FLAGS or is_own(name):
            return False
        from hetstream.slurm_plugin.client.slurm import sbatch_takes_value  # few command lines need it

        return sbatch_takes_value(name, environ)

    return parse_words(arguments, "command line", extra=extra, is_value=is_value)


def requested(
    text: str, name: str, command_line: Sequence[SbatchOption], environ: Mapping[str, str]
) -> list[Directive]:
    """Return all that is asked for, what wins last; nothing: the script is left alone.

    Args:
        text: the script.
        name: its name, for messages.
        command_line: options of sbatch and of hetstream.
        environ: may give a class to a job whose script and command line say none. Within a job the variable says what
            that job is; what it submits is a job of its own.

    Raises:
        DirectiveError: a line of the script is wrong; see `read_directives`.
    """
    directives = [*read_directives(text, name), *from_command_line(command_line)]
    value = environ.get(CLASS_VARIABLE)
    if value is None or "SLURM_JOB_ID" in environ or any(directive.name == "job-class" for directive in directives):
        return directives
    return [Directive("job-class", value, f"environment variable {CLASS_VARIABLE}"), *directives]


def notes_on_lines(text: str, name: str) -> tuple[str, ...]:
    """Return what to say about lines that look like directives and are none."""
    return (
        *(
            f"{name} line {number}: a comment, not a directive. A directive begins the line as: #HETSTREAM --"
            for number in near_misses(text)
        ),
        *(
            f"{name} line {number}: a #HETSTREAM line after the first command has no effect"
            for number in late_directives(text)
        ),
    )
