"""`hetstream internal dispatcher`: run the dispatcher of a job in the foreground."""

from __future__ import annotations

import argparse
import logging
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.process import hold_warnings, is_in_step, pass_over_warnings, stop_requests
from hetstream.slurm_plugin.submit.program import become


def add_dispatcher_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(run=run_dispatcher)


def run_dispatcher(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT."""
    # First of all: a thread of a library that is there already would take what is held later.
    should_stop = stop_requests() if is_in_step() else _stopped_by_handlers()
    from hetstream.base.limits import take_all_descriptors
    from hetstream.mpi_dataworkers.dispatcher.server import serve
    from hetstream.mpi_dataworkers.process.config import metrics_address, metrics_from_environment

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


# `hetstream internal worker`: run the processes of one data worker in the foreground.

log = logging.getLogger(__name__)

# How long an embedding server waits for the dispatcher, as data workers do.
_ADDRESS_FILE_S = 30.0
# More than the CPUs of any host: a slip of the finger is not to fork without end.
_MAX_PROCESSES = 4096


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
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
    parser.set_defaults(run=run_worker)


def run_worker(args: argparse.Namespace) -> int:
    """Work until the service ends."""
    from hetstream.mpi_dataworkers.process.children import keep_apart
    from hetstream.mpi_dataworkers.process.config import cache_bytes_from_environment
    from hetstream.mpi_dataworkers.process.interpreter import take_hash_seed
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
        from hetstream.mpi_dataworkers.worker.worker import run_mpi_data_worker

        return run_mpi_data_worker(parse_service(args.service), cache_bytes, args.threads)
    return _work(args, parse_service(args.service), cache_bytes)


def _work(
    args: argparse.Namespace, address_file: Path, cache_bytes: int, wants_change: Callable[[], bool] = lambda: False
) -> int:
    from hetstream.mpi_dataworkers.worker.supervisor import run_data_workers

    make_earlier = None
    if args.device == "gpu":
        from hetstream.mpi_dataworkers.worker.gpu_stage import LoaderOfEarlierStage

        make_earlier = partial(LoaderOfEarlierStage, address_file)
    return run_data_workers(address_file, args.processes, cache_bytes, args.threads, wants_change, make_earlier)


def _follow(args: argparse.Namespace, cache_bytes: int) -> int:
    """Work in the Python environment of the program, whichever that turns out to be."""
    from hetstream.mpi_dataworkers.process.interpreter import EnvironmentWatch
    from hetstream.mpi_dataworkers.wire.address import parse_service

    address_file = parse_service(args.service)
    follower = EnvironmentWatch(address_file, args.follow_program)
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
    arguments = ["internal", "worker", "--service", f"file:{address_file}", "--processes", str(args.processes)]
    arguments += ["--device", args.device]
    arguments += [] if args.log is None else ["--log", str(args.log)]
    return [*arguments, "--threads", str(args.threads), "--cache-bytes", str(cache_bytes), f"--follow-program={digest}"]


# `hetstream internal embedding-server`: keep rows of embedding tables for the trainers of a service.

_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def add_embedding_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Keep rows of embedding tables for the trainers of a service until it ends. After SIGTERM it serves until the "
        "trainers have taken all rows to other embedding servers. Started again with the same arguments it has all "
        "rows that it had."
    )
    parser.add_argument("--service", required=True, metavar="file:FILE", help="address file of the dispatcher")
    parser.add_argument("--name", required=True, help="its own, among the embedding servers of the service")
    parser.add_argument(
        "--directory",
        required=True,
        metavar="DIR",
        help="its log goes to DIR/server-NAME; a place that all embedding servers of the service share",
    )
    parser.add_argument("--memory", required=True, metavar="SIZE", help="that its rows may take, such as 64G")
    parser.add_argument(
        "--generations", type=int, default=8, metavar="N", help="how many can be restored from its log (default 8)"
    )
    parser.add_argument(
        "--segment",
        default="64M",
        metavar="SIZE",
        help="what is written to the log before all rows are written anew, at least; more where all rows are more "
        "(default 64M)",
    )
    parser.add_argument(
        "--drain-s", type=float, default=30.0, metavar="S", help="how long it serves after SIGTERM at most (default 30)"
    )
    parser.add_argument("--log", type=Path, help=argparse.SUPPRESS)  # of `hetstream run`: its own lines, and no others
    parser.set_defaults(run=run_embedding_server)


def run_embedding_server(args: argparse.Namespace) -> int:
    """Serve until the service ends, or until SIGTERM and no row is left."""
    # First of all: a thread of a library that is there already would take what is held later.
    should_stop = stop_requests() if is_in_step() else _stopped_by_handlers()
    from hetstream.base.limits import take_all_descriptors
    from hetstream.mpi_dataworkers.embedding.server import EmbeddingServer
    from hetstream.mpi_dataworkers.process.children import keep_apart
    from hetstream.mpi_dataworkers.process.interpreter import keep_freed_memory
    from hetstream.mpi_dataworkers.wire.address import parse_service, wait_for_address_file

    memory_bytes, segment_bytes = _bytes_of("--memory", args.memory), _bytes_of("--segment", args.segment)
    if not args.directory:
        raise UsageError("--directory '': must name a path. Is a variable of the shell empty?")
    if not _NAME.fullmatch(args.name):
        raise UsageError(
            f"--name {args.name!r}: 1 to 64 letters, digits, `.`, `_` and `-`, the first a letter or digit"
        )
    if not (memory_bytes and args.generations >= 1 and 0 <= args.drain_s < float("inf")):
        raise UsageError("--memory and --generations: at least 1; --drain-s: seconds, at least 0")
    keep_apart(args.log)
    take_all_descriptors()
    keep_freed_memory()  # answers are as large as batches
    service = wait_for_address_file(parse_service(args.service), _ADDRESS_FILE_S)
    place = Path(args.directory)
    server = EmbeddingServer(service, args.name, place, memory_bytes, args.drain_s, args.generations, segment_bytes)
    server.run(should_stop)
    return 0


def _bytes_of(option: str, text: str) -> int:
    size = _SIZE.fullmatch(text)
    if size is None:
        raise UsageError(f"{option} {text!r}: must be a number of bytes, with K, M, G or T behind it, such as 64G")
    return int(float(size[1]) * (1 << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[size[2]]))
