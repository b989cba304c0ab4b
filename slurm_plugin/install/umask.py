"""Files that users other than root must read. Called by boot.py and roots.py."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def readable_by_all() -> Iterator[None]:
    """Make files 0644 and directories 0755 inside, whatever the user's umask: jobs of every user read them."""
    previous = os.umask(0o022)
    try:
        yield
    finally:
        os.umask(previous)
