"""`hetstream gpu ACTION`: several jobs on one GPU, which `hetstream internal gpu-emulate` can stand in for."""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hetstream.base.errors import HetstreamError, UsageError
from hetstream.base.process import with_job
from hetstream.hetjob.errors import ProgramNotFound
from hetstream.hetjob.gpu import environment
from hetstream.hetjob.gpu.config import DEFAULT_SOCKET, coordinator_uid_of
from hetstream.hetjob.gpu.emulated_file import PREFIX, EmulatedGpuFile, resolved
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.cli.screen import add_screen_arguments, check_interval, show_again
from hetstream.slurm_plugin.coordinator.admission import Admission, GrantedJobs, OwnJobs, guaranteed_processes
from hetstream.slurm_plugin.coordinator.gpus import Gpu, open_gpu, resume, suspend
from hetstream.slurm_plugin.coordinator.server import Coordinator
from hetstream.slurm_plugin.coordinator.table import GpuTable, look
from hetstream.slurm_plugin.render.gpu_top import render

# `hetstream internal coordinator`: coordinates the jobs on this node's GPUs.

GPU_COORDINATOR_EPILOG = """\
It runs until SIGTERM or Ctrl-C, as an ordinary user: it ends no job and changes no GPU. When it ends, opportunistic
jobs pause until it is back, and guaranteed ones go on as if alone.

examples:
  hetstream internal coordinator --grants /run/hetstream-jobs/grants --gpu GPU-1a2b=150000000000
  hetstream internal coordinator --own-jobs --socket ./gpu.sock --gpu emulation:./gpu0     to try it

exit codes:
  0  it was stopped
  1  it could not begin, or failed
  2  the command line is wrong
"""


def add_gpu_coordinator_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Say which of a GPU's jobs may launch work, and how much of its memory each may hold."
    parser.epilog = GPU_COORDINATOR_EPILOG
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
    parser.set_defaults(run=run_gpu_coordinator)


def run_gpu_coordinator(args: argparse.Namespace) -> int:
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
    """Return the GPUs that `--gpu` names.

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


# `hetstream gpu run`: a training program that shares its GPU.

GPU_RUN_EPILOG = """\
The program takes the place of this command: its exit code and signals are its own.

examples:
  hetstream gpu run --class opportunistic --gpu emulation:./gpu0 --socket ./gpu.sock python train.py
"""


def add_gpu_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = (
        "Run a training program with an agent that keeps to what the node's coordinator says. The program "
        "needs no change."
    )
    parser.epilog = GPU_RUN_EPILOG
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
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    parser.set_defaults(run=run_gpu_run)


def run_gpu_run(args: argparse.Namespace) -> int:
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


# `hetstream gpu suspend` and `hetstream gpu resume`: take a process off its GPU, and put it back.

GPU_SUSPEND_EPILOG = """\
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


def add_gpu_suspend_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action, one or the other."""
    parser.description = "The last resort for a job that does not give its memory back."
    parser.epilog = GPU_SUSPEND_EPILOG
    parser.add_argument("pid", type=int, metavar="PID", nargs="+", help="of each process of the job")
    parser.set_defaults(run=run_gpu_suspend)


def run_gpu_suspend(args: argparse.Namespace) -> int:
    """Do it for each process."""
    for pid in args.pid:
        (suspend if args.action == "suspend" else resume)(pid)
    return 0


# `hetstream gpu top`: who is on this node's shared GPUs, and how they fare.

GPU_TOP_EPILOG = """\
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


def add_gpu_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = (
        "Show the processes on this node's shared GPUs, again and again until Ctrl-C. Where the output is "
        "no terminal, once."
    )
    parser.epilog = GPU_TOP_EPILOG
    parser.add_argument("--socket", default=DEFAULT_SOCKET, metavar="PATH", help=f"(default {DEFAULT_SOCKET})")
    add_screen_arguments(parser)
    parser.set_defaults(run=run_gpu_top)


def run_gpu_top(args: argparse.Namespace) -> int:
    """Show it until the user has seen enough."""
    check_interval(args)
    coordinator_uid = coordinator_uid_of()
    once = args.once or not sys.stdout.isatty()
    return show_again(args, lambda: look(args.socket, coordinator_uid), _as_json, render, once=once)


def _as_json(seen: GpuTable) -> str:
    return msgspec.json.encode(seen).decode()


_MIB = 2**20
# Numbers of bytes have 64 bits.
_MOST = 2**40


def add_gpu_emulate_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = (
        "Make a file that stands for a GPU. Programs that share it compute on one core, and count tensors "
        "against its memory. Speeds on it say nothing about a real GPU."
    )
    parser.add_argument("file", metavar="FILE", help="to be made; the GPU's name is emulation:FILE")
    parser.add_argument("--memory-mib", type=int, default=1024, metavar="N", help="its memory (default 1024)")
    parser.add_argument(
        "--segment-kib", type=int, default=2048, metavar="N", help="what memory comes in (default 2048)"
    )
    parser.add_argument(
        "--core", type=int, metavar="N", help="where its kernels run (default: the last of this process)"
    )
    parser.add_argument(
        "--bus-mib-per-s", type=int, default=1024, metavar="N", help="speed of memory of the host (default 1024)"
    )
    parser.set_defaults(run=run_gpu_emulate)


def run_gpu_emulate(args: argparse.Namespace) -> int:
    """Make it."""
    sizes = (args.memory_mib, args.segment_kib, args.bus_mib_per_s)
    if min(sizes) <= 0 or max(sizes) > _MOST:
        raise UsageError(f"--memory-mib, --segment-kib and --bus-mib-per-s are from 1 to {_MOST}")
    cores = os.sched_getaffinity(0)
    core = max(cores) if args.core is None else args.core
    if core not in cores:
        raise UsageError(f"--core {core}: this process may run on {sorted(cores)}")
    try:
        EmulatedGpuFile.create(
            Path(args.file),
            capacity_bytes=args.memory_mib * _MIB,
            core=core,
            segment_bytes=args.segment_kib * 1024,
            bus_bytes_per_s=args.bus_mib_per_s * _MIB,
        )
    except FileExistsError:
        raise UsageError(f"{args.file} is there, and is not overwritten. {_what_is_there(args.file)}") from None
    except OSError as error:
        raise UsageError(
            f"{args.file} cannot be made: {error.strerror}. Name a file in a directory of yours"
        ) from error
    print(f"emulated GPU: {resolved(PREFIX + args.file)}")
    return 0


def _what_is_there(path: str) -> str:
    """What a file is that stands where an emulated GPU was to be made, and what to do."""
    try:
        with contextlib.closing(EmulatedGpuFile(path)) as gpu:
            users = ", ".join(map(str, gpu.held()))
            used = f"processes {users} use" if users else "nobody uses now"
            return f"It is an emulated GPU of {gpu.capacity_bytes // _MIB} MiB that {used}: take it, or remove it first"
    except (OSError, ValueError):
        return "It is no emulated GPU: give another name"
