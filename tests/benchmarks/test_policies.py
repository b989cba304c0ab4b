"""The benchmarks of policies: a bound that is one, lists without traces, and each command with --quick."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import sched
from benchmarks.best_order import best_order
from benchmarks.bound import lower_bound_s, most_effective_hours
from benchmarks.harness import Row
from benchmarks.job_lists import FROZEN_JOBS, JobLists
from hetstream.slurm_plugin.policy.table import Pool, job_table
from hetstream.slurm_plugin.simulate.metrics import compare
from hetstream.slurm_plugin.simulate.scenario import Discipline, Request, Scenario
from hetstream.slurm_plugin.simulate.workload import build, parse

ROOT = Path(__file__).resolve().parents[2]
BASE = Scenario("", Request.TUNED, Discipline.FIFO)


def test_the_bound_of_a_job_that_is_alone_is_its_work() -> None:
    load = build(["a"], {"submit_s": [0.0], "work_s": [7200.0], "ideal_cpus": [8]})
    assert lower_bound_s(load, parse("gpus=1,cpus=8")) == pytest.approx(7200, rel=0.02)
    # Two jobs that exclude each other: at best one ends at 7,200, the other at 14,400. The bound lies below that, and
    # above what each needs alone.
    pair = build(["a", "b"], {"submit_s": [0.0, 0.0], "work_s": [7200.0, 7200.0], "ideal_cpus": [8, 8]})
    assert 7200 < lower_bound_s(pair, parse("gpus=1,cpus=8")) <= 10_800


@pytest.mark.parametrize("seed", range(3))
def test_no_schedule_is_below_the_bound(seed: int) -> None:
    draw = np.random.default_rng(seed)
    load = build(
        [str(job) for job in range(30)],
        {
            "submit_s": np.sort(draw.uniform(0, 7200, 30)),
            "work_s": draw.uniform(600, 20_000, 30),
            "units": draw.choice([1, 1, 1, 2, 4], 30),
            "ideal_cpus": draw.choice([4, 10, 24, 40], 30),
            "trainer_cpus": np.full(30, 2.0),
        },
    )
    cluster = parse("2*gpus=4,cpus=48")
    bound_s = lower_bound_s(load, cluster)
    assert bound_s >= load.work_s.mean() * 0.99
    found = compare([load], cluster, ["tuned", "fixed", "fair", "maxtp", "srtf", "stretch"], list(Discipline), BASE)
    assert min(one.runs[0].mean_jct_s for one in found) >= bound_s


def test_no_policy_has_more_effective_gpu_hours_than_the_bound() -> None:
    [load] = JobLists(Path("nowhere")).lists(60, 1)
    cluster = parse("4*gpus=8,cpus=64")
    window_s = 300 * 60.0
    most = most_effective_hours(load, cluster, window_s)
    found = compare([load], cluster, ["tuned", "maxtp", "srtf"], [Discipline.FIFO, Discipline.GREEDY], BASE, window_s)
    shares = [one.runs[0].gpu_effective for one in found]
    assert 0.5 * most < max(shares) * cluster.num_gpus * window_s / 3600 <= most
    alone = build(["a"], {"submit_s": [0.0], "work_s": [7200.0], "units": [2], "ideal_cpus": [8]})
    assert most_effective_hours(alone, parse("gpus=2,cpus=16"), 3600.0) == pytest.approx(2.0)
    assert most_effective_hours(alone, parse("gpus=2,cpus=8"), 3600.0) == pytest.approx(1.0)


def test_a_search_over_orders_finds_one_that_is_no_worse() -> None:
    # SRTF puts B first (60 x 300 CPUs), then A with what is left; C is short and narrow.
    table = job_table([1, 2, 3], [512, 300, 64], remaining_s=[100.0, 60.0, 300.0])
    found = best_order(table, Pool(512), 0.0)
    assert int((found.workers * table.cpus).sum()) == 512
    assert found.workers.tolist() == [148, 300, 64]


def test_without_traces_lists_are_made_up_and_say_so(tmp_path: Path) -> None:
    lists = JobLists(tmp_path)
    assert lists.note().startswith("MADE UP")
    [load] = lists.lists(FROZEN_JOBS, 1)
    assert len(load) == FROZEN_JOBS
    assert len(lists.whole(500)) == 500


@pytest.mark.parametrize("name", ["cost", pytest.param("sched", marks=pytest.mark.slow), "simulate"])
def test_each_command_writes_its_report(name: str, tmp_path: Path) -> None:
    words = [] if name == "cost" else ["--traces", str(tmp_path)]
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--out", str(tmp_path), *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / f"{name}.json").read_text())["rows"]
    assert all(row["value"] is not None for row in rows)
    assert ("MADE UP" in done.stdout) == bool(words)
    if name == "sched":
        for plot in tmp_path.glob("*.svg"):
            assert plot.read_text().startswith("<svg")


def test_the_table_says_which_policy_meets_a_target_that_several_are_held_to() -> None:
    rows = [
        Row("88 jobs, easy", "tuned / srtf", 1.238, "x", None, ">= 1.25", False),
        Row("88 jobs, easy", "tuned / own", 1.251, "x", None, ">= 1.25", True),
        Row("88 jobs, greedy", "tuned / srtf", 1.13, "x"),
        Row("88 jobs, fifo", "effective GPUs, maxtp / tuned", 1.39, "x", None, ">= 1.35", True),
        Row("88 jobs, fifo", "effective GPUs, stretch / tuned", 1.23, "x", None, ">= 1.35", False),
        Row("88 jobs, bound", "own / lower bound", 1.07, "x", None, "<= 1.1", True),
    ]
    assert sched.who_meets(rows) == [
        "88 jobs, easy, tuned / policy >= 1.25: srtf misses it with 1.238, own meets it with 1.251.",
        "88 jobs, fifo, effective GPUs, policy / tuned >= 1.35: maxtp meets it with 1.390, "
        "stretch misses it with 1.230.",
    ]
