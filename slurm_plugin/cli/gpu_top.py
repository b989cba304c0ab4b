"""`hetstream gpu top`: who is on this node's shared GPUs, and how they fare."""

from __future__ import annotations

import argparse

from hetstream.hetjob.gpu.config import DEFAULT_SOCKET, coordinator_uid_of
from hetstream.slurm_plugin.cli.screen import add_screen_arguments, check_interval, show_again
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = (
        "Show the processes on this node's shared GPUs, again and again until Ctrl-C. Where the output is "
        "no terminal, once."
    )
    parser.epilog = EPILOG
    parser.add_argument("--socket", default=DEFAULT_SOCKET, metavar="PATH", help=f"(default {DEFAULT_SOCKET})")
    add_screen_arguments(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Show it until the user has seen enough."""
    check_interval(args)
    coordinator_uid = coordinator_uid_of()
    return show_again(args, lambda: look(args.socket, coordinator_uid), render)
