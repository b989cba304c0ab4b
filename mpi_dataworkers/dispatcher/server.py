"""The dispatcher's loop: take a burst of messages, decide, commit, send, report. All decisions are in `state.py`.

Called by `hetstream internal dispatcher`. It never sees a sample, and never unpickles what it stores for data workers.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import secrets
import shutil
import sqlite3
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from hetstream.base import typed_json
from hetstream.base.errors import HetstreamError
from hetstream.base.files import Directory, UntrustedFile, own_directory
from hetstream.base.locks import HeldByAnother, hold_directory
from hetstream.mpi_dataworkers.dispatcher.events import DispatcherStarted, DispatcherStopped, EventLog
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.dispatcher.tables import (
    ForgetPipeline,
    ForgetWorker,
    Instruction,
    RememberPipeline,
    RememberStats,
    RememberWorker,
    ReportEvent,
    Send,
)
from hetstream.mpi_dataworkers.errors import AddressInUse, ProtocolError, ServiceError
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.mpi_dataworkers.process.interpreter import give_back_freed_memory
from hetstream.mpi_dataworkers.transports.base import Disconnected, DispatcherEndpoint, Received, parse_peer
from hetstream.mpi_dataworkers.transports.zmq import ZmqDispatcherEndpoint, new_keys
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, remove_address_file, write_address_file
from hetstream.mpi_dataworkers.wire.messages import LoaderStats, ProvidePipeline, RegisterLoader, ShutDown, ToDispatcher
from hetstream.mpi_dataworkers.wire.pipeline_transfer import is_there, remove_all, remove_unused

if TYPE_CHECKING:
    from hetstream.base.prometheus import MetricsServer

# What the dispatcher remembers across its own death: SQLite in WAL mode, one commit for each burst of messages.
#
# It holds the number of starts (the high half of fencing tokens), the keys and the port, the pipelines, which data
# workers are registered, and what each loader has delivered. It does not hold leases or positions: the loaders are the
# authority on what they have, and say it again when they meet a restarted dispatcher. So recovery does not depend on
# how far the epoch is.

_log = logging.getLogger(__name__)

# Also of the messages in it: a release whose `ProvidePipeline` or `LoaderStats` has another form has another number.
_SCHEMA_VERSION = 3
_DATABASE = "journal.sqlite"
# SQLite writes its log back into the database after about 4 MiB; the file is cut to this then.
_MAX_WAL_BYTES = 1 << 20
# A commit that takes longer is told: nobody is answered meanwhile, and after 5 s loaders make their steps themselves.
_SLOW_S = 1.0
# A pipeline is stored in parts, because SQLite takes blobs up to 10**9 bytes.
_PART_BYTES = 256 << 20
_SCHEMA = """
create table if not exists facts (name text primary key, value text not null);
create table if not exists pipelines (id text, part integer, message blob not null, primary key (id, part));
create table if not exists loaders (
  job_name text, ordinal integer, rank integer, pid integer, host text, stats blob not null, title text not null,
  primary key (job_name, ordinal, rank, pid, host)
);
create table if not exists workers (peer text primary key);
"""


def remove_leftovers(work_dir: Path) -> None:
    """Remove the directory of a dispatcher that was killed, so that the next one there begins anew.

    Raises:
        ServiceError: the dispatcher lives.
    """
    if not work_dir.is_dir():
        return
    with Directory.open(work_dir) as directory:
        lock = _locked(directory)
    try:
        shutil.rmtree(work_dir)
    finally:
        os.close(lock)


def _locked(directory: Directory) -> int:
    """The descriptor whose lock says that this process has the directory."""
    try:
        return hold_directory(directory)
    except HeldByAnother as error:
        raise ServiceError(
            f"work directory {directory.path} is in use by the dispatcher with process id {error}. One dispatcher a "
            "directory: stop that one, or give another --work-dir."
        ) from error


class Journal:
    """The dispatcher's memory in `work_dir`; one process at a time.

    Args:
        work_dir: made with mode 0700 where it does not exist.

    Raises:
        ServiceError: another dispatcher holds the directory, somebody else may have a hand in it, or the journal in
            it is damaged or of another release.
    """

    def __init__(self, work_dir: Path) -> None:
        self.path = work_dir / _DATABASE
        try:
            with own_directory(work_dir) as directory:
                self._lock = _locked(directory)
                self._prepare(directory)
        except UntrustedFile as error:
            raise ServiceError(
                f"work directory {work_dir} cannot be used: {error.strerror or error}. It holds the keys of the "
                "service, and is to be this user's alone: give another --work-dir"
            ) from error
        try:
            self._open()
        except (sqlite3.Error, msgspec.MsgspecError, ValueError) as error:
            os.close(self._lock)
            raise ServiceError(
                f"journal {self.path} cannot be used: {error}. Move it away and start the dispatcher again; loaders "
                "and data workers that still run register anew."
            ) from error

    def _open(self) -> None:
        self._database = sqlite3.connect(self.path, isolation_level=None)
        try:
            self._database.execute("pragma journal_mode=wal")
            self._database.execute("pragma synchronous=full")
            self._database.execute(f"pragma journal_size_limit={_MAX_WAL_BYTES}")
            self._check()
            self._database.executescript(_SCHEMA)
            self._read()
            self.begin()
            self.set_fact("schema_version", str(_SCHEMA_VERSION))
            self.set_fact("incarnation", str(self.incarnation))
            self.commit()
        except Exception:
            self._database.close()
            raise

    def _prepare(self, directory: Directory) -> None:
        """Make the file with mode 0600, and refuse what somebody else has put where SQLite looks."""
        try:
            os.close(directory.open_file(_DATABASE, os.O_RDWR | os.O_CREAT))
            for name in (f"{_DATABASE}-wal", f"{_DATABASE}-shm", f"{_DATABASE}-journal"):
                with contextlib.suppress(FileNotFoundError):
                    os.close(directory.open_file(name, os.O_RDWR))
        except BaseException:
            os.close(self._lock)
            raise

    def _check(self) -> None:
        """Refuse what SQLite itself finds damaged: pages, order, duplicates in an index. It is small, so all of it."""
        found = [str(row[0]) for row in self._database.execute("pragma integrity_check")]
        if found != ["ok"]:
            raise ValueError("; ".join(found[:3]))

    def _read(self) -> None:
        """Read all of it, so that damage is found now and not when the value is needed."""
        version = self.fact("schema_version")
        others = [name for (name,) in self._database.execute("select name from facts where name != 'schema_version'")]
        if version not in ("", str(_SCHEMA_VERSION)):
            raise ValueError(f"it has schema version {version}, this release reads {_SCHEMA_VERSION} (docs/upgrade.md)")
        if others and not version:
            raise ValueError(f"the schema version is missing, and {others[0]!r} is there")
        self.incarnation = int(self.fact("incarnation", "0" if not version else "missing")) + 1
        self.keys: list[str] = typed_json.decode(self.fact("keys", "[]"), list[str])
        if len(self.keys) not in (0, 5):
            raise ValueError(f"{len(self.keys)} keys instead of 5")
        if self.fact("port") and not 0 < int(self.fact("port")) < 65536:
            raise ValueError(f"port {self.fact('port')}")
        self.pipelines = []
        rows = self._database.execute("select id, message from pipelines order by id, part")
        for name, parts in itertools.groupby(rows, key=lambda row: row[0]):
            blob = b"".join(part for _, part in parts)
            pipeline = msgspec.msgpack.decode(blob, type=ProvidePipeline)
            if pipeline.pipeline_id != name:
                raise ValueError(f"the pipeline {pipeline.pipeline_id} is filed as {name}")
            self.pipelines.append(pipeline)
        self.workers = {str(row[0]) for row in self._database.execute("select peer from workers")}
        self.loaders()

    def begin(self) -> None:
        """Start a group of changes."""
        self._database.execute("begin")

    def commit(self) -> None:
        """Make the group durable; only then may messages that rest on it leave."""
        reach("dispatcher.before_commit")
        began_s = time.monotonic()
        self._database.execute("commit")
        took_s = time.monotonic() - began_s
        if took_s > _SLOW_S:
            _log.warning(
                "the disk of %s took %.1f s for a commit, and nobody was answered meanwhile. --journal-dir puts the "
                "journal on another disk", self.path, took_s,
            )  # fmt: skip
        reach("dispatcher.after_commit")

    def fact(self, name: str, default: str = "") -> str:
        """Return a remembered text, or `default`."""
        row = self._database.execute("select value from facts where name = ?", (name,)).fetchone()
        return str(row[0]) if row else default

    def set_fact(self, name: str, value: str) -> None:
        """Remember a text."""
        self._database.execute("insert or replace into facts values (?, ?)", (name, value))

    def remember_pipeline(self, pipeline: ProvidePipeline) -> None:
        """Remember a pipeline, so that a data worker can fetch it after a restart."""
        blob = memoryview(msgspec.msgpack.encode(pipeline))
        self.forget_pipeline(pipeline.pipeline_id)
        for part, start in enumerate(range(0, len(blob), _PART_BYTES)):
            row = pipeline.pipeline_id, part, blob[start : start + _PART_BYTES]
            self._database.execute("insert into pipelines values (?, ?, ?)", row)

    def forget_pipeline(self, pipeline_id: str) -> None:
        """Forget a pipeline that nobody uses."""
        self._database.execute("delete from pipelines where id = ?", (pipeline_id,))

    def remember_worker(self, peer: str) -> None:
        """Remember that a data worker is registered."""
        self._database.execute("insert or replace into workers values (?)", (peer,))

    def forget_worker(self, peer: str) -> None:
        """Forget a data worker that is lost."""
        self._database.execute("delete from workers where peer = ?", (peer,))

    def remember_stats(self, loader: RegisterLoader, stats: LoaderStats) -> None:
        """Remember what a loader has delivered so far."""
        key = (loader.job_name, loader.ordinal, loader.rank, loader.pid, loader.host)
        blob = msgspec.msgpack.encode(stats)
        values = (*key, blob, loader.title)
        self._database.execute("insert or replace into loaders values (?, ?, ?, ?, ?, ?, ?)", values)

    def loaders(self) -> list[dict[str, str | int | float]]:
        """Return what every loader has delivered, one flat row each."""
        rows = self._database.execute("select * from loaders order by job_name, ordinal, rank, pid")
        return [
            {"job_name": name, "title": title, "ordinal": ordinal, "rank": rank, "pid": pid, "host": host}
            | msgspec.structs.asdict(msgspec.msgpack.decode(stats, type=LoaderStats))
            for name, ordinal, rank, pid, host, stats, title in rows
        ]

    def close(self) -> None:
        """Release the directory."""
        self._database.close()
        os.close(self._lock)


SUMMARY_FILE = "summary.json"
_METRICS_S = 1.0
# How often files of pipelines that nobody uses are looked for.
_SWEEP_S = 10.0
# At its end the dispatcher takes messages on their way until none came for the first time, or the second has passed.
_QUIET_S = 0.05
_LAST_S = 0.5


def serve(
    bind: str,
    work_dir: Path,
    address_file: Path,
    should_stop: Callable[[], bool],
    metrics_at: tuple[str, int] | None = None,
) -> None:
    """Run a dispatcher until `should_stop()`; write `work_dir/summary.json` at the end.

    Started again with the same directory it keeps its keys, and its port unless another process has taken that: loaders
    and data workers find it by the address file.

    Args:
        bind: `tcp://HOST:PORT`; with port 0 a free one is found at the first start and kept.
        work_dir: the journal's directory.
        address_file: written, mode 0600, when the dispatcher is ready, and removed at its end.
        should_stop: asked between bursts, several times a second.
        metrics_at: host and port at which to serve Prometheus metrics. Where that fails, the log says so and the
            service goes on: a job is worth more than its metrics.

    Raises:
        ServiceError: the directory is in use or damaged, or the address cannot be bound.
    """
    give_back_freed_memory()
    journal = Journal(work_dir)
    try:
        endpoint, service = _open_endpoint(bind, journal, address_file)
        event_log = EventLog(work_dir)
        metrics = None
        try:
            write_address_file(address_file, service)
            ready = DispatcherStarted(
                incarnation=journal.incarnation,
                address=service.address,
                num_pipelines=len(journal.pipelines),
                num_expected_workers=len(journal.workers),
            )
            event_log.report([ready])
            state = DispatcherState(journal.incarnation, time.monotonic(), journal.workers)
            for pipeline in journal.pipelines:
                # The loader that has it is asked again where the file is gone.
                if is_there(pipeline.contents, service.pipelines_dir):
                    state.tables.pipelines[pipeline.pipeline_id] = pipeline
            metrics = _open_metrics(metrics_at, state)
            _loop(state, journal, event_log, metrics, endpoint, should_stop, service.pipelines_dir)
            event_log.report([DispatcherStopped(cause="it was told to")])
            # First: who is not connected is not told, and looks there.
            remove_address_file(address_file, service)
            for peer in (*state.tables.loaders, *state.tables.workers):
                endpoint.send(peer, ShutDown())
            _write_summary(state, journal, work_dir)
            remove_all(service.pipelines_dir)
        finally:
            if metrics is not None:
                metrics.close()
            event_log.close()
            endpoint.close()
    finally:
        journal.close()


def _open_endpoint(bind: str, journal: Journal, address_file: Path) -> tuple[ZmqDispatcherEndpoint, ServiceAddress]:
    if not journal.keys:
        journal.keys = [*new_keys(), *new_keys(), secrets.token_hex(32)]
        journal.begin()
        journal.set_fact("keys", json.dumps(journal.keys))
        journal.commit()
    server_public, server_secret, client_public, client_secret, batch_key = journal.keys
    host = bind.removeprefix("tcp://").rpartition(":")[0]
    kept_port = journal.fact("port")
    wants_any_port = bind.endswith(":0")
    where = f"tcp://{host}:{kept_port}" if kept_port and wants_any_port else bind
    try:
        endpoint = ZmqDispatcherEndpoint(where, server_secret, server_public, client_public)
    except AddressInUse as error:
        if where == bind:
            raise
        # Anybody may have taken it while this service was away. Peers look into the address file, and know the key.
        _log.warning("%s; the dispatcher takes another port, and the address file names it", error)
        endpoint = ZmqDispatcherEndpoint(bind, server_secret, server_public, client_public)
    journal.begin()
    journal.set_fact("port", endpoint.address.rpartition(":")[2])
    journal.commit()
    keys = server_public, client_public, client_secret, batch_key
    return endpoint, ServiceAddress(endpoint.address, *keys, address_file)


def _open_metrics(where: tuple[str, int] | None, state: DispatcherState) -> MetricsServer | None:
    if where is None:
        return None
    try:
        from hetstream.base.prometheus import MetricsServer  # it is an extra
        from hetstream.mpi_dataworkers.dispatcher.metrics import ServiceCollector

        server = MetricsServer(*where, ServiceCollector(state.status(time.monotonic())))
    except HetstreamError as error:
        _log.error("no metrics: %s", error)
        return None
    except OSError as error:
        _log.error("no metrics: metrics cannot be served at %s:%d: %s", *where, error.strerror)
        return None
    _log.info("metrics at %s", server.url)
    return server


def _loop(
    state: DispatcherState,
    journal: Journal,
    event_log: EventLog,
    metrics: MetricsServer | None,
    endpoint: DispatcherEndpoint,
    should_stop: Callable[[], bool],
    pipelines_dir: Path,
) -> None:
    next_tick = next_metrics = next_sweep = time.monotonic()
    while not should_stop():
        received = endpoint.poll(state.next_deadline())
        now = time.monotonic()
        instructions = _decide_all(state, received, now)
        if now >= next_tick:
            instructions += state.tick(now)
            next_tick = now + state.next_deadline()
            if metrics is not None and now >= next_metrics:
                metrics.publish(state.status(now))
                next_metrics = now + _METRICS_S
            if now >= next_sweep:
                remove_unused(pipelines_dir, {kept.contents.sha256 for kept in state.tables.pipelines.values()})
                next_sweep = now + _SWEEP_S
        if instructions:
            reach("dispatcher.decided")
        _carry_out(instructions, journal, event_log, endpoint)
    # A loader that has closed does not wait until it was heard, and what it delivered belongs into the summary.
    last = time.monotonic() + _LAST_S
    while time.monotonic() < last and (received := endpoint.poll(_QUIET_S)):
        _carry_out(_decide_all(state, received, time.monotonic()), journal, event_log, endpoint)


def _decide_all(state: DispatcherState, received: Sequence[Received], now: float) -> list[Instruction]:
    if received:
        reach("dispatcher.received")
    return [instruction for each in received for instruction in _decide(state, each, now)]


def _decide(state: DispatcherState, received: Received, now: float) -> list[Instruction]:
    message = received.message
    if isinstance(message, Disconnected):
        gone = [peer for peer in (*state.tables.loaders, *state.tables.workers) if parse_peer(peer)[0] == received.peer]
        return [instruction for peer in gone for instruction in state.peer_gone(peer, now)]
    if isinstance(message, ToDispatcher):
        return state.handle(received.peer, message, now)
    if not isinstance(message, ProtocolError):
        message = ProtocolError(f"{type(message).__name__} is not a message for a dispatcher")
    return state.refuse(received.peer, message)


def _carry_out(
    instructions: list[Instruction], journal: Journal, event_log: EventLog, endpoint: DispatcherEndpoint
) -> None:
    """Journal, commit, send, and report: what is sent rests on what was committed."""
    kept = [instruction for instruction in instructions if not isinstance(instruction, Send)]
    memories = [instruction for instruction in kept if not isinstance(instruction, ReportEvent)]
    if memories:
        journal.begin()
        for memory in memories:
            _JOURNAL[type(memory)](journal, memory)
        journal.commit()
    for instruction in instructions:
        if isinstance(instruction, Send):
            reach("dispatcher.before_send")
            endpoint.send(instruction.peer, instruction.message)
            reach("dispatcher.after_send")
    events = [instruction.event for instruction in kept if isinstance(instruction, ReportEvent)]
    if events:
        event_log.report(events)


_JOURNAL: dict[type[Instruction], Callable[[Journal, Any], None]] = {
    RememberPipeline: lambda journal, memory: journal.remember_pipeline(memory.pipeline),
    ForgetPipeline: lambda journal, memory: journal.forget_pipeline(memory.pipeline_id),
    RememberWorker: lambda journal, memory: journal.remember_worker(memory.peer),
    ForgetWorker: lambda journal, memory: journal.forget_worker(memory.peer),
    RememberStats: lambda journal, memory: journal.remember_stats(memory.loader, memory.stats),
}


def _write_summary(state: DispatcherState, journal: Journal, work_dir: Path) -> None:
    journal.begin()
    for loader in state.tables.loaders.values():
        if not loader.registration.feeds:  # what data workers hand to each other are no batches of the job
            journal.remember_stats(loader.registration, loader.stats)
    for peer in state.tables.workers:
        journal.forget_worker(peer)  # they are told to end, so the next dispatcher need not wait for them
    journal.commit()
    summary = {
        "loaders": journal.loaders(),
        "data_workers_seen": state.tables.workers_seen,
        "data_workers_used": len(state.tables.used_slots),
        "data_workers_renewed": state.tables.workers_renewed,
        "data_workers_replaced": state.tables.workers_replaced,
        "leases_granted": state.tables.leases_granted,
        "leases_revoked": state.tables.leases_revoked,
        "dispatcher_starts": journal.incarnation,
    }
    with Directory.open(work_dir) as directory:
        directory.write_whole(SUMMARY_FILE, json.dumps(summary, indent=1).encode() + b"\n")
