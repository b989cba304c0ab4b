"""srun's command line: where its options end, and which of them say how many CPUs a step takes. Pure.

Called by `step_demand.py`.

Source: the option table of Slurm 22.05 to 26.05 (src/common/slurm_opt.c, https://slurm.schedmd.com/srun.html).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetstream.hetjob.convert.sbatch_options import LETTERS, SBATCH, TAKES_VALUE, OptionTable
from hetstream.hetjob.convert.shell import Unknown, Values, Word, as_number, unquoted

_WITH_VALUE = """
    accel-bind autocomplete bcast-exclude cpu-bind cpu_bind epilog het-group ignore-signals jobid mpi msg-timeout
    pack-group prolog relative slurmd-debug task-epilog task-prolog threads treewidth wait
"""
_WITHOUT = """
    async bcast compress debugger-test disable-status exact immediate interactive kill-on-bad-exit label multi-prog
    no-allocate overlap preserve-env pty quit-on-interrupt send-libs unbuffered wait-for-children whole
    external-launcher x11
"""
_TAKES_VALUE: Mapping[str, bool] = {
    **TAKES_VALUE,
    **dict.fromkeys(_WITHOUT.split(), False),
    **dict.fromkeys(_WITH_VALUE.split(), True),
}
_LETTERS: Mapping[str, str] = {
    **LETTERS, "E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads", "W": "wait",
    "X": "disable-status", "Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered",
}  # fmt: skip
# Without what came after 22.05.
SRUN = OptionTable(
    _TAKES_VALUE, _LETTERS, {*SBATCH.older, *_WITH_VALUE.split(), *_WITHOUT.split()} - {"external-launcher"}
)
_OPTIONAL = ("I", "K", "k")  # their value stands in the same word
# Of these the number of CPUs depends on the node's hardware.
_OF_HARDWARE = [
    "core-spec",
    "cores-per-socket",
    "extra-node-info",
    "hint",
    "mincpus",
    "ntasks-per-core",
    "ntasks-per-gpu",
    "ntasks-per-socket",
    "ntasks-per-tres",
    "resources",
    "sockets-per-node",
    "thread-spec",
    "threads-per-core",
]
_MOST_READINGS = 64


@dataclass(frozen=True)
class Given:
    """An option's value in a word: behind so many characters of it, or behind `=` (None)."""

    word: Word
    skipped: int | None = 0

    def texts(self, values: Values) -> list[str]:
        """Return all that it may be.

        Raises:
            Unknown: that is not known.
        """
        texts = values.of(self.word.text)
        return [text.partition("=")[2] if self.skipped is None else text[self.skipped :] for text in texts]


Step = Mapping[str, Given | None]


def steps_of(arguments: Sequence[Word], values: Values) -> list[Step]:
    """Return the options of an srun, by their long names, in each reading that the variables among its words allow.

    Raises:
        Unknown: a word may hold options, and nobody knows which; or they ask for hardware.
    """
    found = [options for options, _ in _readings(arguments, values)]
    for name in (name for options in found for name in options if name in _OF_HARDWARE):
        raise Unknown(f"--{name} depends on the nodes' hardware")
    return found


def programs_of(arguments: Sequence[Word], values: Values) -> list[list[Word]]:
    """Return what an srun runs, in each of these readings.

    Raises:
        Unknown: as above, or it is in a file (`--multi-prog`).
    """
    found = _readings(arguments, values)
    if any("multi-prog" in options for options, _ in found):
        raise Unknown("what --multi-prog runs is in a file")
    return [program for _, program in found]


def _readings(arguments: Sequence[Word], values: Values) -> list[tuple[Step, list[Word]]]:
    found: list[tuple[Step, list[Word]]] = []
    pending: list[tuple[dict[str, Given | None], list[Word]]] = [({}, list(arguments))]
    while pending:
        options, unread = pending.pop()
        program: list[Word] = []
        while unread:
            word = unread.pop(0)
            if re.match(r'"?[$`]', word.text):
                if re.match(r'"?\$\((which|command -v|type -p)\s', word.text):
                    program = [word, *unread]
                    break
                texts = values.of(word.text)
                if any(re.match(r'"?[$`]', piece) for text in texts for piece in text.split()):
                    raise Unknown(f"{word.text[:40]!r} has a $ in its value, which a shell leaves as it is")
                split = [[Word(piece, word.line) for piece in text.split()] for text in texts]
                pending += [(dict(options), [*pieces, *unread]) for pieces in split]
                options = {"": None}
                break
            text = unquoted(word.text)
            if not text.startswith("-") or text == "--":
                if text == ":":
                    raise Unknown("it starts a heterogeneous step")
                program = unread if text == "--" else [word, *unread]
                break
            _read_option(text, word, unread, options)
        if "" not in options:
            found.append((options, program))
        if len(found) + len(pending) > _MOST_READINGS:
            raise Unknown("it can be read in too many ways")
    return found


def _read_option(text: str, word: Word, unread: list[Word], options: dict[str, Given | None]) -> None:
    if text.startswith("--"):
        name, equals, _ = text[2:].partition("=")
        if name not in _TAKES_VALUE:
            matches = [known for known in _TAKES_VALUE if known.startswith(name)]
            name = matches[0] if len(matches) == 1 else name
        # Of a plugin's option nobody knows whether the next word is its value: too much is read rather than too little.
        takes_next = _TAKES_VALUE.get(name, bool(unread) and not unread[0].text.startswith("-"))
        options[name] = Given(word, None) if equals else Given(unread.pop(0)) if takes_next and unread else None
        return
    for place, letter in enumerate(text[1:], start=2):
        name = _LETTERS.get(letter, letter)
        if _TAKES_VALUE.get(name, False):
            # An equals sign is part of a letter's value, and no number.
            options[name] = Given(word, place) if text[place:] else Given(unread.pop(0)) if unread else None
            return
        options[name] = None
        if letter in _OPTIONAL:
            return


# mpirun's command line and its like: how many processes it starts, and where its options end. Pure.
#
# Called by `step_demand.py`. The options are those of Open MPI (mpirun, prterun), Hydra (mpiexec) and ibrun that say
# nothing of CPUs; any other is `Unknown`, because it may bind processes to CPUs or count them in another way.
#
# Source: mpirun(1) of Open MPI 4 and 5, `mpiexec -help` of MPICH 4.

_PROCESSES = ("np", "n", "c")
_PER_NODE = ("ppn", "npernode", "N", "ntasks-per-node", "perhost")
# Without a value, with one, and with two.
_NUM_VALUES = {
    name: number
    for number, names in enumerate(
        (
            "oversubscribe nooversubscribe allow-run-as-root report-bindings display-map display-allocation tag-output "
            "timestamp-output v verbose q quiet l prepend-rank genvall envall bynode pernode",
            "x H host hosts f hostfile machinefile prefix wdir wd path output-filename bootstrap launcher iface "
            "genvlist envlist bind-to map-by rank-by mpi outfile-pattern errfile-pattern stdin",
            "mca gmca genv env",
        )
    )
    for name in names.split()
}
# Where each process is placed and bound: to one of these, and not to a number of CPUs.
_PLACES = re.compile(r"(none|core|hwthread|slot|socket|package|numa|l\dcache|board|node)")
_OF_MAPPING = re.compile(r"rmaps|bind|map|hwloc|rank|slot|cpu|core", re.IGNORECASE)
# Variables of MPI that do what such options do.
OF_MPI = re.compile(r"(OMPI|PRTE|PMIX)_MCA_\w*(rmaps|bind|map|hwloc|slot|cpu|core)\w*|(I_MPI|HYDRA|MV2|MPICH)_\w+")


def processes_of_mpi(arguments: Sequence[Word], values: Values) -> tuple[list[int], bool]:
    """Return how many processes it may start, and whether that is on each node; nothing where it does not say.

    Raises:
        Unknown: an option is not known, or its value.
    """
    return _read(arguments, values)[:2]


def program_of_mpi(arguments: Sequence[Word], values: Values) -> list[Word]:
    """Return what it runs.

    Raises:
        Unknown: as above.
    """
    return _read(arguments, values)[2]


def _read(arguments: Sequence[Word], values: Values) -> tuple[list[int], bool, list[Word]]:
    unread, processes, is_per_node = [*arguments], list[int](), False
    while unread:
        word = unread[0]
        text = unquoted(word.text)
        if word.text.startswith(("$", '"$')):
            texts = values.of(word.text)
            if any(piece.startswith("-") for found in texts for piece in found.split()):
                raise Unknown(f"{text} holds options")
            break
        if not text.startswith("-"):
            break
        unread.pop(0)
        name, equals, value = text.lstrip("-").partition("=")
        if name in (*_PROCESSES, *_PER_NODE):
            if not equals and not unread:
                break
            texts = [value] if equals else values.of(unread.pop(0).text)
            processes, is_per_node = [as_number(found) for found in texts], name in _PER_NODE
        elif name not in _NUM_VALUES:
            raise Unknown(f"{text} may choose CPUs")
        else:
            given = [value] if equals else [unquoted(unread.pop(0).text) for _ in range(_NUM_VALUES[name]) if unread]
            is_place = name in ("bind-to", "map-by", "rank-by")
            if is_place and not all(_PLACES.fullmatch(found) for found in given):
                raise Unknown(f"{text} {' '.join(given)} chooses CPUs".replace(f"={value} {value}", f"={value}"))
            if _NUM_VALUES[name] == 2 and _OF_MAPPING.search(given[0] if given else ""):
                raise Unknown(f"{text} {' '.join(given)} chooses CPUs")
    return processes, is_per_node, unread
