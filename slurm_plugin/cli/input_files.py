"""Files that a user names for a command to read: whole, and no more of them than such a file may have."""

from __future__ import annotations

from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.text import printable


def read_text(path: str, what: str, most_characters: int) -> str:
    """A text of UTF-8, with or without a mark of its bytes' order; what is no UTF-8 is escaped.

    Args:
        path: as the user gave it; it may be a pipe.
        what: it is to be, in words.
        most_characters: that such a text has.

    Raises:
        UsageError: it has more, or no end (a device).
        OSError: it cannot be read.
    """
    with Path(path).open(encoding="utf-8-sig", errors="backslashreplace") as file:
        text = file.read(most_characters + 1)
    if len(text) > most_characters:
        raise UsageError(f"{printable(path)}: more than {most_characters:,} characters are no {what}. Check its name")
    return text
