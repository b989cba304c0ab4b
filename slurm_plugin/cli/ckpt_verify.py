"""`hetstream ckpt verify`: read checkpoints, compare every byte with its checksum, and decode what restores decode."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hetstream.base.text import printable, size_words
from hetstream.checkpoint.disk.directory import Checkpoint
from hetstream.checkpoint.disk.rank_file import bounded
from hetstream.checkpoint.errors import NoCheckpoint
from hetstream.slurm_plugin.cli.ckpt import as_fields, existing

EPILOG = """\
A damaged checkpoint is marked by a file `damaged.txt` in its directory, so that no restore takes it. If a marked one is
whole again, the mark is removed.

Exit codes: 0 all are good, 1 one is damaged or there is none.

examples:
  hetstream ckpt verify checkpoints               all of them
  hetstream ckpt verify --step 1200 checkpoints   those of one step, of whichever attempt
"""


def add_ckpt_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Read checkpoints, compare their checksums, and decode them as a restore does."
    parser.epilog = EPILOG
    parser.add_argument("directory", type=Path, metavar="DIR", help="checkpoint directory")
    parser.add_argument("--step", type=int, metavar="N", help="only checkpoints of this step")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Read them, newest first, and say how each is."""
    # Here, as without torch there is no checkpoint to read, and all the same a parser, completion and man pages.
    from hetstream.checkpoint.flash.sources import check_readable

    directory = existing(args.directory)
    chosen = [checkpoint for checkpoint in directory.scan() if args.step in (None, checkpoint.generation.step)]
    if not chosen:
        step = "" if args.step is None else f" of step {args.step}"
        raise NoCheckpoint(f"{args.directory} has no checkpoint{step}. See: hetstream ckpt ls {args.directory}")
    results: list[dict[str, Any]] = []
    for number, checkpoint in enumerate(chosen, start=1):
        progress = _Progress(checkpoint, f"{number}/{len(chosen)}")
        began_s = time.monotonic()
        with bounded(checkpoint.path):
            problems = directory.verify(checkpoint.generation, progress.advance, check_readable)
        took_s = time.monotonic() - began_s
        progress.clear()
        results.append(
            {**as_fields(checkpoint.generation), "path": str(checkpoint.path), "problems": problems, "took_s": took_s}
        )
        if not args.json:
            good = f"good  {size_words(checkpoint.num_bytes)} in {took_s:.1f} s"
            print(
                f"{checkpoint.path.name}  {'damaged: ' + printable('; '.join(problems)) if problems else good}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"meta": {"version": 1}, "checkpoints": results}, indent=1))
    return 1 if any(result["problems"] for result in results) else 0


class _Progress:
    """One line on a terminal that says how far a checkpoint has been read; elsewhere nothing.

    Args:
        checkpoint: that is read.
        place: of it among all.
    """

    def __init__(self, checkpoint: Checkpoint, place: str) -> None:
        self._checkpoint = checkpoint
        self._place = place
        self._done_bytes = 0
        self._is_shown = sys.stderr.isatty()
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        """So many more bytes have been compared."""
        self._done_bytes += num_bytes
        if self._is_shown:
            of = f"{size_words(self._done_bytes)} of {size_words(self._checkpoint.num_bytes)}"
            print(f"\r\x1b[K{self._place} {self._checkpoint.path.name}  {of}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the line empty."""
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
