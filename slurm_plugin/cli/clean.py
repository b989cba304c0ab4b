"""`hetstream clean`: remove what old jobs have left in their places; without `--remove` it only says what would go."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.text import printable
from hetstream.hetjob.job_cleaning import JobLeft, jobs_left, remove
from hetstream.hetjob.jobs_dir import IN_SUBMIT_DIR, JOBS_DIR, RULE, for_user, is_directory_pattern, places, setting
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.render.table import duration_words, size_words

_UNITS_S = {"h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}

EPILOG = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = "List the directories of old jobs in .hetstream, or remove them with --remove."
    parser.epilog = EPILOG
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
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
