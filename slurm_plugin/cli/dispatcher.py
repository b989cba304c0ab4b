"""`hetstream dispatcher`: run the dispatcher of a job in the foreground."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.signals import is_in_step, stop_requests


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Hand out steps to data workers until SIGTERM. Started again with the same arguments it recovers "
        "and keeps its address."
    )
    parser.add_argument("--bind", required=True, metavar="tcp://HOST:PORT", help="address to bind; port 0 finds one")
    parser.add_argument("--work-dir", required=True, metavar="DIR", help="directory of the journal")
    parser.add_argument(
        "--address-file",
        required=True,
        metavar="FILE",
        help="gets address and keys, mode 0600",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="serve Prometheus metrics there; HOST is 127.0.0.1 where none is given, port 0 finds a free one and the "
        "log names it (default HETSTREAM_METRICS_PORT, or nowhere)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    # First of all: a thread of a library that is there already would take what is held later.
    should_stop = stop_requests() if is_in_step() else _stopped_by_handlers()
    from hetstream.base.limits import take_all_descriptors
    from hetstream.mpi_dataworkers.config import metrics_address, metrics_from_environment
    from hetstream.mpi_dataworkers.dispatcher.server import serve

    scheme, _, address = args.bind.partition("://")
    host, _, port = address.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or int(port) > 65535:
        raise UsageError(f"--bind {args.bind!r}: the form is tcp://HOST:PORT, for example tcp://127.0.0.1:0")
    if host in ("*", "0.0.0.0"):
        raise UsageError(
            f"--bind {args.bind!r}: name one address of this host, which trainers and data workers can reach"
        )
    for option, path in (("--work-dir", args.work_dir), ("--address-file", args.address_file)):
        if not path:
            raise UsageError(f"{option} '': must name a path. Is a variable of the shell empty?")
    if Path(args.address_file).is_dir():
        raise UsageError(f"--address-file {args.address_file!r} is a directory: name a file in it")
    metrics = metrics_from_environment()
    if args.metrics_port is not None:
        metrics = metrics_address(args.metrics_port, "--metrics-port")
    take_all_descriptors()  # each data worker and trainer has one
    serve(args.bind, Path(args.work_dir), Path(args.address_file), should_stop, metrics)
    return 0


def _stopped_by_handlers() -> Callable[[], bool]:
    stopping = False  # not an Event: a second signal inside its lock would wait for itself

    def stop(*_: object) -> None:
        nonlocal stopping
        stopping = True

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    return lambda: stopping
