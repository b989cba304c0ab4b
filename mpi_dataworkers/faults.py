"""Places where a process can be made to die or stop, for tests of what its death costs. Without HETSTREAM_FAULT none.

A request names a point of `POINTS`, how often it is passed until something happens, what happens, and a file:

    HETSTREAM_FAULT=worker.batch_sent:3:kill:/tmp/marker

kills a data worker process after its third batch. The file is made just before (with the process id in it), and while
it exists nothing happens, so the process that takes the dead one's place lives. Several requests are separated by
commas. Actions: `kill` (SIGKILL), `stop` (SIGSTOP), `exit` (code 70, without any clean-up).
"""

from __future__ import annotations

import os
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.config import faults_from_environment

POINTS = {
    "dispatcher.received": "a burst of messages has come and nothing is decided",
    "dispatcher.decided": "it is decided what to do, nothing is written",
    "dispatcher.before_commit": "a group of changes is written to the journal and not committed",
    "dispatcher.after_commit": "a group of changes is committed",
    "dispatcher.before_send": "the next message is not sent",
    "dispatcher.after_send": "a message has just been sent",
    "worker.registered": "the dispatcher has let the data worker in",
    "worker.lease_received": "a lease has come and is not begun",
    "worker.before_make": "a step is next, its samples are not read",
    "worker.after_make": "a batch is made and not sent",
    "worker.batch_sent": "a batch was handed to the transport",
    "worker.before_finish": "all steps of a lease are sent, the dispatcher has not been told",
    "worker.after_finish": "the dispatcher is being told that a lease is done",
    "worker.draining": "the dispatcher is being told that the data worker leaves",
    "loader.registered": "the dispatcher has let the loader in",
    "loader.batches_received": "batches have come and are not looked at",
    "loader.before_report": "progress is to be reported",
    "loader.after_report": "progress was reported",
    "loader.step_taken": "the training loop is about to get a step",
    "loader.state_taken": "the program is about to get the loader's state",
    "daemon.received": "the site daemon knows who reports and has decided nothing",
    "daemon.before_commit": "a job's report and the new limits are written and not committed",
    "daemon.after_commit": "they are committed, the job has no answer",
    "daemon.read": "the cluster was read, nothing of it is noted",
}
ACTIONS = ("kill", "stop", "exit")
_EXIT_CODE = 70


@dataclass(frozen=True)
class Fault:
    """One request.

    Attributes:
        point: a name of `POINTS`.
        count: at which of its passes through the point it happens, from 1.
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
        ConfigError: one is malformed.
    """
    faults: dict[str, list[Fault]] = {}
    for word in filter(None, text.split(",")):
        point, count, action, marker = (*word.split(":", 3), "", "", "")[:4]
        if point not in POINTS or not count.isdigit() or int(count) < 1 or action not in ACTIONS or not marker:
            raise ConfigError(
                f"HETSTREAM_FAULT: {word!r} is not POINT:COUNT:ACTION:FILE with an action of {', '.join(ACTIONS)} and "
                f"a point of {', '.join(POINTS)}"
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
