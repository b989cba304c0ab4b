"""The rules around a policy: floors, caps, staleness, steadiness, what nobody wants; and that they hold together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.policy.filling import pieces_of, speed_at
from hetstream.slurm_plugin.policy.policies import (
    POLICIES,
    MoveCost,
    Rules,
    fair,
    maxtp,
    share,
    srtf,
    under_all_rules,
    with_caps,
    with_floor,
    with_leftovers,
    with_staleness,
    with_steadiness,
    workers_for,
)
from hetstream.slurm_plugin.policy.table import (
    Allocation,
    JobTable,
    Policy,
    Pool,
    Reason,
    allocation,
    check_allocation,
    check_table,
    checked,
    explain,
    job_table,
)
from tests.slurm_plugin.policy.tables import GROWING, lines, tables

CPUS = st.integers(0, 600)
CAPS = st.lists(st.integers(0, 120), min_size=3, max_size=3).map(lambda caps: np.array(caps, np.int64))


def workers(policy: Policy, table: JobTable, cpus: int, **caps: object) -> list[int]:
    return policy(table, Pool(cpus, **caps), 0.0).workers.tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(POLICIES))
@settings(deadline=None, max_examples=30)
@given(table=tables(), cpus=CPUS, users=CAPS, tenants=CAPS)
def test_all_rules_together_keep_the_bounds_and_the_caps(
    name: str, table: JobTable, cpus: int, users: np.ndarray, tenants: np.ndarray
) -> None:
    pool = Pool(cpus, tenants, users)
    found = under_all_rules(POLICIES[name])(table, pool, 0.0)
    check_table(table)
    check_allocation(table, pool, found)
    held = np.clip(table.current, table.minimum, np.maximum(table.cap, table.minimum))
    for group, caps in ((table.user, users), (table.tenant, tenants)):
        for code, cap in enumerate(caps):
            rows = group == code
            # What jobs hold already may be above a cap that was lowered; nobody grows into it.
            at_once = int((np.maximum(found.workers, held) * table.cpus)[rows].sum())
            assert at_once <= max(cap, int((held * table.cpus)[rows].sum()))
            least = int((table.minimum * table.cpus)[rows].sum())
            assert int((found.workers * table.cpus)[rows].sum()) <= max(cap, least)
    for row in range(len(table)):
        assert explain(table, pool, found, row)
    again = under_all_rules(POLICIES[name])(table, pool, 0.0)
    assert found.workers.tobytes() == again.workers.tobytes()


# --- floors ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["srtf", "maxtp"])
def test_nobody_is_below_the_floor_where_the_pool_has_room(name: str) -> None:
    table = lines([20, 400, 40], remaining_s=[60.0, 90000.0, 60.0])
    assert workers(POLICIES[name], table, 60) == [20, 0, 40]
    found = with_floor(POLICIES[name])(table, Pool(60), 0.0)
    assert found.workers.tolist() == [20, 20, 20]
    assert found.reasons[1] == Reason.FLOOR
    assert "least speed" in explain(table, Pool(60), found, 1)


@pytest.mark.shows("policies keep floors, aging, caps and moves that pay their cost")
def test_floors_too_many_for_the_pool_go_round_so_that_no_wait_is_without_end() -> None:
    """Ten jobs need 10 CPUs each for the floor, and there are 25: each has its turn within a bounded time."""
    table = lines([200] * 10, remaining_s=np.arange(1, 11) * 1000.0)
    policy = with_steadiness(with_floor(srtf), MoveCost(hold_s=60.0))
    starved, held, current = np.zeros(10), np.full(10, np.inf), np.zeros(10, np.int64)
    longest = np.zeros(10)
    for _ in range(100):
        now = replace(table, starved_s=starved, held_s=held, current=current)
        given_now = policy(now, Pool(25), 0.0).workers
        held = np.where(given_now != current, 0.0, held + 30.0)
        current = given_now
        starved = np.where(speed_at(table, current * 1.0) < 0.05, starved + 30.0, 0.0)
        longest = np.maximum(longest, starved)
    assert longest.max() <= 600.0
    assert longest.max() < np.inf


@settings(deadline=None)
@given(table=tables())
def test_workers_for_a_speed_are_the_fewest_that_have_it(table: JobTable) -> None:
    count = workers_for(table, pieces_of(table), 0.3)
    fewer = speed_at(table, np.maximum(count - 1.0, 0.0) * table.cpus)
    assert np.all((count == table.minimum) | (fewer < 0.3))


# --- caps -----------------------------------------------------------------------------------------------------------


@pytest.mark.shows("policies keep floors, aging, caps and moves that pay their cost")
def test_a_capped_tenant_leaves_the_rest_to_others_and_divides_its_own_by_the_same_policy() -> None:
    table = lines([40, 40, 40], tenant=[0, 0, 1], remaining_s=[10.0, 20.0, 30.0])
    pool = Pool(100, tenant_caps=np.array([24], np.int64))
    found = with_caps(srtf)(table, pool, 0.0)
    assert found.workers.tolist() == [24, 0, 40]
    assert found.reasons.tolist()[0] == Reason.TENANT_CAP
    assert "its tenant may have 24 CPUs" in explain(table, pool, found, 0)
    assert with_caps(fair)(table, pool, 0.0).workers.tolist() == [12, 12, 40]


def test_a_cap_holds_also_while_data_workers_are_on_their_way_out() -> None:
    """Job 1 has 24 and is to have 10; job 2 of the same tenant waits until those are given back."""
    table = lines([10, 14], current=[24, 0], tenant=0)
    pool = Pool(100, tenant_caps=np.array([24], np.int64))
    assert with_caps(share)(table, pool, 0.0).workers.tolist() == [10, 0]
    later = replace(table, current=np.array([16, 0], np.int64))
    assert with_caps(share)(later, pool, 0.0).workers.tolist() == [10, 8]


def test_a_limit_of_the_job_itself_is_kept() -> None:
    table = lines([40, 40], cap=[5, 1 << 31])
    found = share(table, Pool(100), 0.0)
    assert found.workers.tolist() == [5, 40]
    assert found.reasons[0] == Reason.JOB_CAP


# --- staleness ------------------------------------------------------------------------------------------------------


def test_old_measurements_freeze_a_job_and_then_the_machines_ratio_counts() -> None:
    table = lines([64, 64], current=[7, 3], gpus=2.0, cpus=[1, 4])
    policy = with_staleness(maxtp)
    assert workers(policy, table, 64) == [64, 0]
    found = policy(replace(table, stale_s=np.array([400.0, 0.0])), Pool(64), 0.0)
    assert found.workers.tolist() == [7, 14]
    assert found.reasons[0] == Reason.FROZEN
    found = policy(replace(table, stale_s=np.array([400.0, 4000.0])), Pool(640), 0.0)
    assert found.workers.tolist() == [7, 4], "8 CPUs for each of 2 GPUs, by data workers of 4"
    assert found.reasons.tolist() == [Reason.FROZEN, Reason.MACHINE_RATIO]
    # A pool that has become smaller is not exceeded for the sake of the frozen.
    assert workers(policy, replace(table, stale_s=np.full(2, 400.0)), 10) == [7, 0]


# --- steadiness -----------------------------------------------------------------------------------------------------


def changes(policy: Policy, rounds: int, cpus: int, knees: np.ndarray) -> int:
    """How often jobs are moved while their measured knees are these, one row a round of 30 s."""
    current = np.zeros(knees.shape[1], np.int64)
    held, moves = np.full(len(current), np.inf), 0
    for number in range(rounds):
        table = lines([int(knee) for knee in knees[number]], current=current, held_s=held)
        found = policy(table, Pool(cpus), 0.0).workers
        if number >= 10:
            moves += int((found != current).sum())
        held = np.where(found != current, 0.0, held + 30.0)
        current = found
    return moves


@pytest.mark.parametrize("name", GROWING)
@pytest.mark.parametrize("cpus", [100, 1000])
def test_a_demand_that_swings_by_one_cpu_moves_no_data_worker(name: str, cpus: int) -> None:
    swing = np.array([[52, 64, 90], [53, 63, 91]] * 120)
    assert changes(POLICIES[name], 240, 1000, swing) > 100
    assert changes(with_steadiness(POLICIES[name]), 240, cpus, swing) == 0


@pytest.mark.shows("policies keep floors, aging, caps and moves that pay their cost")
@pytest.mark.parametrize("name", GROWING)
def test_a_noisy_demand_moves_a_job_at_most_five_times_an_hour(name: str) -> None:
    noise = np.random.default_rng(1).uniform(0.95, 1.05, (240, 4))  # two hours of rounds of 30 s
    knees = np.round(np.array([60, 50, 40, 70]) * noise).astype(int)
    assert changes(POLICIES[name], 240, 160, knees) > 100
    assert changes(with_steadiness(POLICIES[name]), 240, 160, knees) <= 5 * 2 * 4


def test_a_job_that_arrives_is_given_its_part_at_once_and_one_that_ends_gives_at_once() -> None:
    policy = with_steadiness(share)
    table = lines([64, 64], current=[64, 0], held_s=[30.0, np.inf])
    assert workers(policy, table, 64) == [32, 32]
    assert workers(policy, replace(table, current=np.array([32, 32], np.int64)), 64) == [32, 32]
    assert workers(policy, lines([64], current=[32], held_s=30.0), 64) == [64]


@pytest.mark.shows("policies keep floors, aging, caps and moves that pay their cost")
def test_a_job_that_ends_before_a_data_worker_is_there_gets_none_and_one_with_work_does() -> None:
    policy = with_steadiness(maxtp)
    table = lines([64, 64], current=[8, 8], held_s=100.0, remaining_s=[45.0, 4000.0])
    found = policy(table, Pool(200), 0.0)
    assert found.workers.tolist() == [8, 64]
    assert found.reasons[0] == Reason.STEADY


def test_what_one_has_no_use_for_moves_to_one_that_has_in_the_same_round() -> None:
    # The knee of job 1 has moved from 64 to 8 a moment ago.
    table = lines([8, 64], current=[64, 8], held_s=30.0)
    assert workers(with_steadiness(share), table, 72) == [8, 64]
    alone = lines([8, 8], current=[64, 8], held_s=30.0)
    found = with_steadiness(share)(alone, Pool(72), 0.0)
    assert found.workers.tolist() == [64, 8]
    assert explain(alone, Pool(72), found, 0)


def test_a_pool_that_shrinks_is_not_exceeded_however_fresh_the_last_change_is() -> None:
    table = lines([64, 64], current=[32, 32], held_s=0.0)
    assert sum(workers(with_steadiness(share), table, 40)) <= 40


# --- what nobody wants ----------------------------------------------------------------------------------------------


def test_what_nobody_wants_stays_with_those_that_have_it() -> None:
    table = job_table([1, 2], [6, 4], cpus=4, current=[8, 0])
    found = with_leftovers(share)(table, Pool(64), 0.0)
    assert found.workers.tolist() == [8, 4]
    assert explain(table, Pool(64), found, 0) == "it wants 6 and keeps 8: nobody wants their CPUs"
    assert workers(with_leftovers(share), table, 32) == [4, 4]


# --- checks ---------------------------------------------------------------------------------------------------------


@pytest.mark.shows("a policy that gives out too much ends at the event at which it does")
@pytest.mark.parametrize(
    ("given_out", "said"),
    [
        ([40, 40], "a policy gives out 80 CPUs: the pool has 64, the minimums of all need 1"),
        ([0, 10], "job 1: it is given less than its minimum"),
        ([41, 1], "job 1: it is given more than it wants and has"),
        ([1], r"a policy answers int64\[1\] data workers and \[1\] reasons for 2 jobs"),
    ],
)
def test_a_policy_that_gives_out_too_much_is_refused(given_out: list[int], said: str) -> None:
    table = job_table([1, 2], 40, minimum=[1, 0])

    def greedy(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        return allocation(np.array(given_out, np.int64))

    with pytest.raises(PolicyError, match=said):
        checked(greedy)(table, Pool(64), 0.0)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"cpus": [0, 1]}, "job 1: its data workers have no CPUs"),
        ({"minimum": [9, 9]}, r"job 1: its minimum is negative or above what it wants \(and 1 more\)"),
        ({"weight": [1.0, np.nan]}, "job 2: its weight is not above 0"),
        ({"curve_cpus": [0.0, 1.0, 2.0], "curve_speed": [0.0, 0.1, 1.0]}, "its curve is not concave"),
        ({"curve_cpus": [0.0, 1.0, 2.0], "curve_speed": [0.0, 0.9, 0.5]}, "its curve falls or goes back"),
        ({"curve_cpus": [1.0, 1.0, 2.0], "curve_speed": [0.0, 0.9, 0.9]}, "its curve does not begin at 0 CPUs"),
        ({"curve_cpus": [0.0, 1.0, np.inf], "curve_speed": [0.0, 0.9, 0.9]}, "its curve is not finite"),
        ({"remaining_s": [-1.0, 1.0]}, "job 1: its remaining work is negative"),
    ],
)
def test_a_table_that_no_policy_is_written_for_is_refused(columns: dict[str, object], said: str) -> None:
    with pytest.raises(PolicyError, match=said):
        check_table(job_table([1, 2], 4, **columns))  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="its id is not above the one before"):
        check_table(job_table([3, 3], 4))


def test_where_not_all_floors_fit_a_job_keeps_its_turn_for_as_long_as_a_change_is_held() -> None:
    policy = under_all_rules(maxtp, Rules(floor=0.1, move=MoveCost(hold_s=600.0)))
    have, starved_s, held_s = np.zeros(3, np.int64), np.zeros(3), np.full(3, np.inf)
    turns: list[list[int]] = []
    for now_s in range(0, 7200, 30):
        table = job_table([1, 2, 3], 20, current=have, starved_s=starved_s, held_s=held_s)
        given = policy(table, Pool(9, user_caps=np.array([2], np.int64)), float(now_s)).workers
        held_s = np.where(given != have, 30.0, held_s + 30.0)
        starved_s = np.where(given < 2, starved_s + 30.0, 0.0)
        have = given
        assert have.sum() <= 2
        if not turns or have.tolist() != turns[-1]:
            turns.append(have.tolist())
    served = [turn for turn in turns if any(turn)]
    assert {tuple(turn) for turn in served} == {(2, 0, 0), (0, 2, 0), (0, 0, 2)}, "everybody has turns"
    assert len(served) <= 12, "of ten minutes each"
