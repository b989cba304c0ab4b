"""Which samples a leased step has. Pure; used by `steps.py`."""

from __future__ import annotations

import numpy as np

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.index_form import INTS, IndexForm, unpack_indices
from hetstream.mpi_dataworkers.order.bucketing import LengthBuckets, plan_of
from hetstream.mpi_dataworkers.order.sharding import Indices
from hetstream.mpi_dataworkers.wire.messages import GrantLease, ListedOrder, PlannedOrder


def place_of(lease: GrantLease, step: int) -> tuple[int, int, int]:
    """Epoch and step whose samples a leased step has, and its position in the stream that its session shares.

    They are its own but in a shared stream in window mode, which goes on from epoch to epoch.
    """
    session = lease.session
    if session.sharing is None:
        return session.epoch, step, step
    position = session.epoch * session.sharing.num_steps + step + lease.shift
    return *divmod(position, session.sharing.num_steps), position


def indices_of(
    lease: GrantLease, epoch: int, step: int, buckets: LengthBuckets | None = None
) -> tuple[Indices, IndexForm]:
    """Sample indices of a step, int64, and the form in which the dataset is asked; `buckets` are the pipeline's."""
    order = lease.session.order
    if isinstance(order, PlannedOrder):
        return plan_of(order, epoch, buckets if order.bucketed else None).indices(step, order.rank), INTS
    if lease.steps is None or not isinstance(order, ListedOrder):
        raise PipelineError(f"lease {lease.token} names no samples for step {step} of a listed order")
    counts = np.frombuffer(lease.steps.counts, dtype="<i4")
    number = step - lease.steps.first_step
    first = int(counts[:number].sum())
    numbers = np.frombuffer(lease.steps.indices, dtype="<i8")[first : first + int(counts[number])]
    return unpack_indices(numbers, order.batched)
