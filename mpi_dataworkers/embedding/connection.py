"""The embedding servers of this process's job: one client for all tables, and generations of all of them."""

from __future__ import annotations

import atexit
import gc
import itertools
import secrets
import threading
import weakref
from pathlib import Path
from typing import Any, TypeAlias

import torch

from hetstream.base.errors import ConfigError
from hetstream.mpi_dataworkers.embedding.client import DEADLINE_S, EmbeddingClient
from hetstream.mpi_dataworkers.embedding.ranks import Ranks
from hetstream.mpi_dataworkers.embedding.table import Table
from hetstream.mpi_dataworkers.errors import EmbeddingError
from hetstream.mpi_dataworkers.process.config import num_embedding_servers_from_environment, service_from_environment
from hetstream.mpi_dataworkers.wire.address import parse_service, wait_for_address_file

_Changes: TypeAlias = "weakref.WeakKeyDictionary[Table, int]"

# In the order in which they were made, on each rank the same.
tables: weakref.WeakSet[Table] = weakref.WeakSet()
_lock = threading.RLock()
_client: EmbeddingClient | None = None
_life = ""
_numbers = itertools.count()
_generations = itertools.count()
# The newest generation, and how many changes each table had then.
_marked: tuple[_Changes, dict[str, Any]] | None = None


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
    with _lock:
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
    with _lock:
        name = f"table-{next(_numbers)}" if name is None else name
        if any(table.spec.name == name for table in tables):
            gc.collect()  # that of a model that nobody has any more
        if any(table.spec.name == name for table in tables):
            raise ConfigError(f"name={name!r}: another embedding table of this process has it. Give each its own")
        return name


def _changes() -> _Changes:
    return weakref.WeakKeyDictionary({table: table.num_changes for table in tables})


def mark_generation() -> dict[str, Any]:
    """Make the rows of all tables, as they are now, a generation on the servers' disks. On all ranks.

    Returns:
        What is to be saved beside the model, for `restore_generation`.

    Raises:
        EmbeddingError: that cannot be done.
    """
    global _marked
    assert _client is not None
    with _lock:
        changes = _changes()
        if _marked is None or _marked[0] != changes:
            for table in tables:
                table.write_back()
            name = f"{_life}-{next(_generations)}"
            _client.mark_generation(name)
            _marked = changes, {"generation": name, "log": _client.logs[0]}
        return dict(_marked[1])


def restore_generation(state: dict[str, Any]) -> None:
    """Make all tables what they were in a generation. On all ranks.

    Raises:
        EmbeddingError: there is no such generation.
    """
    global _marked
    if _client is None:
        raise EmbeddingError(
            f"generation {state['generation']} is in the logs of embedding servers ({state['log']}), and this run has "
            "none: run it with --embedding-servers"
        )
    generation = {"generation": state["generation"], "log": state["log"]}
    with _lock:
        changes = _changes()
        if _marked != (changes, generation):
            _client.restore_generation(generation["generation"], str(Path(generation["log"])))
            for table in tables:
                table.forget()
        _marked = changes, generation
