"""What data workers send through the nodes' links. Pure."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hetstream.hetjob.ports import MOST, Measured, SpeedPoint
from hetstream.slurm_plugin.client.model import Gres, HetComponent, Job, Snapshot
from hetstream.slurm_plugin.daemon.nodes import bytes_per_worker_s, sent_bytes_per_s, traffic

TRAINER = Job(
    1, "train", "alice", ("gpu",), "RUNNING", "None", 2, 4, 2, 2, 1000, gres_per_node=(Gres("gpu", "", 1),),
    nodes=("gpu0", "gpu1"),
)  # fmt: skip
WORKER = replace(
    TRAINER, job_id=9, num_cpus=4, gres_per_node=(), nodes=("cpu0",), partitions=("cpu",), comment="hets:trainer=1"
)
ROWS = {"gpu0": 0, "gpu1": 1, "cpu0": 2, "cpu1": 3}


def used(*jobs: Job, bytes_per_s: float = 12.0) -> list[float]:
    snapshot = Snapshot(0.0, "22.05.8", "test", (TRAINER, *jobs), (), ())
    return traffic(snapshot, ROWS, {"1": TRAINER}, {"1": bytes_per_s}).tolist()


def test_a_remote_data_worker_uses_its_own_link_and_those_of_its_trainers() -> None:
    assert used(WORKER) == [6.0, 6.0, 12.0, 0.0]
    twice_as_large = replace(WORKER, job_id=10, num_cpus=8, nodes=("cpu1",))
    assert used(WORKER, twice_as_large) == [6.0, 6.0, 4.0, 8.0]


def test_beside_a_trainer_only_the_others_part_crosses_a_link() -> None:
    assert used(replace(WORKER, nodes=("gpu0",))) == [6.0, 6.0, 0.0, 0.0]


def test_components_count_and_strangers_jobs_and_those_that_wait_do_not() -> None:
    component = replace(WORKER, comment="", het=HetComponent(1, 1), nodes=("cpu0", "cpu1"), num_cpus=8)
    assert used(component) == [6.0, 6.0, 6.0, 6.0]
    for nothing in (
        replace(WORKER, user="bob"),
        replace(WORKER, state="PENDING"),
        replace(WORKER, comment="hets:trainer=7"),
        replace(WORKER, nodes=("away",)),
    ):
        assert used(nothing) == [0.0] * 4
    assert used(WORKER, bytes_per_s=0.0) == [0.0] * 4


def test_a_data_worker_sends_what_it_makes_but_together_no_more_than_trainers_take() -> None:
    measured = Measured(10.0, 20.0, (SpeedPoint(4, 2, 10.0), SpeedPoint(8, 1, 9.0)), step_bytes=100.0)
    assert sent_bytes_per_s(measured) == 1000.0
    assert [bytes_per_worker_s(measured, 4, number) for number in (1, 2, 10)] == [500.0, 500.0, 200.0]
    assert bytes_per_worker_s(measured, 16, 1) == 2000.0, "of another size, of which nothing is known"


@pytest.mark.parametrize("step_bytes", [None, 0.0, MOST])
def test_whatever_a_job_says_of_its_batches_is_a_number_of_bytes(step_bytes: float | None) -> None:
    measured = Measured(MOST, MOST, (), step_bytes=step_bytes)
    for found in (sent_bytes_per_s(measured), bytes_per_worker_s(measured, 1, 1)):
        assert 0 <= found <= 1e13
