"""`hetstream top`: what the data workers and loaders of a running job do."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.base.files import Directory, UntrustedFile
from hetstream.base.text import duration_words, printable, size_words
from hetstream.hetjob.elastic.step_terms import StepTerm
from hetstream.hetjob.errors import ServiceNotFound
from hetstream.hetjob.job.ended_job import (
    SUMMARY_FILE,
    JobLeft,
    ended_of,
    jobs_left,
    load_summary,
    remove,
    summary_line,
)
from hetstream.hetjob.job.find_service import check_running, find_address_file, find_directory
from hetstream.hetjob.job.job import IN_SUBMIT_DIR, JOBS_DIR, RULE, for_user, is_directory_pattern, places, setting
from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.slurm_plugin.cli.output import EXIT_CODES
from hetstream.slurm_plugin.cli.screen import add_screen_arguments, check_interval, show_again
from hetstream.slurm_plugin.client.accounting import job_place
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.render.tables import Cell, table
from hetstream.slurm_plugin.render.top import render

TOP_EPILOG = """\
WAITED is the share of the last seconds in which the training loop waited for data. BUSY is the share in which a data
worker made steps. If trainers wait and data workers are busy, more data workers help. If trainers wait and data workers
are idle, something else holds the job up, such as the network.

examples:
  hetstream top                         the only service of this directory or host
  hetstream top 8123                    a Slurm job, from where it was submitted, or anywhere as long as Slurm knows it
  hetstream top --once --json 8123      for scripts

exit codes:
  0  done
  1  the job has no service that answers, or Slurm could not say where it would be
  2  the command line is wrong, or names no job where there are several services or none
"""


def add_top_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Show a job's data workers and loaders, again and again until Ctrl-C. Where the output is no terminal, once."
    )
    parser.epilog = TOP_EPILOG
    add_service_arguments(parser)
    add_screen_arguments(parser)
    parser.set_defaults(run=run_top)


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name a service."""
    parser.add_argument(
        "job", nargs="?", metavar="JOB", help="job id, also of a component or companion; or a job's directory"
    )
    parser.add_argument("--service", metavar="file:FILE", help="address file of a dispatcher (or HETSTREAM_SERVICE)")


def address_file_of(args: argparse.Namespace) -> Path:
    """Address file of the service that these arguments name."""
    from hetstream.slurm_plugin.client.accounting import job_place

    return find_address_file(args.job, args.service, os.environ, Path.cwd(), lambda job: job_place(job, os.environ))


def run_top(args: argparse.Namespace) -> int:
    """Show it until the user has seen enough."""
    from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service

    check_interval(args)
    path = address_file_of(args)
    check_running(path)
    with StatusClient(running_service(path)) as client:
        return show_again(args, client.fetch, lambda status, color: render(status, path.parent.name, color))


# `hetstream events`: what happened in a job, with its causes.


def add_events_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Print the events of a job's dispatcher, oldest first: data workers that came and went, leases "
        "that were taken back, epochs that began and ended, each with its cause. Also after the job's end."
    )
    add_service_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with all fields")
    parser.add_argument("--follow", action="store_true", help="go on with new events until Ctrl-C")
    parser.set_defaults(run=run_events)


def run_events(args: argparse.Namespace) -> int:
    """Print them."""
    from hetstream.mpi_dataworkers.dispatcher.events import EVENTS_FILE, follow_events, read_events, render_line

    directory = address_file_of(args).parent
    places = [place / EVENTS_FILE for place in (directory / "dispatcher", directory)]
    path = next((place for place in places if place.exists()), None)
    if path is None and (directory / "dispatcher").is_symlink():
        place = (directory / "dispatcher").readlink()
        raise UsageError(f"the events are on a disk of the job's first node until it ends: {place}. Run this there")
    if path is None:
        raise UsageError(f"no {EVENTS_FILE} in {directory} or {directory / 'dispatcher'}: no dispatcher has run there")
    for line in (follow_events if args.follow else read_events)(path):
        print(printable(line.decode(errors="replace").rstrip() if args.json else render_line(line)))
        if args.follow:
            sys.stdout.flush()
    return 0


# `hetstream logs`: what the parts of a job wrote, while it runs and when it is over.

_MAX_BYTES = 256 << 20
_DEFAULT_LINES = 20
_WRITERS = "writers"

LOGS_EPILOG = f"""\
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


def add_logs_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Print the logs of a job's master, dispatcher, data workers and checkpoint writers. The job may be "
        "named by any of its numbers, from any directory, as long as Slurm knows it."
    )
    parser.epilog = LOGS_EPILOG
    parser.add_argument("job", metavar="JOB", help="job id, also of a component or companion; or a job's directory")
    parser.add_argument("names", nargs="*", metavar="LOG", help="print the whole text of these logs")
    parser.add_argument(
        "-n", "--lines", type=int, metavar="N", help=f"how many last lines of each log (default {_DEFAULT_LINES})"
    )
    parser.add_argument("--path", action="store_true", help="print only where the logs are")
    parser.set_defaults(run=run_logs)


def directory_of(job: str) -> Path:
    """The directory of the job that a user names."""
    jobs_dir = setting(JOBS_DIR, os.environ)
    return find_directory(job, Path.cwd(), lambda name: job_place(name, os.environ), jobs_dir)


def run_logs(args: argparse.Namespace) -> int:
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


# `hetstream summary`: what the loaders of an ended job took, who made it, and what the elastic controller did.

_HEAD = ("LOADER", "RANK", "HOST", "EPOCHS", "STEPS", "SAMPLES", "BYTES", "WAITED", "LOCAL", "LEFT OUT")
_DECISIONS_SHOWN = 10

SUMMARY_EPILOG = f"""\
WAITED is the share of the time inside epochs in which the training loop waited for data; LOCAL are steps that the
trainer had to make itself.

examples:
  hetstream summary 8123
  hetstream summary --json 8123
  hetstream summary .hetstream/job-8123   without Slurm

{EXIT_CODES}"""


def add_summary_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Print what a job did that has ended: its loaders, its data workers, the changes of their number."
    )
    parser.epilog = SUMMARY_EPILOG
    parser.add_argument("job", metavar="JOB", help="job id, also of a component or companion; or a job's directory")
    parser.add_argument("--json", action="store_true", help="the whole record, as it was written")
    parser.set_defaults(run=run_summary)


def run_summary(args: argparse.Namespace) -> int:
    """Print it."""
    directory = directory_of(args.job)
    summary = _read(directory)
    if args.json:
        print(json.dumps(summary, indent=1))
    else:
        try:
            lines = _lines(summary, directory)
        except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError) as error:
            raise ServiceError(f"{directory / SUMMARY_FILE} is no record of a job: {error!r}") from error
        print("\n".join(map(printable, lines)))
    return 0


def _read(directory: Path) -> dict[str, Any]:
    try:
        summary, _ = load_summary(directory)
    except FileNotFoundError as error:
        running = (directory / "address").exists()
        raise ServiceNotFound(
            f"no {SUMMARY_FILE} in {directory}: "
            + ("the job runs; see: hetstream top " if running else "its job master was killed; see: hetstream logs ")
            + str(directory)
        ) from error
    except ValueError as error:
        raise ServiceError(f"{directory / SUMMARY_FILE} {error}") from error
    return summary


def _lines(summary: Mapping[str, Any], directory: Path) -> list[str]:
    name = summary.get("job_name")
    lines = [f"{directory.name}{f' ({name})' if name else ''} has ended: {summary_line(summary)}"]
    loaders = summary.get("loaders", [])
    if loaders:
        rows = [_cells(loader) for loader in sorted(loaders, key=lambda loader: (loader["pid"], loader["ordinal"]))]
        lines += ["", *table(_HEAD, rows, ("LOADER", "HOST"), color=False)]
    elastic = summary.get("elastic") or {}
    for name, whose in (("elastic", "data workers"), ("elastic_gpu", "data workers with a GPU")):
        lines += _changes((summary.get(name) or {}).get("decisions", []), whose)
    if elastic.get("step_terms"):
        terms = [StepTerm(**{name: row[name] for name in StepTerm.__struct_fields__}) for row in elastic["step_terms"]]
        lines += ["", "parts of a step:", *(f"  {term}" for term in terms)]
    if elastic.get("trainer_memory"):
        lines += ["", str(elastic["trainer_memory"])]
    ended = ended_of(summary, directory.name, "", 0.0)
    if ended and ended.advice:
        lines += ["", f"{ended.advice}: next time --trainer-cpus={ended.needed_cpus}"]
    return [*lines, "", f"more: hetstream logs {directory}; hetstream events {directory}"]


def _changes(decisions: Sequence[Mapping[str, Any]], whose: str) -> list[str]:
    """What the controller of one stage did; empty if it did nothing."""
    if not decisions:
        return []
    began = decisions[0]["time"]
    shown = [
        f"  after {duration_words(row['time'] - began)}: {row['action']} {row['count']}, because {row['reason']}"
        for row in decisions[-_DECISIONS_SHOWN:]
    ]
    return ["", f"changes of the number of {whose} ({len(decisions)}, the last {_DECISIONS_SHOWN}):", *shown]


def _cells(loader: Mapping[str, Any]) -> list[Cell]:
    waited = min(1.0, loader["wait_s"] / loader["elapsed_s"]) if loader["elapsed_s"] > 0 else 0.0
    texts = (
        str(loader.get("title") or loader["job_name"]),
        str(loader["rank"]),
        str(loader["host"]),
        f"{loader['epochs']:,}",
        f"{loader['steps']:,}",
        f"{loader['samples']:,}",
        size_words(loader["bytes"]),
        f"{waited:.0%}",
        f"{loader['local_steps']:,}",
        f"{loader['skipped']:,}",
    )
    return [(text, "") for text in texts]


# `hetstream clean`: remove what old jobs have left in their places; without `--remove` it only says what would go.

_UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}

CLEAN_EPILOG = """\
A job's directory holds its logs, events and summary. It is old if nothing in it has changed for as long as --older-than
says, and squeue does not list the job. Directories of other users stay, and links are not followed. If Slurm does not
answer, nothing is removed.

examples:
  hetstream clean                             what would be removed here, in ~ and in HETSTREAM_JOBS_DIR
  hetstream clean --older-than 30d ~/runs/*
  hetstream clean --remove

exit codes:
  0  done
  1  Slurm could not be asked, or something could not be removed
  2  the command line is wrong
"""


def add_clean_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "List the directories of old jobs in .hetstream, or remove them with --remove."
    parser.epilog = CLEAN_EPILOG
    parser.add_argument(
        "directories", nargs="*", type=Path, metavar="DIR", help="where jobs were submitted (default: this directory)"
    )
    parser.add_argument(
        "--jobs-dir", metavar="DIR", help=f"look in this place of jobs' directories, too (default: ${JOBS_DIR})"
    )
    parser.add_argument(
        "--older-than", default="14d", metavar="AGE", help="how old, such as 12h, 30d or 8w (default 14d)"
    )
    parser.add_argument("--remove", action="store_true", help="remove it; without this option it is only listed")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=run_clean)


def run_clean(args: argparse.Namespace) -> int:
    """Say what is old, and remove it if that was asked for."""
    limit_s = _seconds(args.older_than)
    if missing := [path for path in args.directories if not path.is_dir()]:
        raise UsageError(f"{missing[0]} is no directory")
    # All of it holds jobs of this user; a directory of another name may hold a `job-7` that is none of ours.
    pattern = args.jobs_dir or (None if args.directories else setting(JOBS_DIR, os.environ))
    if pattern and not is_directory_pattern(pattern):
        raise UsageError(f"--jobs-dir {pattern!r}: must be {RULE}")
    named = [path / IN_SUBMIT_DIR for path in args.directories]
    found = [*named, *([for_user(pattern)] if pattern else [])] if named else places([Path.cwd()], pattern)
    living = CommandSlurm().living_jobs()
    now = time.time()
    rows: list[dict[str, object]] = []
    failed = False
    for left in (job for place in found for job in jobs_left(place, living)):
        reason = left.why_kept or ("" if now - left.newest_s >= limit_s else f"younger than {args.older_than}")
        done = "kept" if reason else "removed" if args.remove else "would be removed"
        if args.remove and not reason:
            try:
                remove(left)
            except OSError as error:
                done, reason, failed = "kept", str(error), True
        rows.append({"directory": str(left.path), "age_s": round(now - left.newest_s), "bytes": left.num_bytes})
        rows[-1] |= {"done": done, "reason": reason}
        if not args.json:
            print(printable(_line(left, now, done, reason)))
    if args.json:
        print(json.dumps({"meta": {"version": 1}, "directories": rows}, indent=1))
    else:
        _say_total(rows, args.remove)
    return 1 if failed else 0


def _line(left: JobLeft, now: float, done: str, reason: str) -> str:
    age = duration_words(now - left.newest_s)
    return f"{left.path}  {size_words(left.num_bytes)}, {age} old: {done}{f' ({reason})' if reason else ''}"


def _say_total(rows: list[dict[str, object]], removing: bool) -> None:
    chosen = [row for row in rows if row["done"] != "kept"]
    size = size_words(sum(float(str(row["bytes"])) for row in chosen))
    verb = "removed" if removing else "would be removed; do it with --remove"
    print(f"hetstream: {len(chosen)} of {len(rows)} directories, {size}: {verb}", file=sys.stderr)


def _seconds(age: str) -> float:
    match = re.fullmatch(r"(\d+)([hdw])", age, re.ASCII)
    if not match:
        raise UsageError(f"--older-than {age!r}: write a number and h, d or w, such as 30d")
    return int(match[1]) * _UNITS_S[match[2]]
