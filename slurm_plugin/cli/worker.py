"""`hetstream worker`: run the processes of one data worker in the foreground."""

from __future__ import annotations

import argparse

from hetjob.errors import UsageError

# More than the CPUs of any host: a slip of the finger is not to fork without end.
_MAX_PROCESSES = 4096


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Declare the verb."""
    parser = subparsers.add_parser(
        "worker",
        help=summary,
        description="Make batches for the loaders of a service until the dispatcher ends or SIGTERM comes. A process "
        "that dies is replaced.",
    )
    parser.add_argument("--service", required=True, metavar="file:FILE", help="address file of the dispatcher")
    parser.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="how many; best one for each CPU of the data worker (default 1)",
    )
    parser.add_argument(
        "--threads",
        type=int,
        default=1,
        metavar="N",
        help="of each process, for datasets that are thread-safe (default 1)",
    )
    parser.add_argument(
        "--cache-bytes",
        type=int,
        metavar="N",
        help="finished batches that each process keeps for other loaders that share them (default "
        "HETSTREAM_CACHE_BYTES, or 256 MiB; 0 keeps none)",
    )
    parser.add_argument(
        "--mpi",
        action="store_true",
        help="this is a rank of an MPI world, which the trainers are in too: one process, batches by MPI",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Work until the service ends."""
    from mpi_dataworkers.address import parse_service
    from mpi_dataworkers.config import cache_bytes_from_environment
    from mpi_dataworkers.supervisor import run_data_workers
    from mpi_dataworkers.threads import MAX_THREADS

    if not 1 <= args.processes <= _MAX_PROCESSES:
        raise UsageError(f"--processes {args.processes}: 1 to {_MAX_PROCESSES}")
    if not 1 <= args.threads <= MAX_THREADS:
        raise UsageError(f"--threads {args.threads}: 1 to {MAX_THREADS}")
    if args.mpi and args.processes > 1:
        raise UsageError(f"--processes {args.processes} with --mpi: a rank is one process; start more ranks instead")
    if args.cache_bytes is not None and args.cache_bytes < 0:
        raise UsageError(f"--cache-bytes {args.cache_bytes}: at least 0")
    cache_bytes = cache_bytes_from_environment() if args.cache_bytes is None else args.cache_bytes
    if args.mpi:
        from mpi_dataworkers.mpi_worker import run_mpi_data_worker

        return run_mpi_data_worker(parse_service(args.service), cache_bytes, args.threads)
    return run_data_workers(parse_service(args.service), args.processes, cache_bytes, args.threads)
