"""Find and read the `#HETSTREAM` lines of a batch script, and the options that may stand there.

First arrow of the job line: script -> directives. Called by the command line; pure. It reads lines where Slurm reads
`#SBATCH` lines, that is before the first command, and never changes the script. An sbatch may wait until it is known
whether its job is ours, so this file loads little.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from hetstream.base.text import shortened
from hetstream.hetjob.convert.sbatch_options import TAKES_VALUE, SbatchOption
from hetstream.hetjob.errors import DirectiveError

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


@dataclass(frozen=True)
class DirectiveOption:
    """One option of a `#HETSTREAM` line.

    Attributes:
        metavar: how its value is written; empty where it has none.
        meaning: one line for the user guide and the error texts.
        default: what holds without it, in words.
    """

    metavar: str
    meaning: str
    default: str


OPTIONS: Mapping[str, DirectiveOption] = {
    "data-workers": DirectiveOption(
        "MIN[-MAX]",
        "data workers that start together with the trainer, and the most that may join later; `auto`: as many as pay, "
        "of 0-16",
        "auto, where another option asks for data workers",
    ),
    "data-worker-cpus": DirectiveOption(
        "[MIN-]N",
        "CPUs of one data worker, each with a process of its own; with MIN the size of those that join later is tried "
        "from MIN to N",
        "4",
    ),
    "data-worker-cooldown": DirectiveOption(
        "SECONDS", "time from one change of the number of data workers to the next at the least", "10"
    ),
    "data-worker-time-min": DirectiveOption(
        "TIME",
        "those that join later run in backfill holes of at least this time (`2:00`), behind everybody else, and leave "
        "before the hole ends",
        "as long as the job, with the job's priority",
    ),
    "total-steps": DirectiveOption(
        "N", "steps of the training loop in all, so that the site knows how much work is left", "not known"
    ),
    "total-epochs": DirectiveOption(
        "N", "epochs of the training loop in all, as a number of steps if the loader knows its length", "not known"
    ),
    "data-worker-threads": DirectiveOption(
        "N", "threads of each process, for datasets that are thread-safe: one process for N CPUs", "1"
    ),
    "offload": DirectiveOption(
        "HOW",
        "the part of the model's forward that depends on no state runs in data workers: `auto` where that makes a step "
        "faster, `all` with its random numbers too, `off` not at all",
        "off",
    ),
    "cache": DirectiveOption(
        "PLACE",
        "the deterministic front of each sample (read, decode, resize) is kept for later epochs and other jobs of the "
        "user: `memory:8G` on each node, or a directory on its own disk, `/local/cache:50G`; `off` wins over the "
        "environment",
        "nowhere",
    ),
    "stream-in-process-loaders": DirectiveOption(
        "",
        "data workers also make the batches of DataLoaders with `num_workers=0`, which torch makes with the program's "
        "own dataset",
        "these loaders stay local",
    ),
    "data-worker-partition": DirectiveOption("NAME", "Slurm partition of the data workers", "the cluster's default"),
    "data-worker-mem": DirectiveOption(
        "SIZE", "memory of one data worker (`16G`)", "2G per CPU if the script asks for memory, else the partition's"
    ),
    "data-worker-constraint": DirectiveOption("FEATURES", "sbatch's --constraint for the data workers", "none"),
    "data-worker-account": DirectiveOption("NAME", "account charged for the data workers", "the job's"),
    "data-worker-qos": DirectiveOption("NAME", "QOS of the data workers", "the job's"),
    "data-worker-reservation": DirectiveOption(
        "NAME",
        "reservation of the data workers, or `none`: a reservation of GPU nodes has no room for them",
        "the job's",
    ),
    "data-worker-python": DirectiveOption(
        "COMMAND",
        "Python of the data workers, as a path or a command (`'apptainer exec image.sif python'`); it has hetstream",
        "the one that the program runs",
    ),
    "gpu-data-workers": DirectiveOption(
        "MIN[-MAX]",
        "data workers for the `gpu_stage` of the program's loaders, companion jobs with one GPU each: the least and "
        "the most",
        "none",
    ),
    "gpu-data-worker-gres": DirectiveOption("GRES", "the GPU of each, as sbatch's --gres (`gpu:a100:1`)", "gpu:1"),
    "gpu-data-worker-cpus": DirectiveOption("N", "CPUs of each", "2"),
    "gpu-data-worker-mem": DirectiveOption(
        "SIZE", "memory of each", "4G per CPU if the script asks for memory, else the partition's"
    ),
    "gpu-data-worker-partition": DirectiveOption("NAME", "Slurm partition of these data workers", "the trainer's"),
    "embedding-servers": DirectiveOption(
        "MIN[-MAX]",
        "processes on CPU nodes that hold the rows of embedding tables: those that start together with the trainer, at "
        "least 1, and the most that there may be when tables grow",
        "none",
    ),
    "embedding-server-memory": DirectiveOption("SIZE", "memory of each (`64G`)", "required with --embedding-servers"),
    "embedding-server-partition": DirectiveOption("NAME", "Slurm partition of these", "the data workers'"),
    "embedding-dir": DirectiveOption(
        "DIR",
        "each start of the job makes a folder there in which they keep what they were told, on a file system that the "
        "job's hosts share; it stays if checkpoints name it",
        "`hetstream-embedding` where sbatch is called",
    ),
    "trainer-cpus": DirectiveOption(
        "N", "CPUs that each trainer task keeps", "2 per GPU of the task, never more than the script asks for"
    ),
    "on-memory-warning": DirectiveOption(
        "WHAT",
        "`migrate`: a trainer that is about to run out of memory moves, once, to a job with more, as by `hetstream "
        "migrate`; `warn`: that is only said",
        "warn",
    ),
    "job-class": DirectiveOption(
        "CLASS",
        "`guaranteed`: its GPUs are its own; `opportunistic`: it runs on what other jobs leave of theirs, as long as "
        "they do not feel it",
        "what its partition or QOS is for",
    ),
    "opportunistic-after": DirectiveOption(
        "TIME",
        "a guaranteed job that has waited so long (`30:00`) for its tenant's quota starts as an opportunistic one, and "
        "becomes guaranteed where it runs when quota is free",
        "never",
    ),
    "jobs-dir": DirectiveOption(
        "DIR",
        "place of the job's directory, on a file system that its hosts share, absolute; `%u` is the user",
        "`.hetstream` where sbatch is called",
    ),
    "journal-dir": DirectiveOption(
        "DIR", "place of the dispatcher's journal, also on a disk of the job's first node", "the job's directory"
    ),
    "checkpoint": DirectiveOption(
        "DIR", "checkpoint directory: the job gets checkpoint writers of its own on each node", "none"
    ),
    "checkpoint-size": DirectiveOption(
        "SIZE", "state of one trainer task, rounded up (`8G`)", "required with --checkpoint"
    ),
    "checkpoint-shared": DirectiveOption(
        "SIZE", "of --checkpoint-size what is equal on all ranks (`shared=`), which a node holds once", "nothing"
    ),
    "checkpoint-replicas": DirectiveOption(
        "N",
        "1: the program keeps replicas on other hosts (`CheckpointOptions(replica=True)`), which take memory too",
        "0",
    ),
}
# Those that take a value; the others are flags.
WITH_VALUE = frozenset(name for name, option in OPTIONS.items() if option.metavar)


def written(name: str) -> str:
    """Return an option as it is written, `--data-workers=MIN[-MAX]`."""
    return f"--{name}={OPTIONS[name].metavar}" if name in WITH_VALUE else f"--{name}"


MARK = "#HETSTREAM"
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
