"""Prometheus metrics of one service, served over HTTP by the dispatcher.

The dispatcher's loop publishes a `Status` once a second; a scrape never touches the dispatcher's state. Labels are
bounded by what is there now: series of a data worker that is gone end.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args

from hetstream.base.prometheus import Column, Metric, ReadingCollector, families
from hetstream.mpi_dataworkers.dispatcher.client import StageLoad, load_of
from hetstream.mpi_dataworkers.wire.messages import DataWorkerStatus, Device, LoaderStatus, Status

_SERVICE: list[Column[Status]] = [
    ("hetstream_dispatcher_starts_total", "Starts of the dispatcher on its directory.", lambda s: s.incarnation),
    ("hetstream_dispatcher_uptime_seconds", "Time since the last of them.", lambda s: s.uptime_s),
    ("hetstream_data_workers", "Data worker processes that are registered.", lambda s: len(s.data_workers)),
    ("hetstream_data_workers_seen_total", "Data worker processes that registered.", lambda s: s.data_workers_seen),
    ("hetstream_data_workers_lost_total", "Data workers that went without a word.", lambda s: s.data_workers_lost),
    ("hetstream_loaders", "Loaders that are connected.", lambda s: len(s.loaders)),
    ("hetstream_leases_granted_total", "Leases granted.", lambda s: s.leases_granted),
    ("hetstream_leases_revoked_total", "Leases taken back; their steps are leased again.", lambda s: s.leases_revoked),
]
_DATA_WORKER: list[Column[DataWorkerStatus]] = [
    ("hetstream_data_worker_steps_total", "Steps made.", lambda w: w.steps),
    ("hetstream_data_worker_leases", "Leases held.", lambda w: w.leases),
    ("hetstream_data_worker_leases_revoked_total", "Leases taken back from it.", lambda w: w.leases_revoked),
    ("hetstream_data_worker_busy_ratio", "Share of the last seconds in which it made steps.", lambda w: w.busy_share),
    (
        "hetstream_data_worker_wait_ratio",
        "Share of the last seconds in which it waited for the stage before.",
        lambda w: w.wait_share,
    ),
    ("hetstream_data_worker_silence_seconds", "Time since its last message.", lambda w: w.silent_s),
]
_STAGE: list[Column[StageLoad]] = [
    ("hetstream_stage_data_workers", "Data worker processes of the stage.", lambda s: len(s.workers)),
    (
        "hetstream_stage_busy_ratio",
        "Share of the last seconds in which its data workers made steps.",
        lambda s: s.busy_share,
    ),
    ("hetstream_stage_missed_ratio", "Share of the last seconds in which it was waited for.", lambda s: s.wait_share),
]
_LOADER: list[Column[LoaderStatus]] = [
    ("hetstream_loader_epochs_total", "Epochs completed.", lambda r: r.totals.epochs),
    ("hetstream_loader_steps_total", "Steps taken by the training loop.", lambda r: r.totals.steps),
    ("hetstream_loader_samples_total", "Samples in them.", lambda r: r.totals.samples),
    ("hetstream_loader_bytes_total", "Bytes of batches that came from data workers.", lambda r: r.totals.bytes),
    ("hetstream_loader_wait_seconds_total", "Time the training loop waited for data.", lambda r: r.totals.wait_s),
    ("hetstream_loader_wait_ratio", "Share of the last seconds that it waited.", lambda r: r.wait_share),
    (
        "hetstream_loader_step_seconds",
        "Time of a step without waits for data, over the last seconds.",
        lambda r: r.step_s,
    ),
    (
        "hetstream_loader_step_time_spread_ratio",
        "Spread of that over the ranks, by the mean.",
        lambda r: r.step_time_spread,
    ),
    ("hetstream_loader_local_steps_total", "Steps made in the trainer itself.", lambda r: r.totals.local_steps),
    ("hetstream_loader_duplicates_total", "Batches dropped as second copies.", lambda r: r.totals.duplicates_dropped),
    ("hetstream_loader_buffered_steps", "Finished steps that wait in its buffer.", lambda r: r.buffered),
    ("hetstream_loader_window_steps", "Steps that may wait or be on their way.", lambda r: r.window),
]


class ServiceCollector(ReadingCollector):
    """Turns the newest `Status` into metrics."""

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the newest status; called by prometheus_client for each scrape."""
        status: Status = self.reading
        yield from families(_SERVICE, [], [([], status)])
        workers = [([str(row.number), row.host], row) for row in status.data_workers]
        yield from families(_DATA_WORKER, ["data_worker", "host"], workers)
        loads = [([device], load_of(device, status)) for device in get_args(Device)]
        yield from families(
            _STAGE, ["device"], [(names, load) for names, load in loads if load.workers or load.reading]
        )
        loaders = [([row.job, str(row.rank), str(row.ordinal)], row) for row in status.loaders]
        yield from families(_LOADER, ["job", "rank", "loader"], loaders)
