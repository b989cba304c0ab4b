"""Tables that are drawn again and again on a terminal: `hetstream top` and `hetstream gpu top`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence

# https://invisible-island.net/xterm/ctlseqs/ctlseqs.html: CUP, EL, ED and DECAWM.
_HOME, _CLEAR_LINE, _CLEAR_BELOW, _CLEAR = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """A terminal on whose screen tables are drawn: long lines are cut and not wrapped."""
    print(f"{_NO_WRAP}{_CLEAR}", end="")
    try:
        yield
    finally:
        print(_WRAP, end="", flush=True)


def draw(lines: Sequence[str]) -> None:
    """Draw over the table before; a screen that is cleared first would flicker."""
    height = shutil.get_terminal_size().lines - 1
    if len(lines) > height:
        lines = [*lines[: height - 1], f"... {len(lines) - height + 1} more; --once shows all"]
    text = "".join(f"{line}{_CLEAR_LINE}\n" for line in lines)
    print(f"{_HOME}{text}{_CLEAR_BELOW}", end="", flush=True)
