"""Streaming for torch's own DataLoader in a program that does not know hetstream. Called by the start-up hook.

The program's sampler is drawn in the trainer in the very order in which torch would draw it, so the samples come in
the order that they have without hetstream, and the program's own random numbers are the same.
"""

from __future__ import annotations

import itertools
import logging
import uuid
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from mpi_dataworkers.config import identity_from_environment, service_from_environment
from mpi_dataworkers.errors import PipelineError, ServiceUnavailable
from mpi_dataworkers.loader.order import ListedPass
from mpi_dataworkers.loader.stream import LocalIterator, Stream, StreamIterator, torch_iter
from mpi_dataworkers.loader.torch_loader import distributed_identity, make_stream, torch_options, why_not_streamable

_log = logging.getLogger(__name__)


class _Streamed:
    """A loader that is streamed: its stream and how many passes it made."""

    def __init__(self, stream: Stream) -> None:
        self.stream = stream
        self.passes = itertools.count()


# None: this loader stays local, and the reason has been said.
_known: weakref.WeakKeyDictionary[Any, _Streamed | None] = weakref.WeakKeyDictionary()


def iterate(loader: Any) -> Iterator[Any]:
    """What `iter(loader)` does under the hook."""
    if loader not in _known:
        _known[loader] = _adopt(loader)
    streamed = _known[loader]
    if streamed is None:
        return torch_iter(loader)
    stream = streamed.stream
    stream.check_length()
    epoch = next(streamed.passes)
    before = torch.get_rng_state()
    # torch makes the sampler's iterator first and draws its base seed second; so must we.
    order = ListedPass(loader._index_sampler, loader.batch_sampler is not None)
    seed = int(torch.empty((), dtype=torch.int64).random_(generator=loader.generator).item())
    try:
        order.indices(0)
    except PipelineError as error:
        torch.set_rng_state(before)
        stream.close()
        _say_local(loader, str(error))
        _known[loader] = None
        return torch_iter(loader)
    if stream.client is not None:
        return StreamIterator(stream, order, seed, epoch, 0, loader)
    return LocalIterator(stream, order, seed, epoch, 0, torch_options(loader))


def _adopt(loader: Any) -> _Streamed | None:
    service = service_from_environment()
    reason = why_not_streamable(loader)
    if reason is None:
        try:
            stream = _make(loader, service)
            stream.close_with(loader)
            return _Streamed(stream)
        except (PipelineError, ServiceUnavailable) as error:
            reason = str(error)
    _say_local(loader, reason)
    return None


def _say_local(loader: Any, reason: str) -> None:
    _log.warning("hetstream: a DataLoader over %s stays local: %s", type(loader.dataset).__name__, reason)


def _make(loader: Any, service: str | None) -> Stream:
    identity = identity_from_environment(distributed_identity())
    if not identity.is_named:
        # Every rank's sampler speaks for itself, so ranks need not meet, and must not collide.
        identity = replace(identity, job_name=f"{identity.job_name}.{uuid.uuid4().hex[:12]}")
    return make_stream(loader, service, identity, {})
