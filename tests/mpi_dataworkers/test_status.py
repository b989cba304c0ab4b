"""What goes on, as counters and rates: the dispatcher's status, the metrics, and the loader's own statistics."""

from __future__ import annotations

import os
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import sample_datasets as datasets
from prometheus_client.parser import text_string_to_metric_families

from hetstream import DataLoader
from hetstream.base.errors import ConfigError
from hetstream.base.process import TrainingProgress
from hetstream.base.prometheus import MetricsServer
from hetstream.mpi_dataworkers.dispatcher import server as dispatcher_server
from hetstream.mpi_dataworkers.dispatcher.client import StatusClient, running_service
from hetstream.mpi_dataworkers.dispatcher.events import DataWorkersChanged
from hetstream.mpi_dataworkers.dispatcher.metrics import ServiceCollector
from hetstream.mpi_dataworkers.dispatcher.state import DispatcherState
from hetstream.mpi_dataworkers.dispatcher.tables import Instruction, Send
from hetstream.mpi_dataworkers.errors import ServiceUnavailable
from hetstream.mpi_dataworkers.loader.statistics import LoaderStatistics
from hetstream.mpi_dataworkers.order.rates import RecentRates
from hetstream.mpi_dataworkers.process.config import metrics_address
from hetstream.mpi_dataworkers.wire.messages import (
    DrainWorker,
    FailLease,
    FinishLease,
    GrantLease,
    LeaveWorker,
    LoaderHeartbeat,
    LoaderStats,
    OpenSession,
    PlannedOrder,
    RegisterLoader,
    RegisterWorker,
    ReportProgress,
    RequestStatus,
    SessionSpec,
    Status,
    SteerDataWorkers,
)


def grants(instructions: list[Instruction]) -> list[tuple[str, GrantLease]]:
    return [(o.peer, o.message) for o in instructions if isinstance(o, Send) and isinstance(o.message, GrantLease)]


def busy_state() -> DispatcherState:
    """Two seconds of a service: one loader, w0 makes a step each 0.5 s, w1 cannot reach the loader."""
    state = DispatcherState(1, 0.0)
    state.handle("loader", RegisterLoader("job", 0, 1, 2, "gpu1", 9, "d", {}), 0.0)
    session = SessionSpec("s", "d", 3, 0, PlannedOrder(100, 1, 1, 0, False, False, 0), ["tcp://loader:1"])
    state.handle("loader", OpenSession(session, 100, 0, [], 8, None), 0.0)
    state.handle("w0", RegisterWorker("cpu0", 7, "", []), 0.0)
    for peer, lease in grants(state.handle("w1", RegisterWorker("cpu1", 8, "", []), 0.0)):
        state.handle(peer, FailLease(lease.token, "no route"), 0.1)
    for number in range(4):
        now = 0.5 * (number + 1)
        stats = LoaderStats(steps=number + 1, bytes=1000 * (number + 1), wait_s=0.25 * (number + 1))
        state.handle("w0", FinishLease(min(state.tables.workers["w0"].tokens), 0.4), now)
        state.handle("loader", ReportProgress("s", number + 1, [(number + 2, number + 3)], 8, stats), now)
        state.tick(now)
    return state


def test_the_status_tells_who_is_there_and_how_fast() -> None:
    status = busy_state().status(2.0)
    first, second = status.data_workers
    assert (first.number, first.host, first.pid, first.state, first.steps) == (0, "cpu0", 7, "working", 4)
    assert first.steps_per_s == pytest.approx(2.0)
    assert first.busy_share == pytest.approx(0.8, abs=0.05)
    assert (second.state, second.leases) == ("silent", 0)
    (loader,) = status.loaders
    assert (loader.job, loader.rank, loader.epoch, loader.step, loader.num_steps) == ("job", 1, 3, 4, 100)
    assert (loader.buffered, loader.window, loader.num_data_workers) == (1, 8, 1)
    assert loader.steps_per_s == pytest.approx(2.0)
    assert loader.bytes_per_s == pytest.approx(2000.0)
    assert loader.wait_share == pytest.approx(0.5)
    assert loader.step_s == pytest.approx(0.25)
    assert loader.step_time_spread == 0.0, "of one rank"
    assert status.leases_granted == 4 + first.leases + status.leases_revoked
    assert msgspec.convert(msgspec.to_builtins(status), Status) == status


def test_what_a_framework_plans_comes_with_the_loaders_progress() -> None:
    state = busy_state()
    assert state.status(2.0).loaders[0].training is None
    told = TrainingProgress(5, 30)
    state.handle("loader", ReportProgress("s", 5, [], 8, LoaderStats(steps=5), told), 2.5)
    assert state.status(2.5).loaders[0].training == told
    state.handle("loader", ReportProgress("s", 6, [], 8, LoaderStats(steps=6)), 3.0)
    assert state.status(3.0).loaders[0].training is None, "it trains no more"


def test_the_spread_of_step_times_is_that_of_the_ranks_of_one_loader() -> None:
    state = DispatcherState(1, 0.0)
    for rank, (job, steps, wait_s) in enumerate(
        [("job", 10, 0.0), ("job", 10, 0.5), ("job", 0, 1.0), ("other", 10, 0.0)]
    ):
        peer = f"rank{rank}"
        state.handle(peer, RegisterLoader(job, 0, rank, 4, "gpu1", rank, "d", {}), 0.0)
        state.handle(peer, LoaderHeartbeat(LoaderStats(steps=steps, wait_s=wait_s)), 1.0)
    rows = state.status(1.0).loaders
    assert [row.step_s for row in rows] == pytest.approx([0.1, 0.05, 0.0, 0.1])
    assert [row.step_time_spread for row in rows] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 0.0])


def test_states_of_data_workers() -> None:
    state = busy_state()
    state.tables.workers["w1"].last_seen = 2.0
    assert [row.state for row in state.status(2.0).data_workers] == ["working", "unreachable"]
    assert state.status(20.0).data_workers[1].state == "silent"
    state.drain("w0", 2.0)
    assert state.status(2.0).data_workers[0].state == "draining"
    state.handle("w0", LeaveWorker(), 2.1)
    state.peer_gone("w1", 2.1)
    assert (state.status(2.1).data_workers_seen, state.status(2.1).data_workers_lost) == (2, 1)


def test_asking_changes_nothing() -> None:
    state = busy_state()
    tables = state.tables
    before = (len(tables.workers), len(tables.loaders), len(tables.leases), len(tables.story))
    (answer,) = state.handle("stranger with the key", RequestStatus(), 2.0)
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Status)
    assert (len(tables.workers), len(tables.loaders), len(tables.leases), len(tables.story)) == before


def test_the_elastic_controller_drains_by_slurm_job_and_its_changes_are_events() -> None:
    state = busy_state()
    state.handle("c0", RegisterWorker("host", 7, "", [], None, "41"), 2.0)
    order = SteerDataWorkers("2 data workers", "drain", 1, "enough", ["41"])
    out = state.handle("stranger with the key", order, 3.0)
    assert next((one.peer, type(one.message)) for one in out if isinstance(one, Send)) == ("c0", DrainWorker)
    answer = out[-1]
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Status)
    assert (answer.peer, answer.message.elastic) == ("stranger with the key", "2 data workers")
    assert [(one.slurm_job, one.state) for one in answer.message.data_workers][-1] == ("41", "draining")
    assert [one.render() for one in state.tables.story if isinstance(one, DataWorkersChanged)] == [
        "data_workers drain 1: enough"
    ]
    again = state.handle("stranger with the key", SteerDataWorkers("", "", 0, "", ["41"]), 13.0)
    assert len(again) == 1
    (decision,) = state.status(13.0).decisions
    assert (decision.ago_s, decision.action, decision.reason) == (10.0, "drain", "enough")


def test_rates_are_of_the_last_seconds() -> None:
    rates = RecentRates(0.0, 0)
    for second in range(1, 101):
        rates.note(second, 10 * second if second <= 90 else 900)
    assert rates.per_s(100.0, 900) == (0.0,)
    assert RecentRates(0.0, 0).per_s(0.0, 5) == (0.0,)


def test_who_waits_for_a_step_reports_the_time_up_to_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    statistics = LoaderStatistics()
    statistics.count({"steps": 1, "wait_s": 2.0}, 0)
    clock[0] = 105.0
    statistics.count({"steps": 1, "wait_s": 1.0}, 0)
    clock[0] = 160.0
    assert statistics.at_last_step().elapsed_s == 7.0, "else a loader that waits would seem to wait less and less"
    assert statistics.now().elapsed_s == 62.0
    statistics.count({"elapsed_s": 62.0}, 3)
    assert statistics.at_last_step() == statistics.now() == statistics.counters
    assert (statistics.counters.steps, statistics.counters.wait_s, statistics.counters.duplicates_dropped) == (
        2,
        3.0,
        3,
    )


def samples(text: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    """Every series of a scrape, by Prometheus' own parser."""
    found: dict[str, list[tuple[dict[str, str], float]]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def scrape(url: str) -> dict[str, list[tuple[dict[str, str], float]]]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return samples(answer.read().decode())


def test_metrics_have_units_and_bounded_labels() -> None:
    state = busy_state()
    server = MetricsServer("127.0.0.1", 0, ServiceCollector(state.status(2.0)))
    try:
        series = scrape(server.url)
        assert series["hetstream_data_worker_steps_total"] == [
            ({"data_worker": "0", "host": "cpu0"}, 4.0),
            ({"data_worker": "1", "host": "cpu1"}, 0.0),
        ]
        assert series["hetstream_loader_bytes_total"] == [({"job": "job", "rank": "1", "loader": "0"}, 4000.0)]
        for name, rows in series.items():
            kind = name.rpartition("_")[2]
            counted = ("workers", "loaders", "leases", "steps")
            assert kind in ("total", "seconds", "ratio", "bytes", *counted), name
            assert all(set(labels) <= {"job", "rank", "loader", "data_worker", "host", "device"} for labels, _ in rows)
        assert series["hetstream_stage_data_workers"] == [({"device": "cpu"}, 2.0)]
        assert series["hetstream_stage_missed_ratio"] == [({"device": "cpu"}, pytest.approx(0.5))]
        state.peer_gone("w1", 2.1)
        server.publish(state.status(2.1))
        assert len(scrape(server.url)["hetstream_data_worker_steps_total"]) == 1
    finally:
        server.close()


def test_a_dispatcher_without_prometheus_client_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("hetstream.base.prometheus", "hetstream.mpi_dataworkers.dispatcher.metrics"):
        monkeypatch.delitem(sys.modules, name)
    assert dispatcher_server._open_metrics(("127.0.0.1", 0), busy_state()) is None
    assert "no metrics: metrics need the package prometheus-client. Run: " in caplog.text


def test_metrics_are_made_once_for_a_state_however_many_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    collector = ServiceCollector(busy_state().status(2.0))
    server = MetricsServer("127.0.0.1", 0, collector)
    made: list[object] = []
    collect = collector.collect
    monkeypatch.setattr(collector, "collect", lambda: [made.append(1), *collect()][1:])
    try:
        assert scrape(server.url) == scrape(server.url)
        assert len(made) == 1
        server.publish(busy_state().status(3.0))
        scrape(server.url)
        assert len(made) == 2
        foreign = urllib.request.Request(server.url, headers={"Host": "evil.example"})
        with pytest.raises(urllib.error.HTTPError) as refused, urllib.request.urlopen(foreign, timeout=10):
            pass
        refused.value.close()
        assert refused.value.code == 403
    finally:
        server.close()


@pytest.mark.parametrize("value", ["", "x", "1:2:x", ":9400", "70000"])
def test_a_metrics_address_of_another_form_is_refused(value: str) -> None:
    with pytest.raises(ConfigError, match=r"\[HOST:\]PORT"):
        metrics_address(value, "--metrics-port")
    assert metrics_address("9400", "") == ("127.0.0.1", 9400)
    assert metrics_address("0.0.0.0:0", "") == ("0.0.0.0", 0)


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> None:
    """To be named before `service`: its dispatcher serves metrics at a free port."""
    monkeypatch.setenv("HETSTREAM_METRICS_PORT", "0")


@pytest.mark.shows("what happens can be seen by `stats()`, status, events and Prometheus")
def test_a_running_service_is_asked_scraped_and_survives_its_dispatchers_death(
    metered: None, service: Any, wait_until: Callable[..., None]
) -> None:
    service.start_workers(2)
    with DataLoader(datasets.Augmented(64), batch_size=4, service=service.name) as loader:
        assert len(list(loader)) == 16
        own = loader.stats()
        with StatusClient(running_service(service.address_file)) as client:
            wait_until(lambda: client.fetch().loaders[0].totals.steps == 16, what="the loader's report")
            status = client.fetch()
            assert [worker.host for worker in status.data_workers] == [os.uname().nodename] * 2
            made = sum(worker.steps for worker in status.data_workers)
            assert 8 <= made <= 16, "leases that were in work when the epoch ended are not counted"
            (url,) = re.findall(r"metrics at (\S+)", service.log("dispatcher"))
            taken = "hetstream_loader_steps_total"
            wait_until(lambda: [value for _, value in scrape(url).get(taken, [])] == [16.0], what="newest numbers")
            service.kill_dispatcher()
            service.start_dispatcher()
            assert client.fetch().incarnation == 2
            wait_until(lambda: len(client.fetch().data_workers) == 2, what="the data workers' return")
    assert own["steps"] == 16
    assert 0 < own["steps_per_s"] < 1e6
    assert own["bytes_per_s"] > 0
    assert 0 <= own["wait_share"] <= 1
    assert 0 <= own["recent_wait_share"] <= 1
    assert 0 <= own["step_s"] < 10
    assert own["elapsed_s"] > 0
    assert own["batches_waiting"] == own["batches_out_of_order"] == 0
    assert own["num_data_workers"] == 2


def test_asking_where_there_is_nothing(tmp_path: Path) -> None:
    with pytest.raises(ServiceUnavailable, match="there is no address file"):
        running_service(tmp_path / "nothing")


def test_the_statistics_count_the_pass_that_is_open() -> None:
    loader = DataLoader(datasets.Augmented(64), batch_size=4)
    batches = iter(loader)
    next(batches)
    next(batches)
    stats = loader.stats()
    assert stats["steps"] == 2
    assert 0 < stats["wait_s"] <= stats["elapsed_s"]
    assert 0 < stats["wait_share"] <= 1
    list(batches)
    ended = loader.stats()["elapsed_s"]
    assert loader.stats()["elapsed_s"] == ended


@pytest.fixture
def taken_port(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """To be named before `service`: its dispatcher is to serve metrics where somebody else does."""
    server = MetricsServer("127.0.0.1", 0, ServiceCollector(busy_state().status(2.0)))
    monkeypatch.setenv("HETSTREAM_METRICS_PORT", re.findall(r":(\d+)/", server.url)[0])
    yield
    server.close()


def test_metrics_that_cannot_be_served_are_said_and_do_not_stop_the_service(
    taken_port: None, service: Any, wait_until: Callable[..., None]
) -> None:
    wait_until(lambda: "no metrics: metrics cannot be served at" in service.log("dispatcher"), what="the reason")
    service.start_workers()  # they register
