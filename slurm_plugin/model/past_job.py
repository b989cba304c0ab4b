"""What is kept of a job that has ended, and what a new one is compared by. Made from a job's record; pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from hetstream.hetjob.elastic.step_terms import EMBEDDING, GRADIENT, UPDATE

# A job that took fewer steps has not found its number of data workers, or was only a try.
LEAST_STEPS = 50
# Of data workers and of their CPUs, as in a job's reports; of seconds, too.
_MOST = 100_000


class Features(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a job before it runs, as far as it is.

    Attributes:
        name: the job's name in Slurm, which is the script's unless somebody chose one.
        gpus: of the job; 0: not known.
        user: the user's name, hashed or plain; "": not known.
        dataset: titles of its loaders; "": not known.
        batch: samples of one rank in a step; 0: not known.
    """

    name: str
    gpus: int = 0
    user: str = ""
    dataset: str = ""
    batch: int = 0


class PastJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job that ended.

    Attributes:
        job: its id in Slurm.
        ended_s: when, in seconds since the epoch.
        features: see there.
        data_workers: that it had in the end, while it read data; 0: local loading was as fast.
        data_worker_cpus: CPUs of each.
        trainer_cpus: CPUs that its busiest trainer task needed besides; None if that was not measured.
        steps_per_s: of all ranks together, then.
        wait_share: of the time in which trainers waited for data, then.
        data_worker_mb: the most memory that one data worker had, in MB; None if that was not measured.
        limit_share: of its time limit that it ran; None if that is not known.
        gradient_s, update_s: of a step on one rank: computing gradients (and synchronising, with several ranks), and
            updating parameters; None if they were not told apart.
        embedding_s: looking up embeddings in it; None if there are none, or `gradient_s` has it.
    """

    job: str
    ended_s: float
    features: Features
    data_workers: int
    data_worker_cpus: int
    trainer_cpus: int | None
    steps_per_s: float
    wait_share: float
    data_worker_mb: int | None = None
    limit_share: float | None = None
    gradient_s: float | None = None
    update_s: float | None = None
    embedding_s: float | None = None


def past_job_of(summary: Mapping[str, Any], job: str, user: str, ended_s: float) -> PastJob | None:
    """What a job's record tells; None if it had no elastic controller, or took too few steps.

    Args:
        summary: `summary.json`, of any version: it may have any form.
        job, user, ended_s: of whose record it is, and when it was written.
    """
    try:
        elastic, loaders = summary.get("elastic") or {}, summary.get("loaders") or []
        data_workers, cpus = elastic.get("data_workers"), elastic.get("data_worker_cpus")
        steps = sum(int(loader["steps"]) for loader in loaders)
        if data_workers is None or cpus is None or steps < LEAST_STEPS:
            return None
        largest = max(loaders, key=lambda loader: int(loader["steps"]))
        features = Features(
            name=_text(summary.get("job_name", "")),
            gpus=len({int(loader["rank"]) for loader in loaders}),
            user=user,
            dataset=", ".join(sorted({_text(loader["title"]) for loader in loaders if loader.get("title")})),
            batch=round(int(largest["samples"]) / max(1, int(largest["steps"]))),
        )
        gradient_s, update_s, embedding_s = _step_parts(elastic.get("step_terms") or ())
        needed, memory = elastic.get("trainer_cpus_recommended"), elastic.get("data_worker_mb")
        return PastJob(
            job=job,
            ended_s=ended_s,
            features=features,
            data_workers=min(_MOST, max(0, int(data_workers))),
            data_worker_cpus=min(_MOST, max(1, int(cpus))),
            trainer_cpus=None if needed is None else max(1, int(needed)),
            steps_per_s=max(0.0, float(elastic.get("steps_per_s") or 0.0)),
            wait_share=min(1.0, max(0.0, float(elastic.get("wait_share") or 0.0))),
            data_worker_mb=None if memory is None else max(1, int(memory)),
            limit_share=_limit_share(summary.get("elapsed_s"), summary.get("time_limit_s")),
            gradient_s=gradient_s,
            update_s=update_s,
            embedding_s=embedding_s,
        )
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
        return None  # no record of ours


def _step_parts(terms: Iterable[Mapping[str, Any]]) -> tuple[float | None, float | None, float | None]:
    """Seconds for gradients, for the update and for looking up embeddings, where the first two were told."""
    known = {term["name"]: float(term["seconds"]) for term in terms if term.get("seconds") is not None}
    # Of what holds T_grad the least: with T_sync, and with T_emb, where these were not told apart.
    gradients = [seconds for name, seconds in known.items() if GRADIENT in name and UPDATE not in name]
    gradient_s, update_s, embedding_s = min(gradients, default=None), known.get(UPDATE), known.get(EMBEDDING)
    if gradient_s is None or update_s is None or not (0 < gradient_s <= _MOST and 0 < update_s <= _MOST):
        return None, None, None
    return gradient_s, update_s, embedding_s if embedding_s is not None and 0 < embedding_s <= _MOST else None


def _limit_share(elapsed_s: Any, limit_s: Any) -> float | None:
    """Slurm gives a job that is told to end a little more time than its limit."""
    if elapsed_s is None or limit_s is None:
        return None
    share = float(elapsed_s) / float(limit_s)
    return min(share, 1.0) if share > 0 else None


def _text(value: object) -> str:
    """A name of bytes that are no UTF-8 comes with surrogates, which cannot be kept."""
    return str(value).encode("utf-8", "replace").decode()
