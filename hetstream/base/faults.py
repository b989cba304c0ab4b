"""Points at which a process can be made to die or stop, for tests of what its death costs; none without being asked.

A request names a point, at which of its passes something happens, what happens, and a file:

    HETSTREAM_FAULT=worker.batch_sent:3:kill:/tmp/marker

kills a data worker process after its third batch. The file is made just before (with the process id in it), and while
it exists nothing happens, so the process that takes the dead one's place lives. Several requests are separated by
commas. Actions: `kill` (SIGKILL), `stop` (SIGSTOP), `exit` (code 70, without any clean-up), `full` (as on a full disk).
"""

from __future__ import annotations

import errno
import os
import signal
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hetstream.base.errors import OptionsError

ACTIONS = ("kill", "stop", "exit", "full")
_EXIT_CODE = 70


@dataclass(frozen=True)
class Fault:
    """One request.

    Attributes:
        point: where.
        count: at which of its passes through the point it happens, from 1.
        action: one of `ACTIONS`.
        marker: made when it happens; while it exists it does not happen.
    """

    point: str
    count: int
    action: str
    marker: Path


class InjectionPoints:
    """The points of one package, and the requests of this process for them.

    Args:
        variable: the environment variable that holds the requests, for messages.
        points: names, with what is done and not done there.
        requests: what the variable says.

    Raises:
        OptionsError: a request is malformed, or names no such point.
    """

    def __init__(self, variable: str, points: Mapping[str, str], requests: str) -> None:
        self._variable = variable
        self._points = points
        self._faults: dict[str, list[Fault]] = {}
        self._passed: Counter[str] = Counter()
        self.request(requests)

    def request(self, requests: str) -> None:
        """Add requests: `POINT:COUNT:ACTION:FILE`, separated by commas.

        Raises:
            OptionsError: one is malformed, or names no such point.
        """
        for request in filter(None, requests.split(",")):
            point, count, action, marker = (*request.split(":", 3), "", "", "")[:4]
            if (
                point not in self._points
                or not count.isdigit()
                or not int(count)
                or action not in ACTIONS
                or not marker
            ):
                raise OptionsError(
                    f"{self._variable}: {request!r} is not POINT:COUNT:ACTION:FILE with an action of "
                    f"{', '.join(ACTIONS)} and a point of {', '.join(self._points)}"
                )
            self._faults.setdefault(point, []).append(Fault(point, int(count), action, Path(marker)))

    def clear(self) -> None:
        """Forget all requests, and all passes: what is requested, or forked, from here on begins anew."""
        self._faults.clear()
        self._passed.clear()

    def reach(self, point: str) -> None:
        """Pass a point: without a request for it, nothing.

        Raises:
            OSError: a request says that the disk is full.
        """
        if self._faults and point in self._faults:
            self._passed[point] += 1
            for fault in self._faults[point]:
                if fault.count == self._passed[point]:
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
    if fault.action == "full":
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.kill(os.getpid(), signal.SIGKILL if fault.action == "kill" else signal.SIGSTOP)
