"""`hetstream gpu run`: a training program that shares its GPU."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping

from hetstream.base.errors import UsageError
from hetstream.base.own_job import with_job
from hetstream.hetjob.errors import ProgramNotFound
from hetstream.hetjob.gpu import environment
from hetstream.hetjob.gpu.config import DEFAULT_SOCKET
from hetstream.hetjob.gpu.devices.emulated_file import resolved
from hetstream.hetjob.gpu.orders import JobClass

EPILOG = """\
The program takes the place of this command: its exit code and signals are its own.

examples:
  hetstream gpu run --class opportunistic --gpu emulation:./gpu0 --socket ./gpu.sock python train.py
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = (
        "Run a training program with an agent that keeps to what the node's coordinator says. The program "
        "needs no change."
    )
    parser.epilog = EPILOG
    parser.usage = "%(prog)s --class CLASS --gpu GPU [options] [--] PROGRAM [ARGUMENTS]"
    parser.add_argument(
        "--class", dest="job_class", required=True, choices=[kind.value for kind in JobClass], help="what the job is"
    )
    parser.add_argument(
        "--gpu",
        required=True,
        metavar="GPU",
        help="as the coordinator calls it; several with commas, for one process each",
    )
    parser.add_argument("--socket", default=DEFAULT_SOCKET, metavar="PATH", help=f"(default {DEFAULT_SOCKET})")
    parser.add_argument(
        "--host-bytes", type=int, metavar="N", help="memory of the host that may stand in for the GPU's (default 1 GiB)"
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Become the program."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("name the program to run, such as: python train.py")
    if not args.gpu.replace(",", "").strip():  # the program would share nothing, and be held back by nobody
        raise UsageError(f"--gpu {args.gpu!r} names no GPU: write it as the coordinator calls it")
    settings = {
        "HETSTREAM_GPU": ",".join(map(resolved, args.gpu.split(","))),
        "HETSTREAM_JOB_CLASS": args.job_class,
        "HETSTREAM_GPU_SOCKET": os.path.abspath(args.socket),
        "HETSTREAM_GPU_JOB": _program(os.environ),
    }
    if args.host_bytes is not None:
        settings["HETSTREAM_GPU_HOST_BYTES"] = str(args.host_bytes)
    try:
        os.execvpe(command[0], command, {**os.environ, **with_job(environment(settings), os.environ)})
    except OSError as error:
        raise ProgramNotFound(f"cannot run {command[0]}: {error}") from error


def _program(environ: Mapping[str, str]) -> str:
    """What all processes of the program have in common: this process's place is the program's, which may start others.

    The tasks of a step of Slurm's are one program.
    """
    if environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":
        return f"step {environ.get('SLURM_JOB_ID', '')}.{environ.get('SLURM_STEP_ID', '')}"
    return f"process {os.getpid()}"
