"""What goes on in a service, as the dispatcher sees it: (tables, now) -> Status. Pure.

Called when a peer asks (`hetstream job`) and for the metrics; between two questions it costs nothing but counters.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from statistics import fmean

import msgspec

from hetstream.mpi_dataworkers.dispatcher.sharing import key_of
from hetstream.mpi_dataworkers.dispatcher.tables import LoaderRecord, Session, Tables, WorkerRecord
from hetstream.mpi_dataworkers.order.rates import step_time_s
from hetstream.mpi_dataworkers.wire.messages import (
    DataWorkerState,
    DataWorkerStatus,
    LoaderStatus,
    PastDecision,
    Status,
)

# A data worker speaks every half second; one that missed three turns is called silent.
_SILENT_S = 1.5


def status_of(tables: Tables, now: float) -> Status:
    """Everything that `hetstream job` shows, at the time `now`."""
    (leases_per_s,) = tables.recent.per_s(now, tables.leases_granted)
    return Status(
        incarnation=tables.incarnation,
        uptime_s=now - tables.started_at,
        data_workers=[_worker_status(tables, worker, now) for worker in tables.workers.values()],
        loaders=sorted(
            _with_spread(
                [
                    (key_of(loader.registration), _loader_status(tables, peer, loader, now))
                    for peer, loader in tables.loaders.items()
                    if not loader.registration.feeds  # a data worker, which has a row of its own
                ]
            ),
            key=lambda row: (row.job, row.rank, row.ordinal),
        ),
        data_workers_seen=tables.workers_seen,
        data_workers_lost=tables.workers_lost,
        leases_granted=tables.leases_granted,
        leases_revoked=tables.leases_revoked,
        leases_per_s=leases_per_s,
        elastic=tables.elastic["cpu"],
        decisions=[
            PastDecision(now - when, said.action, said.count, said.reason, said.device)
            for when, said in tables.decisions
        ],
        elastic_gpu=tables.elastic["gpu"],
    )


def note_rates(tables: Tables, now: float) -> None:
    """Take note of all counters whose growth `status_of` shows; to be called several times a second."""
    tables.recent.note(now, tables.leases_granted)
    for worker in tables.workers.values():
        work = worker.work
        work.recent.note(now, work.steps, _busy_s(tables, worker, now), work.waited_s)
    for loader in tables.loaders.values():
        loader.recent.note(now, loader.stats.steps, loader.stats.bytes, loader.stats.wait_s)


def _busy_s(tables: Tables, worker: WorkerRecord, now: float) -> float:
    """Time in which the worker made steps, with that of the lease in work, without its waits for the stage before."""
    begun_at = tables.leases[min(worker.tokens)].begun_at if worker.tokens else now
    return worker.work.busy_s + now - begun_at - worker.work.waited_s


def _share(value: float) -> float:
    return min(1.0, max(0.0, value))


def _worker_status(tables: Tables, worker: WorkerRecord, now: float) -> DataWorkerStatus:
    work = worker.work
    steps_per_s, busy, waiting = work.recent.per_s(now, work.steps, _busy_s(tables, worker, now), work.waited_s)
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
        resident_bytes=worker.resident_bytes,
        device=worker.device,
        wait_share=_share(waiting),
    )


def _loader_status(tables: Tables, peer: str, loader: LoaderRecord, now: float) -> LoaderStatus:
    stats, who = loader.stats, loader.registration
    steps_per_s, bytes_per_s, waiting = loader.recent.per_s(now, stats.steps, stats.bytes, stats.wait_s)
    # Several at once for an iterable dataset: one for each shard.
    sessions: list[Session] = [session for session in tables.sessions.values() if session.loader == peer]
    ends_known = all(session.num_steps >= 0 for session in sessions)
    return LoaderStatus(
        job=who.job_name,
        ordinal=who.ordinal,
        rank=who.rank,
        world_size=who.world_size,
        host=who.host,
        pid=who.pid,
        epoch=max((session.spec.epoch for session in sessions), default=-1),
        step=sum(session.consumed for session in sessions),
        num_steps=sum(session.num_steps for session in sessions) if ends_known else -1,
        buffered=sum(stop - first for session in sessions for first, stop in session.received),
        window=sum(session.window for session in sessions),
        num_data_workers=max(0, loader.announced_workers),
        steps_per_s=steps_per_s,
        bytes_per_s=bytes_per_s,
        wait_share=_share(waiting),
        totals=stats,
        step_s=step_time_s(steps_per_s, waiting),
        title=who.title,
        training=loader.training,
        device=who.device,
        optimizer=loader.optimizer,
        features=loader.features,
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
