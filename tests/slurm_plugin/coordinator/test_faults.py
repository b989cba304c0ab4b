"""Agents and coordinators that die or stop at exact points, beside a guaranteed job that must not feel it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from hetstream.hetjob.gpu.config import POINTS
from hetstream.slurm_plugin.coordinator.table import look
from tests.slurm_plugin.coordinator.conftest import Node, Program
from tests.slurm_plugin.coordinator.test_processes import alone

OF_AGENTS = [point for point in POINTS if point.startswith("agent.")]
OF_COORDINATORS = [point for point in POINTS if point.startswith("coordinator.")]

pytestmark = pytest.mark.slow


def opened(pid: int) -> tuple[int, int]:
    """Descriptors that a process has, and pages that it has mapped."""
    process = Path(f"/proc/{pid}")
    return len([*(process / "fd").iterdir()]), (process / "maps").read_text().count("hetstream-gpu")


def end(program: Program) -> None:
    program.process.send_signal(signal.SIGKILL)
    program.process.wait()


@pytest.mark.shows("agents, coordinator and nodes may be killed at each point, and the guaranteed job goes on as alone")
def test_an_agent_that_dies_at_any_point_leaves_nothing_and_the_guaranteed_job_computes_as_alone(node: Node) -> None:
    coordinator = node.coordinate()
    guaranteed = node.train("guaranteed", wait_ms=10)
    node.goes_on(guaranteed, 12)
    before = opened(coordinator.pid)
    programs = {point: node.train("opportunistic", faults=node.fault(point, "kill", 2)) for point in OF_AGENTS[3:]}
    programs |= {point: node.train("opportunistic", faults=node.fault(point, "kill")) for point in OF_AGENTS[:3]}
    for point, program in programs.items():
        node.wait_until(lambda point=point: node.is_struck(point, "kill"), 120, f"the end at {point}")
        assert program.process.wait() == -signal.SIGKILL
    node.wait_until(lambda: opened(coordinator.pid) == before, 20, "the coordinator to have closed all")
    node.goes_on(guaranteed, 20)
    end(guaranteed)
    assert guaranteed.losses == alone(len(guaranteed.losses))
    assert "goes on as if alone" not in guaranteed.said


@pytest.mark.shows("agents, coordinator and nodes may be killed at each point, and the guaranteed job goes on as alone")
def test_a_guaranteed_process_that_dies_at_any_point_leaves_the_gpu_to_the_other_one(node: Node) -> None:
    node.coordinate()
    opportunistic = node.train("opportunistic")
    node.goes_on(opportunistic, 5)
    for point in ("agent.introduced", "agent.answered", "agent.reported", "agent.boundary"):
        guaranteed = node.train("guaranteed", wait_ms=10, faults=node.fault(point, "kill"))
        node.wait_until(lambda point=point: node.is_struck(point, "kill"), 120, f"the end at {point}")
        assert guaranteed.process.wait() == -signal.SIGKILL
        node.goes_on(opportunistic, 20)
    end(opportunistic)
    assert opportunistic.losses == alone(len(opportunistic.losses))


@pytest.mark.shows("agents, coordinator and nodes may be killed at each point, and the guaranteed job goes on as alone")
def test_a_coordinator_that_dies_at_any_point_stops_the_other_job_alone_and_the_next_one_goes_on(node: Node) -> None:
    guaranteed = node.train("guaranteed", wait_ms=10)
    opportunistic = node.train("opportunistic")
    node.goes_on(guaranteed, 5)
    for point in OF_COORDINATORS:
        dead = node.coordinate(faults=node.fault(point, "kill"))
        node.wait_until(lambda point=point: node.is_struck(point, "kill"), 30, f"the end at {point}")
        assert dead.wait() == -signal.SIGKILL
        node.goes_on(guaranteed, 20)
        living = node.coordinate()
        node.goes_on(opportunistic, 3)
        living.kill()
        living.wait()
    assert [path.name for path in node.directory.iterdir() if path.is_socket()] == ["gpu.sock"]
    end(guaranteed)
    end(opportunistic)
    assert guaranteed.losses == alone(len(guaranteed.losses))
    assert opportunistic.losses == alone(len(opportunistic.losses))


@pytest.mark.shows("a new coordinator lets nobody on before the guaranteed job has come back")
def test_a_coordinator_that_is_started_anew_lets_nobody_on_before_the_guaranteed_job_has_come_back(node: Node) -> None:
    """That is in a mini-batch, however long, when the coordinator is killed."""
    dead = node.coordinate()
    guaranteed = node.train("guaranteed", wait_ms=10, faults=node.fault("agent.boundary", "stop", 40))
    opportunistic = node.train("opportunistic")
    node.wait_until(lambda: node.is_struck("agent.boundary", "stop"), 120, "it to be stopped")
    node.shows("opportunistic")
    dead.kill()
    dead.wait()
    made = len(opportunistic.losses)
    node.coordinate()
    waits = "a guaranteed job from before this coordinator has not come to it yet: paused"
    node.wait_until(lambda: node.shows("opportunistic").reason == waits, 30, "the other one to be told to wait")
    assert len(opportunistic.losses) == made
    os.kill(guaranteed.process.pid, signal.SIGCONT)
    node.goes_on(guaranteed, 20)
    node.goes_on(opportunistic, 5)
    assert "GPU order not kept" not in node.log.read_text()
    end(guaranteed)
    assert guaranteed.losses == alone(len(guaranteed.losses))


def test_an_opportunistic_process_that_is_stopped_with_its_memory_holds_up_nobody(node: Node) -> None:
    """It neither ends its mini-batch nor gives memory back: two seconds later it counts as stopped where it is."""
    node.emulate(memory_mib=64)
    node.coordinate()
    stopped = node.train("opportunistic", width=1100, faults=node.fault("agent.reporting", "stop", 9))
    node.wait_until(lambda: node.is_struck("agent.reporting", "stop"), 120, "it to be stopped")
    guaranteed = node.train("guaranteed", width=1600, wait_ms=5)
    node.wait_until(lambda: node.socket.exists() and has_pace(node), 60, "the guaranteed job's pace to be known")
    node.goes_on(guaranteed, 5)
    assert node.shows("guaranteed").alone_s is not None
    # It is reported after ten seconds: the guaranteed job has tensors on the host for its sake.
    node.wait_until(lambda: node.shows("opportunistic").is_disobedient, 30, "the report")
    os.kill(stopped.process.pid, signal.SIGCONT)
    node.wait_until(lambda: node.shows("guaranteed").host_bytes == 0, 60, "all of it to be on the GPU")
    end(guaranteed)
    node.goes_on(stopped, 3)
    assert guaranteed.losses == alone(len(guaranteed.losses), 1600)
    assert stopped.losses[:10] == alone(10, 1100)


def has_pace(node: Node) -> bool:
    (row,) = look(str(node.socket)).gpus
    return any(process.job_class == "guaranteed" and process.alone_s for process in row.processes)


def test_a_guaranteed_process_that_is_stopped_in_a_mini_batch_keeps_its_gpu_and_goes_on(node: Node) -> None:
    node.coordinate()
    guaranteed = node.train("guaranteed", wait_ms=10, faults=node.fault("agent.boundary", "stop", 40))
    opportunistic = node.train("opportunistic")
    node.wait_until(lambda: node.is_struck("agent.boundary", "stop"), 120, "it to be stopped")
    node.wait_until(lambda: "at one mini-batch for long" in node.shows("opportunistic").reason, 30, "the pause")
    made = len(opportunistic.losses)
    assert node.shows("guaranteed").verdict == "run"
    os.kill(guaranteed.process.pid, signal.SIGCONT)
    node.goes_on(guaranteed, 20)
    node.goes_on(opportunistic, 5)
    assert len(opportunistic.losses) > made
    end(guaranteed)
    assert guaranteed.losses == alone(len(guaranteed.losses))


def test_a_coordinator_that_is_stopped_for_ten_seconds_comes_back_and_nobody_is_lost(node: Node) -> None:
    coordinator = node.coordinate(faults=node.fault("coordinator.decided", "stop", 300))
    guaranteed = node.train("guaranteed", wait_ms=10)
    opportunistic = node.train("opportunistic")
    node.wait_until(lambda: node.is_struck("coordinator.decided", "stop"), 120, "it to be stopped")
    node.goes_on(guaranteed, 300)  # some ten seconds
    made = len(opportunistic.losses)
    node.goes_on(guaranteed, 50)
    assert len(opportunistic.losses) == made
    os.kill(coordinator.pid, signal.SIGCONT)
    node.goes_on(opportunistic, 5)
    end(guaranteed)
    assert guaranteed.losses == alone(len(guaranteed.losses))
    assert "has gone" not in opportunistic.said
