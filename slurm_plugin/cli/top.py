"""`hetstream top`: what the data workers and loaders of a running job do."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from hetstream.hetjob.find_service import check_running, find_address_file
from hetstream.slurm_plugin.cli.screen import add_screen_arguments, check_interval, show_again
from hetstream.slurm_plugin.render.top import render

EPILOG = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Show a job's data workers and loaders, again and again until Ctrl-C. Where the output is no terminal, once."
    )
    parser.epilog = EPILOG
    add_service_arguments(parser)
    add_screen_arguments(parser)
    parser.set_defaults(run=run)


def add_service_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments that name a service."""
    parser.add_argument(
        "job", nargs="?", metavar="JOB", help="job id, also of a component or companion; or a job's directory"
    )
    parser.add_argument("--service", metavar="file:FILE", help="address file of a dispatcher (or HETSTREAM_SERVICE)")


def address_file_of(args: argparse.Namespace) -> Path:
    """Address file of the service that these arguments name."""
    from hetstream.slurm_plugin.client.job_place import job_place

    return find_address_file(args.job, args.service, os.environ, Path.cwd(), lambda job: job_place(job, os.environ))


def run(args: argparse.Namespace) -> int:
    """Show it until the user has seen enough."""
    from hetstream.mpi_dataworkers.status_client import StatusClient, running_service

    check_interval(args)
    path = address_file_of(args)
    check_running(path)
    with StatusClient(running_service(path)) as client:
        return show_again(args, client.fetch, lambda status, color: render(status, path.parent.name, color))
