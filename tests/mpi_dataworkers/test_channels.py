"""The table of a data worker's connections, with connections that only write down what happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from mpi_dataworkers.errors import ProtocolError
from mpi_dataworkers.messages import Delivery, EndOfShard
from mpi_dataworkers.transports import channels
from mpi_dataworkers.transports.base import PeerUnreachable
from mpi_dataworkers.transports.channels import ChannelSender

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

    def close(self, linger_s: float) -> None:
        self.story.append(("close", self.receiver, linger_s))


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
    monkeypatch.setattr(channels, "MAX_CHANNELS", 2)
    for receiver in ("a", "b", "a", "c", "a"):
        sender.send(receiver, END, [])
    assert [one for one in Written.story if one[0] == "close"] == [("close", "b", channels._EVICTED_LINGER_S)]
    assert channels._EVICTED_LINGER_S > 0, "what is queued leaves"


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


def test_all_connections_share_the_time_to_leave(sender: Sender) -> None:
    for receiver in ("a", "b"):
        sender.send(receiver, END, [])
    sender.close(5.0)
    sender.close(5.0)
    lingers = [one[2] for one in Written.story if one[0] == "close"]
    assert len(lingers) == 2
    assert 5.0 >= lingers[0] >= lingers[1] > 0
