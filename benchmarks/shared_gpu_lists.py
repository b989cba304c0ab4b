"""Job lists of AntMan's Figure 13, and light jobs for GPUs whose trainers wait; from Philly's trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.job_lists import JobLists
from hetstream.slurm_plugin.simulate.sharing import Sharing
from hetstream.slurm_plugin.simulate.workload import Workload, build

Floats = npt.NDArray[np.float64]
_DAY_S, _HOUR_S, _MINUTE_S = 86400.0, 3600.0, 60.0
# Jobs are submitted in hours 2 to 10 of a day, as in GoldMiner's lists.
_FROM_S, _TO_S = 2 * _HOUR_S, 10 * _HOUR_S


class Model(NamedTuple):
    """A model: the share of a GPU's time that it keeps busy, and its memory there. Assumed: the paper names neither."""

    name: str
    gpu_use: float
    gpu_memory_gib: float


# Five kinds of jobs, a fifth of the list each.
CATEGORIES: Sequence[Sequence[Model]] = (
    (Model("ResNet50", 0.95, 18), Model("VGG16", 0.8, 10), Model("SR", 0.9, 12)),
    (Model("Bert", 0.95, 20),),
    (Model("ESPnet", 0.3, 6),),
    (Model("GraphSAGE", 0.2, 4), Model("GCN", 0.15, 3.5)),
    (Model("DIN", 0.3, 5), Model("WideDeep", 0.2, 5)),
)


def antman_list(lists: JobLists, num_jobs: int, seed: int) -> Workload:
    """A list of 8 hours: 60 minutes on average, at most 2 hours and 4 GPUs; half of the jobs are opportunistic.

    Run times are Philly's, stretched so that their mean is an hour after the longest were cut.
    """
    draw = np.random.default_rng([seed, num_jobs, 13])
    submit_s, work_s, num_gpus = _drawn(lists, num_jobs, 4, 60 * _MINUTE_S, 120 * _MINUTE_S, draw)
    kinds = [CATEGORIES[int(at)] for at in draw.integers(0, len(CATEGORIES), num_jobs)]
    models = [kind[int(at * len(kind))] for kind, at in zip(kinds, draw.random(num_jobs).tolist(), strict=True)]
    is_opportunistic = draw.random(num_jobs) < 0.5
    return build(
        [f"{place}:{model.name}" for place, model in enumerate(models)],
        {"submit_s": submit_s, "work_s": work_s, "units": num_gpus},
        tenants=["B" if own else "A" for own in is_opportunistic.tolist()],
        sharing=Sharing(
            is_opportunistic,
            np.array([model.gpu_use for model in models]),
            np.array([model.gpu_memory_gib for model in models]),
        ),
    )


def with_light_jobs(load: Workload, lists: JobLists, num_jobs: int, seed: int) -> Workload:
    """A list with opportunistic jobs besides: 1 GPU that each could keep busy alone, 1 CPU, an hour on average."""
    draw = np.random.default_rng([seed, num_jobs, 14])
    submit_s, work_s, _ = _drawn(lists, num_jobs, 1, 60 * _MINUTE_S, 120 * _MINUTE_S, draw)
    ones = np.ones(num_jobs)
    own = {
        "submit_s": submit_s, "work_s": work_s, "units": ones, "gpus": ones, "ideal_cpus": ones, "trainer_cpus": ones,
        "overhead": 0 * ones, "memory_gib": 0 * ones, "worker_memory_gib": 0 * ones, "network_gbps": 0 * ones,
        "limit_s": np.full(num_jobs, np.inf),
    }  # fmt: skip
    columns = {name: np.concatenate([getattr(load, name), column]) for name, column in own.items()}
    both = len(load) + num_jobs
    return build(
        [*load.names, *(f"light {place}" for place in range(num_jobs))],
        columns,
        sharing=Sharing(np.arange(both) >= len(load), np.ones(both), np.zeros(both)),
    )


def all_share(load: Workload, memory_factor: float, most_gib: float) -> Workload:
    """The same list without classes: each job may share, and takes so many times its memory, at most all of a GPU."""
    assert load.sharing is not None, "nothing is known of sharing"
    own = load.sharing
    memory_gib = np.minimum(own.gpu_memory_gib * memory_factor, most_gib)
    return replace(load, sharing=Sharing(np.ones(len(load), dtype=bool), own.gpu_use, memory_gib))


def only_class(load: Workload, is_opportunistic: bool) -> Workload:
    """The jobs of one class, with the clock of the whole list."""
    assert load.sharing is not None, "nothing is known of sharing"
    return load.only(load.sharing.is_opportunistic == is_opportunistic)


def _drawn(
    lists: JobLists, num_jobs: int, most_gpus: int, mean_s: float, longest_s: float, draw: np.random.Generator
) -> tuple[Floats, Floats, npt.NDArray[np.int64]]:
    """Submissions, run times and GPUs of jobs of the trace."""
    submit_s, run_s, num_gpus = lists.trace()
    of_day = submit_s % _DAY_S
    fits = (run_s >= _MINUTE_S) & (num_gpus >= 1) & (num_gpus <= most_gpus) & (of_day >= _FROM_S) & (of_day < _TO_S)
    chosen = draw.choice(np.flatnonzero(fits), num_jobs, replace=False)
    chosen = chosen[np.argsort(of_day[chosen], kind="stable")]
    low, high = 1e-3, 1e3
    for _ in range(60):
        factor = (low * high) ** 0.5
        short = np.minimum(run_s[chosen] * factor, longest_s).mean() < mean_s
        low, high = (factor, high) if short else (low, factor)
    return of_day[chosen] - _FROM_S, np.minimum(run_s[chosen] * high, longest_s), num_gpus[chosen]
