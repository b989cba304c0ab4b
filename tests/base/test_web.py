"""Who sees the documents, and what a crowd of visitors costs."""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import resource
import select
import socket
import threading
import time
from collections.abc import Iterator
from http import HTTPStatus
from urllib.parse import urlsplit

import pytest

from hetstream.base import web
from hetstream.base.limits import ConnectionLimit
from hetstream.base.web import Document, WebServer


@functools.cache
def document(path: str) -> Document | None:
    """What the server shows; the large one is made when it is first asked for."""
    contents = {"/": lambda: "here\n", "/large": lambda: "x" * (64 << 20)}
    return Document("text/plain", contents[path]()) if path in contents else None


@pytest.fixture
def server() -> Iterator[WebServer]:
    server = WebServer("127.0.0.1", 0, lambda path, _: document(path))
    yield server
    server.close()
    document.cache_clear()


def port_of(server: WebServer) -> int:
    return urlsplit(server.url).port or 0


def connect(server: WebServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port_of(server)), timeout=10)


def ask(server: WebServer, path: str = "/", method: str = "GET", **headers: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port_of(server), timeout=10)
    with contextlib.closing(connection):
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def test_places_go_to_those_who_take_few() -> None:
    places: ConnectionLimit[int] = ConnectionLimit(4, 3)
    for number in range(4):
        places.enter(number, "crowd")
    assert places.one_too_many() == 0
    places.leave(0)
    places.leave(0)
    assert places.one_too_many() is None
    places.enter(10, "honest")
    places.enter(11, "other")
    assert places.one_too_many() == 1, "the oldest of the crowd, not of all"
    places.leave(1)
    assert (places.one_too_many(), len(places), list(places)) == (None, 4, [2, 3, 10, 11])


def test_where_each_has_one_place_the_oldest_leaves() -> None:
    places: ConnectionLimit[int] = ConnectionLimit(2)
    left = []
    for number in range(5):
        places.enter(number, str(number))
        if (leaving := places.one_too_many()) is not None:
            places.leave(leaving)
            left.append(leaving)
    assert left == [0, 1, 2]


def test_one_asks_and_is_answered(server: WebServer) -> None:
    assert ask(server) == ask(server, "/?x=1") == (200, "here\n")
    assert ask(server, method="HEAD") == (200, "")
    assert ask(server, Host="evil.example:80")[0] == ask(server, Host="[::2]:80")[0] == HTTPStatus.FORBIDDEN
    assert ask(server, Host="[::1]:80")[0] == ask(server, Host="LOCALHOST")[0] == HTTPStatus.OK
    assert ask(server, "/none")[0] == HTTPStatus.NOT_FOUND
    assert ask(server, method="POST")[0] == HTTPStatus.NOT_IMPLEMENTED
    with connect(server) as visitor:
        visitor.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: http://evil.example\r\n\r\n")
        assert b"access-control" not in visitor.recv(4096).lower(), "no page of another site may read it"
    with connect(server) as visitor:
        visitor.sendall(b"\0\xff\r\n: :\r\n\r\n")
        assert visitor.recv(4096).startswith(b"HTTP/1.1 501")
    with connect(server) as visitor, contextlib.suppress(ConnectionError):
        visitor.sendall(b"GET / HTTP/1.1\r\nHost: " + bytes(1 << 20))
        assert visitor.recv(4096) == b"", "a head has an end"


def test_who_has_no_token_is_asked_for_it_and_a_browser_keeps_it() -> None:
    server = WebServer("127.0.0.1", 0, lambda path, _: document(path), "a-token")
    try:
        port, query = port_of(server), "token=a-token"
        assert server.url.endswith(f"/?{query}")
        assert ask(server, f"/?{query}") == (200, "here\n")
        assert ask(server, "/none?token=a-token")[0] == HTTPStatus.NOT_FOUND
        bad = ("a-toke", "a-token%00", "%ff&token=a-token", "")
        for path in ("/", "/?", "/none", *(f"/?token={token}" for token in bad)):
            status, text = ask(server, path)
            assert (status, "here" in text, "a-token" in text) == (HTTPStatus.FORBIDDEN, False, False), path
        assert ask(server, f"/?{query}", Host="evil.example")[0] == HTTPStatus.FORBIDDEN
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", f"/?{query}")
            kept = connection.getresponse().headers["Set-Cookie"]
        assert kept == f"hetstream-{port}=a-token; Path=/; HttpOnly; SameSite=Strict"
        cookie = kept.partition(";")[0]
        assert ask(server, Cookie=f"other=1; {cookie}; last") == (200, "here\n")
        for wrong in ("", cookie[:-1], f"x{cookie}", "hetstream-1=a-token", f"hetstream-{port}=\xff", ";=;"):
            assert ask(server, Cookie=wrong)[0] == HTTPStatus.FORBIDDEN, wrong
    finally:
        server.close()
        document.cache_clear()


def test_a_silent_crowd_takes_few_descriptors_no_threads_and_keeps_nobody_out(server: WebServer) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    with contextlib.ExitStack() as undo:
        crowd = [undo.enter_context(connect(server)) for _ in range(96)]
        assert ask(server) == (200, "here\n")
        assert threading.active_count() == threads
        assert len(os.listdir("/proc/self/fd")) <= descriptors + len(crowd) + web._MAX_OF_ADDRESS + 1
        assert select.select(crowd, [], [], 0)[0], "the oldest have made room"


def test_who_says_nothing_or_takes_nothing_is_cut_off(server: WebServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "_REQUEST_S", 0.2)
    monkeypatch.setattr(web, "_ANSWER_S", 0.2)
    with connect(server) as silent, connect(server) as slow, connect(server) as deaf:
        slow.sendall(b"GET / HTTP/1.1\r\n")
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert silent.recv(1) == slow.recv(1) == b""
        deadline = time.monotonic() + 10
        while len(server._places):
            assert time.monotonic() < deadline
            ask(server)


def test_a_flood_of_requests_costs_little(server: WebServer) -> None:
    """It is answered slowly, a tenth of a second after the last ones."""
    done = threading.Event()

    def flood() -> None:
        while not done.is_set():
            with contextlib.suppress(OSError), socket.create_connection(address, timeout=0.5) as visitor:
                visitor.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
                visitor.recv(1)

    address = ("127.0.0.1", int(server.url.rpartition(":")[2].rstrip("/")))
    threads = [threading.Thread(target=flood) for _ in range(8)]
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
    for thread in threads:
        thread.start()
    answered = 0
    while time.monotonic() < began + 2:
        assert ask(server) == (200, "here\n")
        answered += 1
    done.set()
    for thread in threads:
        thread.join()
    after = resource.getrusage(resource.RUSAGE_SELF)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert answered >= 2, "who waits for a turn gets one"
    assert used_s < 1, f"{used_s:.2f} s of CPU, the flood's own among them"
