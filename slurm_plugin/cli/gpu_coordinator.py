"""`hetstream gpu coordinator`: coordinates the jobs on this node's GPUs."""

from __future__ import annotations

import argparse
import functools
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.hetjob.gpu.config import DEFAULT_SOCKET
from hetstream.slurm_plugin.coordinator.admission import Admission, GrantedJobs
from hetstream.slurm_plugin.coordinator.gpus import Gpu, open_gpu
from hetstream.slurm_plugin.coordinator.own_jobs import OwnJobs, guaranteed_processes
from hetstream.slurm_plugin.coordinator.server import Coordinator

EPILOG = """\
It runs until SIGTERM or Ctrl-C, as an ordinary user: it ends no job and changes no GPU. When it ends, opportunistic
jobs pause until it is back, and guaranteed ones go on as if alone.

examples:
  hetstream gpu coordinator --grants /run/hetstream-jobs/grants --gpu GPU-1a2b=150000000000
  hetstream gpu coordinator --own-jobs --socket ./gpu.sock --gpu emulation:./gpu0     to try it

exit codes:
  0  it was stopped
  1  it could not begin, or failed
  2  the command line is wrong
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Say which of a GPU's jobs may launch work, and how much of its memory each may hold."
    parser.epilog = EPILOG
    parser.add_argument(
        "--gpu", action="append", required=True, metavar="GPU", help="NAME=BYTES or emulation:FILE; again for each"
    )
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument("--grants", type=Path, metavar="DIR", help="what jobs were given, by Slurm's prolog: DIR/JOB.json")
    who.add_argument(
        "--own-jobs",
        action="store_true",
        help="serve this user's processes, as what they say; one guaranteed job a GPU",
    )
    parser.add_argument(
        "--socket", type=Path, default=Path(DEFAULT_SOCKET), metavar="PATH", help=f"(default {DEFAULT_SOCKET})"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Coordinate until a signal comes."""
    gpus = opened_gpus(args.gpu)
    own_jobs = OwnJobs(functools.partial(guaranteed_processes, args.socket))
    admission: Admission = own_jobs if args.own_jobs else GrantedJobs(args.grants)
    try:
        coordinator = Coordinator(args.socket, gpus, admission)
    except OSError as error:
        raise HetstreamError(f"cannot listen at {args.socket}: {error}. Give another --socket") from error
    for signum in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signum, lambda *_: coordinator.stop())
    print(f"coordinating {', '.join(args.gpu)} at {args.socket}", file=sys.stderr, flush=True)
    coordinator.run()
    return 0


def opened_gpus(texts: Sequence[str]) -> list[Gpu]:
    """The GPUs that `--gpu` names.

    Raises:
        UsageError: there is no such GPU, or it is named twice.
    """
    gpus: list[Gpu] = []
    for text in texts:
        gpu = open_gpu(text)
        if any(gpu.name == other.name for other in gpus):
            gpu.close()
            raise UsageError(f"--gpu {text}: it is named twice")
        gpus.append(gpu)
    return gpus
