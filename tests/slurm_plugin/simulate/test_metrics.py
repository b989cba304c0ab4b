"""Figures of runs against what can be worked out by hand; replays of what really happened."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetstream.base.errors import UsageError
from hetstream.slurm_plugin.errors import SimulationInputError
from hetstream.slurm_plugin.insight.prices import Prices
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.metrics import Metrics, compare, interval, measure
from hetstream.slurm_plugin.simulate.scenario import Discipline, QueueOptions, Request, Scenario
from hetstream.slurm_plugin.simulate.traces import replay
from hetstream.slurm_plugin.simulate.workload import Recorded, Workload, build, parse

FIFO = Scenario("tuned", Request.TUNED, Discipline.FIFO, sample_s=1.0)
# On 2 GPUs and 8 CPUs: the first takes 6 CPUs for 10 s; the second, of 4 CPUs, waits for them, and runs for 20 s.
TWO = build(["a", "b"], {"submit_s": [0, 0], "work_s": [10, 20], "ideal_cpus": [6, 4]})


def figures(window_s: float | None = None, prices: Prices | None = None) -> Metrics:
    return measure(simulate(TWO, parse("gpus=2,cpus=8"), FIFO), window_s, prices)


def test_figures_of_two_jobs_by_hand() -> None:
    found = figures(prices=Prices(gpu_hour=3600.0, cpu_hour=36.0))
    assert (found.mean_jct_s, found.median_jct_s, found.makespan_s) == (20, 20, 30)
    assert (found.mean_wait_s, found.p50_wait_s) == (5, 5)
    assert found.wait_by_cause_s["cpus"] == 5
    assert (found.mean_stretch, found.mean_slowdown, found.max_slowdown) == (1, 1.25, 1.5)
    assert found.gpu_allocated == pytest.approx(30 / 60)
    assert found.gpu_effective == found.gpu_allocated
    assert found.cpu_allocated == pytest.approx((60 + 80) / 240)
    assert found.cpu_productive == pytest.approx(found.cpu_allocated)
    # A GPU costs 1 a second, a CPU 0.01: 30 s of one GPU, and 140 CPU-seconds.
    assert found.cost == pytest.approx(31.4)
    assert found.cost_per_work_hour == pytest.approx(31.4 / 30 * 3600)
    assert found.jain == 1


def test_shares_are_of_the_window() -> None:
    found = figures(window_s=15.0)
    assert found.gpu_allocated == pytest.approx(15 / 30)
    assert found.cpu_allocated == pytest.approx((60 + 20) / 120)
    assert figures(window_s=60.0).gpu_allocated == pytest.approx(30 / 120)


def test_fragmentation_is_told_by_which_resource_is_stranded() -> None:
    # Both CPUs are taken and 3 of 4 GPUs are free, for all of the 10 s.
    load = build(["a"], {"submit_s": [0], "work_s": [10], "ideal_cpus": [2]})
    found = measure(simulate(load, parse("gpus=4,cpus=2"), FIFO))
    assert (found.cpus_gone, found.gpus_gone) == (1, 0)
    assert found.fragmentation == pytest.approx(0.75)


def test_data_workers_count_where_they_are() -> None:
    # A trainer with 2 CPUs on the first node; its 4 data workers are beside it.
    load = build(["a"], {"submit_s": [0], "work_s": [100], "ideal_cpus": [6], "trainer_cpus": [2]})
    [one] = compare([load], parse("gpus=1,cpus=6;gpus=1,cpus=6"), ["srtf"], [Discipline.FIFO], FIFO)
    assert one.first.fragmentation is not None
    assert one.first.fragmentation.indicator[-1] == pytest.approx(0), "one node is full, the other empty"
    assert one.runs[0].cpu_allocated == pytest.approx(0.5)


@given(st.lists(st.floats(0, 1e6), min_size=2, max_size=30))
def test_an_interval_holds_the_mean_and_stays_within_the_values(values: list[float]) -> None:
    low, high = interval(values)
    assert min(values) - 1e-6 <= low <= high <= max(values) + 1e-6
    assert (low, high) == interval(values)


@pytest.mark.shows("the simulator tells waits by cause, slowdown, use and cost; table, JSON and CSV agree")
def test_rows_have_intervals_over_seeds() -> None:
    draw = np.random.default_rng(0)
    loads = [
        build([str(job) for job in range(20)], {"submit_s": np.arange(20.0), "work_s": draw.uniform(1, 50, 20)})
        for _ in range(3)
    ]
    rows = [one.row() for one in compare(loads, parse("gpus=4,cpus=8"), ["tuned", "fair"], list(Discipline), FIFO)]
    assert [(row["policy"], row["discipline"]) for row in rows[:3]] == [
        ("tuned", "fifo"),
        ("fair", "fifo"),
        ("tuned", "easy"),
    ]
    assert rows[0]["mean_jct_s_low"] < rows[0]["mean_jct_s"] < rows[0]["mean_jct_s_high"]
    assert rows[0]["num_seeds"] == 3
    with pytest.raises(UsageError, match="no policy 'best'"):
        compare(loads, parse("gpus=4,cpus=8"), ["best"], [Discipline.FIFO], FIFO)


def recorded(start_s: list[float]) -> Workload:
    work_s = np.array([10.0, 20.0, 5.0])
    start = np.array(start_s)
    columns = {"submit_s": [0, 0, 1], "work_s": work_s, "ideal_cpus": [1, 1, 1]}
    return build(["a", "b", "c"], columns, recorded=Recorded(start, start + work_s, np.ones(3), np.zeros(3)))


def test_a_replay_of_what_happened_just_so_has_no_error() -> None:
    _, error = replay(recorded([0, 10, 30]), parse("gpus=1,cpus=1"), QueueOptions(interval_s=0))
    assert (error.mean_jct, error.makespan, error.order, error.median_start_s) == (0, 0, 1, 0)
    assert error.num_jobs == 3


@pytest.mark.shows("traces, tables and exports of sacct are read; an export is first replayed as it happened")
def test_a_replay_tells_how_wrong_it_is() -> None:
    # Really the last one came before the second, by priority.
    _, error = replay(recorded([0, 15, 10]), parse("gpus=1,cpus=1"), QueueOptions(interval_s=0))
    assert error.order == pytest.approx(2 / 3)
    assert error.makespan == 0
    assert error.mean_jct == pytest.approx((10 + 30 + 34) / (10 + 35 + 14) - 1)
    with pytest.raises(SimulationInputError, match="does not say what really happened"):
        replay(TWO, parse("gpus=1,cpus=6"), QueueOptions())
    with pytest.raises(SimulationInputError, match="no job fits the cluster"):
        replay(recorded([0, 10, 30]), parse("cpus=8"), QueueOptions())
