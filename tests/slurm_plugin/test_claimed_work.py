"""What a job claims to have left, and what the daemon believes of it. Pure."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from hetstream.slurm_plugin.daemon.claimed_work import LATE_SIGMA, LEAST_SPEED, SLACK, Promises
from hetstream.slurm_plugin.policy.choices import policy_named
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
