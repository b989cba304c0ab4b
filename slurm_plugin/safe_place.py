"""Directories whose files are believed: records, programs, state. Used by `devcluster`, `install` and the daemon."""

from __future__ import annotations

import os
from pathlib import Path

from hetstream.base.access import others_can_write, unsafe_above
from hetstream.slurm_plugin.errors import UnsafePlace


def check_place(place: Path) -> None:
    """Refuse a directory in which anybody but root and this user could change something, or put another in its place.

    What is found safe stays so: nobody else can change anything on the way to it.

    Args:
        place: absolute; where it is missing, what is there above it is looked at. In a directory like /tmp a stranger
            may be the one who makes it then: see `make_place`.

    Raises:
        UnsafePlace: somebody else could.
    """
    try:
        reason = unsafe_above(place / "file")
        if not reason and place.is_dir() and others_can_write(os.stat(place), place):
            reason = f"others can make files in {place}: chmod go-w {place}, or use another directory"
    except OSError as error:
        raise UnsafePlace(f"{place} cannot be looked at: {error}") from error
    if reason:
        raise UnsafePlace(reason)


def make_place(place: Path, mode: int = 0o755) -> None:
    """Make a directory, if it is missing, in which nobody but root and this user can change anything.

    Args:
        place: absolute.
        mode: of it, if it is made.

    Raises:
        UnsafePlace: as `check_place`.
        OSError: it cannot be made.
    """
    check_place(place)
    place.mkdir(mode=mode, parents=True, exist_ok=True)
    check_place(place)
