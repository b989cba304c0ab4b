"""What a running job tells of itself: memory that will be full soon, the parts of its step. Reads a file in the job's
directory; asks nobody.

Called by `hetstream why`. Only the directories of this user's own jobs are looked into, as in `wait_shares.py`.
"""

from __future__ import annotations

import msgspec

from hetstream.hetjob.master.controller_state_file import Told, told_by
from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.insight.wait_shares import directory_of, may_tell


def told_by_job(job: Job) -> Told:
    """By one record of the queue; nothing also where nothing can be known."""
    if not may_tell(job):
        return Told()
    try:
        directory = directory_of(job)
        return told_by(directory) if directory else Told()
    except (OSError, msgspec.MsgspecError):
        return Told()  # it is ending, or of another release
