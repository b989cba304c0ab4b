"""What goes on in a service, as the dispatcher sees it: (state, now) -> Status. Pure.

Called when a peer asks (`hetstream top`) and for the metrics; between two questions it costs nothing but counters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec

from hetstream.mpi_dataworkers.dispatcher.matching import key_of
from hetstream.mpi_dataworkers.dispatcher.records import LoaderRecord, SessionRecord, WorkerRecord
from hetstream.mpi_dataworkers.rates import step_time_s
from hetstream.mpi_dataworkers.wire.messages import (
    DataWorkerState,
    DataWorkerStatus,
    LoaderStatus,
    PastDecision,
    Status,
)

if TYPE_CHECKING:
    from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState

# A data worker speaks every half second; one that missed three turns is called silent.
_SILENT_S = 1.5


def status_of(state: DispatcherState, now: float) -> Status:
    """Everything that `hetstream top` shows, at the time `now`."""
    (leases_per_s,) = state.recent.per_s(now, state.leases_granted)
    return Status(
        incarnation=state.incarnation,
        uptime_s=now - state.started_at,
        data_workers=[_worker_status(state, worker, now) for worker in state.workers.values()],
        loaders=sorted(
            _with_spread(
                [
                    (key_of(loader.registration), _loader_status(state, peer, loader, now))
                    for peer, loader in state.loaders.items()
                ]
            ),
            key=lambda row: (row.job, row.rank, row.ordinal),
        ),
        data_workers_seen=state.workers_seen,
        data_workers_lost=state.workers_lost,
        leases_granted=state.leases_granted,
        leases_revoked=state.leases_revoked,
        leases_per_s=leases_per_s,
        elastic=state.elastic,
        decisions=[PastDecision(now - when, one.action, one.count, one.reason) for when, one in state.decisions],
    )


def note_rates(state: DispatcherState, now: float) -> None:
    """Take note of all counters whose growth `status_of` shows; to be called several times a second."""
    state.recent.note(now, state.leases_granted)
    for worker in state.workers.values():
        worker.work.recent.note(now, worker.work.steps, _busy_s(state, worker, now))
    for loader in state.loaders.values():
        loader.recent.note(now, loader.stats.steps, loader.stats.bytes, loader.stats.wait_s)


def _busy_s(state: DispatcherState, worker: WorkerRecord, now: float) -> float:
    """Time in which the worker made steps, with that of the lease in work."""
    begun_at = state.leases[min(worker.tokens)].begun_at if worker.tokens else now
    return worker.work.busy_s + now - begun_at


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _worker_status(state: DispatcherState, worker: WorkerRecord, now: float) -> DataWorkerStatus:
    work = worker.work
    steps_per_s, busy = work.recent.per_s(now, work.steps, _busy_s(state, worker, now))
    if now - worker.last_seen > _SILENT_S:
        doing: DataWorkerState = "silent"
    elif worker.draining:
        doing = "draining"
    elif any(until > now for until in worker.unreachable.values()):
        doing = "unreachable"
    else:
        doing = "working" if worker.tokens else "idle"
    return DataWorkerStatus(
        number=worker.number,
        host=worker.host,
        pid=worker.pid,
        state=doing,
        leases=len(worker.tokens),
        steps=work.steps,
        steps_per_s=steps_per_s,
        busy_share=_share(busy),
        leases_revoked=work.leases_revoked,
        up_s=now - work.registered_at,
        silent_s=now - worker.last_seen,
        slurm_job=worker.slurm_job,
    )


def _loader_status(state: DispatcherState, peer: str, loader: LoaderRecord, now: float) -> LoaderStatus:
    stats, who = loader.stats, loader.registration
    steps_per_s, bytes_per_s, waiting = loader.recent.per_s(now, stats.steps, stats.bytes, stats.wait_s)
    # Several at once for an iterable dataset: one for each shard.
    passes: list[SessionRecord] = [record for record in state.sessions.values() if record.loader == peer]
    ends_known = all(record.num_steps >= 0 for record in passes)
    return LoaderStatus(
        job=who.job_name,
        ordinal=who.ordinal,
        rank=who.rank,
        world_size=who.world_size,
        host=who.host,
        pid=who.pid,
        epoch=max((record.session.epoch for record in passes), default=-1),
        step=sum(record.consumed for record in passes),
        num_steps=sum(record.num_steps for record in passes) if ends_known else -1,
        buffered=sum(stop - first for record in passes for first, stop in record.received),
        window=sum(record.window for record in passes),
        num_data_workers=max(0, loader.announced_workers),
        steps_per_s=steps_per_s,
        bytes_per_s=bytes_per_s,
        wait_share=_share(waiting),
        totals=stats,
        step_s=step_time_s(steps_per_s, waiting),
        title=who.title,
    )


def _with_spread(rows: list[tuple[Hashable, LoaderStatus]]) -> Iterator[LoaderStatus]:
    """The rows with how much the ranks' step times differ; loaders of one key belong together."""
    times: dict[Hashable, list[float]] = {}
    for key, row in rows:
        if row.step_s > 0:
            times.setdefault(key, []).append(row.step_s)
    for key, row in rows:
        of_ranks = times.get(key, [])
        spread = (max(of_ranks) - min(of_ranks)) / fmean(of_ranks) if of_ranks else 0.0
        yield msgspec.structs.replace(row, step_time_spread=spread)
