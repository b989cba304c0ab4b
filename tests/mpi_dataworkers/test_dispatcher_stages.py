"""Two stages at the dispatcher, without sockets and clocks: who is leased which steps, and what a loss takes away."""

from __future__ import annotations

from typing import Any

import pytest

from hetstream.mpi_dataworkers.dispatcher import tables
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.dispatcher.tables import Instruction, RememberStats, Send
from hetstream.mpi_dataworkers.wire.messages import (
    AddProcess,
    CloseSession,
    Device,
    DropSession,
    GrantLease,
    LeaveLoader,
    LeaveWorker,
    LoaderRegistered,
    LoaderStats,
    Membership,
    OpenSession,
    PlannedOrder,
    Program,
    ProvidePipeline,
    RegisterLoader,
    RegisterWorker,
    RenewWorker,
    ReportProgress,
    SessionSpec,
    UnknownPeer,
)

STATS = LoaderStats()
PIPELINE = ProvidePipeline("p", Program("/", []), b"", b"")


def trainer() -> RegisterLoader:
    return RegisterLoader("job", 0, 0, 1, "host", 1, "p", {}, trainer="t", device="gpu")


def feeding(worker: str) -> RegisterLoader:
    return RegisterLoader(f"stage.{worker}", 0, 0, 1, "host", 2, "p", {}, trainer="another", feeds=worker)


def opened(session_id: str, first: int, stop: int, window: int = 8) -> OpenSession:
    order = PlannedOrder(100, 1, 1, 0, False, False, 0)
    return OpenSession(SessionSpec(session_id, "p", 0, 0, order, ["tcp://x:1"]), stop, first, [], window, None)


def sent(instructions: list[Instruction], kind: type[Any]) -> list[tuple[str, Any]]:
    return [(one.peer, one.message) for one in instructions if isinstance(one, Send) and isinstance(one.message, kind)]


@pytest.fixture
def state() -> DispatcherState:
    """One trainer, two data workers with a GPU and two without, each in a slot of its own."""
    state = DispatcherState(1, 0.0)
    state.handle("trainer", trainer(), 0.0)
    state.handle("trainer", PIPELINE, 0.0)
    devices: dict[str, Device] = {"c0": "cpu", "c1": "cpu", "g0": "gpu", "g1": "gpu"}
    for pid, (peer, device) in enumerate(devices.items()):
        state.handle(peer, RegisterWorker("host", pid, "", [], slot=f"slot-{peer}", device=device), 0.0)
    return state


def holders(state: DispatcherState, session_id: str) -> set[str]:
    return {lease.worker for lease in state.tables.leases.values() if lease.session_id == session_id}


def feed(state: DispatcherState, worker: str, now: float = 1.0) -> list[Instruction]:
    """The holder of a lease of the last stage asks for its steps of the stage before."""
    lease = next(one for one in state.tables.leases.values() if one.worker == worker)
    out = state.handle(f"loader of {worker}", feeding(worker), now)
    return out + state.handle(f"loader of {worker}", opened(f"before-{worker}", lease.first, lease.stop), now)


@pytest.mark.shows("two stages of data workers make what one process makes; each has its controller")
def test_the_last_stage_is_leased_first_and_its_holder_asks_for_the_same_steps_before(state: DispatcherState) -> None:
    out = state.handle("trainer", opened("last", 0, 100), 0.0)
    assert {peer for peer, _ in sent(out, GrantLease)} == {"g0", "g1"}, "those with a GPU, and nobody else"
    lease = next(one for one in state.tables.leases.values() if one.worker == "g0")
    granted = sent(feed(state, "g0"), GrantLease)
    assert {peer for peer, _ in granted} <= {"c0", "c1"}
    steps = [step for _, one in granted for step in range(one.first_step, one.stop_step)]
    assert sorted(steps) == [*range(lease.first, lease.stop)]
    # Two leases each: while one is taken, each data worker of the stage before has a step of the other one to make.
    assert lease.stop - lease.first == 2
    # Who has worked for the run as a whole works for one stage of it only.
    state.handle("trainer", ReportProgress("last", 8, [], 8, STATS), 1.0)
    assert holders(state, "last") == {"g0", "g1"}
    assert holders(state, "before-g0") <= {"c0", "c1"}
    state.validate()


def test_each_loader_counts_the_data_workers_of_its_stage(state: DispatcherState) -> None:
    assert state.tables.loaders["trainer"].announced_workers == 2
    state.handle("trainer", opened("last", 0, 100), 0.0)
    assert sent(feed(state, "g0"), LoaderRegistered)[0][1].num_data_workers == 2
    out = state.peer_gone("c1", 2.0)
    assert sent(out, Membership) == [("loader of g0", Membership(1))]
    out = state.peer_gone("g1", 2.0)
    assert sent(out, Membership) == [("trainer", Membership(1))]


def test_nobody_is_asked_for_a_process_with_another_device(state: DispatcherState) -> None:
    out = state.handle("trainer", opened("last", 0, 100), 0.0) + feed(state, "g0")
    for second in range(2, 20):
        out += state.tick(float(second)) if second < tables.WORKER_TIMEOUT_S else []
    assert not sent(out, AddProcess)
    assert not sent(out, RenewWorker)


@pytest.mark.shows("two stages of data workers make what one process makes; each has its controller")
@pytest.mark.parametrize("how", ["gone", "left", "replaced", "silent"])
def test_losing_a_holder_takes_both_of_its_leases(state: DispatcherState, how: str) -> None:
    state.handle("trainer", opened("last", 0, 100), 0.0)
    feed(state, "g0")
    assert holders(state, "before-g0")
    now = 2.0
    if how == "gone":
        out = state.peer_gone("g0", now)
    elif how == "left":
        out = state.handle("g0", LeaveWorker(), now)
    elif how == "replaced":
        out = state.handle("g9", RegisterWorker("host", 9, "g0", [], slot="slot-g0", device="gpu"), now)
    else:
        now = tables.WORKER_TIMEOUT_S + 1000.0
        for peer in ("c0", "c1", "g1", "trainer", "loader of g0"):
            (state.tables.workers.get(peer) or state.tables.loaders[peer]).last_seen = now
        out = state.tick(now)
    assert "g0" not in state.tables.workers
    assert "loader of g0" not in state.tables.loaders
    assert "before-g0" not in state.tables.sessions
    assert holders(state, "before-g0") == set()
    assert {peer for peer, _ in sent(out, DropSession)} >= {"c0", "c1"}
    assert holders(state, "last") <= {"g1", "g9"}
    state.validate()
    # It was only stopped, and goes on as if nothing had been.
    assert sent(state.handle("loader of g0", ReportProgress("before-g0", 1, [], 8, STATS), now), UnknownPeer)


def test_a_loader_that_feeds_is_of_the_run_of_its_trainer_and_no_loader_of_the_job(state: DispatcherState) -> None:
    state.handle("trainer", opened("last", 0, 100), 0.0)
    feed(state, "g0")
    assert state.tables.loaders["loader of g0"].registration.trainer == "t"
    assert [row.job for row in state.status(2.0).loaders] == ["job"]
    assert {row.device for row in state.status(2.0).data_workers} == {"cpu", "gpu"}
    counted = LoaderStats(steps=3)
    out = state.handle("loader of g0", CloseSession("before-g0", 1, counted), 2.0)
    out += state.handle("loader of g0", LeaveLoader(counted), 2.0)
    assert not [one for one in out if isinstance(one, RememberStats)], "the job would have its steps twice"
    assert "g0" in state.tables.workers
