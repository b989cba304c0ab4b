"""Who may see what of a node's GPUs, and how it is shown."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hetstream.base.errors import HetstreamError
from hetstream.base.typed_json import encode
from hetstream.hetjob.errors import GpuCoordinatorError, GpuJobRefused
from hetstream.hetjob.gpu.handshake import Connection
from hetstream.hetjob.gpu.orders import VERSION, GpuUse, JobClass
from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.coordinator.admission import GrantedJobs, OwnJobs
from hetstream.slurm_plugin.coordinator.decide import Measurements
from hetstream.slurm_plugin.coordinator.gpus import StatedGpu
from hetstream.slurm_plugin.coordinator.table import TABLE_VERSION, GpuTable, Look, Who, gpu_row, look, read_table
from hetstream.slurm_plugin.render.gpu_top import render
from tests.base.users import STRANGER, VICTIM, needs_root, run_as
from tests.conftest import WaitUntil
from tests.slurm_plugin.coordinator.test_coordinator import GPU, connect, has, running, statistics
from tests.slurm_plugin.coordinator.test_decide import CAPACITY, GIB, HOST, MS, Gpu

WHO = {"g": Who("7", 1000, 70), "o": Who("8", 1001, 80)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "gpu.sock"


@pytest.fixture
def both(path: Path, wait_until: WaitUntil) -> Iterator[Connection]:
    """A coordinator with a guaranteed and an opportunistic process; the latter's connection."""
    with (
        running(path, OwnJobs()),
        closing(connect(path, JobClass.GUARANTEED, "7")) as guaranteed,
        closing(connect(path, JobClass.OPPORTUNISTIC, "8")) as other,
    ):
        other.report(statistics(), news=True)
        guaranteed.report(statistics(boundaries=2, boundary_ns=1, mini_batch_ns=10 * MS, is_idle=1), news=True)
        wait_until(has(other, GpuUse.RUN))
        yield other


def shared() -> GpuTable:
    """A guaranteed job of 100 ms, 40 of them idle, that takes 110 beside one with some memory on the host."""
    gpu = Gpu()
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=5, mini_batch_ns=50 * MS, peak_bytes=4 * GIB)
    gpu.decide()
    gpu.join("g", JobClass.GUARANTEED)
    gpu.settle("g", 100, gap_ms=40, peak_bytes=10 * GIB, held_bytes=12 * GIB)
    gpu.update("o", mini_batch_ns=75 * MS, held_bytes=3 * GIB, host_bytes=GIB, paused_ns=2_000 * MS)
    for _ in range(64):
        number = (gpu.jobs["g"].statistics or statistics()).boundaries
        gpu.batch("g", 100 if gpu.state.pacing.is_left_alone(number) else 110, gap_ms=40)
    decisions = gpu.decide()
    seen = Measurements(CAPACITY, tuple(gpu.jobs.values()))
    row = gpu_row(StatedGpu(GPU, CAPACITY), gpu.state, seen, decisions, WHO, None, gpu.now_ns + 500 * MS)
    return GpuTable(TABLE_VERSION, "gpu0", 0.0, (row,))


@pytest.mark.shows("`opp`, `gpu top`, doctor, metrics and page show shared GPUs")
def test_the_table_says_who_holds_what_and_how_fast_it_is_against_alone() -> None:
    (row,) = shared().gpus
    assert (row.phase, row.is_reserved, row.capacity_bytes) == ("sharing", True, CAPACITY)
    assert row.idle_share == pytest.approx(40 / 102.5), "a quarter of its last mini-batches was beside the other job"
    assert row.free_bytes == CAPACITY - 12 * GIB - 3 * GIB
    other, guaranteed = row.processes
    assert (guaranteed.job, guaranteed.uid, guaranteed.pid, guaranteed.limit_bytes) == ("7", 1000, 70, None)
    assert (guaranteed.batch_s, guaranteed.alone_s) == (pytest.approx(0.1025), pytest.approx(0.1))
    assert (other.job, other.job_class, other.uid) == ("8", "opportunistic", 1001)
    assert (other.batch_s, other.alone_s) == (0.075, 0.05)
    assert (other.held_bytes, other.host_bytes, other.host_capacity_bytes) == (3 * GIB, GIB, HOST)
    assert other.paused_s == 2
    assert other.said_ago_s == pytest.approx(6.61 + 0.5), "for all of the other job's mini-batches"
    assert "mini-batches take" in other.reason


def test_what_cannot_be_is_not_shown_as_if_it_had_been_said() -> None:
    gpu = Gpu()
    gpu.join("o", JobClass.OPPORTUNISTIC, boundaries=-5, paused_ns=-1)
    decisions = gpu.decide()
    row = gpu_row(
        StatedGpu(GPU, CAPACITY),
        gpu.state,
        Measurements(CAPACITY, tuple(gpu.jobs.values())),
        decisions,
        WHO,
        None,
        gpu.now_ns,
    )
    (process,) = row.processes
    assert (process.verdict, process.num_batches, process.said_ago_s) == ("pause", 0, None)
    assert row.idle_share is None


def test_the_table_for_people_marks_who_is_slower_than_alone() -> None:
    lines = render(shared())
    assert lines[0] == "gpu0  1 GPU shared"
    assert lines[1].startswith(
        f"{GPU}  18.3 GB of 34.4 GB free; mini-batches take 100.0 ms alone and +2.6% beside others"
    )
    assert lines[1].endswith("the guaranteed job leaves it idle 39% of the time")
    guaranteed = next(line for line in lines if "guaranteed  " in line)
    assert guaranteed.split()[-5:] == ["102.5", "ms", "100.0", "ms", "1.02"]
    assert (
        sum("mini-batches take" in line for line in lines) == 2
    )  # of the GPU, and why the other one does what it does
    assert "\x1b[33m" in "".join(render(shared(), color=True))


def test_a_table_of_another_version_is_refused() -> None:
    with pytest.raises(HetstreamError, match=f"has version 2, and this hetstream reads {TABLE_VERSION}"):
        read_table(b'{"version": 2, "gpus": "what will be"}')
    with pytest.raises(HetstreamError, match="is no table"):
        read_table(b'{"version": 1}')


def test_who_looks_sees_all_of_his_own_and_takes_no_place(
    path: Path, both: Connection, wait_until: WaitUntil, capsys: pytest.CaptureFixture[str]
) -> None:
    (row,) = look(str(path)).gpus
    assert [(process.job, process.job_class) for process in row.processes] == [
        ("7", "guaranteed"),
        ("8", "opportunistic"),
    ]
    assert {process.uid for process in row.processes} == {os.geteuid()}
    assert main(["gpu", "top", "--socket", str(path)]) == 0  # no terminal: once
    assert "2 GPU" not in (shown := capsys.readouterr().out)
    assert "opportunistic" in shown
    assert main(["gpu", "top", "--once", "--json", "--socket", str(path)]) == 0
    assert json.loads(capsys.readouterr().out)["gpus"][0]["gpu"] == GPU
    assert main(["gpu", "exporter", "--print", "--socket", str(path)]) == 0
    families = {family.name: family for family in text_string_to_metric_families(capsys.readouterr().out)}
    assert families["hetstream_gpu_up"].samples[0].value == 1
    labels = [sample.labels["job"] for sample in families["hetstream_gpu_process_may_run"].samples]
    assert labels == ["7", "8"]
    before = both.order()
    wait_until(lambda: both.order() != before)


def test_where_nobody_coordinates_there_is_a_line_and_the_metric_is_0(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(GpuCoordinatorError, match="no coordinator of GPUs answers at"):
        look(str(path))
    assert main(["gpu", "exporter", "--print", "--socket", str(path)]) == 1
    assert "hetstream_gpu_up 0.0" in capsys.readouterr().out


def test_who_looks_without_end_holds_up_nobodys_orders(path: Path, both: Connection, wait_until: WaitUntil) -> None:
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.is_set():
            look(str(path))

    threads = [threading.Thread(target=watch) for _ in range(3)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(20):
            before = both.order()
            wait_until(lambda before=before: both.order() != before)
            assert has(both, GpuUse.RUN)()
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def test_another_version_is_refused(path: Path, both: Connection) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        other.connect(str(path))
        other.send(encode(Look(VERSION + 1)))
        assert b"refusal" in other.recv(4096)


@needs_root
def test_another_user_sees_his_own_processes_alone(tmp_path: Path, path: Path) -> None:
    grants = tmp_path / "grants"
    grants.mkdir()
    for job, uid in (("7", os.geteuid()), ("8", VICTIM)):
        (grants / f"{job}.json").write_text(json.dumps({"uid": uid, "job_class": "opportunistic", "gpus": [GPU]}))
    for directory in path.parents:
        if directory.stat().st_mode & 0o005 != 0o005 and directory != directory.parent:
            directory.chmod(directory.stat().st_mode | 0o005)

    def jobs() -> list[str]:
        return [process.job for row in look(str(path)).gpus for process in row.processes]

    def take_part_and_look() -> None:
        with closing(connect(path, JobClass.OPPORTUNISTIC, "8")):
            assert jobs() == ["8"]

    def look_alone() -> None:
        assert jobs() == []
        assert look(str(path)).gpus[0].capacity_bytes == 32 * GIB

    with running(path, GrantedJobs(grants, lambda _: None)), closing(connect(path, JobClass.OPPORTUNISTIC, "7")):
        run_as(VICTIM, take_part_and_look)
        run_as(STRANGER, look_alone)
        with pytest.raises(GpuJobRefused, match="of user"):
            connect(path, JobClass.OPPORTUNISTIC, "8")
        assert jobs() == ["7"]
