"""The records that ended hetstream jobs have left where they were submitted. Called by `hetstream advise`.

It reads directories, `job-ID/` in each place, and asks nobody. What this user may not read is left out.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from hetstream.hetjob.ended_job import EndedJob, read_ended


def ended_jobs(places: Iterable[Path], since_s: float) -> list[EndedJob]:
    """Of each script's name and place, the newest job that ended since then.

    Args:
        places: that hold directories of jobs, such as `.hetstream` where they were submitted.
        since_s: in seconds since the epoch.
    """
    newest: dict[tuple[Path, str], EndedJob] = {}
    for place in {path.resolve() for path in places}:
        try:
            for directory in place.glob("job-*"):
                found = read_ended(directory)
                if found is None or found.ended_s < since_s:
                    continue
                before = newest.get((place, found.name))
                if before is None or before.ended_s < found.ended_s:
                    newest[place, found.name] = found
        except OSError:
            continue  # another user's directory
    return sorted(newest.values(), key=lambda job: job.ended_s)
