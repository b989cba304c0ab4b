"""Tables in text, read whole: every problem with its line, all of them at once. Pure; used by the readers of traces."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from hetstream.base.text import printable
from hetstream.slurm_plugin.errors import SimulationInputError

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
        """A number from 0 to 1e10; NaN, and a complaint, if it is none. An empty value gives the default."""
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
        """The records without a problem.

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
    """A value for a message: no line end in it, and not without end."""
    short = text if len(text) <= MOST_SHOWN else text[:MOST_SHOWN] + "..."
    return f'"{printable(short)}"' if short else "empty"
