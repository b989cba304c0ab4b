"""The records of this user's ended jobs, as the job history keeps them. Called by `advise` and `convert --auto`.

It reads directories, `job-ID/` in each place, and asks nobody. What belongs to others is left out: a record in a
directory that many can write to must not decide what this user submits.
"""

from __future__ import annotations

import json
import os
import pwd
from collections.abc import Iterable
from pathlib import Path

from hetstream.base.files import Directory
from hetstream.hetjob.ended_job import MAX_SUMMARY_BYTES, SUMMARY_FILE
from hetstream.slurm_plugin.model.past_job import PastJob, past_job_of


def past_jobs(places: Iterable[Path]) -> list[PastJob]:
    """What the records in these places tell.

    Args:
        places: that hold directories of jobs, such as `.hetstream` where they were submitted.
    """
    found: list[PastJob] = []
    for place in sorted({path.resolve() for path in places}):
        try:
            for directory in sorted(place.glob("job-*")):
                past_job = _read(directory)
                if past_job is not None:
                    found.append(past_job)
        except OSError:
            continue  # another user's directory
    return found


def _read(directory: Path) -> PastJob | None:
    try:
        with Directory.open(directory) as opened:
            text, status = opened.read(SUMMARY_FILE, MAX_SUMMARY_BYTES), opened.status(SUMMARY_FILE)
    except OSError:
        return None  # it runs, or is not ours
    if status.st_uid != os.geteuid():
        return None
    try:
        summary = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(summary, dict):
        return None
    return past_job_of(summary, directory.name.split("-")[1], own_name(), round(status.st_mtime, 3))


def own_name() -> str:
    """The name of whom this process runs as; the number where this host has no name for it."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a number that this host has no name for
        return str(os.geteuid())
