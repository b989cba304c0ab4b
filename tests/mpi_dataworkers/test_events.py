"""Events: what is told, with its cause, on one line and as JSON; the file stays bounded and survives a full disk."""

from __future__ import annotations

import json
import logging
import os
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sample_datasets as datasets

from hetstream import DataLoader
from hetstream.mpi_dataworkers.dispatcher import events
from hetstream.mpi_dataworkers.dispatcher.events import EVENTS_FILE, EventLog, follow_events, older, read_events
from hetstream.mpi_dataworkers.dispatcher.server import Journal, _carry_out
from hetstream.mpi_dataworkers.dispatcher.tables import ReportEvent

LOST = events.DataWorkerLost(data_worker=3, host="cpu1", pid=7, orderly=False, cause="silent for 4.1 s")


def test_an_event_is_one_line_of_words_and_one_of_json() -> None:
    assert LOST.render() == "data_worker=3 host=cpu1 pid=7 lost: silent for 4.1 s"
    assert json.loads(LOST.as_json(1.5)) == {
        "time": 1.5,
        "event": "DataWorkerLost",
        "subject": "data_worker=3",
        "cause": "silent for 4.1 s",
        "data_worker": 3,
        "host": "cpu1",
        "pid": 7,
        "orderly": False,
    }


def test_the_file_is_bounded_and_keeps_the_newest(tmp_path: Path) -> None:
    log = EventLog(tmp_path, max_bytes=1000)
    for number in range(100):
        log.report([events.DataWorkersMissing(num_missing=number)])
    log.close()
    path = tmp_path / EVENTS_FILE
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert path.stat().st_size <= 1000
    assert older(path).stat().st_size <= 1000
    kept = [json.loads(line)["num_missing"] for line in read_events(path)]
    assert kept == list(range(kept[0], 100))
    assert len(kept) >= 10


def test_of_a_file_that_is_too_large_the_end_is_read(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Such as one full of holes, a line without an end: nobody has to wait for it, or needs memory for it."""
    path = tmp_path / EVENTS_FILE
    last = events.DataWorkersMissing(num_missing=7).as_json(1.0) + b"\n"
    for place in (path, older(path)):
        with open(place, "wb") as file:
            file.truncate(20 << 30)
            file.seek(0, os.SEEK_END)
            file.write(b"\n" + last)
    began_s = time.process_time()
    assert [*read_events(path)] == [last, last]
    assert next(follow_events(path)) == last
    assert time.process_time() - began_s < 10
    assert "only its end is read" in caplog.text
    path.write_bytes(b"x" * (2 << 20) + b"\n" + last)
    assert [*read_events(path)][1:] == [last], "a line that is no event's is left out"


def test_a_file_that_cannot_be_written_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = EventLog(tmp_path, max_bytes=100)
    (tmp_path / EVENTS_FILE).unlink()  # so that it cannot be renamed
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            log.report([LOST])
    log.close()
    assert caplog.text.count("events are missing") == 1


class _Unconnected:
    """An endpoint to which nothing is sent."""

    def send(self, peer: str, message: object) -> None:
        raise AssertionError(f"{message} to {peer}")


def test_a_burst_is_reported_whole(tmp_path: Path) -> None:
    journal, log = Journal(tmp_path), EventLog(tmp_path)
    burst = [ReportEvent(events.DataWorkersMissing(num_missing=number)) for number in range(2000)]
    try:
        _carry_out([*burst], journal, log, _Unconnected())  # type: ignore[arg-type]
    finally:
        log.close()
        journal.close()
    reported = [json.loads(line)["num_missing"] for line in read_events(tmp_path / EVENTS_FILE)]
    assert reported == list(range(2000))


@pytest.mark.shows("what happens can be seen by `stats()`, status, events and Prometheus")
def test_a_service_tells_its_story(service: Any, wait_until: Callable[..., None]) -> None:
    worker = service.start_workers(2)
    with DataLoader(datasets.Augmented(64), batch_size=4, service=service.name) as loader:
        batches = iter(loader)
        next(batches)
        told = [json.loads(line) for line in read_events(service.directory / "work" / EVENTS_FILE)]
        pid = next(event["pid"] for event in told if event["event"] == "DataWorkerRegistered")
        os.kill(pid, signal.SIGKILL)
        assert len(list(batches)) == 15
    wait_until(lambda: service.log("dispatcher").count("registered") == 3, what="the replacement")
    worker.send_signal(signal.SIGTERM)
    worker.wait(timeout=15)
    service.stop()
    told = [json.loads(line) for line in read_events(service.directory / "work" / EVENTS_FILE)]
    names = [event["event"] for event in told]
    assert names[0] == "DispatcherStarted"
    assert names[-1] == "DispatcherStopped"
    for name in ("LoaderConnected", "PipelineRemembered", "SessionOpened", "SessionClosed", "LoaderLost"):
        assert names.count(name) == 1, names
    causes = [event["cause"] for event in told if event["event"] == "DataWorkerLost"]
    assert len(causes) == 3
    assert "its connection closed" in causes or "its process ended" in causes
    assert causes.count("left") == 2
    assert [event["time"] for event in told] == sorted(event["time"] for event in told)
