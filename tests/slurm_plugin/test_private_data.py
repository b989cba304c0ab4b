"""What Slurm hides from users is shown to nobody else: at an address without a password, or in a file."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from recorded import Recorded

from hetstream.slurm_plugin.coordinator.table import GpuRow, GpuTable, ProcessRow
from hetstream.slurm_plugin.render.metrics import GpuCollector, GpuReading

COMMAND = [sys.executable, "-m", "hetstream.slurm_plugin.cli"]


@pytest.fixture(params=("PrivateData=jobs", "PrivateData=nodes,usage", "MCSPlugin=mcs/user"))
def hiding(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Recorded, str]:
    """A cluster that hides something from some users, and the setting."""
    name, value = request.param.split("=")
    slurm = Recorded(tmp_path)
    config = (tmp_path / "config").read_text()
    changed = re.sub(rf"^{name}( *)=.*$", rf"{name}\1= {value}", config, flags=re.MULTILINE)
    assert changed != config
    slurm.write("config", changed)
    return slurm, request.param


def environment(slurm: Recorded) -> dict[str, str]:
    return {**os.environ, "PATH": f"{slurm.directory}:/usr/bin:/bin"}


@pytest.mark.shows("`exporter` does not show what PrivateData hides, without `--public`; `serve` asks for a token")
def test_what_slurm_hides_is_not_exported(hiding: tuple[Recorded, str]) -> None:
    slurm, setting = hiding
    argv = [*COMMAND, "exporter", "--listen", "0", "--fresh"]
    done = subprocess.run(argv, env=environment(slurm), capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert f"{setting} hides a part of the cluster" in done.stderr
    assert "--public" in done.stderr


@pytest.mark.shows("`exporter` does not show what PrivateData hides, without `--public`; `serve` asks for a token")
@pytest.mark.parametrize("options", [["serve"], ["serve", "--public"], ["exporter", "--public"]], ids=" ".join)
def test_what_slurm_hides_needs_a_token(
    hiding: tuple[Recorded, str], options: list[str], wait_until: Callable[..., None]
) -> None:
    slurm, _ = hiding
    log = slurm.directory / "log"
    with log.open("w") as stderr:
        argv = [*COMMAND, *options, "--listen", "0", "--fresh"]
        server = subprocess.Popen(argv, env=environment(slurm), stderr=stderr)
    try:
        wait_until(lambda: "http://" in log.read_text(), 60)
        (url,) = re.findall(r"http://\S+", log.read_text())
        root, _, query = url.partition("?")
        assert bool(query) == (options == ["serve"])

        def answers() -> bool:
            path = f"data.json?{query}" if options[0] == "serve" else ""
            with urllib.request.urlopen(root + path, timeout=30) as answer:
                return b"up 1.0" in answer.read() or options[0] == "serve"

        wait_until(lambda: _without_error(answers), 60)
        if query:
            with pytest.raises(urllib.error.HTTPError, match="403") as refused:
                urllib.request.urlopen(root, timeout=30)
            refused.value.close()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130


def test_a_socket_is_for_its_user_and_asks_for_no_token(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    slurm, log, path = Recorded(tmp_path), tmp_path / "log", tmp_path / "socket"
    with log.open("w") as stderr:
        argv = [*COMMAND, "serve", "--listen", f"unix:{path}", "--fresh"]
        server = subprocess.Popen(argv, env=environment(slurm), stderr=stderr)

    def page() -> bytes:
        with socket.socket(socket.AF_UNIX) as visitor:
            visitor.connect(str(path))
            visitor.sendall(b"GET / HTTP/1.1\r\nHost: proxy.example\r\n\r\n")
            return b"".join(iter(lambda: visitor.recv(1 << 16), b""))

    try:
        wait_until(lambda: _without_error(lambda: page().startswith(b"HTTP/1.1 200 OK")), 60)
        assert path.stat().st_mode & 0o777 == 0o600
        assert log.read_text() == f"the cluster at unix:{path}\n"
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130
    assert not path.exists()
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    done = slurm.run(f"serve --listen unix:{tmp_path}/open/socket")
    assert (done.returncode, "all can write to" in done.stderr) == (1, True), done.stderr


def _without_error(act: Callable[[], Any]) -> Any:
    try:
        return act()
    except OSError as error:
        getattr(error, "close", lambda: None)()
        return False


def test_a_cluster_that_hides_nothing_is_served(tmp_path: Path, wait_until: Callable[..., None]) -> None:
    slurm, log = Recorded(tmp_path), tmp_path / "log"
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [*COMMAND, "serve", "--listen", "0", "--fresh"], env=environment(slurm), stderr=stderr
        )
    try:
        wait_until(lambda: "http://" in log.read_text(), 60)
        (url,) = re.findall(r"http://\S+", log.read_text())
        wait_until(lambda: _without_error(lambda: urllib.request.urlopen(url, timeout=30).close() or True), 60)
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(60) == 130


def test_one_reading_is_printed_for_who_asks(hiding: tuple[Recorded, str]) -> None:
    """It goes to the user's own standard output."""
    slurm, _ = hiding
    done = slurm.run("exporter --print --fresh")
    assert (done.returncode, "hetstream_up 1.0" in done.stdout) == (0, True)


def test_a_page_of_what_slurm_hides_is_for_its_owner_alone(hiding: tuple[Recorded, str]) -> None:
    slurm, setting = hiding
    page = slurm.directory / "page.html"
    page.touch(0o644)
    done = slurm.run(f"report --fresh --html {page}")
    assert done.returncode == 0
    assert page.stat().st_mode & 0o777 == 0o600
    assert f"{setting} hides a part of the cluster" in done.stderr


def test_a_page_of_what_all_see_has_the_mode_of_the_umask(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    umask = os.umask(0o022)
    try:
        done = Recorded(tmp_path).run(f"report --fresh --html {page}")
    finally:
        os.umask(umask)
    assert (done.returncode, page.stat().st_mode & 0o777) == (0, 0o644)
    assert f"the page is in {page}: open it in a browser" in done.stderr
    assert "the page is in" not in Recorded(tmp_path).run("report --fresh --html /dev/null").stderr


@pytest.fixture
def table() -> GpuTable:
    process = ProcessRow(
        "12", "guaranteed", 1001, 4242, "run", "", 0.0, None, 0, 0, 0, 0, 9, None, None, 0.0, None, False
    )
    row = GpuRow("GPU-1a2b", 1 << 30, "vacant", "", True, None, 0, None, None, False, (process,))
    return GpuTable(1, "g1", 0.0, (row,))


def test_processes_of_a_gpu_are_served_where_the_user_says_so(table: GpuTable) -> None:
    """The coordinator shows each user his own; at an address without a password everybody would see all."""

    def text(*, public: bool) -> str:
        collector = GpuCollector("/nowhere", None, public=public)
        collector.reading = GpuReading(table)
        return collector.text()

    assert 'gpu="GPU-1a2b"' in text(public=False)
    assert "4242" not in text(public=False)
    assert 'pid="4242"' in text(public=True)
