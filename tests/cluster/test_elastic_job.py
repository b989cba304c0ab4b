"""The elastic controller on real Slurm: a job finds by itself how many data workers it needs. CPU work is sleeps."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest

from benchmarks.clients.elastic_job import ElasticJob
from hetstream.slurm_plugin.past_jobs import past_job_of

pytestmark = [pytest.mark.slurm, pytest.mark.every_release]
WaitUntil = Callable[..., None]


@pytest.fixture
def submit(devcluster: Any, wait_until: WaitUntil) -> Iterator[Callable[..., ElasticJob]]:
    jobs: list[ElasticJob] = []

    def act(name: str, directives: str, *arguments: str) -> ElasticJob:
        jobs.append(ElasticJob(devcluster.out_dir / name, devcluster.env, directives, *arguments))
        return jobs[-1]

    yield act
    for job in jobs:
        print((job.home / "master.log").read_text() if (job.home / "master.log").exists() else "no master.log")
        job.cancel()
        wait_until(job.has_ended, timeout_s=120, what="an empty queue")


def end(job: ElasticJob, wait_until: WaitUntil) -> None:
    job.stop()
    wait_until(job.has_ended, timeout_s=120, what="the end of the job")


@pytest.mark.shows("a job grows from one to eight data workers, and shrinks by one drain")
@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@pytest.mark.shows("the next submission of a script is proposed from the most similar past jobs")
@pytest.mark.slow
def test_a_starving_job_grows_by_itself_also_beyond_a_killed_job_master(
    submit: Callable[..., ElasticJob], wait_until: WaitUntil
) -> None:
    """A step takes the trainer 30 ms and one CPU 100 ms to make: four data workers feed it."""
    directives = "--data-workers=0-6 --data-worker-cpus=1 --data-worker-cooldown=2"
    job = submit("elastic-grow", directives, "--make-s=0.1", "--step-s=0.03", "--num-steps=60")
    wait_until(lambda: len(job.changes()) >= 2, timeout_s=90, what="two changes")
    (first, one), (second, more) = job.changes()[:2]
    assert (first, one, second) == ("grow", 1, "grow")
    assert 2 <= more <= 5
    wait_until(lambda: len(job.status()["data_workers"]) == 1 + more, timeout_s=60, what="the data workers")
    status = job.status()
    assert status["decisions"][0]["reason"].startswith("the trainer waits")
    assert "data workers" in status["elastic"]
    assert {worker["slurm_job"] for worker in status["data_workers"]} == set(job.companions())
    grown_at = len(job.steps())
    wait_until(lambda: len(job.steps()) > grown_at + 80, timeout_s=60, what="steps of the grown job")
    assert job.wait_share(last_s=3) < 0.5  # the machine is loaded by other tests; the figure is the benchmark's

    companions = job.companions()
    names = {*job.run("squeue", "--noheader", f"--jobs={','.join(companions)}", "--format=%j").split()}
    (master,) = job.master_pids("serve")
    os.kill(master, signal.SIGKILL)
    log = job.home / "master.log"
    taken_over = "of a job master of before is taken over"
    wait_until(lambda: taken_over in log.read_text(), timeout_s=60, what="companions taken over")
    taken = set(re.findall(rf"companion job=(\d+) {taken_over}", log.read_text()))
    assert taken
    assert taken <= set(companions)
    wait_until(lambda: job.status()["data_workers"], timeout_s=60, what="the data workers")
    restarted_at = len(job.steps())
    wait_until(lambda: len(job.steps()) > restarted_at + 40, timeout_s=60, what="steps after the restart")
    end(job, wait_until)
    assert not job.companions("PD", "R")
    assert job.ledger_problems(240) == []
    summary = json.loads((job.home / "summary.json").read_text())
    elastic = summary["elastic"]
    past = past_job_of(summary, "1", "user", 0.0)
    assert past is not None, "what the next submission is proposed by"
    assert 1 <= past.data_workers <= 6
    assert past.data_worker_mb is not None
    assert 10 < past.data_worker_mb < 4000
    assert [(one["action"], one["count"]) for one in elastic["decisions"]][:2] == [(first, one), (second, more)]
    assert elastic["local_wait_s"] > 0.05, "the baseline of before"
    assert names == {"job.sbatch-data-worker"}
    assert not (job.home / "elastic.json").exists()


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@pytest.mark.slow
@pytest.mark.parametrize(("grows", "cpus"), [(True, 2), (False, 1)], ids=["in proportion", "one sample at a time"])
def test_the_size_of_a_data_worker_is_tried_before_the_number(
    submit: Callable[..., ElasticJob], wait_until: WaitUntil, devcluster: Any, grows: bool, cpus: int
) -> None:
    """One of 1 CPU, then one of 2, each CPU with a process of its own; the other size leaves, and more of it come."""
    directives = "--data-workers=0-4 --data-worker-cpus=1-2 --data-worker-cooldown=2"
    lock = [] if grows else [f"--lock={devcluster.out_dir}/size-lock"]
    job = submit(f"elastic-size-{cpus}", directives, "--make-s=0.1", "--step-s=0.01", "--num-steps=100", *lock)
    wait_until(lambda: len(job.changes()) >= 3, timeout_s=180, what="two sizes and the verdict")
    assert job.changes()[:3] == [("grow", 1), ("grow", 1), ("drain", 1)]
    _, second, verdict = (one["cause"] for one in job.events("DataWorkersChanged")[:3])
    assert re.fullmatch(r"\d+\.\d steps/s with 1 CPU: next 2 are tried", second)
    assert re.fullmatch(rf"\d+\.\d steps/s with 2 CPUs, \d+\.\d times as many as with 1: {cpus} it is", verdict)
    if grows:  # with the lock, more of them are of no use either
        wait_until(lambda: job.changes()[-1][0] == "grow" and len(job.companions("R")) > 1, 90, "more of that size")

    def processes() -> list[int]:
        """Data worker processes of each companion."""
        return [*Counter(one["slurm_job"] for one in job.status()["data_workers"]).values()]

    wait_until(
        lambda: processes() and set(processes()) == {cpus}, timeout_s=90, what=f"companions of {cpus} CPUs alone"
    )
    end(job, wait_until)
    summary = json.loads((job.home / "summary.json").read_text())
    assert summary["elastic"]["data_worker_cpus"] == cpus
    assert job.ledger_problems(400) == []


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@pytest.mark.slow
@pytest.mark.parametrize("victims", [("keep",), ("keep", "serve")], ids=["in order", "at once"])
def test_companions_end_with_a_job_master_that_is_gone_for_good(
    submit: Callable[..., ElasticJob], wait_until: WaitUntil, victims: tuple[str, ...]
) -> None:
    directives = "--data-workers=0-2 --data-worker-cpus=1 --data-worker-cooldown=2"
    job = submit(f"elastic-{'-'.join(victims)}", directives, "--make-s=0.1", "--step-s=0.05", "--num-steps=60")
    wait_until(lambda: job.companions("R"), timeout_s=90, what="a companion")
    wait_until(lambda: job.status()["data_workers"], timeout_s=60, what="a data worker")
    for pid in job.master_pids(*victims):
        os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not job.companions("PD", "R"), timeout_s=100, what="the end of the companions")
    before = len(job.steps())
    wait_until(lambda: len(job.steps()) > before + 2, timeout_s=60, what="steps that the trainer makes itself")
    wait_until(lambda: job.ledger_problems(240) == [], timeout_s=60, what="an epoch")
    end(job, wait_until)
    assert job.ledger_problems(240) == []


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@pytest.mark.slow
def test_a_job_that_gains_nothing_ends_with_no_data_workers(
    submit: Callable[..., ElasticJob], wait_until: WaitUntil, devcluster: Any
) -> None:
    """Samples come one at a time on the whole cluster, as from one slow disk: more data workers make none faster."""
    directives = "--data-workers=0-6 --data-worker-cpus=1 --data-worker-cooldown=2"
    arguments = ("--make-s=0.1", "--step-s=0.001", "--num-steps=100")
    job = submit("elastic-useless", directives, *arguments, f"--lock={devcluster.out_dir}/lock")
    wait_until(lambda: job.changes()[-1:] and job.changes()[-1][0] == "drain" and not job.companions(), 180, "the end")
    assert job.changes()[0] == ("grow", 1)
    wait_until(lambda: not job.status()["data_workers"], timeout_s=30, what="no data workers")
    reasons = [one["cause"] for one in job.events("DataWorkersChanged")]
    assert "as many as with local loading" in reasons[-1]
    end(job, wait_until)
    assert job.ledger_problems(400) == []
    summary = json.loads((job.home / "summary.json").read_text())
    assert summary["elastic"]["stage"] == "loading locally"
    assert [one["action"] for one in summary["elastic"]["decisions"]] == [action for action, _ in job.changes()]


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@pytest.mark.slow
def test_a_job_that_local_loading_feeds_gets_no_data_worker(
    submit: Callable[..., ElasticJob], wait_until: WaitUntil
) -> None:
    job = submit("elastic-fed", "--data-workers=0-6 --data-worker-cooldown=2", "--make-s=0.001", "--step-s=0.2")
    wait_until((job.home / "address").exists, timeout_s=60, what="the dispatcher")
    wait_until(lambda: "keeps up" in job.status()["elastic"], timeout_s=60, what="the verdict")
    assert job.changes() == []
    end(job, wait_until)


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@pytest.mark.shows("what comes and goes is companions, which can be cancelled while they are pending")
@pytest.mark.slow
def test_companions_that_wait_in_the_queue_hold_nothing_up_and_are_taken_back(
    submit: Callable[..., ElasticJob], wait_until: WaitUntil, devcluster: Any
) -> None:
    """Two CPUs are free, the rest is another job's; four data workers would feed the trainer, for its first 80 s."""
    held = ["sbatch", "--parsable", "-p", "cpu", "-N4", "-n62", "--mem-per-cpu=1", "--output=/dev/null"]
    other = devcluster.run(*held, "--wrap=sleep 600")
    try:
        wait_until(lambda: devcluster.run("squeue", "-hj", other, "-o", "%t") == "R", 60)
        directives = "--data-workers=0-6 --data-worker-cpus=1 --data-worker-cooldown=3"
        costs = ("--make-s=0.1", "--step-s=0.03,0.3,0.3,0.3,0.3", "--period=80", "--num-steps=100")
        job = submit("elastic-queue", directives, *costs)
        wait_until(
            lambda: len(job.companions("R")) == 2 and job.companions("PD"), 120, "two that run, and more that wait"
        )
        waiting = set(job.companions("PD"))
        steps = len(job.steps())
        wait_until(lambda: len(job.steps()) > steps + 40, 60, "steps meanwhile")
        wait_until(lambda: "wait in Slurm's queue" in job.status()["elastic"], 60, "the controller to say so")
        wait_until(lambda: ("cancel", len(waiting)) in job.changes(), 150, "those that waited to be taken back")
        # It is written down before it is done.
        wait_until(lambda: not waiting & set(job.companions()), 60, "those that waited to be gone")
        assert job.companions("R"), "what works is another matter"
    finally:
        devcluster.run("scancel", other)
    end(job, wait_until)
    assert job.ledger_problems(400) == []
    record = job.home / "summary.json"
    wait_until(lambda: "what_runs" in record.read_text(), timeout_s=60, what="what the script runs, added last")
    summary = json.loads(record.read_text())
    elastic = summary["elastic"]
    assert {row["data_workers"] for row in elastic["waits_by_data_workers"]} <= {0, 1, 2}, "none of those that waited"
    assert elastic["most_data_workers"] == 6
    assert 0 <= time.time() - summary["ended_s"] < 600
    past = past_job_of(summary, "1", "user", 0.0)
    assert past is not None
    assert past.data_workers <= 2
    assert past.features.commands
    assert past.features.directory == os.path.realpath(job.home.parents[1])


@pytest.mark.shows("`advise` names jobs that would gain, with the basis of each estimate")
@pytest.mark.shows("a job grows from one to eight data workers, and shrinks by one drain")
@pytest.mark.shows("shrinking cancels companions, each by its own job id; no component of the job is touched")
@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@pytest.mark.slow
def test_load_that_goes_gives_the_cpus_back_within_one_drain(
    submit: Callable[..., ElasticJob], wait_until: WaitUntil
) -> None:
    """For 40 s a step takes the trainer 30 ms, then 300 ms: one data worker is enough then."""
    directives = "--data-workers=0-6 --data-worker-cpus=1 --data-worker-cooldown=3"
    job = submit(
        "elastic-shrink", directives, "--make-s=0.1", "--step-s=0.03,0.3,0.3,0.3", "--period=40", "--num-steps=100"
    )
    given_back = "all CPUs but one data worker's"
    wait_until(lambda: len(job.companions()) > 1, timeout_s=90, what="companions")
    wait_until(lambda: len(job.companions()) == 1, timeout_s=120, what=given_back)
    assert job.changes()[-1][0] == "drain"
    lost = job.events("DataWorkerLost")
    assert lost
    assert all(one["orderly"] for one in lost)
    assert not job.events("LeaseRevoked")
    times = [one["time"] for one in job.events("DataWorkersChanged")]
    assert all(later - earlier >= 3 for earlier, later in pairwise(times))
    end(job, wait_until)
    assert job.ledger_problems(400) == []
    # The trainer sleeps: one of its two CPUs would have been enough, which its user hears of at the end and later.
    assert (
        "needs 1 of its 2 CPUs besides data workers: next time --trainer-cpus=1"
        in (job.home / "master.log").read_text()
    )
    advice = json.loads(job.hetstream("advise", "--json"))["advice"]
    assert [one["step"] for one in advice if one["job"] == job.job_id] == ["next time: #HETSTREAM --trainer-cpus=1"]
