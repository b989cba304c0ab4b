"""One starving job and the daemon's registry: it grows as far as the free CPUs go. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetstream.hetjob.ports import Measured, RemainingWork, SpeedPoint
from hetstream.hetjob.site.messages import ReportDemand
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.daemon.registry import Registry

ALICE = ("alice", "1000")
STARTED_S, LIMIT_S = 1000.0, 600.0


def seen(num_companions: int, free_cpus: int, now_s: float) -> Snapshot:
    """A trainer on a GPU node, and a node with so many CPUs that companions have or could have."""
    gpu = (Gres("gpu", "", 1),)
    trainer = Job(
        1, "train", "alice", ("gpu",), "RUNNING", "None", 1, 2, 1, 2, 2000, gres_per_node=gpu,
        submit_s=STARTED_S, start_s=STARTED_S, end_s=STARTED_S + LIMIT_S,
    )  # fmt: skip
    companions = (
        replace(
            trainer, job_id=10 + number, partitions=("cpu",), num_cpus=1, memory_mb=512, gres_per_node=(),
            nodes=("cpu0",), comment="hets:trainer=1",
        )
        for number in range(num_companions)
    )  # fmt: skip
    nodes = (
        Node("gpu0", frozenset({"ALLOCATED"}), ("gpu",), 16, 2, 64000, 2000, gpu),
        Node("cpu0", frozenset({"MIXED"}), ("cpu",), 16, 16 - free_cpus + num_companions, 64000, 0, ()),
    )
    partitions = (Partition("gpu", ("gpu0",)), Partition("cpu", ("cpu0",)))
    return Snapshot(now_s, "24.11.5", "test", (trainer, *companions), nodes, partitions)


@pytest.mark.parametrize(("local_per_s", "worker_per_s", "ideal_per_s"), [(5.8, 9.0, 29.9), (7.4, 8.0, 30.0)])
def test_a_job_whose_first_data_worker_is_hardly_faster_than_local_loading_gets_the_second(
    local_per_s: float, worker_per_s: float, ideal_per_s: float
) -> None:
    """It reports every 10 s. Two CPUs are free, of which it has one; with four it would be fed."""
    registry = Registry((), allocating=True)
    now_s = STARTED_S + 10
    registry.observe(seen(0, 2, now_s), now_s)
    registry.report(ALICE, ReportDemand(1, 0, 0, 1, 1, 0.8), 1, now_s)
    assert registry.jobs["1"].limit == 1
    points = (SpeedPoint(1, 0, local_per_s), SpeedPoint(1, 1, worker_per_s))
    for number in range(2, 6):
        now_s += 10
        left = RemainingWork((STARTED_S + LIMIT_S - now_s) / 2 * ideal_per_s, 1.4, "time_limit")
        measured = Measured(worker_per_s, ideal_per_s, points, gpus=1, remaining=left)
        registry.observe(seen(1, 2, now_s), now_s)
        registry.report(ALICE, ReportDemand(1, 0, 1, 4, 1, 0.7, measured=measured), number, now_s)
    assert registry.jobs["1"].limit == 2, registry.jobs["1"].reason
    assert registry.problem == ""
