"""Text from elsewhere for a terminal or a log: a name in a file may hold escape sequences and newlines."""

from __future__ import annotations

import logging


def printable(text: str) -> str:
    """A text in which every character that is not printed is written as Python writes it: "\\x1b" for Escape."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def shortened(text: str, most: int) -> str:
    """A text of so many characters at most, and how many were left out: whoever wrote it may have gone on for ever."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} more characters)"


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can hold it: names of files may have surrogates in the place of bytes that are none (PEP 383)."""
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
