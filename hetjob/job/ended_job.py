"""What a job's record tells when the job is over: how many CPUs its trainers need next time. Called by the job master,
which writes the record (`summary.json` in the job's directory), and by `hetstream advise`, which reads it.
"""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetstream.base.files import Directory
from hetstream.base.text import count_words, size_words, user_name
from hetstream.hetjob.job.job import IN_SUBMIT_DIR
from hetstream.hetjob.job.processes import remove_tree

# What a service has done in all: the record of a job or its dispatcher, `summary.json`, and one line of it.
#
# Used when a job ends, and by the commands that look at jobs that have ended.

log = logging.getLogger(__name__)

SUMMARY_FILE = "summary.json"
# Where logs of embedding servers are, unless a user names another place: checkpoints name what is in it.
EMBEDDING_DIR = "hetstream-embedding"
_MAX_SUMMARY_BYTES = 64 << 20
# A trainer that waits for less of the time gains nothing that a user would notice.
_WELL_BELOW = 0.05


def load_summary(directory: Path, *, links: bool = True) -> tuple[dict[str, Any], os.stat_result]:
    """Return the record in a directory, which may be of a user who has put anything there, and the status of its file.

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
    """Return the same of this user's own record: one in a directory that many can write to must not advise him, nor
    must one of another project, to which somebody's link there leads.

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
    """Return the dispatcher's record; empty when it left none (it was killed)."""
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
    """Return the summary on one line, for a log or a terminal."""
    loaders = summary.get("loaders", [])
    steps, samples, elapsed_s, local = (
        sum(loader.get(name, 0) for loader in loaders) for name in ("steps", "samples", "elapsed_s", "local_steps")
    )
    replaced = summary.get("data_workers_replaced", 0)
    renewed = summary.get("data_workers_renewed", 0)
    seen = summary.get("data_workers_seen", 0) - replaced - renewed
    # Those that left before their first step, to start anew in the program's Python, are none that a user would count.
    processes = count_words(summary.get("data_workers_used") or max(0, seen), "data worker process")
    if replaced:
        processes += f", {replaced} more in the place of some that died"
    processes += _companions(summary)
    if not loaders:
        reason = "the program made no DataLoader, or they stayed local, as a warning of the program says"
        return f"no loader connected ({reason}), {processes}"
    wait_s = sum(min(loader.get("wait_s", 0), loader.get("elapsed_s", 0)) for loader in loaders)
    waited = f"trainer waited {wait_s / elapsed_s:.0%} of the time" if elapsed_s else "it took no step"
    made = "all of them" if 0 < local == steps else f"{local} steps"
    taken = (
        f"{count_words(len(loaders), 'loader')}, {steps} steps, {samples} samples, {made} made in the trainer, {waited}"
    )
    return f"{taken}{_moved(loaders, steps)}{_compared(loaders)}{_cached(loaders)}, {processes}"


def servers_words(summary: Mapping[str, Any]) -> str:
    """Return what embedding servers had at their end, to be put behind `summary_line`; empty without any."""
    servers = summary.get("embedding_servers") or []
    if not servers:
        return ""
    rows, num_bytes, reads = (sum(server.get(name, 0) for server in servers) for name in ("rows", "bytes", "reads"))
    held = f"{rows:,} rows ({size_words(num_bytes)}), {reads:,} read"
    return f", {count_words(len(servers), 'embedding server')} with {held}"


def next_try(summary: Mapping[str, Any], data_workers: int, cpus: int) -> str:
    """Return what to try in the next run, or that all is well.

    A trainer that waits for the share w of the time takes 1 / (1 - w) times the steps once it never waits, and data
    workers must make as many more.

    Args:
        summary: of a run without Slurm.
        data_workers: that the run was to have; 0 where it was to find how many it needs.
        cpus: of the host.
    """
    loaders = summary.get("loaders", [])
    steps, local, elapsed_s = (
        sum(loader.get(name, 0) for loader in loaders) for name in ("steps", "local_steps", "elapsed_s")
    )
    if not steps or not elapsed_s:
        return ""
    data_workers = data_workers or summary.get("elastic", {}).get("data_workers") or cpus
    if local > steps / 2:
        return "most batches were made in the program: a longer run tells more, as data workers take seconds to start"
    share = sum(min(loader.get("wait_s", 0), loader.get("elapsed_s", 0)) for loader in loaders) / elapsed_s
    if share < _WELL_BELOW:
        return "the trainer hardly waited: all is well"
    needed = math.ceil(data_workers / max(1 - share, 0.01))
    if data_workers >= cpus:
        return f"this host has {cpus} CPUs, all in use: on Slurm, data workers of other nodes would shorten the waits"
    if needed <= cpus:
        return f"to wait less, try --data-workers={needed}"
    return f"to wait less, try --data-workers={cpus}, as many as this host has CPUs; about {needed} would be enough"


def _moved(loaders: Sequence[Mapping[str, Any]], steps: int) -> str:
    """What moved operators add to a batch; empty where none moved."""
    moved = sum(loader.get("moved_bytes", 0) for loader in loaders)
    return f", moved operators add {moved / steps:,.0f} bytes to a batch" if steps and moved else ""


def _compared(loaders: Sequence[Mapping[str, Any]]) -> str:
    """The evidence that data workers make what the program makes; empty where no loader was asked for it."""
    compared, differing = (
        sum(loader.get(name, 0) for loader in loaders) for name in ("compared_steps", "differing_steps")
    )
    steps = count_words(compared, "step")
    return f", {steps} compared with the program's own, {differing} differed" if compared else ""


def _cached(loaders: Sequence[Mapping[str, Any]]) -> str:
    """What the prefix cache did; empty where there was none."""
    names = ("cache_hits", "cache_misses", "cache_saved_s")
    hits, misses, saved_s = (sum(loader.get(name, 0) for loader in loaders) for name in names)
    if not hits and not misses:
        return ""
    return f", the cache had {hits:,} of {hits + misses:,} samples' fronts, which saved {saved_s:,.0f} CPU s"


def _companions(summary: Mapping[str, Any]) -> str:
    """CPU time of companions, and how much of it came from backfill holes; empty where there was none."""
    elastic = summary.get("elastic") or {}
    cpu_s, in_holes_s = elastic.get("companion_cpu_s", 0.0), elastic.get("companion_cpu_s_in_holes", 0.0)
    if not cpu_s:
        return ""
    jobs = count_words(elastic.get("companions", 0), "companion job")
    return f", {cpu_s / 3600:.2f} CPU-hours in {jobs}, {in_holes_s / cpu_s:.0%} of it in backfill holes"


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that had an elastic controller, and is over.

    Attributes:
        job: its id in Slurm.
        name: as squeue showed it.
        user: whose it was.
        ended_s: when, in seconds since the epoch.
        num_ranks: trainer tasks that read data.
        trainer_cpus: CPUs that each of them had; None if the script did not ask for them by task.
        needed_cpus: those that the busiest one needs besides data workers, with some to spare.
    """

    job: str
    name: str
    user: str
    ended_s: float
    num_ranks: int
    trainer_cpus: int | None
    needed_cpus: int

    @property
    def advice(self) -> str:
        """What to ask for next time; empty if it had no more than it needs."""
        if self.trainer_cpus is None:
            return f"its busiest trainer task needs {self.needed_cpus} CPUs besides its data workers"
        if self.needed_cpus >= self.trainer_cpus:
            return ""
        return f"its busiest trainer task needs {self.needed_cpus} of its {self.trainer_cpus} CPUs besides data workers"


def read_ended(directory: Path) -> EndedJob | None:
    """Return what this user's record in a job's directory tells; None if there is none, or it tells nothing of
    trainers.

    Raises:
        OSError: it cannot be read, or is another user's.
    """
    try:
        summary, status = load_own_summary(directory)
        ended_s = float(summary.get("ended_s") or status.st_mtime)  # a copy's file is younger
        return ended_of(summary, directory.name.split("-")[1], user_name(status.st_uid), ended_s)
    except FileNotFoundError:
        return None
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
        return None  # of another version, or no record of ours


def ended_of(summary: Mapping[str, Any], job: str, user: str, ended_s: float) -> EndedJob | None:
    """Return the same of a record that was read already."""
    # Known to the controller of the stage that the trainer takes its batches from.
    records = [summary.get(name) or {} for name in ("elastic", "elastic_gpu")]
    elastic = next((record for record in records if record.get("trainer_cpus_recommended") is not None), None)
    if elastic is None:
        return None
    needed, held = elastic["trainer_cpus_recommended"], elastic.get("trainer_cpus")
    ranks = {loader["rank"] for loader in summary.get("loaders", [])}
    name = str(summary.get("job_name", ""))
    return EndedJob(job, name, user, ended_s, max(1, len(ranks)), None if held is None else int(held), int(needed))


# Which directories of jobs in `.hetstream` are old and of no use any more. Reads; `remove` alone changes something.

_NAME = re.compile(r"job-(\d+)(?:-restart-\d+)?")


@dataclass(frozen=True)
class JobLeft:
    """The directory that a job has left.

    Attributes:
        path: of the directory.
        job_id: of the job.
        newest_s: when something in it changed last, in seconds since the epoch.
        num_bytes: of its files.
        why_kept: why it must stay; "" if it may go when it is old enough.
    """

    path: Path
    job_id: str
    newest_s: float
    num_bytes: int
    why_kept: str = ""


def jobs_left(place: Path, living: Collection[str]) -> list[JobLeft]:
    """Return what jobs have left in a place, the oldest first.

    Args:
        place: `.hetstream` of a directory that jobs were submitted from, or one for all jobs of a user.
        living: ids of the jobs that are not over.
    """
    found = []
    for path in sorted(place.glob("job-*")):
        name = _NAME.fullmatch(path.name)
        if name is not None and stat.S_ISDIR(path.lstat().st_mode):
            found.append(look_at(path, name[1], living))
    return sorted(found, key=lambda left: left.newest_s)


def look_at(path: Path, job_id: str, living: Collection[str]) -> JobLeft:
    """Return what is left in a directory of a job; for `living` see `jobs_left`."""
    status = path.lstat()
    if status.st_uid != os.geteuid():
        return JobLeft(path, job_id, status.st_mtime, 0, f"it is user {status.st_uid}'s")
    facts = [status, *_files(path)]
    newest_s = max(fact.st_mtime for fact in facts)
    num_bytes = sum(fact.st_size for fact in facts if stat.S_ISREG(fact.st_mode))
    return JobLeft(path, job_id, newest_s, num_bytes, "its job is not over" if job_id in living else "")


def _files(path: Path) -> Iterator[os.stat_result]:
    for entry in os.scandir(path):
        status = entry.stat(follow_symlinks=False)
        yield status
        if stat.S_ISDIR(status.st_mode):
            yield from _files(Path(entry.path))


def remove(left: JobLeft) -> None:
    """Remove it, and the place where it was if nothing else is in that.

    Raises:
        UntrustedFile: something in it is another user's.
        OSError: it cannot be removed.
    """
    place = left.path.parent
    with Directory.open(place) as outer:
        outer.check_own()
        remove_tree(outer, left.path.name)
        is_last = not outer.names()
    if is_last and place.name in (IN_SUBMIT_DIR, EMBEDDING_DIR):
        place.rmdir()
