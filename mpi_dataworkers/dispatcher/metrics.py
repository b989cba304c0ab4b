"""Prometheus metrics of one service, served over HTTP by the dispatcher.

The dispatcher's loop publishes a `Status` once a second; a scrape reads the newest from a thread of its own and never
touches the dispatcher's state. Labels are bounded by what is there now: series of a data worker that is gone end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar, get_args

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from hetstream.base.installed import install_command
from hetstream.base.web import Document, WebServer
from hetstream.mpi_dataworkers.dispatcher.client import StageLoad, load_of
from hetstream.mpi_dataworkers.errors import ServiceError
from hetstream.mpi_dataworkers.wire.messages import DataWorkerStatus, Device, LoaderStatus, Status

try:
    from prometheus_client.core import Metric
    from prometheus_client.registry import Collector

except ImportError as error:
    raise ServiceError(f"metrics need the package prometheus-client. Run: {install_command('metrics')}") from error

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


class MetricsServer(Collector):
    """Serves `http://HOST:PORT/metrics` until it is closed.

    Args:
        host, port: where; port 0 finds a free one.
        status: the first to show.

    Raises:
        ServiceError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, status: Status) -> None:
        self._status = status
        exposition = Exposition(self)
        try:
            self._server = WebServer(host, port, lambda path, accept: exposition.document(path, accept, self._status))
        except OSError as error:
            raise ServiceError(f"metrics cannot be served at {host}:{port}: {error.strerror}") from error
        self.url = f"{self._server.url}metrics"

    def publish(self, status: Status) -> None:
        """Show this from now on."""
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """The metrics of the newest status; called by prometheus_client for each scrape."""
        status = self._status
        yield from families(_SERVICE, [], [([], status)])
        workers = [([str(row.number), row.host], row) for row in status.data_workers]
        yield from families(_DATA_WORKER, ["data_worker", "host"], workers)
        loads = [([device], load_of(device, status)) for device in get_args(Device)]
        yield from families(
            _STAGE, ["device"], [(names, load) for names, load in loads if load.workers or load.reading]
        )
        loaders = [([row.job, str(row.rank), str(row.ordinal)], row) for row in status.loaders]
        yield from families(_LOADER, ["job", "rank", "loader"], loaders)

    def close(self) -> None:
        """Stop serving."""
        self._server.close()


# Metrics as text that Prometheus reads, made once for each state however many ask. Used by both metrics servers.

Row = TypeVar("Row")
# Name (a counter's ends in _total), help, value; None is left out.
Column = tuple[str, str, Callable[[Row], float | None]]


def families(
    columns: Iterable[Column[Row]], labels: list[str], rows: Iterable[tuple[list[str], Row]]
) -> Iterator[Metric]:
    """A metric for each column.

    Args:
        columns: of a table.
        labels: names of its rows' labels.
        rows: of the table, each behind the values of its labels.
    """
    for name, text, value in columns:
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(name, text, labels=labels)
        for label_values, row in rows:
            number = value(row)
            if number is not None:
                family.add_metric(label_values, number)
        yield family


class PrintableCollector(Collector):
    """A collector whose metrics can be printed, too."""

    def text(self) -> str:
        """The metrics in Prometheus's text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()


class Exposition:
    """The text of a collector.

    Args:
        collector: of the metrics.
    """

    def __init__(self, collector: Collector) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._made_of: object = None
        self._documents: dict[bool, Document] = {}  # by whether it is OpenMetrics

    def document(self, path: str, accept: str, state: object) -> Document | None:
        """What a path shows: `/metrics` the metrics, in the format that the visitor asks for.

        Args:
            path: it.
            accept: the visitor's Accept header.
            state: what the collector shows now; as long as it is the same object, the text is.
        """
        if path != "/metrics":
            return None
        if state is not self._made_of:
            self._documents, self._made_of = {}, state
        wants_open = "application/openmetrics-text" in accept
        if wants_open not in self._documents:
            kind = openmetrics.CONTENT_TYPE_LATEST if wants_open else CONTENT_TYPE_LATEST
            make = openmetrics.generate_latest if wants_open else generate_latest
            self._documents[wants_open] = Document(kind, make(self._registry).decode())
        return self._documents[wants_open]
