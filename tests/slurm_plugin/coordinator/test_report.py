"""What the site daemon is told of a node's GPUs."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from running_daemon import RunningDaemon

from hetstream.base.errors import UsageError
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.hetjob.site.messages import (
    MAX_QUESTION_BYTES,
    AskGpus,
    GpuNow,
    SharingJobNow,
    ShowGpus,
    encode_request,
    new_request,
)
from hetstream.slurm_plugin.cli import main
from hetstream.slurm_plugin.coordinator.admission import OwnJobs
from hetstream.slurm_plugin.coordinator.table import (
    TABLE_VERSION,
    GpuRow,
    GpuTable,
    GpuWatch,
    ProcessRow,
    parse_numbers,
)
from tests.conftest import WaitUntil
from tests.slurm_plugin.coordinator.test_coordinator import GPU, connect, running, statistics

GIB = 1 << 30
NOW_S = 1_795_000_000.0


def process(job: str, job_class: str = "guaranteed", **more: Any) -> ProcessRow:
    row = ProcessRow(
        job, job_class, 1000, 4711, "run", "", 1.0, None, 8 * GIB, 10 * GIB, 0, 0, 100, 0.1, 0.1, 0.0, 0.1, False
    )
    return replace(row, **more)


def gpu(*processes: ProcessRow, **more: Any) -> GpuRow:
    row = GpuRow("GPU-a", 80 * GIB, "sharing", "", True, 0.6, 60 * GIB, None, None, False, processes)
    return replace(row, **more)


def told(*rows: GpuRow, seconds: int = 1) -> GpuNow:
    """What is told of the first GPU, after its row was seen for each of some seconds."""
    watch = GpuWatch("g1", {"GPU-a": 3})
    for second in range(seconds):
        table = GpuTable(TABLE_VERSION, "host", NOW_S + second, (rows[min(second, len(rows) - 1)],))
        watch.see(table)
    report = watch.report(table)
    assert report.node == "g1"
    return report.gpus[0]


def test_the_driver_says_how_much_is_used_else_the_mini_batches_do() -> None:
    assert told(gpu(process("7"), utilisation=0.35)).used_share == 0.35
    assert told(gpu(process("7"))).used_share == 0.4
    assert told(gpu(is_reserved=False, idle_share=None)).used_share == 0.0
    rows = (gpu(process("7"), idle_share=0.8), gpu(process("7"), idle_share=0.6))
    assert abs(told(*rows, seconds=2).used_share - 0.3) < 1e-9
    assert abs(told(*rows, seconds=30).used_share - 0.4) < 1e-9  # only the last ten seconds count


def test_memory_is_what_the_guaranteed_jobs_peak_leaves() -> None:
    beside = process("8", "opportunistic", held_bytes=30 * GIB)
    now = told(gpu(process("7"), beside))
    assert (now.index, now.guaranteed, now.is_reserved) == (3, ("7",), True)
    assert now.free_bytes == 80 * GIB - 10 * GIB - 4 * GIB
    assert told(gpu(beside, is_reserved=False)).free_bytes == 80 * GIB


def test_a_gpu_where_an_opportunistic_job_could_do_nothing_is_closed() -> None:
    assert told(gpu(process("7"))).closed == ""
    assert told(gpu(is_reserved=False)).closed == ""
    assert told(gpu()).closed == "of guaranteed jobs without an agent"
    assert told(gpu(process("7", said_ago_s=31.0))).closed == "of guaranteed jobs that say nothing"
    assert told(gpu(process("7", said_ago_s=None))).closed == "of guaranteed jobs that say nothing"
    assert told(gpu(process("7"), idle_share=None)).closed == "of guaranteed jobs that have made no mini-batch yet"
    assert told(gpu(process("7"), is_lost=True)).closed == "that answer no more"


def test_a_pause_counts_from_its_beginning_and_ends_with_a_mini_batch() -> None:
    def row(verdict: str, made: int) -> GpuRow:
        return gpu(process("7"), process("8", "opportunistic", verdict=verdict, num_batches=made))

    assert told(row("pause", 5), seconds=8).sharing[0].paused_s == 7.0
    assert told(row("run", 5), row("pause", 5), seconds=8).sharing[0].paused_s == 6.0
    assert told(row("pause", 5), row("pause", 6), seconds=8).sharing[0].paused_s == 6.0
    assert told(row("run", 5), seconds=8).sharing[0].paused_s == 0.0


def test_who_breaks_his_orders_is_told_of_and_other_gpus_are_not() -> None:
    bad = process("8", "opportunistic", is_disobedient=True, reason="it goes on although it should pause")
    assert told(gpu(process("7"), bad)).sharing[0].complaint == "it goes on although it should pause"
    watch = GpuWatch("g1", {"GPU-b": 0})
    table = GpuTable(TABLE_VERSION, "host", NOW_S, (gpu(),))
    watch.see(table)
    assert watch.report(table).gpus == ()


def test_how_jobs_fare_is_told_by_job_with_the_pace_of_its_slowest_process() -> None:
    slow = process("7", batch_s=0.3, host_bytes=GIB, pid=4712)
    fares = told(gpu(process("7"), slow, process("8", "opportunistic", batch_s=None, alone_s=None, uid=1001))).jobs
    assert fares == (SharingJobNow("7", 1000, True, 16 * GIB, GIB, 0.3, 0.1), SharingJobNow("8", 1001, False, 8 * GIB))
    now = told(gpu(process("7"), idle_share=0.6))
    assert (now.capacity_bytes, now.idle_share) == (80 * GIB, 0.6)
    assert told(gpu(is_reserved=False, idle_share=0.6)).idle_share is None  # of a job that has left


def test_the_largest_report_of_a_node_is_a_question() -> None:
    rows = tuple(
        gpu(process("123456789"), *(process(f"12345678{n}", "opportunistic") for n in (1, 2)), gpu=f"GPU-{'a' * 36}{i}")
        for i in range(56)
    )  # seven instances (MIG) of each of eight GPUs, with as many jobs as the packer places
    watch = GpuWatch("g1", {row.gpu: index for index, row in enumerate(rows)})
    table = GpuTable(TABLE_VERSION, "host", NOW_S, rows)
    watch.see(table)
    size_bytes = len(encode_request(new_request(watch.report(table), 1)))
    assert size_bytes * 4 / 3 < MAX_QUESTION_BYTES


def test_numbers_of_gpus() -> None:
    assert parse_numbers("0=GPU-a 1=emulation:/x/gpu1") == {"GPU-a": 0, "emulation:/x/gpu1": 1}


@pytest.mark.parametrize("word", ["two=GPU-c", "3=", "GPU-c", "-1=GPU-c", "\u0663=GPU-c", "1" * 5000 + "=GPU-c"])
def test_a_gpu_without_a_number_is_refused_and_not_left_out(word: str) -> None:
    with pytest.raises(UsageError, match="must be NUMBER=NAME"):
        parse_numbers(f"0=GPU-a {word}")


@pytest.mark.parametrize("twice", ["0=GPU-a 0=GPU-b", "0=GPU-a 1=GPU-a"])
def test_a_gpu_that_stands_there_twice_is_refused(twice: str) -> None:
    with pytest.raises(UsageError, match="twice"):
        parse_numbers(twice)


def test_a_node_tells_a_real_daemon_what_its_coordinator_sees(
    tmp_path: Path, local: RunningDaemon, wait_until: WaitUntil
) -> None:
    local.start(wait_until)
    words = ["internal", "gpu-report", "--once", "--node", "g1", "--address", local.address, "--socket"]
    path = tmp_path / "gpu.sock"
    with (
        running(path, OwnJobs()),
        closing(connect(path, JobClass.GUARANTEED, "7")) as guaranteed,
        closing(connect(path, JobClass.OPPORTUNISTIC, "8")),
    ):
        guaranteed.report(statistics(boundaries=2, boundary_ns=1, peak_bytes=GIB), news=True)
        assert main([*words, str(path), "--gpus", f"2={GPU}"]) == 0
        assert main([*words, str(path), "--gpus", "GPU-x"]) == 2  # no number of any GPU
    assert main([*words, str(path), "--gpus", f"2={GPU}"]) == 1  # nobody coordinates any more
    shown = local.ask(AskGpus())
    assert isinstance(shown, ShowGpus)
    (node,) = shown.nodes
    assert (node.node, [now.index for now in node.gpus]) == ("g1", [2])
    assert (node.gpus[0].gpu, node.gpus[0].is_reserved, node.gpus[0].guaranteed) == (GPU, True, ("7",))
    assert [job.job for job in node.gpus[0].sharing] == ["8"]
    assert [(job.job, job.is_guaranteed) for job in node.gpus[0].jobs] == [("7", True), ("8", False)]
