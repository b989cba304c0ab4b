"""`hetstream run`: a training program with local data workers, without Slurm."""

from __future__ import annotations

import argparse
import functools
import json
import logging
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.hetjob.convert.spec import AUTO
from hetstream.hetjob.job.embedding_servers import EMBEDDING_DIR
from hetstream.hetjob.job.ended_job import next_try, servers_words, summary_line
from hetstream.hetjob.master.local import LocalConfig, run_local
from hetstream.mpi_dataworkers.hook import environment
from hetstream.mpi_dataworkers.process.config import OFFLOADS, checked_cache
from hetstream.slurm_plugin.submit.program import own_program

EPILOG = """\
The program's exit code is passed on (128 + N when signal N ended it), and so are its signals.

examples:
  hetstream run python train.py
  hetstream run --data-workers 2 python train.py --epochs 3
  hetstream run --data-workers 2 --offload auto python train.py
  hetstream run --data-workers 2 --embedding-servers 2 python train.py
  hetstream run --data-workers 8 --explain python train.py    what --offload could move; its prints go to stderr
  hetstream run --data-workers 2 --json summary.json -- torchrun --nproc-per-node 2 train.py
"""


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Run a program whose torch DataLoader streams from data workers on this host. The program needs no change."
    )
    parser.epilog = EPILOG
    parser.usage = "%(prog)s [--data-workers N] [options] [--] PROGRAM [ARGUMENTS]"
    parser.add_argument(
        "--data-workers",
        type=_count,
        metavar="N",
        help="how many; with 0 the program makes the same batches itself (default: auto, one for each CPU, at most 8, "
        "and then as many as are needed, which a controller finds out while the program runs)",
    )
    _add_embedding_arguments(parser)
    parser.add_argument(
        "--worker-threads", type=int, default=1, metavar="N", help="threads of each data worker (default 1)"
    )
    parser.add_argument(
        "--offload",
        choices=OFFLOADS,
        help="move the part of the model's forward that depends on no state to the data workers: auto where that makes "
        "a step faster, all with its random numbers too (default: off)",
    )
    parser.add_argument(
        "--cache",
        metavar="PLACE",
        help="keep the deterministic front of each sample (read, decode, resize) for later epochs and runs: memory:8G, "
        "or a directory on a local disk, with or without a bound (/local/cache:50G)",
    )
    parser.add_argument(
        "--stream-in-process-loaders",
        action="store_true",
        help="have data workers also make the batches of DataLoaders with num_workers=0, which torch makes with the "
        "program's own dataset",
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="run three steps, and show which operators of the model's forward --offload could move, what they cost, "
        "and why the others stay",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the summary of the run, or what --explain has found"
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help="print what would be started, and stop")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the program and its arguments")
    parser.set_defaults(run=run)


def _add_embedding_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--embedding-servers",
        type=int,
        default=0,
        metavar="N",
        help="processes that hold the rows of embedding tables in memory, all together in half of what this host has "
        "available (default none; with some and no --data-workers there are no data workers); what they are told stays "
        f"in {EMBEDDING_DIR} if checkpoints name it",
    )


def _count(text: str) -> int | str:
    """A number, or auto."""
    try:
        return text if text == AUTO else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: write a whole number, or auto") from None


def run(args: argparse.Namespace) -> int:
    """Run the program and return its exit code."""
    if args.json and not args.json.parent.is_dir():
        raise UsageError(f"--json {args.json}: there is no directory {args.json.parent}; make it first")
    if args.cache:
        checked_cache(args.cache)
    if args.explain:
        from hetstream.slurm_plugin.cli.explain import run_explained

        return run_explained(args)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    is_auto = args.data_workers == AUTO or (args.data_workers is None and not args.embedding_servers)
    config = LocalConfig(
        program=own_program(),
        command=tuple(command),
        data_workers=0 if is_auto else args.data_workers or 0,
        most_data_workers=len(os.sched_getaffinity(0)) if is_auto else 0,
        embedding_servers=args.embedding_servers,
        worker_threads=args.worker_threads,
        show_logs=args.verbose,
    )
    hook_environment = functools.partial(
        environment,
        offload=args.offload,
        in_process_loaders=args.stream_in_process_loaders,
        cache=args.cache,
        embedding_servers=config.embedding_servers,
        has_data_workers=config.data_workers > 0 or config.most_data_workers > 0,
    )
    if args.dry_run:
        _print_commands(config, hook_environment)
        return 0
    if not args.verbose:
        logging.getLogger("hetstream").setLevel(logging.WARNING)  # the terminal belongs to the program
    result = run_local(config, os.environ, hook_environment)
    if config.data_workers or config.most_data_workers:
        print(f"hetstream: {summary_line(result.summary)}{servers_words(result.summary)}", file=sys.stderr)
        advice = next_try(result.summary, config.data_workers, len(os.sched_getaffinity(0)))
        if advice:
            print(f"hetstream: {advice}", file=sys.stderr)
    elif config.embedding_servers:
        print(f"hetstream: {servers_words(result.summary).removeprefix(', ')}", file=sys.stderr)
    if args.json:
        report = {"meta": {"version": 1}, "returncode": result.returncode, **result.summary}
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return result.returncode


def _print_commands(config: LocalConfig, hook_environment: Callable[[str | None], dict[str, str]]) -> None:
    directory = Path("/tmp/hetstream-XXXXXXXX")
    if config.has_service:
        print(shlex.join(config.dispatcher_words(directory)))
    if config.embedding_servers:
        embedding = config.embedding_of_run()
        for index in range(config.embedding_servers):
            print(shlex.join(embedding.words(config.program, directory / "address", str(index))))
    for _ in range(config.data_workers):
        print(shlex.join(config.data_worker_words(directory)))
    if config.most_data_workers:
        print(f"# up to {config.most_data_workers} times, as many as pay:")
        print(shlex.join(config.data_worker_words(directory)))
    service = f"file:{directory / 'address'}" if config.has_service else None
    variables = hook_environment(service)
    print(shlex.join(["env", *(f"{name}={value}" for name, value in variables.items()), *config.command]))
