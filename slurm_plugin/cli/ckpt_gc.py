"""`hetstream ckpt gc`: remove what dead jobs left in this host's memory, and unfinished checkpoints on disk."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from hetstream.base.text import printable
from hetstream.checkpoint.config import NO_JOB
from hetstream.checkpoint.disk.bounds import bounded
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.memory.collection import reason_to_keep, reason_to_remove
from hetstream.checkpoint.memory.view import FoundStore, StoreView, find_stores, places
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.cli.ckpt_ls import existing
from hetstream.slurm_plugin.client.slurm import CommandSlurm
from hetstream.slurm_plugin.render.table import size_words

EPILOG = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "Remove what dead jobs left in memory, and unfinished checkpoints."
    parser.epilog = EPILOG
    parser.add_argument("directories", nargs="*", type=Path, metavar="DIR", help="checkpoint directories")
    parser.add_argument("--dry-run", action="store_true", help="say what would be done, with the reason")
    parser.add_argument("--discard-unsaved", action="store_true", help="remove from memory also what is not on disk")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
