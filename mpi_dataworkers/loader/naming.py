"""Who a loader is among the loaders of its program, so that the dispatcher finds the same loader of another rank.

A number in order of making does not say that: a loader that rank 0 alone makes would shift all that follow. So a loader
is known by its description and by the how-many-th of that description it is; and where it was made says whether two
ranks mean the same by it.
"""

from __future__ import annotations

import hashlib
import sys
import threading
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath

from hetstream.mpi_dataworkers.config import TrainerIdentity

_SITE = {"site-packages", "dist-packages"}
_OWN_PACKAGE = "hetstream"


@dataclass(frozen=True)
class LoaderName:
    """What tells a loader from the others of its process, and what the other ranks' call the same.

    Attributes:
        ordinal: its number among all loaders of the process, in order of making.
        occurrence: its number among those of the same rank, job name and description.
        place: stands for the calls that led to it, and for how often they had before: alike in all ranks.
        made_at: the innermost of these calls that is the program's own, as `train.py:42`; not an installed package's.
        divides: each rank gets its share of the data, and the other ranks the rest.
    """

    ordinal: int
    occurrence: int
    place: str
    made_at: str
    divides: bool


class _Names:
    """Counts the loaders of this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[Hashable] = Counter()

    def name(self, identity: TrainerIdentity, description: Mapping[str, str], divides: bool) -> LoaderName:
        """Name a loader that the caller's caller makes now."""
        found = list(_calls())
        calls = [place for place, _ in found]
        own = [place for place, is_installed in found if not is_installed]
        rank = identity.job_name, identity.rank
        with self._lock:
            ordinal, occurrence, nth = (
                self._next(key) for key in ("all", (rank, frozenset(description.items())), (rank, tuple(calls)))
            )
        place = hashlib.blake2b(repr((calls, nth)).encode(errors="replace"), digest_size=8).hexdigest()
        return LoaderName(ordinal, occurrence, place, (own or calls or [""])[0], divides)

    def _next(self, key: Hashable) -> int:
        self._counts[key] += 1
        return self._counts[key] - 1


def title_of(identity: TrainerIdentity, name: LoaderName, description: Mapping[str, str]) -> str:
    """What a person knows a loader by: the name that was given to it, the class of its dataset and where it is made."""
    dataset = description.get("dataset", "").rpartition(".")[2]
    parts = (identity.job_name if identity.is_named else "", dataset, name.made_at)
    return " ".join(part for part in parts if part)


def _calls() -> Iterator[tuple[str, bool]]:
    """Where the program is, innermost call first, without hetstream's own calls; and whether that is an installed
    package."""
    frame = sys._getframe(1)
    while frame is not None:
        # Code that a program executes by itself may have anything for a name, or none.
        if str(frame.f_globals.get("__name__")).partition(".")[0] != _OWN_PACKAGE:
            path = PurePath(frame.f_code.co_filename)
            yield f"{path.name}:{frame.f_lineno}", not _SITE.isdisjoint(path.parts)
        frame = frame.f_back  # type: ignore[assignment]


name_loader = _Names().name
