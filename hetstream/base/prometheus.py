"""Metrics for Prometheus: tables of columns, and a server of them. The home of prometheus_client, which is an extra.

Used by the dispatcher, by the exporter of a cluster and by that of shared GPUs. A scrape reads the newest reading in a
thread of its own, and asks nobody. Units are Prometheus's: seconds, bytes, ratios.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from hetstream.base.errors import HetstreamError
from hetstream.base.installed import install_command
from hetstream.base.web import Document, WebServer, plain_page

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
    from prometheus_client.core import Metric as Metric
    from prometheus_client.openmetrics import exposition as openmetrics
    from prometheus_client.registry import Collector
except ImportError as error:
    raise HetstreamError(f"metrics need the package prometheus-client. Run: {install_command('metrics')}") from error

_LANDING = plain_page('<h1>hetstream</h1><p>Metrics for Prometheus: <a href="/metrics">/metrics</a></p>')
Row = TypeVar("Row")
# Name (a counter's ends in _total), help, value; None is left out.
Column = tuple[str, str, Callable[[Row], float | None]]


def families(
    columns: Iterable[Column[Row]], labels: list[str], rows: Iterable[tuple[list[str], Row]]
) -> Iterator[Metric]:
    """Yield a metric for each column.

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


class ReadingCollector(Collector):
    """Shows the newest reading, which may be replaced while a scrape is answered.

    Args:
        reading: the first to show.
    """

    def __init__(self, reading: Any) -> None:
        self.reading = reading

    def text(self) -> str:
        """Return the metrics in Prometheus's text format."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()


class MetricsServer:
    """Serves `http://HOST:PORT/metrics` until it is closed.

    The text is made once for each reading, however many ask.

    Args:
        host, port: where; port 0 finds a free one.
        collector: of the metrics.

    Raises:
        OSError: the address cannot be bound.
    """

    def __init__(self, host: str, port: int, collector: ReadingCollector) -> None:
        self._collector = collector
        self._registry = CollectorRegistry()
        self._registry.register(collector)
        self._made_of: object = None
        self._documents: dict[bool, Document] = {}  # by whether it is OpenMetrics
        self._server = WebServer(host, port, self._document)
        self.url = f"{self._server.url}metrics"

    def publish(self, reading: object) -> None:
        """Show this from now on."""
        self._collector.reading = reading

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def _document(self, path: str, accept: str) -> Document | None:
        """Show the metrics in the format that the visitor's Accept header asks for."""
        if path != "/metrics":
            return _LANDING if path == "/" else None
        reading = self._collector.reading
        if reading is not self._made_of:
            self._documents, self._made_of = {}, reading
        wants_open = "application/openmetrics-text" in accept
        if wants_open not in self._documents:
            kind = openmetrics.CONTENT_TYPE_LATEST if wants_open else CONTENT_TYPE_LATEST
            make = openmetrics.generate_latest if wants_open else generate_latest
            self._documents[wants_open] = Document(kind, make(self._registry).decode())
        return self._documents[wants_open]
