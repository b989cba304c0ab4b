"""The jobs that are simulated, as one array for each property. Pure; made by the readers.

A job is a gang of equal units: each unit has its GPUs, CPUs and memory on one node, and all start together. A unit is
a GPU with its trainer in the traces, and a node's share of a job in an export of sacct.

The speed law: without data workers a unit with c CPUs runs at min(1, c / ideal_cpus) of its ideal speed. With them, the
unit keeps trainer_cpus, and a job with w CPUs of data workers runs at min(1, w / demand) * (1 - overhead), where demand
is (ideal_cpus - trainer_cpus) * units. Where curves were measured, they say what data workers bring instead.
"""

from __future__ import annotations

import csv
import json
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.base.text import count_words, printable, shortened
from hetstream.slurm_plugin.client.model import Node
from hetstream.slurm_plugin.errors import SimulationInputError
from hetstream.slurm_plugin.policy.filling import along
from hetstream.slurm_plugin.simulate.sharing import Sharing

# Measured curves of speed over CPUs of data workers: what a job of a workload has, and how a table writes it. Pure.

Floats = npt.NDArray[np.float64]
# (CPUs of data workers, speed as a share of the ideal one), from (0, 0) on.
Points = tuple[tuple[float, float], ...]

MOST_POINTS, _MOST_CPUS = 16, 1e6
# Of a slope: measured curves come as rounded numbers.
_ROUNDING = 1e-6


@dataclass(frozen=True)
class Curves:
    """A curve for each job.

    Attributes:
        cpus: (jobs, points): CPUs of data workers of the whole job, ascending from 0; padded with the last value.
        speed: (jobs, points): with so many, as a share of the ideal. Concave, from 0; padded like `cpus`.
    """

    cpus: Floats
    speed: Floats

    def rows(self, places: npt.NDArray[np.int64]) -> Curves:
        """Return the curves of these jobs."""
        return Curves(self.cpus[places], self.speed[places])

    def speed_with(self, cpus: Floats) -> Floats:
        """Return the speed of each job with these CPUs of data workers."""
        return along(self.cpus, self.speed, cpus)


def curves_of(points: Sequence[Points], units: Sequence[float]) -> Curves:
    """Put curves together.

    Args:
        points: of each job, for one of its units.
        units: of each job.
    """
    width = max(len(own) for own in points)
    padded = np.array([[*own, *([own[-1]] * (width - len(own)))] for own in points])
    return Curves(padded[:, :, 0] * np.asarray(units, dtype=float)[:, None], padded[:, :, 1])


def parse_curve(text: str) -> Points:
    """Read a curve such as `8:0.3 16:0.55 64:0.95`; it begins at 0:0.

    Raises:
        ValueError: it is none, with what is wrong.
    """
    written = text.split()
    if len(written) > MOST_POINTS:
        raise ValueError(f"it has {len(written)} points: must be at most {MOST_POINTS}")
    points = [(0.0, 0.0), *map(_point, written)]
    slopes = []
    for (cpus, speed), (more_cpus, more_speed) in pairwise(points):
        if more_cpus <= cpus or more_speed < speed:
            raise ValueError(f"{more_cpus:g}:{more_speed:g} comes after {cpus:g}:{speed:g}: both numbers must rise")
        slopes.append((more_speed - speed) / (more_cpus - cpus))
    steeper = [place for place in range(1, len(slopes)) if slopes[place] > slopes[place - 1] + _ROUNDING]
    if steeper:
        cpus, speed = points[steeper[0] + 1]
        raise ValueError(f"at {cpus:g}:{speed:g} it is steeper than before: no CPU may bring more than one before it")
    return tuple(points)


def _point(word: str) -> tuple[float, float]:
    cpus, _, speed = word.partition(":")
    try:
        point = float(cpus), float(speed)
    except ValueError:
        point = math.nan, math.nan
    if not (0 < point[0] <= _MOST_CPUS and 0 < point[1] <= 1):
        raise ValueError(f"{word!r}: must be CPUs:SPEED, with a speed above 0 and at most 1, such as 16:0.55")
    return point


Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Recorded:
    """What really happened to each job, of a site's export.

    Attributes:
        start_s, end_s: in the clock of the workload.
        cpus: that each unit had.
        extra_cpus: that each job had besides, anywhere: other components of a heterogeneous job.
    """

    start_s: Floats
    end_s: Floats
    cpus: Floats
    extra_cpus: Floats


@dataclass(frozen=True)
class Workload:
    """Jobs in the order of their submission.

    Attributes:
        names: of the jobs, for reports.
        submit_s: from the first submission on, so that the first is 0.
        work_s: how long a job runs at its ideal speed, without data workers' overhead.
        units: of its gang.
        gpus: of each unit.
        ideal_cpus: with which a unit reaches its ideal speed.
        trainer_cpus: that a unit itself needs when data workers make its batches.
        overhead: share of the ideal speed that data workers cost.
        memory_gib: of each unit.
        worker_memory_gib: for each CPU of a data worker.
        network_gbps: that a unit takes in at its ideal speed from data workers on other nodes.
        limit_s: time limit; infinite where none is known.
        tenants, users: whose a job is, as numbers; `tenant_names` and `user_names` say who.
        is_het: whether it can only start as a heterogeneous job does, in a cycle of backfill.
        recorded: what really happened; None for a trace without it.
        curves: what data workers bring each job, where that was measured; None: it is in proportion.
        sharing: which of them are opportunistic, and what each is to a GPU; None: nothing is known, and none is.
    """

    names: tuple[str, ...]
    submit_s: Floats
    work_s: Floats
    units: Ints
    gpus: Ints
    ideal_cpus: Floats
    trainer_cpus: Floats
    overhead: Floats
    memory_gib: Floats
    worker_memory_gib: Floats
    network_gbps: Floats
    limit_s: Floats
    tenants: Ints
    users: Ints
    is_het: Bools
    tenant_names: tuple[str, ...] = ("",)
    user_names: tuple[str, ...] = ("",)
    recorded: Recorded | None = None
    curves: Curves | None = None
    sharing: Sharing | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_gpus(self) -> Ints:
        """Of each job."""
        return self.units * self.gpus

    @property
    def demand(self) -> Floats:
        """CPUs of data workers with which each job is at its best."""
        if self.curves is not None:
            return self.curves.cpus[:, -1]
        return np.maximum(0.0, self.ideal_cpus - self.trainer_cpus) * self.units

    def only(self, keep: npt.NDArray[Any]) -> Workload:
        """Some of the jobs, by a mask or by places, with their clock unchanged."""
        places = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep
        changed: dict[str, Any] = {"names": tuple(self.names[place] for place in places)}
        for part in fields(self):
            value = getattr(self, part.name)
            if isinstance(value, np.ndarray):
                changed[part.name] = value[places]
        if self.recorded is not None:
            own = self.recorded
            changed["recorded"] = Recorded(
                own.start_s[places], own.end_s[places], own.cpus[places], own.extra_cpus[places]
            )
        if self.curves is not None:
            changed["curves"] = self.curves.rows(places)
        if self.sharing is not None:
            changed["sharing"] = self.sharing.rows(places)
        return replace(self, **changed)


_DEFAULTS: Mapping[str, float] = {
    "units": 1,
    "gpus": 1,
    "ideal_cpus": 1.0,
    "trainer_cpus": 1.0,
    "overhead": 0.0,
    "memory_gib": 0.0,
    "worker_memory_gib": 0.0,
    "network_gbps": 0.0,
    "limit_s": np.inf,
}


def build(
    names: Sequence[str],
    columns: Mapping[str, Sequence[float] | npt.NDArray[Any]],
    tenants: Sequence[str] = (),
    users: Sequence[str] = (),
    is_het: Sequence[bool] = (),
    recorded: Recorded | None = None,
    curves: Curves | None = None,
    sharing: Sharing | None = None,
) -> Workload:
    """Put a workload together: sorts it by submission and lets its clock begin at 0.

    Args:
        names: of the jobs.
        columns: `submit_s`, `work_s` and any of the other number columns of `Workload`.
        tenants, users: of each job; none: they are all one's.
        is_het: of each job.
        recorded: in the same clock as `submit_s`.
        curves: of each job.
        sharing: of each job.

    Raises:
        SimulationInputError: there is no job.
    """
    if not len(names):
        raise SimulationInputError("workload", ["there is no job in it"])
    size = len(names)
    values = {name: np.full(size, default, dtype=float) for name, default in _DEFAULTS.items()}
    values |= {name: np.asarray(column, dtype=float) for name, column in columns.items()}
    begin_s = float(values["submit_s"].min())
    order = np.argsort(values["submit_s"], kind="stable")
    tenant_names, tenant_of = _numbered(tenants, size)
    user_names, user_of = _numbered(users, size)
    whole = Workload(
        names=tuple(names),
        submit_s=values["submit_s"] - begin_s,
        work_s=values["work_s"],
        units=values["units"].astype(np.int64),
        gpus=values["gpus"].astype(np.int64),
        ideal_cpus=values["ideal_cpus"],
        trainer_cpus=np.minimum(values["trainer_cpus"], values["ideal_cpus"]),
        overhead=values["overhead"],
        memory_gib=values["memory_gib"],
        worker_memory_gib=values["worker_memory_gib"],
        network_gbps=values["network_gbps"],
        limit_s=values["limit_s"],
        tenants=tenant_of,
        users=user_of,
        is_het=np.array(is_het, dtype=bool) if len(is_het) else np.zeros(size, dtype=bool),
        tenant_names=tenant_names,
        user_names=user_names,
        recorded=recorded and replace(recorded, start_s=recorded.start_s - begin_s, end_s=recorded.end_s - begin_s),
        curves=curves,
        sharing=sharing,
    )
    return whole.only(order)


def _numbered(names: Sequence[str], size: int) -> tuple[tuple[str, ...], Ints]:
    """The different words in their order, and the number of each."""
    if not names:
        return ("",), np.zeros(size, dtype=np.int64)
    numbers: dict[str, int] = {}
    places = [numbers.setdefault(word, len(numbers)) for word in names]
    return tuple(numbers), np.array(places, dtype=np.int64)


# The cluster that is simulated: nodes with GPUs, CPUs, memory and a network link. Pure.

_KEYS = {"count": 1.0, "gpus": 0.0, "cpus": 0.0, "memory_gib": math.inf, "network_gbps": math.inf}
_MB_PER_GIB = 1024
# More than any cluster has; what is beyond it is a slip, and would not fit into memory.
_MOST_NODES, _MOST_OF_A_NODE = 1_000_000, 1e9


@dataclass(frozen=True)
class Cluster:
    """Nodes, as one array for each resource; values of CPUs and GPUs are whole.

    Attributes:
        gpus, cpus: of each node.
        memory_gib: infinite where memory is no limit.
        network_gbps: what a node's link takes in; infinite where it is no limit.
        notes: what the reader should know of how they were counted.
    """

    gpus: Floats
    cpus: Floats
    memory_gib: Floats
    network_gbps: Floats
    notes: tuple[str, ...] = ()

    @property
    def num_nodes(self) -> int:
        return len(self.gpus)

    @property
    def num_gpus(self) -> float:
        return float(self.gpus.sum())

    @property
    def num_cpus(self) -> float:
        return float(self.cpus.sum())

    def describe(self) -> str:
        """`8 nodes, 64 GPUs, 512 CPUs`."""
        return f"{self.num_nodes:,} nodes, {self.num_gpus:,.0f} GPUs, {self.num_cpus:,.0f} CPUs"


def of_groups(groups: Iterable[Mapping[str, Any]]) -> Cluster:
    """Return a cluster of groups of equal nodes, each with the keys count, gpus, cpus, memory_gib and network_gbps.

    Raises:
        SimulationInputError: with all that is wrong.
    """
    problems: list[str] = []
    columns: dict[str, list[float]] = {name: [] for name in _KEYS if name != "count"}
    for place, group in enumerate(groups, start=1):
        unknown = sorted(set(group) - set(_KEYS))
        if unknown:
            problems.append(f"group {place}: no key {', '.join(unknown)}; there are {', '.join(_KEYS)}")
        values = {name: group.get(name, default) for name, default in _KEYS.items()}
        wrong = [name for name, value in values.items() if not _is_amount(value)]
        # Infinite memory and links are no limit.
        large = [
            name
            for name, value in values.items()
            if name not in wrong and value > _MOST_OF_A_NODE and value != _KEYS[name]
        ]
        problems += [
            f"group {place}: {name} is {_amount(values[name])}: must be at most {_MOST_OF_A_NODE:g}" for name in large
        ]
        problems += [f"group {place}: {name} is {values[name]!r}: must be a number of 0 or more" for name in wrong]
        if wrong or large:
            continue
        fractions = [name for name in ("count", "gpus", "cpus") if values[name] != int(values[name])]
        problems += [f"group {place}: {name} is {values[name]!r}: must be whole" for name in fractions]
        if len(columns["gpus"]) + values["count"] > _MOST_NODES:
            problems.append(f"group {place}: with it there are more than {_MOST_NODES:,} nodes")
        elif not fractions:
            for name, column in columns.items():
                column += [float(values[name])] * int(values["count"])
    if not problems and not columns["gpus"]:
        problems.append("there is no node in it")
    if problems:
        raise SimulationInputError("cluster", problems)
    gpus, cpus, memory_gib, network_gbps = (np.array(columns[name]) for name in _KEYS if name != "count")
    return Cluster(gpus, cpus, memory_gib, network_gbps)


def parse(text: str) -> Cluster:
    """Return a cluster from text: JSON, or groups such as `8*gpus=8,cpus=64,memory_gib=256;4*cpus=64`.

    JSON is `{"nodes": [{"count": 8, "gpus": 8, "cpus": 64, "memory_gib": 256, "network_gbps": 20}]}`.

    Raises:
        SimulationInputError: it is neither.
    """
    if text.lstrip().startswith("{"):
        try:
            document = json.loads(text, object_pairs_hook=_without_doubles)
        except (ValueError, RecursionError) as exc:
            raise SimulationInputError("cluster", [f"it cannot be read as JSON: {exc}"]) from exc
        groups = document.get("nodes") if isinstance(document, dict) else None
        if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
            raise SimulationInputError("cluster", ['it has no list "nodes" of objects'])
        return of_groups(groups)
    groups, problems = [], []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        match = re.fullmatch(r"(?:(\d+)\*)?(\w+=[\d.]+(?:,\w+=[\d.]+)*)", part)
        if not match:
            problems.append(f"{part!r}: must look like 8*gpus=8,cpus=64,memory_gib=256")
            continue
        try:
            pairs = [item.split("=") for item in match[2].split(",")]
            own = _without_doubles([(name, float(value)) for name, value in pairs])
            groups.append({"count": float(match[1] or 1), **own})
        except ValueError as exc:
            problems.append(f"{part!r}: {exc}")
    if problems:
        raise SimulationInputError("cluster", problems)
    return of_groups(groups)


def of_nodes(nodes: Iterable[Node]) -> Cluster:
    """Return the usable nodes of a site, from what Slurm says of them; it says nothing of their network.

    Instances of MIG are parts of GPUs, of which the simulator knows none: the GPUs that they make up count, rounded up.

    Raises:
        SimulationInputError: none is usable.
    """
    usable = [node for node in nodes if node.is_usable]
    found = of_groups(
        {
            "gpus": math.ceil(round(node.gpus_with_mig(), 6)) + sum(part.gpus_free for part in node.reserved_parts),
            # What is kept there for a reservation is there for its jobs.
            "cpus": node.cpus + sum(part.cpus_free for part in node.reserved_parts),
            "memory_gib": node.memory_mb / _MB_PER_GIB,
        }
        for node in usable
    )
    divided = [node for node in usable if node.mig]
    if not divided:
        return found
    instances = sum(node.mig for node in divided)
    note = (
        f"{count_words(instances, 'MIG instance')} of {count_words(len(divided), 'node')} count as the whole GPUs "
        "that they make up; a job on "
        "one is taken to have a GPU of its own, so such jobs wait longer here than on the site"
    )
    return replace(found, notes=(note,))


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A dictionary; of a key that stands twice nobody can know which one is meant.

    Raises:
        ValueError: there is one.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        double = sorted({name for name in names if names.count(name) > 1})
        raise ValueError(f"{', '.join(double)} stands there twice")
    return found


def _is_amount(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value >= 0


def _amount(value: float) -> str:
    """JSON has whole numbers that no float can hold."""
    return f"{value:g}" if isinstance(value, float) else shortened(str(value), 40)


# Tables in text, read whole: every problem with its line, all of them at once. Pure; used by the readers of traces.

Convert = Callable[[str], float]
MOST_SHOWN = 60
NUL = "a byte of it is 0, which no text has"
AS_UTF_8 = "Is it UTF-16? Write it as UTF-8"
# Beyond it, seconds are no longer told apart well enough for the books to balance. Epochs in seconds are below.
MOST = 1e10
# Of an export of sacct: what jobstats measured of a job on many nodes is one value.
MOST_FIELD = 4 << 20


@dataclass
class Lines:
    """The records of a table, and what is wrong with them.

    Attributes:
        source: for messages.
        records: (line number, values by column).
        problems: (line number, text).
        bad: numbers of lines with a problem.
    """

    source: str
    records: list[tuple[int, Mapping[str, str]]]
    problems: list[tuple[int, str]] = field(default_factory=list)
    bad: set[int] = field(default_factory=set)

    def complain(self, line: int, problem: str) -> None:
        """A line is wrong."""
        self.problems.append((line, problem))
        self.bad.add(line)

    def number(self, line: int, record: Mapping[str, str], column: str, default: float = math.nan) -> float:
        """Return a number from 0 to 1e10; NaN, and a complaint, if it is none. An empty value gives the default."""
        text = record.get(column, "").strip()
        if not text and not math.isnan(default):
            return default
        try:
            value = float(text)
        except ValueError:
            self.complain(line, f"{column} is {quoted(text)}: must be a number")
            return math.nan
        if not math.isfinite(value) or value < 0:
            self.complain(line, f"{column} is {quoted(text)}: must be a finite number of 0 or more")
            return math.nan
        if value > MOST:
            self.complain(line, f"{column} is {quoted(text)}: must be at most {MOST:g}")
            return math.nan
        return value

    def good(self, skip_bad: bool) -> list[tuple[int, Mapping[str, str]]]:
        """Return the records without a problem.

        Args:
            skip_bad: leave out the others; otherwise any problem is an error.

        Raises:
            SimulationInputError: with all problems, by line.
        """
        if self.problems and not skip_bad:
            found = [f"line {line}: {text}" for line, text in sorted(self.problems)]
            raise SimulationInputError(self.source, found, "Correct them, or leave such lines out with --skip-bad")
        kept = [(line, record) for line, record in self.records if line not in self.bad]
        if not kept:
            problems = [f"line {line}: {text}" for line, text in sorted(self.problems)]
            raise SimulationInputError(self.source, [*problems, "there is no job in it"])
        return kept


def read(
    source: str, text: Iterable[str], required: Collection[str], known: Collection[str] | None, delimiter: str = ","
) -> Lines:
    """Read a table with a head line.

    Args:
        source: for messages.
        text: lines.
        required: columns that must be there.
        known: all columns that may be there; None: any.
        delimiter: between values.

    Raises:
        SimulationInputError: the head line lacks columns or has unknown ones; there is none.
    """
    with _fields_up_to(MOST_FIELD if delimiter != "," else csv.field_size_limit()):
        return _read(source, text, required, known, delimiter)


def _read(
    source: str, text: Iterable[str], required: Collection[str], known: Collection[str] | None, delimiter: str
) -> Lines:
    lines = _Lines(text)
    # Slurm quotes nothing. Elsewhere a quote that is not closed must not swallow the rest of the file.
    is_csv = delimiter == ","
    rows = csv.reader(lines, strict=True) if is_csv else csv.reader(lines, delimiter=delimiter, quoting=csv.QUOTE_NONE)
    try:
        head: Sequence[str] = next(rows, [])
    except csv.Error as error:
        raise SimulationInputError(source, [f"line 1: {error}"]) from error
    if lines.has_nul():
        raise SimulationInputError(source, [f"line 1: {NUL}. {AS_UTF_8}"])
    names = [name.strip().lstrip("\ufeff") for name in head]
    missing = [name for name in required if name not in names]
    unknown = [] if known is None else [name for name in names if name not in known]
    problems = [f"line 1: there is no column {name}" for name in missing]
    problems += [f"line 1: column {quoted(name)} is not known; there are {', '.join(known or ())}" for name in unknown]
    problems += [f"line 1: column {name} is there twice" for name in sorted({n for n in names if names.count(n) > 1})]
    if problems:
        raise SimulationInputError(source, problems)
    found = Lines(source, [])
    while True:
        begin = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return found
        except csv.Error as error:
            if is_csv:  # where a quote is not closed, nobody knows what the next line is
                problems = [f"line {line}: {problem}" for line, problem in found.problems]
                problems.append(f"line {begin}: {error}; is a quote of the record that begins here not closed?")
                raise SimulationInputError(source, problems) from error
            is_long = "field limit" in str(error)
            found.complain(rows.line_num, f"a value has more than {MOST_FIELD:,} characters" if is_long else str(error))
            continue
        if not row and not lines.num_nul:
            continue
        if lines.has_nul():
            found.complain(rows.line_num, NUL)
        elif len(row) != len(names):
            found.complain(rows.line_num, f"{len(row)} values and not {len(names)}")
        else:
            found.records.append((rows.line_num, dict(zip(names, row, strict=True))))


@contextmanager
def _fields_up_to(num_characters: int) -> Iterator[None]:
    """The csv module has one limit for the whole process."""
    before = csv.field_size_limit(num_characters)
    try:
        yield
    finally:
        csv.field_size_limit(before)


class _Lines:
    """Lines without NUL bytes, which no csv reader takes, and how many of them had some since that was last asked."""

    def __init__(self, text: Iterable[str]) -> None:
        self._text = iter(text)
        self.num_nul = 0

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        line = next(self._text)
        self.num_nul += "\0" in line
        return line.replace("\0", "")

    def has_nul(self) -> bool:
        num, self.num_nul = self.num_nul, 0
        return num > 0


def quoted(text: str) -> str:
    """Return a value for a message: no line end in it, and not without end."""
    short = text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."
    return f'"{printable(short)}"' if short else "empty"
