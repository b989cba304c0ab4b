"""The dispatcher's decisions, without sockets, clocks or disks: leases, fencing, loss, recovery, a fuzzed ledger."""

from __future__ import annotations

import array
import random
from collections import Counter

import msgspec
import pytest

from hetstream.mpi_dataworkers.dispatcher import tables
from hetstream.mpi_dataworkers.dispatcher.events import LoaderLost, PipelineRemembered, SessionClosed
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.dispatcher.tables import (
    ForgetPipeline,
    ForgetWorker,
    Instruction,
    Lease,
    LeaseStatus,
    RememberPipeline,
    RememberStats,
    RememberWorker,
    ReportEvent,
    Send,
)
from hetstream.mpi_dataworkers.order.reorder import ReorderBuffer
from hetstream.mpi_dataworkers.wire.messages import (
    HEARTBEAT_S,
    CloseSession,
    Draining,
    DrainWorker,
    DropPipeline,
    DropSession,
    ExtendSession,
    FailLease,
    FetchPipeline,
    FinishLease,
    GrantLease,
    HeldLease,
    LeaseRevoked,
    LeaveLoader,
    LeaveWorker,
    ListedOrder,
    LoaderHeartbeat,
    LoaderRegistered,
    LoaderStats,
    Membership,
    Message,
    NeedPipeline,
    Notice,
    OpenSession,
    PlannedOrder,
    Program,
    ProvidePipeline,
    Refused,
    RegisterLoader,
    RegisterWorker,
    ReportProgress,
    RevokeLease,
    SessionSpec,
    StepList,
    TrimLease,
    UnknownPeer,
    WorkerHeartbeat,
)

LOADER = "loader"
STATS = LoaderStats()


def planned(steps: int) -> PlannedOrder:
    return PlannedOrder(steps, 1, 1, 0, False, False, 0)


def session(steps: int = 100, session_id: str = "s") -> SessionSpec:
    return SessionSpec(session_id, "d", 0, 0, planned(steps), ["tcp://loader:1"])


def loader(rank: int = 0, **description: str) -> RegisterLoader:
    whole = {"dataset": "A", **description}
    return RegisterLoader("job", 0, rank, 2, "host", 100 + rank, "d", whole, place="x", divides=True)


def sent(instructions: list[Instruction], kind: type[Message]) -> list[tuple[str, Message]]:
    return [(one.peer, one.message) for one in instructions if isinstance(one, Send) and isinstance(one.message, kind)]


def ready_state(steps: int = 100, window: int = 8, workers: int = 1, now: float = 0.0) -> DispatcherState:
    """A state with one loader in one pass; workers w0, w1, ... hold their first leases."""
    state = DispatcherState(1, now)
    state.handle(LOADER, loader(), now)
    for number in range(workers):
        state.handle(f"w{number}", RegisterWorker("host", number, "", []), now)
    state.handle(LOADER, OpenSession(session(steps), steps, 0, [], window, None), now)
    state.validate()
    return state


def leased_steps(state: DispatcherState) -> list[int]:
    return sorted(step for lease in state.tables.leases.values() for step in range(lease.first, lease.stop))


def test_leases_stay_inside_the_window_and_follow_consumption() -> None:
    state = ready_state(window=4, workers=8)
    assert leased_steps(state) == [0, 1, 2, 3]
    state.handle(LOADER, ReportProgress("s", 0, [(0, 4)], 4, STATS), 1.0)
    assert max(leased_steps(state)) == 3, "received is not consumed: the window has not moved"
    state.handle(LOADER, ReportProgress("s", 2, [(2, 4)], 4, STATS), 1.0)
    assert max(leased_steps(state)) == 5
    state.validate()


def test_a_window_is_spread_before_anyone_gets_a_second_lease() -> None:
    state = ready_state(window=3, workers=3)
    assert [len(worker.tokens) for worker in state.tables.workers.values()] == [1, 1, 1]


def test_a_lease_is_settled_when_the_loader_has_its_steps_not_when_they_were_sent() -> None:
    state = ready_state(steps=1)
    (lease,) = state.tables.leases.values()
    state.handle("w0", FinishLease(lease.token, 0.1), 1.0)
    assert state.tables.leases[lease.token].status is LeaseStatus.SENT
    state.handle(LOADER, ReportProgress("s", 0, [(0, 1)], 8, STATS), 1.1)
    assert not state.tables.leases


@pytest.mark.shows("work of a dead data worker times out, and the order stays")
def test_steps_that_were_sent_and_never_came_are_leased_again_with_a_new_token() -> None:
    state = ready_state(steps=1, workers=2)
    (lease,) = state.tables.leases.values()
    state.handle(lease.worker, FinishLease(lease.token, 0.1), 0.0)
    other = "w1" if lease.worker == "w0" else "w0"
    for now in (2.0, 4.0):
        for worker in ("w0", "w1"):
            state.handle(worker, WorkerHeartbeat([]), now)
        state.handle(LOADER, ReportProgress("s", 0, [], 8, STATS), now)
    out = state.tick(tables.ARRIVAL_TIMEOUT_S + 0.1)
    assert sent(out, RevokeLease)[0][1] == RevokeLease(lease.token, "s", True, "sent 5.1 s ago and not received")
    assert sent(out, LeaseRevoked) == [(LOADER, LeaseRevoked("s", lease.token))]
    assert sent(out, Membership) == [(LOADER, Membership(1))], "that worker does not reach this loader"
    ((peer, grant),) = sent(out, GrantLease)
    assert peer == other
    assert isinstance(grant, GrantLease)
    assert grant.token > lease.token
    state.validate()


def test_a_data_worker_that_reaches_nobody_is_told_once_for_all_its_leases() -> None:
    state = ready_state(steps=8, workers=1)
    while tokens := [*state.tables.workers["w0"].tokens]:
        for token in tokens:
            state.handle("w0", FinishLease(token, 0.1), 0.0)
    assert len(state.tables.leases) > 1
    for now in (2.0, 4.0):
        state.handle("w0", WorkerHeartbeat([]), now)
        state.handle(LOADER, ReportProgress("s", 0, [], 8, STATS), now)
    state.tick(tables.ARRIVAL_TIMEOUT_S + 0.1)
    assert [event.happened for event in state.tables.story if "does not reach" in event.happened] == [
        "does not reach rank=0, next try in 10 s"
    ]


def test_a_worker_whose_sample_holds_the_gil_is_not_lost_before_the_sample_hangs() -> None:
    state = ready_state(steps=2, workers=2)
    held = {token for token, lease in state.tables.leases.items() if lease.worker == "w0"}
    state.handle("w1", WorkerHeartbeat([*state.tables.workers["w1"].tokens]), 250.0)
    state.handle(LOADER, LoaderHeartbeat(STATS), 250.0)
    assert not sent(state.tick(250.0), LeaseRevoked)
    assert "w0" in state.tables.workers
    assert state.tables.workers["w0"].tokens == held
    state.handle(LOADER, LoaderHeartbeat(STATS), 304.0)
    state.tick(tables.WORKER_TIMEOUT_S + 300.1)
    assert "w0" not in state.tables.workers, "its supervisor would have replaced it"


@pytest.mark.shows("what a lost data worker had not delivered is leased anew; what had arrived is not made again")
@pytest.mark.parametrize("how", ["gone", "silent", "left", "replaced", "failed"])
def test_a_lost_workers_steps_go_to_the_others(how: str) -> None:
    state = ready_state(steps=2, workers=2)
    victims = [lease.token for lease in state.tables.leases.values() if lease.worker == "w0"]
    assert victims
    if how == "gone":
        out = state.peer_gone("w0", 3.0)
    elif how == "silent":
        state.handle("w1", WorkerHeartbeat([*state.tables.workers["w1"].tokens]), 300.0)
        state.handle(LOADER, LoaderHeartbeat(STATS), 300.0)
        out = state.tick(tables.WORKER_TIMEOUT_S + 300.1)
    elif how == "left":
        out = state.handle("w0", LeaveWorker(), 1.0)
    elif how == "replaced":
        out = state.handle("w2", RegisterWorker("host", 9, "w0", []), 1.0)
    else:
        out = state.handle("w0", FailLease(victims[0], "no route"), 1.0)
    assert {message.token for _, message in sent(out, LeaseRevoked) if isinstance(message, LeaseRevoked)} == set(
        victims
    )
    assert leased_steps(state) == [0, 1]
    assert all(lease.worker != "w0" for lease in state.tables.leases.values())
    state.validate()


def test_a_worker_that_was_stopped_and_continues_is_fenced() -> None:
    state = ready_state(steps=4, workers=2)
    mine = next(lease for lease in state.tables.leases.values() if lease.worker == "w0")
    state.peer_gone("w0", 4.5)  # libzmq was no more told that it is alive
    assert "w0" not in state.tables.workers
    assert state.handle("w0", FinishLease(mine.token, 1.0), 10.0) == [Send("w0", UnknownPeer())]
    held = HeldLease(mine.token, "s", mine.first, mine.stop)
    out = state.handle("w0", RegisterWorker("host", 0, "", [held]), 10.1)
    assert sent(out, RevokeLease) == [("w0", RevokeLease(mine.token, "s", False, "leased to another data worker"))]
    state.validate()


def test_a_report_of_another_workers_lease_changes_nothing() -> None:
    state = ready_state(steps=2, workers=2)
    mine = next(lease for lease in state.tables.leases.values() if lease.worker == "w0")
    state.handle("w1", FinishLease(mine.token, 1.0), 1.0)
    assert state.tables.leases[mine.token].status is LeaseStatus.ACTIVE


def test_lease_size_follows_the_measured_time_of_a_step() -> None:
    state = ready_state(steps=4000, window=1024)
    for _ in range(3):
        lease = next(one for one in state.tables.leases.values() if one.status is LeaseStatus.ACTIVE)
        state.handle("w0", FinishLease(lease.token, 0.0001 * (lease.stop - lease.first)), 1.0)
    sizes = [lease.stop - lease.first for lease in state.tables.leases.values() if lease.status is LeaseStatus.ACTIVE]
    assert max(sizes) == tables.MAX_LEASE_STEPS


def test_steps_that_wait_for_the_network_are_leased_in_small_lots_and_do_not_keep_a_data_worker_busy() -> None:
    state = ready_state(steps=4000, window=1024)
    for _ in range(3):
        lease = next(one for one in state.tables.leases.values() if one.status is LeaseStatus.ACTIVE)
        num_steps = lease.stop - lease.first
        state.handle("w0", FinishLease(lease.token, 0.0001 * num_steps, waited_s=0.0099 * num_steps), 1.0)
    sizes = [lease.stop - lease.first for lease in state.tables.leases.values() if lease.status is LeaseStatus.ACTIVE]
    assert min(sizes) == tables.TARGET_LEASE_S / 0.01
    work = state.tables.workers["w0"].work
    assert work.busy_s == pytest.approx(0.0001 * work.steps)


def test_listed_order_is_leased_as_it_comes_and_carries_its_indices() -> None:
    state = DispatcherState(1, 0.0)
    state.handle(LOADER, loader(), 0.0)
    state.handle("w0", RegisterWorker("host", 0, "", []), 0.0)
    listed = SessionSpec("s", "d", 0, 0, ListedOrder(True), ["tcp://loader:1"])
    assert not sent(state.handle(LOADER, OpenSession(listed, -1, 0, [], 8, None), 0.0), GrantLease)
    indices = [value.to_bytes(8, "little") for value in (7, 9, 4)]
    steps = StepList(0, (2).to_bytes(4, "little") + (1).to_bytes(4, "little"), b"".join(indices))
    out = state.handle(LOADER, ExtendSession("s", steps, 2), 0.0)
    grants = [message for _, message in sent(out, GrantLease) if isinstance(message, GrantLease)]
    assert [grant.steps.indices for grant in grants if grant.steps] == [b"".join(indices[:2]), indices[2]]
    state.handle(LOADER, ReportProgress("s", 2, [], 8, STATS), 1.0)
    assert state.tables.sessions["s"].lists == {}, "steps that were consumed are forgotten"
    state.validate()


def test_pickled_pipeline_is_sent_once_and_fetched_when_it_comes() -> None:
    state = DispatcherState(1, 0.0)
    state.handle("w0", RegisterWorker("host", 0, "", []), 0.0)
    assert sent(state.handle(LOADER, loader(0), 0.0), LoaderRegistered) == [(LOADER, LoaderRegistered(True, 1, "d"))]
    assert state.handle("w0", FetchPipeline("d"), 0.0) == []
    provided = ProvidePipeline("d", Program("/", []), b"", b"blob")
    out = state.handle(LOADER, provided, 0.0)
    remembered = ReportEvent(PipelineRemembered(pipeline_id="d", num_bytes=4))
    assert out == [RememberPipeline(provided), remembered, Send("w0", provided)]
    assert sent(state.handle("other", loader(1), 0.0), LoaderRegistered) == [("other", LoaderRegistered(False, 1, "d"))]


def test_a_pickled_pipeline_that_was_lost_is_asked_for_once_for_each_data_worker_that_wants_it() -> None:
    state = ready_state()
    assert state.handle("w0", FetchPipeline("d"), 0.0) == [Send(LOADER, NeedPipeline("d"))]
    provided = ProvidePipeline("d", Program("/", []), b"", b"blob")
    assert sent(state.handle(LOADER, provided, 0.0), ProvidePipeline) == [("w0", provided)]
    assert state.handle(LOADER, provided, 0.0) == [], "it is journaled once, and was asked for once"
    assert state.handle("w0", FetchPipeline("d"), 0.0) == [Send("w0", provided)]


@pytest.mark.shows("one name with another policy or pipeline is refused, and the difference is named")
def test_one_job_name_with_two_pipelines_is_refused_and_names_the_difference() -> None:
    state = DispatcherState(1, 0.0)
    state.handle(LOADER, loader(0), 0.0)
    ((_, message),) = sent(state.handle("other", loader(1, dataset="B"), 0.0), Refused)
    assert isinstance(message, Refused)
    assert message.code == "JobNameConflict"
    assert "dataset: A there, B here" in message.text
    assert "other" not in state.tables.loaders


def test_a_loader_of_rank_0_alone_shifts_no_other() -> None:
    state = DispatcherState(1, 0.0)
    alone = msgspec.structs.replace(loader(0, dataset="V"), ordinal=1, place="y", world_size=1, divides=False)
    first, last = (msgspec.structs.replace(loader(0), ordinal=n, occurrence=n // 2, place=f"{n}") for n in (0, 2))
    for peer, one in (("train", first), ("validation", alone), ("test", last)):
        assert sent(state.handle(peer, one, 0.0), LoaderRegistered)
    for number, one in enumerate((first, last)):
        theirs = msgspec.structs.replace(one, ordinal=number, rank=1, pid=101)
        assert sent(state.handle(f"rank 1, {number}", theirs, 0.0), LoaderRegistered)
    assert len(state.tables.loaders) == 5


def test_the_same_lines_of_two_ranks_with_other_data_are_refused_only_where_they_divide_it() -> None:
    state = DispatcherState(1, 0.0)
    state.handle(LOADER, loader(0), 0.0)
    other = msgspec.structs.replace(loader(1, length="41"), made_at="train.py:7")
    ((_, message),) = sent(state.handle("other", other, 0.0), Refused)
    assert isinstance(message, Refused)
    assert "at train.py:7 (length: None there, 41 here)" in message.text
    assert "rank=0, world_size=1" in message.text
    for harmless in ({"divides": False}, {"place": "z"}, {"job_name": "another"}, {"world_size": 4}):
        state = DispatcherState(1, 0.0)
        state.handle(LOADER, loader(0), 0.0)
        assert not sent(state.handle("other", msgspec.structs.replace(other, **harmless), 0.0), Refused), harmless


def test_two_programs_that_are_one_rank_of_one_job_are_refused_and_a_restart_is_none() -> None:
    state = DispatcherState(1, 0.0)
    state.handle(LOADER, loader(0), 0.0)
    second = msgspec.structs.replace(loader(0, dataset="V"), ordinal=1, place="y")
    state.handle("validation", second, 0.0)
    stranger = msgspec.structs.replace(loader(0, dataset="B"), pid=7, place="elsewhere")
    ((_, message),) = sent(state.handle("stranger", stranger, 0.0), Refused)
    assert isinstance(message, Refused)
    assert message.code == "JobNameConflict"
    out = state.handle("started again", msgspec.structs.replace(second, ordinal=0, pid=8), 0.0)
    assert sent(out, Refused) == [("validation", sent(out, Refused)[0][1])], "the older one's is superseded"
    assert sent(out, LoaderRegistered)


def test_a_loader_whose_share_nobody_completes_is_told_once() -> None:
    state = DispatcherState(1, 0.0)
    lonely = msgspec.structs.replace(loader(0), made_at="train.py:9")
    state.handle(LOADER, lonely, 0.0)
    state.handle("other", msgspec.structs.replace(loader(1, dataset="T"), place="y"), 0.0)
    for second in range(0, 200, 10):
        taken = LoaderStats(steps=5 if second >= 100 else 0)
        out = state.handle(LOADER, LoaderHeartbeat(taken), float(second)) + state.tick(float(second))
        told = [message.text for _, message in sent(out, Notice) if isinstance(message, Notice)]
        assert len(told) == (second == 100), second
        assert all(
            "made at train.py:9 reads rank 0's share of its data, of 2; rank 1 has no such" in one for one in told
        )


def test_a_loader_that_another_rank_had_and_closed_is_not_alone() -> None:
    for incarnation, closed in ((1, True), (2, False)):
        state = DispatcherState(incarnation, 0.0)
        state.handle(LOADER, loader(0), 0.0)
        if closed:
            state.handle("other", loader(1), 0.0)
            state.handle("other", LeaveLoader(STATS), 1.0)
        for second in range(0, 100, 10):
            state.handle(LOADER, LoaderHeartbeat(LoaderStats(steps=5)), float(second))
            assert not sent(state.tick(float(second)), Notice)


def test_a_rank_started_twice_supersedes_the_older_process() -> None:
    state = ready_state()
    out = state.handle("newer", loader(0), 1.0)
    ((peer, message),) = sent(out, Refused)
    assert (peer, isinstance(message, Refused) and message.code) == (LOADER, "Superseded")
    assert not state.tables.sessions
    assert sent(out, DropSession) == [("w0", DropSession("s"))]


def test_a_restarted_dispatcher_adopts_leases_and_waits_before_leasing_their_steps_again() -> None:
    state = DispatcherState(2, 100.0, {"w0", "w1"})
    assert state.handle(LOADER, ReportProgress("s", 3, [], 8, STATS), 100.1) == [Send(LOADER, UnknownPeer())]
    held = HeldLease((1 << 32) + 5, "s", 4, 6)
    state.handle("w0", RegisterWorker("host", 0, "", [held]), 100.2)
    state.handle(LOADER, loader(), 100.2)
    out = state.handle(LOADER, OpenSession(session(100), 100, 3, [(6, 7)], 8, None), 100.2)
    assert not sent(out, GrantLease)
    state.validate()
    assert state.tables.sessions["s"].requeued == [3]
    out = state.tick(100.1 + tables.RECOVERY_GRACE_S)
    assert ForgetWorker("w1") in out, "it did not come back"
    grants = [message for _, message in sent(out, GrantLease) if isinstance(message, GrantLease)]
    assert grants[0].first_step == 3, "the step that the trainer waits for comes first"
    assert all(grant.token >> 32 == 2 for grant in grants)
    state.validate()


def test_a_restarted_dispatcher_leases_as_soon_as_all_workers_of_before_are_back() -> None:
    state = DispatcherState(2, 100.0, {"w0", "w1", "dead"})
    state.handle(LOADER, loader(), 100.0)
    state.handle(LOADER, OpenSession(session(100), 100, 3, [], 8, None), 100.0)
    assert RememberWorker("w0") in state.handle("w0", RegisterWorker("host", 0, "", []), 100.01)
    assert not state.tables.leases
    state.handle("w2", RegisterWorker("host", 2, "dead", []), 100.01)
    held = HeldLease((1 << 32) + 5, "s", 3, 5)
    out = state.handle("w1", RegisterWorker("host", 1, "", [held]), 100.02)
    assert not sent(out, RevokeLease)
    assert leased_steps(state)[:4] == [3, 4, 5, 6]
    state.validate()


def test_a_lease_is_as_long_as_its_own_worker_is_fast() -> None:
    state = ready_state(steps=10_000, window=2000, workers=2)
    for number in range(40):
        for worker, step_s in (("w0", 0.001), ("w1", 0.01)):
            token = min(state.tables.workers[worker].tokens)
            lease = state.tables.leases[token]
            state.handle(worker, FinishLease(token, step_s * (lease.stop - lease.first)), 0.01 * number)
    sizes = {
        worker: {lease.stop - lease.first for lease in state.tables.leases.values() if lease.worker == worker}
        for worker in ("w0", "w1")
    }
    assert max(sizes["w0"]) == 20
    assert max(sizes["w1"]) <= 2


def busy_and_idle(idle_step_s: float = 0.001) -> tuple[DispatcherState, Lease]:
    """w0 was fast, got a lease of 20 steps, and became slow; w1 has nothing to do."""
    state = ready_state(steps=1, workers=2)
    state.handle(LOADER, CloseSession("s", 1, STATS), 0.0)
    for worker in ("w0", "w1"):
        state._rooms.begin_drain(worker, "a test wants it")
    state.handle(LOADER, OpenSession(session(20), 20, 0, [], 64, None), 0.0)
    record = state.tables.sessions["s"]
    record.frontier = 20
    for worker, step_s in (("w0", 0.001), ("w1", idle_step_s)):
        state.tables.workers[worker].draining = False
        state.tables.note_load(worker)
        state.tables.workers[worker].step_s["s"] = step_s
    state.leasing.lifecycle.grant("w0", record, range(20), 1.0)
    return state, next(iter(state.tables.leases.values()))


def test_an_idle_worker_takes_the_rest_of_a_slow_workers_lease() -> None:
    state, lease = busy_and_idle()
    assert not sent(state.tick(1.1), TrimLease), "it may only be that the loader has not reported"
    out = state.handle(LOADER, ReportProgress("s", 2, [], 64, STATS), 2.0)
    ((victim, trim),) = sent(out, TrimLease)
    ((thief, grant),) = sent(out, GrantLease)
    assert (victim, thief) == ("w0", "w1")
    assert isinstance(trim, TrimLease)
    assert isinstance(grant, GrantLease)
    assert (trim.token, trim.stop_step, grant.first_step, grant.stop_step) == (lease.token, 4, 4, 20), (
        "it is thought to be at step 3"
    )
    assert not sent(out, LeaseRevoked), "what the slow worker made of it is as good as any"
    state.validate()
    assert not sent(state.tick(2.2), TrimLease), "nothing is taken back and forth"
    state.handle("w0", FinishLease(lease.token, 2.0), 2.3)
    assert state.tables.workers["w0"].step_s["s"] == 0.001, "a lease that was cut tells nothing of the speed"


def test_a_slow_or_unmeasured_worker_does_not_take_what_is_done_sooner_where_it_is() -> None:
    state, _ = busy_and_idle(idle_step_s=60.0)
    assert not sent(state.handle(LOADER, ReportProgress("s", 18, [], 64, STATS), 2.0), TrimLease)
    state, _ = busy_and_idle()
    del state.tables.workers["w1"].step_s["s"]
    assert not sent(state.handle(LOADER, ReportProgress("s", 17, [], 64, STATS), 1.3), TrimLease)


def test_a_lease_that_waits_behind_a_long_step_goes_whole_to_an_idle_worker() -> None:
    state = ready_state(steps=2, workers=1)
    first, second = sorted(state.tables.leases.values(), key=lambda lease: lease.first)
    out = state.handle("w1", RegisterWorker("host", 1, "", []), 3.0)
    assert sent(out, TrimLease) == [("w0", TrimLease(second.token, second.first))]
    assert second.token not in state.tables.leases
    assert first.token in state.tables.leases
    assert leased_steps(state) == [0, 1]
    state.validate()


def test_a_drained_worker_loses_nothing_that_it_made() -> None:
    state = ready_state(steps=400, workers=1, window=400)
    for _ in range(6):
        token = min(state.tables.workers["w0"].tokens)
        lease = state.tables.leases[token]
        state.handle("w0", FinishLease(token, 0.002 * (lease.stop - lease.first)), 0.1)
    at, waiting = (state.tables.leases[token] for token in sorted(state.tables.workers["w0"].tokens))
    assert at.stop - at.first > 2
    assert sent(state.drain("w0", 1.0), Message) == [("w0", DrainWorker())]
    assert state.drain("w0", 1.0) == []
    stop = at.first + 2
    out = state.handle("w0", Draining([(at.token, stop)]), 1.1)
    assert not sent(out, GrantLease)
    assert not sent(out, LeaseRevoked)
    state.validate()
    assert state.tables.sessions["s"].requeued == list(range(stop, waiting.stop))
    state.handle("w1", RegisterWorker("host", 1, "", []), 1.1)
    state.handle("w0", FinishLease(at.token, 0.004), 1.2)
    out = state.handle("w0", LeaveWorker(), 1.2)
    assert not sent(out, LeaseRevoked), "what it sent is on its way"
    assert at.token in state.tables.leases
    for now in (2.0, 4.0, 6.0, 8.0):
        state.handle("w1", WorkerHeartbeat([*state.tables.workers["w1"].tokens]), now)
        state.handle(LOADER, ReportProgress("s", 0, [], 400, STATS), now)
    out = state.tick(8.0)
    revoked = [message.token for _, message in sent(out, LeaseRevoked) if isinstance(message, LeaseRevoked)]
    assert at.token in revoked, "it never came"
    state.validate()


def test_the_window_never_stalls_on_steps_that_the_loader_made_itself() -> None:
    state = DispatcherState(1, 0.0)
    state.handle(LOADER, loader(), 0.0)
    state.handle(LOADER, OpenSession(session(10), 10, 0, [], 4, None), 0.0)
    state.handle(LOADER, ReportProgress("s", 5, [], 4, STATS), 1.0)
    out = state.handle("w0", RegisterWorker("host", 0, "", []), 1.0)
    assert min(m.first_step for _, m in sent(out, GrantLease) if isinstance(m, GrantLease)) == 5


def test_two_passes_share_the_workers_by_need() -> None:
    state = ready_state(steps=100, window=2, workers=1)
    state.handle("l1", loader(1), 0.0)
    state.handle("l1", OpenSession(session(100, "t"), 100, 0, [], 8, None), 0.0)
    lease = next(iter(state.tables.leases.values()))
    out = state.handle("w0", FinishLease(lease.token, 0.001), 0.1)
    grants = [message.session.session_id for _, message in sent(out, GrantLease) if isinstance(message, GrantLease)]
    assert grants == ["t"]


@pytest.mark.shows("each element comes once under random schedules of faults")
def test_ledger_is_exact_under_a_random_schedule() -> None:
    wrong = {}
    for seed in range(200):
        try:
            follow_random_schedule(seed)
        except AssertionError as error:
            wrong[seed] = str(error)
    assert not wrong


def follow_random_schedule(seed: int) -> None:
    """Workers join, die, drain, stop, go on and steal, messages and batches get lost, the dispatcher restarts, and the
    loader makes steps itself. Every second order is listed: of what is consumed, the dispatcher has no indices."""
    chance, is_listed = random.Random(seed), bool(seed % 2)
    steps, window, now = chance.randint(1, 60), chance.randint(1, 12), 0.0
    state, incarnation = DispatcherState(1, now), 1
    buffer, ledger = ReorderBuffer(0), Counter[int]()
    mailbox: dict[str, list[GrantLease]] = {}  # living workers and the leases they hold
    frozen: dict[str, list[GrantLease]] = {}  # stopped workers
    names = iter(range(10_000))
    journal: set[str] = set()  # workers that a restarted dispatcher waits for

    def deliver(instructions: list[Instruction]) -> None:
        for one in instructions:
            if isinstance(one, RememberWorker):
                journal.add(one.peer)
            elif isinstance(one, ForgetWorker):
                journal.discard(one.peer)
            if not isinstance(one, Send):
                continue
            message = one.message
            if isinstance(message, TrimLease) and one.peer in mailbox and chance.random() > 0.05:
                trimmed = [
                    msgspec.structs.replace(lease, stop_step=min(lease.stop_step, message.stop_step))
                    if lease.token == message.token
                    else lease
                    for lease in mailbox[one.peer]
                ]
                mailbox[one.peer] = [lease for lease in trimmed if lease.stop_step > lease.first_step]
            elif isinstance(message, GrantLease) and one.peer in mailbox and chance.random() > 0.05:
                mailbox[one.peer].append(message)
            elif isinstance(message, RevokeLease) and one.peer in mailbox:
                mailbox[one.peer] = [lease for lease in mailbox[one.peer] if lease.token != message.token]
            elif isinstance(message, LeaseRevoked):
                buffer.revoke(message.token)
            elif isinstance(message, UnknownPeer):
                say_hello(one.peer)

    def say_hello(peer: str) -> None:
        if peer == LOADER:
            deliver(state.handle(LOADER, loader(), now))
            first, spec, listed = buffer.position, session(steps), None
            if is_listed:
                spec = msgspec.structs.replace(spec, order=ListedOrder(batched=True))
                indices = array.array("q", range(first, steps))
                listed = StepList(first, array.array("i", [1] * len(indices)).tobytes(), indices.tobytes())
            opening = OpenSession(spec, steps, first, buffer.received(), window, listed)
            deliver(state.handle(LOADER, opening, now))
        elif peer in mailbox:
            held = [HeldLease(one.token, "s", one.first_step, one.stop_step) for one in mailbox[peer]]
            deliver(state.handle(peer, RegisterWorker("host", 0, "", held), now))

    def work(peer: str, stop: int | None = None) -> None:
        lease = mailbox[peer].pop(0)
        for step in range(lease.first_step, stop or lease.stop_step):
            arrives = chance.random() > 0.1
            if arrives and buffer.wants(step, lease.token):
                buffer.put(step, step)
        deliver(state.handle(peer, FinishLease(lease.token, chance.choice((0.001, 0.1, 2.0))), now))

    def drain(peer: str) -> None:
        if chance.random() < 0.5:
            deliver(state.drain(peer, now))
        if mailbox[peer]:
            lease = mailbox[peer][0]
            stop = chance.randint(lease.first_step + 1, lease.stop_step)
            deliver(state.handle(peer, Draining([(lease.token, stop)]), now))
            if mailbox[peer]:  # else it was told to register again, and lost the lease
                work(peer, stop)
        deliver(state.handle(peer, LeaveWorker(), now))
        del mailbox[peer]

    say_hello(LOADER)
    for _ in range(3000):
        if buffer.position == steps:
            break
        now += chance.choice((0.01, 0.1, 0.5))
        event = chance.random()
        living = sorted(mailbox)
        if event < 0.05 and len(living) < 6:
            name = f"w{next(names)}"
            mailbox[name] = []
            say_hello(name)
        elif event < 0.08 and living:
            mailbox.pop(chance.choice(living))
        elif event < 0.10 and living:
            name = chance.choice(living)
            frozen[name] = mailbox.pop(name)
        elif event < 0.12 and frozen:
            name = chance.choice(sorted(frozen))
            mailbox[name] = frozen.pop(name)
        elif event < 0.13:
            incarnation += 1
            state = DispatcherState(incarnation, now, set(journal))
        elif event < 0.16 and living:
            drain(chance.choice(living))
        elif event < 0.5 and living:
            name = chance.choice(living)
            if mailbox[name]:
                work(name)
        elif event < 0.7 and buffer.has_next():
            ledger[buffer.pop()] += 1
        elif event > 0.97:
            for _ in range(min(chance.randint(1, window), steps - buffer.position)):
                if not buffer.has_next():
                    buffer.put(buffer.position, buffer.position)
                ledger[buffer.pop()] += 1
        for name in sorted(mailbox):
            deliver(state.handle(name, WorkerHeartbeat([one.token for one in mailbox[name]]), now))
        deliver(state.handle(LOADER, ReportProgress("s", buffer.position, buffer.received(), window, STATS), now))
        deliver(state.tick(now))
        state.validate()
        assert max([lease.stop for lease in state.tables.leases.values()], default=0) <= buffer.position + window
    assert ledger == Counter(range(steps)), f"not finished: {buffer.position} of {steps}\n" + "\n".join(
        event.render() for event in state.tables.story
    )
    state.handle(LOADER, CloseSession("s", steps, STATS), now)
    assert not state.tables.leases


def test_a_burst_of_events_is_returned_whole() -> None:
    state = DispatcherState(1, 0.0)
    state.handle(LOADER, loader(), 0.0)
    names = [f"s{number}" for number in range(1000)]
    for name in names:
        state.handle(LOADER, OpenSession(session(100, name), 100, 0, [], 8, None), 0.0)
    out = state.peer_gone(LOADER, 1.0)
    events = [instruction.event for instruction in out if isinstance(instruction, ReportEvent)]
    assert [event.session for event in events if isinstance(event, SessionClosed)] == names
    assert [type(event) for event in events[:2]] == [LoaderLost, SessionClosed]


def test_a_grant_that_never_reached_its_worker_is_given_again() -> None:
    state = ready_state(steps=1)
    (lost,) = state.tables.leases.values()
    assert not sent(state.handle("w0", WorkerHeartbeat([]), 0.5), RevokeLease), "it may still be on its way"
    out = state.handle("w0", WorkerHeartbeat([]), 2 * HEARTBEAT_S + 0.1)
    assert sent(out, LeaseRevoked) == [(LOADER, LeaseRevoked("s", lost.token))]
    assert leased_steps(state) == [0]
    state.validate()


def test_a_worker_that_reports_a_revoked_lease_is_told() -> None:
    state = ready_state(steps=1)
    out = state.handle("w0", WorkerHeartbeat([*state.tables.workers["w0"].tokens, 99]), 0.5)
    assert sent(out, RevokeLease) == [("w0", RevokeLease(99, "", False, "leased to another data worker"))]


def test_a_closed_connection_frees_what_its_peer_had() -> None:
    state = ready_state(steps=2, workers=2)
    out = state.peer_gone("w0", 1.0)
    assert leased_steps(state) == [0, 1]
    assert all(lease.worker == "w1" for lease in state.tables.leases.values())
    assert sent(out, Membership) == [(LOADER, Membership(1))]
    out = state.peer_gone(LOADER, 1.0)
    assert RememberStats(loader(), STATS) in out
    assert (state.tables.sessions, state.tables.leases) == ({}, {})
    assert state.peer_gone("nobody", 1.0) == []


def test_a_loader_that_was_held_up_does_not_blame_the_connections() -> None:
    state = ready_state(steps=1)
    (lease,) = state.tables.leases.values()
    state.handle("w0", FinishLease(lease.token, 0.1), 0.1)
    for now in (2.0, 4.0, 6.0, 8.0):
        state.handle("w0", WorkerHeartbeat([]), now)
        assert not sent(state.tick(now), LeaseRevoked), "the loader has said nothing since 0.0 s"
    state.handle(LOADER, ReportProgress("s", 0, [(0, 1)], 8, STATS), 8.1)
    assert not state.tables.leases
    assert state.tables.workers["w0"].unreachable == {}


@pytest.mark.shows("a loader that is silent for 15 s is removed, and told so when it comes back")
def test_a_silent_loader_is_collected_and_told_and_one_that_does_not_read_yet_is_not() -> None:
    state = ready_state()
    state.handle("idle", loader(1), 0.0)
    for now in range(1, 20):
        state.handle("idle", LoaderHeartbeat(STATS), float(now))
        state.handle("w0", WorkerHeartbeat([*state.tables.workers["w0"].tokens]), float(now))
        out = state.tick(float(now))
        if LOADER not in state.tables.loaders:
            break
    assert now == tables.LOADER_TIMEOUT_S + 1
    assert Send(LOADER, UnknownPeer()) in out
    assert RememberStats(loader(), STATS) in out
    assert (list(state.tables.loaders), state.tables.sessions, state.tables.leases) == (["idle"], {}, {})
    state.validate()


@pytest.mark.shows("an abandoned iterator frees its leases; one job may come and go three times")
def test_one_job_may_come_and_go_three_times() -> None:
    state = ready_state(steps=4)
    state.handle(LOADER, LeaveLoader(STATS), 1.0)
    for number in range(3):
        state.handle(LOADER, loader(), 2.0)
        out = state.handle(LOADER, OpenSession(session(4, f"s{number}"), 4, 0, [], 8, None), 2.0)
        assert sent(out, GrantLease)
        state.validate()
        state.handle(LOADER, LeaveLoader(STATS), 3.0)
        assert (state.tables.loaders, state.tables.sessions, state.tables.leases) == ({}, {}, {})


def test_a_worker_that_may_be_tried_again_is_announced() -> None:
    state = ready_state(steps=4)
    lease = next(iter(state.tables.leases.values()))
    assert sent(state.handle("w0", FailLease(lease.token, "no route"), 0.1), Membership) == [(LOADER, Membership(0))]
    for now in (3.0, 6.0, 9.0, 10.0):
        state.handle("w0", WorkerHeartbeat([*state.tables.workers["w0"].tokens]), now)
        state.handle(LOADER, ReportProgress("s", 0, [], 8, STATS), now)
        state.tick(now)
    out = state.tick(0.2 + tables.UNREACHABLE_S)
    assert sent(out, Membership) == [(LOADER, Membership(1))]
    assert sent(out, GrantLease)


def test_a_message_of_the_wrong_role_is_refused() -> None:
    state = ready_state()
    for peer, message in ((LOADER, WorkerHeartbeat([])), ("w0", ReportProgress("s", 0, [], 8, STATS))):
        ((_, refusal),) = sent(state.handle(peer, message, 1.0), Refused)
        assert isinstance(refusal, Refused)
        assert f"{type(message).__name__} is no message of a" in refusal.text


def test_pickled_pipelines_that_no_loader_uses_are_forgotten() -> None:
    state = ready_state()
    for number in range(3):
        out = state.handle(LOADER, ProvidePipeline(f"d{number}", Program("/", []), b"", b""), 0.0)
    assert out[0] == ForgetPipeline("d1")
    assert sent(out, DropPipeline) == [
        (f"w{number}", DropPipeline("d1")) for number in range(len(state.tables.workers))
    ]
    assert state.tables.pipelines.keys() == {"d2"}
    current = SessionSpec("t", "d2", 0, 0, planned(5), ["tcp://loader:1"])
    state.handle(LOADER, OpenSession(current, 5, 0, [], 8, None), 0.0)
    state.handle(LOADER, ProvidePipeline("d3", Program("/", []), b"", b""), 0.0)
    assert state.tables.pipelines.keys() == {"d2", "d3"}, "a pass still needs it"
