"""The last moments of a dispatcher: what is on its way when it is told to stop is still taken."""

from __future__ import annotations

from pathlib import Path

from hetstream.mpi_dataworkers.dispatcher import server
from hetstream.mpi_dataworkers.dispatcher.events import EventLog
from hetstream.mpi_dataworkers.dispatcher.server import Journal
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.errors import ProtocolError
from hetstream.mpi_dataworkers.transports.base import Received
from hetstream.mpi_dataworkers.wire.messages import Message


class ScriptedEndpoint:
    """An endpoint at which these bursts arrive, then nothing; it keeps who was answered."""

    address = "tcp://nowhere:1"

    def __init__(self, *bursts: list[Received]) -> None:
        self.bursts = list(bursts)
        self.answered: list[str] = []

    def poll(self, timeout_s: float) -> list[Received]:
        return self.bursts.pop(0) if self.bursts else []

    def send(self, peer: str, message: Message) -> None:
        self.answered.append(peer)

    def close(self) -> None:
        pass


def test_what_came_before_the_end_is_still_taken(tmp_path: Path) -> None:
    endpoint = ScriptedEndpoint([Received("a", ProtocolError("first"))], [Received("b", ProtocolError("second"))])
    journal, events = Journal(tmp_path), EventLog(tmp_path)
    try:
        server._loop(DispatcherState(1, 0.0, {}), journal, events, None, endpoint, lambda: True, tmp_path)
    finally:
        events.close()
        journal.close()
    assert endpoint.answered == ["a", "b"]
