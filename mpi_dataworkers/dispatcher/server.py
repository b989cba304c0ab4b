"""The dispatcher's loop: take a burst of messages, decide, commit, send, report. All decisions are in `state.py`.

Called by `hetstream dispatcher`. It never sees a sample, and never unpickles what it stores for data workers.
"""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hetstream.base.files import Directory
from hetstream.mpi_dataworkers.dispatcher.event_log import EventLog
from hetstream.mpi_dataworkers.dispatcher.events import DispatcherStarted, DispatcherStopped
from hetstream.mpi_dataworkers.dispatcher.instructions import (
    ForgetPipeline,
    ForgetWorker,
    Instruction,
    RememberPipeline,
    RememberStats,
    RememberWorker,
    ReportEvent,
    Send,
)
from hetstream.mpi_dataworkers.dispatcher.journal import Journal
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.errors import AddressInUse, ProtocolError, ServiceError
from hetstream.mpi_dataworkers.faults import reach
from hetstream.mpi_dataworkers.memory import give_back_freed_memory
from hetstream.mpi_dataworkers.transports.base import Disconnected, DispatcherEndpoint, Received, parse_peer
from hetstream.mpi_dataworkers.transports.zmq import ZmqDispatcherEndpoint, new_keys
from hetstream.mpi_dataworkers.wire.address import ServiceAddress, remove_address_file, write_address_file
from hetstream.mpi_dataworkers.wire.messages import ShutDown, ToDispatcher
from hetstream.mpi_dataworkers.wire.pipeline_transfer import is_there, remove_all, remove_unused

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.dispatcher.metrics import MetricsServer

_log = logging.getLogger(__name__)

SUMMARY_FILE = "summary.json"
_METRICS_S = 1.0
# How often files of pipelines that nobody uses are looked for.
_SWEEP_S = 10.0
# At its end it takes what is still on the way, until it has heard nothing for so long, at most for so long in all.
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
        from hetstream.mpi_dataworkers.dispatcher.metrics import MetricsServer

        server = MetricsServer(*where, state.status(time.monotonic()))
    except ServiceError as error:
        _log.error("no metrics: %s", error)
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
        "data_workers_renewed": state.tables.workers_renewed,
        "data_workers_replaced": state.tables.workers_replaced,
        "leases_granted": state.tables.leases_granted,
        "leases_revoked": state.tables.leases_revoked,
        "dispatcher_starts": journal.incarnation,
    }
    with Directory.open(work_dir) as directory:
        directory.write_whole(SUMMARY_FILE, json.dumps(summary, indent=1).encode() + b"\n")
