"""The start-up hook in this process, for tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as torch_dataloader

from hetstream.mpi_dataworkers.hook import patch
from hetstream.mpi_dataworkers.loader import connection as loader_connection
from hetstream.mpi_dataworkers.loader import unmodified
from hetstream.mpi_dataworkers.loader.connection import LoaderConnection, SentPipelines
from hetstream.mpi_dataworkers.loader.data_loader import DataLoader as OurDataLoader

_Iterator: Any = torch_dataloader._BaseDataLoaderIter


@contextlib.contextmanager
def hooked(service: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the start-up hook makes it, with `--stream-in-process-loaders`."""
    with monkeypatch.context() as changed:
        changed.setattr(DataLoader, "_get_iterator", DataLoader._get_iterator)
        changed.setattr(OurDataLoader, "__iter__", OurDataLoader.__iter__)
        for kind in (DataLoader, OurDataLoader):
            changed.setattr(kind, patch.MARK, True, raising=False)
            delattr(kind, patch.MARK)
        changed.setenv("HETSTREAM_IN_PROCESS_LOADERS", "1")
        if service is not None:
            changed.setenv("HETSTREAM_SERVICE", service)
        unmodified._say_local.cache_clear()
        patch.install()
        try:
            yield
        finally:
            for connection in list(loader_connection._open_connections):
                connection.close()
            # A class that had one, and has none, takes no arguments any more.
            _Iterator.__new__ = lambda kind, *_, **__: object.__new__(kind)


def connection_of(loader: Any) -> LoaderConnection:
    """A loader that is streamed, at its service."""
    connection = vars(loader)["_hetstream"].connection
    assert isinstance(connection, LoaderConnection)
    return connection


def sent_pipelines_of(loader: Any) -> SentPipelines:
    """What data workers were given by a loader that is streamed."""
    sent_pipelines = connection_of(loader).sent_pipelines
    assert sent_pipelines is not None
    return sent_pipelines


def assert_no_local_step(loader: Any) -> None:
    """Fail unless data workers have made all that a loader gave."""
    stats = connection_of(loader).statistics.counters
    assert stats.local_steps == 0
    assert stats.steps > 0
