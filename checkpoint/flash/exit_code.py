"""The exit code of a program whose exit handlers fail: Python says 0 whatever they raise.

Called by the checkpointer, whose own handler brings the last state to disk.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import sys

_has_failed = False


def fail() -> None:
    """Have the program end with 1."""
    global _has_failed
    _has_failed = True


def _end() -> None:
    # Handlers run in the opposite order: what programs have registered since this module was imported is behind us.
    if _has_failed:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()
        os._exit(1)


atexit.register(_end)
