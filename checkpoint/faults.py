"""Places where a process can be made to die or stop, for tests of what its death costs; none without being asked.

A request names a point of `POINTS`, how often it is passed until something happens, what happens, and a file:

    HETSTREAM_CKPT_FAULT=slot.begun:3:kill:/tmp/marker

kills a trainer when it begins its third save. The file is made just before (with the process id in it), and while
it exists nothing happens, so the process that takes the dead one's place lives. Several requests are separated by
commas. Actions: `kill` (SIGKILL), `stop` (SIGSTOP), `exit` (code 70, without any clean-up).
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from checkpoint.config import faults_from_environment
from checkpoint.errors import OptionsError

POINTS = {
    "store.created": "the trainer's store has its directory and no slots",
    "store.adopted": "a dead trainer's store has a new owner",
    "slot.allocated": "a slot file is made and has not got its name",
    "slot.placed": "a slot file has its name and holds nothing",
    "slot.begun": "a slot is marked as being written, and not a byte of it is",
    "slot.described": "payload and metadata are written, the header is not",
    "slot.before_complete": "all but the word that makes a generation complete is written",
    "slot.complete": "a generation is complete, its lock is held and the saver knows nothing",
    "slot.published": "the saver has been woken",
    "store.closing": "the trainer is about to mark its store as closed",
    "store.closed": "the store is marked as closed",
    "store.removing": "a store's first file is deleted",
}
ACTIONS = ("kill", "stop", "exit")
_EXIT_CODE = 70


@dataclass(frozen=True)
class Fault:
    """One request.

    Attributes:
        point: a name of `POINTS`.
        count: it happens the so-manieth time that this process passes the point, from 1.
        action: one of `ACTIONS`.
        marker: made when it happens; while it exists it does not happen.
    """

    point: str
    count: int
    action: str
    marker: Path


def parse_faults(text: str) -> dict[str, list[Fault]]:
    """Read requests: `POINT:COUNT:ACTION:FILE`, separated by commas; by point.

    Raises:
        OptionsError: one is malformed.
    """
    faults: dict[str, list[Fault]] = {}
    for word in filter(None, text.split(",")):
        point, count, action, marker = (*word.split(":", 3), "", "", "")[:4]
        if point not in POINTS or not count.isdigit() or int(count) < 1 or action not in ACTIONS or not marker:
            raise OptionsError(
                f"HETSTREAM_CKPT_FAULT: {word!r} is not POINT:COUNT:ACTION:FILE with an action of "
                f"{', '.join(ACTIONS)} and a point of {', '.join(POINTS)}"
            )
        faults.setdefault(point, []).append(Fault(point, int(count), action, Path(marker)))
    return faults


_faults = parse_faults(faults_from_environment())
_passed: Counter[str] = Counter()


def reach(point: str) -> None:
    """Pass a point: without a request for it, nothing."""
    if _faults and point in _faults:
        _passed[point] += 1
        for fault in _faults[point]:
            if fault.count == _passed[point]:
                _strike(fault)


def _strike(fault: Fault) -> None:
    try:
        marker = os.open(fault.marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    except FileExistsError:
        return
    os.write(marker, str(os.getpid()).encode())
    os.close(marker)
    if fault.action == "exit":
        os._exit(_EXIT_CODE)
    os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
