"""Which data worker process serves which program: the dispatcher's decisions, without sockets, clocks or disks."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hetstream.mpi_dataworkers.dispatcher import placement
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.dispatcher.tables import Instruction, Send
from hetstream.mpi_dataworkers.process.programs import joined, serves
from hetstream.mpi_dataworkers.wire.messages import (
    AddProcess,
    CloseSession,
    Draining,
    DrainWorker,
    EndProcesses,
    GrantLease,
    HeldLease,
    LeaveLoader,
    LeaveWorker,
    LoaderStats,
    Membership,
    Message,
    OpenSession,
    PlannedOrder,
    ProcessesEnded,
    Program,
    ProvidePipeline,
    RegisterLoader,
    RegisterWorker,
    RenewWorker,
    SessionSpec,
    Sharing,
    WorkerHeartbeat,
)

STATS = LoaderStats()


def sent(instructions: Iterable[Instruction], kind: type[Message]) -> list[str]:
    return [one.peer for one in instructions if isinstance(one, Send) and isinstance(one.message, kind)]


def connect(state: DispatcherState, loader: str, program: Program, trainer: str = "", now: float = 0.0) -> None:
    """A loader of a program registers; its trainer has its name unless another is said."""
    registration = RegisterLoader(loader, 0, 0, 1, "host", 1, f"d-{loader}", {}, trainer=trainer or loader)
    state.handle(loader, registration, now)
    state.handle(loader, ProvidePipeline(f"d-{loader}", program, b"", b""), now)


def begin(
    state: DispatcherState, loader: str, now: float = 0.0, sharing: Sharing | None = None, pipeline_id: str = ""
) -> list[Instruction]:
    order = PlannedOrder(8, 1, 1, 0, False, False, 0)
    session = SessionSpec(f"s-{loader}", pipeline_id or f"d-{loader}", 0, 0, order, ["tcp://loader:1"], sharing)
    return state.handle(loader, OpenSession(session, 8, 0, [], 4, None), now)


def register(state: DispatcherState, worker: str, slot: str = "slot", now: float = 0.0) -> list[Instruction]:
    return state.handle(worker, RegisterWorker("host", 1, "", [], slot=slot), now)


def served(state: DispatcherState, worker: str) -> set[str]:
    return {state.tables.leases[token].session_id for token in state.tables.workers[worker].tokens}


ONE, TWO = Program("/one", ["/one", ""], {"data": "1"}), Program("/two", ["/two", ""], {"data": "1"})


def test_a_process_serves_a_program_with_the_same_directories_and_no_other_version_of_a_module() -> None:
    assert serves(ONE, ONE)
    assert serves(ONE, Program("/one", ["/one", ""], {"other": "2"})), "a module that is loaded later"
    assert not serves(ONE, Program("/one", ["/one", ""], {"data": "2"}))
    assert not serves(ONE, Program("/one", ["", "/one"], {"data": "1"}))
    assert not serves(ONE, TWO)
    assert joined(ONE, Program("/one", ["/one", ""], {"other": "2"})).modules == {"data": "1", "other": "2"}


def test_a_program_after_another_gets_fresh_processes() -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0")
    connect(state, "a", ONE)
    begin(state, "a")
    assert served(state, "w0") == {"s-a"}
    state.handle("a", LeaveLoader(STATS), 1.0)
    connect(state, "b", ONE, now=1.0)
    out = begin(state, "b", 1.0)
    assert not sent(out, GrantLease), "also the same program, run again: its processes may have kept something"
    assert sent(out, RenewWorker) == ["w0"]
    assert sent(out, Membership) == []
    out = state.handle("w0", LeaveWorker(), 1.1)
    assert sent(out, Membership) == [], "the slot counts until its fresh process is there"
    assert state.tables.loaders["b"].announced_workers == 1
    out = register(state, "w1", now=1.2)
    assert set(sent(out, GrantLease)) == {"w1"}
    assert state.tables.workers_lost == 0
    state.validate()


def test_loaders_of_one_trainer_and_ranks_of_one_run_have_their_processes_in_common() -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0")
    for loader, trainer in (("train", "rank0"), ("other", "rank1"), ("valid", "rank0")):
        connect(state, loader, ONE, trainer)
        out = begin(state, loader)
        assert not sent(out, AddProcess)
        assert not sent(out, RenewWorker)
    state.handle("train", LeaveLoader(STATS), 1.0)
    state.handle("valid", LeaveLoader(STATS), 1.0)
    state.handle("other", LeaveLoader(STATS), 1.0)
    connect(state, "again", ONE, "rank0", now=2.0)
    assert sent(begin(state, "again", 2.0), GrantLease), "a trainer that makes a loader for each fold"


def test_programs_at_the_same_time_get_a_process_each_in_every_slot() -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0", "slot0")
    register(state, "w1", "slot1")
    connect(state, "a", ONE)
    begin(state, "a")
    connect(state, "b", TWO)
    out = begin(state, "b")
    assert not sent(out, RenewWorker)
    assert sorted(sent(out, AddProcess)) == ["w0", "w1"]
    assert not sent(state.tick(0.3), AddProcess), "asked once"
    register(state, "w2", "slot0", 0.4)
    register(state, "w3", "slot1", 0.4)
    assert [served(state, f"w{number}") for number in range(4)] == [{"s-a"}, {"s-a"}, {"s-b"}, {"s-b"}]
    assert {one.announced_workers for one in state.tables.loaders.values()} == {2}
    assert not sent(state.tick(0.5), AddProcess)
    out = state.handle("b", LeaveLoader(STATS), 1.0) + state.tick(1.3) + state.tick(1.6)
    assert sorted(sent(out, DrainWorker)) == ["w2", "w3"], "the others stay for the program that is there"
    assert not sent(out, RenewWorker)
    state.validate()


def test_a_slot_whose_processes_died_has_one_for_each_program_again() -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0")
    connect(state, "a", ONE)
    begin(state, "a")
    connect(state, "b", TWO)
    begin(state, "b")
    register(state, "w1", now=0.2)
    state.peer_gone("w0", 1.0)
    state.peer_gone("w1", 1.0)
    register(state, "w2", now=1.1)
    register(state, "w3", now=1.2)
    assert served(state, "w2") | served(state, "w3") == {"s-a", "s-b"}
    assert served(state, "w2") != served(state, "w3")


def test_a_program_that_loads_another_version_of_a_module_gets_fresh_processes() -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0")
    connect(state, "a", ONE)
    begin(state, "a")
    state.handle("a", CloseSession("s-a", 8, STATS), 1.0)
    reloaded = Program("/one", ["/one", ""], {"data": "2"})
    state.handle("a", ProvidePipeline("reloaded", reloaded, b"", b""), 1.0)
    assert sent(begin(state, "a", 1.0, pipeline_id="reloaded"), RenewWorker) == ["w0"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_loader_that_needs_what_its_processes_hold_is_told_when_they_are_gone(is_killed: bool) -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0", "slot")
    register(state, "rank", "")  # of an MPI world
    connect(state, "a", ONE)
    begin(state, "a")
    connect(state, "b", ONE)
    assert sent(state.handle("b", EndProcesses(), 1.0), ProcessesEnded) == ["b"], "none has made a step of it"
    state.handle("a", CloseSession("s-a", 0, STATS), 1.0)
    out = state.handle("a", EndProcesses(), 1.0)
    assert (sent(out, RenewWorker), sent(out, ProcessesEnded)) == (["w0"], [])
    state.handle("w0", Draining([], renews=True), 1.0)
    # One that leaves says so while it still holds something; that it has ended its supervisor shows.
    out = state.peer_gone("w0", 1.1) if is_killed else state.handle("w0", LeaveWorker(), 1.1)
    assert sent(out, ProcessesEnded) == ["a"] * is_killed
    out = register(state, "w1", "slot", 1.2)
    assert sent(out, ProcessesEnded) == ["a"] * (not is_killed)
    state.tables.validate()


def test_after_a_restart_of_the_dispatcher_a_process_says_which_program_it_serves() -> None:
    state = DispatcherState(2, 0.0, ["w0"])
    held = [HeldLease((1 << 32) + 1, "s-a", 0, 1)]
    state.handle("w0", RegisterWorker("host", 1, "", held, slot="slot", program=ONE), 0.0)
    connect(state, "b", TWO)
    connect(state, "a", ONE)
    out = begin(state, "b")
    assert not sent(out, GrantLease)
    assert sent(out, AddProcess) == ["w0"], "the program that it serves is there"
    begin(state, "a")
    assert served(state, "w0") == {"s-a"}


def test_a_process_that_does_not_come_free_gets_a_fresh_one_beside_it() -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0")
    connect(state, "a", ONE)
    begin(state, "a")
    state.handle("a", LeaveLoader(STATS), 1.0)
    connect(state, "b", TWO, now=1.0)
    assert sent(begin(state, "b", 1.0), RenewWorker) == ["w0"]
    late = 1.0 + placement.ROOM_S
    out = state.handle("w0", WorkerHeartbeat([]), late)  # it is at a long sample, and alive
    assert sent(out + state.tick(late), AddProcess) == ["w0"]


@pytest.mark.parametrize("slot", ["", "slot"])
def test_a_data_worker_that_leaves_is_not_renewed(slot: str) -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0", slot)
    connect(state, "a", ONE)
    begin(state, "a")
    state.drain("w0", 0.5)
    connect(state, "b", TWO, now=1.0)
    out = begin(state, "b", 1.0)
    assert not sent(out, RenewWorker)
    assert not sent(out, AddProcess)


def test_a_process_that_nobody_can_fork_anew_serves_its_first_program_and_does_not_count_for_others() -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0", "")
    connect(state, "a", ONE)
    begin(state, "a")
    connect(state, "b", TWO)
    out = begin(state, "b") + state.tick(0.3)
    assert not sent(out, GrantLease)
    assert not sent(out, RenewWorker)
    assert state.tables.loaders["a"].announced_workers == 1
    assert state.tables.loaders["b"].announced_workers == 0, "so it loads its own data"


def test_jobs_that_name_their_pipeline_share_although_they_start_in_different_directories() -> None:
    state = DispatcherState(1, 0.0)
    register(state, "w0")
    stream = Sharing("key", "lossless", 8)
    connect(state, "a", ONE)
    begin(state, "a", sharing=stream)
    connect(state, "b", TWO)
    out = begin(state, "b", sharing=stream)
    grants = [one.message for one in out if isinstance(one, Send) and isinstance(one.message, GrantLease)]
    assert {grant.session.pipeline_id for grant in grants} == {"d-a"}, "made from the pipeline that is there"
    assert not sent(out, AddProcess)
