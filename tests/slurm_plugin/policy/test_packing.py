"""What the policies and joint plans are worth beside all allocations that there are, enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from benchmarks.resource_model.joint import Candidates, exact, upgrades
from benchmarks.resource_model.pareto import front
from hetstream.slurm_plugin.policy.policies import POLICIES, RHO, expected_remaining_s, under_all_rules
from hetstream.slurm_plugin.policy.table import JobTable, Pool, job_table

MOST_CPUS = 8
Allocated = tuple[int, ...]


class Case:
    """Three or four jobs whose curves bend at each CPU, and a pool that is too small for all.

    Args:
        random: of its seed.
        is_mixed: data workers of 1 to 3 CPUs; else of 1.
        is_local: jobs have some speed without data workers.
    """

    def __init__(self, random: np.random.Generator, is_mixed: bool, is_local: bool) -> None:
        num = int(random.integers(3, 5))
        self.pool = int(random.integers(3, 9))
        gains = np.sort(random.gamma(0.7, 1, (num, MOST_CPUS)), axis=1)[:, ::-1].copy()
        for row, last in enumerate(random.integers(1, MOST_CPUS + 1, num)):
            gains[row, last:] = 0
        first = random.uniform(0, 0.5, num) if is_local else np.zeros(num)
        rising = np.concatenate([np.zeros((num, 1)), gains.cumsum(1)], 1)
        self.speed = first[:, None] + (1 - first[:, None]) * rising / rising[:, -1:]
        self.sizes = random.integers(1, 4, num) if is_mixed else np.ones(num, int)
        self.gpus = 2.0 ** random.integers(0, 4, num)

    @property
    def table(self) -> JobTable:
        num = len(self.sizes)
        return job_table(
            np.arange(num) + 1, wanted=np.maximum(1, MOST_CPUS // self.sizes), cpus=self.sizes, gpus=self.gpus,
            curve_cpus=np.tile(np.arange(MOST_CPUS + 1.0), (num, 1)), curve_speed=self.speed,
        )  # fmt: skip

    def all(self) -> Iterator[Allocated]:
        """Every allocation that fits."""
        for found in itertools.product(*[range(MOST_CPUS // size + 1) for size in self.sizes]):
            if int((np.array(found) * self.sizes).sum()) <= self.pool:
                yield found

    def by(self, policy: str) -> Allocated:
        return tuple(POLICIES[policy](self.table, Pool(self.pool), 0.0).workers.tolist())

    def speeds(self, allocated: Allocated) -> list[float]:
        return [float(self.speed[row, count * self.sizes[row]]) for row, count in enumerate(allocated)]

    def throughput(self, allocated: Allocated) -> float:
        return float((np.array(self.speeds(allocated)) * self.gpus).sum())


def cases(num: int, is_mixed: bool, is_local: bool) -> list[Case]:
    random = np.random.default_rng(7)
    return [Case(random, is_mixed, is_local) for _ in range(num)]


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_sum_of_speeds_beside_all_allocations(is_mixed: bool, is_local: bool) -> None:
    shares = []
    for case in cases(150, is_mixed, is_local):
        nothing = case.throughput((0,) * len(case.sizes))
        best = max(map(case.throughput, case.all()))
        found = case.throughput(case.by("maxtp"))
        shares.append((found - nothing) / (best - nothing) if best > nothing else 1.0)
    if not is_mixed:
        assert min(shares) > 1 - 1e-9, "exact for data workers of one size"
    assert min(shares) >= 0.5, "what greedy and the best single job guarantee"
    assert np.mean(shares) >= 0.97


@pytest.mark.parametrize("is_mixed", [False, True])
def test_what_dlrover_says_of_itself_beside_all_allocations(is_mixed: bool) -> None:
    """The sum of gain x WG; and the paper's equation 12, the sum of gain / cost x WG of one plan for each job."""
    shares, by_paper = [], []
    for case in cases(40, is_mixed, is_local=False):
        table = case.table
        best_speed = np.maximum(case.speed[:, -1], 1e-12)
        weight = (expected_remaining_s(table) / best_speed + 1.0) ** -RHO * case.gpus

        def gain(allocated: Allocated, case: Case = case, weight: np.ndarray = weight) -> float:
            return float((np.array(case.speeds(allocated)) * weight).sum())

        def paper(allocated: Allocated, case: Case = case, weight: np.ndarray = weight) -> float:
            cost = np.maximum(np.array(allocated) * case.sizes, 1)
            return float((np.array(case.speeds(allocated)) / cost * weight).sum())

        found, every = case.by("dlrover"), [*case.all()]
        for share, worth in ((shares, gain), (by_paper, paper)):
            best = max(map(worth, every))
            share.append(worth(found) / best if best > 0 else 1.0)
    if not is_mixed:
        assert min(shares) > 1 - 1e-9, "the greatest with data workers of one size"
    assert min(shares) >= 0.5, "at least half with several"
    assert np.mean(np.array(by_paper) > 1 - 1e-9) < 0.5, "no promise"
    assert 0.7 < np.mean(by_paper) < 0.9


@pytest.mark.parametrize("is_local", [False, True])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_the_lowest_speed_is_the_greatest_that_there_is(is_mixed: bool, is_local: bool) -> None:
    num_best = num_raised = 0
    for case in cases(150, is_mixed, is_local):
        found, best = case.speeds(case.by("fair")), max(sorted(case.speeds(one)) for one in case.all())
        assert min(found) >= best[0] - 1e-6
        num_best += np.allclose(sorted(found), best, atol=1e-6)
        num_raised += sum(speed > 1e-9 for speed in found) == sum(speed > 1e-9 for speed in best)
    assert num_raised == 150, "as many jobs as can be are raised"
    assert num_best >= (150 if is_local and not is_mixed else 75), "of the others leximin is no promise"


@pytest.mark.shows("packing looks at the best single job, too")
def test_a_small_data_worker_does_not_take_the_room_of_one_that_brings_far_more() -> None:
    curves = np.array([[0.0, 8.0], [0.0, 1.0]]), np.array([[0.0, 1.0], [0.0, 0.2]])
    table = job_table([1, 2], wanted=[1, 1], cpus=[8, 1], curve_cpus=curves[0], curve_speed=curves[1])
    for name in ("maxtp", "dlrover"):
        assert POLICIES[name](table, Pool(8), 0.0).workers.tolist() == [1, 0]
    jobs = [Candidates(np.array([0.0, 1.0]), np.array([0.0, 0.2])), Candidates(np.array([0.0, 8.0]), np.array([0.0, 1.0]))]  # fmt: skip # noqa: E501
    assert upgrades(jobs, 8.0) == exact(jobs, 8.0)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_where_not_all_can_have_one_as_many_as_can_be_do(name: str) -> None:
    table = job_table([1, 2, 3, 4], wanted=[8] * 4, cpus=[3, 1, 1, 1], curve_cpus=[0, 8], curve_speed=[0, 1])
    workers = POLICIES[name](table, Pool(3), 0.0).workers.tolist()
    assert workers[0] == 0
    assert under_all_rules(POLICIES[name])(table, Pool(3), 0.0).workers.tolist() == [0, 1, 1, 1]
    if name in ("share", "fair"):
        assert workers == [0, 1, 1, 1]


def test_joint_plans_beside_all_choices() -> None:
    random = np.random.default_rng(2)
    shares = []
    for _ in range(200):
        jobs = []
        for _ in range(random.integers(2, 5)):
            num = random.integers(2, 6)
            costs = np.concatenate([[0], np.sort(random.integers(1, 12, num))]).astype(float)
            values = np.concatenate([[0], np.sort(random.random(num))])
            kept = front(costs, values)
            jobs.append(Candidates(costs[kept], values[kept]))
        capacity = float(random.integers(2, 25))
        plans = itertools.product(*[range(len(job.costs)) for job in jobs])
        worth = [
            (sum(job.values[at] for job, at in zip(jobs, plan, strict=True)),
             sum(job.costs[at] for job, at in zip(jobs, plan, strict=True)))
            for plan in plans
        ]  # fmt: skip
        best = max(value for value, cost in worth if cost <= capacity)
        assert exact(jobs, capacity).value == pytest.approx(best)
        found = upgrades(jobs, capacity)
        assert found.cost <= capacity + 1e-9
        shares.append(found.value / best if best > 0 else 1.0)
    assert min(shares) >= 0.5
    assert np.mean(shares) >= 0.97
