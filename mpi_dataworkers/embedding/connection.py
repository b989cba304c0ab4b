"""The embedding servers of this process's job: one client for all tables, and generations of all of them."""

from __future__ import annotations

import atexit
import gc
import itertools
import secrets
import weakref
from pathlib import Path
from typing import Any

import torch

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.embedding.client import DEADLINE_S, EmbeddingClient
from hetstream.mpi_dataworkers.embedding.history import parts_of_generation
from hetstream.mpi_dataworkers.embedding.ranks import Ranks
from hetstream.mpi_dataworkers.embedding.table import Table
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.process.config import num_embedding_servers_from_environment, service_from_environment
from hetstream.mpi_dataworkers.wire.address import parse_service, wait_for_address_file

# A generation: its name, and the log of one server that has it.
_Generation = tuple[str, str]

# In the order in which they were made, on each rank the same.
tables: weakref.WeakSet[Table] = weakref.WeakSet()
_client: EmbeddingClient | None = None
_life = ""
_numbers = itertools.count()
_generations = itertools.count()
# The newest generation, and how many changes each table had then.
_marked: tuple[_Generation, weakref.WeakKeyDictionary[Table, int]] | None = None
# Tables that were loaded since rows were used.
_wanted: weakref.WeakKeyDictionary[Table, _Generation] = weakref.WeakKeyDictionary()


def connect(ranks: Ranks) -> EmbeddingClient | None:
    """Return the client of this process's job; None where it has no embedding servers. On all ranks.

    Raises:
        EmbeddingError: they did not come.
    """
    global _client, _life
    num_servers = num_embedding_servers_from_environment()
    service = service_from_environment()
    if not num_servers or service is None:
        return None
    restore_wanted()
    if _client is None:
        address = wait_for_address_file(parse_service(service), DEADLINE_S)
        _client = EmbeddingClient(address, ranks.rank, ranks.size, num_servers, DEADLINE_S)
        atexit.register(_client.close)
        _life = f"{int(ranks.from_first(torch.tensor([secrets.randbits(48)])).item()):012x}"
    return _client


def table_name(name: str | None) -> str:
    """Return a table's name; without one, the number of tables before.

    Raises:
        ConfigError: another table has it.
    """
    name = f"table-{next(_numbers)}" if name is None else name
    if any(table.spec.name == name for table in tables):
        gc.collect()  # that of a model that nobody has any more
    if any(table.spec.name == name for table in tables):
        raise ConfigError(f"name={name!r}: another embedding table of this process has it. Give each its own")
    return name


def mark_generation() -> dict[str, Any]:
    """Make the rows of all tables, as they are now, a generation on the servers' disks. On all ranks.

    Returns:
        What is to be saved beside the model, for `restore_generation`.

    Raises:
        EmbeddingError: that cannot be done.
    """
    global _marked
    assert _client is not None
    restore_wanted()
    if _marked is None or _marked[1] != _changes():
        for table in tables:
            table.write_back()
        name = f"{_life}-{next(_generations)}"
        _client.mark_generation(name)
        _marked = (name, _client.logs[0]), _changes()
    return dict(zip(("generation", "log"), _marked[0], strict=True))


def restore_generation(table: Table, state: dict[str, Any]) -> None:
    """Make a table what it was in a generation, before its next use. On all ranks.

    Raises:
        EmbeddingError: there is no such generation.
    """
    generation = state["generation"], state["log"]
    if _client is None:
        raise EmbeddingError(
            f"generation {generation[0]} is in the logs of embedding servers ({generation[1]}), and this run has "
            "none: run it with --embedding-servers"
        )
    table.check_idle()
    if generation not in (_marked and _marked[0], *_wanted.values()):
        parts_of_generation(Path(generation[1]), generation[0], _client.parts, ())
    _wanted[table] = generation


def forget_wanted(table: Table) -> None:
    """Forget that a table is to be restored: it gets other rows."""
    _wanted.pop(table, None)


def restore_wanted() -> None:
    """Restore tables that were loaded: the servers do it where that is all of them, and else they get the rows.

    Raises:
        EmbeddingError: that cannot be done.
    """
    global _marked
    wanted = {
        table: generation
        for table, generation in _wanted.items()
        if _marked is None or _marked[0] != generation or _marked[1].get(table) != table.num_changes
    }
    _wanted.clear()
    if not wanted:
        return
    assert _client is not None
    for table in wanted:
        table.forget()
    if {*wanted} == {*tables} and len({*wanted.values()}) == 1:
        ((name, log),) = {*wanted.values()}
        _client.restore_generation(name, str(Path(log)))
        _marked = (name, log), _changes()
        return
    for table, (name, log) in wanted.items():
        table.put_chunks(parts_of_generation(Path(log), name, _client.parts, [table.spec]), name)


def _changes() -> weakref.WeakKeyDictionary[Table, int]:
    return weakref.WeakKeyDictionary({table: table.num_changes for table in tables})
