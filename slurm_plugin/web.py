"""Serves two documents over HTTP, read only: the page and its figures. Used by `hetstream serve`.

The documents are made once for each reading and not for each visitor. Nothing that a visitor sends is looked at but the
path and the Host header: on localhost other names are refused, so that no web site can have a browser read the page.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from slurm_plugin.errors import ServeError

logger = logging.getLogger(__name__)

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
# A visitor that says nothing for so long is cut off.
_TIMEOUT_S = 10.0
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True)
class Document:
    """What a path shows.

    Attributes:
        mime: such as `text/html; charset=utf-8`.
        status: 200, or 503 while Slurm does not answer.
    """

    mime: str
    text: str
    status: HTTPStatus = HTTPStatus.OK


class WebServer:
    """Serves at `http://HOST:PORT/` until it is closed.

    Args:
        host, port: where; port 0 finds a free one.
        documents: path -> what is there now; asked for each request, from other threads.

    Raises:
        ServeError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, documents: Callable[[], Mapping[str, Document]]) -> None:
        class Handler(_Handler):
            timeout = _TIMEOUT_S
            only_loopback = host in _LOOPBACK

            def documents(self) -> Mapping[str, Document]:
                return documents()

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002, its form
                """A visitor that goes away in the middle is no news."""
                logger.debug("a request of %s failed", client_address, exc_info=True)

        try:
            self._server = Server((host, port), Handler)
        except OSError as exc:
            raise ServeError(
                f"{host}:{port} cannot be listened on: {exc.strerror}. Give another one: --listen=HOST:PORT"
            ) from exc
        self._thread = Thread(target=self._server.serve_forever, name="hetstream-web", daemon=True)
        self._thread.start()
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._server.server_port}/"

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    only_loopback = True
    server_version, sys_version = "hetstream", ""

    def documents(self) -> Mapping[str, Document]:
        raise NotImplementedError

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def _answer(self, with_body: bool) -> None:
        document = self._chosen()
        body = document.text.encode()
        self.send_response(document.status)
        headers = _HEADERS | {"Content-Type": document.mime, "Content-Length": str(len(body))}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body)

    def _chosen(self) -> Document:
        host = self.headers.get("Host", "").lower()
        name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
        if self.only_loopback and name not in _LOOPBACK:
            return Document("text/plain", "only as localhost\n", HTTPStatus.FORBIDDEN)
        path = self.path.partition("?")[0]
        return self.documents().get(path) or Document("text/plain", "no such page\n", HTTPStatus.NOT_FOUND)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug(format, *args)
