"""Remove a cluster: its processes, its network, its control groups, its files.

Called by `devcluster down`, by a failed `up`, by tests. It works on whatever is left: daemons that were
killed, a boot that was interrupted, a supervisor that is gone. It touches no process, no directory and no part of a
network that the cluster's record does not identify.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.devcluster.cgroups import groups_of, remove_groups
from tests.devcluster.errors import TeardownFailed
from tests.devcluster.lock import MACHINE, locked
from tests.devcluster.namespaces import left_of, remove_network
from tests.devcluster.processes import Process, cluster_processes, start_ticks
from tests.devcluster.record import RECORD_FILE, read_record
from tests.devcluster.spec import DEFAULT_STATE_ROOT

# Programs of jobs get this long after SIGTERM to remove what they made outside the state directory.
TERM_GRACE_S = 2.0
KILL_TIMEOUT_S = 10.0
REAP_TIMEOUT_S = 0.5
LOCK_TIMEOUT_S = 90.0
POLL_INTERVAL_S = 0.02
SUPERVISOR_MODULE = "tests.devcluster.supervisor"


@dataclass(frozen=True)
class TeardownPlan:
    """What `down` would remove.

    Attributes:
        state_dir: the directory.
        processes: what runs now.
        network: what there is of its network: ("link" or "netns", name).
        cgroups: its control groups.
    """

    state_dir: Path
    processes: tuple[Process, ...]
    network: tuple[tuple[str, str], ...]
    cgroups: tuple[Path, ...]


def plan_teardown(state_dir: Path) -> TeardownPlan | None:
    """What there is to remove, or None if no cluster was begun in `state_dir`."""
    record = read_record(state_dir)
    if record is None:
        return None
    network = tuple(left_of(record.network)) if record.network is not None else ()
    processes = tuple(cluster_processes(record))
    return TeardownPlan(state_dir, processes, network, tuple(groups_of(record.cluster_name)))


def tear_down(state_dir: Path) -> TeardownPlan | None:
    """Remove the cluster and, if it was the last one there, the default place of clusters.

    Returns:
        what was there, or None if there was no cluster.

    Raises:
        TeardownFailed: a process outlived SIGKILL; the directory stays, so that `down` can be run again.
        NetworkFailed: its network could not be removed; likewise.
    """
    plan = remove_cluster(state_dir)
    if plan is not None and state_dir.parent == DEFAULT_STATE_ROOT:
        # An `up` may be making its directory there.
        with locked(MACHINE, LOCK_TIMEOUT_S, f"removing {state_dir}"):
            for parent in (DEFAULT_STATE_ROOT, DEFAULT_STATE_ROOT.parent):
                _remove_if_empty(parent)
    return plan


def remove_cluster(state_dir: Path) -> TeardownPlan | None:
    """Kill every process of the cluster and remove its directory; see `tear_down`."""
    plan = plan_teardown(state_dir)
    record = read_record(state_dir)
    if plan is None or record is None:
        return None
    # Daemons first: a live slurmctld would requeue the jobs whose processes end, a live slurmd would start them again.
    # The supervisor last: it reaps the others, and ends when there are none.
    daemons = [process for process in plan.processes if process.is_daemon]
    supervisor = [process for process in daemons if SUPERVISOR_MODULE in process.command]
    _signal([process for process in daemons if process not in supervisor and not _is_stepd(process)], signal.SIGKILL)
    programs = [process for process in plan.processes if not process.is_daemon]
    _signal(programs, signal.SIGTERM)
    _wait_until_gone(programs, TERM_GRACE_S)
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while left := cluster_processes(record):
        if time.monotonic() > deadline:
            raise TeardownFailed(
                f"processes of {state_dir} outlived SIGKILL for {KILL_TIMEOUT_S:g} s: "
                + ", ".join(f"{process.pid} ({process.command})" for process in left)
                + f". Look at them and run: devcluster down --state-dir {state_dir}"
            )
        others = [process for process in left if process not in supervisor]
        _signal(others or left, signal.SIGKILL)
        _wait_until_gone(left, REAP_TIMEOUT_S)
    if record.network is not None:
        remove_network(record.network)
    remove_groups(record.cluster_name)
    _remove_files(state_dir)
    return plan


def _remove_files(state_dir: Path) -> None:
    """Remove the directory, its record last: an interrupted `down` can be run again."""
    for entry in state_dir.iterdir():
        if entry.name == RECORD_FILE:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    shutil.rmtree(state_dir)


def _remove_if_empty(directory: Path) -> None:
    if directory.exists() and not any(directory.iterdir()):
        directory.rmdir()


def _is_stepd(process: Process) -> bool:
    # slurmstepd must outlive its tasks' SIGTERM: without it their output would be lost.
    return "slurmstepd" in process.command


def _signal(processes: Sequence[Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            os.kill(process.pid, number)
        except ProcessLookupError:
            continue


def _wait_until_gone(processes: Sequence[Process], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if all(start_ticks(process.pid) != process.start_ticks for process in processes):
            return
        time.sleep(POLL_INTERVAL_S)
