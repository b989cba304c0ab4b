"""What a command of the admin CLI has to say, as a table, JSON or CSV that agree. Pure; printed by `cli/output.py`."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetstream.base.text import duration_words, printable
from hetstream.hetjob.site.messages import JobNow
from hetstream.slurm_plugin.client.values import compress

# Tables and figures for a terminal: what the commands that list things have in common. Pure.

RED, YELLOW = "\x1b[31m", "\x1b[33m"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"

Cell = tuple[str, str]  # text and colour, "" for none


def table(head: Sequence[str], rows: Sequence[Sequence[Cell]], left: Collection[str], color: bool) -> list[str]:
    """Columns as wide as their widest cell. What a cell holds does nothing to a terminal, and stays on its line.

    Args:
        head: titles.
        rows: a cell for each title.
        left: titles of columns of words, which stand to the left; numbers stand to the right.
        color: whether to mark cells with ANSI colours.
    """
    rows = [[(printable(text), mark) for text, mark in row] for row in rows]
    widths = [max(len(title), *(len(row[place][0]) for row in rows)) for place, title in enumerate(head)]

    def line(cells: Sequence[Cell]) -> str:
        texts = []
        for title, width, (text, mark) in zip(head, widths, cells, strict=True):
            padded = text.ljust(width) if title in left else text.rjust(width)
            texts.append(f"{mark}{padded}{_PLAIN}" if color and mark else padded)
        return "  ".join(texts).rstrip()

    return [line([(title, _BOLD) for title in head]), *(line(row) for row in rows)]


def rate_words(per_s: float) -> str:
    """A rate with two or three figures."""
    return f"{per_s:,.0f}" if per_s >= 100 else f"{per_s:.1f}"


# Grows when a key changes its meaning or goes; new keys may come at any time.
SCHEMA_VERSION = 1

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table.

    Attributes:
        key: of the row's value, also in JSON and CSV.
        title: its head.
        show: value -> text; None is shown as `-`.
        left: it holds words.
        mark: row -> ANSI colour, or nothing.
    """

    key: str
    title: str
    show: Callable[[Any], str] = str
    left: bool = False
    mark: Callable[[Row], str] | None = None


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
    """

    meta: Mapping[str, Any]
    summary: Mapping[str, Any]
    lines: Sequence[str]
    sections: Sequence[Section]
    notes: Sequence[str] = field(default_factory=tuple)


def as_table(report: Report, color: bool) -> list[str]:
    """The lines for a terminal; names in them may be anybody's."""
    lines = [printable(line) for line in report.lines]
    for section in report.sections:
        if section.most_lines == 0:
            continue
        if lines:
            lines.append("")
        if section.title:
            lines.append(section.title)
        if section.rows:
            head = [column.title for column in section.columns]
            left = {column.title for column in section.columns if column.left}
            cells = _cells(section)
            lines += table(head, cells[: section.most_lines], left, color)
            num_more = len(cells) - len(cells[: section.most_lines])
            if num_more:
                lines.append(f"and {num_more:,} more, all of them with --json")
        elif section.empty:
            lines.append(section.empty)
    return lines


def as_json(report: Report) -> str:
    """One JSON document with `meta.version`."""
    document: dict[str, Any] = {
        "meta": {"version": SCHEMA_VERSION, **report.meta},
        "summary": report.summary,
        **{section.name: list(section.rows) for section in report.sections},
        "notes": list(report.notes),
    }
    return json.dumps(document, indent=1)


def as_csv(report: Report) -> str:
    """The first table with a head line of keys; lists are joined by blanks, what is not known is empty.

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


def partition_words(names: Sequence[str], most: int = 24) -> str:
    """Names of partitions with commas; of many as many as take about so much room, and how many others there are."""
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
    """One line."""
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
