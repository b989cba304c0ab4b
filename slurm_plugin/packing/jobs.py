"""The jobs that the packer serves, and what became of those that it has placed. Pure.

All that the packer remembers stands in Slurm, so this is also how it finds its way after it died at any point:

| it died                    | what it finds                               | what follows                            |
|----------------------------|---------------------------------------------|-----------------------------------------|
| before the update          | a held job                                  | it waits                                |
| between update and release | a held job with a place                     | it waits; the next update replaces that |
| between release and start  | a pending job with a place                  | it starts, or is held again in time     |
| while it runs              | a running job with a place                  | it is compared with what Slurm gave it  |
| between requeue and note   | a held job with a place of an earlier start | it is noted as evicted                  |

A slurmctld that is killed forgets what it has not written down, which takes it up to 5 s. If it forgets a place and
hears the release, there is a job without a place that is not held: it is taken back. So is whoever came past the guard.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

from hetstream.base.text import printable
from hetstream.slurm_plugin.client.model import SHARING, Gres, Job, Node, Snapshot
from hetstream.slurm_plugin.client.packing_slurm import JobNotes
from hetstream.slurm_plugin.client.read import release_of
from hetstream.slurm_plugin.client.slurm_units import alternatives, compress, meets
from hetstream.slurm_plugin.packing.notes import (
    EvictedRecord,
    GpuWish,
    PackingRecord,
    held_at,
    is_guarded,
    is_held_by_operator,
    is_held_by_owner,
    read_record,
    says_place,
    wish_of,
)
from hetstream.slurm_plugin.packing.state import PackingRules, WaitingJob

GRES = "opp"
_TYPE = re.compile(r"p(\d{1,3})")
_REQUEUED_AND_HELD = re.compile("job_requeued_in_held_state")
_HELD = re.compile(rf"JobHeld(User|Admin)|{_REQUEUED_AND_HELD.pattern}")
_HELD_BY_OPERATOR = re.compile("JobHeldAdmin")
_HELD_BY_NOBODY = re.compile(r"None|Priority|Cleaning|Dependency|BeginTime")
_FAILED = re.compile(r"launch_failed_requeued_held|JobHoldMaxRequeue|JobLaunchFailure")
# Most pending tasks of an array that are looked at.
_MOST_TASKS = 16
# Older releases (22.05 was tried) keep a GRES that a job asks for no more, with a count of 0: the job then starts only
# where at least one of it is free.
_FIRST_THAT_FORGETS = (24, 11)
# A clock that is set back by less is waited for.
_CLOCK_S = 60.0


@dataclass(frozen=True, slots=True)
class OpportunisticJob:
    """One job of the partitions that the packer serves.

    Attributes:
        name: by which Slurm's commands and people call it; of an array's task `33_4`.
        job: Slurm's record.
        wish: what its owner asks for.
        record: what the packer has written.
        notes: whatever else Slurm has.
        others: partitions that it names and that the packer does not serve.
    """

    name: str
    job: Job
    wish: GpuWish
    record: PackingRecord
    notes: JobNotes
    others: tuple[str, ...] = ()

    @property
    def is_held(self) -> bool:
        """Whether it waits for a release."""
        reason = self.job.reason.replace(" ", "_")
        return self.job.is_pending and (self.job.priority == 0 or bool(_HELD.match(reason)))

    @property
    def has_gres(self) -> bool:
        """Whether it asks for a GPU that the packer chose before."""
        return any(gres.name == GRES for gres in self.job.gres_asked)

    @property
    def whole_name(self) -> str:
        """By which it is held and requeued: Slurm does that to no component of a heterogeneous job alone."""
        return str(self.job.het.het_job_id) if self.job.het else self.name


@dataclass(frozen=True, slots=True)
class Settlement:
    """A job that is no longer where it was placed, and is to wait again.

    Attributes:
        record: what is to stand in its AdminComment.
        is_kept: somebody has held it, who is to release it.
        word: the reason in few words, for its Comment; empty: it has been where it was placed.
    """

    job: OpportunisticJob
    record: PackingRecord
    reason: str
    is_kept: bool = False
    word: str = ""


def served_jobs(
    snapshot: Snapshot, notes: Mapping[int, JobNotes], partitions: Collection[str], now_s: float
) -> list[OpportunisticJob]:
    """Return the jobs that run in these partitions, or may start there. Who came between two questions to Slurm is seen
    the next time.

    Args:
        snapshot: of Slurm.
        notes: see `PackingSlurm`.
        partitions: of the jobs.
        now_s: the time, in seconds since the epoch.
    """
    found = []
    for job in snapshot.jobs:
        if not set(job.partitions).isdisjoint(partitions) and job.job_id in notes:
            of_job = notes[job.job_id]
            record = _with_known_times(read_record(of_job.admin_comment), now_s)
            others = tuple(name for name in job.partitions if name not in partitions)
            named = OpportunisticJob(job.label, job, wish_of(job.comment), record, of_job, others)
            # Tasks that have a place are records of their own. Others that nobody holds are to be held all at once.
            names = task_names(job) if named.is_held else [record_name(job)]
            found += [replace(named, name=name) for name in names]
    return found


def _with_known_times(record: PackingRecord, now_s: float) -> PackingRecord:
    """A record without times to come: when it was written the clock was wrong, and nobody waits until that is right."""
    placed, gone, given_up = record.placed, record.evicted, record.given_up
    if given_up and given_up.at_s > now_s + _CLOCK_S:
        record = replace(record, given_up=replace(given_up, at_s=0.0))
    if placed and placed.at_s > now_s + _CLOCK_S:
        record = replace(record, placed=replace(placed, at_s=0.0))
    if gone and gone.at_s > now_s + _CLOCK_S:
        record = replace(record, evicted=replace(gone, at_s=0.0))
    return record


def evicted(job: OpportunisticJob, now_s: float, rules: PackingRules, *, rests: bool = True) -> PackingRecord:
    """Return what is to be written of a job that is taken from its place.

    Args:
        job: which.
        now_s: seconds since 1970.
        rules: for packing.
        rests: its GPUs take nobody for a while.
    """
    placed, before = job.record.placed, job.record.evicted
    if placed is None:
        return job.record
    is_old = before is None or now_s - before.at_s > 2 * rules.longest_delay_s
    count = 1 if is_old or before is None else before.count + 1
    gone = EvictedRecord(count, now_s, placed.place if rests else None)
    return replace(job.record, placed=None, evicted=gone, upgraded=None, given_up=None, taking=False, limit="")


def is_cut_short(job: OpportunisticJob) -> bool:
    """Return whether Slurm has started a job with a shorter time limit than its own, to have it end before a planned
    start.
    """
    limit, now_s = job.record.limit, job.job.time_limit_s
    return bool(limit) and now_s is not None and (not limit.isdigit() or now_s < int(limit) * 60)


def settlement_of(job: OpportunisticJob, now_s: float, rules: PackingRules) -> Settlement | None:
    """Return what became of a job that waits although it was placed, or starts although it was not; None if nothing
    did.
    """
    placed = job.record.placed
    if placed is None:
        return _let_go(job)
    if not job.job.is_pending:
        return None
    # Whatever else brings a job back, its owner can bring about (scontrol requeue, a later StartTime).
    after = evicted(job, now_s, rules, rests=job.record.taking or bool(why_it_failed(job.job)))
    if (
        job.job.num_restarts > placed.num_restarts
        and job.is_held
        and not job.record.taking
        and not why_it_failed(job.job)
    ):
        # Slurm holds a requeued job only if it is told to, and the packer writes down before that it will.
        return Settlement(job, after, "somebody requeued and held it (scontrol requeuehold)", is_kept=True)
    if job.job.num_restarts > placed.num_restarts:
        return Settlement(job, after, "it was requeued, and waits for a place again")
    # Also if its owner had it begin later meanwhile: otherwise it would keep its GPUs from others until then.
    if not job.is_held and now_s > placed.at_s + rules.start_s:
        return Settlement(job, after, f"Slurm did not start it within {rules.start_s:.0f} s ({job.job.reason})")
    return None


def _let_go(job: OpportunisticJob) -> Settlement | None:
    """A job that runs without a place, or is about to; None if it is none.

    Nothing but Slurm's word counts: the partition, and an AdminComment, which administrators alone write. So the guard
    may be absent, old or tricked, and whoever gives a job a GPU by hand writes the packer's note.
    """
    is_there = job.job.is_pending or job.job.holds_resources
    if not is_there or job.is_held:
        return None
    record, has_gpus = replace(job.record, taking=False), takes_gpus(job.job)
    if is_guarded(job.notes.admin_comment) and not has_gpus:
        reason = (
            "it was released without a place: by hand, or slurmctld was killed before it had written the place down"
        )
        return Settlement(job, record, reason, word="it was released without a place")
    word = f"it {'was to start' if job.job.is_pending else 'ran'} without a place"
    gpus = ", with GPUs of Slurm's own" if has_gpus else ""
    seen = "got round job_submit.lua" if is_guarded(job.notes.admin_comment) else "was not seen by job_submit.lua"
    return Settlement(job, record, f"{word}{gpus}: it {seen}", word=word)


def who_holds(job: Job, name: str) -> str:
    """Return who else holds a held job than the guard and the packer, and how it goes on; empty if nobody does.

    The packer holds by `uhold` and `requeuehold`, and Slurm calls neither an operator's.
    """
    if _HELD_BY_OPERATOR.match(job.reason.replace(" ", "_")) or is_held_by_operator(job.comment):
        return f"an operator holds it, who hands it back by: scontrol uhold {name}"
    if is_held_by_owner(job.comment):
        return f"its owner holds it, who lets it wait for its turn by: scontrol release {name}"
    return ""


def is_requeued_and_held(job: Job) -> bool:
    """Return whether somebody had a guaranteed job requeued and held, which is no word of its Comment yet: no guard
    hears of it, and the packer does it to opportunistic jobs alone.
    """
    is_so = job.is_pending and bool(_REQUEUED_AND_HELD.match(job.reason.replace(" ", "_")))
    return is_so and job.num_restarts > held_at(job.comment)


def waiting_job(job: OpportunisticJob, snapshot: Snapshot, now_s: float, rules: PackingRules) -> WaitingJob:
    record, num_nodes = job.job, max(1, job.job.num_nodes)
    gone = job.record.evicted
    return WaitingJob(
        job.name,
        record.submit_s or 0.0,
        num_nodes,
        job.wish.gpus,
        job.wish.gpu_bytes,
        -(-record.num_cpus // num_nodes),
        -(-record.memory_mb // num_nodes),
        not_before_s=gone.at_s + rules.delay_s(gone.count) if gone else 0.0,
        only_nodes=_only_nodes(job, snapshot),
        closed=_closed_job(job, now_s) or _why_nowhere(job, snapshot),
        reservations=record.reservations,
    )


def why_it_failed(job: Job) -> str:
    """Return why Slurm itself holds a job that it could not start; empty if it does not. Released again and again, it
    would close one node after the other: Slurm drains a node where a Prolog fails.
    """
    if not _FAILED.match(job.reason.replace(" ", "_")):
        return ""
    return f"Slurm could not start it ({job.reason}). An operator looks at slurmd's log, and releases it"


def why_slurm_holds(job: Job) -> str:
    """Return why Slurm itself holds a job, such as one that no node can have (BadConstraints); empty if it does not.

    Of others that are held its reason is that somebody holds them (job_scheduler.c, job_independent).
    """
    reason = job.reason.replace(" ", "_")
    if job.priority != 0 or _HELD.match(reason) or _HELD_BY_NOBODY.match(reason):
        return ""
    return (
        f"Slurm holds it, and says that it cannot start ({printable(job.reason)}). scancel it, and submit it with what "
        "a node has. If nodes have changed, an operator releases it"
    )


def fits_no_partition(job: Job) -> bool:
    """Return whether a job that was let go cannot start as its partition is, by Slurm's word (WAIT_PART_CONFIG)."""
    return job.is_pending and job.priority != 0 and job.reason == "PartitionConfig"


def _closed_job(job: OpportunisticJob, now_s: float) -> str:
    """Why a job is not placed wherever there is room; empty if it is."""
    record = job.job
    if record.het:
        return "it is a component of a heterogeneous job, whose start cannot be chosen. Submit it as a job of its own"
    if job.others:
        return f"it names partition {','.join(job.others)}, too, whose jobs are guaranteed. scancel it, and name one"
    if takes_gpus(record) or record.exclusive == "NODE":
        asks = "GPUs of Slurm's own" if takes_gpus(record) else "whole nodes"
        return f"it asks for {asks}, and the packer chooses the GPUs here. scancel it, and submit it without"
    if holds := who_holds(record, job.name):
        return holds
    if job.wish.problem:
        return job.wish.problem
    if not job.notes.can_be_requeued:
        return "nobody could take it off a GPU again, because it cannot be requeued. Submit it with --requeue"
    if failed := why_it_failed(record):
        return failed
    if record.dependency:
        return f"it waits for {record.dependency}"
    if record.eligible_s is not None and record.eligible_s > now_s:
        return f"it may begin in {record.eligible_s - now_s:.0f} s: its --begin, or two minutes after it was requeued"
    return ""


def _only_nodes(job: OpportunisticJob, snapshot: Snapshot) -> frozenset[str]:
    """The nodes that a job may have; empty for all."""
    asked = job.record.nodelist if job.record.placed or job.record.evicted else job.job.required_nodes
    found = {node.name for node in snapshot.nodes if not set(node.partitions).isdisjoint(job.job.partitions)}
    if asked:
        found &= {*asked}
    if choices := alternatives(job.job.features):
        found &= {node.name for node in snapshot.nodes if any(meets(choice, node.features) for choice in choices)}
    found -= {*job.job.excluded_nodes}
    found = {node.name for node in snapshot.nodes if node.name in found and _has_spare(node, job, snapshot)}
    return frozenset(found) or frozenset({"no node"})


def keeps_gres(snapshot: Snapshot) -> bool:
    """Return whether this Slurm keeps a GRES that a job asks for no more."""
    return release_of(snapshot.version) < _FIRST_THAT_FORGETS


def _has_spare(node: Node, job: OpportunisticJob, snapshot: Snapshot) -> bool:
    """Whether one of each GRES that a job once asked for is free on a node, where Slurm insists on that."""
    if not job.record.asked or not keeps_gres(snapshot):
        return True
    slots, used = slots_of(node.gres), slots_of(node.gres_used)
    free = {f"p{index}" for index, count in slots.items() if count > used[index]}
    return job.record.asked <= free | ({"gpu"} if node.gpus_free() else set())


def _why_nowhere(job: OpportunisticJob, snapshot: Snapshot) -> str:
    if any(_has_spare(node, job, snapshot) for node in snapshot.nodes):
        return ""
    names = ", ".join(sorted(job.record.asked))
    return f"Slurm {snapshot.version} starts it only where what it asked for before is free as well: {names}"


def wrong_place(job: OpportunisticJob, got: tuple[Gres, ...] | None) -> str:
    """Return what of a running job is not as it was placed; empty if all is.

    Args:
        job: with a place.
        got: the GRES that Slurm gave it; None where that is in doubt.
    """
    assert job.record.placed is not None
    place = job.record.placed.place
    if set(job.job.nodes) != {*place.nodes}:
        return f"it runs on {compress(job.job.nodes)}, and was placed on {compress(place.nodes)}"
    if got is None:
        return "what Slurm gave it is in doubt: its record does not say it, or says it twice"
    wanted, found = dict.fromkeys(place.indices, len(place.nodes)), slots_of(got)
    if dict(found) != wanted or any(gres.name == "gpu" for gres in got):
        names = ", ".join(f"{gres.name}:{gres.type}:{gres.count}" for gres in got) or "nothing"
        return f"Slurm gave it {names}, and it was placed on GPU {','.join(map(str, place.indices))}"
    if not says_place(job.job.comment, place):
        return "its Comment, from which the node's Prolog reads the GPU, is not as it was written"
    return ""


def slots_of(gres: Iterable[Gres]) -> Counter[int]:
    """Opportunistic jobs by number of the GPU: what a node has room for, or has.

    22.05 also lists what a job had at its start before, with 0.
    """
    found = Counter[int]()
    for resource in gres:
        kind = _TYPE.fullmatch(resource.type) if resource.name == GRES else None
        if kind and resource.count:
            found[int(kind[1])] += resource.count
    return found


def takes_gpus(job: Job) -> bool:
    """Return whether a job has GPUs or shares of them, or asks for some."""
    return any(job.count(name) for name in ("gpu", *SHARING))


def record_name(job: Job) -> str:
    """Return how commands call a record with all of its tasks: `33_[3-900]` of `33_[3-900%2]`."""
    return re.sub(r"%\d+(?=\]$)", "", job.label)


def task_names(job: Job) -> list[str]:
    """Return how commands call a record, or the first tasks that it stands for."""
    if job.array_job_id is None or job.het:
        return [job.label]
    tasks = []
    for part in job.array_tasks.split("%")[0].split(","):
        bounds, _, step = part.partition(":")
        first, _, last = bounds.partition("-")
        if first.isdigit() and (last or first).isdigit() and (step or "1").isdigit():
            numbers = range(int(first), int(last or first) + 1, max(1, int(step or 1)))
            tasks += [f"{job.array_job_id}_{number}" for number in numbers[:_MOST_TASKS]]
    return tasks[:_MOST_TASKS]
