"""The site's file of quotas: checked at the start, read again when it changes, and the last good one kept."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hetstream.base.text import count_words
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.hetjob.site.messages import GpuNow, ShowGpus
from hetstream.slurm_plugin.client.model import Gres, Job, Snapshot
from hetstream.slurm_plugin.client.packing_slurm import JobNotes
from hetstream.slurm_plugin.errors import QuotaError
from hetstream.slurm_plugin.packing.jobs import (
    OpportunisticJob,
    is_requeued_and_held,
    record_name,
    takes_gpus,
    task_names,
    who_holds,
    why_it_failed,
    why_slurm_holds,
)
from hetstream.slurm_plugin.packing.notes import (
    OWN_MARKS,
    granted_gpus,
    held_for,
    is_guarded,
    opportunistic_after_s,
    took_gpus,
    upgrades,
    wants_guarantee,
)
from hetstream.slurm_plugin.packing.quota import (
    Excess,
    QuotaAction,
    QuotaDecision,
    QuotaJob,
    Quotas,
    QuotaSite,
    decide,
    excesses,
    read_quotas,
)
from hetstream.slurm_plugin.packing.state import PackingRules

_log = logging.getLogger(__name__)
# More is no list of tenants.
_MOST_BYTES = 1 << 20


class QuotaFile:
    """A file that an administrator may write anew at any time.

    Args:
        path: of it.
        opportunistic: partitions that no quota can name.
        accounts: of a cluster; None where it has no accounting.
    """

    def __init__(
        self,
        path: Path,
        opportunistic: Collection[str],
        accounts: Callable[[Snapshot], Collection[str] | None],
    ) -> None:
        self._path, self._opportunistic, self._accounts = path, frozenset(opportunistic), accounts
        self._text: bytes | None = None
        self._quotas = Quotas()
        self._problem = ""

    def first(self, snapshot: Snapshot) -> Quotas:
        """Read it.

        Raises:
            QuotaError: it cannot be read, or cannot be kept in this cluster.
        """
        text = self._read()
        self._quotas, self._text = self._checked(text, snapshot), text
        return self._quotas

    def now(self, snapshot: Snapshot) -> Quotas:
        """Return the quotas that hold: those of the file, or the last good ones, which is said once."""
        try:
            text = self._read()
            if text != self._text:
                self._quotas = self._checked(text, snapshot)
                self._text = text
                _log.info("quotas of %s hold from now on", self._path)
            self._problem = ""
        except QuotaError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                _log.warning("the quotas before hold further: %s", error)
        return self._quotas

    def _read(self) -> bytes:
        try:
            # A pipe or a device has no end.
            with open(os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                    raise QuotaError(f"{self._path}: the quotas cannot be read: it is no ordinary file")
                text = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise QuotaError(f"{self._path}: the quotas cannot be read: {error.strerror}") from error
        if len(text) > _MOST_BYTES:
            raise QuotaError(f"{self._path}: more than {_MOST_BYTES:,} bytes are no table of quotas")
        return text

    def _checked(self, text: bytes, snapshot: Snapshot) -> Quotas:
        try:
            accounts = self._accounts(snapshot)
        except SlurmCommandError as error:
            raise QuotaError(f"{self._path}: which accounts there are cannot be found out: {error}") from error
        return read_quotas(str(self._path), text, quota_site(snapshot, self._opportunistic, accounts))


def quota_site(snapshot: Snapshot, opportunistic: Collection[str], accounts: Collection[str] | None) -> QuotaSite:
    """Return what a cluster has, for `read_quotas`."""

    def num_gpus(partitions: Collection[str]) -> int:
        return sum(node.gpus for node in snapshot.nodes if not set(partitions).isdisjoint(node.partitions))

    exclusive = [partition.name for partition in snapshot.partitions if partition.is_exclusive]
    names = [partition.name for partition in snapshot.partitions]
    return QuotaSite(num_gpus, names, opportunistic, exclusive, accounts)


# The jobs that have or want quota, of Slurm's records, and what becomes of each: (snapshot, quotas) -> a view. Pure.
#
# Guaranteed are the jobs with GPUs in the partitions that the quotas name; the guard holds them there, and the packer
# releases who is within its tenant's quota. In the same line stand opportunistic jobs whose owners would rather have a
# guaranteed one (`hetstream:class=guaranteed` in the Comment). Slurm's books say which GPUs are taken.

# Tenant of a job without an account: nobody gives it quota.
NO_ACCOUNT = "(no account)"
_GPU = "gpu"
_UNCOUNTED = "its record does not say how many GPUs it asks for. scancel it, and submit it with --gpus=N"


@dataclass(frozen=True)
class QuotaView:
    """Who has quota, who waits for it, and the packer's own jobs.

    Attributes:
        quotas: of the tenants.
        decisions: in the order in which they are to be carried out.
        reasons: why others wait that are in no line, by name.
        guaranteed: jobs of the partitions with quotas, by name.
        admin_comments: of these; who has none came between two questions to Slurm.
        excesses: those that run with more GPUs than they were granted.
        unguarded: jobs that the guard would have held or refused, by name, and why: it was not in place, or has a hole.
        placeholders: the packer's jobs that keep a GPU for an opportunistic one.
        upgraders: the packer's jobs whose Prologs are to make another one guaranteed just now.
        free_gpus: that no guaranteed job has.
    """

    quotas: Quotas
    decisions: tuple[QuotaDecision, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)
    guaranteed: Mapping[str, Job] = field(default_factory=dict)
    admin_comments: Mapping[str, str] = field(default_factory=dict)
    excesses: tuple[Excess, ...] = ()
    unguarded: Mapping[str, tuple[Job, str]] = field(default_factory=dict)
    placeholders: tuple[Job, ...] = ()
    upgraders: tuple[Job, ...] = ()
    free_gpus: int = 0


@dataclass(frozen=True)
class Tenants:
    """Whose quotas hold, and whose jobs may keep GPUs for others.

    Attributes:
        quotas: of the tenants.
        packer_uid: number of the packer's user; None where it is not known, and the guard is relied on.
        notes: in the jobs of their partitions; empty: whom the guard has seen is not looked at.
        opportunistic_qos: QOS whose jobs have no GPUs of Slurm's own, in any case.
        refused: what Slurm has refused lately to do to a job, by name: meanwhile its quota is for others.
    """

    quotas: Quotas = Quotas()  # noqa: RUF009
    packer_uid: int | None = None
    notes: Mapping[int, JobNotes] = field(default_factory=dict)
    opportunistic_qos: frozenset[str] = frozenset()
    refused: Mapping[str, str] = field(default_factory=dict)

    def is_own(self, job: Job) -> bool:
        """Return whether a job is the packer's: whoever else writes such a Comment has an ordinary job."""
        return None in (self.packer_uid, job.uid) or job.uid == self.packer_uid

    def note_of(self, job: Job) -> str | None:
        """Return the AdminComment of a job, that of its leader if it is heterogeneous; None where nobody has
        read it.
        """
        notes = self.notes.get(job.het.het_job_id if job.het else job.job_id)
        return notes.admin_comment if notes else None

    def unguarded(self, snapshot: Snapshot) -> Iterator[Job]:
        """Yield jobs of the partitions with quotas, and of opportunistic QOS, that the guard has not seen, but for
        root's and the packer's own.
        """
        return (
            job for job, notes in self._noted(snapshot) if self._is_users(job) and not is_guarded(notes.admin_comment)
        )

    def guarded(self, snapshot: Snapshot) -> Iterator[Job]:
        """Yield those of partitions with quotas that it has seen with GPUs."""
        return (
            job for job, notes in self._noted(snapshot) if self._has_quotas(job) and is_guarded(notes.admin_comment)
        )

    def past_the_guard(self, snapshot: Snapshot) -> Iterator[tuple[Job, str]]:
        """Yield jobs that the guard would have held, or refused, and why."""
        for job, notes in self._noted(snapshot):
            is_seen, has_gpus, qos = is_guarded(notes.admin_comment), takes_gpus(job), self._qos_of(job, snapshot)
            if not self._is_users(job):
                continue
            if qos and has_gpus and (not is_seen or job.is_running or job.priority != 0):
                yield job, f"it has GPUs of Slurm's own, and QOS {qos} is opportunistic"
            elif qos and not is_seen:
                yield job, f"QOS {qos} is opportunistic, and job_submit.lua has not seen it"
            elif has_gpus and not is_seen and self._has_quotas(job):
                yield job, "it has GPUs where they have quotas, and job_submit.lua has not seen it"

    def partitions(self, snapshot: Snapshot) -> frozenset[str]:
        """Return all whose jobs are looked at."""
        by_qos = (name for job in snapshot.jobs if self._qos_of(job, snapshot) for name in job.partitions)
        return frozenset((*self.quotas.partitions, *by_qos))

    def _has_quotas(self, job: Job) -> bool:
        return not set(self.quotas.partitions).isdisjoint(job.partitions)

    def _is_users(self, job: Job) -> bool:
        return job.uid not in (0, self.packer_uid)

    def _qos_of(self, job: Job, snapshot: Snapshot) -> str:
        """The opportunistic QOS of a job, its own or its partition's; empty if it has none. Slurm's names have no case
        (assoc_mgr.c).
        """
        if not self.opportunistic_qos:
            return ""
        named = [*job.qos.split(","), *(part.qos for part in snapshot.partitions if part.name in job.partitions)]
        return next((name for name in named if name.lower() in self.opportunistic_qos), "")

    def _noted(self, snapshot: Snapshot) -> Iterator[tuple[Job, JobNotes]]:
        for job in snapshot.jobs:
            if job.state != "COMPLETING" and (self._has_quotas(job) or self._qos_of(job, snapshot)):
                notes = self.notes.get(job.job_id)
                if notes is not None:
                    yield job, notes


def quota_view(
    snapshot: Snapshot,
    jobs: Collection[OpportunisticJob],
    readings: ShowGpus | None,
    tenants: Tenants,
    now_s: float,
    rules: PackingRules | None = None,
) -> QuotaView:
    """Decide on all jobs that have or want quota.

    Args:
        snapshot: of Slurm.
        jobs: opportunistic ones, see `served_jobs`.
        readings: what nodes told of their GPUs; None: nobody knows.
        tenants: with quotas.
        now_s: the time, in seconds since the epoch.
        rules: other than the usual ones.
    """
    quotas = tenants.quotas
    own = [job for job in snapshot.jobs if job.comment.startswith(OWN_MARKS) and tenants.is_own(job)]
    placeholders = tuple(job for job in own if held_for(job.comment) is not None and job.state != "COMPLETING")
    upgraders = tuple(job for job in own if upgrades(job.comment) is not None)
    numbers = {job.job_id for job in own}
    guaranteed = {name: job for name, job in _guaranteed(snapshot, quotas).items() if job.job_id not in numbers}
    admin_comments = {name: note for name, job in guaranteed.items() if (note := tenants.note_of(job)) is not None}
    reasons, line, problems = dict[str, str](), list[QuotaJob](), dict[str, str]()
    for name, job in guaranteed.items():
        why = _not_in_line(name, job, now_s) or _why_not_inside(job, snapshot)
        if job.is_pending and (why or (job.priority == 0 and name in tenants.refused)):
            reasons[name] = why or tenants.refused[name]
            continue
        problems[name] = why_not_opportunistic(job)
        wanted = _guaranteed_job(name, job, admin_comments.get(name, ""))
        line.append(replace(wanted, is_reserved=_is_inside(job, snapshot)))
    seen = SeenGpus(readings, now_s, rules or PackingRules())
    # Who has become guaranteed has quota, whatever his Comment says by now.
    wishing = [
        job
        for job in jobs
        if (wants_guarantee(job.job.comment) and not job.job.het and not _is_kept(job)) or is_upgraded(job)
    ]
    line += [_opportunistic_job(job, seen) for job in wishing]
    upgraded = {job.job.job_id for job in wishing if is_upgraded(job)}
    free_gpus = _free_gpus(snapshot, quotas, placeholders, upgraded)
    free_gpus -= sum(job.gpus for job in line if _takes_gpus(guaranteed, job))
    decisions = decide(quotas, line, free_gpus, now_s)
    served = {job.job.job_id for job in jobs}  # what is amiss with these is known already
    unguarded = {
        str(job.het.het_job_id) if job.het else record_name(job): (job, why)
        for job, why in tenants.past_the_guard(snapshot)
        if job.job_id not in served
    }
    for job in tenants.guarded(snapshot):
        if job.is_pending and job.priority == 0 and not job.count(_GPU):
            reasons |= dict.fromkeys(set(_names(job)) - guaranteed.keys(), _UNCOUNTED)
    return QuotaView(
        quotas, tuple(_possible(decision, problems) for decision in decisions), reasons, guaranteed, admin_comments,
        excesses(quotas, line), unguarded, placeholders, upgraders, max(0, free_gpus),
    )  # fmt: skip


def _names(job: Job) -> list[str]:
    """By which Slurm's commands concern all of a job: nobody requeues or holds one component of a heterogeneous job."""
    if job.het:
        return [str(job.het.het_job_id)]
    return task_names(job) if job.is_pending else [job.label]


def why_not_opportunistic(job: Job) -> str:
    """Return why a guaranteed job could not start as an opportunistic one; empty if it could."""
    if job.het:
        return "it is a heterogeneous job"
    if job.count(_GPU) % max(1, job.num_nodes):
        return f"it asks for {job.count(_GPU)} GPUs on {job.num_nodes} nodes, and shared GPUs are as many on each"
    if any(gres.name == _GPU for gres in job.gres_per_task):
        return "it asks for GPUs by task (--gpus-per-task): write --gpus-per-node"
    if job.cpus_per_gpu:
        return "it asks for CPUs by GPU (--cpus-per-gpu): write --cpus-per-task"
    return ""


def gpus_of_a_node(job: Job) -> int:
    """Return how many GPUs a job that could start as an opportunistic one needs on each of its nodes."""
    return max(1, job.count(_GPU) // max(1, job.num_nodes))


def is_upgraded(job: OpportunisticJob) -> bool:
    """Return whether it became guaranteed in this start, by the packer's note."""
    upgraded = job.record.upgraded
    return upgraded is not None and upgraded.is_done and _is_of_this_start(job)


def is_being_upgraded(job: OpportunisticJob) -> bool:
    """Return whether its nodes may call it guaranteed at any time, or do already."""
    upgraded = job.record.upgraded
    return upgraded is not None and not upgraded.is_done and _is_of_this_start(job)


def why_not_upgraded(job: OpportunisticJob) -> str:
    """Return why its upgrade was given up when that was tried last in this start; empty if it was not."""
    gone = job.record.given_up
    is_now = gone is not None and job.job.is_running and gone.num_restarts == job.job.num_restarts
    return gone.reason if gone is not None and is_now and job.record.upgraded is None else ""


def rests(job: OpportunisticJob, now_s: float, rules: PackingRules) -> bool:
    """Return whether its upgrade is not tried now, because it was given up a short time ago."""
    gone = job.record.given_up
    return bool(why_not_upgraded(job)) and gone is not None and gone.rests and now_s < gone.at_s + rules.refused_s


def _is_of_this_start(job: OpportunisticJob) -> bool:
    upgraded = job.record.upgraded
    return upgraded is not None and job.job.is_running and upgraded.num_restarts == job.job.num_restarts


class SeenGpus:
    """What nodes told lately of their GPUs.

    Args:
        readings: of all nodes; None: nobody knows.
        now_s: the time.
        rules: say what is too old.
    """

    def __init__(self, readings: ShowGpus | None, now_s: float, rules: PackingRules) -> None:
        self.now_s, self.rules = now_s, rules
        self._gpus = {
            (node.node, gpu.index): gpu
            for node in (readings.nodes if readings else ())
            if node.age_s <= rules.oldest_s
            for gpu in node.gpus
        }

    def of(self, job: OpportunisticJob) -> list[GpuNow] | None:
        """Readings of all GPUs of a job with a place; None where one is missing."""
        assert job.record.placed is not None
        found = [self._gpus.get(spot) for spot in job.record.placed.place.gpus()]
        return None if None in found else [gpu for gpu in found if gpu is not None]

    def is_ready(self, job: OpportunisticJob) -> bool:
        """Return whether all processes of a job are there, each on a GPU that no guaranteed job has."""
        number, gpus = str(job.job.job_id), self.of(job)
        return gpus is not None and all(
            number in gpu.guaranteed or (number in {other.job for other in gpu.sharing} and not gpu.is_reserved)
            for gpu in gpus
        )

    def is_guaranteed(self, job: OpportunisticJob) -> bool:
        """Return whether a job is guaranteed on all of its GPUs, by the nodes' words."""
        number, gpus = str(job.job.job_id), self.of(job)
        return gpus is not None and all(number in gpu.guaranteed for gpu in gpus)

    def has_begun(self, job: OpportunisticJob) -> bool:
        """Return whether a job is guaranteed on one of its GPUs."""
        number, gpus = str(job.job.job_id), self.of(job)
        return gpus is not None and any(number in gpu.guaranteed for gpu in gpus)

    def others(self, job: OpportunisticJob) -> list[str]:
        """Guaranteed jobs on the GPUs of a job, but for itself."""
        found = [other for gpu in self.of(job) or () for other in gpu.guaranteed]
        return [other for other in dict.fromkeys(found) if other != str(job.job.job_id)]


def _guaranteed(snapshot: Snapshot, quotas: Quotas) -> dict[str, Job]:
    """Jobs with GPUs in the partitions with quotas, by name. A heterogeneous one is one job, with all of its GPUs."""
    found: dict[str, Job] = {}
    for job in snapshot.jobs:
        if set(quotas.partitions).isdisjoint(job.partitions) or not job.count(_GPU) or job.state == "COMPLETING":
            continue
        if job.het:
            name = str(job.het.het_job_id)
            gpus = job.count(_GPU) + (found[name].count(_GPU) if name in found else 0)
            first = found.get(name, job)
            found[name] = replace(first, gres_held=(Gres(_GPU, "", gpus),))
        else:
            found |= dict.fromkeys(_names(job), job)
    return found


def _is_kept(job: OpportunisticJob) -> bool:
    """Whether an opportunistic job is held by somebody who would not let it run now."""
    return job.is_held and bool(who_holds(job.job, job.name))


def _not_in_line(name: str, job: Job, now_s: float) -> str:
    """Why a pending job stands in no line; empty if it does."""
    if job.priority != 0:
        return ""
    if reason := why_it_failed(job) or who_holds(job, name):
        return reason
    if is_requeued_and_held(job):
        return "somebody requeued and held it (scontrol requeuehold). The packer makes a hold of its owner's of that"
    if job.dependency:
        return f"it waits for {job.dependency}"
    if job.eligible_s is not None and job.eligible_s > now_s:
        return f"it may begin in {job.eligible_s - now_s:.0f} s"
    return why_slurm_holds(job)


def _guaranteed_job(name: str, job: Job, admin_comment: str) -> QuotaJob:
    is_held, took = job.is_pending and job.priority == 0, took_gpus(admin_comment)
    return QuotaJob(
        name,
        job.account or NO_ACCOUNT,
        max(job.count(_GPU), took) if job.is_pending else job.count(_GPU),
        job.submit_s or 0.0,
        runs_as=None if is_held else JobClass.GUARANTEED,
        opportunistic_after_s=opportunistic_after_s(job.comment),
        granted_gpus=granted_gpus(admin_comment) if job.state == "RUNNING" else None,
        took_gpus=took,
    )


def _opportunistic_job(job: OpportunisticJob, seen: SeenGpus) -> QuotaJob:
    """One that waits has the class of one that runs: it starts on a GPU of another, whatever the quota is."""
    placed = job.record.placed if job.job.is_running else None
    place = placed.place if placed else None
    not_now = why_not_upgraded(job) if rests(job, seen.now_s, seen.rules) else ""
    return QuotaJob(
        job.name,
        job.job.account or NO_ACCOUNT,
        job.wish.gpus * max(1, job.job.num_nodes),
        job.job.submit_s or 0.0,
        runs_as=JobClass.GUARANTEED if is_upgraded(job) else JobClass.OPPORTUNISTIC,
        runs_on=frozenset(f"{node}:{index}" for node, index in place.gpus()) if place else frozenset(),
        is_ready=place is not None and job.job.state == "RUNNING" and not not_now and seen.is_ready(job),
        not_now=not_now,
    )


def _takes_gpus(guaranteed: Mapping[str, Job], job: QuotaJob) -> bool:
    """Whether a job was released and is to have GPUs that are free now. Those of a reservation are not counted."""
    is_released = job.runs_as is JobClass.GUARANTEED and not job.is_reserved
    return is_released and job.name in guaranteed and guaranteed[job.name].is_pending


def _is_inside(job: Job, snapshot: Snapshot) -> bool:
    """Whether a job has a reservation that has begun."""
    return any(node.is_reserved and node.reservation in job.reservations for node in snapshot.nodes)


def _why_not_inside(job: Job, snapshot: Snapshot) -> str:
    """Why a held job waits for its reservation, or has no room in it; empty if it could start there."""
    known = {reservation.name: reservation.is_active for reservation in snapshot.reservations}
    begun = [known[name] for name in job.reservations if name in known]
    if job.priority != 0 or not begun:
        return ""
    check = f"{','.join(job.reservations)}. Check: scontrol show reservation"
    if not any(begun):
        return f"its reservation has not begun: {check}"
    inside = [node for node in snapshot.nodes if node.is_reserved and node.reservation in job.reservations]
    gpus, asked = sum(node.devices() for node in inside), job.count(_GPU)
    if asked <= gpus and job.num_nodes <= len(inside):
        return ""
    wanted = f"it asks for {count_words(asked, 'GPU')} on {count_words(job.num_nodes, 'node')} or more"
    return f"{wanted}, and its reservation has {gpus} on {len(inside)}: {check}"


def _free_gpus(snapshot: Snapshot, quotas: Quotas, placeholders: Iterable[Job], upgraded: set[int]) -> int:
    """GPUs that no guaranteed job has: those that are kept for a job which is not guaranteed yet are free for it."""
    nodes = [node for node in snapshot.nodes if node.starts_jobs and {*quotas.partitions} & {*node.partitions}]
    kept = [job for job in placeholders if job.is_running and (held_for(job.comment) or (0,))[0] not in upgraded]
    return sum(node.gpus_free() for node in nodes) + sum(job.count(_GPU) for job in kept)


def _possible(decision: QuotaDecision, problems: Mapping[str, str]) -> QuotaDecision:
    """A decision that can be carried out: what could not run as an opportunistic job waits."""
    problem = problems.get(decision.job.name, "")
    if not problem or decision.verdict not in (QuotaAction.OPPORTUNISTIC, QuotaAction.OFFER):
        return decision
    reason = decision.reason.partition(". As an opportunistic job")[0]
    return replace(
        decision, verdict=QuotaAction.WAIT, reason=f"{reason}. As an opportunistic job it cannot run: {problem}"
    )
