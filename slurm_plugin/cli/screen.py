"""How commands print on a terminal: how wide, with which colours, and what is drawn again and again."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from hetstream.base.errors import UsageError
from hetstream.base.process import sleep_in_parts
from hetstream.slurm_plugin.render.tables import wrapped

Seen = TypeVar("Seen")
# What is seen, whether with colours, and the terminal's width -> lines of text.
Render = Callable[[Seen, bool, "int | None"], Sequence[str]]


def width_of_output() -> int | None:
    """Return the width of the terminal; None where it is none.

    A pipe has room, whatever `COLUMNS` says: a program that uses readline sets it to 80 for those that it starts.
    """
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def wants_color() -> bool:
    """Return whether colours are for this output: https://no-color.org."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def say(note: str) -> None:
    """A line on stderr, which is no data."""
    width = shutil.get_terminal_size().columns if sys.stderr.isatty() else None
    print("\n".join(wrapped(f"hetstream: {note}", width, 2)), file=sys.stderr)


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
    render: Render[Seen],
    *,
    once: bool,
) -> int:
    """Show what there is once, or until the user has seen enough.

    Args:
        args: with `json` and `interval`.
        look: asked for what to show, each time.
        encode: what is seen -> JSON on one line.
        render: what is seen, as lines of text.
        once: it is shown once.

    Returns:
        The exit code.
    """
    if sys.stdout.isatty() and not once and not args.json:
        _draw_again(args, look, render)
    while True:
        seen = look()
        print(encode(seen) if args.json else "\n".join(render(seen, wants_color(), width_of_output())), flush=True)
        if once:
            return 0
        sleep_in_parts(args.interval)


def _draw_again(args: argparse.Namespace, look: Callable[[], Seen], render: Render[Seen]) -> None:
    """Draw it on a screen of its own until Ctrl-C; what was seen last stays behind."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    lines: Sequence[str] = ()
    seen = look()  # what cannot be seen is said where the command was typed
    try:
        with Live(console=Console(highlight=False), screen=True, auto_refresh=False) as live:
            while True:
                lines = render(seen, wants_color(), width_of_output())
                height = shutil.get_terminal_size().lines
                shown = lines if len(lines) <= height else [*lines[: height - 1], f"... {len(lines) - height + 1} more"]
                drawn = Text.from_ansi("\n".join(shown), no_wrap=True, overflow="crop")
                live.update(drawn, refresh=True)
                sleep_in_parts(args.interval)
                seen = look()
    finally:
        print("\n".join(lines), flush=True)
