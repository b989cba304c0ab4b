"""Tables that are drawn again and again on a terminal: `hetstream job --watch` and `hetstream gpu top`."""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from hetstream.base.errors import UsageError
from hetstream.base.process import sleep_in_parts

Seen = TypeVar("Seen")

# https://invisible-island.net/xterm/ctlseqs/ctlseqs.html: CUP, EL, ED and DECAWM.
_HOME, _CLEAR_LINE, _CLEAR_BELOW, _CLEAR = "\x1b[H", "\x1b[K", "\x1b[J", "\x1b[2J"
_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"


def add_screen_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare `--once`, `--json` and `--interval`."""
    parser.add_argument("--once", action="store_true", help="show it once")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two tables (default 2)"
    )


def check_interval(args: argparse.Namespace) -> None:
    """Refuse an interval that is none.

    Raises:
        UsageError: it is not above 0.
    """
    if args.interval <= 0:
        raise UsageError(f"--interval {args.interval:g}: must be more than 0")


def show_again(
    args: argparse.Namespace,
    look: Callable[[], Seen],
    encode: Callable[[Seen], str],
    render: Callable[[Seen, bool], Sequence[str]],
    *,
    once: bool,
) -> int:
    """Show what there is once, or until the user has seen enough.

    Args:
        args: with `json` and `interval`.
        look: asked for what to show, each time.
        encode: what is seen -> JSON on one line.
        render: (what is seen, whether with colours) -> lines of text.
        once: it is shown once.

    Returns:
        The exit code.
    """
    terminal = sys.stdout.isatty()
    color = terminal and not os.environ.get("NO_COLOR")
    live = terminal and not once and not args.json
    with drawing() if live else contextlib.nullcontext():
        while True:
            seen = look()
            if args.json:
                print(encode(seen), flush=True)
            elif live:
                draw(render(seen, color))
            else:
                print("\n".join(render(seen, color)), flush=True)
            if once:
                return 0
            sleep_in_parts(args.interval)


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
