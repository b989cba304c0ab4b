"""`hetstream events`: what happened in a job, with its causes."""

from __future__ import annotations

import argparse
import sys

from hetstream.base.errors import UsageError
from hetstream.base.text import printable
from hetstream.slurm_plugin.cli.top import add_service_arguments, address_file_of


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Print the events of a job's dispatcher, oldest first: data workers that came and went, leases "
        "that were taken back, epochs that began and ended, each with its cause. Also after the job's end."
    )
    add_service_arguments(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with all fields")
    parser.add_argument("--follow", action="store_true", help="go on with new events until Ctrl-C")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print them."""
    from hetstream.mpi_dataworkers.dispatcher.event_log import EVENTS_FILE, follow_events, read_events, render_line

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
