"""Ask the site daemon one question. Used by the thread of `SiteLink` and by `hetstream site status`.

Every wait has a deadline. Nothing here decides anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import random
import re
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import msgspec

from hetstream.base.errors import ConfigError, HetstreamError
from hetstream.base.unix_sockets import StrangerListens, connect_to
from hetstream.hetjob.errors import SiteClosed, SiteError
from hetstream.hetjob.ports import JobDemand, MarkedJob, SiteReading
from hetstream.hetjob.site.messages import (
    LENGTH,
    MAX_ANSWER_BYTES,
    Answer,
    GrantLimit,
    Question,
    ReportDemand,
    decode_answer,
    encode_request,
    new_request,
)
from hetstream.hetjob.site.site_file import SITE_FILE, assignments

# Where the site daemon is, for jobs and for the daemon itself: one address in a variable or in the site's file.
#
# unix:/run/hetstream/daemon.sock      jobs on the daemon's own host; the kernel says who asks
# tcp://hetstream@controller:9420      jobs on any host; MUNGE says who asks, and only the user `hetstream` can read it

ADDRESS_VARIABLE = "HETSTREAM_DAEMON"
MUNGE_VARIABLE = "HETSTREAM_MUNGE_SOCKET"
# The kernel's limit for the path of a Unix socket (unix(7)), with its final zero.
_MAX_SOCKET_PATH = 107


@dataclass(frozen=True)
class UnixAddress:
    """A Unix socket on the daemon's host."""

    path: Path

    def __str__(self) -> str:
        return f"unix:{self.path}"


@dataclass(frozen=True)
class TcpAddress:
    """A TCP port.

    Attributes:
        user: whom the daemon runs as, by name or number: what jobs write can be read by this user alone.
    """

    user: str
    host: str
    port: int

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{self.user}@{host}:{self.port}"

    def reader_uid(self) -> int:
        """Return the daemon's user id.

        Raises:
            ConfigError: this host does not know the user.
        """
        if self.user.isdigit():
            return int(self.user)
        try:
            return pwd.getpwnam(self.user).pw_uid
        except KeyError as error:
            raise ConfigError(
                f"{ADDRESS_VARIABLE}={self}: no user {self.user} on this host. Name the daemon's user, or its number"
            ) from error


Address = UnixAddress | TcpAddress


@dataclass(frozen=True)
class SiteSettings:
    """How the daemon is reached.

    Attributes:
        address: None if the site has no daemon.
        munge_socket: where munged listens; None for the usual place.
    """

    address: Address | None
    munge_socket: Path | None


def parse_address(text: str) -> Address:
    """Read an address.

    Raises:
        ConfigError: another form.
    """
    unix = re.fullmatch(r"unix:(/.+)", text)
    if unix and len(unix[1].encode()) <= _MAX_SOCKET_PATH:
        return UnixAddress(Path(unix[1]))
    tcp = re.fullmatch(r"tcp://([\w.-]+)@([\w.-]+|\[[0-9A-Fa-f:.]+\]):(\d{1,5})", text)
    if tcp and int(tcp[3]) < 65536:
        return TcpAddress(tcp[1], tcp[2].strip("[]"), int(tcp[3]))
    raise ConfigError(
        f"address of the site daemon {text!r}: must be unix:/PATH (at most {_MAX_SOCKET_PATH} bytes) or "
        "tcp://USER@HOST:PORT, where USER is whom the daemon runs as"
    )


def read_settings(environ: Mapping[str, str], site_file: Path = SITE_FILE) -> SiteSettings:
    """Return what the environment says and, for variables that are not set there, the site's file. Empty means none.

    Raises:
        ConfigError: an address of another form.
    """
    try:
        text = site_file.read_text(errors="replace")
    except OSError:
        text = ""
    values = {**assignments(text), **environ}
    address, socket = values.get(ADDRESS_VARIABLE, ""), values.get(MUNGE_VARIABLE, "")
    return SiteSettings(parse_address(address) if address else None, Path(socket) if socket else None)


# MUNGE credentials: who wrote something, by the word of this cluster's munged. Used by both sides over TCP.
#
# It runs the commands `munge` and `unmunge`. A credential is encrypted for one reader, names its writer's user id, and
# is good for five minutes and, at one munged, once.

# munged answers within a millisecond or so; it is on the same host.
_TIMEOUT_S = 5.0


class Munge:
    """The munged of this host.

    Args:
        socket: where it listens; None for the usual place.
    """

    def __init__(self, socket: Path | None = None) -> None:
        self._options = [f"--socket={socket}"] if socket else []

    def encode(self, payload: bytes, reader_uid: int, timeout_s: float = _TIMEOUT_S) -> bytes:
        """Write a credential that only processes of one user can read.

        Raises:
            SiteError: munged does not answer, or MUNGE is not installed.
        """
        argv = ["munge", *self._options, f"--restrict-uid={reader_uid}"]
        return _run(argv, payload, timeout_s).strip()

    def check(self) -> None:
        """Refuse a host whose munged does not do what both sides need.

        Raises:
            SiteError: MUNGE is not installed, not running, or does not know its own credentials.
        """
        self.decode(self.encode(b"", os.geteuid()))

    def decode(self, credential: bytes) -> tuple[int, bytes]:
        """Return who wrote a credential, and what.

        Raises:
            SiteError: it is none, was read before, is too old, or is for another reader.
        """
        said = _run(["unmunge", *self._options, "--keys=STATUS,UID"], credential, _TIMEOUT_S)
        head, _, payload = said.partition(b"\n\n")  # the head comes first, whatever the payload looks like
        uid = re.search(rb"^UID:\s.*\((\d+)\)$", head, re.MULTILINE)
        if uid is None:
            raise SiteError(f"unmunge names no user: {head[:200]!r}. Check: munge -n | unmunge")
        return int(uid[1]), payload


def _run(argv: Sequence[str], data: bytes, timeout_s: float) -> bytes:
    try:
        done = subprocess.run(argv, input=data, capture_output=True, timeout=timeout_s)
    except subprocess.TimeoutExpired as error:
        raise SiteError(f"{argv[0]} did not answer within {timeout_s:g} s. Check: munge -n | unmunge") from error
    except OSError as error:
        raise SiteError(f"{argv[0]}: {error.strerror}. The site daemon is reached over TCP with MUNGE") from error
    if done.returncode:
        # Of a credential that is one, and does not count, unmunge says why as STATUS.
        status = re.search(rb"\ASTATUS:\s+(.*)$", done.stdout, re.MULTILINE)
        said = (done.stderr.strip() or (status[1] if status else b"nothing")).decode(errors="replace")
        raise SiteError(f"{argv[0]} exited with {done.returncode}: {said!r}. Check: munge -n | unmunge")
    return done.stdout


DEFAULT_LIMIT_S = 5.0


def ask(settings: SiteSettings, question: Question, limit_s: float = DEFAULT_LIMIT_S) -> Answer:
    """Ask, and wait for the answer.

    Args:
        settings: with an address.
        question: what to ask.
        limit_s: for all of it together.

    Raises:
        SiteError: no answer within the limit, or none that can be trusted.
        ConfigError: the daemon's user is unknown here.
    """
    deadline = _Deadline(time.monotonic() + limit_s)
    address = settings.address
    if address is None:
        raise SiteError("no address of a site daemon is set")
    request = new_request(question, time.time_ns())
    data = encode_request(request)
    if isinstance(address, TcpAddress):
        data = Munge(settings.munge_socket).encode(data, address.reader_uid(), deadline.left_s())
    try:
        with _connected(address, deadline) as connection:
            connection.settimeout(deadline.left_s())
            connection.sendall(LENGTH.pack(len(data)) + data)
            (length,) = LENGTH.unpack(_read(connection, LENGTH.size, deadline))
            if length > MAX_ANSWER_BYTES:
                raise SiteError(f"an answer of {length} bytes is announced: at most {MAX_ANSWER_BYTES} are read")
            return decode_answer(_read(connection, length, deadline), request.reply_key)
    except OSError as error:
        raise SiteError(f"{address} does not answer: {error.strerror or error}") from error


@dataclass(frozen=True)
class _Deadline:
    at_s: float

    def left_s(self) -> float:
        left_s = self.at_s - time.monotonic()
        if left_s <= 0:
            raise SiteError("the site daemon took too long to answer")
        return left_s


def _connected(address: UnixAddress | TcpAddress, deadline: _Deadline) -> socket.socket:
    if isinstance(address, TcpAddress):
        return socket.create_connection((address.host, address.port), deadline.left_s())
    try:
        return connect_to(address.path, socket.SOCK_STREAM, deadline.left_s())
    except StrangerListens as error:
        raise SiteError(
            f"{error} listens at {address}, who is neither root nor user {os.geteuid()}, nor has root given "
            f"{address.path.parent} to him alone: he is not asked"
        ) from error


def _read(connection: socket.socket, count: int, deadline: _Deadline) -> bytes:
    data = bytearray()
    while len(data) < count:
        connection.settimeout(deadline.left_s())
        part = connection.recv(min(65536, count - len(data)))
        if not part:
            raise SiteClosed(
                "the site daemon closed the connection: it does not know who asks, could not read the question, or is "
                "of another release of hetstream; its log says which"
            )
        data += part
    return bytes(data)


# A job's link to the site daemon: a thread that reports the job's demand and keeps the newest limit.
#
# Made by the job master where a site daemon is set. `report` and `data_workers` never wait. A daemon that does not
# answer changes nothing at once: the last limit holds for `HOLD_S`, so that a restart of the daemon does not make all
# jobs grow, and then there is none.

log = logging.getLogger(__name__)

HOLD_S = 120.0
_FIRST_RETRY_S = 2.0
_LONGEST_RETRY_S = 30.0
# A daemon of version 1 of the protocol may be replaced while the job runs.
_TRY_NEWER_S = 600.0
_SHORTEST_S, _LONGEST_S = 1.0, 300.0
# Nothing waits for the thread for longer: it holds no lock and no file between two questions.
_JOIN_S = 6.0


@contextlib.contextmanager
def linked(environ: Mapping[str, str], job_id: int) -> Iterator[SiteLink | None]:
    """The job's link while it runs; None where no site daemon is set. A wrong address is no reason to fail a job."""
    try:
        settings = read_settings(environ)
    except ConfigError as error:
        log.warning("no link to the site daemon: %s", error)
        settings = SiteSettings(None, None)
    if settings.address is None:
        yield None
        return
    log.info("job=%d reports to the site daemon at %s", job_id, settings.address)
    with SiteLink(settings, job_id) as link:
        yield link


class SiteLink:
    """The thread; `hetstream.hetjob.ports.SiteLimit` for the elastic controller.

    Args:
        settings: with an address.
        job_id: of the leader.
        clock: seconds, never going back.
    """

    def __init__(self, settings: SiteSettings, job_id: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._job_id = job_id
        self._clock = clock
        self._news = threading.Condition()
        self._demand: ReportDemand | None = None
        self._said: ReportDemand | None = None
        self._granted: GrantLimit | None = None
        self._granted_s = 0.0
        self._asked_s = 0.0
        self._closed = False
        self._problem = ""
        self._old_until_s = float("-inf")
        self._has_told_old = False
        self._thread = threading.Thread(target=self._run, name="hetstream-site", daemon=True)
        self._thread.start()

    def report(self, demand: JobDemand) -> None:
        """Say what the job has and wants, as in `ReportDemand`. A change is sent at once, the rest when it is due."""
        report = ReportDemand(
            job_id=self._job_id,
            minimum=demand.minimum,
            current=demand.current,
            wanted=max(demand.wanted, demand.minimum),
            cpus=demand.cpus,
            wait_share=min(max(demand.wait_share, 0.0), 1.0),
            measured=demand.measured,
        )
        with self._news:
            self._demand = report
            self._news.notify()

    def data_workers(self) -> int | None:
        """Return how many data workers the job may have, minimum included; None where nobody limits it."""
        with self._news:
            granted, held_s = self._granted, self._clock() - self._granted_s
        return granted.limit if granted is not None and held_s < HOLD_S else None

    def preferred_nodes(self) -> Sequence[str]:
        """Return where the next data workers would be best, as the newest answer says."""
        with self._news:
            granted, held_s = self._granted, self._clock() - self._granted_s
        return granted.nodes if granted is not None and held_s < HOLD_S else ()

    def marked(self, mark: str) -> SiteReading | None:
        """This job's companions with this word in their comment, in the daemon's last reading; None if it told none."""
        with self._news:
            granted, asked_s = self._granted, self._asked_s
        if granted is None or granted.read_age_s is None:
            return None
        seen = [
            MarkedJob(companion.job_id, companion.state, companion.num_cpus)
            for companion in granted.companions
            if companion.mark == mark
        ]
        # Not after the answer has come: it may have been on its way for seconds.
        return SiteReading(asked_s - granted.read_age_s, seen)

    def close(self) -> None:
        """End the thread. A question that is on its way is waited for, a few seconds at most."""
        with self._news:
            self._closed = True
            self._news.notify()
        self._thread.join(_JOIN_S)

    def __enter__(self) -> SiteLink:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _run(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # they are the main thread's
        retry_s = _FIRST_RETRY_S
        next_s = soonest_s = self._clock()
        while True:
            demand = self._wait(next_s, soonest_s)
            if demand is None:
                return
            asked_s = self._clock()
            soonest_s = asked_s + _SHORTEST_S
            try:
                answer = self._ask(demand)
                if not isinstance(answer, GrantLimit):
                    self._note(f"the site daemon refuses the report of job={demand.job_id}: {answer}")
                    delay_s = _LONGEST_RETRY_S
                else:
                    self._take(demand, answer, asked_s)
                    delay_s = min(max(answer.next_s, _SHORTEST_S), _LONGEST_S)
                retry_s = _FIRST_RETRY_S
            except HetstreamError as error:
                self._note(f"the site daemon was not asked: {error}")
                # Not all jobs at once when the daemon is back.
                delay_s = retry_s * random.uniform(0.5, 1.0)
                retry_s = min(_LONGEST_RETRY_S, 2 * retry_s)
            except Exception as error:  # noqa: BLE001, the boundary of the thread: the job goes on without the site's word
                self._note(f"the link to the site daemon fails: {type(error).__name__}: {error}")
                delay_s = _LONGEST_RETRY_S
            next_s = self._clock() + delay_s

    def _ask(self, demand: ReportDemand) -> Answer:
        """Ask with all that was measured, or with what a daemon of version 1 of the protocol understands."""
        if demand.measured is None or self._clock() >= self._old_until_s:
            try:
                return ask(self._settings, demand)
            except SiteClosed:
                if demand.measured is None:
                    raise
        answer = ask(self._settings, msgspec.structs.replace(demand, measured=None))
        if self._clock() >= self._old_until_s:
            self._old_until_s = self._clock() + _TRY_NEWER_S
        if not self._has_told_old:
            self._has_told_old = True
            log.info("the site daemon speaks version 1: it is not told what job=%d has measured", demand.job_id)
        return answer

    def _wait(self, next_s: float, soonest_s: float) -> ReportDemand | None:
        """The newest demand when it is time to report it, for one that has changed the sooner; None at the end."""
        with self._news:
            while not self._closed:
                due_s = min(next_s, soonest_s) if self._has_changed() else next_s
                left_s = due_s - self._clock()
                if self._demand is not None and left_s <= 0:
                    return self._demand
                self._news.wait(left_s if self._demand is not None else None)
        return None

    def _has_changed(self) -> bool:
        """Whether the job wants something else than what the daemon has answered."""
        new, said = self._demand, self._said
        if new is None or said is None:
            return False
        return (new.minimum, new.wanted, new.cpus) != (said.minimum, said.wanted, said.cpus)

    def _take(self, demand: ReportDemand, granted: GrantLimit, asked_s: float) -> None:
        with self._news:
            self._asked_s = asked_s
            before, self._granted, self._granted_s = self._granted, granted, self._clock()
            self._said = demand
        self._problem = ""
        if before is None or before.limit != granted.limit:
            log.info("job=%d site limit=%s: %s", demand.job_id, granted.limit, granted.reason)

    def _note(self, problem: str) -> None:
        """Say it once, not every time."""
        if problem != self._problem:
            log.warning("%s", problem)
        self._problem = problem
