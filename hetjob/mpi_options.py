"""mpirun's command line and its like: how many processes it starts, and where its options end. Pure.

Called by `step_demand.py`. The options are those of Open MPI (mpirun, prterun), Hydra (mpiexec) and ibrun that say
nothing of CPUs; any other is `Unknown`, because it may bind processes to CPUs or count them in another way.

Source: mpirun(1) of Open MPI 4 and 5, `mpiexec -help` of MPICH 4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from hetstream.hetjob.shell_text import Word, unquoted
from hetstream.hetjob.shell_values import Unknown, Values, as_number

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
    """How many processes it may start, and whether that is on each node; nothing where it does not say.

    Raises:
        Unknown: an option is not known, or its value.
    """
    return _read(arguments, values)[:2]


def program_of_mpi(arguments: Sequence[Word], values: Values) -> list[Word]:
    """What it runs.

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
