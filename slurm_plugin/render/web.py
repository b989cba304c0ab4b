"""Serves the page of a cluster and its figures over HTTP, read only. Used by `hetstream serve`.

The documents are made once for each reading and not for each visitor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hetstream.base.web import Document, WebServer
from hetstream.slurm_plugin.errors import ServeError


def serve_documents(host: str, port: int, documents: Callable[[], Mapping[str, Document]]) -> WebServer:
    """Serve documents by their paths until the server is closed.

    Args:
        host, port: where; port 0 finds a free one.
        documents: path -> what is there now; asked for each request, from another thread.

    Raises:
        ServeError: the address cannot be listened on.
    """
    return listening(host, port, lambda path, _: documents().get(path))


def listening(host: str, port: int, document: Callable[[str, str], Document | None]) -> WebServer:
    """A server, or the error that says what to do.

    Raises:
        ServeError: the address cannot be listened on.
    """
    try:
        return WebServer(host, port, document)
    except OSError as exc:
        raise ServeError(
            f"{host}:{port} cannot be listened on: {exc.strerror}. Give another one: --listen=HOST:PORT"
        ) from exc
