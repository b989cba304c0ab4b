"""`hetstream worker`: run the processes of one data worker in the foreground."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.signals import hold_warnings, is_in_step, pass_over_warnings
from hetstream.slurm_plugin.program import become

log = logging.getLogger(__name__)

# More than the CPUs of any host: a slip of the finger is not to fork without end.
_MAX_PROCESSES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Make batches for the loaders of a service until the dispatcher ends or SIGTERM comes. A process "
        "that dies is replaced."
    )
    parser.add_argument("--service", required=True, metavar="file:FILE", help="address file of the dispatcher")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="number of processes; best one for each CPU of the data worker (default 1)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="threads of each process, for datasets that are thread-safe (default 1)",
    )
    parser.add_argument(
        "--cache-bytes",
        type=int,
        metavar="N",
        help="finished batches that each process keeps for other loaders that share them (default "
        "HETSTREAM_CACHE_BYTES, or 256 MiB; 0 keeps none)",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "gpu"),
        default="cpu",
        help="gpu: run the last stage (gpu_stage=) of loaders that have one, on this data worker's GPU; batches come "
        "from data workers with cpu (default), which run the rest",
    )
    parser.add_argument(
        "--mpi",
        action="store_true",
        help="send batches by MPI: this process and the trainers are ranks of one MPI world",
    )
    parser.add_argument(
        "--follow-program",
        nargs="?",
        const="",
        metavar="DIGEST",
        help="start anew in the Python environment of the program when that differs from this one (DIGEST: of the "
        "environment that this process was started in for that)",
    )
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # of `hetstream run`: its own lines, and no others
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Work until the service ends."""
    from hetstream.mpi_dataworkers.config import cache_bytes_from_environment
    from hetstream.mpi_dataworkers.interpreter import take_hash_seed
    from hetstream.mpi_dataworkers.own_log import keep_apart
    from hetstream.mpi_dataworkers.threads import MAX_THREADS
    from hetstream.mpi_dataworkers.wire.address import parse_service

    if not 1 <= args.processes <= _MAX_PROCESSES:
        raise UsageError(f"--processes {args.processes}: must be 1 to {_MAX_PROCESSES}")
    if not 1 <= args.threads <= MAX_THREADS:
        raise UsageError(f"--threads {args.threads}: must be 1 to {MAX_THREADS}")
    if args.mpi and args.processes > 1:
        raise UsageError(f"--processes {args.processes} with --mpi: a rank is one process; start more ranks instead")
    if args.device == "gpu" and (args.processes > 1 or args.mpi):
        raise UsageError("--device gpu with --processes or --mpi: start a data worker for each GPU")
    if args.cache_bytes is not None and args.cache_bytes < 0:
        raise UsageError(f"--cache-bytes {args.cache_bytes}: must be at least 0")
    keep_apart(args.log)
    if is_in_step():
        hold_warnings()
    take_hash_seed()
    if is_in_step():
        pass_over_warnings()
    cache_bytes = cache_bytes_from_environment() if args.cache_bytes is None else args.cache_bytes
    if args.follow_program is not None and not args.mpi:
        return _follow(args, cache_bytes)
    if args.mpi:
        from hetstream.mpi_dataworkers.worker.mpi_worker import run_mpi_data_worker

        return run_mpi_data_worker(parse_service(args.service), cache_bytes, args.threads)
    return _work(args, parse_service(args.service), cache_bytes)


def _work(
    args: argparse.Namespace, address_file: Path, cache_bytes: int, wants_change: Callable[[], bool] = lambda: False
) -> int:
    from hetstream.mpi_dataworkers.worker.supervisor import run_data_workers

    make_earlier = None
    if args.device == "gpu":
        from hetstream.mpi_dataworkers.stages.earlier import LoaderOfEarlierStage

        make_earlier = partial(LoaderOfEarlierStage, address_file)
    return run_data_workers(address_file, args.processes, cache_bytes, args.threads, wants_change, make_earlier)


def _follow(args: argparse.Namespace, cache_bytes: int) -> int:
    """Work in the Python environment of the program, whichever that turns out to be."""
    from hetstream.mpi_dataworkers.interpreter import Follower
    from hetstream.mpi_dataworkers.wire.address import parse_service

    address_file = parse_service(args.service)
    follower = Follower(address_file, args.follow_program)
    follower.wait_for_torch()
    wanted = follower.target()
    if wanted is None:
        from hetstream.mpi_dataworkers.worker.supervisor import CHANGE

        code = _work(args, address_file, cache_bytes, follower.wants_change)
        wanted = follower.chosen
        if code != CHANGE or wanted is None:
            return code
    log.info("starting anew as %s, the Python of the program", wanted.executable)
    if is_in_step():
        hold_warnings()
    become(wanted, _words(args, address_file, cache_bytes, wanted.digest))


def _words(args: argparse.Namespace, address_file: Path, cache_bytes: int, digest: str) -> list[str]:
    arguments = ["worker", "--service", f"file:{address_file}", "--processes", str(args.processes)]
    arguments += ["--device", args.device]
    arguments += [] if args.log is None else ["--log", str(args.log)]
    return [*arguments, "--threads", str(args.threads), "--cache-bytes", str(cache_bytes), f"--follow-program={digest}"]
