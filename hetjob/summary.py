"""What a service has done in all: the record of a job or its dispatcher, `summary.json`, and one line of it.

Used when a job ends, and by the commands that look at jobs that have ended.
"""

from __future__ import annotations

import errno
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetstream.base.files import Directory

log = logging.getLogger(__name__)

SUMMARY_FILE = "summary.json"
_MAX_SUMMARY_BYTES = 64 << 20


def load_summary(directory: Path, *, links: bool = True) -> tuple[dict[str, Any], os.stat_result]:
    """The record in a directory, which may be of a user who has put anything there, and the status of its file.

    Args:
        directory: where the record is.
        links: see `Directory.open`.

    Raises:
        FileNotFoundError: there is none.
        OSError: it cannot be read.
        ValueError: it is no record; the text says what of the file, without its name.
    """
    with Directory.open(directory, links=links) as opened:
        text, status = opened.read(SUMMARY_FILE, _MAX_SUMMARY_BYTES), opened.status(SUMMARY_FILE)
    try:
        summary = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is damaged: {error}") from error
    if not isinstance(summary, dict):
        raise ValueError("is no record of a job")
    return summary, status


def load_own_summary(directory: Path) -> tuple[dict[str, Any], os.stat_result]:
    """The same of this user's own record: one in a directory that many can write to must not advise him, nor must one
    of another project, to which somebody's link there leads.

    Raises:
        PermissionError: it is another user's.
        OSError, ValueError: as of `load_summary`.
    """
    summary, status = load_summary(directory, links=False)
    if status.st_uid != os.geteuid():
        text = f"it belongs to user {status.st_uid}, this is user {os.geteuid()}"
        raise PermissionError(errno.EPERM, text, str(directory / SUMMARY_FILE))
    return summary, status


def read_summary(work_dir: Path) -> dict[str, Any]:
    """The dispatcher's record; empty when it left none (it was killed)."""
    try:
        summary, _ = load_summary(work_dir)
    except (OSError, ValueError) as error:
        log.warning("no summary in %s: %s", work_dir, error)
        return {}
    return summary


def write_summary(directory: Path, summary: Mapping[str, Any]) -> None:
    """Leave a job's record in its directory, whole.

    Raises:
        OSError: it cannot be written.
    """
    with Directory.open(directory) as opened:
        opened.write_whole(SUMMARY_FILE, json.dumps(summary, indent=1).encode() + b"\n")


def summary_line(summary: Mapping[str, Any]) -> str:
    """The summary on one line, for a log or a terminal."""
    loaders = summary.get("loaders", [])
    steps, samples, elapsed_s, local = (
        sum(loader.get(name, 0) for loader in loaders) for name in ("steps", "samples", "elapsed_s", "local_steps")
    )
    replaced = summary.get("data_workers_replaced", 0)
    renewed = summary.get("data_workers_renewed", 0)
    processes = f"{summary.get('data_workers_seen', 0) - replaced - renewed} data worker process(es)"
    if replaced:
        processes += f", {replaced} more in the place of some that died"
    processes += _companions(summary)
    if not loaders:
        reason = "the program made no DataLoader, or they stayed local, as a warning of the program says"
        return f"no loader connected ({reason}), {processes}"
    wait_s = sum(min(loader.get("wait_s", 0), loader.get("elapsed_s", 0)) for loader in loaders)
    waited = f"trainer waited {wait_s / elapsed_s:.0%} of the time" if elapsed_s else "it took no step"
    made = "all of them" if 0 < local == steps else f"{local} steps"
    taken = f"{len(loaders)} loader(s), {steps} steps, {samples} samples, {made} made in the trainer, {waited}"
    return f"{taken}{_moved(loaders, steps)}{_compared(loaders)}, {processes}"


def _moved(loaders: Sequence[Mapping[str, Any]], steps: int) -> str:
    """What moved operators add to a batch; empty where none moved."""
    moved = sum(loader.get("moved_bytes", 0) for loader in loaders)
    return f", moved operators add {moved / steps:,.0f} bytes to a batch" if steps and moved else ""


def _compared(loaders: Sequence[Mapping[str, Any]]) -> str:
    """The evidence that data workers make what the program makes; empty where no loader was asked for it."""
    compared, differing = (
        sum(loader.get(name, 0) for loader in loaders) for name in ("compared_steps", "differing_steps")
    )
    return f", {compared} steps compared with the program's own, {differing} differed" if compared else ""


def _companions(summary: Mapping[str, Any]) -> str:
    """CPU time of companions, and how much of it came from backfill holes; empty where there was none."""
    elastic = summary.get("elastic") or {}
    cpu_s, in_holes_s = elastic.get("companion_cpu_s", 0.0), elastic.get("companion_cpu_s_in_holes", 0.0)
    if not cpu_s:
        return ""
    jobs = f"{elastic.get('companions', 0)} companion job(s)"
    return f", {cpu_s / 3600:.2f} CPU-hours in {jobs}, {in_holes_s / cpu_s:.0%} of it in backfill holes"
