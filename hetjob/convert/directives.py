"""Find and read the `#HETSTREAM` lines of a batch script.

First arrow of the job line: script -> directives -> JobSpec. Called by the command line; pure. It reads lines where
Slurm reads `#SBATCH` lines, that is before the first command, and never changes the script.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from hetstream.base.text import shortened
from hetstream.hetjob.convert.sbatch_options import TAKES_VALUE, SbatchOption
from hetstream.hetjob.convert.spec import AUTO, OPTIONS, JobSpec, parse_value
from hetstream.hetjob.errors import DataWorkersMissing, DirectiveError

# Lines of a batch script that sbatch reads options from, taken to pieces as sbatch does it. Pure; no option is judged.
#
# Called by `convert.py`, too. Where sbatch's rules differ from a shell's, sbatch's hold: a backslash
# escapes also within quotes, one at the end of a line counts for nothing, an empty word ends its line, and the words of
# all lines are one command line, so that a value may stand on the line after its option.
#
# Source: `_opt_batch_script`, `get_argument` in src/sbatch/opt.c, and src/sbatch/xlate.c of Slurm 22.05 to 26.05.

# What C's isspace() takes for a blank; Python's str.isspace() takes more, such as U+00A0.
BLANKS = " \t\n\v\f\r"
# A word of a command has no more (MAX_ARG_STRLEN of Linux).
_MAX_LINE = 128 << 10
_MAGIC = ("#SBATCH", "#SLURM")
# Of another batch system. sbatch translates the lines of one, wherever they stand, and gives up after this many others.
_FOREIGN = ("#BSUB", "#PBS")
_MOST_FOREIGN_COMMANDS = 100
_COMPONENT = re.compile(rf"[{BLANKS}]*(?:het|pack)job(?=[{BLANKS}]|$)", re.IGNORECASE)


@dataclass(frozen=True)
class OptionLine:
    """One line with options for sbatch.

    Attributes:
        number: of the line, from 1 on.
        line: the whole of it.
        text: what stands behind the mark.
    """

    number: int
    line: str
    text: str

    @property
    def starts_component(self) -> bool:
        """Whether another component begins here."""
        return _COMPONENT.match(self.text) is not None


def prologue_length(lines: Sequence[str]) -> int:
    """Return how many lines stand before the first command: blank ones and comments, as sbatch counts them."""
    for index, line in enumerate(lines):
        text = line.strip(BLANKS)
        if text and not text.startswith("#"):
            return index
    return len(lines)


def option_lines(script: str) -> list[OptionLine]:
    """Return the lines before the first command that sbatch reads its options from."""
    lines = script.split("\n")
    return [
        OptionLine(number, line, line.removeprefix(mark))
        for number, line in enumerate(lines[: prologue_length(lines)], start=1)
        for mark in _MAGIC
        if line.startswith(mark)
    ]


def foreign_line(script: str) -> int | None:
    """Return the number of the first line with options of another batch system that sbatch translates; None without
    one.
    """
    others = 0
    for number, line in enumerate(script.split("\n"), start=1):
        if line.startswith(_FOREIGN):
            return number
        others += not line.startswith("#")
        if others > _MOST_FOREIGN_COMMANDS:
            return None
    return None


def split_line(text: str, *, blank_can_be_escaped: bool = True, is_whole: bool = False) -> list[str]:
    """Return the words of a line of options, as sbatch takes them.

    Args:
        text: what stands behind the mark.
        blank_can_be_escaped: as from Slurm 24.05 on; before, a backslash and a blank end the word.
        is_whole: refuse a line whose end sbatch would pass over, as it does after an empty word.

    Raises:
        ValueError: an open quote, a colon that would begin a component, more than the words of a command can have, or
            such an end.
    """
    if len(text) > _MAX_LINE:
        raise ValueError(f"it has {len(text):,} characters, {_MAX_LINE:,} at most are read")
    found: list[str] = []
    at = 0
    while True:
        while at < len(text) and text[at] in BLANKS:
            at += 1
        begin = at
        if text[at : at + 1] == ":":
            raise ValueError("a word that begins with ':'")
        # sbatch blanks the word hetjob wherever it stands, finds no argument there, and reads no further.
        word, at = ("", at) if _COMPONENT.match(text, at) else _word(text, at, blank_can_be_escaped)
        if not word:
            break  # the end, a comment, or an empty word, at which sbatch stops, too
        found.append(word)
    unread = text[begin:].strip(BLANKS + "\\")
    if is_whole and unread and not unread.startswith("#"):
        raise ValueError(f"an empty word: {shortened(unread, 50)!r}")
    return found


def _word(text: str, at: int, blank_can_be_escaped: bool) -> tuple[str, int]:
    """The word that begins here, and where it ends."""
    found: list[str] = []
    quote = ""
    escaped = False
    while at < len(text) and (quote or text[at] not in BLANKS) and text[at] != "\n":
        character = text[at]
        if escaped:
            escaped = False
        elif character == "\\":
            at += 1
            escaped = not (blank_can_be_escaped and text[at : at + 1] == " ")
            if not escaped:
                found.append(" ")
                at += 1
            continue
        elif character == quote:
            quote = ""
            at += 1
            continue
        elif not quote and character in "\"'":
            quote = character
            at += 1
            continue
        elif not quote and character == "#":
            break
        found.append(character)
        at += 1
    if quote:
        raise ValueError("No closing quotation")
    return "".join(found), at


MARK = "#HETSTREAM"
# Options that say something of a job without data workers, too.
_WITHOUT_WORKERS = (
    *("jobs-dir", "job-class", "opportunistic-after"),
    *(name for name in OPTIONS if name.startswith(("checkpoint", "embedding"))),
)
_MEANT = re.compile(r"\s*#\s*hetstream\b", re.IGNORECASE)


@dataclass(frozen=True)
class Directive:
    """One option of a directive.

    Attributes:
        name: long name without dashes, as written.
        value: its text; None when none was given.
        origin: `line 3`, or `command line`.
    """

    name: str
    value: str | None
    origin: str


def _is_directive(line: str) -> bool:
    return line.startswith(MARK) and (len(line) == len(MARK) or line[len(MARK)].isspace())


def late_directives(script: str) -> list[int]:
    """Return numbers of the lines that look like directives but stand after the first command, where they mean
    nothing.
    """
    lines = script.split("\n")
    start = prologue_length(lines)
    return [number for number, line in enumerate(lines[start:], start=start + 1) if _is_directive(line)]


def near_misses(script: str) -> list[int]:
    """Return numbers of the lines that were probably meant as directives but are comments: `# HETSTREAM`,
    `#hetstream`.
    """
    lines = script.split("\n")
    prologue = enumerate(lines[: prologue_length(lines)], start=1)
    return [number for number, line in prologue if _MEANT.match(line) and not _is_directive(line)]


def read_directives(script: str, name: str) -> list[Directive]:
    """Return all directives of a script, in order.

    Args:
        script: the whole text.
        name: the script's name, for messages.

    Raises:
        DirectiveError: no words, words that are no options, or open quotes; every such line is named.
    """
    lines = script.split("\n")
    found: list[Directive] = []
    problems: list[str] = []
    for number, line in enumerate(lines[: prologue_length(lines)], start=1):
        if _is_directive(line):
            try:
                found += _read_words(split_line(line[len(MARK) :], is_whole=True), f"line {number}")
            except ValueError as error:
                problems.append(f"line {number}: {error}")
    if problems:
        raise DirectiveError(f"{name} {'; '.join(problems)}. A directive looks like: {MARK} --data-workers=2-8")
    return found


def _read_words(arguments: Sequence[str], origin: str) -> list[Directive]:
    found: list[Directive] = []
    unread = list(arguments)
    if not unread:
        raise ValueError(f"{MARK} without an option")
    while unread:
        word = unread.pop(0)
        if not word.startswith("--") or len(word) == 2:
            raise ValueError(f"{word!r} is not an option")
        name, equals, value = word[2:].partition("=")
        if equals:
            found.append(Directive(name, value, origin))
        elif unread and not unread[0].startswith("-"):
            found.append(Directive(name, unread.pop(0), origin))
        else:
            found.append(Directive(name, None, origin))
    return found


# Of `difflib`'s likeness: two letters that have changed places, in a long name.
_SURELY_MEANT = 0.9


def from_command_line(options: Sequence[SbatchOption]) -> list[Directive]:
    """hetstream's own among the options of a command line, misspelt ones too."""
    return [Directive(option.name, option.value, option.origin) for option in options if is_own(option.name)]


def is_own(name: str) -> bool:
    """Return whether an option is hetstream's, or can only be meant as one: sbatch has none that begins so, or is so
    near.
    """
    if name in OPTIONS or name.startswith(("data-worker", "gpu-data-worker", "trainer-", "checkpoint", "embedding-")):
        return True
    return name not in TAKES_VALUE and bool(get_close_matches(name, OPTIONS, n=1, cutoff=_SURELY_MEANT))


def read_spec(directives: Sequence[Directive], name: str, counts_from_history: bool = False) -> JobSpec | None:
    """Put the directives together; of two with one name the later wins, so append the command line's.

    Args:
        directives: of the script first, of the command line last.
        name: the script's name, for messages.
        counts_from_history: whether past jobs were to say how many data workers, where nobody else does.

    Returns:
        None when there is no directive at all: the script is not ours.

    Raises:
        DirectiveError: unknown options and wrong values, all of them at once.
        DataWorkersMissing: past jobs have not said how many, and nothing else is wrong.
    """
    if not directives:
        return None
    problems: list[str] = []
    fields: dict[str, Any] = {}
    for directive in directives:
        written = f"{directive.origin}: --{directive.name}"
        if directive.name not in OPTIONS:
            close = get_close_matches(directive.name, OPTIONS, n=1)
            problems.append(
                f"{written} is unknown (did you mean --{close[0]}?)"
                if close
                else f"{written} is unknown; valid are {', '.join(f'--{known}' for known in OPTIONS)}"
            )
        else:
            try:
                fields |= parse_value(directive.name, directive.value)
            except ValueError as error:
                value = directive.value or ""
                given = "" if directive.value is None else f"={value if value.isprintable() else repr(value)}:"
                problems.append(f"{written}{given} {error}")
    names = {directive.name for directive in directives}
    needs_data_workers = names - {*_WITHOUT_WORKERS}
    # An unknown option may be this one misspelt.
    is_missing = names <= OPTIONS.keys() and bool(needs_data_workers) and "data-workers" not in names
    if is_missing and not counts_from_history:
        fields |= parse_value("data-workers", AUTO)
        is_missing = False
    kind = DataWorkersMissing if is_missing and not problems else DirectiveError
    if is_missing:
        problems.append(f"{directives[0].origin}: --data-workers=MIN[-MAX] is missing; it says how many data workers")
    if problems:
        raise kind(f"{name} {'; '.join(problems)}")
    try:
        return JobSpec(**fields)
    except DirectiveError as exc:
        raise DirectiveError(f"{name}: {exc}") from exc
