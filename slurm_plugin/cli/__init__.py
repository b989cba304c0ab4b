"""The `hetstream` command: a file for each family of verbs, with `add_VERB_arguments` and `run_VERB`.

Verbs are imported only when they are called, so that reading commands start without the data plane or torch.
Data goes to stdout, notes and errors to stderr. Exit codes: 0 done, 1 the operation failed, 2 the command line or a
script is wrong; `hetstream sbatch` and `hetstream run` pass on the exit code of what they started.
"""

from __future__ import annotations

import argparse
import errno
import io
import logging
import os
import shlex
import signal
import sys
from collections.abc import Sequence

import hetstream
from hetstream.base.errors import HetstreamError, OptionsError, UsageError
from hetstream.base.files import UntrustedFile
from hetstream.base.text import PrintableFormatter, printable
from hetstream.slurm_plugin.cli.commands import add_command

VERBS = {
    "convert": "print the heterogeneous script that an sbatch script becomes",
    "sbatch": "submit an sbatch script as a heterogeneous job",
    "run": "run a training program with local data workers, without Slurm",
    "explain": "show what of a program's forward could move to data workers, and why not more",
    "top": "show what the data workers and loaders of a running job do",
    "events": "print what happened in a job, with its causes",
    "logs": "print what the job master, dispatcher, data workers and checkpoint writers of a job wrote",
    "summary": "print what a job did that has ended",
    "clean": "remove what old jobs have left in .hetstream",
    "frag": "show which free CPUs and GPUs no pending job can use",
    "jobs": "show the queue: what jobs hold, and what pending ones wait for",
    "why": "say what a pending job waits for, and whether data workers would let it start",
    "util": "show how much of the cluster was allocated, and how much of that did something",
    "advise": "list jobs that would gain from data workers",
    "doctor": "find problems in the cluster's configuration, with the fix",
    "migrate": "move a running training job to other nodes, without a step lost",
    "simulate": "say what a policy would have done to a cluster and its jobs",
    "exporter": "serve the cluster's figures to Prometheus, with a dashboard for Grafana",
    "daemon": "run the site daemon: keep the cluster's history, divide data workers among jobs",
    "policy": "show, set and explain how data workers are divided among jobs",
    "report": "draw fragmentation, queueing delay and utilisation as one HTML page",
    "serve": "show that page live",
    "ckpt": "list, check and clean up checkpoints; run their checkpoint writer",
    "packer": "place opportunistic jobs onto GPUs in use",
    "opp": "show opportunistic jobs, and why they wait",
    "gpu": "share GPUs among a guaranteed job and opportunistic ones",
    "dispatcher": "run the dispatcher of a job by hand",
    "worker": "run data workers by hand",
    "master": "run the job master (called by converted scripts)",
    "filter": "plan the conversion of an sbatch (called by the cli_filter plugin)",
    "install": "place the Lua plugins, systemd units, man pages and completion",
    "uninstall": "take away what install placed",
}
# What a write says that finds no room; it names no file.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def build_parser(only: str | None = None, action: str | None = None) -> argparse.ArgumentParser:
    """Build the parser; with `only`, import that verb alone, and with `action` that of it, and leave the others as help
    lines."""
    parser = argparse.ArgumentParser(prog="hetstream", description="CPU data workers for GPU jobs on Slurm.")
    parser.add_argument("--version", action="version", version=f"hetstream {hetstream.__version__}")
    parser.add_argument("-v", "--verbose", action="store_true", help="debug log lines and tracebacks on stderr")
    subparsers = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for verb, summary in VERBS.items():
        if only in (None, verb):
            add_command(subparsers, verb, summary, verb, action)
        else:
            subparsers.add_parser(verb, help=summary)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return its exit code. The console script `hetstream` is this function."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb, action, *_ = *(word for word in arguments if not word.startswith("-")), None, None
    return call(f"hetstream {verb}", build_parser(verb if verb in VERBS else "", action).parse_args(arguments))


def call(name: str, args: argparse.Namespace) -> int:
    """Run what the parser chose and return its exit code, with every error one line on stderr that begins with `name`.

    Args:
        name: What the user typed, such as `hetstream why`.
        args: `run`, a function of these arguments, and `verbose`.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.DEBUG if args.verbose else logging.INFO, handlers=[handler])
    # A name that the terminal's encoding lacks must not end the command. Python does the same for stderr by itself.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        code = int(args.run(args))
        sys.stdout.flush()
        return code
    except (HetstreamError, UntrustedFile) as error:
        if args.verbose:
            logging.getLogger(__name__).exception("%s failed", name)
        # The lines are ours; what stands in them may be from a file.
        text = "\n".join(map(printable, str(error).split("\n")))
        print(f"{name}: {type(error).__name__}: {text}", file=sys.stderr)
        return 2 if isinstance(error, UsageError | OptionsError) else 1
    except BrokenPipeError:
        # The reader of a pipe (`| head`) has enough.
        _drop_stdout()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno in _FULL and error.filename is None and not args.verbose:
            _flush_or_drop()
            problem = f"{error.strerror}: what it writes, to stdout or a file, is cut off"
            print(f"{name}: {problem}", file=sys.stderr)
            return 1
        # A path that the user gave cannot be read or written; an error without a path is a fault of ours.
        if error.filename is None or args.verbose:
            raise
        path = str(error.filename)
        print(
            f"{name}: {type(error).__name__}: {printable(path)}: {error.strerror}. "
            f"Check: namei -l {printable(shlex.quote(path))}",
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130


def _flush_or_drop() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()


def _drop_stdout() -> None:
    """Let nothing more be written, not even by Python at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
