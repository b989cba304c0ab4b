"""The past jobs that are most like a new one, and what follows for it (DLRover-RM, algorithm 1). Pure.

Jobs are alike if they run the same; `_may_be_alike` says what that is. How much so is told by directory, data, GPUs,
batch and user, as far as these are known of both. The configurations of the most similar ones are smoothed
exponentially, so that the most similar one counts most; data workers are counted by GPU, as a job with twice the GPUs
takes twice the batches. A larger batch takes longer for its gradients and its embeddings, and no longer for the update
and to synchronise (DLRover-RM, 4.1). So a GPU then takes more samples a second: T_grad, T_emb and T_upd of the past job
say how many, and T_sync, which a past job with one GPU tells by the difference.

No single job decides, once there are three: of data workers, what is far from the median is replaced by it before they
are smoothed (`without_outliers`), their size is the most frequent, and of memory and trainer CPUs, of which too few
harm a job, the most counts, but for a value that is more than twice all others (`usual_most`). A job that waited for
data with the data workers that it had says "at least", never "enough".
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
import secrets
import sqlite3
import stat
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from statistics import median, stdev
from typing import Any, TypeVar

import msgspec

from hetstream.base import typed_json
from hetstream.base.files import Directory
from hetstream.base.text import count_words
from hetstream.hetjob.elastic.step_terms import EMBEDDING, GRADIENT, UPDATE, UsualLength
from hetstream.hetjob.job.job import for_user, setting
from hetstream.hetjob.ports import NodeSize
from hetstream.hetjob.site.site_file import site_value
from hetstream.slurm_plugin.database import BUSY_TIMEOUT_S, DatabaseFile, check_beside, create_private

# What is kept of a job that has ended, and what a new one is compared by. Made from a job's record; pure.

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
        commands, files: digests of what its script runs (`hetstream.hetjob.convert.render`); "": not known.
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
        wait_share: of the time in which trainers waited for data, with these data workers.
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
        """Whether its data workers were as many as it needed. Else it needs at least as many."""
        return self.wait_share <= ENOUGH_WAIT_SHARE


def past_job_of(
    summary: Mapping[str, Any], job: str, user: str, ended_s: float, directory: str = ""
) -> PastJob | None:  # fmt: skip
    """Return what a job's record tells; None if it had no elastic controller, or took too few steps.

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
    """Return the job without numbers that no job has; None if nothing is left of it without them.

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


# So many of the most similar jobs are looked at, and only those that are more like than this.
TOP, LEAST_LIKENESS = 5, 0.7
# Weight of the next more similar job over all before it.
SMOOTHING = 0.5
_RUNS, _DIRECTORY, _DATASET, _GPUS, _BATCH, _USER = 4.0, 0.5, 2.0, 0.5, 0.5, 1.5
# A script of the same name and directory that was edited runs nearly the same.
_EDITED = 0.9
_SUFFIX = ".sbatch"
# The controller may need a little more than jobs of before: what it does not need it gives back.
_HEADROOM = 1.25
# The process that starts the others says nothing of its memory.
_SUPERVISOR_MB = 256
# A share of waiting gives the factor by which data workers were too few. Of a larger share it would be a guess.
_MOST_WAIT_SHARE = 0.75
# Of fewer jobs nobody knows which one is wrong.
_FEW = 3
# A value above this multiple of the next one says something of its own job alone.
_OUTLIER = 2.0


def likeness(job: Features, other: Features) -> float:
    """From 0 to 1, over what is known of both; 0 for jobs that run something else."""
    if not _may_be_alike(job, other):
        return 0.0
    are_same_commands = bool(job.commands) and job.commands == other.commands
    are_edited = bool(job.commands and other.commands) and not are_same_commands
    parts = [(_RUNS, _EDITED if are_edited else 1.0)]
    if job.directory and other.directory and _is_known_same(job.user, other.user):
        parts.append((_DIRECTORY, float(job.directory == other.directory)))
    if job.dataset and other.dataset:
        parts.append((_DATASET, _same_text(job.dataset, other.dataset)))
    if job.gpus and other.gpus:
        parts.append((_GPUS, _near(job.gpus, other.gpus)))
    if job.batch and other.batch:
        parts.append((_BATCH, _near(job.batch, other.batch)))
    if job.user and other.user:
        parts.append((_USER, float(job.user == other.user)))
    return sum(weight * like for weight, like in parts) / sum(weight for weight, _ in parts)


def _may_be_alike(job: Features, other: Features) -> bool:
    """Whether two jobs run the same.

    Equal commands do, wherever and under whatever name. Else it must be the script of the same name in the same
    directory, that names the same files: there are many `train.sbatch`, and `exp1.sbatch` is not `exp2.sbatch`. What is
    not known of one of them decides nothing.
    """
    if job.commands and job.commands == other.commands:
        return True
    return (
        job.name.removesuffix(_SUFFIX) == other.name.removesuffix(_SUFFIX)
        and (not job.directory or not other.directory or job.directory == other.directory)
        and (not job.files or not other.files or job.files == other.files)
    )


def _is_known_same(text: str, other: str) -> bool:
    return not text or not other or text == other


def _same_text(text: str, other: str) -> float:
    """Equal texts are 1; of others the square of the share that they have in common."""
    return 1.0 if text == other else float(SequenceMatcher(None, text, other, autojunk=False).ratio()) ** 2


def _near(number: float, other: float) -> float:
    """Half for twice as much."""
    return 1 / (1 + abs(math.log2(number / other)))


def most_alike(new: Features, past: Sequence[PastJob], top: int = TOP) -> list[PastJob]:
    """Return the past jobs that are alike, the most similar one last; of those that are about as similar the newest."""
    # Features are compared once: a history has few of them and many jobs.
    known: dict[Features, float] = {}
    for job in past:
        if job.features not in known:
            known[job.features] = likeness(new, job.features)
    found = [job for job in past if known[job.features] >= LEAST_LIKENESS]
    return sorted(found, key=lambda job: (round(known[job.features], 1), job.ended_s, job.job))[-top:]


def without_outliers(values: Sequence[float]) -> list[float]:
    """Return the values; the median replaces what is beyond twice or half of it. Of two nobody knows which is wrong."""
    middle = median(values) if values else 0.0
    is_far = (value > _OUTLIER * middle or value * _OUTLIER < middle for value in values)
    return list(values) if len(values) < _FEW else [middle if far else v for v, far in zip(values, is_far, strict=True)]


def usual_most(values: Iterable[float]) -> float | None:
    """Return the greatest value, unless it is the only one of at least three that is so great; None if there is none.

    For what harms a job if it is too little: four of five jobs had no more, and mostly all five.
    """
    found = sorted(values)
    if len(found) >= _FEW and found[-1] > _OUTLIER * found[-2]:
        return found[-2]
    return found[-1] if found else None


def smoothed(values: Sequence[float]) -> float:
    """Exponential smoothing (equation 10 of the paper), over values of which the last counts most.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("there is nothing to smooth")
    found = values[0]
    for value in values[1:]:
        found = SMOOTHING * value + (1 - SMOOTHING) * found
    return found


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
        usual_mb: the part of `data_worker_mb` without headroom.
    """

    data_workers: int
    data_worker_cpus: int
    trainer_cpus: int | None
    data_worker_mb: int | None
    num_jobs: int
    reason: str
    usual_mb: int | None = None

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


def last_batch(new: Features, past: Sequence[PastJob]) -> int:
    """Return samples in a batch of this user's newest job that runs the same; 0: not known.

    A script is mostly submitted as before.
    """
    own = (job for job in past if new.user and job.features.user == new.user and _may_be_alike(new, job.features))
    newest = max(own, key=lambda job: (job.ended_s, job.job), default=None)
    return newest.features.batch if newest else 0


def pace(new: Features, job: PastJob, alike: Sequence[PastJob] = ()) -> float:
    """Return samples a second of a GPU with the new job's batch, by those of a past job; 1 where one of them is not
    known.

    Args:
        new: the job that is to start.
        job: the past one.
        alike: others like it; they may tell what synchronising takes.
    """
    if not (new.batch and job.features.batch and job.gradient_s and job.update_s):
        return 1.0
    larger = new.batch / job.features.batch
    synchronising_s = _synchronising_s(job, alike)
    grows_s = job.gradient_s - synchronising_s + (job.embedding_s or 0.0)
    stays_s = job.update_s + synchronising_s
    return larger * (grows_s + stays_s) / (grows_s * larger + stays_s)


def _synchronising_s(job: PastJob, alike: Sequence[PastJob]) -> float:
    """T_sync of a step: what several GPUs take longer for gradients than one with as many samples took. No job can tell
    that of itself. 0 where none with one GPU is known: it is then among what grows.
    """
    if job.gradient_s is None or job.features.gpus < 2:
        return 0.0
    alone = [
        other.gradient_s
        for other in alike
        if other.gradient_s is not None
        and (other.features.gpus, other.features.batch) == (1, job.features.batch)
        and (other.embedding_s is None) == (job.embedding_s is None)
    ]
    return max(0.0, job.gradient_s - median(alone)) if alone else 0.0


def usual_data_workers(new: Features, alike: Sequence[PastJob], cpus: int | None = None) -> float:
    """Data workers that jobs like this one need, smoothed.

    Args:
        new: the job that is to start.
        alike: at least one past job, the most similar one last.
        cpus: of each; by default those of the most similar job.
    """
    gpus = new.gpus or alike[-1].features.gpus or 1
    if all(job.had_enough and not job.data_workers for job in alike):
        return 0.0
    needed = [_needed_cpus(new, job, alike) for job in alike]
    enough = [need for need, job in zip(needed, alike, strict=True) if job.had_enough]
    # Who had too few says "at least", which is no reason to expect less than others needed.
    floor = median(enough) if enough else 0.0
    needed = [need if job.had_enough else max(need, floor) for need, job in zip(needed, alike, strict=True)]
    return smoothed(without_outliers(needed)) * gpus / (cpus or alike[-1].data_worker_cpus) + 0.5


def _needed_cpus(new: Features, job: PastJob, alike: Sequence[PastJob]) -> float:
    """CPUs of data workers that a GPU of the new job needs by one past job; by a job that waited, at least.

    A job that had three in the end and did not wait needed more than two: the half between counts, and is added again
    at the end. One that waited needs more than it had: what it had makes `1 - wait_share` of the steps. And it is never
    a reason to allow fewer than its script allowed.
    """
    if job.had_enough:
        number = max(0.0, job.data_workers - 0.5)
    else:
        number = max(1, job.data_workers) / (1 - min(job.wait_share, _MOST_WAIT_SHARE))
        number = max(number, (job.most_data_workers or 0) / _HEADROOM)
    return pace(new, job, alike) * number * job.data_worker_cpus / max(1, job.features.gpus)


def propose(new: Features, past: Sequence[PastJob]) -> Proposal | None:
    """Return what follows from the most similar past jobs; None if there is none."""
    ordered = most_alike(new, past, max(1, len(past)))
    if not ordered:
        return None
    alike = ordered[-TOP:]
    # The most frequent size, and of those the most similar job's.
    sizes = Counter(job.data_worker_cpus for job in reversed(alike))
    cpus = sizes.most_common(1)[0][0]
    usual = max(usual_data_workers(new, ordered[:end][-TOP:], cpus) for end in _ends(ordered))
    trainer_cpus = usual_most(job.trainer_cpus for job in alike if job.trainer_cpus is not None)
    memory = usual_most(
        job.data_worker_mb * cpus / job.data_worker_cpus for job in alike if job.data_worker_mb is not None
    )
    return Proposal(
        data_workers=math.ceil(round(usual * _HEADROOM, 6)) if usual >= 1 else 0,
        data_worker_cpus=cpus,
        trainer_cpus=None if trainer_cpus is None else int(trainer_cpus),
        data_worker_mb=None if memory is None else math.ceil(memory * _HEADROOM) + _SUPERVISOR_MB,
        num_jobs=len(alike),
        reason=_reason(new, alike),
        usual_mb=None if memory is None else math.ceil(memory) + _SUPERVISOR_MB,
    )


def _ends(ordered: Sequence[PastJob]) -> Iterable[int]:
    """How many of the jobs to look at: all; and again without the most similar ones, as long as these waited for data.

    What they needed is only known to be more than they had. They must not hide an older job that shows how much.
    """
    end = len(ordered)
    yield end
    while end > _FEW and len(ordered) - end < TOP and not ordered[end - 1].had_enough:
        end -= 1
        yield end


def _reason(new: Features, alike: Sequence[PastJob]) -> str:
    last = alike[-1]
    names = sorted({job.features.name for job in alike})
    reason = (
        f"{count_words(len(alike), 'past job')} like it ({', '.join(names)}); the most similar, job {last.job}, had "
        f"{count_words(last.data_workers, 'data worker')} of {count_words(last.data_worker_cpus, 'CPU')} for "
        f"{count_words(last.features.gpus, 'GPU')} at work, and waited {last.wait_share:.0%} of the time"
    )
    if num_starved := sum(not job.had_enough for job in alike):
        which = "which" if len(alike) == 1 else f"{num_starved} of the {len(alike)} waited so much that what they had"
        reason += f": {which} was not enough"
    if round(faster := pace(new, last, alike), 2) != 1:
        batches = f"in batches of {new.batch} as of {last.features.batch}"
        reason += f"; a GPU takes {faster:.3g} times as many samples {batches}"
    return reason


def within_nodes(proposal: Proposal, nodes: Sequence[NodeSize]) -> Proposal:
    """Return the proposal as far as nodes have room for it.

    Memory is never below what the jobs had at their usual peak: where no node has so much, it is left as it is, for
    the conversion to refuse.

    Args:
        proposal: from past jobs.
        nodes: of the data workers' partitions; none where they are not known.
    """
    if not nodes:
        return proposal
    largest = max(node.cpus for node in nodes)
    if proposal.data_worker_cpus > largest:
        share = largest / proposal.data_worker_cpus
        scaled = (None if mb is None else math.ceil(mb * share) for mb in (proposal.data_worker_mb, proposal.usual_mb))
        mb, usual_mb = scaled
        number = math.ceil(proposal.data_workers / share)
        proposal = replace(
            proposal, data_workers=number, data_worker_cpus=largest, data_worker_mb=mb, usual_mb=usual_mb
        )
    fitting = [node.memory_mb for node in nodes if node.cpus >= proposal.data_worker_cpus]
    if proposal.data_worker_mb is not None and proposal.usual_mb is not None:
        most_mb = max(max(fitting), proposal.usual_mb)
        proposal = replace(proposal, data_worker_mb=min(proposal.data_worker_mb, most_mb))
    room = sum(node.holds(proposal.data_worker_cpus, proposal.data_worker_mb or 0) for node in nodes)
    return replace(proposal, data_workers=min(proposal.data_workers, room)) if room else proposal


# Jobs that have ended, in an SQLite file of their own: what new submissions are compared with.
#
# `hetstream advise` and `hetstream convert --auto` add what the records of this user's jobs tell, and read it. A user
# has one of his own, or the site names a directory (`HETSTREAM_JOB_HISTORY`, with %u for the user, or one for all). The
# file has mode 0600; an administrator who wants others to read it gives them that right. Where it cannot be written, it
# is only read. Names of users, and directories, in which they often are, are kept as HMAC-SHA256 under a key that lies
# beside it, unless the site says `HETSTREAM_JOB_HISTORY_USERS=plain`.
#
# A job counts once, wherever copies of its record lie: its number and what its record says are what tells it apart, not
# the time of a file. A record that is dated ahead of the clock is kept without a date.
#
# WAL mode with one process at a time (locking_mode=exclusive), so that no memory is shared between hosts: homes are on
# network file systems. A transaction takes milliseconds; others wait for it.

JOB_HISTORY, JOB_HISTORY_USERS = "HETSTREAM_JOB_HISTORY", "HETSTREAM_JOB_HISTORY_USERS"
HISTORY_FILE, KEY_FILE = "job-history.sqlite", "job-history.key"
# A job of a year ago says little of one of today, and the last ten thousand say all that more of them would.
KEEP_S, KEEP_JOBS = 366 * 86400.0, 10_000
# Bytes; one has a few hundred.
_MOST_OF_RECORD = 1 << 20
# What records of older releases do not say of a job.
_NEWER_FIELDS = ("directory", "commands", "files")
_KEY_BYTES = 32


def history_directory(environ: Mapping[str, str]) -> Path:
    """Return where the job history of this user is: what the site or the user says, else in the user's state
    directory.
    """
    pattern = setting(JOB_HISTORY, environ)
    if pattern:
        return for_user(pattern)
    state = environ.get("XDG_STATE_HOME", "")
    return (Path(state) if state.startswith("/") else Path.home() / ".local" / "state") / "hetstream"


def keeps_plain_names(environ: Mapping[str, str]) -> bool:
    """Return whether the site wants users' names as they are."""
    return site_value(JOB_HISTORY_USERS, environ) == "plain"


class JobHistory(DatabaseFile):
    """The file, made where it does not exist.

    Args:
        directory: holds it and the key; made with mode 0700 where it does not exist.
        plain_names: keep names of users as they are.
        keep_s, keep_jobs: what is older, or more, goes when something is added.

    Attributes:
        is_read_only: nothing can be added: the file is somebody else's.
        num_unreadable: records that `jobs` last left out.

    Raises:
        HistoryError: it cannot be used, or is another program's.
    """

    APPLICATION_ID = 0x6865746A  # "hetj"

    def __init__(
        self, directory: Path, *, plain_names: bool = False, keep_s: float = KEEP_S, keep_jobs: int = KEEP_JOBS
    ) -> None:
        super().__init__(directory / HISTORY_FILE, "job history", f"Name another directory in {JOB_HISTORY}")
        self._keep_s, self._keep_jobs = keep_s, keep_jobs
        self._key: bytes | None = None
        self._plain_names = plain_names
        self.is_read_only = False
        self.num_unreadable = 0
        self._open(self._connect, self._prepare)

    def _connect(self) -> sqlite3.Connection:
        self.is_read_only = self.path.exists() and not os.access(self.path, os.W_OK, effective_ids=True)
        if self.is_read_only:
            check_beside(self.path, is_own=False)
            # Without its log beside it, nobody is writing: the file is whole, and read as it is.
            beside = "" if Path(f"{self.path}-wal").exists() else "&immutable=1"
            address = f"{self.path.absolute().as_uri()}?mode=ro{beside}"
            return sqlite3.connect(address, uri=True, timeout=BUSY_TIMEOUT_S, isolation_level=None)
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        create_private(self.path)
        return sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)

    def _prepare(self) -> None:
        if not self.is_read_only:
            self._database.execute("pragma locking_mode=exclusive")
        new = self._is_new()
        if not self.is_read_only:
            self._database.execute("pragma journal_mode=wal")
        if new and not self.is_read_only:
            tables = "jobs (job text not null, ended_s real not null, record text not null, primary key (job, ended_s))"
            self._make(tables)
        if not self._plain_names:
            self._key = self._key_of_place()

    def kept_name(self, name: str) -> str:
        """Return what is kept for a user's name or a directory; "" where the key cannot be read: then it is not
        compared.
        """
        if self._plain_names or not name:
            return name
        digest = hmac.new(self._key, os.fsencode(name), hashlib.sha256) if self._key else None
        return digest.hexdigest()[:32] if digest else ""

    def add(self, jobs: Iterable[PastJob], now_s: float) -> int:
        """Keep jobs, and drop those that are too old or too many; returns how many were new.

        Args:
            jobs: whose features have the user's name and the directory; they are replaced by what is kept for them.
            now_s: in seconds since the epoch.

        Raises:
            HistoryError: it cannot be written.
        """
        if self.is_read_only:
            return 0
        with self._named():
            before = self._count()
            with self._changing():
                for job in jobs:
                    self._add(job, now_s)
                added = self._count() - before
                # By a clock that is a year ahead, all that is kept would be too old.
                (newest_s,) = self._database.execute("select coalesce(max(ended_s), 0) from jobs").fetchone()
                oldest_s = min(now_s, newest_s) - self._keep_s
                self._database.execute("delete from jobs where ended_s < ?", (oldest_s,))
                self._database.execute(
                    "delete from jobs where rowid not in (select rowid from jobs order by ended_s desc, job limit ?)",
                    (self._keep_jobs,),
                )
        return added

    def _add(self, job: PastJob, now_s: float) -> None:
        """Keep one job, unless it is there; of a copy's date and the original's, the earlier counts.

        What was kept by an older release, or before the job's record was whole, is replaced by what says more of it.
        """
        features = msgspec.structs.replace(
            job.features, user=self.kept_name(job.features.user), directory=self.kept_name(job.features.directory)
        )
        is_ahead = job.ended_s > now_s + CLOCKS_DIFFER_S
        kept = msgspec.structs.replace(job, features=features, ended_s=0.0 if is_ahead else job.ended_s)
        row_s = now_s if is_ahead else job.ended_s
        found = self._database.execute(
            "select rowid, ended_s, cast(record as blob) from jobs where job = ?", (job.job,)
        ).fetchall()
        for rowid, found_s, text in found:
            other = _decoded(text)
            if other is None or _told_by(other) != _told_by(kept):
                continue
            says_more = any(getattr(features, name) and not getattr(other.features, name) for name in _NEWER_FIELDS)
            if not says_more and (is_ahead or found_s <= row_s):
                return
            if found_s <= row_s:
                row_s, kept = found_s, msgspec.structs.replace(kept, ended_s=other.ended_s)
            self._database.execute("delete from jobs where rowid = ?", (rowid,))
        text = msgspec.json.encode(kept).decode()
        self._database.execute("insert or ignore into jobs values (?, ?, ?)", (kept.job, row_s, text))

    def jobs(self, now_s: float = math.inf) -> list[PastJob]:
        """Return all that are kept, the oldest first. A damaged record is left out.

        Args:
            now_s: in seconds since the epoch. A later date, which older releases kept, counts as none.

        Raises:
            HistoryError: it cannot be read.
        """
        with self._named():
            # It may be another user's, who puts anything there: the newest count, and no record of megabytes.
            rows = self._database.execute(
                "select cast(case when length(record) <= ? then record else '' end as blob) from jobs "
                "order by ended_s desc, job limit ?",
                (_MOST_OF_RECORD, self._keep_jobs),
            ).fetchall()
        found = [job for (text,) in reversed(rows) if (job := _decoded(text)) is not None]
        self.num_unreadable = len(rows) - len(found)
        # Of a file of an older release, which kept every copy of a record.
        first: dict[tuple[object, ...], PastJob] = {}
        for job in found:
            is_ahead = job.ended_s > now_s + CLOCKS_DIFFER_S
            first.setdefault((job.job, *_told_by(job)), msgspec.structs.replace(job, ended_s=0.0) if is_ahead else job)
        bounded = (within_bounds(job) for job in first.values())
        return sorted((job for job in bounded if job is not None), key=lambda job: (job.ended_s, job.job))

    def _key_of_place(self) -> bytes | None:
        """The key for names, made where there is none: by one process, and whole or not at all.

        A part of one, which a crash has left, has named nobody yet: it is replaced.
        """
        path = self.path.parent / KEY_FILE
        found = _read_key(path)
        if found or found is None or self.is_read_only:
            return found
        with self._changing():
            found = _read_key(path)
            if found == b"":
                found = secrets.token_bytes(_KEY_BYTES)
                with Directory.open(path.parent) as directory:
                    directory.write_whole(path.name, found)
        return found

    def _count(self) -> int:
        (num,) = self._database.execute("select count(*) from jobs").fetchone()
        return int(num)


def _told_by(job: PastJob) -> tuple[object, ...]:
    """What a job's record says of its run, in every release: not where a copy lies, nor when it was written."""
    features = job.features
    return (
        features.name, features.gpus, features.user, features.batch, job.trainer_cpus, job.steps_per_s, job.wait_share,
        job.data_worker_mb, job.limit_share, job.gradient_s, job.update_s, job.embedding_s,
    )  # fmt: skip


def _decoded(text: bytes) -> PastJob | None:
    """A record; None if it is damaged."""
    try:
        return typed_json.decode(text, PastJob)
    except msgspec.MsgspecError:
        return None


def _read_key(path: Path) -> bytes | None:
    """The key for names; empty if there is none that is whole, None if this user may not read it.

    Raises:
        OSError: others could have written it.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except PermissionError:
        return None
    except FileNotFoundError:
        return b""
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_IMODE(status.st_mode) & 0o022 or status.st_uid not in (os.geteuid(), 0):
            raise PermissionError(1, f"others can write to {path}, which holds the key for names", str(path))
        found = file.read(_KEY_BYTES)
    return found if len(found) == _KEY_BYTES else b""


# How long jobs like a new one run, as a share of their time limit: (job, past jobs) -> `UsualLength`. Pure.

# What one past job says of the next is wrong by a factor of two as often as not; a few that agree are not exact either.
_SIGMA_OF_ONE, _LEAST_SIGMA, _LARGEST_SIGMA = 0.7, 0.3, 1.4
# A job that failed at once says nothing of a length.
_LEAST_SHARE = 1e-4


def usual_length(new: Features, past: Sequence[PastJob]) -> UsualLength | None:
    """Return what follows from the most similar past jobs of which it is known; None if there are none."""
    known = [job for job in past if job.limit_share is not None and _LEAST_SHARE <= job.limit_share <= 1]
    shares = [job.limit_share for job in most_alike(new, known) if job.limit_share is not None]
    if not shares:
        return None
    sigma = stdev(map(math.log, shares)) if len(shares) > 1 else _SIGMA_OF_ONE
    usual = math.exp(smoothed([math.log(share) for share in without_outliers(shares)]))
    return UsualLength(min(1.0, usual), min(max(sigma, _LEAST_SIGMA), _LARGEST_SIGMA), len(shares))
