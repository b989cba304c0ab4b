"""Job lists for the benchmarks of scheduling: from the traces beside the checkout, or made up where there are none."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.running import ROOT
from hetstream.slurm_plugin.simulate.traces import Floats, Ints, with_models
from hetstream.slurm_plugin.simulate.workload import Workload, build

TRACES = ROOT.parent / "shared" / "traces"
FROZEN, PHILLY = "goldminer_8h_ref_workloads.csv", "philly_jobs.csv"
NUM_FROZEN, FROZEN_JOBS = 20, 88
_FROZEN_NUMBERS = ("submit_min", "num_gpus", "ideal_min", "cpus_per_gpu_ideal", "trainer_cpus_per_gpu", "dw_overhead")
# What is made up has as many jobs in as many days as Philly's trace.
MADE_UP_JOBS, MADE_UP_DAYS = 82_247, 109.0

_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
# The rule for a list: jobs of half an hour to a day and at most 8 GPUs, submitted in hours 2 to 10 of a day, their run
# times scaled to the mean of 200 minutes that the paper's own figures imply.
_SHORTEST_S, _LONGEST_S, _MOST_GPUS, _MEAN_S = 30 * _MINUTE_S, _DAY_S, 8, 200 * _MINUTE_S
_FROM_S, _TO_S = 2 * _HOUR_S, 10 * _HOUR_S

Trace = tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int64]]


@dataclass
class JobLists:
    """Lists of 8 hours in the manner of GoldMiner's Table 5, and the whole trace.

    Attributes:
        folder: with the traces.
    """

    folder: Path

    def __post_init__(self) -> None:
        self.is_real = (self.folder / FROZEN).is_file() and (self.folder / PHILLY).is_file()
        self._trace: Trace | None = None
        self._frozen_text = (self.folder / FROZEN).read_text() if self.is_real else ""

    def note(self) -> str:
        """Where they come from."""
        if self.is_real:
            return f"{FROZEN_JOBS} jobs: the lists of {FROZEN}; other numbers: drawn from {PHILLY} by the same rule."
        return f"MADE UP: {self.folder} has no traces, so the jobs are drawn from a distribution like Philly's."

    def lists(self, num_jobs: int, num_lists: int) -> list[Workload]:
        """So many lists of so many jobs."""
        if num_jobs == FROZEN_JOBS and self.is_real:
            rows = list(csv.DictReader(self._frozen_text.splitlines()))
            return [
                _frozen([row for row in rows if row["seed"] == str(at)]) for at in range(min(num_lists, NUM_FROZEN))
            ]
        return [list_from(*self.trace(), num_jobs, seed) for seed in range(num_lists)]

    def whole(self, num_jobs: int) -> Workload:
        """The first jobs of the whole trace, with models drawn for them."""
        submit_s, run_s, num_gpus = (column[:num_jobs] for column in self.trace())
        return with_models(submit_s, run_s, num_gpus, np.random.default_rng([0, 4]))

    def trace(self) -> Trace:
        """Submissions, run times and GPUs of all jobs of Philly, or of the made-up ones."""
        if self._trace is None:
            if self.is_real:
                text = (self.folder / PHILLY).read_text().splitlines()
                place = {name: at for at, name in enumerate(text[0].split(","))}
                rows = [line.split(",") for line in text[1:]]
                submit, run, gpus = (
                    np.array([float(row[place[name]]) for row in rows])
                    for name in ("submit_s", "duration_s", "num_gpus")
                )
                order = np.argsort(submit, kind="stable")
                self._trace = submit[order], run[order], gpus[order].astype(np.int64)
            else:
                self._trace = synthetic_trace(MADE_UP_JOBS, MADE_UP_DAYS, 0)
        return self._trace


def _frozen(rows: Sequence[Mapping[str, str]]) -> Workload:
    """One of GoldMiner's lists."""
    column = {name: np.array([float(row[name]) for row in rows]) for name in _FROZEN_NUMBERS}
    columns = {
        "submit_s": column["submit_min"] * 60,
        "work_s": column["ideal_min"] * 60,
        "units": column["num_gpus"],
        "ideal_cpus": column["cpus_per_gpu_ideal"],
        "trainer_cpus": column["trainer_cpus_per_gpu"],
        "overhead": column["dw_overhead"],
    }
    return build([f"{row['job']}:{row['model']}" for row in rows], columns)


def list_from(submit_s: Floats, run_s: Floats, num_gpus: Ints, num_jobs: int, seed: int) -> Workload:
    """An 8-hour list in the manner of GoldMiner's, drawn from the jobs of a long trace.

    Args:
        submit_s: since a midnight.
        run_s: of each job.
        num_gpus: of each job.
        num_jobs: of the list.
        seed: of the draw.
    """
    of_day = submit_s % _DAY_S
    fits = (run_s >= _SHORTEST_S) & (run_s <= _LONGEST_S) & (num_gpus <= _MOST_GPUS)
    fits &= (of_day >= _FROM_S) & (of_day < _TO_S)
    draw = np.random.default_rng([seed, num_jobs])
    chosen = draw.choice(np.flatnonzero(fits), num_jobs, replace=False)
    chosen = chosen[np.argsort(of_day[chosen], kind="stable")]
    work_s = run_s[chosen] * (_MEAN_S / run_s[chosen].mean())
    return with_models(of_day[chosen] - _FROM_S, work_s, num_gpus[chosen], draw)


def synthetic_trace(num_jobs: int, days: float, seed: int) -> tuple[Floats, Floats, Ints]:
    """Submission times, run times and GPUs that look like Philly's, for machines without the trace.

    Run times are log-normal with Philly's median (19 min) and mean (219 min); 93.2 % of the jobs have one GPU.
    """
    draw = np.random.default_rng([seed, 3])
    submit_s = np.sort(draw.uniform(0.0, days * _DAY_S, num_jobs))
    sigma = np.sqrt(2 * np.log(13136 / 1144))
    run_s = np.clip(1144.0 * np.exp(sigma * draw.standard_normal(num_jobs)), 1.0, 60 * _DAY_S)
    num_gpus = draw.choice([1, 2, 4, 8, 16], num_jobs, p=[0.932, 0.022, 0.023, 0.020, 0.003])
    return submit_s, run_s, num_gpus.astype(np.int64)
