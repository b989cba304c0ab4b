"""`hetstream advise`: who would gain, by which basis, and who would not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from hetstream.slurm_plugin.cli.cluster import advise_report
from hetstream.slurm_plugin.client.accounting import Usage
from hetstream.slurm_plugin.client.model import Gres, HetComponent, Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.insight.advise import advise
from hetstream.slurm_plugin.insight.proposals import Remembered
from hetstream.slurm_plugin.past_jobs import Features, PastJob

NOW_S = 1_000_000.0
CPU_NODE = Node("c0", frozenset({"IDLE"}), ("cpu",), 16, 0, 1000, 0)


def job(job_id: int, state: str, cpus: int, gpus: int, **more: Any) -> Job:
    return replace(
        Job(
            job_id, "train", "alice", ("gpu",), state, "Resources" if state == "PENDING" else "", 1, cpus, 1, cpus, 0,
            gres_per_node=(Gres("gpu", "", gpus),), nodes=("g0",) if state == "RUNNING" else (), start_s=NOW_S - 60,
        ),
        **more,
    )  # fmt: skip


def node(cpus_free: int, gpus_free: int) -> Node:
    return Node(
        "g0", frozenset({"MIXED"}), ("gpu",), 16, 16 - cpus_free, 1000, 0,
        (Gres("gpu", "", 4),), (Gres("gpu", "", 4 - gpus_free),),
    )  # fmt: skip


def cluster(*jobs: Job, nodes: tuple[Node, ...]) -> Snapshot:
    partitions = (Partition("gpu", ()), Partition("cpu", ()))
    return Snapshot(NOW_S, "22.05.8", "test", jobs, (*nodes, CPU_NODE), partitions)


@pytest.mark.shows("`advise` names jobs that would gain, with the basis of each estimate")
def test_a_running_job_holds_the_cpus_of_free_gpus() -> None:
    running = job(1, "RUNNING", 16, 1)
    waiting = job(2, "PENDING", 4, 1)
    (one,) = [line for line in advise(cluster(running, waiting, nodes=(node(0, 3),)), {}) if line.basis == "shape"]
    assert (one.job, one.cpus_freed, one.gpus_unlocked, one.gpu_hours_per_day) == ("1", 14, 3, 72.0)
    assert "16 CPUs for 1 GPU a node, beside 3 free GPUs" in one.text


def test_who_says_that_he_serves_the_job_of_somebody_else_does_not_hide_its_advice() -> None:
    running, waiting = job(1, "RUNNING", 16, 1, uid=1001), job(2, "PENDING", 4, 1)
    claim = job(3, "RUNNING", 1, 0, comment="hets:trainer=1", uid=1002)
    counts = [
        sum(line.job == "1" for line in advise(cluster(running, waiting, one, nodes=(node(0, 3),)), {}))
        for one in (claim, replace(claim, uid=1001))
    ]
    assert counts == [1, 0]


@pytest.mark.parametrize(
    "running",
    [
        job(1, "RUNNING", 2, 1),
        job(1, "RUNNING", 16, 4),
        job(1, "RUNNING", 16, 1, het=HetComponent(1, 0)),
        job(1, "RUNNING", 16, 0),
    ],
)
def test_nothing_to_gain(running: Job) -> None:
    gpus_free = 4 - running.count("gpu")
    assert advise(cluster(running, nodes=(node(16 - running.num_cpus, gpus_free),)), {}) == ()


@pytest.mark.shows("`advise` names jobs that would gain, with the basis of each estimate")
def test_a_trainer_that_has_data_workers_is_measured_and_not_guessed() -> None:
    running, companion = job(1, "RUNNING", 16, 1), job(9, "RUNNING", 4, 0, comment="hets:trainer=1", nodes=("c0",))
    seen = cluster(running, companion, nodes=(node(0, 3),))
    assert advise(seen, {"1": 0.01}) == ()
    (one,) = advise(seen, {"1": 0.5})
    assert (one.basis, one.gpu_hours_per_day, one.step) == ("measured", 12.0, "more data workers; hetstream job 1")


@pytest.mark.shows("`advise` names jobs that would gain, with the basis of each estimate")
def test_a_pending_job_that_would_start() -> None:
    waiting = job(2, "PENDING", 16, 2, start_s=NOW_S + 7200)
    (one,) = advise(cluster(waiting, nodes=(node(8, 2),)), {})
    assert (one.basis, one.cpus_freed, one.gpus_unlocked, one.gpu_hours_per_day) == ("free now", 12, 2, 4.0)
    assert one.step == "#HETSTREAM --data-workers=3 --data-worker-partition=cpu"


@pytest.mark.shows("`advise` names jobs that would gain, with the basis of each estimate")
def test_ended_jobs_whose_gpus_were_idle_and_cpus_busy() -> None:
    usage = Usage("7", "train", "bob", "lab", "gpu", 4, 2, 0.0, 3600.0, cpu_used_s=4 * 3600.0, gpu_share=0.25)
    others = [replace(usage, job="8", gpu_share=0.9), replace(usage, job="9", cpu_used_s=3600.0)]
    (one,) = advise(cluster(nodes=()), {}, [usage, *others])
    assert (one.job, one.basis, one.gpu_hours_per_day) == ("7", "measured", 36.0)
    assert "busy 25% of the time, its CPUs 100%" in one.text


@pytest.mark.shows("`util` counts each run of a requeued job; `advise` lists the job once, by its last run")
def test_a_requeued_job_is_one_row_by_its_last_run() -> None:
    last = Usage("7", "train", "bob", "lab", "gpu", 4, 2, 7200.0, 9000.0, cpu_used_s=4 * 1800.0, gpu_share=0.5)
    idle = replace(last, gpu_share=0.25)
    before = replace(idle, start_s=0.0, end_s=3600.0, cpu_used_s=4 * 3600.0)
    assert [one.gpu_hours_per_day for one in advise(cluster(nodes=()), {}, [idle, before])] == [36.0]
    assert advise(cluster(nodes=()), {}, [before, last]) == (), "by now its GPUs are busy"
    assert advise(cluster(nodes=()), {}, [before, replace(idle, end_s=None)]) == (), "it runs, and nothing is known yet"


def test_firm_advice_comes_first() -> None:
    jobs = (job(1, "RUNNING", 14, 1), job(2, "PENDING", 12, 1), job(3, "RUNNING", 8, 1))
    found = advise(cluster(*jobs, nodes=(node(2, 2),)), {"3": 0.5})
    assert [line.basis for line in found] == ["measured", "free now", "shape"]


@pytest.mark.parametrize(
    ("enforced", "is_noted"),
    [("associations,limits,qos", True), ("safe", True), ("none", False), ("associations", False), ("", False)],
)
def test_limits_that_were_not_looked_at_are_said_not_to_be(enforced: str, is_noted: bool) -> None:
    waiting = job(2, "PENDING", 16, 1)
    found = advise(cluster(waiting, nodes=(node(4, 3),)), {})
    assert [one.basis for one in found] == ["free now"]
    snapshot = replace(cluster(waiting, nodes=(node(4, 3),)), config={"AccountingStorageEnforce": enforced})
    assert any("were not looked at" in note for note in advise_report(found, snapshot).notes) == is_noted
    assert not any("were not looked at" in note for note in advise_report((), snapshot).notes)


@pytest.mark.shows("the next submission of a script is proposed from the most similar past jobs")
def test_what_past_jobs_propose_is_a_table_of_its_own() -> None:
    past = PastJob("8", NOW_S - 60, Features("train.sbatch", 2, "u"), 6, 4, 3, 9.0, 0.02)
    shown = advise_report((), cluster(nodes=()), Remembered((past,), "u"))
    advice, following = shown.sections
    assert advice.rows == []
    (row,) = following.rows
    assert (row["name"], row["num_jobs"]) == ("train.sbatch", 1)
    assert row["directive"] == "#HETSTREAM --data-workers=0-8 --data-worker-cpus=4 --trainer-cpus=3"
    assert "job 8, had 6 data workers of 4 CPUs for 2 GPUs" in row["text"]
    assert not any("past job" in note for note in shown.notes)


@pytest.mark.parametrize(
    ("history", "said"),
    [
        (Remembered(), "nothing is proposed from history"),
        (Remembered(problem="job history /x is damaged"), "damaged"),
        (Remembered(num_unreadable=3), "3 damaged records of the job history: left out"),
    ],
)
def test_without_a_history_advise_says_so(history: Remembered, said: str) -> None:
    assert any(said in note for note in advise_report((), cluster(nodes=()), history).notes)
