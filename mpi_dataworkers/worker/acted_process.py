"""What `multiprocessing` says of a data worker process: it is a worker process of torch, or no child of a program.

`multiprocessing` keeps this in its own variables, and hetstream, which forks by itself, asks for none of it.
"""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

_process: Any = multiprocessing.process
_own = _process._current_process, _process._parent_process


def act(as_worker: bool, number: int) -> None:
    """Be a worker process of torch for `multiprocessing`, or what this process is.

    Such a worker is daemonic, so that a sample which starts a `multiprocessing.Process` gets the error that torch's
    worker gives it: where a loader has no worker processes it may start them.

    Args:
        as_worker: be one.
        number: of the data worker, which its name has.
    """
    if not as_worker:
        _process._current_process, _process._parent_process = _own
        return
    acted: Any = multiprocessing.Process(daemon=True)
    acted.name = f"Process-{number + 1}"
    acted._parent_pid = parent = os.getppid()
    acted._popen = None
    _process._current_process = acted
    # Readable at the end of that process, as the pipe is that multiprocessing has for it.
    _process._parent_process = _process._ParentProcess("MainProcess", parent, os.pidfd_open(parent))
