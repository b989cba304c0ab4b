"""The I/O of `hetstream site daemon`: sockets, credentials, the thread that reads the cluster, the store.

What jobs may have is decided in `registry.py`. Slurm is only read. Who cannot say who they are, or says what is no
question of the protocol, gets nothing but a closed connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from hetstream.base.errors import ConfigError, HetstreamError
from hetstream.base.limits import ConnectionLimit, RateLimit
from hetstream.base.unix_sockets import listen_at, peer_of
from hetstream.hetjob.errors import SiteError
from hetstream.hetjob.site.client import Munge, TcpAddress, UnixAddress
from hetstream.hetjob.site.messages import (
    LENGTH,
    MAX_QUESTION_BYTES,
    Answer,
    AskGpus,
    AskPolicy,
    AskReading,
    AskStatus,
    DecisionTaken,
    GpuNow,
    JobNow,
    NodeGpus,
    RefuseGpus,
    RefusePolicy,
    RefuseReading,
    ReportDemand,
    ReportGpus,
    SetPolicy,
    ShowGpus,
    ShowPolicy,
    ShowReading,
    ShowStatus,
    SiteRequest,
    TakeGpus,
    answer_mac,
    answer_text,
    decode_request,
)
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.slurm_plugin.client.model import Cluster, Job, names_of
from hetstream.slurm_plugin.client.read import hidden_by
from hetstream.slurm_plugin.daemon.registry import Change, Registry
from hetstream.slurm_plugin.daemon.settings import DaemonOptions, ReportIntervals, decode_settings
from hetstream.slurm_plugin.daemon.store import HISTORY_FILE, Store
from hetstream.slurm_plugin.errors import PolicyError, ServeError
from hetstream.slurm_plugin.insight.last_reading import MAX_PACKED_BYTES, pack
from hetstream.slurm_plugin.insight.observation import History, Monitor, Reading
from hetstream.slurm_plugin.policy.policies import POLICIES

# What the daemon answers to those who ask for its last reading: (reading) -> two answers. Pure.


@dataclass(frozen=True, slots=True)
class ReadingAnswers:
    """The answers of one reading, encoded.

    Attributes:
        to_all: to root and the daemon's own user, who see what the daemon sees.
        to_users: to everybody else.
    """

    to_all: bytes
    to_users: bytes


def offer(reading: Reading) -> ReadingAnswers:
    """Answer with the reading, or say why not."""
    if reading.observation is None:
        return _refusal(reading.error or "the first reading is not there yet")
    snapshot = reading.observation.snapshot
    packed = pack(snapshot)
    if len(packed) > MAX_PACKED_BYTES:
        return _refusal(f"the reading has {len(packed)} bytes: at most {MAX_PACKED_BYTES} are sent")
    text = answer_text(ShowReading(packed))
    hidden = hidden_by(snapshot.config)
    if not hidden:
        return ReadingAnswers(text, text)
    return ReadingAnswers(text, answer_text(RefuseReading(f"{hidden} shows each user another part of the cluster")))


def _refusal(reason: str) -> ReadingAnswers:
    text = answer_text(RefuseReading(reason))
    return ReadingAnswers(text, text)


# What nodes told of their shared GPUs, kept in memory for the packer: who may tell, and who may see. Pure.
#
# Readings are some seconds old or worth nothing, so none is written down: after the daemon's start they come again.

# Two reports may be lost before the packer holds a reading for too old.
REPORT_S = 5.0
# Silence after which a node is forgotten.
_FORGET_S = 600.0


class GpuReadings:
    """The last reading of each node.

    Args:
        trusted: users who may tell and see, beside root and this process's own. Jobs cannot run as one of these, so no
            job tells anything about itself.
    """

    def __init__(self, trusted: Collection[int] = ()) -> None:
        self._trusted = frozenset({0, os.geteuid(), *trusted})
        self._reports: dict[str, tuple[float, ReportGpus]] = {}

    def trusts(self, uid: int) -> bool:
        """Return whether a user may tell, and see all."""
        return uid in self._trusted

    def report(self, uid: int, report: ReportGpus, now_s: float) -> TakeGpus | RefuseGpus:
        """Take a node's word.

        Args:
            uid: of who reports.
            report: what it says.
            now_s: by a clock that never goes back.
        """
        if not self.trusts(uid):
            return RefuseGpus(
                f"user {uid} does not tell of GPUs here: start the daemon with --gpu-reporters={uid} if it should"
            )
        self._reports = {node: last for node, last in self._reports.items() if now_s - last[0] < _FORGET_S}
        self._reports[report.node] = now_s, report
        return TakeGpus(REPORT_S)

    def show(self, uid: int, hidden: str, wait_shares: Mapping[str, float], now_s: float) -> ShowGpus | RefuseGpus:
        """Return all readings.

        Args:
            uid: of who asks. How jobs fare, a user is told of his own alone.
            hidden: why users do not see all of the cluster; empty if they do.
            wait_shares: of jobs, by id; what jobs tell of themselves is for trusted users alone.
            now_s: as for `report`.
        """
        if hidden and not self.trusts(uid):
            return RefuseGpus(hidden)
        reports = sorted(self._reports.items())
        if self.trusts(uid):
            nodes = tuple(NodeGpus(node, now_s - at_s, report.gpus) for node, (at_s, report) in reports)
            return ShowGpus(nodes, dict(wait_shares))
        own = tuple(
            NodeGpus(node, now_s - at_s, tuple(_with_own_jobs(gpu, uid) for gpu in report.gpus))
            for node, (at_s, report) in reports
        )
        return ShowGpus(own, {})

    def answer(
        self, uid: int, question: ReportGpus | AskGpus, hidden: str, wait_shares: Mapping[str, float], now_s: float
    ) -> TakeGpus | ShowGpus | RefuseGpus:
        """Either of them."""
        if isinstance(question, ReportGpus):
            return self.report(uid, question, now_s)
        return self.show(uid, hidden, wait_shares, now_s)


def _with_own_jobs(gpu: GpuNow, uid: int) -> GpuNow:
    return msgspec.structs.replace(gpu, jobs=tuple(job for job in gpu.jobs if job.uid == uid))


log = logging.getLogger(__name__)

# A question is asked within milliseconds; who takes longer is broken, or wants to be in the way.
_CONNECTION_S = 5.0
_MAX_CONNECTIONS = 256
_BACKLOG = 128
# More of one user (over TCP: of one host) make room for each other, and nobody waits behind more of them than these.
_MAX_OF_ONE = 64
# Questions of one user (over TCP: of one host) a second; whoever asks more waits for his turn. All jobs of a site
# together are told to report half as often, so only a flood meets it.
_MAX_QUESTIONS_PER_S = 2 * ReportIntervals.max_reports_per_s
# No turn is further away: where a thousand jobs of one user start at once, each is answered while it still asks.
# With `_MAX_OF_ONE` connections the rate stays what it is, or little more.
_LONGEST_TURN_S = 0.5
# A crowd is told of once in this time.
_SAY_AGAIN_S = 60.0
# unmunge takes 2 ms of one core.
_NUM_DECODERS = 4
# Of an answer, what is handed to the kernel at once: many who read a large one slowly cost no memory.
_PIECE_BYTES = 64 << 10


class Daemon:
    """One life of the daemon.

    Args:
        options: how it runs.
        cluster: Slurm, to be read.
        store: of the state directory.
    """

    def __init__(self, options: DaemonOptions, cluster: Cluster, store: Store) -> None:
        self._options = options
        self._cluster = cluster
        self._store = store
        self._registry = Registry(
            store.jobs(),
            allocating=options.allocating,
            partitions=options.partitions,
            settings=store.settings(),
            pace=options.pace,
            promises=store.promises(),
            times=store.times(),
        )
        self._said_problem = ""
        self._munge = Munge(options.settings.munge_socket)
        self._decoders = ThreadPoolExecutor(_NUM_DECODERS, "hetstreamd-unmunge")
        self._since_s = time.time()
        self._reading = Reading()
        self._offered = offer(self._reading)
        self._num_readings = 0
        self._num_errors = 0
        self._wait_shares = self._registry.wait_shares()
        self._gpus = GpuReadings(options.gpu_reporters)
        self._connections: ConnectionLimit[asyncio.Task[None]] = ConnectionLimit(_MAX_CONNECTIONS, _MAX_OF_ONE)
        self._turns = RateLimit(_MAX_QUESTIONS_PER_S, int(_MAX_QUESTIONS_PER_S), _LONGEST_TURN_S)
        self._num_closed = 0
        self._say_closed_at = 0.0
        self._read_now = threading.Event()
        self._stopped = threading.Event()
        self._stop = asyncio.Event()
        self._failure: Exception | None = None

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT.

        Raises:
            ServeError: the address cannot be listened on.
            HistoryError: the history cannot be used.
        """
        loop = asyncio.get_running_loop()
        History(self._options.state_dir / HISTORY_FILE).close()  # what is wrong with it is said now, and by this thread
        async with contextlib.AsyncExitStack() as undo:
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self._stop.set)
                undo.callback(loop.remove_signal_handler, number)
            server, address = await self._listen()
            undo.callback(server.close)
            if isinstance(self._options.settings.address, UnixAddress):
                undo.callback(self._options.settings.address.path.unlink, missing_ok=True)
            undo.callback(self._decoders.shutdown, wait=False, cancel_futures=True)
            mode = "allocate" if self._options.allocating else "observe"
            log.info("mode=%s jobs=%d listening at %s", mode, len(self._registry.jobs), address)
            # A daemon thread: a command that waits for a dead slurmctld must not hold up the end.
            reader = threading.Thread(target=self._read_cluster, args=(loop,), name="hetstreamd-reader", daemon=True)
            reader.start()
            undo.callback(self._stop_reading)
            await self._stop.wait()
            for task in self._connections:
                task.cancel()
        if self._failure:
            raise self._failure
        log.info("stopping: a signal")

    async def _listen(self) -> tuple[asyncio.AbstractServer, str]:
        address = self._options.settings.address
        try:
            if isinstance(address, UnixAddress):
                # Anybody may ask: the kernel says who it is.
                listener = listen_at(address.path, socket.SOCK_STREAM, 0o666, _BACKLOG)
                server: asyncio.Server = await asyncio.start_unix_server(self._accept, sock=listener, backlog=_BACKLOG)
                return server, str(address)
            if isinstance(address, TcpAddress):
                if address.reader_uid() != os.geteuid():
                    raise ServeError(
                        f"{address}: what jobs write is for user {address.user} alone, and this is user id "
                        f"{os.geteuid()}. Start the daemon as {address.user}, or name its user in the address"
                    )
                _check_munge(self._munge, address)
                server = await asyncio.start_server(self._accept, address.host, address.port, backlog=_BACKLOG)
                port = server.sockets[0].getsockname()[1]
                return server, str(TcpAddress(address.user, address.host, port))
        except OSError as error:
            if isinstance(address, UnixAddress) and error.errno == errno.EADDRINUSE:
                raise ServeError(
                    f"{address} is in use by another daemon. Stop that one, or give another --address"
                ) from error
            raise ServeError(
                f"{address} cannot be listened on: {error.strerror or error}. Give another --address"
            ) from error
        raise ConfigError("the daemon needs an address to listen at")

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called by asyncio for each connection."""
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        owner = self._owner_of(writer)
        self._connections.enter(task, owner)
        task.add_done_callback(self._connections.leave)
        # Not in the task: one that is cancelled before it begins never comes to its `finally`.
        task.add_done_callback(lambda _: writer.transport.abort())
        while (surplus := self._connections.one_too_many()) is not None:
            # A question takes milliseconds: the oldest connection is the one that most likely asks nothing.
            self._connections.leave(surplus)
            surplus.cancel()
            self._num_closed += 1
        if self._num_closed and time.monotonic() >= self._say_closed_at:
            log.warning(
                "more connections than are held: %d were closed, the last when %s came", self._num_closed, owner
            )
            self._num_closed, self._say_closed_at = 0, time.monotonic() + _SAY_AGAIN_S

    def _owner_of(self, writer: asyncio.StreamWriter) -> str:
        """Whose connection it is: the user's, or over TCP the host's."""
        if isinstance(self._options.settings.address, TcpAddress):
            peer = writer.get_extra_info("peername")
            return f"host {peer[0]}" if peer else "a host"  # it may be gone by now
        return f"user {_user_of(writer)}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await asyncio.wait_for(self._converse(reader, writer), _CONNECTION_S)
        except SiteError as error:
            log.info("a connection is closed without an answer: %s", error)
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError) as error:
            log.debug("a connection asked nothing: %s", str(error) or type(error).__name__)
        except Exception:
            # The boundary of one connection: the others go on, and the fault is in the log.
            log.exception("a connection is closed without an answer")

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        if length > MAX_QUESTION_BYTES:
            raise SiteError(f"a question of {length} bytes is announced: at most {MAX_QUESTION_BYTES} are read")
        data = await reader.readexactly(length)
        await asyncio.sleep(self._turns.wait_s(self._owner_of(writer), time.monotonic()))
        uid, text = await self._authenticate(writer, data)
        request = decode_request(text)
        # A directory service may take its time over a name: not in the event loop.
        names = await asyncio.get_running_loop().run_in_executor(self._decoders, names_of, uid)
        reach("daemon.received")
        text = self._answer(uid, names, request)
        mac = answer_mac(text, request.reply_key)
        writer.transport.set_write_buffer_limits(0)  # so that `drain` means that the kernel has all of it
        writer.write(LENGTH.pack(len(mac) + len(text)) + mac)
        for begin in range(0, len(text), _PIECE_BYTES):
            writer.write(text[begin : begin + _PIECE_BYTES])
            await writer.drain()

    async def _authenticate(self, writer: asyncio.StreamWriter, data: bytes) -> tuple[int, bytes]:
        """Who asks, and what."""
        if isinstance(self._options.settings.address, TcpAddress):
            if not data.startswith(b"MUNGE:"):
                raise SiteError("what came is no MUNGE credential")
            return await asyncio.get_running_loop().run_in_executor(self._decoders, self._munge.decode, data)
        return _user_of(writer), data

    def _answer(self, uid: int, names: set[str], request: SiteRequest) -> bytes:
        question, now_s = request.question, time.time()
        sees_all = uid in (0, os.geteuid())
        if isinstance(question, AskReading):
            return self._offered.to_all if sees_all else self._offered.to_users
        if isinstance(question, AskStatus):
            return answer_text(self._status(None if sees_all else names, now_s))
        if isinstance(question, AskPolicy):
            return answer_text(self._policy(None if sees_all else names, question, now_s))
        if isinstance(question, SetPolicy):
            return answer_text(self._set_policy(sees_all, question, now_s))
        if isinstance(question, ReportGpus | AskGpus):
            hidden = self._hidden()
            return answer_text(self._gpus.answer(uid, question, hidden, self._wait_shares, time.monotonic()))
        return answer_text(self._report(names, question, request.sent_ns, now_s))

    def _hidden(self) -> str:
        """Why users do not see all of the cluster; empty if they do."""
        if self._reading.observation is None:
            return self._reading.error or "the first reading is not there yet"
        hidden = hidden_by(self._reading.observation.snapshot.config)
        return f"{hidden} shows each user another part of the cluster" if hidden else ""

    def _report(self, names: set[str], report: ReportDemand, sent_ns: int, now_s: float) -> Answer:
        answer, changes = self._registry.report(names, report, sent_ns, now_s)
        self._keep(changes)
        if self._registry.wants_reading:
            self._read_now.set()
        return answer

    def _policy(self, names: set[str] | None, question: AskPolicy, now_s: float) -> ShowPolicy:
        jobs = self._registry.now(names, question.job, now_s)
        return self._shown(jobs, self._store.decisions(names, question.job, question.num_decisions))

    def _set_policy(self, may_set: bool, question: SetPolicy, now_s: float) -> Answer:
        if not may_set:
            return RefusePolicy(
                f"only root and the daemon's own user (id {os.geteuid()}) set a policy. hetstream site policy says "
                "which it is"
            )
        try:
            settings = decode_settings(question.settings)
            changes = self._registry.would_change(settings, now_s)
        except PolicyError as error:
            return RefusePolicy(str(error))
        if not question.dry_run:
            self._store.save_settings(settings)
            log.info("policy=%s: set. settings=%s", settings.policy, question.settings)
            changes = self._registry.use(settings, now_s)
            self._keep(changes)
        return self._shown((), self._decisions(changes, settings.policy, now_s))

    def _shown(self, jobs: tuple[JobNow, ...], decisions: tuple[DecisionTaken, ...]) -> ShowPolicy:
        registry = self._registry
        return ShowPolicy(
            "allocate" if self._options.allocating else "observe",
            msgspec.json.encode(registry.settings).decode(),
            tuple(POLICIES),
            registry.pool_cpus,
            registry.problem,
            jobs,
            decisions,
        )

    def _decisions(self, changes: tuple[Change, ...], policy: str, now_s: float) -> tuple[DecisionTaken, ...]:
        is_told = self._options.allocating
        return tuple(
            DecisionTaken(now_s, change.job, change.user, change.before, change.after, policy, is_told, change.reason)
            for change in changes
        )

    def _status(self, names: set[str] | None, now_s: float) -> ShowStatus:
        return ShowStatus(
            "allocate" if self._options.allocating else "observe",
            self._since_s,
            self._num_readings,
            self._num_errors,
            self._reading.success_s,
            self._reading.error,
            self._registry.partitions,
            self._registry.pool_cpus,
            self._registry.status(names, now_s),
        )

    def _keep(self, changes: tuple[Change, ...]) -> None:
        """Write down what is new, then say it."""
        registry = self._registry
        if registry.touched:
            decisions = self._decisions(changes, registry.settings.policy, time.time())
            touched = {job: registry.jobs.get(job) for job in registry.touched}
            self._store.save(touched, decisions, registry.promises(touched), registry.times(touched))
            registry.touched.clear()
        self._wait_shares = registry.wait_shares()
        limit = "limit" if self._options.allocating else "would-be-limit"
        for change in changes:
            log.info("job=%s %s=%s before=%s: %s", change.job, limit, change.after, change.before, change.reason)
        if registry.problem != self._said_problem:
            self._said_problem = registry.problem
            if registry.problem:
                log.error("the last limits are kept: %s", registry.problem)

    def _take(self, reading: Reading, offered: ReadingAnswers) -> None:
        """Take a reading, in the event loop."""
        reach("daemon.read")
        self._reading, self._offered = reading, offered
        self._num_readings += 1
        self._num_errors += bool(reading.error)
        if reading.observation is None:
            return
        snapshot = reading.observation.snapshot
        missing = set(self._options.partitions or ()) - {partition.name for partition in snapshot.partitions}
        if missing:
            log.warning("--pool names what is no partition: %s", ", ".join(sorted(missing)))
        try:
            self._keep(self._registry.observe(snapshot, time.time()))
        except HetstreamError as error:
            log.error("the new limits were not kept, and are at the next reading: %s", error)

    def _read_cluster(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread: a reading in each interval, or soon after a job has come that Slurm did not know."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the daemon ends
            try:
                with History(self._options.state_dir / HISTORY_FILE) as history:
                    monitor = Monitor(self._cluster, self._shares_of, history)
                    while not self._stopped.is_set():
                        reading = monitor.read()
                        loop.call_soon_threadsafe(self._take, reading, offer(reading))
                        self._rest(self._options.interval_s - reading.read_s)
            except Exception as error:  # noqa: BLE001, the boundary of the thread: the daemon ends with it
                self._failure = error
                loop.call_soon_threadsafe(self._stop.set)

    def _rest(self, seconds: float) -> None:
        least_s = self._options.pace.least_interval_s
        if not self._stopped.wait(least_s):
            self._read_now.wait(max(0.0, seconds - least_s))
        self._read_now.clear()

    def _stop_reading(self) -> None:
        self._stopped.set()
        self._read_now.set()

    def _shares_of(self, jobs: Iterable[Job]) -> dict[str, float]:
        """What the jobs have reported, by their labels."""
        shares = self._wait_shares
        leaders = {job.label: str(job.het.het_job_id if job.het else job.job_id) for job in jobs if not job.trainer}
        return {
            label: shares[leader]
            for label, leader in leaders.items()
            if leader in shares and label in (leader, f"{leader}+0")
        }


def _user_of(writer: asyncio.StreamWriter) -> int:
    """The user id of the peer at a Unix socket, by the kernel's word."""
    peer: socket.socket = writer.get_extra_info("socket")
    return peer_of(peer)[1]


def _check_munge(munge: Munge, address: TcpAddress) -> None:
    """Over TCP nobody could say who asks without MUNGE: better no daemon than one that answers nobody."""
    try:
        munge.check()
    except SiteError as error:
        raise ServeError(
            f"{address} needs MUNGE, here and on all nodes with jobs: {error}. A cluster with AuthType=auth/slurm may "
            "have none: run munged beside it, or listen at a unix: address, for jobs of this host alone"
        ) from error
