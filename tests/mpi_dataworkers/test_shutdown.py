"""The 2 s in which a data worker ends: one time, noted once and handed down to whatever waits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from hetstream.mpi_dataworkers.transports.zmq import ZmqWorkerEndpoint
from hetstream.mpi_dataworkers.worker import worker
from hetstream.mpi_dataworkers.worker.process import ShutdownDeadlines, WorkPage

RULE_S = 2.0


def test_who_was_not_told_to_end_has_all_the_time() -> None:
    assert (ShutdownDeadlines().batches_by, ShutdownDeadlines().messages_by) == (math.inf, math.inf)
    assert not ShutdownDeadlines().is_overdue(1e12, runs_user_code=True)
    assert ShutdownDeadlines().next_look_s(1e12, 0.25) == 0.25


def test_each_thing_is_over_before_the_next_and_all_within_the_rule() -> None:
    deadlines = ShutdownDeadlines(100.0)
    looks, now = [], 100.0
    while not deadlines.is_overdue(now, runs_user_code=False):
        looks.append(now)
        now += deadlines.next_look_s(now, 0.4)
    user_code_by = next(at for at in looks if deadlines.is_overdue(at, runs_user_code=True))
    assert looks[0] < user_code_by < deadlines.batches_by < deadlines.messages_by < now < 100.0 + RULE_S
    assert user_code_by == 101.0, "it is looked exactly then"


def test_the_page_hands_the_time_to_a_process() -> None:
    page = WorkPage()
    assert page.deadlines == ShutdownDeadlines()
    page.begin("s", 1, 2, 3.0)
    page.deadlines = ShutdownDeadlines(12.5)
    page.at_sample(4, thread=127)
    assert page.deadlines == ShutdownDeadlines(12.5)
    page.close()


class _Closed:
    """Notes until when it may let something leave."""

    until = -1.0

    def close(self, until: float = -1.0) -> None:
        self.until = until


def _worker_that_closes() -> Any:
    one: Any = worker.DataWorker.__new__(worker.DataWorker)
    one._page = WorkPage()
    one._sender, one._dispatcher, one._steps, one._pickled_pipelines = _Closed(), _Closed(), _Closed(), _Closed()
    return one


@pytest.mark.parametrize("told_s_ago", [0.0, 0.9, 1.4, 1.9])
def test_what_came_before_is_taken_off_the_time_to_leave(monkeypatch: pytest.MonkeyPatch, told_s_ago: float) -> None:
    """However long a loader or user code was waited for, the end of it all stays where it was."""
    monkeypatch.setattr(worker.time, "monotonic", lambda: 100.0 + told_s_ago)
    one = _worker_that_closes()
    one._page.deadlines = ShutdownDeadlines(100.0)
    one._close()
    assert (one._sender.until, one._dispatcher.until) == (
        one._page.deadlines.batches_by,
        one._page.deadlines.messages_by,
    )
    assert max(one._sender.until, one._dispatcher.until) < 100.0 + RULE_S
    one._page.close()


def test_a_drained_data_worker_has_time_after_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker.time, "monotonic", lambda: 100.0)
    one = _worker_that_closes()
    one._close()
    assert (one._sender.until, one._dispatcher.until) == (100.0 + worker._LINGER_S, math.inf)
    one._page.close()


class _Socket:
    linger = -1


@pytest.mark.parametrize(("until", "linger_ms"), [(100.25, 250), (99.0, 0), (math.inf, 1000), (1000.0, 1000)])
def test_messages_leave_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch, until: float, linger_ms: int) -> None:
    monkeypatch.setattr("hetstream.mpi_dataworkers.transports.zmq.time.monotonic", lambda: 100.0)
    endpoint: Any = ZmqWorkerEndpoint.__new__(ZmqWorkerEndpoint)
    endpoint._control, endpoint._close_control = _Socket(), lambda: None
    endpoint.close(until)
    assert endpoint._control.linger == linger_ms
