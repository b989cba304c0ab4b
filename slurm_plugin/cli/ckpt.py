"""`hetstream ckpt ACTION`: checkpoints on disk and in memory, in other formats too, and the writers of a job."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetstream.base.errors import HetstreamError, OptionsError, UsageError
from hetstream.base.files import Directory, make_private
from hetstream.base.installed import install_command
from hetstream.base.process import with_job
from hetstream.base.text import count_words, duration_words, list_words, printable, size_words
from hetstream.checkpoint.config import DIRECTORY, NO_JOB
from hetstream.checkpoint.disk.commit import problem_of_latest
from hetstream.checkpoint.disk.directory import Checkpoint, CheckpointDirectory, Partial
from hetstream.checkpoint.disk.isolated_read import read_apart
from hetstream.checkpoint.disk.rank_file import bounded
from hetstream.checkpoint.errors import CheckpointError, NoCheckpoint
from hetstream.checkpoint.memory.store_files import StoreFiles, WriterStatus
from hetstream.checkpoint.memory.view import (
    FoundStore,
    StoreView,
    find_stores,
    places,
    reason_to_keep,
    reason_to_remove,
)
from hetstream.checkpoint.persist.writer import Options, Writer, serve_job
from hetstream.checkpoint.record.layout import Generation
from hetstream.checkpoint.record.lineage import Lineage
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.job.job import (
    JOBS_DIR,
    JobEnd,
    JobEnvironment,
    choose,
    export_lines,
    export_variables,
    log_file,
    ready_file,
    setting,
    start,
)
from hetstream.slurm_plugin.cli.screen import wants_color, width_of_output
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.render.tables import RED, YELLOW, Cell, Column, table
from hetstream.slurm_plugin.submit.program import own_program

if TYPE_CHECKING:
    from hetstream.checkpoint.convert.dcp import Source

# `hetstream ckpt ls`: checkpoints on disk, and what this host's memory holds.

CKPT_LS_EPILOG = """\
States on disk:
  committed    whole; the newest of them is `latest`
  damaged      with what is wrong; never restored
  partial      parts of some ranks are missing, which are named; never restored
  left behind  training went back to an earlier step; restored only if its step is named

Without DIR only the memory of this host is shown. Exit code 1: DIR is no directory.

examples:
  hetstream ckpt ls checkpoints
  hetstream ckpt ls --json checkpoints     for scripts
"""


def add_ckpt_ls_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "List checkpoints on disk, and what this host holds in memory."
    parser.epilog = CKPT_LS_EPILOG
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="checkpoint directory")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.set_defaults(run=run_ckpt_ls)


def run_ckpt_ls(args: argparse.Namespace) -> int:
    """Print them."""
    directory = existing(args.directory) if args.directory else None
    with bounded(directory.path) if directory else contextlib.nullcontext():
        checkpoints = directory.scan() if directory else []
        partials = directory.partials() if directory else []
        lineage = directory.lineage() if directory else Lineage()
    stores = find_stores(places([directory.path] if directory else []))
    if directory:
        wanted = os.path.realpath(directory.path)
        stores = [store for store in stores if os.path.realpath(store.holder.directory) == wanted]
    now_s = time.time()
    if args.json:
        print(json.dumps(_as_json(directory, checkpoints, partials, stores, lineage, now_s), indent=1))
        return 0
    color, width = wants_color(), width_of_output()
    if directory:
        print("\n".join(disk_table(directory.path, checkpoints, partials, lineage, now_s, color, width)))
        problem = printable(problem_of_latest(directory.path))
        print(f"note: {problem}\n" if problem else "")
    print("\n".join(memory_table(stores, color, width)))
    return 0


def existing(path: Path) -> CheckpointDirectory:
    """Return a directory that is there.

    Raises:
        NoCheckpoint: it is not.
    """
    if not path.is_dir():
        raise NoCheckpoint(f"{path} is no directory. Name the one that FlashCheckpointer was given")
    return CheckpointDirectory(path)


_DISK_COLUMNS = (
    Column("", "STEP"),
    Column("", "ATTEMPT", priority=1),
    Column("", "RANKS"),
    Column("", "SIZE"),
    Column("", "AGE"),
    Column("", "STATE", left=True, wraps=True),
)
_MEMORY_COLUMNS = (
    Column("", "JOB", left=True),
    Column("", "COMPONENT", priority=2),
    Column("", "RANK"),
    Column("", "IN MEMORY", left=True),
    Column("", "ON DISK"),
    Column("", "SIZE"),
    Column("", "TRAINER"),
    Column("", "WRITER", priority=1),
)


def disk_table(
    path: Path,
    checkpoints: Sequence[Checkpoint],
    partials: Sequence[Partial],
    lineage: Lineage,
    now_s: float,
    color: bool = False,
    width: int | None = None,
) -> list[str]:
    """Return what is on disk, newest first."""
    newest = lineage.newest(checkpoint.generation for checkpoint in checkpoints)
    rows: list[tuple[Generation, list[Cell]]] = []
    for checkpoint in checkpoints:
        state = "committed, latest" if checkpoint.generation == newest else "committed"
        mark = ""
        branch = lineage.left_by(checkpoint.generation)
        if branch:
            state, mark = f"left behind: {branch}", YELLOW
        if checkpoint.problem:
            state, mark = f"damaged: {printable(checkpoint.problem)}", RED
        rows.append(
            (
                checkpoint.generation,
                [
                    (str(checkpoint.generation.step), ""),
                    (_attempt(checkpoint.generation), ""),
                    (str(checkpoint.world_size) if checkpoint.manifests else "?", ""),
                    (size_words(checkpoint.num_bytes) if checkpoint.manifests else "?", ""),
                    (duration_words(max(0.0, now_s - checkpoint.time_s)) if checkpoint.time_s else "?", ""),
                    (state, mark),
                ],
            )
        )
    for part in partials:
        there = f"{len(part.ranks)}/{part.world_size or '?'}"
        state = f"partial: {_missing(part)}"
        cells = [str(part.generation.step), _attempt(part.generation), there, "-", "-"]
        rows.append((part.generation, [*((cell, "") for cell in cells), (state, YELLOW)]))
    if not rows:
        return [f"{printable(str(path))}: no checkpoint"]
    rows.sort(key=lambda row: row[0], reverse=True)
    return [printable(str(path)), *table(_DISK_COLUMNS, [cells for _, cells in rows], color, width)]


def memory_table(stores: Sequence[FoundStore], color: bool = False, width: int | None = None) -> list[str]:
    """Return what is in this host's memory."""
    if not stores:
        return ["nothing in memory on this host"]
    rows: list[list[Cell]] = []
    for store in stores:
        newest = store.generations[0] if store.generations else None
        unsaved = newest and (store.persisted is None or newest > store.persisted)
        rows.append(
            [
                (printable(store.holder.job), ""),
                (f"{store.holder.component}", ""),
                (str(store.holder.rank), ""),
                (", ".join(map(_short, store.generations)) or "-", ""),
                (_short(store.persisted) if store.persisted else "-", YELLOW if unsaved else ""),
                (size_words(store.num_bytes), ""),
                ("lives" if store.trainer_alive else "ended" if store.closed else "died", ""),
                ("lives" if store.writer_alive else "-", ""),
            ]
        )
    return ["in memory on this host (step.attempt, newest first)", *table(_MEMORY_COLUMNS, rows, color, width)]


def _short(generation: Generation) -> str:
    return f"{generation.step}.{_attempt(generation)}"


def _attempt(generation: Generation) -> str:
    """As in the checkpoint's name: the attempt, and how often it had saved the step before."""
    return f"{generation.attempt}.{generation.repeat}" if generation.repeat else str(generation.attempt)


def _missing(part: Partial) -> str:
    if part.world_size is None:
        return "no rank has written its part"
    there = {*part.ranks}
    missing = list(itertools.islice((rank for rank in range(part.world_size) if rank not in there), 11))
    if not missing:
        return "complete but not committed; hetstream ckpt gc commits it"
    return f"{list_words('rank', missing)} of {part.world_size} missing"


def _as_json(
    directory: CheckpointDirectory | None,
    checkpoints: Sequence[Checkpoint],
    partials: Sequence[Partial],
    stores: Sequence[FoundStore],
    lineage: Lineage,
    now_s: float,
) -> dict[str, Any]:
    line = {
        checkpoint.generation
        for checkpoint in checkpoints
        if not checkpoint.problem and lineage.holds(checkpoint.generation)
    }
    owner = directory.owner() if directory else None
    return {
        "meta": {"version": 1},
        "directory": str(directory.path) if directory else None,
        "owner": {"attempt": owner.attempt, "job": owner.identity.job, "host": owner.identity.host} if owner else None,
        "directory_id": lineage.directory_id,
        "steps": sorted({generation.step for generation in line}),
        "checkpoints": [
            _checkpoint_row(checkpoint, lineage, checkpoint.generation in line, now_s) for checkpoint in checkpoints
        ],
        "partials": [
            {
                **as_fields(part.generation),
                "path": str(part.path),
                "world_size": part.world_size,
                "ranks": list(part.ranks),
            }
            for part in partials
        ],
        "memory": [
            {
                "path": str(store.path),
                "job": store.holder.job,
                "component": store.holder.component,
                "rank": store.holder.rank,
                "directory": store.holder.directory,
                "generations": [as_fields(generation) for generation in store.generations],
                "persisted": as_fields(store.persisted) if store.persisted else None,
                "num_bytes": store.num_bytes,
                "trainer_alive": store.trainer_alive,
                "writer_alive": store.writer_alive,
                "closed": store.closed,
            }
            for store in stores
        ],
    }


def _checkpoint_row(checkpoint: Checkpoint, lineage: Lineage, is_in_line: bool, now_s: float) -> dict[str, Any]:
    return {
        **as_fields(checkpoint.generation),
        "path": str(checkpoint.path),
        "world_size": checkpoint.world_size,
        "num_bytes": checkpoint.num_bytes,
        "age_s": round(max(0.0, now_s - checkpoint.time_s), 3) if checkpoint.time_s else None,
        "state": "damaged" if checkpoint.problem else "committed" if is_in_line else "left behind",
        "problem": checkpoint.problem,
        "left_by": str(lineage.left_by(checkpoint.generation) or ""),
        "metrics": dict(checkpoint.metrics),
    }


def as_fields(generation: Generation) -> dict[str, int]:
    """Return a generation in JSON."""
    fields = {"step": generation.step, "attempt": generation.attempt}
    return fields | {"repeat": generation.repeat} if generation.repeat else fields


# `hetstream ckpt gc`: remove what dead jobs left in this host's memory, and unfinished checkpoints on disk.

CKPT_GC_EPILOG = """\
Memory: the saved state of a job of this user is removed if no process holds it, the job is over and its newest state is
on disk. squeue says whether a job is over; a requeued job is not. If Slurm does not answer, everything is kept. The
memory of other users is not looked at.

Disk: in each DIR, a checkpoint whose parts are all there is committed. Parts that are older than the newest checkpoint
are removed. Newer parts stay: a job may still complete them. Checkpoints that were left behind, because training went
back to an earlier step, are removed when a newer one has been saved since.

Exit code 1: a DIR is no directory or cannot be written to.

examples:
  hetstream ckpt gc --dry-run
  hetstream ckpt gc checkpoints
"""


def add_ckpt_gc_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Remove what dead jobs left in memory, and unfinished checkpoints."
    parser.epilog = CKPT_GC_EPILOG
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="checkpoint directories")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, with the reason")
    parser.add_argument("--discard-unsaved", action="store_true", help="remove from memory also what is not on disk")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=run_ckpt_gc)


def run_ckpt_gc(args: argparse.Namespace) -> int:
    """Collect, and say what was done with everything that was found."""
    directories = [existing(path) for path in args.directories]
    stores = find_stores(places(directory.path for directory in directories))
    jobs: dict[str, str] | None = {}
    if any(store.holder.job != NO_JOB for store in stores):
        try:
            jobs = CommandSlurm().living_jobs()
        except SlurmCommandError as error:
            print(f"hetstream ckpt gc: {error}", file=sys.stderr)
            jobs = None
    for directory in directories:
        directory.check_own()
    rows = [_collect(store, jobs, args) for store in stores]
    for directory in directories:
        with bounded(directory.path):
            rows += _complete(directory, args.dry_run)
    if args.json:
        print(json.dumps({"meta": {"version": 1}, "dry_run": args.dry_run, "found": rows}, indent=1))
        return 0
    for row in rows:
        would = "would be " if args.dry_run and row["action"] != "kept" else ""
        print(f"{would}{row['action']}  {printable(row['path'])}")
        print(f"    because {row['reason']}" + (f"; {size_words(row['num_bytes'])}" if row["num_bytes"] else ""))
    if not rows:
        print("nothing to collect")
    return 0


def _collect(store: FoundStore, jobs: dict[str, str] | None, args: argparse.Namespace) -> dict[str, Any]:
    keep = reason_to_keep(store, jobs, discard_unsaved=args.discard_unsaved)
    action, reason = ("kept", keep) if keep else ("removed", reason_to_remove(store))
    if not keep and not args.dry_run:
        with StoreView(store.path) as view:
            if not view.remove():
                action, reason = "kept", "somebody has taken it up meanwhile"
    return {"path": str(store.path), "action": action, "reason": reason, "num_bytes": store.num_bytes}


def _complete(directory: CheckpointDirectory, dry_run: bool) -> list[dict[str, Any]]:
    """One row for each checkpoint that is unfinished or was left behind."""
    partials = directory.partials()
    newest = max((checkpoint.generation for checkpoint in directory.scan()), default=None)
    planned: dict[Path, tuple[str, str]] = {}
    for part in partials:
        whole = part.world_size is not None and len(part.ranks) == part.world_size
        if whole:
            planned[part.path] = ("committed", "all parts are there")
        elif newest and part.generation <= newest:
            planned[part.path] = ("removed", f"{newest} is newer and complete")
        else:
            planned[part.path] = ("kept", "no checkpoint is newer; a job may still complete it")
    for path in directory.left_over():
        planned[path] = ("removed", "it was being removed when whoever did so died")
    planned |= {
        directory.path / generation.directory_name: ("removed", f"left behind: {reason}")
        for generation, reason in directory.left_behind().items()
    }
    if not dry_run:
        directory.complete_partials()
        directory.remove_left_behind()
        for path, (action, _) in planned.items():
            if action != "kept" and path.exists():
                planned[path] = ("kept", "somebody reads or writes it, it is damaged, or not this user's alone")
            elif action == "kept" and not path.exists():
                planned[path] = ("removed", "a newer one was committed meanwhile")
    return [
        {"path": str(path), "action": action, "reason": reason, "num_bytes": 0}
        for path, (action, reason) in planned.items()
    ]


# `hetstream ckpt start`: start the checkpoint writers of this job. Called by batch scripts, converted or not.

CKPT_START_EPILOG = """\
In a batch script, before the line that starts the trainers:

  eval "$(hetstream ckpt start --checkpoint=DIR)"

What it prints tells the trainers that the job has checkpoint writers. If these cannot start, it does not print that,
says why on stderr and exits with 1. Then each trainer starts a checkpoint writer of its own.
"""


def add_ckpt_start_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Start the checkpoint writers of this job."
    parser.epilog = CKPT_START_EPILOG
    parser.add_argument("--checkpoint", metavar="DIR", type=Path, help="exported as HETSTREAM_CKPT_DIR, absolute")
    parser.add_argument("--jobs-dir", metavar="DIR", help=f"directories of jobs (default: ${JOBS_DIR}, or .hetstream)")
    parser.set_defaults(run=run_ckpt_start)


def run_ckpt_start(args: argparse.Namespace) -> int:
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
        print(f"hetstream: {error}", file=sys.stderr)
        return 1
    variables |= export_variables(os.environ, directory | variables)
    sys.stdout.write(export_lines(variables))
    return 0


# `hetstream internal writer`: write the generations of a job's trainers on this host to disk, until the job ends.

log = logging.getLogger(__name__)

CKPT_WRITER_EPILOG = """\
In a batch script, start one on each node, in a step of its own that outlives the trainers:

  eval "$(hetstream ckpt start)"

This waits until all checkpoint writers are ready. With Slurm before 23.11 these two lines start them without waiting:

  srun --overlap --ntasks=$SLURM_JOB_NUM_NODES --ntasks-per-node=1 --mem=0 --gres=none hetstream internal writer &
  export HETSTREAM_CKPT_WRITER=1

Slurm ends a step with SIGTERM. A checkpoint writer then asks the trainers to save and to end, and writes the newest
state in memory first. What it could not write is named in its log, .hetstream/job-ID/writers/NODE.log. It also asks the
trainers before the job's time limit, and at SIGUSR1.

With --once it writes what dead trainers of this user's jobs have left in this host's memory, and ends.
Exit code 1: something was not written to disk.
"""


def add_ckpt_writer_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Write what a job saves from memory to disk, until the job ends."
    parser.epilog = CKPT_WRITER_EPILOG
    parser.add_argument("--once", action="store_true", help="write what dead trainers left, and end")
    parser.add_argument("--dry-run", action="store_true", help="with --once: say what would be written")
    parser.add_argument("--jobs-dir", metavar="DIR", help="directories of jobs (default: .hetstream)")
    parser.set_defaults(run=run_ckpt_writer)


def run_ckpt_writer(args: argparse.Namespace) -> int:
    """Serve."""
    if args.once:
        return _write_left_over(args.dry_run)
    if args.dry_run:
        raise UsageError("--dry-run works only with --once. What is in memory and on disk: hetstream ckpt ls")
    if "SLURM_JOB_ID" not in os.environ:
        raise UsageError(
            "a job's checkpoint writer is a step of that job. What dead trainers left: hetstream internal writer --once"
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


CKPT_VERIFY_EPILOG = """\
A damaged checkpoint is marked by a file `damaged.txt` in its directory, so that no restore takes it. If a marked one is
whole again, the mark is removed.

Exit codes: 0 all are good, 1 one is damaged or there is none.

examples:
  hetstream ckpt verify checkpoints               all of them
  hetstream ckpt verify --step 1200 checkpoints   those of one step, of whichever attempt
"""


def add_ckpt_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Read checkpoints, compare their checksums, and decode them as a restore does."
    parser.epilog = CKPT_VERIFY_EPILOG
    parser.add_argument("directory", type=Path, metavar="DIR", help="checkpoint directory")
    parser.add_argument("--step", type=int, metavar="N", help="only checkpoints of this step")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=run_ckpt_verify)


def run_ckpt_verify(args: argparse.Namespace) -> int:
    """Read them, newest first, and say how each is."""
    # Here, as without torch there is no checkpoint to read, and all the same a parser, completion and man pages.
    from hetstream.checkpoint.flash.sources import check_readable

    directory = existing(args.directory)
    chosen = [checkpoint for checkpoint in directory.scan() if args.step in (None, checkpoint.generation.step)]
    if not chosen:
        step = "" if args.step is None else f" of step {args.step}"
        raise NoCheckpoint(f"{args.directory} has no checkpoint{step}. See: hetstream ckpt ls {args.directory}")
    results: list[dict[str, Any]] = []
    for number, checkpoint in enumerate(chosen, start=1):
        progress = _Progress(checkpoint, f"{number}/{len(chosen)}")
        began_s = time.monotonic()
        with bounded(checkpoint.path):
            problems = directory.verify(checkpoint.generation, progress.advance, check_readable)
        took_s = time.monotonic() - began_s
        progress.clear()
        results.append(
            {**as_fields(checkpoint.generation), "path": str(checkpoint.path), "problems": problems, "took_s": took_s}
        )
        if not args.json:
            good = f"good  {size_words(checkpoint.num_bytes)} in {took_s:.1f} s"
            print(
                f"{checkpoint.path.name}  {'damaged: ' + printable('; '.join(problems)) if problems else good}",
                flush=True,
            )
    if args.json:
        print(json.dumps({"meta": {"version": 1}, "checkpoints": results}, indent=1))
    return 1 if any(result["problems"] for result in results) else 0


class _Progress:
    """One line on a terminal that says how far a checkpoint has been read; elsewhere nothing.

    Args:
        checkpoint: that is read.
        place: of it among all.
    """

    def __init__(self, checkpoint: Checkpoint, place: str) -> None:
        self._checkpoint = checkpoint
        self._place = place
        self._done_bytes = 0
        self._is_shown = sys.stderr.isatty()
        self.advance(0)

    def advance(self, num_bytes: int) -> None:
        """So many more bytes have been compared."""
        self._done_bytes += num_bytes
        if self._is_shown:
            of = f"{size_words(self._done_bytes)} of {size_words(self._checkpoint.num_bytes)}"
            print(f"\r\x1b[K{self._place} {self._checkpoint.path.name}  {of}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Leave the line empty."""
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


# Those of `convert/dcp.py`, which needs torch; a parser does not.
KINDS = ("flash", "dcp", "torch", "safetensors")

CKPT_CONVERT_EPILOG = """\
SRC is recognised by what is in it: a directory of checkpoints, or one checkpoint in it; a directory of
torch.distributed.checkpoint (dcp); a file of torch.save; a safetensors file.

  --to dcp          what plain torch.distributed.checkpoint.load reads, on any number of ranks
  --to torch        one file for torch.load(..., weights_only=True): the state, nested as it was
  --to safetensors  one file of all tensors, by their names in the state
  --to flash        one more checkpoint in the directory DST, newer than all there, as FlashCheckpointer restores it

Sharded tensors become whole. Of values that each rank has for itself, those of rank 0 are taken. No code in SRC is run.
Exit codes: 0 done, 1 SRC is damaged, missing or cannot be held by DST, 2 the command line is wrong.

examples:
  hetstream ckpt convert checkpoints model.pt --to torch              the newest checkpoint
  hetstream ckpt convert --step 1200 checkpoints dcp --to dcp
  hetstream ckpt convert old_dcp checkpoints --to flash --as-step 1200
"""


def add_ckpt_convert_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Turn checkpoints into other formats, and others into checkpoints."
    parser.epilog = CKPT_CONVERT_EPILOG
    parser.add_argument("source", type=Path, metavar="SRC", help="what to convert")
    parser.add_argument("target", type=Path, metavar="DST", help="what to make of it; must not exist, except for flash")
    parser.add_argument("--to", required=True, choices=KINDS, help="format of DST")
    parser.add_argument("--step", type=int, metavar="N", help="of which step (default: the newest)")
    parser.add_argument("--as-step", type=int, metavar="N", help="flash: which step DST is of, if SRC does not say")
    parser.add_argument("--under", metavar="KEY", help="put all of SRC under this key, e.g. model")
    parser.add_argument("--dry-run", action="store_true", help="read SRC and say what would be written")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=run_ckpt_convert)


def run_ckpt_convert(args: argparse.Namespace) -> int:
    """Convert, or say what would be."""
    from hetstream.checkpoint.convert.dcp import check_target, detect

    source = detect(args.source)
    _check_options(args, source)
    check_target(args.target, args.to)
    done = read_apart(source.path, lambda: _convert(source, args))
    done = {"source": str(args.source), "from": source.kind, "to": args.to, "dry_run": args.dry_run, **done}
    if args.json:
        print(json.dumps({"meta": {"version": 1}, "conversion": done}, indent=1))
        return 0
    verb = "would write" if args.dry_run else "wrote"
    print(printable(f"{verb} {done['target']}: {done['what']}, from {args.source} ({source.kind})"))
    for note in done["notes"]:
        print(f"note: {printable(note)}", file=sys.stderr)
    return 0


def _check_options(args: argparse.Namespace, source: Source) -> None:
    """Refuse options that would change nothing, all at once."""
    rules = (
        ("step", source.kind == "flash", f"SRC is {source.kind}, which has no steps to choose from"),
        ("as_step", args.to == "flash", "only with --to flash"),
    )
    problems = [
        f"--{name.replace('_', '-')}={getattr(args, name)}: {rule}"
        for name, is_right, rule in rules
        if getattr(args, name) is not None and not is_right
    ]
    if (args.as_step or 0) < 0:
        problems.append(f"--as-step={args.as_step}: a step is 0 or more")
    if args.under == "":
        problems.append("--under: a key has at least one letter")
    if problems:
        raise OptionsError("; ".join(problems))


def _convert(source: Source, args: argparse.Namespace) -> dict[str, Any]:
    try:
        from hetstream.checkpoint.convert.weights import check_step, reading, write
    except ImportError as error:
        raise CheckpointError(f"this conversion needs torch: {install_command('torch')} ({error})") from error
    with reading(source, args.step, args.under or "") as content:
        check_step(content, args.to, args.as_step)
        tensors = content.tensors
        num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        keys = ", ".join(content.state)
        what = f"{count_words(len(tensors), 'tensor')}, {size_words(num_bytes)}, under {keys[:200]}"
        target = args.target
        if not args.dry_run:
            target = write(content, args.to, target, step=args.as_step)
        return {"target": str(target), "what": what, "num_tensors": len(tensors), "notes": content.notes}
