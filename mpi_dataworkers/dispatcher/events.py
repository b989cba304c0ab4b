"""What happens in a service, with its causes: typed events, and the file that keeps them.

`DispatcherState` returns them among its instructions; the log shows `render()`, `events.jsonl` holds all fields.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import Any

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory
from hetstream.mpi_dataworkers.wire.messages import RegisterLoader, Steered


class Event(msgspec.Struct, frozen=True, tag_field="event", tag=True, kw_only=True):
    """Base of all events.

    Attributes:
        cause: why, in words; "" where the event says it all.
    """

    cause: str = ""

    @property
    def subject(self) -> str:
        """Whom or what it happened to, in the words of the logs: `data_worker=3`."""
        raise NotImplementedError

    @property
    def happened(self) -> str:
        """What happened to it, in words."""
        raise NotImplementedError

    def render(self) -> str:
        """Return the event on one line."""
        return f"{self.subject} {self.happened}" + (f": {self.cause}" if self.cause else "")

    def as_json(self, time_s: float) -> bytes:
        """Return a line of `events.jsonl`, without its end: time (s since 1970, UTC), event, subject, cause, other
        fields.
        """
        fields: dict[str, Any] = msgspec.to_builtins(self)
        head = {"time": round(time_s, 3), "event": fields.pop("event"), "subject": self.subject}
        return msgspec.json.encode({**head, "cause": fields.pop("cause"), **fields})


class DispatcherStarted(Event, frozen=True, kw_only=True):
    """The dispatcher can be reached."""

    incarnation: int
    address: str
    num_pipelines: int
    num_expected_workers: int

    @property
    def subject(self) -> str:
        return "dispatcher"

    @property
    def happened(self) -> str:
        recovered = self.num_pipelines or self.num_expected_workers
        known = f" knows={self.num_pipelines} pipelines, {self.num_expected_workers} data workers" if recovered else ""
        return f"ready address={self.address} incarnation={self.incarnation}{known}"


class DispatcherStopped(Event, frozen=True, kw_only=True):
    """The dispatcher was asked to end the service."""

    @property
    def subject(self) -> str:
        return "dispatcher"

    @property
    def happened(self) -> str:
        return "ends the service"


class MessageRefused(Event, frozen=True, kw_only=True):
    """A peer's message was none, or one that it must not send."""

    peer: str

    @property
    def subject(self) -> str:
        return f"peer={self.peer[:8]}"

    @property
    def happened(self) -> str:
        return "had a message refused"


# --- data workers ---------------------------------------------------------------------------------------------------


class _OfWorker(Event, frozen=True, kw_only=True):
    data_worker: int

    @property
    def subject(self) -> str:
        return f"data_worker={self.data_worker}"


class DataWorkerRegistered(_OfWorker, frozen=True, kw_only=True):
    """A data worker process offers itself, or is back after a cut."""

    host: str
    pid: int
    num_held: int

    @property
    def happened(self) -> str:
        return f"host={self.host} pid={self.pid} registered" + (
            f" holding={self.num_held} leases" * bool(self.num_held)
        )


class DataWorkerLost(_OfWorker, frozen=True, kw_only=True):
    """A data worker process is not there any more; `orderly` when it said so."""

    host: str
    pid: int
    orderly: bool

    @property
    def happened(self) -> str:
        return f"host={self.host} pid={self.pid} {'gone' if self.orderly else 'lost'}"


class DataWorkerDrains(_OfWorker, frozen=True, kw_only=True):
    """A data worker gets no more leases and leaves after the step in work."""

    @property
    def happened(self) -> str:
        return "drains"


class ProcessAdded(_OfWorker, frozen=True, kw_only=True):
    """A further process was asked for in a data worker's slot."""

    @property
    def happened(self) -> str:
        return "gets another process beside it"


class DataWorkerUnreachable(_OfWorker, frozen=True, kw_only=True):
    """A data worker cannot deliver to a loader, and gets no leases of it for `for_s` seconds."""

    rank: int
    for_s: float

    @property
    def happened(self) -> str:
        return f"does not reach rank={self.rank}, next try in {self.for_s:g} s"


class DataWorkerPaused(_OfWorker, frozen=True, kw_only=True):
    """A data worker fails what others can make, and gets no leases of the pipeline for `for_s` seconds."""

    host: str
    pipeline_id: str
    for_s: float

    @property
    def happened(self) -> str:
        return f"host={self.host} is paused for pipeline={self.pipeline_id[:8]}, next try in {self.for_s:g} s"


class DataWorkersMissing(Event, frozen=True, kw_only=True):
    """Data workers of before the dispatcher's restart did not come back."""

    num_missing: int

    @property
    def subject(self) -> str:
        return f"data_workers={self.num_missing}"

    @property
    def happened(self) -> str:
        return "of before the restart did not come back"


class DataWorkersChanged(Event, frozen=True, kw_only=True):
    """An elastic controller changes the number of data workers, or servers: `action` is grow, drain or cancel."""

    action: str
    count: int
    device: Steered = "cpu"

    @property
    def subject(self) -> str:
        return {"cpu": "data_workers", "gpu": "gpu_data_workers", "embedding": "embedding_servers"}[self.device]

    @property
    def happened(self) -> str:
        return f"{self.action} by {self.count}" if self.action == "grow" else f"{self.action} {self.count}"


# --- loaders and their sessions --------------------------------------------------------------------------------------


class _OfLoader(Event, frozen=True, kw_only=True):
    job: str
    rank: int
    host: str
    pid: int
    title: str = ""

    @property
    def subject(self) -> str:
        return f"loader {self.title or f'job={self.job}'} rank={self.rank}"


def loader_fields(loader: RegisterLoader) -> dict[str, Any]:
    """Return what an event about a loader says of it."""
    who = {"job": loader.job_name, "rank": loader.rank, "host": loader.host, "pid": loader.pid}
    return who | {"title": loader.title}


class LoaderConnected(_OfLoader, frozen=True, kw_only=True):
    """A loader introduced itself, or is back after a cut."""

    @property
    def happened(self) -> str:
        return f"host={self.host} pid={self.pid} connected"


class LoaderLost(_OfLoader, frozen=True, kw_only=True):
    """A loader is not there any more; `orderly` when it was closed."""

    orderly: bool
    steps: int

    @property
    def happened(self) -> str:
        return f"{'left' if self.orderly else 'lost'} after {self.steps} steps"


class LoaderAlone(_OfLoader, frozen=True, kw_only=True):
    """A loader divides its data with ranks that do not have it; their share is read by nobody."""

    missing_ranks: list[int]

    @property
    def happened(self) -> str:
        return f"divides its data with ranks {', '.join(map(str, self.missing_ranks[:8]))}, which have no such loader"


class LoaderUnfit(_OfLoader, frozen=True, kw_only=True):
    """A loader's program runs another Python than all data workers."""

    interpreter: str

    @property
    def happened(self) -> str:
        return f"makes its batches itself: {self.interpreter} is not what the data workers run"


class PipelineRemembered(Event, frozen=True, kw_only=True):
    """A pipeline came, for data workers to fetch."""

    pipeline_id: str
    num_bytes: int

    @property
    def subject(self) -> str:
        return f"pipeline={self.pipeline_id[:8]}"

    @property
    def happened(self) -> str:
        return f"remembered, {self.num_bytes} bytes"


class _OfSession(Event, frozen=True, kw_only=True):
    session: str

    @property
    def subject(self) -> str:
        return f"session={self.session}"


class SessionOpened(_OfSession, frozen=True, kw_only=True):
    """A loader began a session; `num_steps` -1 while its end is unknown."""

    job: str
    rank: int
    epoch: int
    first_step: int
    num_steps: int

    @property
    def happened(self) -> str:
        return f"rank={self.rank} epoch={self.epoch} opened at step {self.first_step}"


class SessionClosed(_OfSession, frozen=True, kw_only=True):
    """A session ended: at its last step, or before."""

    step: int
    num_steps: int

    @property
    def happened(self) -> str:
        return f"closed at step {self.step} of {self.num_steps if self.num_steps >= 0 else 'unknown'}"


class SessionMeasured(_OfSession, frozen=True, kw_only=True):
    """A data worker came to the end of a shard whose length nobody knew."""

    num_steps: int

    @property
    def happened(self) -> str:
        return f"has {self.num_steps} steps"


class StepsGivenUp(_OfSession, frozen=True, kw_only=True):
    """Steps were lost in a session that is read at most once; `stop_step` -1 for all that follow."""

    ranges: list[tuple[int, int]]

    @property
    def happened(self) -> str:
        return "lost steps " + ", ".join(f"{first}-{stop if stop >= 0 else ''}" for first, stop in self.ranges)


class StepFailed(_OfSession, frozen=True, kw_only=True):
    """A data worker could not make a step: user code raised, hung or ended the process.

    Attributes:
        sample: -1 when it was not one sample.
        verdict: what becomes of the step, in words.
    """

    step: int
    sample: int
    host: str
    pid: int
    verdict: str
    traceback: str

    @property
    def happened(self) -> str:
        sample = f" sample={self.sample}" if self.sample >= 0 else ""
        return f"step={self.step}{sample} failed on host={self.host} pid={self.pid} and is {self.verdict}"


# --- leases ---------------------------------------------------------------------------------------------------------


class _OfLease(Event, frozen=True, kw_only=True):
    lease: int
    session: str
    data_worker: int
    first_step: int
    stop_step: int

    @property
    def subject(self) -> str:
        return f"lease={self.lease}"

    @property
    def _steps(self) -> str:
        return f"steps={self.first_step}-{self.stop_step}"


class LeaseRevoked(_OfLease, frozen=True, kw_only=True):
    """A lease was revoked: its missing steps are leased again. `data_worker` -1 when that is gone already."""

    @property
    def happened(self) -> str:
        return f"{self._steps} revoked"


class LeaseTrimmed(_OfLease, frozen=True, kw_only=True):
    """The end of a lease went to another data worker, `to_data_worker`, that was idle."""

    to_data_worker: int

    @property
    def happened(self) -> str:
        return f"{self._steps} go to idle data_worker={self.to_data_worker}"


ALL_EVENTS = (
    DispatcherStarted
    | DispatcherStopped
    | MessageRefused
    | DataWorkerRegistered
    | DataWorkerLost
    | DataWorkerDrains
    | ProcessAdded
    | DataWorkerUnreachable
    | DataWorkerPaused
    | DataWorkersMissing
    | DataWorkersChanged
    | LoaderConnected
    | LoaderLost
    | LoaderAlone
    | LoaderUnfit
    | PipelineRemembered
    | SessionOpened
    | SessionClosed
    | SessionMeasured
    | StepsGivenUp
    | StepFailed
    | LeaseRevoked
    | LeaseTrimmed
)


# Events on disk: `events.jsonl` in the dispatcher's directory, one JSON object a line, bounded in size.
#
# Written by `server.py`; read by `hetstream job --events`, also after the job has ended.

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
    """Return the file that a full `events.jsonl` becomes."""
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
    """Return a line of the file in words; a line that is none, because the disk was full, as it is."""
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
