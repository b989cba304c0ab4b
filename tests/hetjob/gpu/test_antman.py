"""AntMan's files: what they say, and what an agent does by them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from hetstream.hetjob.errors import GpuCoordinatorError
from hetstream.hetjob.gpu.agent import Agent
from hetstream.hetjob.gpu.antman import FileChannel, order_of, status_of
from hetstream.hetjob.gpu.device import MemoryUse
from hetstream.hetjob.gpu.orders import FULL_SHARE, NO_LIMIT, JobClass, Statistics, Verdict

BUS = "3b:00.0"
S = 1_000_000_000


def config(perf: int = 100, **limits: int) -> bytes:
    gpus = {BUS: {"maxDeviceMem": limits["limit"]}} if limits else {}
    return json.dumps({"gpuConfigInfo": gpus, "perfControl": perf}).encode()


def test_limit_and_share_are_as_the_file_says() -> None:
    order = order_of(config(25, limit=2**30), BUS)
    assert (order.verdict, order.limit_bytes, order.share) == (Verdict.RUN, 2**30, FULL_SHARE // 4)
    assert order_of(config(0), BUS).verdict == Verdict.PAUSE
    assert order_of(config(limit=2**30), "ff:00.0").limit_bytes == NO_LIMIT
    assert order_of(b"{}", BUS).share == FULL_SHARE


@pytest.mark.parametrize("text", [b"", b"[]", b'{"perfControl": 101}', b'{"gpuConfigInfo": {"3b:00.0": 7}}'])
def test_another_form_is_refused(text: bytes) -> None:
    with pytest.raises(GpuCoordinatorError, match="none of AntMan's"):
        order_of(text, BUS)


def test_the_status_has_antmans_keys() -> None:
    statistics = Statistics(peak_bytes=10, host_bytes=4, held_bytes=8, host_capacity_bytes=100, mini_batch_ns=5_000)
    assert json.loads(status_of(statistics, BUS)) == {
        "gpuUsageInfo": {
            BUS: {
                "deviceMemUsedMax": 6,
                "deviceMemUsedMin": 6,
                "deviceMemPoolSize": 8,
                "deviceMemStable": False,
                "hostMemUsedMax": 4,
                "hostMemUsedMin": 4,
                "hostMemPoolSize": 100,
                "swapReason": "OOM",
                "deviceMemUsedNvidia": -1,
            }
        },
        "miniBatchDuration": 5,
    }


class FakeGpu:
    """A GPU that remembers its limit."""

    name = BUS
    limit_bytes = NO_LIMIT

    def memory(self) -> MemoryUse:
        return MemoryUse(8, 10, 0, 100)

    def begin_mini_batch(self) -> None: ...

    def set_limit(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes

    def is_idle(self) -> bool:
        return True

    def launched(self) -> int:
        return 0


def test_an_agent_keeps_to_the_files_and_pauses_without_one(tmp_path: Path) -> None:
    now_ns, gpu = [0], FakeGpu()
    file, status = tmp_path / "config.json", tmp_path / "status.json"

    def wait(seconds: float) -> None:
        """Time goes by, and after ten seconds of it somebody writes the file."""
        now_ns[0] += S // 4
        if now_ns[0] > 10 * S and not file.exists():
            file.write_bytes(config(limit=5))

    agent = Agent(
        gpu, JobClass.OPPORTUNISTIC, lambda: FileChannel(file, status, BUS, lambda: now_ns[0]), lambda: now_ns[0], wait
    )
    agent.before_launch()
    assert 10 * S < now_ns[0] < 12 * S
    now_ns[0] += 2 * S
    agent.at_boundary()
    assert gpu.limit_bytes == 5
    assert json.loads(status.read_bytes())["gpuUsageInfo"][BUS]["deviceMemPoolSize"] == 8


def test_a_status_that_cannot_be_written_holds_up_nobody(tmp_path: Path) -> None:
    channel = FileChannel(tmp_path / "config.json", tmp_path / "missing" / "status.json", BUS)
    channel.report(Statistics(), news=True)
    assert channel.order() is None


def test_a_pipe_in_the_place_of_the_file_holds_up_nobody(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert FileChannel(tmp_path / "config.json", None, BUS).order() is None


def test_brackets_without_end_are_no_order(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' + "[" * 500_000)
    assert FileChannel(tmp_path / "config.json", None, BUS).order() is None


def test_a_planted_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("results of a year")
    (tmp_path / f".status.json.{os.getpid()}").symlink_to("mine")
    FileChannel(tmp_path / "config.json", tmp_path / "status.json", BUS).report(Statistics(), news=True)
    assert (tmp_path / "mine").read_text() == "results of a year"
    assert not (tmp_path / "status.json").is_symlink()


def test_a_coordinator_that_never_answers_costs_a_guaranteed_job_little() -> None:
    """It takes connections, as one does that is stopped; each attempt costs the two seconds until it is given up."""
    now_ns, attempts = [0], [0]

    def connect() -> FileChannel:
        attempts[0] += 1
        now_ns[0] += 2 * S
        raise GpuCoordinatorError("no answer")

    agent = Agent(FakeGpu(), JobClass.GUARANTEED, connect, lambda: now_ns[0])
    for _ in range(1000):
        agent.before_launch()
        now_ns[0] += S
        agent.at_boundary()
    assert attempts[0] * 2 <= 0.03 * 1000
