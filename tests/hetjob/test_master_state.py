"""The job master's decisions: events in, instructions out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.hetjob.master.state import (
    DISPATCHER,
    LONGEST_DELAY_S,
    STEADY_AFTER_S,
    Begin,
    BeginElastic,
    ChildEnded,
    ClockReached,
    DispatcherReady,
    Finish,
    IllegalTransition,
    MasterState,
    Phase,
    StartDataWorker,
    StartDispatcher,
    StartEmbeddingServer,
    StopAll,
    StopRequested,
    data_worker,
    embedding_server,
)


def started(data_workers: int = 2) -> MasterState:
    state = MasterState(data_workers)
    state.handle(Begin(), 0)
    state.handle(DispatcherReady(), 1)
    return state


def test_the_dispatcher_comes_first_and_the_rest_when_it_is_ready() -> None:
    state = MasterState(2, elastic=True)
    assert state.handle(Begin(), 0) == [StartDispatcher("the job begins")]
    assert state.handle(DispatcherReady(), 1) == [
        StartDataWorker(0, "the dispatcher is ready"),
        StartDataWorker(1, "the dispatcher is ready"),
        BeginElastic("the dispatcher is ready"),
    ]
    assert state.phase is Phase.RUNNING


def test_embedding_servers_come_first_and_come_back() -> None:
    state = MasterState(1, embedding_servers=2)
    state.handle(Begin(), 0)
    assert [(type(one), getattr(one, "index", None)) for one in state.handle(DispatcherReady(), 1)] == [
        (StartEmbeddingServer, 0),
        (StartEmbeddingServer, 1),
        (StartDataWorker, 0),
    ]
    assert state.handle(ChildEnded(embedding_server(1), -9), 2) == []
    assert state.next_due() == 2.5
    (again,) = state.handle(ClockReached(), 2.5)
    assert again == StartEmbeddingServer(1, "it ended 1 time in a row")


def test_what_ends_is_started_again_after_a_delay_that_grows() -> None:
    state = started()
    delays = []
    now = 2.0
    for _ in range(9):
        assert state.handle(ChildEnded(data_worker(1), 1), now) == []
        due = state.next_due()
        assert due is not None
        delays.append(due - now)
        assert state.handle(ClockReached(), now) == []
        now = due
        assert [type(one) for one in state.handle(ClockReached(), now)] == [StartDataWorker]
    assert delays == [0.5, 1, 2, 4, 8, 16, LONGEST_DELAY_S, LONGEST_DELAY_S, LONGEST_DELAY_S]


def test_a_steady_life_forgives_earlier_failures() -> None:
    state = started()
    state.handle(ChildEnded(DISPATCHER, -9), 2)
    assert state.handle(ClockReached(), 2.5) == [StartDispatcher("it ended 1 time in a row")]
    state.handle(ChildEnded(DISPATCHER, -9), 2.5 + STEADY_AFTER_S)
    assert state.next_due() == 3.0 + STEADY_AFTER_S


def test_stopping_waits_for_every_child_and_starts_nothing() -> None:
    state = started()
    state.handle(ChildEnded(data_worker(0), 1), 2)
    assert state.handle(StopRequested("the job ends"), 2.1) == [StopAll("the job ends")]
    assert state.next_due() is None
    assert state.handle(ClockReached(), 90) == []
    assert state.handle(StopRequested("again"), 90) == []
    assert state.handle(ChildEnded(data_worker(1), 0), 91) == []
    assert state.handle(ChildEnded(DISPATCHER, 0), 92) == [Finish("every child has ended")]
    assert state.phase is Phase.ENDED


def test_stopping_with_nothing_running_is_the_end() -> None:
    state = MasterState(1)
    state.handle(Begin(), 0)
    state.handle(ChildEnded(DISPATCHER, 1), 0)
    assert state.handle(StopRequested("x"), 1) == [StopAll("x"), Finish("x")]


def test_an_impossible_event_tells_the_story() -> None:
    state = started()
    with pytest.raises(IllegalTransition, match=r"DispatcherReady.*running.*Begin"):
        state.handle(DispatcherReady(), 3)


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0, 40)), max_size=60), st.integers(0, 3))
def test_every_child_is_running_or_due_until_the_stop(choices: list[tuple[int, float]], workers: int) -> None:
    state = started(workers)
    names = {DISPATCHER, *(data_worker(index) for index in range(workers))}
    now = 1.0
    for choice, wait in choices:
        now += wait
        running = sorted(state.running)
        if choice < 3 and running:
            state.handle(ChildEnded(running[choice % len(running)], choice), now)
        else:
            state.handle(ClockReached(), now)
        assert state.running.keys() | state.due.keys() == names
    state.handle(StopRequested("done"), now)
    for name in list(state.running):
        state.handle(ChildEnded(name, 0), now)
    assert state.phase is Phase.ENDED
