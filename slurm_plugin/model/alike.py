"""The past jobs that are most like a new one, and what follows for it (DLRover-RM, algorithm 1). Pure.

Jobs are alike by name, data, GPUs, batch and user, as far as these are known of both. The configurations of the most
similar ones are smoothed exponentially, so that the most similar one counts most; data workers are counted by GPU, as a
job with twice the GPUs takes twice the batches. A larger batch takes longer for its gradients and its embeddings, and
no longer for the update (DLRover-RM, 4.1). So a GPU then takes more samples a second: T_grad, T_emb and T_upd of the
past job say how many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from hetstream.slurm_plugin.model.past_job import Features, PastJob

# So many of the most similar jobs are looked at, and only those that are more like than this.
TOP, LEAST_LIKENESS = 5, 0.7
# Weight of the next more similar job over all before it.
SMOOTHING = 0.5
_NAME, _DATASET, _GPUS, _BATCH, _USER = 4.0, 2.0, 0.5, 0.5, 1.5
# Scripts of other names are other programs, whatever else they share.
_LEAST_OF_NAME = 0.5
_SUFFIX = ".sbatch"
# The controller may need a little more than jobs of before: what it does not need it gives back.
_HEADROOM = 1.25
# The process that starts the others says nothing of its memory.
_SUPERVISOR_MB = 256


def likeness(job: Features, other: Features) -> float:
    """From 0 to 1, over what is known of both; 0 for names that have little in common."""
    name = _same_text(job.name.removesuffix(_SUFFIX), other.name.removesuffix(_SUFFIX))
    if name < _LEAST_OF_NAME:
        return 0.0
    parts = [(_NAME, name)]
    if job.dataset and other.dataset:
        parts.append((_DATASET, _same_text(job.dataset, other.dataset)))
    if job.gpus and other.gpus:
        parts.append((_GPUS, _near(job.gpus, other.gpus)))
    if job.batch and other.batch:
        parts.append((_BATCH, _near(job.batch, other.batch)))
    if job.user and other.user:
        parts.append((_USER, float(job.user == other.user)))
    return sum(weight * like for weight, like in parts) / sum(weight for weight, _ in parts)


def _same_text(text: str, other: str) -> float:
    """Equal texts are 1; of others the square of the share that they have in common: `resnet50` is like `resnet18`."""
    return 1.0 if text == other else float(SequenceMatcher(None, text, other, autojunk=False).ratio()) ** 2


def _near(number: float, other: float) -> float:
    """Half for twice as much."""
    return 1 / (1 + abs(math.log2(number / other)))


def most_alike(new: Features, past: Sequence[PastJob], top: int = TOP) -> list[PastJob]:
    """The past jobs that are alike, the most similar one last; of those that are about as similar the newest."""
    # Texts are compared once for each name: a history has few names and many jobs.
    known: dict[Features, float] = {}
    for job in past:
        if job.features not in known:
            known[job.features] = likeness(new, job.features)
    found = [job for job in past if known[job.features] >= LEAST_LIKENESS]
    return sorted(found, key=lambda job: (round(known[job.features], 1), job.ended_s, job.job))[-top:]


def smoothed(values: Sequence[float], smoothing: float = SMOOTHING) -> float:
    """Exponential smoothing (equation 10 of the paper), over values of which the last counts most.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("there is nothing to smooth")
    found = values[0]
    for value in values[1:]:
        found = smoothing * value + (1 - smoothing) * found
    return found


def accuracy(first: float, final: float) -> float:
    """How near a first configuration came to the final one, from 0 to 1.

    The paper gives 92 and 85 % without a formula; this is one minus the relative error, at least 0.
    """
    return max(0.0, 1 - abs(first - final) / final) if final > 0 else float(first == final)


@dataclass(frozen=True)
class Proposal:
    """What a new submission may ask for.

    Attributes:
        data_workers: the most that it should be allowed; 0: none, past jobs did not gain by them.
        data_worker_cpus: of each.
        trainer_cpus: of each trainer task; None if past jobs did not measure it.
        data_worker_mb: memory of each data worker in MB; None likewise.
        num_jobs: how many past jobs it rests on.
        reason: for people.
    """

    data_workers: int
    data_worker_cpus: int
    trainer_cpus: int | None
    data_worker_mb: int | None
    num_jobs: int
    reason: str

    @property
    def options(self) -> dict[str, str]:
        """As options of `#HETSTREAM` lines, by name; empty if it says that data workers bring nothing."""
        if not self.data_workers:
            return {}
        found = {"data-workers": f"0-{self.data_workers}", "data-worker-cpus": str(self.data_worker_cpus)}
        if self.data_worker_mb is not None:
            found["data-worker-mem"] = f"{self.data_worker_mb}M"
        if self.trainer_cpus is not None:
            found["trainer-cpus"] = str(self.trainer_cpus)
        return found

    @property
    def directive(self) -> str:
        """As one line of a script; empty likewise."""
        options = " ".join(f"--{name}={value}" for name, value in self.options.items())
        return f"#HETSTREAM {options}" if options else ""


def last_batch(name: str, user: str, past: Sequence[PastJob]) -> int:
    """Samples in a batch of this user's newest job of this name, which is mostly submitted as before; 0: not known."""
    own = (job.features for job in reversed(past) if user and job.features.user == user)
    name = name.removesuffix(_SUFFIX)
    return next((features.batch for features in own if features.name.removesuffix(_SUFFIX) == name), 0)


def pace(new: Features, job: PastJob) -> float:
    """Samples a second of a GPU with the new job's batch, by those of a past job; 1 where one of them is not known."""
    if not (new.batch and job.features.batch and job.gradient_s and job.update_s):
        return 1.0
    larger = new.batch / job.features.batch
    grows_s = job.gradient_s + (job.embedding_s or 0.0)
    return larger * (grows_s + job.update_s) / (grows_s * larger + job.update_s)


def usual_data_workers(new: Features, alike: Sequence[PastJob]) -> float:
    """Data workers of the most similar job's size that jobs like this one have in the end, smoothed.

    Args:
        new: the job that is to start.
        alike: at least one past job, the most similar one last.
    """
    gpus = new.gpus or alike[-1].features.gpus or 1
    if not any(job.data_workers for job in alike):
        return 0.0
    # A job that had three in the end needed more than two: the half between counts, and is added again at the end.
    needed = [
        pace(new, job) * max(0.0, job.data_workers - 0.5) * job.data_worker_cpus / max(1, job.features.gpus)
        for job in alike
    ]
    return smoothed(needed) * gpus / alike[-1].data_worker_cpus + 0.5


def propose(new: Features, past: Sequence[PastJob]) -> Proposal | None:
    """What follows from the most similar past jobs; None if there is none."""
    alike = most_alike(new, past)
    if not alike:
        return None
    cpus, usual = alike[-1].data_worker_cpus, usual_data_workers(new, alike)
    needed = [job.trainer_cpus for job in alike if job.trainer_cpus is not None]
    memory = [job.data_worker_mb * cpus / job.data_worker_cpus for job in alike if job.data_worker_mb is not None]
    names = sorted({job.features.name for job in alike})
    last = alike[-1]
    reason = (
        f"{len(alike)} past job(s) like it ({', '.join(names)}); the most similar, job {last.job}, had "
        f"{last.data_workers} data worker(s) of {last.data_worker_cpus} CPUs for {last.features.gpus} GPU(s) in the "
        f"end, and waited {last.wait_share:.0%} of the time"
    )
    if round(faster := pace(new, last), 2) != 1:
        batches = f"in batches of {new.batch} as of {last.features.batch}"
        reason += f"; a GPU takes {faster:.3g} times as many samples {batches}"
    return Proposal(
        data_workers=math.ceil(round(usual * _HEADROOM, 6)) if usual >= 1 else 0,
        data_worker_cpus=cpus,
        trainer_cpus=max(needed) if needed else None,
        data_worker_mb=math.ceil(max(memory) * _HEADROOM) + _SUPERVISOR_MB if memory else None,
        num_jobs=len(alike),
        reason=reason,
    )
