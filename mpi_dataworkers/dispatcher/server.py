"""The dispatcher's loop: take a burst of messages, decide, journal, commit, then send. All decisions are in `state.py`.

Called by `hetstream dispatcher`. It never sees a sample, and never unpickles what it stores for data workers.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

from mpi_dataworkers.address import ServiceAddress, write_address_file
from mpi_dataworkers.dispatcher.journal import Journal
from mpi_dataworkers.dispatcher.state import DispatcherState, ForgetDefinition, Instruction, RememberDefinition, Send
from mpi_dataworkers.errors import ProtocolError
from mpi_dataworkers.messages import Refused, ShutDown, ToDispatcher
from mpi_dataworkers.transports.base import Disconnected, DispatcherEndpoint, Received
from mpi_dataworkers.transports.zmq import ZmqDispatcherEndpoint, new_keys

_log = logging.getLogger(__name__)

SUMMARY_FILE = "summary.json"


def serve(bind: str, work_dir: Path, address_file: Path, should_stop: Callable[[], bool]) -> None:
    """Run a dispatcher until `should_stop()`; write `work_dir/summary.json` at the end.

    Started again with the same directory it keeps its keys and its port, so that loaders and data workers find it.

    Args:
        bind: `tcp://HOST:PORT`; with port 0 a free one is found at the first start and kept.
        work_dir: the journal's directory.
        address_file: written, mode 0600, when the dispatcher is ready.
        should_stop: asked between bursts, several times a second.

    Raises:
        ServiceError: the directory is in use or damaged, or the address cannot be bound.
    """
    journal = Journal(work_dir)
    try:
        endpoint, service = _open_endpoint(bind, journal)
        try:
            write_address_file(address_file, service)
            _log.info("dispatcher ready address=%s incarnation=%d", service.address, journal.incarnation)
            state = DispatcherState(journal.incarnation, time.monotonic())
            state.definitions = {definition.definition_id: definition for definition in journal.definitions}
            _loop(state, journal, endpoint, should_stop)
            for peer in (*state.consumers, *state.workers):
                endpoint.send(peer, ShutDown())
            _write_summary(state, journal, work_dir)
        finally:
            endpoint.close()
    finally:
        journal.close()


def _open_endpoint(bind: str, journal: Journal) -> tuple[ZmqDispatcherEndpoint, ServiceAddress]:
    if not journal.fact("keys"):
        server_public, server_secret = new_keys()
        client_public, client_secret = new_keys()
        keys = [server_public, server_secret, client_public, client_secret, secrets.token_hex(32)]
        journal.begin()
        journal.set_fact("keys", json.dumps(keys))
        journal.commit()
    server_public, server_secret, client_public, client_secret, batch_key = json.loads(journal.fact("keys"))
    host = bind.removeprefix("tcp://").rpartition(":")[0]
    kept_port = journal.fact("port")
    wants_any_port = bind.endswith(":0")
    where = f"tcp://{host}:{kept_port}" if kept_port and wants_any_port else bind
    endpoint = ZmqDispatcherEndpoint(where, server_secret, server_public, client_public)
    journal.begin()
    journal.set_fact("port", endpoint.address.rpartition(":")[2])
    journal.commit()
    return endpoint, ServiceAddress(endpoint.address, server_public, client_public, client_secret, batch_key)


def _loop(
    state: DispatcherState, journal: Journal, endpoint: DispatcherEndpoint, should_stop: Callable[[], bool]
) -> None:
    told = 0
    next_tick = time.monotonic()
    while not should_stop():
        received = endpoint.poll(state.next_deadline())
        now = time.monotonic()
        instructions = [instruction for one in received for instruction in _decide(state, one, now)]
        if now >= next_tick:
            instructions += state.tick(now)
            next_tick = now + state.next_deadline()
        _carry_out(instructions, journal, endpoint)
        told = _log_story(state, told)


def _decide(state: DispatcherState, received: Received, now: float) -> list[Instruction]:
    message = received.message
    if isinstance(message, Disconnected):
        return state.peer_gone(received.peer, now)
    if isinstance(message, ProtocolError):
        _log.warning("refused a message of peer %s: %s", received.peer[:8], message)
        return [Send(received.peer, Refused("ProtocolError", str(message)))]
    if not isinstance(message, ToDispatcher):
        text = f"{type(message).__name__} is not a message for a dispatcher"
        _log.warning("refused a message of peer %s: %s", received.peer[:8], text)
        return [Send(received.peer, Refused("ProtocolError", text))]
    return state.handle(received.peer, message, now)


def _carry_out(instructions: list[Instruction], journal: Journal, endpoint: DispatcherEndpoint) -> None:
    memories = [one for one in instructions if not isinstance(one, Send)]
    if memories:
        journal.begin()
        for memory in memories:
            if isinstance(memory, RememberDefinition):
                journal.remember_definition(memory.definition)
            elif isinstance(memory, ForgetDefinition):
                journal.forget_definition(memory.definition_id)
            else:
                journal.remember_stats(memory.consumer, memory.stats)
        journal.commit()
    for instruction in instructions:
        if isinstance(instruction, Send):
            endpoint.send(instruction.peer, instruction.message)


def _log_story(state: DispatcherState, told: int) -> int:
    """Log the lines of the story that are new; the state counts them, so none is logged twice."""
    new = min(state.lines_told - told, len(state.story))
    for line in list(state.story)[len(state.story) - new :]:
        _log.info("%s", line)
    return state.lines_told


def _write_summary(state: DispatcherState, journal: Journal, work_dir: Path) -> None:
    journal.begin()
    for consumer in state.consumers.values():
        journal.remember_stats(consumer.registration, consumer.stats)
    journal.commit()
    summary = {
        "loaders": journal.loaders(),
        "data_workers_seen": state.workers_seen,
        "leases_granted": state.leases_granted,
        "leases_revoked": state.leases_revoked,
        "dispatcher_starts": journal.incarnation,
    }
    temporary = work_dir / f".{SUMMARY_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps(summary, indent=1) + "\n")
    temporary.replace(work_dir / SUMMARY_FILE)
