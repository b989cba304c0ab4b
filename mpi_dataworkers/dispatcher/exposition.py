"""Metrics as text that Prometheus reads, made once for each state however many ask. Used by both metrics servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from hetstream.base.web import Document

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
