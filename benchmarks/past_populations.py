"""A made-up month of submissions: scripts that are submitted again and again, a little different each time. Seeded."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass

import numpy as np

from hetstream.slurm_plugin.past_jobs import Features, PastJob, most_alike, smoothed, usual_data_workers

NUM_SCRIPTS, NUM_JOBS, NUM_USERS = 40, 600, 15
DEFAULT_DATA_WORKERS = 4
# From job to job, the need of the same script differs by so much: nodes, neighbours, data (assumed).
NOISE = 0.06
# Now and then somebody changes what is done to a sample (assumed).
CHANGED = 0.04


@dataclass
class _Script:
    name: str
    user: str
    dataset: str
    cpus_per_gpu: float
    data_worker_cpus: int
    trainer_cpus: float


@dataclass(frozen=True)
class Accuracies:
    """In percent, means over the submissions that had a past job alike.

    Attributes:
        data_workers, trainer_cpus: of a start from past jobs.
        default: of the same number for every job.
        last: of what the last job of this name had, whatever its GPUs.
        bound: of who knows what the script needs, but not how this run differs.
        known: share of submissions that had a past job alike.
    """

    data_workers: float
    trainer_cpus: float
    default: float
    last: float
    bound: float
    known: float


def accuracy(first: float, final: float) -> float:
    """Return how near a first configuration came to the final one, from 0 to 1.

    The paper gives 92 and 85 % without a formula; this is one minus the relative error, at least 0.
    """
    return max(0.0, 1 - abs(first - final) / final) if final > 0 else float(first == final)


def accuracies(seed: int) -> Accuracies:
    """Replay a month."""
    generator = np.random.default_rng(seed)
    scripts = [_script(number, generator) for number in range(NUM_SCRIPTS)]
    popular = 1 / np.arange(1, NUM_SCRIPTS + 1)
    past: list[PastJob] = []
    found: dict[str, list[float]] = {name: [] for name in ("workers", "trainer", "default", "last", "bound")}
    num_known = 0
    for number in range(NUM_JOBS):
        script = scripts[int(generator.choice(NUM_SCRIPTS, p=popular / popular.sum()))]
        if generator.random() < CHANGED:
            script.cpus_per_gpu *= generator.uniform(0.6, 1.6)
        gpus = int(generator.choice([1, 2, 4, 8], p=[0.5, 0.2, 0.2, 0.1]))
        new = Features(script.name, gpus, script.user, script.dataset, int(generator.choice([64, 128])))
        need = script.cpus_per_gpu * gpus * float(np.exp(generator.normal(0, NOISE)))
        # The controller goes a tenth beyond the need (hetjob/elastic/controller.py), in whole data workers.
        final = max(1, math.ceil(1.1 * need / script.data_worker_cpus))
        trainer = max(1, math.ceil(script.trainer_cpus * float(np.exp(generator.normal(0, NOISE)))))
        alike = most_alike(new, past)
        if alike:
            num_known += 1
            started = max(1, round(usual_data_workers(new, alike)))
            found["workers"].append(accuracy(started, final))
            needed = [one.trainer_cpus for one in alike if one.trainer_cpus is not None]
            found["trainer"].append(accuracy(round(smoothed(needed)), trainer))
            found["default"].append(accuracy(DEFAULT_DATA_WORKERS, final))
            found["last"].append(accuracy(alike[-1].data_workers, final))
            known = max(1, math.ceil(1.1 * script.cpus_per_gpu * gpus / script.data_worker_cpus))
            found["bound"].append(accuracy(known, final))
        past.append(
            PastJob(str(number), float(number), new, final, script.data_worker_cpus, trainer, 1.0, 0.02)
        )  # fmt: skip
    means = {name: 100 * statistics.fmean(values) for name, values in found.items()}
    return Accuracies(
        means["workers"], means["trainer"], means["default"], means["last"], means["bound"],
        100 * num_known / NUM_JOBS,
    )  # fmt: skip


def _script(number: int, generator: np.random.Generator) -> _Script:
    words = ("resnet", "bert", "deepfm", "vit", "unet", "llama", "whisper", "gnn", "dlrm", "clip")
    return _Script(
        f"{words[number % len(words)]}-{generator.integers(1 << 16):04x}.sbatch",
        f"user{generator.integers(NUM_USERS)}",
        f"dataset{generator.integers(8)}",
        float(generator.choice([10, 24, 36, 64]) * generator.uniform(0.7, 1.3)),
        int(generator.choice([2, 4, 8])),
        float(generator.uniform(1.5, 6)),
    )
