"""Text from elsewhere for a terminal or a log: a name in a file may hold escape sequences and newlines."""

from __future__ import annotations


def printable(text: str) -> str:
    """A text in which every character that is not printed is written as Python writes it: "\\x1b" for Escape."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)
