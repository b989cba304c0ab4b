"""The records that ended hetstream jobs have left where they were submitted. Called by `advise` and `convert --auto`.

It reads directories, `job-ID/` in each place, and asks nobody. What this user may not read is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from hetstream.base.users import user_name
from hetstream.hetjob.ended_job import EndedJob, read_ended
from hetstream.hetjob.jobs_dir import IN_SUBMIT_DIR
from hetstream.hetjob.summary import load_own_summary
from hetstream.slurm_plugin.model.past_job import CLOCKS_DIFFER_S, PastJob, past_job_of


def ended_jobs(places: Iterable[Path], since_s: float, until_s: float) -> list[EndedJob]:
    """Of each script's name and place, the newest of this user's jobs that ended in this time.

    Args:
        places: that hold directories of jobs, such as `.hetstream` where they were submitted.
        since_s, until_s: in seconds since the epoch. A record with a later date says not when its job ended.
    """
    newest: dict[tuple[Path, str], EndedJob] = {}
    for directory in _directories(places):
        try:
            found = read_ended(directory)
        except OSError:
            continue
        if found is None or not since_s <= found.ended_s <= until_s + CLOCKS_DIFFER_S:
            continue
        before = newest.get((directory.parent, found.name))
        if before is None or before.ended_s < found.ended_s:
            newest[directory.parent, found.name] = found
    return sorted(newest.values(), key=lambda job: job.ended_s)


def past_jobs(places: Iterable[Path]) -> list[PastJob]:
    """What the records of this user's own jobs tell, as the job history keeps them.

    What belongs to others is left out: a record in a directory that many can write to must not decide what this user
    submits.

    Args:
        places: as of `ended_jobs`.
    """
    return [past_job for directory in _directories(places) if (past_job := _read(directory)) is not None]


def _directories(places: Iterable[Path]) -> Iterator[Path]:
    """The directories of jobs in these places."""
    for place in sorted({path.resolve() for path in places}):
        try:
            yield from sorted(place.glob("job-*"))
        except OSError:
            continue  # another user's place


def _read(directory: Path) -> PastJob | None:
    try:
        summary, status = load_own_summary(directory)
    except (OSError, ValueError):
        return None  # it runs, is not ours, or no record
    place = directory.parent  # resolved
    submit_dir = str(place.parent) if place.name == IN_SUBMIT_DIR else ""
    job, user = directory.name.split("-")[1], user_name(status.st_uid)
    return past_job_of(summary, job, user, round(status.st_mtime, 3), submit_dir)
