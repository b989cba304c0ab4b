"""Plans of one job and of several: exact fronts, and what marginal upgrades and NSGA-II reach of them."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.resource_model import nsga2
from benchmarks.resource_model.fit import Observations, fit
from benchmarks.resource_model.joint import Candidates, exact, joint_front, upgrades, weight
from benchmarks.resource_model.pareto import front, hypervolume, upper_hull
from benchmarks.resource_model.plan import Prices, fastest, grid, plans
from benchmarks.resource_model.terms import GPU_TRAINERS, Workload

POINTS = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(POINTS)
def test_the_front_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    costs, gains = np.array(points, dtype=np.float64).T
    found = set(front(costs, gains).tolist())
    for one in range(len(points)):
        beaten = any(
            costs[other] <= costs[one] and gains[other] >= gains[one] and points[other] != points[one]
            for other in range(len(points))
        )
        equals = [other for other in range(one) if points[other] == points[one]]
        assert (one in found) == (not beaten and not equals)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(POINTS)
def test_the_hypervolume_is_the_area_that_the_points_dominate(points: list[tuple[int, int]]) -> None:
    costs, gains = np.array(points, dtype=np.float64).T
    cells = sum(any(cost <= x and gain >= y + 1 for cost, gain in points) for x in range(21) for y in range(20))
    assert hypervolume(costs, gains, 21.0, 0.0) == pytest.approx(cells)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(POINTS)
def test_upgrades_along_the_hull_bring_less_and_less(points: list[tuple[int, int]]) -> None:
    costs, gains = np.array(points, dtype=np.float64).T
    chosen = front(costs, gains)
    hull = chosen[upper_hull(costs[chosen], gains[chosen])]
    slopes = np.diff(gains[hull]) / np.diff(costs[hull])
    assert (np.diff(slopes) < 0).all()
    assert {chosen[0], chosen[-1]} <= set(hull.tolist())


def a_million_points() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random(1_048_576), rng.random(1_048_576)


def test_a_million_points_take_no_time_to_speak_of() -> None:
    costs, gains = a_million_points()
    began = time.perf_counter()
    assert len(front(costs, gains)) < 100
    assert time.perf_counter() - began < 10  # 0.4 s on an idle core


def jobs_of(rng: np.random.Generator, num: int, most: int = 8) -> list[Candidates]:
    found = []
    for _ in range(num):
        costs = np.cumsum(rng.integers(1, 8, rng.integers(2, most + 1))).astype(np.float64)
        found.append(Candidates(costs, np.sort(rng.random(len(costs)) * rng.uniform(0.5, 5))))
    return found


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(0, 1 << 30), st.integers(1, 8), st.floats(0.0, 1.0))
def test_any_choice_fits_and_the_exact_one_is_never_worse(seed: int, num: int, share: float) -> None:
    jobs = jobs_of(np.random.default_rng(seed), num)
    least, most = (sum(float(one.costs[at]) for one in jobs) for at in (0, -1))
    capacity = least + share * (most - least)
    found, best = upgrades(jobs, capacity), exact(jobs, capacity)
    for choice in (found, best):
        assert choice.cost <= capacity + 1e-6
        assert all(0 <= at < len(one.costs) for at, one in zip(choice.plans, jobs, strict=True))
    assert best.value >= found.value - 1e-9


def test_upgrades_reach_nearly_all_of_the_best_value() -> None:
    rng = np.random.default_rng(3)
    shares = []
    for _ in range(60):
        jobs = jobs_of(rng, 12)
        capacity = sum(float(one.costs[0]) for one in jobs) + 60
        shares.append(upgrades(jobs, capacity).value / exact(jobs, capacity).value)
    assert np.mean(shares) >= 0.99
    assert min(shares) >= 0.95


def test_a_capacity_below_what_jobs_have_in_any_case_is_no_question() -> None:
    with pytest.raises(ValueError, match="in any case"):
        exact([Candidates(np.array([5.0]), np.array([1.0]))], 4.0)


def test_shorter_jobs_count_more() -> None:
    assert weight(60) > weight(600)
    assert weight(600, rho=0.0) == 1.0


def test_a_plan_is_worth_as_much_as_the_best_there_is() -> None:
    workload = Workload(batch=256)
    rng = np.random.default_rng(0)
    everything = grid(data_workers=range(1, 65), data_worker_cpus=range(1, 17))
    shares = []
    for _ in range(20):
        fastest_s, core_s = rng.uniform(0.05, 0.2), rng.uniform(0.5, 20)
        truth = np.maximum(fastest_s, core_s / (everything.data_workers * everything.data_worker_cpus) + 0.002)
        chosen = rng.choice(len(everything), 20, replace=False)
        times = truth[chosen] * np.exp(rng.normal(0, 0.05, 20))
        model = fit(GPU_TRAINERS, workload, Observations(everything[chosen], times))
        prices = Prices(per_cpu=1.0)
        found = plans(model, everything, grid(data_workers=[1]), prices, most_cost=200)
        at = found.configurations[fastest(found)]
        got = np.maximum(fastest_s, core_s / (at.data_workers * at.data_worker_cpus)[0] + 0.002)
        shares.append(truth[prices.of(everything) <= 200].min() / got)
    assert np.median(shares) >= 0.99


def test_what_a_job_has_is_a_plan_and_a_change_must_pay() -> None:
    seen = grid(data_workers=[1, 2, 4, 8])
    model = fit(GPU_TRAINERS, Workload(batch=8), Observations(seen, 1 / seen.data_workers, np.full(4, 0.5)))
    now, candidates = grid(data_workers=[2]), grid(data_workers=range(1, 17))
    free = plans(model, candidates, now, Prices())
    dear = plans(model, candidates, now, Prices(), change_s=100, horizon_s=100)
    assert free.gains.max() > 0
    assert dear.gains.max() == 0.0
    assert dear.configurations.data_workers.tolist() == [1.0, 2.0] or dear.configurations.data_workers.tolist() == [2.0]


def test_a_grid_has_limits() -> None:
    with pytest.raises(ValueError, match="between 1 and"):
        grid(data_workers=[], trainers=[1])
    with pytest.raises(ValueError, match="between 1 and"):
        grid(data_workers=range(1, 10_001), trainers=range(1, 10_001))


def test_nsga2_comes_near_the_exact_front() -> None:
    pytest.importorskip("pymoo", reason="joint plans by NSGA-II need more: pip install pymoo")
    jobs = jobs_of(np.random.default_rng(0), 6)
    capacity = sum(float(one.costs[-1]) for one in jobs)
    costs, values = joint_front(jobs, capacity)
    found = nsga2.joint_front(jobs, capacity, generations=60)
    worst = capacity * 1.01
    assert hypervolume(*found, worst, 0.0) >= 0.97 * hypervolume(costs, values, worst, 0.0)
