"""The places that the variables of an environment name, and which of them may be a stranger's on this host.

A library loads what it finds in its cache, and a program runs what it finds on a path. Which variables name such places
nobody can list, so each value that is an absolute path, or several with colons between them, is looked at.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from hetstream.base.access import strange_value


class LeftOut(NamedTuple):
    """A variable of which something is left out: what is kept of it, None for nothing; and why."""

    name: str
    kept: str | None
    why: str


def places_in(value: str) -> list[str]:
    """The absolute paths that a value consists of; none if it holds anything else."""
    entries = [entry for entry in value.split(os.pathsep) if entry]
    return entries if all(entry.startswith("/") for entry in entries) else []


def strange_variables(
    environ: Mapping[str, str], owners_there: Callable[[str], tuple[int, ...] | None]
) -> list[LeftOut]:
    """The variables of this process that name what may be a stranger's on this host.

    Args:
        environ: of this process.
        owners_there: of a place on the program's host, as `access.owners_of` has them; None for a place that its
            environment does not name: that is of this host's own set-up, and stays.
    """
    found = []
    for name, value in environ.items():
        owners = {path: owners_there(path) for path in places_in(value)}
        strange = {
            path: why for path, there in owners.items() if there is not None and (why := _strange_value(path, there))
        }
        if strange:
            kept = [entry for entry in value.split(os.pathsep) if entry not in strange]
            found.append(LeftOut(name, os.pathsep.join(kept) if any(kept) else None, next(iter(strange.values()))))
    return found


# Once in a process: settings are put in force again and again.
_strange_value = functools.lru_cache(maxsize=4096)(strange_value)
