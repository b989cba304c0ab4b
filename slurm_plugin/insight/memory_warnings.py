"""What a running job warns of: memory that will be full soon. Reads a file in the job's directory; asks nobody.

Called by `hetstream why`. Only the directories of this user's own jobs are looked into, as in `wait_shares.py`.
"""

from __future__ import annotations

import msgspec

from hetstream.hetjob.master.controller_state_file import kept_warnings
from hetstream.hetjob.master.memory_warning import MemoryWarning
from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.insight.wait_shares import directory_of, may_tell


def memory_warnings(job: Job) -> tuple[MemoryWarning, ...]:
    """Of one record of the queue; () also where nothing can be known."""
    if not may_tell(job):
        return ()
    try:
        directory = directory_of(job)
        return kept_warnings(directory) if directory else ()
    except (OSError, msgspec.MsgspecError):
        return ()  # it is ending, or of another release
