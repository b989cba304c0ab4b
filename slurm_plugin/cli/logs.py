"""`hetstream logs`: what the parts of a job wrote, while it runs and when it is over."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.files import Directory, UntrustedFile
from hetstream.base.text import printable
from hetstream.hetjob.find_service import find_directory
from hetstream.hetjob.jobs_dir import JOBS_DIR, setting
from hetstream.slurm_plugin.cli.output import EXIT_CODES
from hetstream.slurm_plugin.client.job_place import job_place

_MAX_BYTES = 256 << 20
_DEFAULT_LINES = 20
_WRITERS = "writers"

EPILOG = f"""\
master.log      what the job master decided and why
dispatcher.log  which data workers and loaders came and went
data-worker-N   the data workers of component 1; companion-N: those that joined later;
                gpu-companion-N: those with a GPU
writers/NODE    the checkpoint writers

examples:
  hetstream logs 8123                    the last lines of each
  hetstream logs 8123 master             all of one
  hetstream logs 8123 --path             where they are
  hetstream logs .hetstream/job-8123     without Slurm

{EXIT_CODES}"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Print the logs of a job's master, dispatcher, data workers and checkpoint writers. The job may be "
        "named by any of its numbers, from any directory, as long as Slurm knows it."
    )
    parser.epilog = EPILOG
    parser.add_argument("job", metavar="JOB", help="job id, also of a component or companion; or a job's directory")
    parser.add_argument("names", nargs="*", metavar="LOG", help="print the whole text of these logs")
    parser.add_argument(
        "-n", "--lines", type=int, metavar="N", help=f"how many last lines of each log (default {_DEFAULT_LINES})"
    )
    parser.add_argument("--path", action="store_true", help="print only where the logs are")
    parser.set_defaults(run=run)


def directory_of(job: str) -> Path:
    """The directory of the job that a user names."""
    jobs_dir = setting(JOBS_DIR, os.environ)
    return find_directory(job, Path.cwd(), lambda name: job_place(name, os.environ), jobs_dir)


def run(args: argparse.Namespace) -> int:
    """Print them."""
    if args.lines is not None and args.lines < 1:
        raise UsageError(f"--lines {args.lines}: at least 1")
    path = directory_of(args.job)
    with Directory.open(path) as directory:
        logs = list(_logs(directory))
        if not logs:
            raise UsageError(
                f"no log in {path}: the job has not started, or had no data workers and no checkpoint writers"
            )
        chosen = [log for log in logs if not args.names or any(_is_called(log, name) for name in args.names)]
        if not chosen:
            known = ", ".join(str(log.with_suffix("")) for log in logs)
            raise UsageError(f"no log {' or '.join(map(repr, args.names))} in {path}. It has: {known}")
        if args.path:
            print("\n".join(printable(str(path / log)) for log in chosen))
            return 0
        num_lines = args.lines or (None if args.names else _DEFAULT_LINES)
        for place, log in enumerate(chosen):
            if len(chosen) > 1:
                print(f"{chr(10) if place else ''}==> {printable(str(path / log))} <==")
            for line in _last_lines(directory, log, num_lines):
                print(printable(line))
    sys.stdout.flush()
    return 0


def _logs(directory: Directory) -> Iterator[Path]:
    """The logs of a job in its directory, its master's first."""
    order = {"master.log": 0, "dispatcher.log": 1}
    yield from sorted(_named(directory), key=lambda log: (order.get(log.name, 2), len(log.name), log.name))
    try:
        with directory.enter(_WRITERS) as writers:
            yield from sorted(Path(_WRITERS) / log for log in _named(writers))
    except FileNotFoundError:
        pass
    except UntrustedFile as error:
        print(f"logs of checkpoint writers are not shown: {printable(str(error))}", file=sys.stderr)


def _named(directory: Directory) -> Iterator[Path]:
    return (Path(name) for name in directory.names() if name.endswith(".log") and not directory.has_directory(name))


def _is_called(path: Path, name: str) -> bool:
    return name in (path.name, path.stem, f"{path.parent.name}/{path.stem}")


def _last_lines(directory: Directory, log: Path, num_lines: int | None) -> list[str]:
    """The last lines, or all; of what is no log of the job's, why it is not read."""
    try:
        if log.parent.name:
            with directory.enter(log.parent.name) as writers:
                return _last_lines(writers, Path(log.name), num_lines)
        lines = directory.read(log.name, _MAX_BYTES).decode(errors="replace").splitlines()
    except UntrustedFile as error:
        return [f"not shown: {error}"]
    return lines if num_lines is None else lines[-num_lines:]
