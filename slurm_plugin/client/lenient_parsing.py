"""Records of which a part cannot be read are kept: (parser, text) -> value, and what was in doubt. Pure, but for a line
in the log. Used by all that reads jobs and nodes.

Users have a say in what a job's record holds. Whoever could make it vanish would run beside every count and limit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TypeVar

from hetstream.slurm_plugin.client.model import CUT, Gres, Job, Node
from hetstream.slurm_plugin.client.slurm_units import known_gres

logger = logging.getLogger(__name__)
_T = TypeVar("_T")
_MOST_NAMED = 8
_MOST_SHOWN = 300


class Reading:
    """Reads the fields of one record.

    Attributes:
        unreadable: what could not be read, and why.
        gres_in_doubt: some of it were GRES.
    """

    def __init__(self) -> None:
        self.unreadable: tuple[str, ...] = ()
        self.gres_in_doubt = False

    def __call__(self, parse: Callable[[str], _T], text: str, otherwise: _T) -> _T:
        """The value of a text, or `otherwise` if the parser raises ValueError."""
        try:
            return parse(text)
        except ValueError as exc:
            self.unreadable += (str(exc)[:_MOST_SHOWN],)
            return otherwise

    def array_tasks(self, text: str) -> str:
        """The indices of an array; those that are cut are said to be."""
        if CUT in text:
            cut = f"the indices {text[:_MOST_SHOWN]!r} of an array are cut: more tasks are pending than are counted"
            self.unreadable += (cut,)
        return text

    def gres(self, text: str) -> tuple[Gres, ...]:
        """The GRES that a text names. What cannot be read of it counts as one, and may be any number."""
        found, unreadable = known_gres(text)
        self.unreadable += tuple(reason[:_MOST_SHOWN] for reason in unreadable)
        self.gres_in_doubt |= bool(unreadable)
        return found


def note_doubts(records: Iterable[Job | Node]) -> None:
    """Say in one line which records could not be read in full."""
    found = [(_name(record), record) for record in records if record.unreadable]
    if not found:
        return
    names = ", ".join(name for name, _ in found[:_MOST_NAMED])
    others = f" and {len(found) - _MOST_NAMED:,} others" if len(found) > _MOST_NAMED else ""
    name, first = found[0]
    in_doubt = [name for name, record in found if isinstance(record, Job) and record.gpus_in_doubt]
    gpus = f" The GPUs that they ask for are in doubt: {', '.join(in_doubt[:_MOST_NAMED])}." if in_doubt else ""
    logger.warning(
        "of %s%s a part cannot be read; they count all the same.%s Of %s: %r", names, others, gpus, name,
        first.unreadable[0],
    )  # fmt: skip


def _name(record: Job | Node) -> str:
    return f"job {record.job_id}" if isinstance(record, Job) else f"node {record.name}"
