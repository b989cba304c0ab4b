"""Lines of a batch script that sbatch reads options from, taken to pieces as sbatch does it. Pure; no option is judged.

Called by `directives.py` and `convert.py`. Where sbatch's rules differ from a shell's, sbatch's hold: a backslash
escapes also within quotes, one at the end of a line counts for nothing, an empty word ends its line, and the words of
all lines are one command line, so that a value may stand on the line after its option.

Source: `_opt_batch_script`, `get_argument` in src/sbatch/opt.c, and src/sbatch/xlate.c of Slurm 22.05 to 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hetstream.base.text import shortened

# What C's isspace() takes for a blank; Python's str.isspace() takes more, such as U+00A0.
BLANKS = " \t\n\v\f\r"
# A word of a command has no more (MAX_ARG_STRLEN of Linux).
_MAX_LINE = 128 << 10
_MAGIC = ("#SBATCH", "#SLURM")
# Of another batch system. sbatch translates the lines of one, wherever they stand, and gives up after so many others.
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
    """How many lines stand before the first command: blank ones and comments, as sbatch counts them."""
    for index, line in enumerate(lines):
        text = line.strip(BLANKS)
        if text and not text.startswith("#"):
            return index
    return len(lines)


def option_lines(script: str) -> list[OptionLine]:
    """The lines before the first command that sbatch reads its options from."""
    lines = script.split("\n")
    return [
        OptionLine(number, line, line.removeprefix(mark))
        for number, line in enumerate(lines[: prologue_length(lines)], start=1)
        for mark in _MAGIC
        if line.startswith(mark)
    ]


def foreign_line(script: str) -> int | None:
    """The number of the first line with options of another batch system that sbatch translates; None without one."""
    others = 0
    for number, line in enumerate(script.split("\n"), start=1):
        if line.startswith(_FOREIGN):
            return number
        others += not line.startswith("#")
        if others > _MOST_FOREIGN_COMMANDS:
            return None
    return None


def split_line(text: str, *, blank_can_be_escaped: bool = True, is_whole: bool = False) -> list[str]:
    """The words of a line of options, as sbatch takes them.

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
