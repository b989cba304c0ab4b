"""Small batches share a message, in order, byte for byte, and none waits long for company."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from hetstream.mpi_dataworkers.wire.codec import (
    FUSE_BELOW_BYTES,
    Leaf,
    Scattered,
    decode,
    encode,
    in_one_piece,
    size_of,
    split,
)
from hetstream.mpi_dataworkers.wire.messages import Batch, Batches, Delivery, EndOfShard
from hetstream.mpi_dataworkers.worker.steps import GATHER_BYTES, GATHER_S, Gatherer

Sent = list[tuple[Delivery, Sequence[Leaf]]]


def made(gathered: Gatherer, step: int, buffers: list[bytes | bytearray], now: float = 0.0) -> None:
    gathered.add(Batch("s", step, 1, 1, b"", gathered.place(buffers, now)))


def arrived(sent: Sent) -> list[tuple[int, list[bytes]]]:
    """(step, buffers) of each batch as the loader reads them."""
    out = []
    for header, frames in sent:
        message = decode(encode(header))
        views = [memoryview(bytes(in_one_piece(frame))) for frame in frames]
        for batch in message.batches if isinstance(message, Batches) else [message]:
            if isinstance(batch, Batch):
                out.append((batch.step, [bytes(view) for view in split(views, batch.buffers)]))
            elif isinstance(batch, EndOfShard):
                out.append((batch.num_steps, []))
    return out


@pytest.mark.parametrize("seed", range(20))
def test_what_is_gathered_arrives_in_order_byte_for_byte(seed: int) -> None:
    chance = random.Random(seed)
    gathered, sent, expected = Gatherer(), Sent(), []
    for step in range(60):
        if chance.random() < 0.1:
            gathered.add_alone(EndOfShard("s", step, 1), [])
            expected.append((step, []))
        else:
            sizes = [chance.choice([0, 1, 1000, 100_000, FUSE_BELOW_BYTES]) for _ in range(chance.randint(0, 4))]
            buffers = [chance.randbytes(size) for size in sizes]
            made(gathered, step, list(buffers), now=step * 1e-5)
            expected.append((step, buffers))
        sent += gathered.due(step * 1e-5, 1e-5)
    sent += gathered.rest()
    assert arrived(sent) == expected
    assert gathered.rest() == []


def test_fast_steps_share_a_message_and_none_exceeds_the_limit() -> None:
    gathered, sent = Gatherer(), Sent()
    for step in range(100):
        made(gathered, step, [bytes(100_000)])
        sent += gathered.due(0.0, 0.0)
    sent += gathered.rest()
    assert len(sent) == 4, "31 of 100,000 bytes fit into one"
    assert max(size_of(frames[0]) for _, frames in sent) <= GATHER_BYTES


def test_a_slow_step_is_sent_at_once_and_a_fast_one_within_the_limit() -> None:
    gathered = Gatherer()
    made(gathered, 0, [b"x"], now=1.0)
    assert len(gathered.due(1.0, 2 * GATHER_S)) == 1, "the next step would take longer than this one may wait"
    made(gathered, 1, [b"x"], now=2.0)
    assert gathered.due(2.0, GATHER_S / 10) == []
    made(gathered, 2, [b"x"], now=2.0 + GATHER_S)
    ((header, _),) = gathered.due(2.0 + GATHER_S, GATHER_S / 10)
    assert isinstance(header, Batches)
    assert [batch.step for batch in header.batches] == [1, 2]


def test_a_scattered_buffer_is_written_where_it_leaves_from() -> None:
    def scattered(size: int) -> Scattered:
        def write(memory: memoryview) -> None:
            memory[:] = b"x" * size

        return Scattered(size, write)

    gathered = Gatherer()
    sizes = [10, FUSE_BELOW_BYTES]
    gathered.add(Batch("s", 0, 1, 1, b"", gathered.place([scattered(size) for size in sizes], 0.0)))
    ((header, (shared, large)),) = gathered.rest()
    assert isinstance(large, Scattered), "a large one is left to the transport, which may have a place for it"
    assert arrived([(header, [shared, in_one_piece(large)])]) == [(0, [b"x" * size for size in sizes])]


def test_a_small_buffer_may_be_changed_after_it_was_placed() -> None:
    gathered, buffer = Gatherer(), bytearray(b"before")
    made(gathered, 0, [buffer])
    buffer[:] = b"after!"
    assert arrived(gathered.rest()) == [(0, [b"before"])]


def test_small_batches_are_made_where_the_transport_sends_them_from() -> None:
    lent: list[memoryview] = []

    def room(num_bytes: int) -> memoryview | None:
        lent.append(memoryview(bytearray(num_bytes)))
        return lent[-1]

    gathered = Gatherer(room)
    for step in range(3):
        made(gathered, step, [b"small" * 100])
    [(_, [frame])] = gathered.rest()
    assert len(lent) == 1
    assert isinstance(frame, memoryview)
    assert frame.obj is lent[0].obj
    made(gathered, 3, [b"small", bytes(FUSE_BELOW_BYTES)])
    assert arrived(gathered.rest()) == [(3, [b"small", bytes(FUSE_BELOW_BYTES)])]
    assert len(lent) == 1, "a large buffer leaves from where it lies"
