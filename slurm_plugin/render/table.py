"""Tables and figures for a terminal: what the commands that list things have in common. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import timedelta

from hetstream.base.text import printable

RED, YELLOW = "\x1b[31m", "\x1b[33m"
_BOLD, _PLAIN = "\x1b[1m", "\x1b[0m"

Cell = tuple[str, str]  # text and colour, "" for none
_LONGEST_S = 1e12  # more than timedelta takes has no meaning


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


def size_words(num_bytes: float) -> str:
    """A number of bytes in the unit that fits."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration_words(seconds: float) -> str:
    """Days, hours, minutes and seconds; what is longer than 30,000 years is not told apart."""
    return str(timedelta(seconds=int(min(seconds, _LONGEST_S))))
