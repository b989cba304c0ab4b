"""`hetstream ckpt ls`: checkpoints on disk, and what this host's memory holds."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetstream.base.text import printable
from hetstream.checkpoint.disk.bounds import bounded
from hetstream.checkpoint.disk.checkpoint import Checkpoint, Partial
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.latest import problem_of_latest
from hetstream.checkpoint.errors import NoCheckpoint
from hetstream.checkpoint.memory.view import FoundStore, find_stores, places
from hetstream.checkpoint.record.generation import Generation
from hetstream.checkpoint.record.lineage import Lineage
from hetstream.slurm_plugin.render.table import RED, YELLOW, Cell, duration_words, size_words, table

EPILOG = """\
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action."""
    parser.description = "List checkpoints on disk, and what this host holds in memory."
    parser.epilog = EPILOG
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR", help="checkpoint directory")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
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
    color = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    if directory:
        print("\n".join(disk_table(directory.path, checkpoints, partials, lineage, now_s, color)))
        problem = printable(problem_of_latest(directory.path))
        print(f"note: {problem}\n" if problem else "")
    print("\n".join(memory_table(stores, color)))
    return 0


def existing(path: Path) -> CheckpointDirectory:
    """A directory that is there.

    Raises:
        NoCheckpoint: it is not.
    """
    if not path.is_dir():
        raise NoCheckpoint(f"{path} is no directory. Name the one that FlashCheckpointer was given")
    return CheckpointDirectory(path)


def disk_table(
    path: Path,
    checkpoints: Sequence[Checkpoint],
    partials: Sequence[Partial],
    lineage: Lineage,
    now_s: float,
    color: bool = False,
) -> list[str]:
    """What is on disk, newest first."""
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
    head = ["STEP", "ATTEMPT", "RANKS", "SIZE", "AGE", "STATE"]
    return [printable(str(path)), *table(head, [cells for _, cells in rows], ("STATE",), color)]


def memory_table(stores: Sequence[FoundStore], color: bool = False) -> list[str]:
    """What is in this host's memory."""
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
    head = ["JOB", "COMPONENT", "RANK", "IN MEMORY", "ON DISK", "SIZE", "TRAINER", "WRITER"]
    return ["in memory on this host (step.attempt, newest first)", *table(head, rows, ("JOB", "IN MEMORY"), color)]


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
    named = ", ".join(map(str, missing[:10])) + (" and more" if len(missing) > 10 else "")
    return f"rank(s) {named} of {part.world_size} missing"


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
    """A generation in JSON."""
    fields = {"step": generation.step, "attempt": generation.attempt}
    return fields | {"repeat": generation.repeat} if generation.repeat else fields
