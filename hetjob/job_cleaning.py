"""Which directories of jobs in `.hetstream` are old and of no use any more. Reads; `remove` alone changes something."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.files import Directory
from hetstream.hetjob.jobs_dir import IN_SUBMIT_DIR
from hetstream.hetjob.temporary import remove_tree

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
    """What jobs have left in a place, the oldest first.

    Args:
        place: `.hetstream` of a directory that jobs were submitted from, or one for all jobs of a user.
        living: ids of the jobs that are not over.
    """
    found = []
    for path in sorted(place.glob("job-*")):
        name = _NAME.fullmatch(path.name)
        if name is not None and stat.S_ISDIR(path.lstat().st_mode):
            found.append(_look_at(path, name[1], living))
    return sorted(found, key=lambda left: left.newest_s)


def _look_at(path: Path, job_id: str, living: Collection[str]) -> JobLeft:
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
    """Remove it, and `.hetstream` if nothing else is in it.

    Raises:
        UntrustedFile: something in it is another user's.
        OSError: it cannot be removed.
    """
    place = left.path.parent
    with Directory.open(place) as outer:
        outer.check_own()
        remove_tree(outer, left.path.name)
        is_last = not outer.names()
    if is_last and place.name == IN_SUBMIT_DIR:
        place.rmdir()
