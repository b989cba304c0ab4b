"""What every policy promises, on any jobs; and what each of them is for."""

from __future__ import annotations

import heapq
import math
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.slurm_plugin.policy.filling import pieces_of, saturation_of, speed_at
from hetstream.slurm_plugin.policy.policies import POLICIES, share
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Pool, explain, job_table
from tests.slurm_plugin.policy.tables import GROWING, lines, tables

EVERY = pytest.mark.parametrize("name", sorted(POLICIES))
EVERY_THAT_GROWS = pytest.mark.parametrize("name", GROWING)
CPUS = st.integers(0, 600)
NOW_S = 1_000_000.0


def allocate(name: str, table: JobTable, cpus: int) -> list[int]:
    return POLICIES[name](table, Pool(cpus), NOW_S).workers.tolist()


def used(table: JobTable, workers: list[int]) -> int:
    return int((np.array(workers, np.int64) * table.cpus).sum())


@EVERY
@settings(deadline=None, max_examples=60)
@given(table=tables(), cpus=CPUS)
def test_bounds_are_kept_and_no_cpu_is_given_twice(name: str, table: JobTable, cpus: int) -> None:
    workers = allocate(name, table, cpus)
    assert used(table, workers) <= max(cpus, used(table, table.minimum.tolist()))
    most = saturation_of(table, pieces_of(table))
    for row, count in enumerate(workers):
        assert table.minimum[row] <= count <= max(table.minimum[row], min(table.wanted[row], table.cap[row]))
        assert count <= most[row]


@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
@EVERY_THAT_GROWS
@settings(deadline=None, max_examples=60)
@given(table=tables(), cpus=CPUS)
def test_nothing_that_makes_somebody_faster_is_left(name: str, table: JobTable, cpus: int) -> None:
    workers = np.array(allocate(name, table, cpus), np.int64)
    left = cpus - used(table, workers.tolist())
    limit = np.minimum(table.wanted, table.cap)
    faster = speed_at(table, (workers + 1.0) * table.cpus) > speed_at(table, workers.astype(float) * table.cpus) + 1e-6
    assert not (faster & (workers < limit) & (table.cpus <= left)).any()


@EVERY
@settings(deadline=None, max_examples=60)
@given(table=tables(), cpus=CPUS, shuffle=st.randoms())
def test_the_order_of_the_jobs_does_not_matter(name: str, table: JobTable, cpus: int, shuffle: object) -> None:
    order = list(range(len(table)))
    shuffle.shuffle(order)  # type: ignore[attr-defined]
    columns = {field.name: getattr(table, field.name)[order] for field in fields(table)}
    again = job_table(**columns)
    assert POLICIES[name](again, Pool(cpus), NOW_S).workers.tobytes() == (
        POLICIES[name](table, Pool(cpus), NOW_S).workers.tobytes()
    )


@EVERY
@settings(deadline=None, max_examples=60)
@given(table=tables(), cpus=CPUS)
def test_equal_input_gives_equal_bytes_and_is_left_as_it_is(name: str, table: JobTable, cpus: int) -> None:
    before = {field.name: getattr(table, field.name).tobytes() for field in fields(table)}
    first, second = (POLICIES[name](table, Pool(cpus), NOW_S) for _ in range(2))
    assert first.workers.tobytes() == second.workers.tobytes()
    assert first.reasons.tobytes() == second.reasons.tobytes()
    assert before == {field.name: getattr(table, field.name).tobytes() for field in fields(table)}


@EVERY
@settings(deadline=None, max_examples=60)
@given(table=tables(one_size=True), cpus=CPUS, more=st.integers(0, 50))
def test_more_cpus_take_nothing_from_anybody(name: str, table: JobTable, cpus: int, more: int) -> None:
    assert np.all(np.array(allocate(name, table, cpus + more)) >= np.array(allocate(name, table, cpus)))


@EVERY_THAT_GROWS
@settings(deadline=None, max_examples=60)
@given(table=tables())
def test_with_enough_cpus_all_policies_say_the_same(name: str, table: JobTable) -> None:
    workers = allocate(name, table, 1 << 40)
    assert workers == saturation_of(table, pieces_of(table)).tolist()


@EVERY
@settings(deadline=None, max_examples=60)
@given(table=tables(), cpus=CPUS)
def test_every_row_has_words_for_its_reason(name: str, table: JobTable, cpus: int) -> None:
    allocation = POLICIES[name](table, Pool(cpus), NOW_S)
    for row in range(len(table)):
        assert explain(table, Pool(cpus), allocation, row)


@EVERY_THAT_GROWS
def test_a_job_without_preprocessing_gets_nothing_and_others_have_its_cpus(name: str) -> None:
    table = job_table([1, 2], 64, curve_cpus=[0.0, 64.0], curve_speed=[[1.0, 1.0], [0.0, 1.0]], remaining_s=60.0)
    assert allocate(name, table, 40) == [0, 40]
    assert explain(table, Pool(40), POLICIES[name](table, Pool(40), NOW_S), 0).startswith("none: ")


@EVERY_THAT_GROWS
def test_a_job_shrinks_in_the_round_in_which_its_knee_moves(name: str) -> None:
    assert allocate(name, lines([32, 32], remaining_s=60.0), 64) == [32, 32]
    assert allocate(name, lines([8, 32], remaining_s=60.0), 64) == [8, 32]


def one_by_one(table: JobTable, cpus: int) -> list[int]:
    """Weighted max-min fairness as it is defined, one data worker after the other."""
    top = saturation_of(table, pieces_of(table)).tolist()
    per_worker = (table.cpus / (table.weight * np.maximum(table.gpus, 1.0))).tolist()
    have, sizes = table.minimum.tolist(), table.cpus.tolist()
    left = cpus - used(table, have)

    def entry(row: int) -> tuple[np.float32, float, int]:
        # Of jobs that have nothing, the one with the smaller data worker is first; else the lower id.
        return np.float32(have[row] * per_worker[row]), sizes[row] if not have[row] else math.inf, row

    queue = [entry(row) for row in range(len(table)) if have[row] < top[row]]
    heapq.heapify(queue)
    while queue:
        _, _, row = heapq.heappop(queue)
        if sizes[row] <= left:
            left -= sizes[row]
            have[row] += 1
            if have[row] < top[row]:
                heapq.heappush(queue, entry(row))
    return have


@pytest.mark.shows("policies are pure functions, compared with brute force and closed forms")
@pytest.mark.shows("the site daemon divides data workers, survives its death, and believes what Slurm confirms")
@settings(deadline=None)
@given(table=tables(), cpus=CPUS)
def test_shares_are_those_of_giving_data_workers_one_by_one(table: JobTable, cpus: int) -> None:
    assert allocate("share", table, cpus) == one_by_one(table, cpus)


@pytest.mark.shows("policies are pure functions, compared with brute force and closed forms")
@settings(deadline=None)
@given(table=tables(max_jobs=6), cpus=CPUS)
def test_under_fair_all_that_want_more_are_within_one_data_worker_of_one_speed(table: JobTable, cpus: int) -> None:
    table = replace(
        table, weight=np.ones(len(table)), minimum=np.zeros(len(table), np.int64), cpus=np.full(len(table), 2)
    )
    workers = np.array(allocate("fair", table, cpus), np.int64)
    top = saturation_of(table, pieces_of(table))
    speed = speed_at(table, workers * 2.0)
    without_last = speed_at(table, np.maximum(workers - 1, 0) * 2.0)
    for poor in np.flatnonzero(workers < top):
        assert np.all((without_last <= speed[poor] + 1e-9) | (workers == 0))


@pytest.mark.shows("policies are pure functions, compared with brute force and closed forms")
@settings(deadline=None)
@given(table=tables(max_jobs=4, one_size=True), cpus=st.integers(0, 60))
def test_maxtp_has_the_greatest_sum_of_speeds(table: JobTable, cpus: int) -> None:
    table = replace(table, weight=np.ones(len(table)), gpus=np.ones(len(table)), cpus=np.ones(len(table), np.int64))
    workers = np.array(allocate("maxtp", table, cpus), np.int64)
    # On concave curves a sum that no exchange of one CPU raises is the greatest.
    most = saturation_of(table, pieces_of(table))
    more = speed_at(table, workers + 1.0) - speed_at(table, workers.astype(float))
    less = speed_at(table, workers.astype(float)) - speed_at(table, np.maximum(workers - 1.0, 0.0))
    for gainer in np.flatnonzero(workers < most):
        for loser in np.flatnonzero(workers > table.minimum):
            assert more[gainer] <= less[loser] + 1e-9


@pytest.mark.shows("policies are pure functions, compared with brute force and closed forms")
def test_known_orders() -> None:
    # CPUs at the knee 10, 20, 40: MaxTP by ascending knee.
    assert allocate("maxtp", lines([10, 20, 40]), 25) == [10, 15, 0]
    # SRTF by remaining time x knee: 100 x 10, 10 x 20, 20 x 40.
    assert allocate("srtf", lines([10, 20, 40], remaining_s=[100.0, 10.0, 20.0]), 65) == [5, 20, 40]
    # DLRover-RM by (1 / knee) / remaining^2.5.
    assert allocate("dlrover", lines([10, 20, 40], remaining_s=[100.0, 10.0, 20.0]), 65) == [5, 20, 40]
    # Stretch by remaining x knee^1.35: 100 x 22, 20 x 57, 20 x 146.
    table = lines([10, 20, 40], remaining_s=[100.0, 20.0, 20.0], total_s=100.0)
    assert allocate("stretch", table, 65) == [10, 20, 35]
    assert allocate("stretch", table, 25) == [5, 20, 0]
    assert allocate("fair", lines([10, 20, 40]), 35) == [5, 10, 20]
    assert allocate("share", lines([10, 20, 40]), 35) == [10, 13, 12]


@pytest.mark.shows("policies are pure functions, compared with brute force and closed forms")
def test_stretch_takes_the_narrow_job_first_unless_the_wide_one_would_be_later_than_srtfs_latest() -> None:
    table = lines([10, 40], remaining_s=[100.0, 20.0], total_s=[100.0, 200.0])
    # 100 x 10^1.35 before 20 x 40^1.35, where SRTF has 20 x 40 before 100 x 10.
    assert allocate("srtf", table, 20) == [0, 20]
    assert allocate("stretch", table, 20) == [10, 10]
    # Of a job of 20 s that ends after 90 s the stretch is 4.5; in SRTF's order none is above 2.
    short = replace(table, total_s=np.array([100.0, 20.0]))
    assert allocate("stretch", short, 20) == [0, 20]


def test_a_job_of_unknown_length_is_not_late_however_old_it_is() -> None:
    # The wide one would be late if the old one of unknown length did not count as SRTF's latest.
    table = lines([10, 40, 10], remaining_s=[100.0, 20.0, 5000.0], total_s=[100.0, 20.0, np.nan], age_s=[0.0, 0.0, 1e6])
    assert allocate("stretch", table, 20) == [0, 20, 0]


def test_stretch_leaves_data_workers_where_they_are_and_lets_gpus_decide_between_equals() -> None:
    table = lines([10, 10], remaining_s=[100.0, 95.0], total_s=1000.0)
    assert allocate("stretch", table, 10) == [0, 10]
    assert allocate("stretch", replace(table, current=np.array([10, 0])), 10) == [10, 0]
    assert allocate("stretch", replace(table, gpus=np.array([8.0, 1.0])), 10) == [10, 0]


def test_an_uncertain_estimate_counts_as_its_mean() -> None:
    table = lines([10, 10], remaining_s=[100.0, 120.0], remaining_sigma=[1.0, 0.0])
    assert allocate("srtf", table, 10) == [0, 10]


@pytest.mark.shows("policies keep floors, aging, caps and moves that pay their cost")
def test_a_data_worker_across_a_bend_counts_with_both_sides() -> None:
    # 3 CPUs at 0.3 each, then nothing: the first data worker of 2 brings 0.6, the second 0.3.
    bent = job_table(
        [1, 2],
        5,
        cpus=2,
        curve_cpus=[[0.0, 3.0, 9.0], [0.0, 10.0, 10.0]],
        curve_speed=[[0.0, 0.9, 0.9], [0.0, 1.0, 1.0]],
    )
    pieces = pieces_of(bent)
    assert saturation_of(bent, pieces).tolist() == [2, 5]
    assert allocate("maxtp", bent, 2) == [1, 0]
    assert allocate("maxtp", bent, 4) == [2, 0]
    assert np.allclose(pieces.speed[0, -1], 0.9)


@pytest.mark.parametrize(
    ("cpus", "rows", "expected"),
    [
        (64, [(0, 8, 8, 1), (0, 8, 8, 1)], [4, 4]),
        (64, [(0, 2, 8, 1), (0, 8, 8, 1)], [2, 6]),
        (48, [(0, 9, 4, 1), (0, 9, 4, 2)], [4, 8]),
        (0, [(2, 8, 8, 1)], [2]),
        (12, [(0, 4, 8, 1), (0, 4, 2, 1)], [1, 2]),
        (8, [], []),
    ],
)
def test_known_shares(cpus: int, rows: list[tuple[int, int, int, int]], expected: list[int]) -> None:
    minimum, wanted, size, weight = zip(*rows, strict=True) if rows else ((), (), (), ())
    table = job_table(range(len(rows)), wanted, minimum=minimum, cpus=size, weight=weight)
    allocation = share(table, Pool(cpus), NOW_S)
    assert isinstance(allocation, Allocation)
    assert allocation.workers.tolist() == expected


@pytest.mark.parametrize("name", ["srtf", "dlrover", "stretch"])
def test_one_wrong_estimate_does_not_decide_over_a_job_without_one(name: str) -> None:
    """Job 2 tells nothing; job 4 claims a billion years. Job 2 stays before job 3, which has truly more to do."""
    left_s = [1e3, np.nan, 1e5, 1e15, 1e3]
    table = job_table([1, 2, 3, 4, 5], 4, remaining_s=left_s, total_s=left_s, age_s=1.0)
    workers = POLICIES[name](table, Pool(12), 0.0).workers
    assert workers.tolist() == [4, 4, 0, 0, 4]
