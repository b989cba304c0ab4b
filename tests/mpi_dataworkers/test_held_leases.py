"""The leases of a data worker, between the thread that gets them and the one that works on them. No socket, no wait."""

from __future__ import annotations

from typing import Any

import pytest

from hetstream.mpi_dataworkers.wire.messages import (
    Draining,
    FailLease,
    FinishLease,
    GrantLease,
    HeldLease,
    ListedOrder,
    Message,
    RevokeLease,
    SessionSpec,
)
from hetstream.mpi_dataworkers.worker.leases import HeldLeases, LeaseGone

LOADER = ("tcp://h:1",)


class Dispatcher:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[Message] = []

    def tell(self, message: Message) -> None:
        self.told.append(message)


@pytest.fixture
def dispatcher() -> Dispatcher:
    return Dispatcher()


@pytest.fixture
def leases(dispatcher: Any) -> HeldLeases:
    held = HeldLeases(dispatcher)
    for token, session, first in ((1, "a", 10), (2, "b", 20)):
        spec = SessionSpec(session, "d", 0, 0, ListedOrder(True), [*LOADER])
        held.take(GrantLease(token, spec, first, first + 5, None))
    return held


def test_leases_are_worked_on_in_the_order_in_which_they_came(leases: HeldLeases, dispatcher: Dispatcher) -> None:
    for token in (1, 2):
        lease = leases.next(0.0)
        assert lease is not None
        assert lease.token == token
        assert leases.begin(token, lease.first_step)
        leases.settle(token, FinishLease(token, 0.1))
    assert [message.token for message in dispatcher.told if isinstance(message, FinishLease)] == [1, 2]
    assert leases.tokens() == []


def test_a_lease_ends_where_it_was_trimmed(leases: HeldLeases) -> None:
    leases.trim(1, 12)
    assert leases.described()[0] == HeldLease(1, "a", 10, 12, 0)
    assert [leases.begin(1, step) for step in (10, 11, 12)] == [True, True, False]
    leases.trim(1, 14)  # it does not grow again
    assert not leases.begin(1, 12)
    leases.trim(2, 20)  # nothing is left of it
    assert leases.tokens() == [1]


@pytest.mark.parametrize("how", ["revoked", "its session has ended"])
def test_nobody_hears_of_a_lease_that_is_gone(leases: HeldLeases, dispatcher: Dispatcher, how: str) -> None:
    if how == "revoked":
        leases.revoke(RevokeLease(1, "a", False, "why"))
    else:
        leases.drop_session("a")
    with pytest.raises(LeaseGone):
        leases.begin(1, 10)
    leases.settle(1, FailLease(1, "late"))
    assert not leases.holds(1)
    assert leases.holds(2)
    assert dispatcher.told == []


def test_the_lease_in_work_of_a_session_that_has_ended_is_told(leases: HeldLeases) -> None:
    leases.begin(1, 10)
    assert leases.drop_session("another") == 0
    assert leases.drop_session("a") == 1
    assert leases.drop_session("a") == 0


def test_a_connection_in_doubt_is_made_afresh_once_also_for_a_lease_that_was_sent(leases: HeldLeases) -> None:
    leases.settle(1, FinishLease(1, 0.1))
    leases.revoke(RevokeLease(1, "a", True, "its batches did not come"))
    assert [leases.take_doubt(LOADER), leases.take_doubt(LOADER)] == [True, False]


def test_who_leaves_finishes_its_step_and_says_once_how_far_it_comes(
    leases: HeldLeases, dispatcher: Dispatcher
) -> None:
    assert leases.begin(1, 11)
    leases.renews = True
    leases.stop()
    leases.drain()
    leases.drain()
    assert dispatcher.told == [Draining([(1, 12)], True)]
    assert leases.tokens() == [1], "the other lease is another's now"
    assert not leases.begin(1, 12)
    leases.drain_again()  # another dispatcher does not know
    assert dispatcher.told == 2 * [Draining([(1, 12)], True)]


def test_what_is_granted_to_one_that_leaves_is_not_begun(leases: HeldLeases) -> None:
    leases.drain()
    spec = SessionSpec("a", "d", 0, 0, ListedOrder(True), [*LOADER])
    leases.take(GrantLease(3, spec, 30, 35, None))
    assert leases.tokens() == []
