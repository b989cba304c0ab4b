"""The past jobs that are most like a new one, and what follows for it (DLRover-RM, algorithm 1). Pure.

Jobs are alike if they run the same; `_may_be_alike` says what that is. How much so is told by directory, data, GPUs,
batch and user, as far as these are known of both. The configurations of the most similar ones are smoothed
exponentially, so that the most similar one counts most; data workers are counted by GPU, as a job with twice the GPUs
takes twice the batches. A larger batch takes longer for its gradients and its embeddings, and no longer for the update
(DLRover-RM, 4.1). So a GPU then takes more samples a second: T_grad, T_emb and T_upd of the past job say how many.

No single job decides, once there are three: of data workers, what is far from the median is replaced by it before they
are smoothed (`without_outliers`), their size is the most frequent, and of memory and trainer CPUs, of which too few
harm a job, the most counts, but for a value that is more than twice all others (`usual_most`). A job that waited for
data with the data workers that it had says "at least", never "enough".
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from statistics import median

from hetstream.hetjob.ports import NodeSize
from hetstream.slurm_plugin.model.past_job import Features, PastJob

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
# A job that waited this share of its time needed so many times its data workers, if loading was all it waited for.
# With less of them to go by, a larger factor would be a guess.
_MOST_WAIT_SHARE = 0.75
# Of fewer jobs nobody knows which one is wrong.
_FEW = 3
# A value that is so many times the next one is its job's alone.
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
    """The past jobs that are alike, the most similar one last; of those that are about as similar the newest."""
    # Features are compared once: a history has few of them and many jobs.
    known: dict[Features, float] = {}
    for job in past:
        if job.features not in known:
            known[job.features] = likeness(new, job.features)
    found = [job for job in past if known[job.features] >= LEAST_LIKENESS]
    return sorted(found, key=lambda job: (round(known[job.features], 1), job.ended_s, job.job))[-top:]


def without_outliers(values: Sequence[float]) -> list[float]:
    """The values; the median replaces what is beyond twice or half of it. Of two nobody knows which is wrong."""
    middle = median(values) if values else 0.0
    is_far = (value > _OUTLIER * middle or value * _OUTLIER < middle for value in values)
    return list(values) if len(values) < _FEW else [middle if far else v for v, far in zip(values, is_far, strict=True)]


def usual_most(values: Iterable[float]) -> float | None:
    """The greatest value, unless it is the only one of at least three that is so great; None if there is none.

    For what harms a job if it is too little: four of five jobs had no more, and mostly all five.
    """
    found = sorted(values)
    if len(found) >= _FEW and found[-1] > _OUTLIER * found[-2]:
        return found[-2]
    return found[-1] if found else None


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
    """Samples in a batch of this user's newest job that runs the same; 0: not known.

    A script is mostly submitted as before.
    """
    own = (job for job in past if new.user and job.features.user == new.user and _may_be_alike(new, job.features))
    newest = max(own, key=lambda job: (job.ended_s, job.job), default=None)
    return newest.features.batch if newest else 0


def pace(new: Features, job: PastJob) -> float:
    """Samples a second of a GPU with the new job's batch, by those of a past job; 1 where one of them is not known."""
    if not (new.batch and job.features.batch and job.gradient_s and job.update_s):
        return 1.0
    larger = new.batch / job.features.batch
    grows_s = job.gradient_s + (job.embedding_s or 0.0)
    return larger * (grows_s + job.update_s) / (grows_s * larger + job.update_s)


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
    needed = [_needed_cpus(new, job) for job in alike]
    enough = [need for need, job in zip(needed, alike, strict=True) if job.had_enough]
    # Who had too few says "at least", which is no reason to expect less than others needed.
    floor = median(enough) if enough else 0.0
    needed = [need if job.had_enough else max(need, floor) for need, job in zip(needed, alike, strict=True)]
    return smoothed(without_outliers(needed)) * gpus / (cpus or alike[-1].data_worker_cpus) + 0.5


def _needed_cpus(new: Features, job: PastJob) -> float:
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
    return pace(new, job) * number * job.data_worker_cpus / max(1, job.features.gpus)


def propose(new: Features, past: Sequence[PastJob]) -> Proposal | None:
    """What follows from the most similar past jobs; None if there is none."""
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
        f"{len(alike)} past job(s) like it ({', '.join(names)}); the most similar, job {last.job}, had "
        f"{last.data_workers} data worker(s) of {last.data_worker_cpus} CPUs for {last.features.gpus} GPU(s) at work, "
        f"and waited {last.wait_share:.0%} of the time"
    )
    if num_starved := sum(not job.had_enough for job in alike):
        which = "which" if len(alike) == 1 else f"{num_starved} of the {len(alike)} waited so much that what they had"
        reason += f": {which} was not enough"
    if round(faster := pace(new, last), 2) != 1:
        batches = f"in batches of {new.batch} as of {last.features.batch}"
        reason += f"; a GPU takes {faster:.3g} times as many samples {batches}"
    return reason


def within_nodes(proposal: Proposal, nodes: Sequence[NodeSize]) -> Proposal:
    """The proposal as far as nodes have room for it.

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
