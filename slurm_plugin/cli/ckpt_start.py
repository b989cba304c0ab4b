"""`hetstream ckpt start`: start the checkpoint writers of this job. Called by batch scripts, converted or not."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from hetstream.base.errors import HetstreamError
from hetstream.base.own_job import with_job
from hetstream.checkpoint.config import DIRECTORY
from hetstream.hetjob.job_environment import export_lines, export_variables
from hetstream.hetjob.jobs_dir import JOBS_DIR, choose, setting
from hetstream.hetjob.writers import start
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.program import own_program

EPILOG = """\
In a batch script, before the line that starts the trainers:

  eval "$(hetstream ckpt start --checkpoint=DIR)"

What it prints tells the trainers that the job has checkpoint writers. If these cannot start, it does not print that,
says why on stderr and exits with 1. Then each trainer starts a checkpoint writer of its own.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Start the checkpoint writers of this job."
    parser.epilog = EPILOG
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="exported as HETSTREAM_CKPT_DIR, absolute")
    parser.add_argument("--jobs-dir", metavar="DIR", help=f"directories of jobs (default: ${JOBS_DIR}, or .hetstream)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Start them and print shell text that exports the variables."""
    directory = with_job({DIRECTORY: str(args.checkpoint.absolute())} if args.checkpoint else {}, os.environ)
    # Printed first: the program needs it even if no checkpoint writer starts.
    sys.stdout.write(export_lines(directory | export_variables(os.environ, directory)))
    try:
        named = args.jobs_dir or setting(JOBS_DIR, os.environ)
        jobs_dir, why = choose(named, Path(os.environ.get("SLURM_SUBMIT_DIR", "")))
        if why:
            print(f"hetstream: {why}", file=sys.stderr)
        variables = start(own_program(), CommandSlurm(), os.environ, jobs_dir=jobs_dir)
    except HetstreamError as error:
        logging.getLogger(__name__).debug("hetstream ckpt start failed", exc_info=True)
        print(f"hetstream: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    variables |= export_variables(os.environ, directory | variables)
    sys.stdout.write(export_lines(variables))
    return 0
