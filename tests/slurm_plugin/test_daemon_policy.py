"""The daemon's policy: what max-min fairness promises, on any pool."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.slurm_plugin.daemon.policy import Decision, Demand, Pool, allocate


def demands(cpus: st.SearchStrategy[int]) -> st.SearchStrategy[tuple[Demand, ...]]:
    def demand(values: tuple[int, int, int, int, int], job: str) -> Demand:
        minimum, more, size, weight, current = values
        return Demand(job, minimum, minimum + more, size, float(weight), current)

    values = st.tuples(st.integers(0, 4), st.integers(0, 40), cpus, st.integers(1, 8), st.integers(0, 40))
    return st.lists(values, max_size=8).map(
        lambda rows: tuple(demand(row, str(100 + place)) for place, row in enumerate(rows))
    )


POOLS = st.builds(Pool, st.integers(0, 400), demands(st.integers(1, 8)))
EQUAL_POOLS = st.builds(Pool, st.integers(0, 400), st.integers(1, 8).flatmap(lambda size: demands(st.just(size))))


def limits(pool: Pool) -> dict[str, int]:
    return {job: decision.limit for job, decision in allocate(pool).items()}


def used(pool: Pool) -> int:
    given_out = limits(pool)
    return sum(given_out[demand.job] * demand.cpus for demand in pool.demands)


@given(POOLS)
def test_limits_keep_their_bounds_and_nothing_is_given_twice(pool: Pool) -> None:
    minimum = sum(demand.minimum * demand.cpus for demand in pool.demands)
    assert used(pool) <= max(pool.cpus, minimum)
    for demand in pool.demands:
        assert demand.minimum <= limits(pool)[demand.job] <= max(demand.wanted, demand.current)


@given(POOLS)
def test_nothing_that_somebody_could_use_is_left(pool: Pool) -> None:
    left = pool.cpus - used(pool)
    for demand in pool.demands:
        assert limits(pool)[demand.job] >= max(demand.wanted, demand.current) or demand.cpus > left


@given(EQUAL_POOLS)
def test_nobody_has_more_for_its_weight_than_one_that_wants_more(pool: Pool) -> None:
    given_out = limits(pool)
    for poor in pool.demands:
        if given_out[poor.job] >= poor.wanted:
            continue
        for rich in pool.demands:
            if given_out[rich.job] > rich.minimum:
                without_last = (given_out[rich.job] - 1) / rich.weight
                assert without_last <= given_out[poor.job] / poor.weight


@given(POOLS)
def test_the_order_of_the_jobs_does_not_matter(pool: Pool) -> None:
    assert allocate(replace(pool, demands=pool.demands[::-1])) == allocate(pool)


@given(EQUAL_POOLS, st.integers(0, 50))
def test_more_cpus_take_nothing_from_anybody(pool: Pool, more: int) -> None:
    before, after = limits(pool), limits(replace(pool, cpus=pool.cpus + more))
    assert all(after[job] >= before[job] for job in before)


@pytest.mark.parametrize(
    ("cpus", "demands", "expected"),
    [
        (64, (Demand("1", 0, 8, 8), Demand("2", 0, 8, 8)), {"1": 4, "2": 4}),
        (64, (Demand("1", 0, 2, 8), Demand("2", 0, 8, 8)), {"1": 2, "2": 6}),
        (48, (Demand("1", 0, 9, 4, 1.0), Demand("2", 0, 9, 4, 2.0)), {"1": 4, "2": 8}),
        (0, (Demand("1", 2, 8, 8),), {"1": 2}),
        (12, (Demand("1", 0, 4, 8), Demand("2", 0, 4, 2)), {"1": 1, "2": 2}),
        (8, (), {}),
        # What a job has beyond its wish it keeps, unless somebody wants it.
        (64, (Demand("1", 0, 6, 4, 1.0, 8), Demand("2", 0, 4, 4)), {"1": 8, "2": 4}),
        (32, (Demand("1", 0, 6, 4, 1.0, 8), Demand("2", 0, 4, 4)), {"1": 4, "2": 4}),
    ],
)
def test_known_pools(cpus: int, demands: tuple[Demand, ...], expected: dict[str, int]) -> None:
    assert limits(Pool(cpus, demands)) == expected


def test_every_limit_has_a_reason() -> None:
    pool = Pool(40, (Demand("1", 1, 2, 4), Demand("2", 0, 50, 4, 2.0), Demand("3", 2, 5, 32)))
    assert allocate(pool) == {
        "1": Decision(1, "its minimum 1 of 2: 40 CPUs are shared by 3 job(s), and no more of 4 CPUs fit its share"),
        "2": Decision(0, "its minimum 0 of 50: 40 CPUs are shared by 3 job(s), and no more of 4 CPUs fit its share"),
        "3": Decision(2, "its minimum 2 of 5: 40 CPUs are shared by 3 job(s), and no more of 32 CPUs fit its share"),
    }
    pool = Pool(24, (Demand("1", 1, 2, 4), Demand("2", 0, 50, 4, 2.0)))
    assert allocate(pool) == {
        "1": Decision(2, "all that it wants: 2"),
        "2": Decision(4, "4 of 50: 24 CPUs are shared by 2 job(s), its weight is 2"),
    }
    assert allocate(Pool(24, (Demand("1", 1, 2, 4, current=3),))) == {
        "1": Decision(3, "it wants 2 and keeps 3: nobody wants their CPUs")
    }
