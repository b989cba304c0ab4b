"""What a job claims to have left, and what the daemon believes of it. Pure."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from running_daemon import RunningDaemon, WaitUntil

from hetstream.hetjob.ports import Measured, RemainingWork, SpeedPoint
from hetstream.hetjob.site.messages import AskPolicy, ReportDemand, ShowPolicy
from hetstream.slurm_plugin.client.model import Job, Node, Partition, Snapshot
from hetstream.slurm_plugin.daemon.registry import Registry
from hetstream.slurm_plugin.daemon.settings import LATE_SIGMA, LEAST_SPEED, SLACK, Promise, Promises
from hetstream.slurm_plugin.daemon.store import STATE_FILE, Store
from hetstream.slurm_plugin.policy.policies import policy_named
from hetstream.slurm_plugin.policy.table import JobTable, Pool, job_table

MINUTE, HOUR = 60.0, 3600.0


def look(
    promises: Promises, now_s: float, claim_s: float, speed: float = 1.0, left_s: float = np.inf, total_s: float = 1e9
) -> JobTable:
    table = job_table([1], [8], remaining_s=[claim_s], remaining_sigma=[0.1], total_s=[total_s], age_s=[now_s])
    return promises.believed(table, ["1"], np.array([speed]), np.array([left_s]), now_s)


def follow(promises: Promises, until_s: float, claim: Callable[[float], float], speed: float = 1.0) -> JobTable:
    """A look a minute."""
    for now_s in np.arange(0.0, until_s + 1, MINUTE).tolist():
        found = look(promises, now_s, claim(now_s), speed)
    return found


def test_an_honest_claim_counts_as_it_is_whatever_the_speed() -> None:
    for speed in (1.0, 0.5, LEAST_SPEED):
        found = follow(Promises(), 2 * HOUR, lambda now_s, speed=speed: 3 * HOUR - speed * now_s, speed)
        assert found.remaining_s[0] == pytest.approx(3 * HOUR - speed * 2 * HOUR)
        assert found.remaining_sigma[0] == 0.1


def test_a_claim_that_stays_small_loses_its_weight_when_its_time_has_passed() -> None:
    claim_s = 2 * MINUTE
    assert follow(Promises(), 2 * MINUTE, lambda _: claim_s).remaining_s[0] == claim_s
    for hours in (1, 2, 4):
        found = follow(Promises(), hours * HOUR, lambda _: claim_s)
        assert found.remaining_s[0] == pytest.approx(hours * HOUR - SLACK * claim_s)
        assert found.remaining_sigma[0] == LATE_SIGMA


def test_neither_a_first_claim_that_was_large_nor_a_slow_speed_helps() -> None:
    shrinks = follow(Promises(), 3 * HOUR, lambda now_s: 10 * HOUR if now_s < HOUR else MINUTE)
    assert shrinks.remaining_s[0] == pytest.approx(3 * HOUR - SLACK * (HOUR + MINUTE))
    slow = follow(Promises(), 10 * HOUR, lambda _: MINUTE, speed=0.0)
    assert slow.remaining_s[0] == pytest.approx(LEAST_SPEED * 10 * HOUR - SLACK * MINUTE)
    silent = follow(Promises(), 2 * HOUR, lambda now_s: MINUTE if now_s < HOUR else np.nan)
    assert silent.remaining_s[0] == pytest.approx(2 * HOUR - SLACK * MINUTE)


def test_a_small_claimed_length_makes_no_job_late_for_it() -> None:
    promises = Promises()
    for now_s in np.arange(0.0, HOUR + 1, MINUTE).tolist():
        found = look(promises, now_s, MINUTE, total_s=MINUTE)
    assert found.total_s[0] == pytest.approx(HOUR + found.remaining_s[0])


def test_the_time_limit_bounds_every_claim() -> None:
    assert look(Promises(), 0.0, 100 * HOUR, left_s=HOUR).remaining_s[0] == HOUR
    assert look(Promises(), 0.0, np.inf, left_s=HOUR).remaining_s[0] == HOUR
    assert look(Promises(), 0.0, 100 * HOUR, left_s=0.0).remaining_s[0] == 0.0
    assert np.isnan(look(Promises(), 0.0, np.nan, left_s=HOUR).remaining_s[0]), "no claim is none"


@pytest.mark.shows("clocks that jump are found in exports, in the daemon and in the history")
def test_a_clock_that_jumps_makes_no_liar() -> None:
    promises = Promises()
    look(promises, 1e6, HOUR)
    assert look(promises, 0.0, HOUR).remaining_s[0] == HOUR, "an hour back, or eleven days"
    assert look(promises, 1e9, HOUR).remaining_s[0] == HOUR, "thirty years on"


def test_a_job_that_is_forgotten_begins_anew() -> None:
    promises = Promises()
    assert follow(promises, HOUR, lambda _: MINUTE).remaining_s[0] > MINUTE
    promises.forget("1")
    assert look(promises, HOUR + MINUTE, MINUTE).remaining_s[0] == MINUTE


@pytest.mark.parametrize("name", ["srtf", "dlrover", "stretch"])
def test_a_liars_advantage_ends_after_what_it_has_claimed(name: str) -> None:
    """Two jobs want all CPUs. One has an hour left and says so; the other claims two minutes, again and again."""
    policy, promises = policy_named(name), Promises()
    first = np.zeros(2, np.int64)
    for now_s in np.arange(0.0, 40 * MINUTE, MINUTE).tolist():
        claims = [HOUR - now_s, 2 * MINUTE]
        table = job_table([1, 2], [8, 8], remaining_s=claims, total_s=[HOUR, 2 * MINUTE], age_s=[now_s, now_s])
        speed = first / 8.0
        first = policy(promises.believed(table, ["1", "2"], speed, np.full(2, np.inf), now_s), Pool(8), now_s).workers
        if now_s == 0:
            assert first.tolist() == [0, 8], "at first it is believed"
    assert first.tolist() == [8, 0]


def claiming(job_id: int, steps: float) -> ReportDemand:
    """A job that takes a step a second with the eight data workers that it has, and claims so many more."""
    points = (SpeedPoint(1, 1, 0.125), SpeedPoint(1, 8, 1.0))
    remaining = RemainingWork(steps, 0.1, "directive")
    return ReportDemand(job_id, 0, 8, 8, 1, 0.5, Measured(1.0, 1.0, points, remaining=remaining))


def next_life(store: Store, now_s: float) -> Registry:
    """A daemon that begins with what the last one has left; two jobs run with eight companions each."""
    registry = Registry(store.jobs(), allocating=True, promises=store.promises())
    trainers = [Job(number, "train", "alice", ("cpu",), "RUNNING", "None", 1, 1, 1, 1, 1000) for number in (1, 2)]
    companions = [
        replace(trainers[0], job_id=10 * number + index, comment=f"hets:trainer={number}")
        for number in (1, 2)
        for index in range(8)
    ]
    nodes = (Node("cpu0", frozenset({"IDLE"}), ("cpu",), 32, 18, 64000, 0),)
    registry.observe(
        Snapshot(0.0, "22.05.8", "test", (*trainers, *companions), nodes, (Partition("cpu", ("cpu0",)),)), now_s
    )
    return registry


def test_a_liar_gets_no_weight_back_by_a_restart_of_the_daemon(tmp_path: Path) -> None:
    """The daemon dies every ten minutes, between two reports, and is away for one. Both jobs go on as they are."""
    believed = []
    now_s = 0.0
    for _ in range(4):
        with Store(tmp_path) as store:
            registry = next_life(store, now_s)
            for minute in range(9):
                for job_id, steps in ((1, 3600 - now_s), (2, 120.0)):
                    registry.report({"alice"}, claiming(job_id, steps), int(now_s * 1e9) + 1, now_s + job_id)
                store.save(
                    {job: registry.jobs[job] for job in registry.touched}, (), registry.promises(registry.touched)
                )
                registry.touched.clear()
                if not minute:
                    believed.append([job.remaining_s for job in registry.now(None, "", now_s + 2)])
                now_s += MINUTE
        now_s += MINUTE
    for life, (honest, liar) in enumerate(believed):
        assert honest == pytest.approx(3600 - 10 * MINUTE * life, abs=2 * MINUTE)
        assert liar == pytest.approx(max(120, 10 * MINUTE * life - SLACK * 120), abs=2 * MINUTE)
    with Store(tmp_path) as store:
        store.save({"2": None}, (), store.promises())
        assert list(store.promises()) == ["1"], "the other one has ended"


@pytest.mark.parametrize("row", ["'x', 1.0, 1.0", "-1.0, 1.0, 1.0", "1.0, 9e999, 1.0", "1.0, 1.0, x'00'"])
def test_what_is_no_promise_in_the_file_is_said_once_and_begins_anew(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Store(tmp_path) as store:
        registry = next_life(store, 0.0)
        registry.report({"alice"}, claiming(1, 50.0), 1, 1.0)
        registry.report({"alice"}, claiming(2, 50.0), 1, 5.0)
        store.save(registry.jobs, (), registry.promises(registry.jobs))
    assert (tmp_path / STATE_FILE).stat().st_mode & 0o777 == 0o600
    database = sqlite3.connect(tmp_path / STATE_FILE)
    with database:
        database.execute(f"insert or replace into promises values ('2', {row})")
        database.execute("insert into promises values ('3', 1.0, 1.0, 1.0)")  # of no job
    database.close()
    with Store(tmp_path) as store:
        assert store.promises().keys() == {"1"}
    assert len(caplog.records) == 1
    assert "of 1 job it is no promise that is kept there, and they begin anew: job='2' has (" in caplog.text
    database = sqlite3.connect(tmp_path / STATE_FILE)
    database.execute("drop table promises")  # as a daemon of before has left it
    database.close()
    with Store(tmp_path) as store:
        assert store.promises() == {}
        assert len(store.jobs()) == 2


def test_a_daemon_begins_with_the_promises_of_its_last_life(local: RunningDaemon, wait_until: WaitUntil) -> None:
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    local.ask(claiming(1, 60.0))
    local.kill()
    with Store(local.directory / "state") as store:
        (promise,) = store.promises().values()
        assert promise[:2] == (0.0, 60.0)
        store.save({"1": store.jobs()[0]}, (), {"1": Promise(5000.0, 60.0, time.time())})
    local.start(wait_until)
    local.wait_for_reading(wait_until)
    shown = local.ask(AskPolicy("1", 0))
    assert isinstance(shown, ShowPolicy)
    assert shown.jobs[0].claimed_s == 60.0
    assert shown.jobs[0].remaining_s == pytest.approx(5000 - SLACK * 60, rel=0.05)
    assert local.end() == 0
