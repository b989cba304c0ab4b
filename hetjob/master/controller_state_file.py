"""The file in which the elastic controller's memory and changes outlive a killed job master. Called by `elastic.py`;
`hetstream why` reads there what the job warns of.

It lies beside the address file and goes with it when the job ends. What cannot be read or written costs the memory,
never the job.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory
from hetstream.hetjob.elastic.controller_state import ControllerState
from hetstream.hetjob.elastic.step_terms import StepTerm
from hetstream.hetjob.job_environment import CONTROLLER_STATE_FILE
from hetstream.hetjob.master.companion_time import TimeTally
from hetstream.hetjob.master.memory_warning import MemoryWarning

log = logging.getLogger(__name__)

# As many changes as a day has at a cooldown of 86 s; the service's events have all.
MOST_CHANGES = 1000
_MAX_BYTES = 16 << 20


class _FileContent(msgspec.Struct, forbid_unknown_fields=True):
    memory: ControllerState
    changes: list[dict[str, Any]]
    tally: TimeTally = msgspec.field(default_factory=TimeTally)
    warnings: tuple[MemoryWarning, ...] = ()
    step_terms: tuple[StepTerm, ...] = ()


class ControllerStateFile:
    """The file.

    Args:
        path: where; what a job master of before has written there is read now.

    Attributes:
        memory: of the job master of before; None without one.
        changes: the last ones, oldest first, also those of before.
        tally: the time of the companions, also of those of before; whoever counts changes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = b""
        self._problem = ""
        self.memory: ControllerState | None = None
        self.tally = TimeTally()
        self.changes: deque[Mapping[str, Any]] = deque(maxlen=MOST_CHANGES)
        try:
            with Directory.open_safe(self._path.parent, own=True) as directory:
                page = typed_json.decode(directory.read(path.name, _MAX_BYTES), _FileContent)
        except FileNotFoundError:
            return
        except (OSError, msgspec.MsgspecError) as error:
            log.warning("%s cannot be read, the elastic controller begins anew: %s", path, error)
            return
        self.memory = page.memory
        self.tally = page.tally
        self.changes.extend(page.changes)

    def write(
        self, memory: ControllerState, warnings: Sequence[MemoryWarning] = (), step_terms: Sequence[StepTerm] = ()
    ) -> None:
        """Write down what is known now, if anything is new: the old page or the new one is there, whole."""
        changes = [dict(change) for change in self.changes]
        page = msgspec.json.encode(_FileContent(memory, changes, self.tally, tuple(warnings), tuple(step_terms)))
        if page == self._written:
            return
        try:
            with Directory.open_safe(self._path.parent, own=True) as directory:
                directory.write_whole(self._path.name, page)
        except OSError as error:
            if str(error) != self._problem:
                log.warning("%s cannot be written: a job master that is killed forgets this: %s", self._path, error)
            self._problem = str(error)
            return
        self._written = page


class Told(NamedTuple):
    """What a running job tells of itself.

    Attributes:
        warnings: of its memory.
        step_terms: the parts of its step.
    """

    warnings: tuple[MemoryWarning, ...] = ()
    step_terms: tuple[StepTerm, ...] = ()


def told_by(directory: Path) -> Told:
    """What the job master with this directory tells now; nothing where it keeps nothing.

    Raises:
        OSError: it cannot be read, or is none of this user's.
        MsgspecError: it is another file.
    """
    try:
        with Directory.open(directory) as opened:
            page = typed_json.decode(opened.read(CONTROLLER_STATE_FILE, _MAX_BYTES), _FileContent)
    except FileNotFoundError:
        return Told()
    return Told(page.warnings, page.step_terms)
