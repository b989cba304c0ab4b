"""Whether this process was forked from the one that made something. Asked at each step, so without a system call."""

from __future__ import annotations

import os

_generation = 0


def generation() -> int:
    """Grows with each fork: what an ancestor of this process made, it made in another generation."""
    return _generation


def _begin_as_child() -> None:
    global _generation
    _generation += 1


os.register_at_fork(after_in_child=_begin_as_child)
