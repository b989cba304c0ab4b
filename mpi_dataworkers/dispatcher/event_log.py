"""Events on disk: `events.jsonl` in the dispatcher's directory, one JSON object a line, bounded in size.

Written by `server.py`; read by `hetstream events`, also after the job has ended.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory
from hetstream.mpi_dataworkers.dispatcher.events import ALL_EVENTS, Event, MessageRefused

_log = logging.getLogger(__name__)

EVENTS_FILE = "events.jsonl"
# Two files of this size at most: about 100,000 events, weeks of a healthy job.
_MAX_BYTES = 8 << 20
_FOLLOW_S = 0.2
# A file that an event log wrote has no more, and no such line; one that somebody else put there may have any size.
_MOST_READ_BYTES, _MOST_LINE_BYTES = 2 * _MAX_BYTES, 1 << 20


class EventLog:
    """Tells events in the process's log, and appends them to `events.jsonl`.

    A file that grew too large becomes `events.jsonl.1`, and a new one is begun.

    Args:
        directory: where; the file is readable by its owner alone.
        max_bytes: of one file.
    """

    def __init__(self, directory: Path, max_bytes: int = _MAX_BYTES) -> None:
        self._path = directory / EVENTS_FILE
        self._directory = Directory.open(directory)
        self._max_bytes = max_bytes
        self._fails = False
        try:
            self._descriptor = self._open()
        except BaseException:
            self._directory.close()
            raise

    def _open(self) -> int:
        return self._directory.open_file(EVENTS_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def report(self, events: Sequence[Event]) -> None:
        """Tell events that just happened. A full disk costs lines of the file, not the service."""
        for event in events:
            _log.log(logging.WARNING if isinstance(event, MessageRefused) else logging.INFO, "%s", event.render())
        try:
            self._append(events, time.time())
            self._fails = False
        except OSError as error:
            if not self._fails:
                _log.warning("events are missing in %s: %s", self._path, error)
            self._fails = True

    def _append(self, events: Sequence[Event], now_s: float) -> None:
        lines = b"".join(event.as_json(now_s) + b"\n" for event in events)
        if os.fstat(self._descriptor).st_size + len(lines) > self._max_bytes:
            self._directory.rename(EVENTS_FILE, older(self._path).name)
            os.close(self._descriptor)
            self._descriptor = self._open()
        os.write(self._descriptor, lines)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
        self._directory.close()


def older(path: Path) -> Path:
    """The file that a full `events.jsonl` becomes."""
    return path.with_name(f"{path.name}.1")


def read_events(path: Path) -> Iterator[bytes]:
    """Complete lines of the older file and of `path`, oldest first; of a file that is too large, those at its end.

    Raises:
        FileNotFoundError: there is no such file.
    """
    if older(path).exists():
        yield from _lines(older(path))
    yield from _lines(path)


def follow_events(path: Path) -> Iterator[bytes]:
    """As `read_events`, and then each new line when it comes, for ever or until the file is removed."""
    if older(path).exists():
        yield from _lines(older(path))
    stream = _opened(path)
    try:
        begun_line = b""
        while True:
            while line := stream.readline(_MOST_LINE_BYTES):
                begun_line = (begun_line + line)[-_MOST_LINE_BYTES:]
                if begun_line.endswith(b"\n"):
                    yield begun_line
                    begun_line = b""
            time.sleep(_FOLLOW_S)
            if not path.exists():
                return
            if path.stat().st_ino != os.fstat(stream.fileno()).st_ino and not stream.peek(1):
                stream.close()
                stream, begun_line = _opened(path), b""
    finally:
        stream.close()


def render_line(line: bytes) -> str:
    """A line of the file in words; a line that is none, because the disk was full, as it is."""
    try:
        fields = typed_json.decode(line, _Line)
        event = msgspec.convert(msgspec.json.decode(line), ALL_EVENTS)
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(fields.time))
    except (msgspec.MsgspecError, OverflowError, RecursionError):
        return line.decode(errors="replace").rstrip()
    return f"{when} {event.render()}"


class _Line(msgspec.Struct, frozen=True):
    time: float


def _opened(path: Path) -> BufferedReader:
    """The file; its directory may be a stranger's, and no link, pipe or device is opened in it.

    What is before its last `_MOST_READ_BYTES` is passed over.
    """
    with Directory.open(path.parent) as directory:
        descriptor = directory.open_file(path.name)
    stream = os.fdopen(descriptor, "rb")
    begin = os.fstat(stream.fileno()).st_size - _MOST_READ_BYTES
    if begin > 0:
        _log.warning("%s is larger than a file of events: only its end is read", path)
        stream.seek(begin)
        stream.readline(_MOST_READ_BYTES)  # what is left of a line
    return stream


def _lines(path: Path) -> Iterator[bytes]:
    with _opened(path) as stream:
        left_bytes = _MOST_READ_BYTES
        while left_bytes > 0 and (line := stream.readline(left_bytes)):
            left_bytes -= len(line)
            if line.endswith(b"\n") and len(line) <= _MOST_LINE_BYTES:
                yield line
