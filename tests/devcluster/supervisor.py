"""The process that starts a cluster's daemons and adopts everything they leave behind.

Started by boot.py as `python -m tests.devcluster.supervisor PLAN`, where PLAN is a JSON file. It is
the "subreaper" of the cluster: an orphan below it becomes its child instead of init's, so a job's detached process can
always be found. It restarts nothing, and ends when its last child has ended or when `down` kills it.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from tests.devcluster import cgroups, kernel, private_run
from tests.devcluster.namespaces import enter
from tests.devcluster.processes import start_ticks
from tests.devcluster.record import DaemonState, write_daemons

READY_TIMEOUT_S = 30.0
POLL_INTERVAL_S = 0.01


def main(argv: list[str]) -> int:
    """Detach, tell the starter that the supervisor is on record, and supervise."""
    plan = json.loads(Path(argv[0]).read_text())
    ready, tell = os.pipe()
    if os.fork():
        os.close(tell)
        # Nothing to read means that the child ended before it was on record; its traceback is in the log.
        return 0 if os.read(ready, 1) else 1
    os.close(ready)
    os.setsid()
    kernel.adopt_orphans()
    if plan["cgroup"]:
        cgroups.enter(plan["cgroup"])
    if plan["mounts"]:
        private_run.enter(plan["mounts"])
    daemons = [DaemonState("supervisor", os.getpid(), start_ticks(os.getpid()) or 0, None)]
    write_daemons(Path(plan["state_dir"]), daemons)
    os.write(tell, b".")
    os.close(tell)
    return supervise(plan, daemons)


def supervise(plan: dict[str, Any], daemons: list[DaemonState]) -> int:
    """Start the daemons of the plan one after the other, then reap children until none is left."""
    state_dir = Path(plan["state_dir"])
    for daemon in plan["daemons"]:
        daemons.append(_start(daemon, plan))
        write_daemons(state_dir, daemons)
        _wait_until_ready(daemon, daemons[-1])
    while True:
        try:
            pid, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return 0
        ended = [index for index, daemon in enumerate(daemons) if daemon.pid == pid]
        for index in ended:
            daemons[index] = replace(daemons[index], exit_status=os.waitstatus_to_exitcode(status))
            write_daemons(state_dir, daemons)


def _start(daemon: dict[str, Any], plan: dict[str, Any]) -> DaemonState:
    # Not subprocess.Popen: it reaps children whose object was dropped, and their exit status would be lost. Not
    # posix_spawn: it cannot enter a host.
    pid = os.fork()
    if pid == 0:
        _become(daemon, plan)
    # The child is this process's until reaped below, so its pid cannot be another's yet.
    return DaemonState(daemon["name"], pid, start_ticks(pid) or 0, None)


def _become(daemon: dict[str, Any], plan: dict[str, Any]) -> NoReturn:
    """Turn this child into the daemon."""
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(os.open(daemon["output"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), 1)
        os.dup2(1, 2)
        if daemon["cores"]:  # all that a slurmd starts inherits them
            os.sched_setaffinity(0, daemon["cores"])
        if daemon["host"] is not None:
            enter(daemon["host"]["namespace"], daemon["host"]["name"], plan["hosts_file"])
        os.execve(daemon["argv"][0], daemon["argv"], {**plan["environment"], **daemon["environment"]})
    except Exception as error:  # noqa: BLE001, the process's boundary: `up` shows what is written here
        os.write(2, f"{daemon['name']} could not be started: {error!r}\n".encode())
    finally:
        os._exit(127)


def _wait_until_ready(wanted: dict[str, Any], daemon: DaemonState) -> None:
    """Wait until the daemon made its file or listens; if it ends or does not, `up` tells the user from the other side.

    Args:
        wanted: with its file, or its port on this host; where neither is named nothing is waited for.
        daemon: as it was started.
    """
    deadline = time.monotonic() + READY_TIMEOUT_S
    while not _is_ready(wanted) and start_ticks(daemon.pid) is not None and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)


def _is_ready(wanted: dict[str, Any]) -> bool:
    if wanted["ready_file"]:
        return Path(wanted["ready_file"]).exists()
    if not wanted["ready_port"]:
        return True
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", wanted["ready_port"])) == 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
