"""Metrics as text that Prometheus reads, made once for each state however many ask. Used by both metrics servers."""

from __future__ import annotations

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from hetstream.base.web import Document


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
