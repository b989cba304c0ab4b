"""Changes how torch's DataLoader makes its iterators, at the moment torch is imported. Imports little, because it
runs at the start of every Python process of a job."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hetstream.base.imports import when_imported

_MARK = "_hetstream_stands_in"


def install() -> None:
    """Have the loader patched when it is imported, or now if it has been; calling it twice changes nothing."""
    when_imported("torch.utils.data.dataloader", _patch)


def _patch(module: ModuleType) -> None:
    """Stand in where DataLoader makes an iterator, and look on where one is made without it.

    Not at `DataLoader.__iter__`: torch's keeps the iterator of `persistent_workers`, and subclasses change it, wrap it,
    or make an iterator without it.
    """
    loader_kind: Any = module.DataLoader
    if hasattr(loader_kind, _MARK):
        return
    get_iterator = loader_kind._get_iterator

    @functools.wraps(get_iterator)
    def _get_iterator(self: Any) -> Iterator[Any]:
        from hetstream.mpi_dataworkers.config import offload_from_environment
        from hetstream.mpi_dataworkers.loader.unmodified import connection_of, make_iterator  # torch is complete by now

        iterator = make_iterator(self, get_iterator)
        if (offload := offload_from_environment()) != "off":
            from hetstream.mpi_dataworkers.partitioner.unmodified import follow

            follow(connection_of(self), offload, self.num_workers)
        return iterator

    iterator_kind: Any = module._BaseDataLoaderIter
    begin = iterator_kind.__init__

    @functools.wraps(begin)
    def __init__(self: Any, loader: Any, *args: Any, **keywords: Any) -> None:
        from hetstream.mpi_dataworkers.loader.unmodified import notice

        notice(self, loader)
        begin(self, loader, *args, **keywords)

    loader_kind._get_iterator = _get_iterator
    iterator_kind.__init__ = __init__
    setattr(loader_kind, _MARK, True)
    _announce()


def _announce() -> None:
    """Tell data workers, which were started before the script's own environment, which Python this is."""
    from hetstream.base.errors import ConfigError
    from hetstream.mpi_dataworkers.config import service_from_environment
    from hetstream.mpi_dataworkers.interpreter import announce
    from hetstream.mpi_dataworkers.wire.address import parse_service

    service = service_from_environment()
    if service is not None:
        with contextlib.suppress(ConfigError):  # the first loader says it
            announce(parse_service(service))
