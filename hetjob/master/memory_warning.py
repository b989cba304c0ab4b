"""A warning that some process of a job runs out of memory: what `elastic.json` keeps of it, and `hetstream why` shows.

Made by `trainer_memory.py` and `companion_memory.py`; kept by `controller_state_file.py`. Pure.
"""

from __future__ import annotations

import msgspec


class MemoryWarning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One warning.

    Attributes:
        job: the Slurm job whose memory it is: the trainer's, or a companion.
        text: what is so, and what was done about it.
        command: what helps, as a command or a directive.
        full_at_s: when memory will be full, on the clock of whoever made it; in the file seconds since the epoch.
    """

    job: str
    text: str
    command: str
    full_at_s: float
