"""A small web server for a few documents, read only, which strangers can reach: one thread, few connections, deadlines.

Used by the metrics of a service, by the exporter and by the page of a cluster. What a visitor sends is at most a few
KiB; one request is answered on a connection, and only so many a second. Nothing is looked at but the method, the path,
the token, and the Accept, Cookie and Host headers: on localhost other names are refused, so that no web site can have a
browser read it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from urllib.parse import parse_qs

from hetstream.base.limits import ConnectionLimit
from hetstream.base.unix_sockets import listen_at

_log = logging.getLogger(__name__)

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_CONNECTIONS = 64
# More of one address make room for each other. Behind a proxy, or on one host, all have the same.
_MAX_OF_ADDRESS = 48
# A scrape and a page each take a few a minute. More would be work that the job beside it pays for.
_MAX_PER_S = 100
_MAX_REQUEST_BYTES = 8192
_REQUEST_S = 5.0
# A large page may go through a slow tunnel.
_ANSWER_S = 30.0
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:; frame-ancestors 'none'; "
    "form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Connection": "close",
}


@dataclass(frozen=True)
class Document:
    """What a path shows.

    Attributes:
        mime: such as `text/html; charset=utf-8`.
        status: 200, or 503 while there is nothing to show.
    """

    mime: str
    text: str
    status: HTTPStatus = HTTPStatus.OK


def plain_page(body: str, status: HTTPStatus = HTTPStatus.OK) -> Document:
    """Return a few words in HTML."""
    return Document(
        "text/html; charset=utf-8",
        '<!doctype html><html lang="en"><meta name="viewport" content="width=device-width"><meta name="color-scheme" '
        'content="light dark"><link rel="icon" href="data:,"><title>hetstream</title>'
        f'<body style="font-family:sans-serif;margin:2em">{body}</body></html>\n',
        status,
    )


_ASKS = plain_page(
    "<p>This page asks for a token. It stands behind <code>?token=</code> in the address that the server printed when "
    'it began.</p><form><label>Token <input name="token" type="password" autocomplete="off" autofocus></label> '
    "<button>Open</button></form>",
    HTTPStatus.FORBIDDEN,
)
# How a host begins that is the path of a socket.
PRIVATE = "unix:"


class WebServer:
    """Serves at `http://HOST:PORT/`, or at a socket of this user, until it is closed.

    Args:
        host, port: where; port 0 finds a free one. A host `unix:PATH` is a socket for this user and root alone.
        document: from a path and an Accept header to what is there now, or None; asked for each request, from the
            server's thread.
        token: who does not give it, as `?token=` once and as a cookie then, is shown nothing; empty: it is for all.

    Attributes:
        url: of its root, with the token.

    Raises:
        OSError: the address cannot be listened on.
        UntrustedFile: somebody else could put another socket in the place of this one.
    """

    def __init__(self, host: str, port: int, document: Callable[[str, str], Document | None], token: str = "") -> None:
        self._document = document
        self._only_loopback = host in _LOOPBACK
        self._token = token
        self._path = Path(host.removeprefix(PRIVATE)) if host.startswith(PRIVATE) else None
        self._listener = (
            listen_at(self._path, socket.SOCK_STREAM, 0o600, _MAX_CONNECTIONS) if self._path else _listen(host, port)
        )
        shown, port = f"[{host}]" if ":" in host else host, 0 if self._path else self._listener.getsockname()[1]
        # Of several servers at one host, a browser keeps the cookies of all together.
        self._cookie = f"hetstream-{port}"
        self.url = host if self._path else f"http://{shown}:{port}/" + (f"?token={token}" if token else "")
        self._places: ConnectionLimit[asyncio.Task[None]] = ConnectionLimit(_MAX_CONNECTIONS, _MAX_OF_ADDRESS)
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="hetstream-web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        if self._path:
            self._path.unlink(missing_ok=True)

    def _run(self) -> None:
        with self._listener, contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.ensure_future(self._accept())
        await self._stop.wait()
        tasks = [accepting, *self._places]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _accept(self) -> None:
        while True:
            for _ in range(_MAX_PER_S // 10):
                try:
                    connection, address = await self._loop.sock_accept(self._listener)
                except OSError:
                    break  # this process has too many files open, or the visitor is gone already
                task = self._loop.create_task(self._attend(connection))
                self._places.enter(task, address[0] if address else "")
                task.add_done_callback(self._places.leave)
                while (surplus := self._places.one_too_many()) is not None:
                    self._places.leave(surplus)
                    surplus.cancel()
            await asyncio.sleep(0.1)

    async def _attend(self, connection: socket.socket) -> None:
        with connection:
            connection.setblocking(False)
            try:
                head = await asyncio.wait_for(self._read(connection), _REQUEST_S)
                if head:
                    await asyncio.wait_for(self._loop.sock_sendall(connection, self._answer(head)), _ANSWER_S)
                    connection.shutdown(socket.SHUT_WR)
            except (OSError, asyncio.TimeoutError) as error:
                _log.debug("a visitor is gone: %s", str(error) or type(error).__name__)

    async def _read(self, connection: socket.socket) -> bytes:
        """The head of a request; nothing if the visitor says less, or more than a head can have."""
        head = b""
        while b"\r\n\r\n" not in head:
            came = await self._loop.sock_recv(connection, _MAX_REQUEST_BYTES)
            head += came
            if not came or len(head) > _MAX_REQUEST_BYTES:
                return b""
        return head

    def _answer(self, head: bytes) -> bytes:
        request, *lines = head.partition(b"\r\n\r\n")[0].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        method, _, target = request.partition(" ")
        path, _, query = target.partition(" ")[0].partition("?")
        given = parse_qs(query).get("token", [""])[0]
        document = self._chosen(method, path, headers, given)
        body = document.text.encode()
        fields = _HEADERS | {"Content-Type": document.mime, "Content-Length": str(len(body))}
        if self._is_token(given):
            fields["Set-Cookie"] = f"{self._cookie}={self._token}; Path=/; HttpOnly; SameSite=Strict"
        start = f"HTTP/1.1 {document.status.value} {document.status.phrase}"
        text = "\r\n".join([start, *(f"{name}: {value}" for name, value in fields.items()), "", ""])
        return text.encode() + (b"" if method == "HEAD" else body)

    def _is_token(self, given: str) -> bool:
        return bool(self._token) and hmac.compare_digest(given.encode(), self._token.encode())

    def _chosen(self, method: str, path: str, headers: Mapping[str, str], given: str) -> Document:
        if method not in ("GET", "HEAD"):
            return Document("text/plain", "only GET\n", HTTPStatus.NOT_IMPLEMENTED)
        host = headers.get("host", "").lower()
        name = host[1 : host.find("]")] if host.startswith("[") else host.partition(":")[0]
        if self._only_loopback and name not in _LOOPBACK:
            return Document("text/plain", "only as localhost\n", HTTPStatus.FORBIDDEN)
        cookies = dict(part.strip().partition("=")[::2] for part in headers.get("cookie", "").split(";"))
        if self._token and not (self._is_token(given) or self._is_token(cookies.get(self._cookie, ""))):
            return _ASKS
        try:
            found = self._document(path, headers.get("accept", ""))
        except Exception:  # noqa: BLE001, the boundary of a request: the server goes on, and the fault is in the log
            _log.exception("%s cannot be shown", path[:80])
            return Document("text/plain", "it cannot be shown\n", HTTPStatus.INTERNAL_SERVER_ERROR)
        return found or Document("text/plain", "no such page\n", HTTPStatus.NOT_FOUND)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_MAX_CONNECTIONS)
    except OSError:
        listener.close()
        raise
    return listener
