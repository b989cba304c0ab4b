"""Small batches share a message, in order, byte for byte, and none waits long for company."""

from __future__ import annotations

import random

import pytest

from mpi_dataworkers.codec import FUSE_BELOW_BYTES, Buffer, decode, encode, split
from mpi_dataworkers.gather import GATHER_BYTES, GATHER_S, Gatherer
from mpi_dataworkers.messages import Batch, Batches, Delivery, EndOfShard

Sent = list[tuple[Delivery, list[Buffer]]]


def made(gathered: Gatherer, step: int, buffers: list[bytes | bytearray], now: float = 0.0) -> None:
    gathered.add(Batch("s", step, 1, 1, b"", gathered.place(buffers, now)))


def arrived(sent: Sent) -> list[tuple[int, list[bytes]]]:
    """(step, buffers) of each batch as the loader reads them."""
    out = []
    for header, frames in sent:
        message = decode(encode(header))
        views = [memoryview(bytes(frame)) for frame in frames]
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
    assert len(sent) == 10
    assert max(memoryview(frames[0]).nbytes for _, frames in sent) <= GATHER_BYTES


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


def test_a_small_buffer_may_be_changed_after_it_was_placed() -> None:
    gathered, buffer = Gatherer(), bytearray(b"before")
    made(gathered, 0, [buffer])
    buffer[:] = b"after!"
    assert arrived(gathered.rest()) == [(0, [b"before"])]
