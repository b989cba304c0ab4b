"""Changes how torch's DataLoader and ours begin to iterate, at the moment they are imported. Imports little, because it
runs at the start of every Python process of a job."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from hetstream.base.process import other_job, when_imported
from hetstream.mpi_dataworkers.process.programs import MARK

# Modules with loaders that have worker processes of their own, and what of `augmenters` changes them.
_AUGMENTERS = {
    "batchgenerators.dataloading.nondet_multi_threaded_augmenter": "patch_nondeterministic",
    "batchgenerators.dataloading.multi_threaded_augmenter": "patch_deterministic",
    "batchgenerators.dataloading.single_threaded_augmenter": "patch_single",
    "nnunetv2.training.nnUNetTrainer.nnUNetTrainer": "patch_trainer",
}


def install() -> None:
    """Have the loaders patched when they are imported, or now if they were; calling it twice changes nothing.

    Not in a job that was submitted from another one's script: that one's data workers are not for it.
    """
    if other_job("HETSTREAM_HOOK", os.environ):
        when_imported("torch.utils.data.dataloader", _stay_local)
        return
    when_imported("torch.utils.data.dataloader", _patch)
    when_imported("hetstream.mpi_dataworkers.loader.data_loader", _patch_ours)
    for name, function in _AUGMENTERS.items():
        when_imported(name, functools.partial(_patch_augmenters, function))


def _stay_local(module: ModuleType) -> None:
    from hetstream.mpi_dataworkers.process.config import service_from_environment

    del module
    service_from_environment()  # which says so


def _patch(module: ModuleType) -> None:
    """Stand in where DataLoader makes an iterator, and where a class that is known makes one without it.

    Not at `DataLoader.__iter__`: torch's keeps the iterator of `persistent_workers`, and subclasses change it, wrap it,
    or make an iterator without it.
    """
    loader_kind: Any = module.DataLoader
    if MARK in vars(loader_kind):
        return
    get_iterator = loader_kind._get_iterator

    @functools.wraps(get_iterator)
    def _get_iterator(self: Any) -> Iterator[Any]:
        from hetstream.mpi_dataworkers.loader.unmodified import connection_of, make_iterator  # torch is complete by now

        iterator = make_iterator(self, get_iterator)
        _follow(connection_of(self), self.num_workers)
        return iterator

    iterator_kind: Any = module._BaseDataLoaderIter
    kinds = iterator_kind, module._SingleProcessDataLoaderIter, module._MultiProcessingDataLoaderIter
    as_torch = {kind: dict(vars(kind)) for kind in kinds}

    # Not around `__init__`: the place of torch's warnings is that of its caller, and is not to be here.
    def __new__(kind: Any, *args: Any, **keywords: Any) -> Any:
        from hetstream.mpi_dataworkers.loader.unmodified import instead_of

        given = next((each for each in (*args, *keywords.values()) if isinstance(each, loader_kind)), None)
        streamed = instead_of(kind, given) if given is not None else None
        return object.__new__(kind) if streamed is None else streamed

    loader_kind._get_iterator = _get_iterator
    iterator_kind.__new__ = __new__
    setattr(loader_kind, MARK, as_torch)
    _announce()


def _patch_ours(module: ModuleType) -> None:
    """Look on where our DataLoader begins to iterate: it streams by itself, and the model's forward is to move, too."""
    loader_kind: Any = module.DataLoader
    if MARK in vars(loader_kind):
        return
    begin = loader_kind.__iter__

    @functools.wraps(begin)
    def __iter__(self: Any) -> Iterator[Any]:
        iterator: Iterator[Any] = begin(self)
        _follow(self._connection, self.num_workers)
        return iterator

    loader_kind.__iter__ = __iter__
    setattr(loader_kind, MARK, True)


def _patch_augmenters(function: str, module: ModuleType) -> None:
    if MARK not in vars(module):
        from hetstream.mpi_dataworkers.loader import augmenters

        getattr(augmenters, function)(module)
        setattr(module, MARK, True)


def _follow(connection: Any, num_workers: int) -> None:
    """Have the forward partitioned in which a loader's batches arrive, if that is asked for."""
    from hetstream.mpi_dataworkers.process.config import offload_from_environment

    if (offload := offload_from_environment()) != "off":
        from hetstream.mpi_dataworkers.partitioner.unmodified import follow

        follow(connection, offload, num_workers)


def _announce() -> None:
    """Tell data workers, which were started before the script's own environment, which Python this is."""
    from hetstream.base.errors import ConfigError
    from hetstream.mpi_dataworkers.process.config import service_from_environment
    from hetstream.mpi_dataworkers.process.interpreter import announce
    from hetstream.mpi_dataworkers.wire.address import parse_service

    service = service_from_environment()
    if service is not None:
        with contextlib.suppress(ConfigError):  # the first loader says it
            announce(parse_service(service))
