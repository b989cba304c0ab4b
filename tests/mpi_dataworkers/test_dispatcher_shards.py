"""The dispatcher and the shards of streams: kept together, taken over, ended by a message, lost; without sockets."""

from __future__ import annotations

import random

import pytest

from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.dispatcher.tables import Instruction, Send
from hetstream.mpi_dataworkers.order.reorder import ReorderBuffer
from hetstream.mpi_dataworkers.wire.messages import (
    CloseSession,
    EndOfShard,
    FinishLease,
    GrantLease,
    LeaseRevoked,
    LeaveWorker,
    LoaderStats,
    Message,
    OpenSession,
    PlannedOrder,
    RegisterLoader,
    RegisterWorker,
    ReportProgress,
    RevokeLease,
    SessionSpec,
    ShardOrder,
    StepsLost,
)

LOADER = "loader"
STATS = LoaderStats()
WINDOW = 4


def opened(shard: int, at_most_once: bool = False, consumed: int = 0, snapshot: bytes = b"") -> OpenSession:
    order = ShardOrder("itself", shard, 4, 1, False, False, 0, shard)
    session = SessionSpec(f"s{shard}", "d", 0, 0, order, ["tcp://l:1"], kept_together=True, at_most_once=at_most_once)
    return OpenSession(session, -1, consumed, [], WINDOW, None, 0, snapshot)


def ready(shards: int, workers: int, at_most_once: bool = False) -> tuple[DispatcherState, list[GrantLease]]:
    state = DispatcherState(1, 0.0)
    state.handle(LOADER, RegisterLoader("job", 0, 0, 1, "host", 1, "d", {}), 0.0)
    out: list[Instruction] = []
    for number in range(workers):
        out += state.handle(f"w{number}", RegisterWorker("host", number, "", []), 0.0)
    for shard in range(shards):
        out += state.handle(LOADER, opened(shard, at_most_once), 0.0)
    return state, grants(out)


def grants(out: list[Instruction]) -> list[GrantLease]:
    return [message for _, message in sent(out, GrantLease)]  # type: ignore[misc]


def sent(out: list[Instruction], kind: type[Message]) -> list[tuple[str, Message]]:
    return [(one.peer, one.message) for one in out if isinstance(one, Send) and isinstance(one.message, kind)]


def holders(state: DispatcherState) -> dict[str, str]:
    return {key: opened.holder for key, opened in state.tables.sessions.items()}


def test_leases_of_a_shard_stay_with_one_worker_and_shards_are_spread() -> None:
    state, first = ready(shards=2, workers=2)
    assert {lease.session.session_id for lease in first} == {"s0", "s1"}
    before = holders(state)
    assert sorted(before.values()) == ["w0", "w1"]
    for lease in list(state.tables.leases.values()):
        out = state.handle(lease.worker, FinishLease(lease.token, 0.001), 0.1)
        assert all(state.tables.leases[one.token].worker == before[one.session.session_id] for one in grants(out))
    state.validate()
    assert holders(state) == before


def test_a_worker_that_joins_takes_a_shard_of_one_that_has_several() -> None:
    state, _ = ready(shards=3, workers=1)
    assert set(holders(state).values()) == {"w0"} | ({""} if "" in holders(state).values() else set())
    state.handle("w1", RegisterWorker("host", 1, "", []), 0.1)
    for number in range(8):
        for lease in list(state.tables.leases.values()):
            state.handle(lease.worker, FinishLease(lease.token, 0.001), 0.2 + number)
        for key, opened in state.tables.sessions.items():
            state.handle(LOADER, ReportProgress(key, opened.frontier, [], WINDOW, STATS), 0.2 + number)
    assert set(holders(state).values()) == {"w0", "w1"}


def test_the_end_of_a_shard_settles_the_leases_behind_it() -> None:
    state, _ = ready(shards=1, workers=1)
    opened = state.tables.sessions["s0"]
    for lease in sorted(state.tables.leases.values(), key=lambda one: one.first):
        state.handle("w0", EndOfShard("s0", 1, lease.token), 0.1)
        state.handle("w0", FinishLease(lease.token, 0.001), 0.1)
    state.validate()
    assert (opened.num_steps, opened.leasable()) == (1, 0)
    on_its_way = [lease.first for lease in state.tables.leases.values()]
    assert on_its_way == [0], "the batch before the end"
    state.handle(LOADER, ReportProgress("s0", 1, [], WINDOW, STATS), 0.2)
    assert not state.tables.leases


def test_an_end_that_a_stranger_tells_changes_nothing() -> None:
    state, first = ready(shards=1, workers=2)
    other = "w1" if holders(state)["s0"] == "w0" else "w0"
    state.handle(other, EndOfShard("s0", 1, first[0].token), 0.1)
    state.handle(LOADER, EndOfShard("s0", 1, first[0].token), 0.1)
    assert state.tables.sessions["s0"].num_steps == -1


def test_a_lost_workers_shard_goes_on_elsewhere_from_its_last_snapshot() -> None:
    state, first = ready(shards=1, workers=1)
    lease = first[0]
    state.handle("w0", FinishLease(lease.token, 0.001, {}, b"saved", lease.stop_step), 0.1)
    state.handle(LOADER, ReportProgress("s0", lease.stop_step, [], WINDOW, STATS), 0.1)
    state.peer_gone("w0", 0.2)
    (again,) = grants(state.handle("w1", RegisterWorker("host", 1, "", []), 0.3))[:1]
    assert (again.first_step, again.snapshot) == (lease.stop_step, b"saved")
    assert holders(state) == {"s0": "w1"}


def test_a_resumed_shard_begins_with_the_snapshot_of_its_state() -> None:
    state, _ = ready(shards=0, workers=1)
    (lease, *_) = grants(state.handle(LOADER, opened(0, consumed=7, snapshot=b"saved"), 0.1))
    assert (lease.first_step, lease.snapshot) == (7, b"saved")


def test_at_most_once_gives_up_what_a_lost_worker_held_and_the_rest_of_its_shard() -> None:
    state, first = ready(shards=1, workers=2, at_most_once=True)
    holder = holders(state)["s0"]
    out = state.peer_gone(holder, 0.1)
    assert sent(out, StepsLost) == [(LOADER, StepsLost("s0", first[0].first_step, -1))] * len(sent(out, StepsLost))
    assert sent(out, StepsLost)
    assert not grants(out)
    state.validate()


def test_at_most_once_of_indices_gives_up_the_lease_only_and_nothing_when_a_worker_leaves() -> None:
    state, _ = ready(shards=0, workers=2)
    order = PlannedOrder(40, 1, 1, 0, False, False, 0)
    session = SessionSpec("p", "d", 0, 0, order, ["tcp://l:1"], at_most_once=True)
    state.handle(LOADER, OpenSession(session, 40, 0, [], 8, None), 0.1)
    lost = [step for one in state.tables.leases.values() if one.worker == "w0" for step in range(one.first, one.stop)]
    out = state.peer_gone("w0", 0.2)
    told = [step for _, one in sent(out, StepsLost) for step in range(one.first_step, one.stop_step)]  # type: ignore[attr-defined]
    assert sorted(told) == sorted(lost)
    state.validate()
    left = [step for one in state.tables.leases.values() for step in range(one.first, one.stop)]
    out = state.handle("w1", LeaveWorker(), 0.3)
    assert not sent(out, StepsLost)
    assert sorted(state.tables.sessions["p"].requeued) == sorted(left)


@pytest.mark.shows("each element comes once under random schedules of faults")
@pytest.mark.parametrize("seed", range(30))
def test_shards_are_exact_under_a_random_schedule(seed: int) -> None:
    """Workers with readers of their own, a loader with buffers; joins, losses, ends, in any order."""
    chance = random.Random(seed)
    lengths = [chance.randrange(12) for _ in range(4)]
    state, _ = ready(shards=0, workers=0)
    held: dict[str, list[GrantLease]] = {}
    buffers = {f"s{shard}": ReorderBuffer(0) for shard in range(4)}
    ends: dict[str, int] = {}
    taken: dict[str, list[int]] = {key: [] for key in buffers}
    now, joined = 0.0, 0

    def carry_out(out: list[Instruction]) -> None:
        for one in out:
            if not isinstance(one, Send):
                continue
            message = one.message
            if isinstance(message, GrantLease) and one.peer in held:
                held[one.peer].append(message)
            elif isinstance(message, RevokeLease) and one.peer in held:
                held[one.peer] = [lease for lease in held[one.peer] if lease.token != message.token]
            elif isinstance(message, LeaseRevoked):
                buffers[message.session_id].revoke(message.token)
        state.validate()

    for shard in range(4):
        carry_out(state.handle(LOADER, opened(shard), now))
    for _ in range(4000):
        now += 0.01
        if len(ends) == 4 and all(buffers[key].position == ends[key] for key in ends):
            break
        action = chance.random()
        if not held or (action < 0.02 and len(held) < 4):
            peer, joined = f"w{joined}", joined + 1
            held[peer] = []
            carry_out(state.handle(peer, RegisterWorker("host", joined, "", []), now))
        elif action < 0.04:
            peer = chance.choice(sorted(held))
            del held[peer]
            carry_out(state.peer_gone(peer, now))
        elif action < 0.6:
            peer = chance.choice(sorted(held))
            if held[peer]:
                lease = held[peer].pop(0)
                key, length = lease.session.session_id, lengths[int(lease.session.session_id[1:])]
                for step in range(lease.first_step, min(lease.stop_step, length)):
                    if buffers[key].wants(step, lease.token):
                        buffers[key].put(step, step)
                if lease.stop_step > length:
                    if not buffers[key].is_revoked(lease.token):
                        ends[key] = length
                    carry_out(state.handle(peer, EndOfShard(key, length, lease.token), now))
                if peer in held:
                    carry_out(state.handle(peer, FinishLease(lease.token, 0.001), now))
        elif action < 0.9:
            for key, buffer in buffers.items():
                if buffer.has_next():
                    taken[key].append(buffer.pop())
                carry_out(
                    state.handle(LOADER, ReportProgress(key, buffer.position, buffer.received(), WINDOW, STATS), now)
                )
        else:
            for peer in list(held):
                state.tables.workers[peer].last_seen = now
            state.tables.loaders[LOADER].last_seen = now
            carry_out(state.tick(now))
    assert taken == {f"s{shard}": list(range(length)) for shard, length in enumerate(lengths)}
    for key, buffer in buffers.items():
        carry_out(state.handle(LOADER, CloseSession(key, buffer.position, STATS), now))
    assert not state.tables.leases


def test_one_worker_holds_a_shard_for_all_ranks_that_read_its_rounds() -> None:
    state = DispatcherState(1, 0.0)
    for rank in range(2):
        state.handle(f"rank{rank}", RegisterLoader("job", 0, rank, 2, "host", rank, "d", {}), 0.0)
        for shard in range(2):
            order = ShardOrder("itself", shard, 2, 1, False, False, 0, shard, rank, 2)
            session = SessionSpec(f"s{shard}r{rank}", "d", 0, 0, order, ["tcp://l:1"], kept_together=True)
            state.handle(f"rank{rank}", OpenSession(session, -1, 0, [], WINDOW, None), 0.0)

    def held_alike() -> set[str]:
        held = holders(state)
        for shard in range(2):
            assert held[f"s{shard}r0"] == held[f"s{shard}r1"] != ""
        return set(held.values())

    state.handle("w0", RegisterWorker("host", 0, "", []), 0.0)
    for _ in range(4):
        for lease in list(state.tables.leases.values()):
            state.handle(lease.worker, FinishLease(lease.token, 0.001), 0.1)
    assert held_alike() == {"w0"}
    state.handle("w1", RegisterWorker("host", 1, "", []), 0.2)
    for lease in list(state.tables.leases.values()):
        state.handle(lease.worker, FinishLease(lease.token, 0.001), 0.3)
    assert held_alike() == {"w0", "w1"}, "a worker that joins takes a shard, of both ranks"
    state.peer_gone("w1", 0.4)
    for lease in list(state.tables.leases.values()):
        state.handle(lease.worker, FinishLease(lease.token, 0.001), 0.5)
    assert held_alike() == {"w0"}
    state.validate()
