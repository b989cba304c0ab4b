"""The exporter, the history and `hetstream report`: on made-up clusters, on recorded ones, and on a real one."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import clusters
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_prometheus

from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.cli.report import ALERTS, DASHBOARD
from hetstream.slurm_plugin.client.fake import FakeSlurm
from hetstream.slurm_plugin.errors import HistoryError, ServeError
from hetstream.slurm_plugin.insight.observation import KEEP_S, History, Monitor, Reading
from hetstream.slurm_plugin.render.metrics import ClusterCollector, MetricsServer

OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}
# How names may end: a unit, or what is counted.
UNITS = ("seconds", "bytes", "ratio", "total")
COUNTED = ("nodes", "cpus", "gpus", "jobs", "allocated", "free", "use", "load", "measured", "starved", "up")

Series = dict[str, list[tuple[dict[str, str], float]]]


def parsed(text: str, parse: Any = parse_prometheus) -> Series:
    """Every series of a text that the real parser takes."""
    found: Series = {}
    for family in parse(text):
        assert family.documentation
        found.setdefault(family.name if family.type != "counter" else f"{family.name}_total", [])
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def scrape(url: str, headers: Mapping[str, str]) -> str:
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def collector_of(reading: Reading) -> ClusterCollector:
    collector = ClusterCollector()
    collector.reading = reading
    return collector


@pytest.mark.shows("`hetstream exporter` is read by Prometheus's parsers, and a failure is a counted error")
def test_both_formats_are_read_by_their_parsers_and_say_the_same() -> None:
    seen = clusters.observation()
    server = MetricsServer("127.0.0.1", 0, collector_of(Reading(seen, success_s=clusters.NOW_S, read_s=0.5)))
    try:
        plain = parsed(scrape(server.url, {}))
        text = scrape(server.url, OPENMETRICS)
        assert text.endswith("# EOF\n")
        assert parsed(text, parse_openmetrics) == plain
        with pytest.raises(ServeError, match=r"cannot be listened on: Address already in use\. Give another one"):
            MetricsServer("127.0.0.1", int(re.findall(r":(\d+)/", server.url)[0]), ClusterCollector())
    finally:
        server.close()
    assert plain["hetstream_up"] == [({}, 1.0)]
    assert plain["hetstream_last_read_timestamp_seconds"] == [({}, clusters.NOW_S)]
    assert plain["hetstream_cluster_gpus"] == [({}, 88.0 + 7)]  # and what is held on two drained nodes
    assert plain["hetstream_cluster_memory_bytes"] == [({}, (22 * 64000 + 4 * 128000 + 56000) * 1024.0**2)]
    assert ({"cause": "GPUs or CPUs"}, 9.0) in plain["hetstream_pending_jobs"]
    assert ({"node": "gpu1"}, -0.75) in plain["hetstream_node_fragmentation_ratio"]
    assert len(plain["hetstream_node_fragmentation_ratio"]) == 22, "nodes without GPUs have no indicator"
    assert plain["hetstream_partition_gpus"] == [({"partition": "gpu"}, 88.0 + 7), ({"partition": "cpu"}, 0.0)]
    for name, rows in plain.items():
        assert name.rpartition("_")[2] in (*UNITS, *COUNTED), name
        for labels, value in rows:
            assert set(labels) <= {"cause", "node", "partition", "kind"}
            assert value >= 0 or name == "hetstream_node_fragmentation_ratio", name


@pytest.mark.shows("`hetstream exporter` is read by Prometheus's parsers, and a failure is a counted error")
def test_a_cluster_without_gpus_has_no_indicator() -> None:
    found = parsed(collector_of(Reading(clusters.observation(gpus=False))).text())
    assert found["hetstream_cluster_gpus"] == [({}, 0.0)]
    assert found["hetstream_cluster_fragmentation_ratio"] == []


@pytest.mark.shows("`hetstream exporter` is read by Prometheus's parsers, and a failure is a counted error")
def test_slurmctld_down_is_counted_and_passes(tmp_path: Path) -> None:
    fake = FakeSlurm(tmp_path, {}, seen=clusters.snapshot())
    waits: list[float] = []
    monitor = Monitor(fake, lambda jobs: {}, None)
    readings = monitor.readings(60, waits.append)
    collector = collector_of(next(readings))
    assert parsed(collector.text())["hetstream_up"] == [({}, 1.0)]
    fake.refuse.add("snapshot")
    collector.reading = next(readings)
    collector.reading = next(readings)
    found = parsed(collector.text())
    assert found["hetstream_up"] == [({}, 0.0)]
    assert found["hetstream_read_errors_total"] == [({"kind": "SlurmCommandError"}, 2.0)]
    assert found["hetstream_last_read_timestamp_seconds"] == [({}, clusters.NOW_S)]
    assert "hetstream_cluster_gpus" not in found, "what was seen before is not shown as if it were now"
    assert "squeue" in collector.reading.error
    fake.refuse.clear()
    collector.reading = next(readings)
    assert parsed(collector.text())["hetstream_up"] == [({}, 1.0)]
    assert all(59 < one <= 60 for one in waits)


@pytest.mark.shows("`hetstream exporter` is read by Prometheus's parsers, and a failure is a counted error")
def test_what_nobody_foresaw_and_a_history_that_is_full_are_counted_too(tmp_path: Path) -> None:
    def fail(jobs: object) -> dict[str, float]:
        raise OSError("too many open files")

    fake = FakeSlurm(tmp_path, {}, seen=clusters.snapshot())
    reading = Monitor(fake, fail, None).read()
    assert (reading.observation, dict(reading.num_errors)) == (None, {"OSError": 1})
    with History(tmp_path / "history.sqlite") as history:
        monitor = Monitor(fake, lambda jobs: {}, history)
    reading = monitor.read()  # the history is closed: nothing can be kept
    assert reading.observation is not None, "it is shown all the same"
    assert dict(reading.num_errors) == {"HistoryError": 1}
    assert "cannot be used" in reading.error


@pytest.mark.shows("`hetstream exporter` is read by Prometheus's parsers, and a failure is a counted error")
def test_the_dashboard_asks_for_what_is_exported() -> None:
    reading = Reading(clusters.observation(), num_errors={"SlurmCommandError": 1}, success_s=1.0)
    exported = parsed(collector_of(reading).text())
    board = json.loads(DASHBOARD.read_text())
    variables = {one["name"]: one for one in board["templating"]["list"]}
    assert {"partition", "node"} < set(variables)
    asked = set(
        re.findall(r"\bhetstream_\w+", json.dumps([[panel["targets"] for panel in board["panels"]], variables]))
    )
    assert len(asked) > 15
    for name in re.findall(r"\$(\w+)", json.dumps([panel["targets"] for panel in board["panels"]])):
        assert re.fullmatch(rf"label_values\(hetstream_{name}_cpus, {name}\)", variables[name]["query"]["query"])
    assert sorted(asked - set(exported)) == []
    units = {"bytes": "bytes", "seconds": "s"}
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"].endswith("."), f"{panel['title']} is not described"
        assert panel["datasource"]["uid"] == "${datasource}"
        place = panel["gridPos"]
        squares = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not taken & squares, f"{panel['title']} lies on another panel"
        taken |= squares
        for target in panel["targets"]:
            ends = {name.rpartition("_")[2] for name in re.findall(r"\bhetstream_\w+", target["expr"])}
            if len(ends) == 1 and "/" not in target["expr"] and ends & set(units):
                assert panel["fieldConfig"]["defaults"]["unit"] == units[ends.pop()], panel["title"]
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


@pytest.mark.shows("the exporter's alert rules and its dashboard ask for what is exported")
def test_the_alert_rules_ask_for_what_is_exported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exporter", "--alerts"]) == 0
    text = capsys.readouterr().out
    assert text == ALERTS.read_text()
    reading = Reading(clusters.observation(), num_errors={"SlurmCommandError": 1}, success_s=1.0)
    exported = parsed(collector_of(reading).text())
    expressions = re.findall(r"^        expr: (.+)$", text, re.M)
    asked = set(re.findall(r"\bhetstream_\w+", "".join(expressions)))
    assert sorted(asked - set(exported)) == []
    rules = text.split("      - alert: ")[1:]
    assert len(rules) == len(expressions) > 5
    for rule in rules:
        assert re.findall(r"^ +(expr|for|severity|summary|description): \S", rule, re.M) == [
            "expr", "for", "severity", "summary", "description",
        ], rule  # fmt: skip


def test_the_exporter_has_a_landing_page() -> None:
    server = MetricsServer("127.0.0.1", 0, ClusterCollector())
    try:
        assert '<a href="/metrics">' in scrape(server.url.removesuffix("metrics"), {})
        with pytest.raises(urllib.error.HTTPError, match="404") as refused:
            scrape(f"{server.url}x", {})
        refused.value.close()
    finally:
        server.close()


@pytest.mark.shows("the history is one SQLite file; a damaged or foreign file is one clear error")
def test_a_history_keeps_what_it_is_given(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    last = clusters.observation().sample
    samples = clusters.history(last, 20)
    with History(path) as history, History(path) as other:
        for sample in samples:
            history.append(sample)
        assert other.since(0.0) == samples
        assert other.since(last.taken_s) == [last]
        assert path.stat().st_mode & 0o777 == 0o600
        later = replace(last, taken_s=last.taken_s + KEEP_S - 3600)
        other.append(later)
        kept = history.since(0.0)
        assert kept[-1] == later
        assert kept[0].taken_s >= later.taken_s - KEEP_S
        assert len(kept) < len(samples)
    for kind in ("alice", "train", "gpu0"):
        assert kind.encode() not in path.read_bytes(), "it names no users, jobs and nodes"


@pytest.mark.shows("the history is one SQLite file; a damaged or foreign file is one clear error")
def test_a_history_that_cannot_be_used_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(HistoryError, match=r"cannot be opened: No such file or directory\. .* check: namei -l /"):
        History(tmp_path / "nowhere" / "history.sqlite")
    with pytest.raises(HistoryError, match="cannot be opened: Is a directory"):
        History(tmp_path)
    damaged = tmp_path / "damaged"
    damaged.write_bytes(b"no database at all, but long enough to be looked at" * 100)
    with pytest.raises(HistoryError, match=r"not a database\. If it is damaged, move it away"):
        History(damaged)
    foreign = tmp_path / "foreign"
    database = sqlite3.connect(foreign)
    database.execute("create table other (x)")
    database.close()
    with pytest.raises(HistoryError, match=r"is another program's\. Give another file"):
        History(foreign)


def test_a_history_that_others_may_have_prepared_is_not_used(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    History(path).close()
    path.chmod(0o666)
    with pytest.raises(HistoryError, match="others may have prepared"):
        History(path)
    path.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(path, 61002, -1)
        with pytest.raises(HistoryError, match="user 61002 or others may have prepared"):
            History(path)


@pytest.mark.shows("unknown jobs, missing commands and no permission are one line with the next step")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize(("directory_mode", "mode"), [(0o755, 0o666), (0o777, 0o600), (0o777, 0o644)])
def test_a_history_of_somebody_else_is_told_as_that(tmp_path: Path, directory_mode: int, mode: int) -> None:
    """The directory cannot be written to, or the file cannot be read, or only be read."""
    place = Path(tempfile.mkdtemp(dir="/var/tmp"))  # others cannot enter pytest's own
    try:
        History(place / "history.sqlite").close()
        (place / "history.sqlite").chmod(mode)
        place.chmod(directory_mode)
        os.seteuid(65534)
        try:
            with pytest.raises(
                HistoryError, match=r"cannot be opened: (Permission denied|others can make files .*)\. Give another"
            ):
                History(place / "history.sqlite")
        finally:
            os.seteuid(0)
    finally:
        shutil.rmtree(place)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("exporter --listen here", "--listen 'here': the form is [HOST:]PORT"),
        ("serve --listen :1", "the form is [HOST:]PORT"),
        ("exporter --interval 0", "--interval=0: must be at least 5 seconds"),
        ("serve --interval nan", "--interval=nan: must be at least 5 seconds"),
        ("report --html /nowhere/at/all.html", "--html=/nowhere/at/all.html: there is no directory /nowhere/at"),
        ("serve --start yesterday", "--start=yesterday: must be 2026-11-20T16:00:00"),
    ],
)
def test_a_wrong_command_line(line: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(line.split()) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert err.count("\n") == 1


def test_the_dashboard_is_printed_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["exporter", "--dashboard"]) == 0
    assert capsys.readouterr().out == DASHBOARD.read_text()


@pytest.mark.shows("`hetstream exporter` is read by Prometheus's parsers, and a failure is a counted error")
@pytest.mark.shows("`report --html` is one self-contained page, and nothing is told by colour alone")
@pytest.mark.slurm
@pytest.mark.every_release
def test_exporter_report_and_page_on_a_real_cluster(
    devcluster: Any, tmp_path: Path, wait_until: Callable[..., None]
) -> None:
    # The commands are the real ones, until slurmctld is "down".
    for name in ("scontrol", "squeue"):
        real = shutil.which(name, path=devcluster.env["PATH"])
        tool = tmp_path / name
        tool.write_text(
            f"#!/bin/sh\n[ -e {tmp_path}/down ] && {{ echo 'Unable to contact' >&2; exit 1; }}\nexec {real} \"$@\"\n"
        )
        tool.chmod(0o755)
    env = {**devcluster.env, "PATH": f"{tmp_path}:{devcluster.env['PATH']}"}
    command, history = [sys.executable, "-m", "hetstream.slurm_plugin.cli"], tmp_path / "history.sqlite"

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*command, *words], env=env, capture_output=True, text=True, timeout=120)

    page = tmp_path / "page.html"
    done = run("report", "--html", str(page), "--history", str(history), "--json")
    assert done.returncode == 0, done.stderr
    assert [len(json.loads(done.stdout)[name]) for name in ("waiting", "history")] == [0, 1]
    assert page.read_text().count('class="cell"') == 6
    assert "nodes in use" in page.read_text()
    done = run("exporter", "--print", "--history", str(history))
    assert parsed(done.stdout)["hetstream_cluster_gpus"] == [({}, 8.0)]
    assert run("report", "--history", str(history)).stdout.startswith("none of 8 free GPUs is stranded")
    with History(history) as kept:
        assert len(kept.since(0.0)) == 3

    log = tmp_path / "log"
    with log.open("w") as stderr:
        exporter = subprocess.Popen([*command, "exporter", "--listen", "0", "--interval", "5"], env=env, stderr=stderr)
        try:
            wait_until(lambda: "metrics at " in log.read_text(), 60)
            (url,) = re.findall(r"metrics at (http://127\.0\.0\.1:\S+)", log.read_text())
            wait_until(lambda: parsed(scrape(url, OPENMETRICS), parse_openmetrics)["hetstream_up"] == [({}, 1.0)], 60)
            (tmp_path / "down").touch()
            wait_until(lambda: parsed(scrape(url, {}))["hetstream_up"] == [({}, 0.0)], 60)
            assert parsed(scrape(url, {}))["hetstream_read_errors_total"][0][0] == {"kind": "SlurmCommandError"}
            (tmp_path / "down").unlink()
            wait_until(lambda: parsed(scrape(url, {}))["hetstream_up"] == [({}, 1.0)], 60)
        finally:
            exporter.send_signal(signal.SIGINT)
            assert exporter.wait(60) == 130
    assert "Traceback" not in log.read_text()
    (tmp_path / "down").touch()
    done = run("exporter", "--print")
    assert (done.returncode, parsed(done.stdout)["hetstream_up"]) == (1, [({}, 0.0)])
    done = run("report", "--html", str(tmp_path / "none.html"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "none.html").exists()
    os.unlink(tmp_path / "down")


@pytest.mark.shows("`serve` shows the page live, read only, on localhost")
@pytest.mark.slurm
@pytest.mark.every_release
def test_serve_on_a_real_cluster(devcluster: Any, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    log = tmp_path / "log"
    with log.open("w") as stderr:
        argv = [sys.executable, "-m", "hetstream.slurm_plugin.cli", "serve", "--listen", "0", "--interval", "5"]
        server = subprocess.Popen(argv, env=dict(devcluster.env), stderr=stderr)
        try:
            wait_until(lambda: "the cluster at " in log.read_text(), 60)
            ((url, token),) = re.findall(r"the cluster at (http://127\.0\.0\.1:\d+/)(\?token=\S{43})", log.read_text())

            def figures() -> Any:
                try:
                    return json.loads(scrape(f"{url}data.json{token}", {}))
                except urllib.error.HTTPError as error:
                    error.close()
                    return None

            wait_until(lambda: figures() and "waiting" in figures(), 60)
            assert figures()["summary"]["gpus"] == 8
            assert "Nodes now" in scrape(f"{url}{token}", {})
        finally:
            server.send_signal(signal.SIGINT)
            assert server.wait(60) == 130
