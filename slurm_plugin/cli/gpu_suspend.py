"""`hetstream gpu suspend` and `hetstream gpu resume`: take a process off its GPU, and put it back."""

from __future__ import annotations

import argparse

from hetstream.slurm_plugin.coordinator.driver_checkpoint import resume, suspend

EPILOG = """\
Its memory of the GPU goes to the host, and nothing of its work is lost. It waits at its next call to CUDA until
`hetstream gpu resume`. Needs NVIDIA's driver 570 or later, and the process's own user or root.

examples:
  hetstream gpu top --once                     who holds what
  hetstream gpu suspend 8123
  hetstream gpu resume 8123

exit codes:
  0  done
  1  the driver cannot, or will not; the process runs as before
  2  the command line is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action, one or the other."""
    parser.description = "The last resort for a job that does not give its memory back."
    parser.epilog = EPILOG
    parser.add_argument("pid", type=int, metavar="PID", nargs="+", help="of each process of the job")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Do it for each process."""
    for pid in args.pid:
        (suspend if args.action == "suspend" else resume)(pid)
    return 0
