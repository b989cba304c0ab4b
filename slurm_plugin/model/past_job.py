"""What is kept of a job that has ended, and what a new one is compared by. Made from a job's record; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec

from hetstream.hetjob.elastic.step_terms import EMBEDDING, GRADIENT, UPDATE

Number = TypeVar("Number", int, float)

# A job that took fewer steps has not found its number of data workers, or was only a try.
LEAST_STEPS = 50
# Of data workers and of CPUs, as in a job's reports; of GPUs, steps per second and seconds, too. What is more is no
# number of a job. Memory is counted in MB, and batches in samples.
_MOST, _MOST_MB, _MOST_BATCH = 100_000, 100_000_000, 100_000_000
# A trainer that waited for more of its time would have been faster with more data workers: the controller aims at half.
ENOUGH_WAIT_SHARE = 0.1
# Clocks of hosts and file servers may differ by so much.
CLOCKS_DIFFER_S = 300.0
# With a number of data workers that was there for less, the rates had not settled.
_LEAST_SHARE_OF_TIME = 0.05


class Features(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is known of a job before it runs, as far as it is.

    Attributes:
        name: the job's name in Slurm, which is the script's unless somebody chose one.
        gpus: of the job; 0: not known.
        user: the user's name, hashed or plain; "": not known.
        dataset: titles of its loaders; "": not known.
        batch: samples of one rank in a step; 0: not known.
        directory: that it is submitted from, hashed as the user's name is; "": not known.
        commands, files: digests of what its script runs (`hetstream.hetjob.what_runs`); "": not known.
    """

    name: str
    gpus: int = 0
    user: str = ""
    dataset: str = ""
    batch: int = 0
    directory: str = ""
    commands: str = ""
    files: str = ""


class PastJob(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A job that ended.

    Attributes:
        job: its id in Slurm.
        ended_s: when, in seconds since the epoch; 0: not known, the clock that wrote it was ahead.
        features: see there.
        data_workers: that worked for most of the time in which they were enough; if none ever were, those with which
            it waited least.
        data_worker_cpus: CPUs of each.
        trainer_cpus: CPUs that its busiest trainer task needed besides; None if that was not measured.
        steps_per_s: of all ranks together, then.
        wait_share: of the time in which trainers waited for data, with so many.
        data_worker_mb: the most memory that one data worker had, in MB; None if that was not measured.
        limit_share: of its time limit that it ran; None if that is not known.
        gradient_s, update_s: of a step on one rank: computing gradients (and synchronising, with several ranks), and
            updating parameters; None if they were not told apart.
        embedding_s: looking up embeddings in it; None if there are none, or `gradient_s` has it.
        most_data_workers: that its script allowed; None if that is not known.
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
    most_data_workers: int | None = None

    @property
    def had_enough(self) -> bool:
        """Whether its data workers were as many as it needed. Else it needs at least so many."""
        return self.wait_share <= ENOUGH_WAIT_SHARE


def past_job_of(
    summary: Mapping[str, Any], job: str, user: str, ended_s: float, directory: str = ""
) -> PastJob | None:  # fmt: skip
    """What a job's record tells; None if it had no elastic controller, or took too few steps.

    Args:
        summary: `summary.json`, of any version: it may have any form.
        job, user: of whose record it is.
        ended_s: when it was written, for records that do not say when the job ended.
        directory: that holds the record, for those that do not say where the job was submitted.
    """
    try:
        elastic, loaders = summary.get("elastic") or {}, summary.get("loaders") or []
        cpus = elastic.get("data_worker_cpus")
        steps = sum(int(loader["steps"]) for loader in loaders)
        if elastic.get("data_workers") is None or cpus is None or steps < LEAST_STEPS:
            return None
        data_workers, wait_share = _worked(summary, elastic)
        largest = max(loaders, key=lambda loader: int(loader["steps"]))
        runs = summary.get("what_runs") or {}
        features = Features(
            name=_text(summary.get("job_name", "")),
            gpus=len({int(loader["rank"]) for loader in loaders}),
            user=user,
            dataset=", ".join(sorted({_text(loader["title"]) for loader in loaders if loader.get("title")})),
            batch=round(int(largest["samples"]) / max(1, int(largest["steps"]))),
            directory=_text(summary.get("submit_dir") or directory),
            commands=_text(runs.get("commands", "")),
            files=_text(runs.get("files", "")),
        )
        gradient_s, update_s, embedding_s = _step_parts(elastic.get("step_terms") or ())
        needed, memory = elastic.get("trainer_cpus_recommended"), elastic.get("data_worker_mb")
        most = elastic.get("most_data_workers")
        return within_bounds(
            PastJob(
                job=job,
                ended_s=float(summary.get("ended_s") or ended_s),
                features=features,
                data_workers=data_workers,
                data_worker_cpus=int(cpus),
                trainer_cpus=None if needed is None else int(needed),
                steps_per_s=float(elastic.get("steps_per_s") or 0.0),
                wait_share=wait_share,
                data_worker_mb=None if memory is None else int(memory),
                limit_share=_limit_share(summary.get("elapsed_s"), summary.get("time_limit_s")),
                gradient_s=gradient_s,
                update_s=update_s,
                embedding_s=embedding_s,
                most_data_workers=None if most is None else int(most),
            )
        )
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
        return None  # no record of ours


def within_bounds(job: PastJob) -> PastJob | None:
    """The job without numbers that no job has; None if nothing is left of it without them.

    Every record passes here, on its way into the history and out of it: a file may be of a release that bounded less.
    """
    if not (0 <= job.data_workers <= _MOST and 1 <= job.data_worker_cpus <= _MOST and 0 <= job.wait_share <= 1):
        return None
    if not math.isfinite(job.ended_s):
        return None
    features = msgspec.structs.replace(
        job.features,
        gpus=_bounded(job.features.gpus, 1, _MOST) or 0,
        batch=_bounded(job.features.batch, 1, _MOST_BATCH) or 0,
    )
    return msgspec.structs.replace(
        job,
        features=features,
        trainer_cpus=_bounded(job.trainer_cpus, 1, _MOST),
        steps_per_s=_bounded(job.steps_per_s, 0.0, _MOST) or 0.0,
        data_worker_mb=_bounded(job.data_worker_mb, 1, _MOST_MB),
        limit_share=_bounded(job.limit_share, 0.0, 1.0),
        gradient_s=_bounded(job.gradient_s, 0.0, _MOST),
        update_s=_bounded(job.update_s, 0.0, _MOST),
        embedding_s=_bounded(job.embedding_s, 0.0, _MOST),
        most_data_workers=_bounded(job.most_data_workers, 0, _MOST),
    )


def _bounded(value: Number | None, least: Number, most: Number) -> Number | None:
    """The value; None where it is not known, or no number of a job."""
    return value if value is not None and least <= value <= most else None


def _worked(summary: Mapping[str, Any], elastic: Mapping[str, Any]) -> tuple[int, float]:
    """How many data workers it needed, as far as it shows, and the share of the time that it waited with them."""
    seen = [
        (int(row["data_workers"]), float(row["seconds"]), float(row["wait_share"]))
        for row in elastic.get("waits_by_data_workers") or ()
    ]
    seconds = sum(row[1] for row in seen)
    seen = [row for row in seen if row[1] >= _LEAST_SHARE_OF_TIME * seconds > 0]
    enough = [row for row in seen if row[2] <= ENOUGH_WAIT_SHARE]
    if enough:
        number, _, wait_share = max(enough, key=lambda row: (row[1], row[0]))
        return number, wait_share
    if seen:
        number, _, wait_share = min(seen, key=lambda row: (row[2], -row[0]))
        return number, wait_share
    # A record of an older release: its number counts companions in the queue, too. None was there if none ever ran.
    none_ran = elastic.get("companions") == 0 and not summary.get("data_workers_seen")
    return 0 if none_ran else int(elastic["data_workers"]), float(elastic.get("wait_share") or 0.0)


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
