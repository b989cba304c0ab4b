"""The table of a data worker's connections, with connections that only write down what happens to them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.transports import base
from hetstream.mpi_dataworkers.transports.base import ChannelSender, PeerUnreachable
from hetstream.mpi_dataworkers.wire.messages import Delivery, EndOfShard

END = EndOfShard("s", 1, 1)


class Written:
    """A connection; `story` has what happens to all of them."""

    story: ClassVar[list[tuple[Any, ...]]] = []
    failure: ClassVar[Exception | None] = None

    def __init__(self, key: bytes, worker_id: str, receiver: str) -> None:
        self.receiver = receiver
        self.story.append(("open", key, worker_id, receiver))

    def send(self, header: Delivery, frames: Sequence[Any]) -> float:
        if self.failure is not None:
            raise self.failure
        self.story.append(("send", self.receiver, header, frames))
        return 0.25

    def close(self, until: float) -> None:
        self.story.append(("close", self.receiver, until))


class Sender(ChannelSender):
    def _open(self, receiver: str) -> Written:
        return Written(self._key, self._worker_id, receiver)


@pytest.fixture
def sender(monkeypatch: pytest.MonkeyPatch) -> Sender:
    monkeypatch.setattr(Written, "story", [])
    return Sender("5a" * 32, "w")


def test_a_connection_is_opened_once_and_used_again(sender: Sender) -> None:
    for _ in range(2):
        assert sender.send("a", END, [b"x"]) == 0.25, "how long it waited"
    assert Written.story == [("open", b"\x5a" * 32, "w", "a"), *[("send", "a", END, [b"x"])] * 2]


def test_the_one_not_used_for_longest_makes_room_and_loses_nothing(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = time.monotonic()
    monkeypatch.setattr(base, "MAX_CHANNELS", 2)
    for receiver in ("a", "b", "a", "c", "a"):
        sender.send(receiver, END, [])
    closed = [one for one in Written.story if one[0] == "close"]
    assert [one[1] for one in closed] == ["b"]
    assert begun + base._EVICTED_LINGER_S <= closed[0][2] < time.monotonic() + base._EVICTED_LINGER_S


@pytest.mark.parametrize("failure", [ConnectionResetError("it left"), ProtocolError("it left")])
def test_a_connection_that_fails_is_closed_and_opened_anew(
    sender: Sender, monkeypatch: pytest.MonkeyPatch, failure: Exception
) -> None:
    monkeypatch.setattr(Written, "failure", failure)
    with pytest.raises(PeerUnreachable, match="the connection to the loader at a is gone: it left"):
        sender.send("a", END, [])
    monkeypatch.setattr(Written, "failure", None)
    sender.send("a", END, [])
    assert [one[0] for one in Written.story] == ["open", "close", "open", "send"]


def test_all_connections_may_let_batches_leave_until_the_same_time(sender: Sender) -> None:
    for receiver in ("a", "b"):
        sender.send(receiver, END, [])
    sender.close(5.0)
    sender.close(6.0)
    assert [one for one in Written.story if one[0] == "close"] == [("close", "a", 5.0), ("close", "b", 5.0)]
