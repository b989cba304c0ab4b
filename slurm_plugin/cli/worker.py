"""`hetstream worker`: run the processes of one data worker in the foreground."""

from __future__ import annotations

import argparse

from hetjob.errors import UsageError


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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Work until the service ends."""
    from mpi_dataworkers.address import parse_service
    from mpi_dataworkers.worker import run_data_workers

    if args.processes < 1:
        raise UsageError(f"--processes {args.processes}: at least 1")
    return run_data_workers(parse_service(args.service), args.processes)
