"""Text from elsewhere on a terminal."""

from __future__ import annotations

import pytest

from hetstream.base.errors import OptionsError
from hetstream.base.text import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("Zürich, 東京", "Zürich, 東京"),
        ("\x1b]0;mine\x07", r"\x1b]0;mine\x07"),
        ("one\ntwo\r\t", r"one\ntwo\r\t"),
        ("\u202eexe.txt", r"\u202eexe.txt"),
        ("\udc1b", r"\udc1b"),
    ],
)
def test_what_is_not_printed_is_written_out(text: str, shown: str) -> None:
    assert printable(text) == shown


def test_what_an_error_names_is_text_to_a_terminal_and_keeps_its_lines() -> None:
    assert str(OptionsError("name 'a\x1b[2J\x07'\nnext step")) == "name 'a\\x1b[2J\\x07'\nnext step"
