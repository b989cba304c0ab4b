"""`hetstream ckpt saver`: write the generations of a job's trainers on this host to disk, until the job ends."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from checkpoint.errors import CheckpointError
from checkpoint.saver import Options, Saver, serve_job
from checkpoint.store_files import SaverStatus, StoreFiles
from checkpoint.view import FoundStore, find_stores
from hetjob.errors import UsageError
from hetjob.job_end import JobEnd
from hetjob.job_environment import JobEnvironment
from hetjob.savers import log_file, ready_file
from hetstream.base.private import make_private
from slurm_plugin.client.slurm import CommandSlurm

log = logging.getLogger(__name__)

EPILOG = """\
In a batch script, a saver on each node, in a step of its own that outlives the trainers:

  eval "$(hetstream ckpt start)"

which does the same as these two lines do with Slurm before 23.11, and waits until all savers are ready:

  srun --overlap --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 --mem=0 --gres=none hetstream ckpt saver &
  export HETSTREAM_CKPT_SAVER=1

SIGTERM, with which Slurm ends a step: trainers are asked to save and to end, and what is newest in memory goes to disk
first; what did not is in the log, .hetstream/job-ID/savers/NODE.log. Before the job's time limit, and at SIGUSR1,
trainers are asked, too.

With --once: what dead trainers of any job of this user have left in this host's memory is written, then it ends.
Exit code 1: something did not get to disk.
"""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser], summary: str) -> None:
    """Declare the action."""
    parser = subparsers.add_parser(
        "saver", help=summary, description=summary, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--once", action="store_true", help="write what dead trainers left, and end")
    parser.add_argument("--dry-run", action="store_true", help="with --once: say what would be written")
    parser.add_argument("--jobs-dir", type=Path, metavar="DIR", help="directories of jobs (default: .hetstream)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve."""
    if args.once:
        return _write_left_over(args.dry_run)
    if args.dry_run:
        raise UsageError("--dry-run goes with --once: a job's saver writes what comes. See: hetstream ckpt ls")
    if "SLURM_JOB_ID" not in os.environ:
        raise UsageError("a job's saver is a step of that job. What dead trainers left: hetstream ckpt saver --once")
    job = JobEnvironment.read(os.environ, args.jobs_dir)
    make_private(job.directory, own_parents=1)
    make_private(job.savers, own_parents=2)
    # The output of a step goes through srun, which Slurm kills with the batch script; the last lines would be lost.
    with log_file(job).open("a") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    log.info("job=%s node=%s pid=%d saver starts", job.job_id, job.node, os.getpid())
    ready = ready_file(job)
    slurm = CommandSlurm()
    end = JobEnd(job.job_id, lambda: slurm.end_s(job.job_id), lambda: _persist_s(job.job_id))
    try:
        with _watching(end):
            serve_job(job.job_id, ready.touch, stop_reason=lambda: end.reason)
    finally:
        ready.unlink(missing_ok=True)
    log.info("job=%s node=%s saver ends", job.job_id, job.node)
    return 0


@contextlib.contextmanager
def _watching(end: JobEnd) -> Iterator[None]:
    # A command of Slurm may hang for as long as it likes; the saver does not wait for it.
    thread = threading.Thread(target=end.watch, name="job-end", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.end()


def _persist_s(job_id: str) -> list[float]:
    """How long each store of the job took to disk the last time."""
    found = (StoreFiles(store.path).read_status() for store in find_stores() if store.holder.job == job_id)
    return [status.persist_s for status in found if isinstance(status, SaverStatus)]


def _write_left_over(dry_run: bool) -> int:
    failed = False
    left_over = [*filter(_is_left_over, find_stores())]
    if not left_over:
        print("nothing to write: no dead trainer has left anything in this host's memory that is not on disk")
    for store in left_over:
        name = f"{store.generations[0]} of rank {store.holder.rank}"
        if dry_run:
            print(f"would write  {name} to {store.holder.directory}")
            continue
        try:
            Saver(lambda path=store.path: [path], None, Options()).run()  # type: ignore[misc]
        except CheckpointError as error:
            log.error("%s: %s", store.path, error)
        unsaved = any(_is_left_over(one) for one in find_stores() if one.path == store.path)
        failed |= unsaved
        print(f"{'not written' if unsaved else 'written'}  {name} to {store.holder.directory}")
    return 1 if failed else 0


def _is_left_over(store: FoundStore) -> bool:
    newest = store.generations[0] if store.generations else None
    unsaved = newest is not None and (store.persisted is None or newest > store.persisted)
    return unsaved and not store.trainer_alive and not store.saver_alive and Path(store.holder.directory).is_absolute()
