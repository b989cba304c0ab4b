"""What a command of the admin CLI has to say, as a table, JSON or CSV that agree. Pure; printed by `cli/output.py`."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetstream.base.text import duration_words, printable
from hetstream.hetjob.site.messages import JobNow
from hetstream.slurm_plugin.client.slurm_units import compress

# Tables and figures for a terminal: what the commands that list things have in common. Pure.

RED, YELLOW, GREEN = "\x1b[31m", "\x1b[33m", "\x1b[32m"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"
# A column of sentences is not narrower, and no column of words is cut to less.
_NARROWEST, _SHORTEST = 24, 12
_INDENT = "    "

Cell = tuple[str, str]  # text and colour, "" for none
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: of the row's value, also in JSON and CSV.
        title: its head.
        show: value -> text; None is shown as `-`.
        left: it holds words, which stand to the left; numbers stand to the right.
        mark: row -> ANSI colour, or nothing.
        priority: where there is no room for all, columns of the highest number are left out first; 0: never.
        wraps: it holds sentences, which may take several lines.
        cuts: it holds names, of which the beginning is enough.
        below: it has a line of its own below the row.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str
    left: bool = False
    mark: Callable[[Row], str] | None = None
    priority: int = 0
    wraps: bool = False
    cuts: bool = False
    below: bool = False


def table(
    columns: Sequence[Column], rows: Sequence[Sequence[Cell]], color: bool, width: int | None = None
) -> list[str]:
    """Columns as wide as their widest cell, as far as there is room, without a word that is broken.

    What a cell holds does nothing to a terminal, and stays in its place.

    Args:
        columns: what there is; `key`, `show` and `mark` are not looked at.
        rows: a cell for each of them.
        color: whether to mark cells with ANSI colours.
        width: of a terminal, in cells; None: there is room for everything.
    """
    # Only here, and not where the library's data is not needed: its tables say how wide a character is.
    from rich.cells import cell_len, set_cell_size

    rows = [[(printable(text), mark) for text, mark in row] for row in rows]
    natural = [
        max([cell_len(column.title), *(cell_len(row[place][0]) for row in rows)])
        for place, column in enumerate(columns)
    ]
    layout = _Layout(columns, rows, natural, width)

    def line(cells: Sequence[Cell]) -> str:
        texts = []
        for place, (text, mark) in zip(layout.beside, cells, strict=True):
            room = layout.widths[place]
            if cell_len(text) > room:
                text = set_cell_size(text, room - 1) + "…"
            blanks = " " * (room - cell_len(text))
            padded = text + blanks if columns[place].left else blanks + text
            texts.append(f"{mark}{padded}{_PLAIN}" if color and mark else padded)
        return "  ".join(texts).rstrip()

    lines = [line([(columns[place].title, _BOLD) for place in layout.beside])]
    for row in rows:
        parts = [
            _words(row[place][0], layout.widths[place]) if columns[place].wraps else [row[place][0]]
            for place in layout.beside
        ]
        marks = [row[place][1] for place in layout.beside]
        for texts in itertools.zip_longest(*parts, fillvalue=""):
            lines.append(line([*zip(texts, marks, strict=True)]))
        for place in layout.below:
            if row[place][0] not in ("", "-"):
                text = f"{_INDENT}{columns[place].title.lower()}: {row[place][0]}"
                lines += wrapped(text, width, len(_INDENT) + 2)
    if layout.left_out:
        lines += wrapped(f"left out: {', '.join(layout.left_out)} (| less -S shows all)", width)
    return lines


class _Layout:
    """Which columns stand beside each other, and how wide, and which have lines of their own."""

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], natural: Sequence[int], width: int | None
    ) -> None:
        self._columns = columns
        self.widths = [*natural]
        self.below = [place for place, column in enumerate(columns) if column.below]
        self.beside = [place for place, column in enumerate(columns) if not column.below]
        self.left_out: list[str] = []
        if width is None:
            return
        for place in [place for place in self.beside if columns[place].wraps]:
            longest = max((len(word) for row in rows for word in row[place][0].split()), default=0)
            self.widths[place] = min(natural[place], max(longest, _NARROWEST, len(columns[place].title)))
        # Before a name is cut, columns go that say nothing.
        for place in [place for place in self.beside if rows and all(row[place][0] == "-" for row in rows)]:
            if self._lacking(width) > 0:
                self.beside.remove(place)
        for place in [place for place in self.beside if columns[place].cuts]:
            self.widths[place] = min(natural[place], max(_SHORTEST, len(columns[place].title)))
        gone = []
        while self._lacking(width) > 0 and any(columns[place].priority for place in self.beside):
            gone.append(max(self.beside, key=lambda place: (columns[place].priority, place)))
            self.beside.remove(gone[-1])
        for place in [place for place in self.beside if columns[place].wraps]:
            if self._lacking(width) > 0:
                self.beside.remove(place)
                self.below = sorted([*self.below, place])
        # One that went for one that has gone since may have room again.
        for place in sorted(gone, key=lambda place: (columns[place].priority, place)):
            self.beside = sorted([*self.beside, place])
            if self._lacking(width) > 0:
                self.beside.remove(place)
        self.left_out = [*dict.fromkeys(columns[place].title for place in sorted(gone) if place not in self.beside)]
        for place in sorted(self.beside, key=lambda place: -self.widths[place]):
            if columns[place].left and not columns[place].wraps and self._lacking(width) > 0:
                self.widths[place] = min(self.widths[place], max(_SHORTEST, self.widths[place] - self._lacking(width)))
        for place in self.beside:
            if columns[place].wraps or columns[place].cuts:
                self.widths[place] = min(natural[place], self.widths[place] - self._lacking(width))

    def _lacking(self, width: int) -> int:
        """Cells that are missing; below 0, that are left."""
        return sum(self.widths[place] for place in self.beside) + 2 * (len(self.beside) - 1) - width


def wrapped(line: str, width: int | None, indent: int | None = None) -> list[str]:
    """Return a line as several that fit, without a word that is broken.

    Args:
        line: of words, perhaps after a name and two blanks or more, below which the other lines do not stand.
        width: of the terminal; None: there is room.
        indent: of the lines after the first; None: what is behind such a name, or two blanks more than the first.
    """
    if width is None or len(line) <= width:
        return [line]
    if indent is None:
        named = _NAMED.match(line)
        indent = named.end() if named else len(line) - len(line.lstrip()) + 2
    return _words(line, width, " " * indent)


_NAMED = re.compile(r" {0,10}\S(?:\S| (?! )){0,10} {2,}(?=\S)| {6,12}(?=\S)")


_DIRECTIVE = "#HETSTREAM "


def _words(text: str, width: int, indent: str = "") -> list[str]:
    if len(text) <= width:
        return [text]
    # A script may have its directives on several lines, each of which says that it is one.
    again = f"{indent}{_DIRECTIVE}" if text.rpartition(": ")[2].lstrip().startswith(_DIRECTIVE) else indent
    return textwrap.wrap(
        text, width, subsequent_indent=again, break_long_words=False, break_on_hyphens=False, replace_whitespace=False
    ) or [""]


_STATES = {
    RED: ("FAILED", "TIMEOUT", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "DEADLINE", "DOWN", "CANCELLED"),
    YELLOW: ("PENDING", "SUSPENDED", "PREEMPTED", "REQUEUED", "DRAIN", "DRAINED", "DRAINING", "CONFIGURING"),
    GREEN: ("RUNNING", "COMPLETED", "COMPLETING"),
}


def by_state(row: Row) -> str:
    """Return the colour of a state in Slurm's spelling."""
    return next((mark for mark, states in _STATES.items() if str(row["state"]).split("+")[0] in states), "")


def rate_words(per_s: float) -> str:
    """Return a rate with two or three figures."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


# Grows when a key changes its meaning or goes; new keys may come at any time.
SCHEMA_VERSION = 1


@dataclass(frozen=True)
class Section:
    """One table.

    Attributes:
        name: its key in JSON.
        columns: what the table shows; JSON and CSV have all keys of the rows.
        rows: what it says.
        title: a line above it.
        empty: the line in its place when there are no rows.
        hosts: key of a column of node names: rows that are shown alike but for it become one, with a hostlist.
        most_lines: that the table shows; None for all, and 0 for no table. JSON and CSV have all in any case.
    """

    name: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    empty: str = ""
    hosts: str = ""
    most_lines: int | None = None


@dataclass(frozen=True)
class Report:
    """The whole answer.

    Attributes:
        meta: where it comes from: Slurm's version, the moment.
        summary: single facts.
        lines: the facts in words, above the tables.
        sections: the tables; CSV has the first.
        notes: what the reader should know about it; for stderr.
        conclusion: lines below the tables.
    """

    meta: Mapping[str, Any]
    summary: Mapping[str, Any]
    lines: Sequence[str]
    sections: Sequence[Section]
    notes: Sequence[str] = field(default_factory=tuple)
    conclusion: Sequence[str] = ()


def as_table(report: Report, color: bool, width: int | None = None) -> list[str]:
    """Return the lines for a terminal; names in them may be anybody's.

    Args:
        report: what to say.
        color: whether to mark cells with ANSI colours.
        width: of the terminal; None: there is room for everything.
    """
    lines = [part for line in report.lines for part in wrapped(printable(line), width)]
    for section in report.sections:
        if section.most_lines == 0 or not (section.rows or section.title or section.empty):
            continue
        if lines:
            lines.append("")
        if section.title:
            lines.append(section.title)
        if section.rows:
            cells = _cells(section)
            lines += table(section.columns, cells[: section.most_lines], color, width)
            num_more = len(cells) - len(cells[: section.most_lines])
            if num_more:
                lines.append(f"and {num_more:,} more, all of them with --json")
        elif section.empty:
            lines.append(section.empty)
    if report.conclusion:
        lines += ["", *(part for line in report.conclusion for part in wrapped(printable(line), width))]
    return lines


def as_json(report: Report) -> str:
    """Return one JSON document with `meta.version`."""
    document: dict[str, Any] = {
        "meta": {"version": SCHEMA_VERSION, **report.meta},
        "summary": report.summary,
        **{section.name: list(section.rows) for section in report.sections},
        "notes": list(report.notes),
    }
    return json.dumps(document, indent=1)


def as_csv(report: Report) -> str:
    """Return the first table with a head line of keys; lists are joined by blanks, what is not known is empty.

    Control characters in names are written out: a table is looked at on terminals. JSON has the names as they are.
    """
    section = report.sections[0]
    keys = list(section.rows[0]) if section.rows else [column.key for column in section.columns]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    for row in section.rows:
        writer.writerow([_flat(row[key]) for key in keys])
    return text.getvalue()


def _flat(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return printable(" ".join(map(str, value)))
    return printable(value) if isinstance(value, str) else value


def _cells(section: Section) -> list[list[Cell]]:
    shown = [(row, [_cell(column, row) for column in section.columns]) for row in section.rows]
    if not section.hosts:
        return [cells for _, cells in shown]
    place = next(place for place, column in enumerate(section.columns) if column.key == section.hosts)
    groups: dict[tuple[Cell, ...], list[str]] = {}
    for row, cells in shown:
        groups.setdefault((*cells[:place], *cells[place + 1 :]), []).append(row[section.hosts])
    return [[*others[:place], (compress(hosts), ""), *others[place:]] for others, hosts in groups.items()]


def _cell(column: Column, row: Row) -> Cell:
    value = row[column.key]
    return ("-" if value is None or value == "" else column.show(value), column.mark(row) if column.mark else "")


def gib(memory_mb: float) -> str:
    """MB as GiB: `62.5`."""
    return f"{memory_mb / 1024:,.1f}"


def signed(value: float) -> str:
    """`+0.75`; zero without a sign."""
    return f"{value:+.2f}" if abs(value) >= 0.005 else "0.00"


def sparkline(values: Sequence[float]) -> str:
    """Return figures over time, each as a bar of the height of a letter; the greatest is as high as it."""
    most = max(values, default=0.0)
    return "".join(_BARS[int(value / most * (len(_BARS) - 1))] if most > 0 else _BARS[0] for value in values)


_BARS = "▁▂▃▄▅▆▇█"


def partition_words(names: Sequence[str], most: int = 24) -> str:
    """Return names of partitions with commas; of many as many as take about so much room, and how many others there
    are.
    """
    shown = ",".join(names)
    if len(shown) <= most or len(names) == 1:
        return shown
    num = next(num for num in range(len(names), 0, -1) if num == 1 or len(",".join(names[:num])) <= most)
    return f"{','.join(names[:num])}{f',+{len(names) - num}' if num < len(names) else ''}"


# A job's remaining work in words: who says how much it is, and what the daemon believes. Pure.

_SOURCES = {
    "directive": "--total-steps of the script",
    "loader": "--total-epochs of the script and the loader's length",
    "integration": "the callback for its framework",
    "history": "similar jobs of the past and its time limit",
    "time_limit": "half of what is left of its time limit",
}
# A claim and what is believed of it are equal but for rounding.
_SAME = 0.01


def remaining_words(job: JobNow) -> str:
    """Return one line."""
    if job.claimed_s is None:
        return "remaining work: nobody says how much, so it counts as the median of the others"
    claimed, sigma = job.claimed_s, job.claimed_sigma or 0.0
    line = f"remaining work: {duration_words(claimed)} at full speed by {_SOURCES.get(job.remaining_source, '?')}"
    if sigma:
        line += f", right within a factor of {math.exp(sigma):.1f} two times of three"
    left = job.remaining_s if job.remaining_s is not None else claimed
    if left > claimed * (1 + _SAME) + 1:
        return f"{line}; believed: {duration_words(left)}, as it is still there after what it claimed before"
    if left < claimed * (1 - _SAME) - 1:
        return f"{line}; believed: {duration_words(left)}, when its time limit ends it"
    return line
