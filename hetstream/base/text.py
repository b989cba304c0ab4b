"""Text from elsewhere for a terminal or a log: a name in a file may hold escape sequences and newlines."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

from hetstream.base.posix import grp, pwd


def printable(text: str) -> str:
    """Return a text in which every character that is not printed is written as Python writes it: "\\x1b" for Escape."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def shortened(text: str, most: int) -> str:
    """Shorten a text, and say how many characters were left out: its writer may have gone on for ever."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} more characters)"


def is_unicode(text: str) -> bool:
    """Return whether UTF-8 can hold it: names of files may have surrogates in the place of bytes that are none (PEP
    383).
    """
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class PrintableFormatter(logging.Formatter):
    """Formats log records so that nothing in them is more to a terminal than text."""

    def format(self, record: logging.LogRecord) -> str:
        """As `logging.Formatter` does; stacks keep their lines."""
        return "\n".join(map(printable, super().format(record).split("\n")))


# What a user or a group is called. Reads this host's lists, asks nobody else.


def user_name(uid: int) -> str:
    """Return the name of a user, or the number where this host has no name for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def group_name(gid: int) -> str:
    """Return the name of a group, or the number where this host has no name for it."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


_LONGEST_S = 1e12  # more than timedelta takes has no meaning


def size_words(num_bytes: float) -> str:
    """Return a number of bytes in the unit that fits."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"


def duration_words(seconds: float) -> str:
    """Days, hours, minutes and seconds; what is longer than 30,000 years is not told apart."""
    return str(timedelta(seconds=int(min(seconds, _LONGEST_S))))


def count_words(number: float, noun: str) -> str:
    """`1 job`, `2,000 jobs`, `3 processes`."""
    plural = noun + ("es" if noun.endswith("s") else "s")
    return f"{number:,} {noun if number == 1 else plural}"


def list_words(noun: str, members: Sequence[object]) -> str:
    """`rank 3`, `ranks 0, 2`; of more than ten the first, and that there are more."""
    more = " and more" if len(members) > 10 else ""
    return f"{noun if len(members) == 1 else noun + 's'} {', '.join(map(str, members[:10]))}{more}"


def percent(share: float) -> str:
    """`31 %`."""
    return f"{100 * share:.0f} %"


def duration(seconds: float) -> str:
    """`2-03:04:05` as Slurm writes it."""
    days, left = divmod(int(seconds), 86400)
    clock = f"{left // 3600:02}:{left // 60 % 60:02}:{left % 60:02}"
    return f"{days}-{clock}" if days else clock
