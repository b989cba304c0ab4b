"""GoldMiner's models and the CPUs that they are taken to need; lists of jobs in the manner of its Table 5. Pure.

The paper gives bounds, not figures: the CPUs per GPU here are assumed, so that its two cross-checks are met (run time
under the machines' ratio, and CPUs per GPU of its fixed data workers). docs/simulate.md has the table.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.simulate.workload import Workload, build

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Model(NamedTuple):
    """A model: CPUs per GPU at its ideal speed, of them the trainer's own, and what data workers cost."""

    name: str
    ideal_cpus: float
    trainer_cpus: float
    overhead: float


HEAVY = (
    Model("WDL", 36, 3, 0),
    Model("DeepFM", 64, 4, 0),
    Model("AlexNet", 40, 4, 0.127),
    Model("DIN", 24, 2, 0),
    Model("ShuffleNet", 22, 3, 0),
    Model("ResNet18", 27, 3, 0.063),
)
LIGHT = (Model("Inception", 10, 2, 0), Model("ResNet50", 12, 2, 0), Model("VGG16", 10, 2, 0), Model("Bert", 4, 1, 0))

_MINUTE_S, _HOUR_S, _DAY_S = 60.0, 3600.0, 86400.0
# The rule for a list: jobs of half an hour to a day and at most 8 GPUs, submitted in hours 2 to 10 of a day, their run
# times scaled to the mean of 200 minutes that the paper's own figures imply.
_SHORTEST_S, _LONGEST_S, _MOST_GPUS, _MEAN_S = 30 * _MINUTE_S, _DAY_S, 8, 200 * _MINUTE_S
_FROM_S, _TO_S = 2 * _HOUR_S, 10 * _HOUR_S


def draw_models(num_jobs: int, draw: np.random.Generator) -> list[Model]:
    """A model for each job: one of the two classes with even chances, and any model of the class."""
    heavy = draw.random(num_jobs) < 0.5
    place = draw.random(num_jobs)
    return [
        (HEAVY if is_heavy else LIGHT)[int(at * len(HEAVY if is_heavy else LIGHT))]
        for is_heavy, at in zip(heavy.tolist(), place.tolist(), strict=True)
    ]


def with_models(submit_s: Floats, work_s: Floats, num_gpus: Ints, draw: np.random.Generator) -> Workload:
    """A workload of jobs of which only times and GPUs are known: each gets a model."""
    models = draw_models(len(submit_s), draw)
    return build(
        [f"{place}:{model.name}" for place, model in enumerate(models)],
        {
            "submit_s": submit_s,
            "work_s": work_s,
            "units": num_gpus,
            "ideal_cpus": [model.ideal_cpus for model in models],
            "trainer_cpus": [model.trainer_cpus for model in models],
            "overhead": [model.overhead for model in models],
        },
    )


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
