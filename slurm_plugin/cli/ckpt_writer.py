"""`hetstream ckpt writer`: write the generations of a job's trainers on this host to disk, until the job ends."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.base.files import Directory
from hetstream.base.private import make_private
from hetstream.checkpoint.errors import CheckpointError
from hetstream.checkpoint.memory.store_files import StoreFiles, WriterStatus
from hetstream.checkpoint.memory.view import FoundStore, find_stores
from hetstream.checkpoint.persist.writer import Options, Writer, serve_job
from hetstream.hetjob.job_end import JobEnd
from hetstream.hetjob.job_environment import JobEnvironment
from hetstream.hetjob.jobs_dir import choose
from hetstream.hetjob.writers import log_file, ready_file
from hetstream.slurm_plugin.client.slurm import CommandSlurm

log = logging.getLogger(__name__)

EPILOG = """\
In a batch script, start one on each node, in a step of its own that outlives the trainers:

  eval "$(hetstream ckpt start)"

This waits until all checkpoint writers are ready. With Slurm before 23.11 these two lines start them without waiting:

  srun --overlap --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 --mem=0 --gres=none hetstream ckpt writer &
  export HETSTREAM_CKPT_WRITER=1

Slurm ends a step with SIGTERM. A checkpoint writer then asks the trainers to save and to end, and writes the newest
state in memory first. What it could not write is named in its log, .hetstream/job-ID/writers/NODE.log. It also asks the
trainers before the job's time limit, and at SIGUSR1.

With --once it writes what dead trainers of this user's jobs have left in this host's memory, and ends.
Exit code 1: something was not written to disk.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Write what a job saves from memory to disk, until the job ends."
    parser.epilog = EPILOG
    parser.add_argument("--once", action="store_true", help="write what dead trainers left, and end")
    parser.add_argument("--dry-run", action="store_true", help="with --once: say what would be written")
    parser.add_argument("--jobs-dir", metavar="DIR", help="directories of jobs (default: .hetstream)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve."""
    if args.once:
        return _write_left_over(args.dry_run)
    if args.dry_run:
        raise UsageError("--dry-run works only with --once. What is in memory and on disk: hetstream ckpt ls")
    if "SLURM_JOB_ID" not in os.environ:
        raise UsageError(
            "a job's checkpoint writer is a step of that job. What dead trainers left: hetstream ckpt writer --once"
        )
    # Of a writer that the script starts by itself, each node finds the same place: the file system is shared.
    jobs_dir, _ = choose(args.jobs_dir, Path(os.environ.get("SLURM_SUBMIT_DIR", "")))
    job = JobEnvironment.read(os.environ, jobs_dir)
    make_private(job.directory, own_parents=1)
    make_private(job.writers, own_parents=2)
    # The output of a step goes through srun, which Slurm kills with the batch script; the last lines would be lost.
    with Directory.open_safe(job.writers) as directory:
        log_descriptor = directory.open_file(log_file(job).name, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    for descriptor in (1, 2):
        os.dup2(log_descriptor, descriptor)
    os.close(log_descriptor)
    log.info("job=%s node=%s pid=%d checkpoint writer starts", job.job_id, job.node, os.getpid())
    ready = ready_file(job)
    slurm = CommandSlurm()
    end = JobEnd(job.job_id, lambda: slurm.end_s(job.job_id), lambda: _persist_s(job.job_id))
    try:
        with _watching(end):
            serve_job(
                job.job_id,
                ready.touch,
                stop_reason=lambda: end.reason,
                is_running=lambda: slurm.is_running(job.job_id),
            )
    finally:
        ready.unlink(missing_ok=True)
    log.info("job=%s node=%s checkpoint writer ends", job.job_id, job.node)
    return 0


@contextlib.contextmanager
def _watching(end: JobEnd) -> Iterator[None]:
    # A command of Slurm may hang for as long as it likes; the checkpoint writer does not wait for it.
    thread = threading.Thread(target=end.watch, name="job-end", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.end()


def _persist_s(job_id: str) -> list[float]:
    """How long each store of the job took to disk the last time."""
    found = (StoreFiles(store.path).read_status() for store in find_stores() if store.holder.job == job_id)
    return [status.persist_s for status in found if isinstance(status, WriterStatus)]


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
            Writer(lambda path=store.path: [path], None, Options()).run()  # type: ignore[misc]
        except CheckpointError as error:
            log.error("%s: %s", store.path, error)
        unsaved = any(_is_left_over(left_store) for left_store in find_stores() if left_store.path == store.path)
        failed |= unsaved
        print(f"{'not written' if unsaved else 'written'}  {name} to {store.holder.directory}")
    return 1 if failed else 0


def _is_left_over(store: FoundStore) -> bool:
    newest = store.generations[0] if store.generations else None
    unsaved = newest is not None and (store.persisted is None or newest > store.persisted)
    return unsaved and not store.trainer_alive and not store.writer_alive and Path(store.holder.directory).is_absolute()
