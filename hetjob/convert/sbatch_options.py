"""sbatch's command line as data: which options exist, which take a value, what a list of words means.

Called by `convert.py` for `#SBATCH` lines and by the command line for `hetstream sbatch`. It knows the forms of
options, never what is sensible: wrong values are left for sbatch to refuse with its own words.

Source: `sbatch --help` and the option table of Slurm 22.05 to 26.05 (https://slurm.schedmd.com/sbatch.html, and
src/common/slurm_opt.c). Options of a site's SPANK plugins are in no table: sbatch itself is asked about them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hetstream.base.errors import UsageError
from hetstream.base.text import printable

# Long names by how they take a value: `--name value` and `--name=value`, only `--name=value`, or none.
_WITH_VALUE = """
    account acctg-freq array batch bb bbf begin chdir cluster cluster-constraint clusters comment constraint container
    container-id container-type context core-spec cores-per-socket cpu-freq cpus-per-gpu cpus-per-task deadline
    delay-boot dependency distribution error exclude export export-file extra extra-node-info gid gpu-bind gpu-freq
    gpus gpus-per-node gpus-per-socket gpus-per-task gres gres-flags hint input job-name kill-on-invalid-dep licenses
    mail-type mail-user mcs-label mem mem-bind mem-per-cpu mem-per-gpu mem-update mincpus network nodefile nodelist
    nodes ntasks ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres open-mode output
    partition power prefer priority profile qos reservation resources runtime segment signal sockets-per-node switches
    tasks-per-node thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid wait-all-nodes wckey
    wrap
"""
_WITH_OPTIONAL_VALUE = "exclusive get-user-env nice no-kill oom-kill-step propagate requeue resv-ports"
_WITHOUT_VALUE = """
    consolidate-segments contiguous external help hold ignore-pbs no-requeue overcommit oversubscribe parsable quiet
    reboot spread-job spread-segments stepmgr test-only usage use-min-nodes verbose version wait
"""
# The CPUs among the resources of --tres-per-task: `cpu:8,gres/gpu:1`, or with `=` as some releases write it.
TRES_CPUS = re.compile(r"(?:^|(?<=,))cpu[:=](\d+)(?=,|$)", re.ASCII)
TAKES_VALUE: Mapping[str, bool] = {
    **dict.fromkeys(_WITH_VALUE.split(), True),
    **dict.fromkeys(_WITH_OPTIONAL_VALUE.split(), False),
    **dict.fromkeys(_WITHOUT_VALUE.split(), False),
}
LETTERS: Mapping[str, str] = {
    "A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile", "G": "gpus",
    "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes", "O": "overcommit", "Q": "quiet",
    "S": "core-spec", "V": "version", "W": "wait", "a": "array", "b": "begin", "c": "cpus-per-task",
    "d": "dependency", "e": "error", "h": "help", "i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks",
    "o": "output", "p": "partition", "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose", "w": "nodelist",
    "x": "exclude",
}  # fmt: skip
_PATHS = ("chdir", "error", "input", "output")
ALIASES = {"tasks-per-node": "ntasks-per-node", "cluster": "clusters"}

# Options that came after 22.05: an abbreviation that only they make ambiguous is clear to an older sbatch, and a newer
# one refuses it.
_NEWER = """
    consolidate-segments container-id container-type external extra mem-update oom-kill-step resources resv-ports
    runtime segment spread-segments stepmgr tres-bind tres-per-task
"""
_IN_22_05 = frozenset(TAKES_VALUE) - frozenset(_NEWER.split())
# What sbatch carries from one component to the next (options without `reset_each_pass` in src/common/slurm_opt.c).
_CARRIED = """
    account acctg-freq array batch bbf begin chdir cluster cluster-constraint clusters comment container container-id
    container-type context deadline delay-boot dependency error exclude export export-file extra get-user-env gid help
    hold ignore-pbs input job-name kill-on-invalid-dep mcs-label mem mem-update nice no-kill no-requeue oom-kill-step
    open-mode output parsable prefer priority profile propagate qos quiet reboot requeue reservation signal stepmgr
    test-only time time-min uid usage verbose version wait wait-all-nodes wckey wrap
"""
# What one component consists of: all that sbatch does not carry. It applies its command line to *every* component, also
# over a component's own lines (seen on 22.05 and 26.05): `-p gpu` would take the data workers there, too.
OF_ONE_COMPONENT = frozenset(TAKES_VALUE) - frozenset(_CARRIED.split())

_MEGABYTES = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0 * 1024}


@dataclass(frozen=True)
class OptionTable:
    """The options of one of Slurm's commands.

    Attributes:
        takes_value: by long name, whether a value may stand in the next word.
        letters: long name of each letter.
        older: names that an older release has, too; an abbreviation stands for them first.
    """

    takes_value: Mapping[str, bool]
    letters: Mapping[str, str]
    older: Collection[str]


SBATCH = OptionTable(TAKES_VALUE, LETTERS, _IN_22_05)
_IN_ONE_WORD = ("no-kill", "immediate", "kill-on-bad-exit")  # letters whose optional value stands in the same word


@dataclass(frozen=True)
class SbatchOption:
    """One option as somebody wrote it.

    Attributes:
        name: the long name without dashes (`cpus-per-task` for `-c`).
        value: what it was given; None for a flag.
        origin: where it stands, for messages (`line 7`, `command line`, `SBATCH_PARTITION`).
        words: the command-line words that wrote it, so that they can be passed on unchanged. Empty for a letter
            that shares its word with the one before (`-HW`).
    """

    name: str
    value: str | None
    origin: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class SbatchOptions:
    """Options in the order in which sbatch applies them: of two with one name, the later wins."""

    items: tuple[SbatchOption, ...] = ()

    def last(self, name: str) -> SbatchOption | None:
        """Return the option that is in force under this long name, or None."""
        return next((item for item in reversed(self.items) if item.name == name), None)

    def value(self, name: str) -> str | None:
        """Return the value in force, or None when the option is absent or a bare flag."""
        item = self.last(name)
        return item.value if item else None

    def number(self, name: str) -> int | None:
        """Return the value in force as a positive integer; None when absent or of another form (sbatch judges that)."""
        text = self.value(name) or ""
        return int(text) if text.isascii() and text.isdigit() and int(text) > 0 else None

    def has(self, *names: str) -> bool:
        """Return whether any of these options is given."""
        return any(item.name in names for item in self.items)


def parse_words(
    arguments: Sequence[str],
    origin: str | Sequence[str],
    extra: Collection[str] = (),
    is_value: Callable[[int], bool] | None = None,
    table: OptionTable = SBATCH,
) -> tuple[list[SbatchOption], list[str]]:
    """Split words into options and what follows them, as sbatch's getopt does.

    Args:
        arguments: what stands after `#SBATCH`, or after `sbatch` on a command line.
        origin: recorded in each option; one for each word, or one for all.
        extra: long names, besides sbatch's, that take a value (hetstream's own).
        is_value: whether the word at an index is the value of the option before it, whose long name is in no table (a
            SPANK plugin's).
        table: of the command that they are for.

    Returns:
        The options in order, and the words from the first one that is not an option (the script and its arguments).

    Raises:
        UsageError: an option that needs a value stands last.
    """
    origins = [origin] * len(arguments) if isinstance(origin, str) else origin
    options: list[SbatchOption] = []
    index = 0
    while index < len(arguments):
        word, origin = arguments[index], origins[index]
        index += 1
        if word == "--":
            break
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = _full_name(name, extra, table)
            is_asked = name not in table.takes_value and name not in extra and index < len(arguments)
            if equals:
                options.append(SbatchOption(name, value, origin, (word,)))
            elif table.takes_value.get(name, name in extra) or (is_asked and is_value is not None and is_value(index)):
                following = _following(arguments, index, word, origin)
                options.append(SbatchOption(name, following, origin, (word, following)))
                index += 1
            else:
                options.append(SbatchOption(name, None, origin, (word,)))
        elif word.startswith("-") and len(word) > 1:
            index += _parse_letters(arguments, index, origin, options, table)
        else:
            index -= 1
            break
    return options, list(arguments[index:])


def _parse_letters(
    arguments: Sequence[str], index: int, origin: str, options: list[SbatchOption], table: OptionTable
) -> int:
    """Parse the word before `index` as `-c16`, `-c 16` or `-HW`; return how many following words it took."""
    word = arguments[index - 1]
    written: tuple[str, ...] = (word,)
    for place, letter in enumerate(word[1:], start=1):
        name = table.letters.get(letter, letter)
        tail = word[place + 1 :]
        if table.takes_value.get(name, False):
            if tail:
                options.append(SbatchOption(name, tail, origin, written))
                return 0
            following = _following(arguments, index, word, origin)
            options.append(SbatchOption(name, following, origin, (*written, following) if written else (following,)))
            return 1
        if name in _IN_ONE_WORD and tail:
            options.append(SbatchOption(name, tail, origin, written))
            return 0
        options.append(SbatchOption(name, None, origin, written))
        written = ()
    return 0


def _full_name(name: str, extra: Collection[str], table: OptionTable) -> str:
    """Undo getopt's abbreviation: a unique beginning of a long name stands for it."""
    if name not in table.takes_value and name not in extra:
        matches = [known for known in table.takes_value if known.startswith(name)]
        old = [known for known in matches if known in table.older]
        found = old or matches
        name = found[0] if len(found) == 1 else name
    return ALIASES.get(name, name)


def _following(arguments: Sequence[str], index: int, word: str, origin: str) -> str:
    if index >= len(arguments):
        raise UsageError(f"{origin}: option {word} needs a value. Write {word}=VALUE, or see: sbatch --help")
    return arguments[index]


def plain_words(options: Iterable[SbatchOption]) -> list[str]:
    """Options written anew by their long names, each a word of its own."""
    return [f"--{item.name}" if item.value is None else f"--{item.name}={item.value}" for item in options]


def has_line_break(text: str) -> bool:
    """Return whether a text would be more than one line for sbatch, for a shell, or in what Slurm's commands print."""
    return any(character in text for character in "\n\r\0")


def refuse_line_breaks(options: Iterable[SbatchOption]) -> None:
    """Refuse options that are no text of one line: what follows the line break would be a line of its own.

    Raises:
        UsageError: it names all of them.
    """
    broken = [item for item in options if has_line_break(f"{item.name}{item.value or ''}")]
    if broken:
        named = ", ".join(f"{item.origin}: --{printable(item.name)}={item.value!r}" for item in broken)
        raise UsageError(f"{named}: a value with a line break cannot be a line for sbatch. Write it on one line")


def refuse_other_words(arguments: Sequence[str]) -> None:
    """Refuse words for sbatch that are not options with their values: it would take the first other one for the script.

    A path may have line breaks, as no line is made of it; another value with one is no text that anybody meant.

    Raises:
        UsageError: it names what is wrong.
    """
    options, others = parse_words(arguments, "submission")
    while others[:1] == [":"]:  # another component
        more, others = parse_words(others[1:], "submission")
        options += more
    if others:
        raise UsageError(f"submission: {others[0]!r} is no option of sbatch, which would take it for the script")
    refuse_line_breaks(item for item in options if item.name not in _PATHS or "\0" in (item.value or ""))


def words_of(options: Iterable[SbatchOption]) -> list[str]:
    """Return the command line that says the same, word for word."""
    return [word for option in options for word in option.words]


def megabytes(text: str) -> float | None:
    """Return a memory size of Slurm (`4000`, `16G`) in MB, or None when it has another form."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)B?", text.strip(), re.IGNORECASE)
    if not match:
        return None
    return float(match[1]) * _MEGABYTES[match[2].upper()]


def time_limit_s(text: str) -> float | None:
    """Return a time of Slurm (`7` minutes, `5:00` with seconds, `02:03:04`, `3-02`) in seconds, or None for another
    form.
    """
    match = re.fullmatch(r"(?:(\d{1,9})-)?(\d{1,9})(?::(\d{1,9}))?(?::(\d{1,9}))?", text.strip(), re.ASCII)
    if not match:
        return None
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:  # days are followed by hours, then minutes
        hours, minutes, secs = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, secs = numbers
    else:  # minutes, then seconds
        hours, (minutes, secs) = 0, [*numbers, 0][:2]
    return float(((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs)


def memory_words(size_mb: float) -> str:
    """Return a size in MB as Slurm writes it, rounded up to whole MB (`16G`, `1500M`)."""
    whole = math.ceil(size_mb)
    return f"{whole // 1024}G" if whole and whole % 1024 == 0 else f"{whole}M"


# sbatch's environment as options: which variables it reads, and what of them holds beside a script's own options.
#
# Called for every conversion. sbatch reads a variable as an option of *every* component, over a component's own lines:
# SBATCH_PARTITION would take the data workers to the trainer's partition, too. So these options become the trainer's,
# and sbatch is called without the variables.
#
# Source: `env_vars` in src/sbatch/opt.c and `validate_options_salloc_sbatch_srun` in src/common/slurm_opt.c of Slurm
# 22.05 to 26.05.

# In sbatch's order: of two variables with one option the later wins. Variables of sbatch itself (SBATCH_WAIT) and of
# what it carries from component to component anyway (SBATCH_TIMELIMIT) are not listed, but for those of which component
# 1 may have its own.
_VARIABLES: Mapping[str, str] = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_CONSOLIDATE_SEGMENTS": "consolidate-segments",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CONTAINER": "container",
    "SBATCH_CONTAINER_ID": "container-id",
    "SBATCH_CONTAINER_TYPE": "container-type",
    "SBATCH_CORE_SPEC": "core-spec",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_DISTRIBUTION": "distribution",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_GRES": "gres",
    "SBATCH_GRES_FLAGS": "gres-flags",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPU_BIND": "gpu-bind",
    "SBATCH_GPU_FREQ": "gpu-freq",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_SOCKET": "gpus-per-socket",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SLURM_HINT": "hint",
    "SBATCH_HINT": "hint",
    "SBATCH_MEM_BIND": "mem-bind",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NETWORK": "network",
    "SBATCH_OVERCOMMIT": "overcommit",
    "SBATCH_PARTITION": "partition",
    "SBATCH_POWER": "power",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_SEGMENT_SIZE": "segment",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_SPREAD_JOB": "spread-job",
    "SBATCH_SPREAD_SEGMENTS": "spread-segments",
    "SBATCH_THREAD_SPEC": "thread-spec",
    "SBATCH_THREADS_PER_CORE": "threads-per-core",
    "SBATCH_TRES_BIND": "tres-bind",
    "SBATCH_TRES_PER_TASK": "tres-per-task",
    "SBATCH_USE_MIN_NODES": "use-min-nodes",
}
# Both parts of --switches=COUNT@TIME, and the file with the nodes, which is no option's.
_SWITCHES, _SWITCH_TIME, _HOSTFILE = "SBATCH_REQ_SWITCH", "SBATCH_WAIT4SWITCH", "SLURM_HOSTFILE"
_FLAGS = ("consolidate-segments", "overcommit", "spread-job", "spread-segments", "use-min-nodes")
# An option of the script or the command line on the left makes sbatch forget those of its environment on the right. Of
# CPUs only newer releases do so, and 22.05 refuses both; its own variable stays in sbatch's environment, which decides.
_THREADS = ("ntasks-per-core", "threads-per-core", "extra-node-info", "cores-per-socket", "sockets-per-node")
_LEFT_TO_SBATCH = ("cpus-per-gpu",)
_GIVES_WAY: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("mem",), ("mem-per-cpu", "mem-per-gpu")),
    (("mem-per-cpu",), ("mem", "mem-per-gpu")),
    (("mem-per-gpu",), ("mem", "mem-per-cpu")),
    (("cpus-per-task",), _LEFT_TO_SBATCH),
    (("hint",), _THREADS),
    (_THREADS, ("hint",)),
)


def from_environment(
    environ: Mapping[str, str], script: Sequence[SbatchOption] = (), command_line: Sequence[SbatchOption] = ()
) -> list[SbatchOption]:
    """Return the options that sbatch would read from its environment, for those that a component may have for itself.

    Args:
        environ: of sbatch.
        script: options of the script, which the environment's win over.
        command_line: its options, which win over the environment's.

    Returns:
        Without those that sbatch forgets beside another option of the script or the command line.
    """
    found = [
        SbatchOption(name, value, variable, (_written(name, value),))
        for variable, name in _VARIABLES.items()
        if variable in environ and (value := _value(name, environ[variable])) is not False
    ]
    others = SbatchOptions((*script, *command_line))
    found += _switches(environ, others)
    if _HOSTFILE in environ and not others.has("nodelist", "nodefile"):
        path = environ[_HOSTFILE]
        for name, value in (("nodelist", path if "/" in path else f"./{path}"), ("distribution", "arbitrary")):
            found.append(SbatchOption(name, value, _HOSTFILE, (_written(name, value),)))
    dropped = _forgotten(environ, script, command_line)
    return [option for option in found if option.name not in dropped]


def taken_variables(
    environ: Mapping[str, str], script: Sequence[SbatchOption] = (), command_line: Sequence[SbatchOption] = ()
) -> list[str]:
    """Return the variables that have become options, or give way to one: sbatch is to be called without them.

    Not those beside whose option some releases refuse the job: sbatch sees them, and says so or forgets them.
    """
    dropped = _forgotten(environ, script, command_line)
    left = dropped.intersection(_LEFT_TO_SBATCH)
    read = [
        variable
        for variable, name in _VARIABLES.items()
        if variable in environ and name not in left and _value(name, environ[variable]) is not False
    ]
    return sorted([*read, *(environ.keys() & {_SWITCHES, _SWITCH_TIME, _HOSTFILE})])


def _forgotten(
    environ: Mapping[str, str], script: Sequence[SbatchOption], command_line: Sequence[SbatchOption]
) -> set[str]:
    """The options of the environment that give way to others of the script or the command line."""
    of_environment = {name for variable, name in _VARIABLES.items() if variable in environ}
    firm = {option.name for option in script} - of_environment | {option.name for option in command_line}
    if TRES_CPUS.search(SbatchOptions((*script, *command_line)).value("tres-per-task") or ""):
        firm.add("cpus-per-task")
    dropped = {name for strong, weak in _GIVES_WAY if firm & {*strong} for name in weak}
    # One value of sbatch's: the command line's is the last. As options newer releases refuse both.
    return dropped | ({"exclusive"} if any(option.name == "oversubscribe" for option in command_line) else set())


def handed_on(environ: Mapping[str, str], script: SbatchOptions, command_line: SbatchOptions) -> dict[str, str]:
    """Return the variables that sbatch hands on to the job, as far as no file has them (`--export-file`).

    The command line wins over SBATCH_EXPORT, and that over the script.
    """
    if command_line.has("export-file") or script.has("export-file"):
        return {}
    export = command_line.value("export") or environ.get("SBATCH_EXPORT") or script.value("export") or "ALL"
    listed = export.split(",")
    is_whole = any(word.upper() == "ALL" for word in listed)
    named = {name: value for name, value in environ.items() if is_whole or name in listed}
    return {**named, **dict(word.split("=", 1) for word in listed if "=" in word)}


def _value(name: str, text: str) -> str | Literal[False] | None:
    """The option's value, None for a flag; False where the variable takes a flag of the script back."""
    if name in _FLAGS:
        is_set = text == "" or text.lower() == "yes" or bool(re.fullmatch(r"\s*[+-]?0*[1-9]\d*", text, re.ASCII))
        return None if is_set else False
    return text if text or TAKES_VALUE[name] else None


def _written(name: str, value: str | None) -> str:
    return f"--{name}" if value is None else f"--{name}={value}"


def _switches(environ: Mapping[str, str], others: SbatchOptions) -> list[SbatchOption]:
    """`--switches=COUNT@TIME`, which sbatch reads from a variable for each of the two."""
    count, _, time = (others.value("switches") or "").partition("@")
    if (_SWITCHES not in environ and _SWITCH_TIME not in environ) or not (count := environ.get(_SWITCHES, count)):
        return []
    time = environ.get(_SWITCH_TIME, time)
    value = f"{count}@{time}" if time else count
    origin = _SWITCHES if _SWITCHES in environ else _SWITCH_TIME
    return [SbatchOption("switches", value, origin, (_written("switches", value),))]
