"""The loader's reorder buffer."""

from __future__ import annotations

from hetstream.mpi_dataworkers.order.reorder import ReorderBuffer


def test_steps_leave_in_order_and_once() -> None:
    buffer = ReorderBuffer(3)
    for step in (5, 3, 4, 7):
        assert buffer.wants(step, 1)
        buffer.put(step, step)
    assert buffer.received() == [(3, 6), (7, 8)]
    assert not buffer.wants(5, 2), "there already"
    assert not buffer.wants(2, 1), "taken before"
    assert [buffer.pop() for _ in range(3)] == [3, 4, 5]
    assert not buffer.has_next()
    assert not buffer.wants(4, 1)
    assert (buffer.position, len(buffer), buffer.num_dropped) == (6, 1, 3)


def test_batches_of_a_revoked_lease_are_not_wanted() -> None:
    buffer = ReorderBuffer(0)
    buffer.revoke(9)
    assert not buffer.wants(0, 9)
    assert buffer.wants(0, 10)
