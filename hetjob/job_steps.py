"""What the steps beside a job's program have in common: that of the job master, and that of the checkpoint writers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from hetstream.hetjob.ports import Child

_POLL_S = 0.05


def await_ready(step: Child, is_ready: Callable[[], bool], limit_s: float, lacking: str) -> str:
    """Wait until a step is ready; else end it.

    Args:
        step: its srun.
        is_ready: asked again and again.
        limit_s: how long to wait.
        lacking: what there is not until then, in words.

    Returns:
        Why it is not ready; "" if it is.
    """
    deadline = time.monotonic() + limit_s
    while not is_ready():
        ended = step.poll()
        if ended is not None or time.monotonic() > deadline:
            step.terminate()
            return f"the step ended with {ended}" if ended is not None else f"{lacking} within {limit_s:g} s"
        time.sleep(_POLL_S)
    return ""


def why_no_directory(what: str, directory: Path, error: OSError) -> str:
    """Why a directory of a job cannot be made, and what the user can do."""
    return (
        f"the {what} directory {directory} cannot be made: {error.strerror or error}. Submit from a directory that you "
        "can write to and that all hosts share, or name one with --jobs-dir"
    )
