"""`hetstream gpu top`: who is on this node's shared GPUs, and how they fare."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time

import msgspec

from hetstream.base.errors import UsageError
from hetstream.hetjob.gpu.config import DEFAULT_SOCKET, coordinator_uid_of
from hetstream.slurm_plugin.cli.screen import draw, drawing
from hetstream.slurm_plugin.coordinator.look import look
from hetstream.slurm_plugin.render.gpu_top import render

EPILOG = """\
BUSY TIME is the share of the guaranteed job's busy time that an opportunistic process may use; it has the idle gaps
besides. RATIO is the time of a mini-batch against the time that one takes alone. Root and the coordinator's user see
all processes, everybody else his own.

examples:
  hetstream gpu top
  srun --jobid=8123 --overlap hetstream gpu top --once      on the node of a job
  hetstream gpu top --once --json                           for scripts

exit codes:
  0  done
  1  no coordinator answers, or it is of another version
  2  the command line is wrong
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Declare the action."""
    parser = subparsers.add_parser(
        "top",
        help=summary,
        description="Show the processes on this node's shared GPUs, again and again until Ctrl-C. Where the output is "
        "no terminal, once.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--socket", default=DEFAULT_SOCKET, metavar="PATH", help=f"(default {DEFAULT_SOCKET})")
    parser.add_argument("--once", action="store_true", help="show it once")
    parser.add_argument("--json", action="store_true", help="one JSON object a line instead of a table")
    parser.add_argument(
        "--interval", type=float, default=2.0, metavar="S", help="seconds between two tables (default 2)"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show it until the user has seen enough."""
    if args.interval <= 0:
        raise UsageError(f"--interval {args.interval:g}: must be more than 0")
    terminal = sys.stdout.isatty()
    once = args.once or not terminal
    color = terminal and not os.environ.get("NO_COLOR")
    live = not once and not args.json
    coordinator_uid = coordinator_uid_of()
    with drawing() if live else contextlib.nullcontext():
        while True:
            seen = look(args.socket, coordinator_uid)
            if args.json:
                print(msgspec.json.encode(seen).decode(), flush=True)
            elif live:
                draw(render(seen, color))
            else:
                print("\n".join(render(seen, color)))
            if once:
                return 0
            time.sleep(args.interval)
