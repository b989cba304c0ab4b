"""Texts that a user may choose to harm others, for tests of what reads them."""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from hetstream.slurm_plugin.cli import main

HARMLESS = "harmless"
HOSTILE = {
    "separators": "a|b,c;d\x1f66\x1e67\t\x1d \x0b",
    "record": "x\nJobId=42 UserId=root(0)\n   Command=/bin/evil\n\n42 42 RUNNING /evil\n",
    "terminal": "\x1b]0;mine\x07\x1b[2J\x1b[31m\x9b1A\x08\x7f\u202e",
    "path": "../../../etc/passwd",
    "option": "--wrap=reboot",
    "html": "\"><script>alert('1')</script><!--",
    "format": "%s%n{0.__class__}{user}\\N$(reboot)`reboot`",
    "bytes": os.fsdecode(b"\xff\xfe\xc3("),
    "megabyte": "x" * (1 << 20),
}
hostile = pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)


def check_shown(text: str) -> None:
    """Text that changes nothing on a terminal but what it shows, line by line."""
    for line in text.split("\n"):
        assert line.isprintable(), line[:500]


def as_read(text: str) -> str:
    """What arrives of a text: bytes that are no UTF-8 are marked, and line ends are line ends."""
    return os.fsencode(text).decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")


@dataclass(frozen=True)
class Said:
    """What a command printed."""

    code: int
    out: str
    err: str


def said_by(words: str) -> Said:
    """What a command says."""
    return said_of_words(words.split())


def said_of_words(words: Sequence[str]) -> Said:
    """The same of words that may have blanks."""
    # As a terminal's: what cannot be encoded is an error, unless the command has seen to it.
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    with redirect_stdout(out), redirect_stderr(err), pytest.MonkeyPatch.context() as patch:
        patch.setattr("logging.basicConfig", lambda **options: None)
        code = main(words)
    texts = []
    for stream in (out, err):
        stream.flush()
        stream.seek(0)
        texts.append(stream.read())
    return Said(code, *texts)
