"""Real training processes on an emulated GPU, a real coordinator, and real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from hetstream.hetjob.gpu.emulated_file import EmulatedGpuFile
from hetstream.slurm_plugin.coordinator.table import look
from tests.slurm_plugin.coordinator.conftest import MIB, TRAIN, Node, Program


def alone(steps: int, width: int = 256) -> list[str]:
    """Losses of the program without any sharing."""
    argv = [sys.executable, str(TRAIN), str(steps), str(width), "0"]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout.splitlines()


def pauses(node: Node, opportunistic: Program, guaranteed: Program) -> None:
    """The one makes no step any more while the other makes many."""
    before = -1
    while before != len(opportunistic.losses):
        before = len(opportunistic.losses)
        node.goes_on(guaranteed, 20)


@pytest.mark.shows("without a coordinator opportunistic jobs pause and guaranteed ones do not")
def test_an_opportunistic_job_pauses_without_a_coordinator_and_a_guaranteed_one_never_does(node: Node) -> None:
    """Never started, stopped, killed and started again; both compute what they compute alone."""
    guaranteed = node.train("guaranteed", wait_ms=15)
    opportunistic = node.train("opportunistic")
    node.goes_on(guaranteed, 5)
    assert "this guaranteed job goes on as if alone" in guaranteed.said
    node.wait_until(lambda: "this opportunistic job pauses" in opportunistic.said, 60, "its line")
    assert opportunistic.losses == []
    coordinator = node.coordinate()
    node.shows("guaranteed")  # it is back as well, however fast the other one is
    node.goes_on(opportunistic, 10)
    coordinator.send_signal(signal.SIGSTOP)
    pauses(node, opportunistic, guaranteed)
    coordinator.send_signal(signal.SIGCONT)
    node.goes_on(opportunistic, 10)
    coordinator.kill()
    pauses(node, opportunistic, guaranteed)
    assert "the coordinator of GPUs has gone; this guaranteed job goes on as if alone" in guaranteed.said
    assert "the coordinator of GPUs has gone; this opportunistic job pauses" in opportunistic.said
    node.coordinate()
    node.goes_on(opportunistic, 10)
    assert opportunistic.said.count("the coordinator of GPUs is back") == 2
    expected = alone(40)
    assert guaranteed.losses[:40] == expected
    assert opportunistic.losses[:20] == expected[:20]
    guaranteed.process.kill()  # the one that is left has the GPU for itself
    guaranteed.process.wait()
    node.goes_on(opportunistic, 50)


@pytest.mark.shows("jobs that are alone on a GPU, arrive there or are suspended share it")
def test_a_guaranteed_job_that_comes_gets_memory_and_its_losses_are_as_alone(node: Node) -> None:
    """Both need most of the GPU: without sharing the second one runs out of memory."""
    node.emulate(memory_mib=64)
    node.coordinate()
    opportunistic = node.train("opportunistic", width=1400)
    node.goes_on(opportunistic, 3)
    guaranteed = node.train("guaranteed", steps=12, width=1400, wait_ms=5)
    node.goes_on(guaranteed, 12)
    assert guaranteed.process.wait(30) == 0, guaranteed.said
    node.goes_on(opportunistic, 3)
    expected = alone(12, 1400)
    assert guaranteed.losses == expected
    assert opportunistic.losses[:5] == expected[:5]


def test_an_opportunistic_job_that_is_killed_leaves_nothing_and_the_guaranteed_one_computes_as_alone(
    node: Node,
) -> None:
    coordinator = node.coordinate()
    guaranteed = node.train("guaranteed", wait_ms=15)
    node.goes_on(guaranteed, 5)

    def opened() -> tuple[int, int]:
        """Descriptors that the coordinator has, and pages that it has mapped."""
        process = Path(f"/proc/{coordinator.pid}")
        return len([*(process / "fd").iterdir()]), (process / "maps").read_text().count("hetstream-gpu")

    before = opened()
    for _ in range(2):
        opportunistic = node.train("opportunistic")
        node.goes_on(opportunistic, 10)
        assert opened()[1] == before[1] + 2
        opportunistic.process.kill()
        opportunistic.process.wait()
        node.wait_until(lambda: opened() == before, 10, "the coordinator's descriptors")
        with closing(EmulatedGpuFile(node.directory / "gpu0")) as gpu:
            assert gpu.held_by(opportunistic.process.pid) == 0
        node.goes_on(guaranteed, 10)
    assert coordinator.poll() is None
    losses = guaranteed.losses
    assert losses == alone(len(losses))


@pytest.mark.shows("opportunistic jobs get gaps of the guaranteed one and a share of its time")
def test_an_opportunistic_job_lives_from_idle_gaps_alone(node: Node) -> None:
    """Nothing of the busy time is given before all of each gap is: that takes five judgements of three mini-batches."""
    node.coordinate()
    guaranteed = node.train("guaranteed", wait_ms=400)
    node.goes_on(guaranteed, 12)  # the coordinator knows how fast it is alone
    opportunistic = node.train("opportunistic")
    node.wait_until(lambda: "class=opportunistic" in node.log.read_text(), 60, "the opportunistic job to connect")
    made_before = len(guaranteed.losses)
    node.goes_on(opportunistic, 50)  # far more than a first share of the busy time would have room for
    assert len(guaranteed.losses) - made_before <= 12


@pytest.mark.shows("jobs that are alone on a GPU, arrive there or are suspended share it")
@pytest.mark.slow
def test_two_opportunistic_jobs_that_are_alone_divide_the_gpu_by_trial(node: Node) -> None:
    """Each of them would have most of it. What is tried moves memory from one to the other; both go on."""
    node.emulate(memory_mib=64)
    node.coordinate()
    programs = [node.train("opportunistic", width=1400) for _ in range(2)]
    for program in programs:
        node.goes_on(program, 2)
    limits: set[tuple[int, ...]] = set()

    def has_tried() -> bool:
        (row,) = look(str(node.socket)).gpus
        found = tuple(process.limit_bytes or 0 for process in row.processes)
        if len(found) == 2 and row.processes[0].num_batches > 1 < row.processes[1].num_batches:
            assert sum(found) <= 64 * MIB
            limits.add(found)
        return len(limits) >= 3

    node.wait_until(has_tried, 90, "three divisions of the memory")
    for program in programs:
        node.goes_on(program, 2)
        assert program.losses[:4] == alone(4, 1400)


@pytest.mark.shows("an upgraded job is the same process, on real Slurm")
def test_a_job_is_upgraded_where_it_runs(node: Node) -> None:
    """From one step to the next it is bound by nothing, and the coordinator's end changes nothing for it."""
    grants = node.directory / "grants"
    grants.mkdir(mode=0o755)

    def grant(job: str, job_class: str) -> None:
        new = grants / "new"
        new.write_text(json.dumps({"uid": os.geteuid(), "job_class": job_class, "gpus": [node.gpu]}))
        new.rename(grants / f"{job}.json")

    grant("8", "opportunistic")
    grant("9", "opportunistic")
    coordinator = node.coordinate("--grants", str(grants))
    upgraded, other = (
        node.train("opportunistic", wait_ms=5, faults={"SLURM_JOB_ID": "8"}),
        node.train("opportunistic", faults={"SLURM_JOB_ID": "9"}),
    )
    node.goes_on(upgraded, 10)
    node.goes_on(other, 10)
    grant("8", "guaranteed")
    node.wait_until(lambda: "this job has become guaranteed" in upgraded.said, 60, "its line")
    assert f"job=8 pid={upgraded.process.pid}: it is guaranteed now" in node.log.read_text()
    node.goes_on(other, 10)  # in its gaps
    coordinator.kill()
    pauses(node, other, upgraded)
    assert "this guaranteed job goes on as if alone" in upgraded.said
    assert "pauses" not in upgraded.said
    assert upgraded.process.poll() is None
    assert upgraded.losses[:30] == alone(30)
