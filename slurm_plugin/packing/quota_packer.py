"""The packer's hands for quotas: releases, moves and upgrades jobs as `quota.py` decides.

Like the packer it keeps nothing that matters: a job's class stands in its AdminComment, and the packer's own jobs say
in their Comments what they are for.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Protocol

from hetstream.base.text import count_words, printable
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.slurm_plugin.client.model import Gres, Job, Node, Snapshot, total
from hetstream.slurm_plugin.client.packing_slurm import JobNotes
from hetstream.slurm_plugin.client.read import release_of
from hetstream.slurm_plugin.client.run import Failure, failure_of, is_of_scrontab
from hetstream.slurm_plugin.client.slurm_units import compress
from hetstream.slurm_plugin.packing.jobs import (
    OpportunisticJob,
    fits_no_partition,
    is_requeued_and_held,
    keeps_gres,
    takes_gpus,
)
from hetstream.slurm_plugin.packing.notes import (
    GivenUpRecord,
    PackingRecord,
    UpgradedRecord,
    comment_with_gpus,
    comment_without_place,
    held_for,
    holds_comment,
    read_record,
    upgrade_comment,
    upgrades,
    where,
    with_granted,
    with_guard,
    with_record,
    with_requeuehold,
    with_taken,
)
from hetstream.slurm_plugin.packing.observe import PackingView
from hetstream.slurm_plugin.packing.quota import Excess, QuotaAction, QuotaDecision, above_quota
from hetstream.slurm_plugin.packing.quota_file import (
    QuotaView,
    SeenGpus,
    Tenants,
    gpus_of_a_node,
    is_being_upgraded,
    is_upgraded,
)
from hetstream.slurm_plugin.packing.state import PackingEvent, PackingRules

# How an opportunistic job becomes guaranteed where it runs: (job, its placeholders, readings, time) -> steps. Pure.
#
# Slurm starts guaranteed jobs by itself, so its own books must say that the job's GPUs are taken: small jobs of the
# packer's, *placeholders*, take each a GPU of the node, until each GPU of the job is held by one of them. When the
# whole gang is held, another small job on all of its nodes has their Prolog, which is root's, write the job's grants
# anew. Each look begins with what is there, so whoever dies in between, the next packer goes on:
#
# | it died                      | what it finds                            | what follows                            |
# |------------------------------|------------------------------------------|-----------------------------------------|
# | while it submits placeholders| some of them                             | the missing ones, or all are cancelled  |
# | before the upgrade           | all GPUs held, `upgrading` noted or not  | the upgrade                             |
# | between upgrade and note     | nodes that call the job guaranteed       | the note                                |
# | after the note               | placeholders of a guaranteed job         | they stay as long as the job runs       |

# Of a placeholder: it runs nothing but `sleep`.
PLACEHOLDER_MB = 32
# Of a node, beside one for each placeholder: for the job that upgrades. All are of a partition that could preempt the
# very job that they are for.
_UPGRADE_CPUS = 1
# slurm.conf(5), PreemptParameters: a running job whose Priority is above this number is not preempted.
_EXEMPT = re.compile(r"\bmin_exempt_priority=(\d{1,10})\b", re.ASCII)
FIRST_THAT_EXEMPTS = (23, 2)
_MOST_PRIORITY = 4_294_967_293  # the next numbers have other meanings


@dataclass(frozen=True, slots=True)
class Placeholder:
    """A job of the packer's that keeps a GPU, or waits for one.

    Attributes:
        job_id: its number.
        spot: node and number of its GPU; None as long as it waits, or where Slurm does not tell.
        submit_s: when it was submitted.
        is_pending: it waits.
    """

    job_id: int
    spot: tuple[str, int] | None
    submit_s: float
    is_pending: bool


@dataclass(frozen=True, slots=True)
class Keep:
    """Submit a number of placeholders on a node."""

    node: str
    count: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Cancel placeholders."""

    job_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Upgrade:
    """Have the nodes call the job guaranteed."""


@dataclass(frozen=True, slots=True)
class Note:
    """Write down that it is."""


@dataclass(frozen=True, slots=True)
class GiveWay:
    """Take the job away: its GPU is another guaranteed job's by now."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Try no more: for a while, or if nothing was tried yet, in this look."""

    reason: str
    rests: bool


Step = Keep | Drop | Upgrade | Note | GiveWay | GiveUp


def exempt_priority(snapshot: Snapshot) -> int | None:
    """Return the least Priority with which Slurm preempts a running job no more; None where it preempts whatever that
    is.
    """
    found = _EXEMPT.search(snapshot.config.get("PreemptParameters", ""))
    if found is None or release_of(snapshot.version) < FIRST_THAT_EXEMPTS:
        return None
    least = int(found[1]) + 1
    return least if 1 < least <= _MOST_PRIORITY else None


def priority_of(job: OpportunisticJob, exempt: int | None) -> dict[str, str]:
    """Return what is to be changed of a running job's Priority, so that Slurm preempts it exactly if it is
    opportunistic.
    """
    if exempt is None or is_being_upgraded(job) or is_upgraded(job) == (job.job.priority >= exempt):
        return {}
    return {"Priority": str(exempt if is_upgraded(job) else exempt - 1)}


def upgrade_steps(
    job: OpportunisticJob,
    held: Sequence[Placeholder],
    seen: SeenGpus,
    nodes: Mapping[str, Node],
    *,
    is_wanted: bool,
    is_upgrading: bool,
    rules: PackingRules,
) -> list[Step]:
    """Return what is to be done now for one job.

    Args:
        job: runs as it was placed.
        held: its placeholders.
        seen: what its nodes say.
        nodes: of Slurm, by name.
        is_wanted: it has quota, and is ready.
        is_upgrading: a job that has the nodes call it guaranteed is there.
        rules: other than the usual ones.
    """
    assert job.record.placed is not None
    place = job.record.placed.place
    by_spot = {placeholder.spot: placeholder for placeholder in held if placeholder.spot}
    missing = [spot for spot in place.gpus() if spot not in by_spot]
    pending = [placeholder for placeholder in held if placeholder.is_pending]
    upgraded = is_upgraded(job)
    # From here on there is no way back: a node may call it guaranteed, though its last reading does not say so.
    has_begun = is_being_upgraded(job) or seen.has_begun(job)
    if seen.of(job) is None:
        return []  # its nodes say nothing; and nothing is given up, because it may be guaranteed there
    if not (is_wanted or upgraded or has_begun):
        return _drop(held)
    if not missing:
        extra = [placeholder for placeholder in held if placeholder.spot not in place.gpus()]
        if extra or upgraded:
            return _drop(extra)  # their CPUs are free in the next look
        if seen.is_guaranteed(job):
            return [Note()]
        full = next((name for name in place.nodes if name not in nodes or nodes[name].cpus_free < 1), "")
        closed = next((name for name in place.nodes if name in nodes and not nodes[name].is_usable), "")
        if (full or closed) and not has_begun:
            return [*_drop(held), _no_room(full or closed, len(place.indices), rests=True)]
        return [] if is_upgrading or full else [Upgrade()]
    others = seen.others(job)
    if others and (upgraded or has_begun):
        return [GiveWay(f"Slurm gave {where(place)} to guaranteed job {others[0]}")]
    if any(seen.now_s - placeholder.submit_s > rules.keep_s for placeholder in pending):
        return [
            *_drop(pending if upgraded or has_begun else held),
            _no_room(missing[0][0], len(place.indices), rests=True),
        ]
    if pending or any(placeholder.spot is None for placeholder in held):
        return []  # until it is known which GPU each has
    return _keep(held, missing, nodes, stays=upgraded or has_begun)


def _keep(
    held: Sequence[Placeholder], missing: Sequence[tuple[str, int]], nodes: Mapping[str, Node], *, stays: bool
) -> list[Step]:
    """Submit placeholders: as many on a node as it has GPUs free, since Slurm chooses which of them each gets.

    Args:
        held: those that run.
        missing: GPUs that none of them has.
        nodes: by name.
        stays: the job is guaranteed, or may be, so what is held stays.
    """
    steps: list[Step] = []
    for name, count in Counter(node for node, _ in missing).items():
        node = nodes.get(name)
        room = 0
        if node is not None and node.is_usable and (stays or node.cpus_free >= count + _UPGRADE_CPUS):
            room = min(node.gpus_free(), node.cpus_free, node.memory_free_mb // PLACEHOLDER_MB)
        if room < 1:
            return [*([] if stays else _drop(held)), _no_room(name, count, rests=bool(held))]
        steps.append(Keep(name, room))
    return steps


def _no_room(node: str, gpus: int, *, rests: bool) -> GiveUp:
    return GiveUp(
        f"{node} lacks a GPU or {gpus + _UPGRADE_CPUS} CPUs for the jobs that keep GPUs and upgrade it, or takes none",
        rests,
    )


def _drop(placeholders: Iterable[Placeholder]) -> list[Step]:
    found = tuple(placeholder.job_id for placeholder in placeholders)
    return [Drop(found)] if found else []


_log = logging.getLogger(__name__)

# Time after which a node's Prolog refuses an upgrade: the job may have been started again by then.
_UPGRADE_VALID_S = 120.0
_PLACEHOLDER = "#!/bin/sh\nexec sleep infinity\n"
_UPGRADE = "#!/bin/sh\nexit 0\n"
# Jobs about whose resources Slurm is asked in one look; each takes a few milliseconds.
_MOST_ASKED = 200
# Of a job of which Slurm does not say clearly what it has.
_IN_DOUBT = (Gres("gpu", "", 1),)
_WAITS = {QuotaAction.OFFER: "offered", QuotaAction.RESERVE: "reserved", QuotaAction.WAIT: "waits"}
_WOULD = {QuotaAction.GUARANTEED: "grant", QuotaAction.OPPORTUNISTIC: "move", QuotaAction.UPGRADE: "upgrade"}


class QuotaSlurm(Protocol):
    """What is asked of Slurm; `PackingSlurm` does it."""

    def notes(self, partitions: Collection[str]) -> dict[int, JobNotes]:
        """Return what stands in the jobs of these partitions."""

    def update(self, job_id: str, fields: Mapping[str, str]) -> None:
        """Change a job."""

    def release(self, job_id: str) -> None:
        """Let it start."""

    def cancel(self, job_id: str) -> None:
        """End it."""

    def submit_own(self, script: str, options: Sequence[str]) -> str:
        """Submit a job of the packer's own; its number."""

    def gpu_spots(self, job_id: str) -> tuple[tuple[str, int], ...]:
        """Node and number of each GPU of a running job; empty where that is in doubt."""

    def got(self, job_id: str) -> tuple[Gres, ...] | None:
        """Return what a running job was given; None if that is in doubt."""

    def hold(self, job_id: str) -> None:
        """Keep it from starting."""

    def requeue_held(self, job_id: str) -> None:
        """End it, and keep it as a held one."""


@dataclass(frozen=True)
class _Look:
    """What all jobs of one look have in common: the GPUs, Slurm, partitions with quotas, decisions for an upgrade, the
    least Priority with which Slurm preempts no job, and nodes with placeholders that are new.
    """

    gpus: SeenGpus
    snapshot: Snapshot
    partitions: tuple[str, ...]
    wanted: Mapping[str, QuotaDecision]
    exempt: int | None
    kept: set[str] = field(default_factory=set)


class QuotaPacker:
    """Carries out what becomes of jobs that have or want quota.

    Args:
        slurm: the cluster.
        partition: into which a job goes that starts as an opportunistic one.
        say: told of each event.
        alone: what Slurm refuses within it concerns that job alone.
        take_away: takes a job from its place, with a reason.
        rules: other than the usual ones.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        slurm: QuotaSlurm,
        partition: str,
        say: Callable[[PackingEvent], object],
        *,
        alone: Callable[[str], AbstractContextManager[None]],
        take_away: Callable[[OpportunisticJob, str], object],
        rules: PackingRules,
        clock: Callable[[], float],
    ) -> None:
        self._slurm, self._partition, self._say = slurm, partition, say
        self._alone, self._take_away = alone, take_away
        self._rules, self._clock = rules, clock
        self._trials: dict[str, tuple[int, float]] = {}  # how often its nodes were told to upgrade a job, and when last
        self._said: dict[str, str] = {}
        self._above: Mapping[str, int] = {}
        # What was given to jobs that run, by number, start and nodes: a job that is resized has others.
        self._given: dict[tuple[int, int, tuple[str, ...]], tuple[Gres, ...]] = {}
        self.given_back: dict[str, tuple[float, str]] = {}  # until when others have the quota of a job, and why
        self._excesses: set[tuple[str, int]] = set()  # jobs, and their starts, that had too many GPUs at the last look

    def with_given_gpus(self, snapshot: Snapshot, tenants: Tenants) -> Snapshot:
        """Return the cluster, with what was given to running jobs where the site does not account for gres/gpu: those
        with quota, and those that the guard has not seen and whose records name no GPU.

        A request says nothing of it: slurmctld makes GPUs of `--ntasks-per-gpu` and of whole nodes, and chooses nodes
        and tasks. Each start is asked about once, and again on other nodes.

        Raises:
            SlurmCommandError: Slurm does not answer.
        """
        asked = {job: _IN_DOUBT for job in tenants.unguarded(snapshot) if job.is_running and not takes_gpus(job)}
        most = {node.name: total(node.gres, "gpu") for node in snapshot.nodes}
        for job in tenants.guarded(snapshot):
            if job.state == "RUNNING" and (job.gres_held is None or _has_more(job, job.gres_held)):
                # In doubt it is all that is there: a name with a record in it makes it look so.
                asked[job] = (Gres("gpu", "", sum(most.get(name, 0) for name in job.nodes)),)
        starts = {(job.job_id, job.num_restarts, job.nodes): job for job in asked}
        self._given = {start: gres for start, gres in self._given.items() if start in starts}
        given = dict(self._given)
        for start in [start for start in starts if start not in given][:_MOST_ASKED]:
            job = starts[start]
            try:
                got = self._slurm.got(job.label)
            except SlurmCommandError as error:
                if failure_of(error) is not Failure.REFUSED:
                    raise
                continue  # it has gone
            given[start] = asked[job] if got is None else got
            if job.state == "RUNNING" and got is not None and not _has_more(job, got):
                self._given[start] = got
        held = {start[0]: gres for start, gres in given.items()}
        return replace(snapshot, jobs=tuple(
            replace(job, gres_held=held[job.job_id]) if job.job_id in held else job for job in snapshot.jobs
        ))  # fmt: skip

    def act(self, seen: PackingView, rests: Callable[[str], bool]) -> None:
        """Carry out what was decided: upgrades first, since a job that starts could take a GPU that one of them is on.

        Args:
            seen: what there is.
            rests: whether Slurm has refused a job lately.
        """
        quota = seen.quota
        self._say_above(quota)
        self._settle_excesses(quota, rests)
        self._give_back(quota, rests)
        for name, (unguarded, why) in quota.unguarded.items():
            if not rests(name):
                with self._alone(name):
                    self._hold_unguarded(name, unguarded, why)
        for name, held in quota.guaranteed.items():
            if is_requeued_and_held(held) and not rests(name):
                with self._alone(name):
                    self._slurm.update(name, {"Comment": with_requeuehold(held.comment, held.num_restarts)})
                    self._say(PackingEvent("held", name, "somebody requeued and held it (scontrol requeuehold)"))
        takes_gpus = self._upgrade_all(seen, rests)
        for decision in quota.decisions:
            name = decision.job.name
            job = quota.guaranteed.get(name)
            if job is None or name in quota.unguarded or name not in quota.admin_comments or rests(name):
                continue
            with self._alone(name):
                if decision.verdict is QuotaAction.GUARANTEED and not takes_gpus:
                    granted = with_granted(quota.admin_comments[name], decision.job.gpus)
                    if granted != quota.admin_comments[name]:
                        self._slurm.update(name, {"AdminComment": granted})
                    reach("packer.noted")
                    self._slurm.release(name)
                    reach("packer.granted")
                    self._say(PackingEvent("granted", name, decision.reason))
                elif decision.verdict is QuotaAction.OPPORTUNISTIC:
                    self._move(name, job, decision, seen.snapshot)

    def _hold_unguarded(self, name: str, job: Job, what: str) -> None:
        """Have a job wait, held, that went round the guard. Who dies in between finds it unguarded again.

        An allocation, or a job of scrontab, is cancelled.
        """
        notes = self._slurm.notes(job.partitions).get(job.job_id)
        if notes is None:
            return  # it has gone
        try:
            if not job.is_pending:
                comment = with_requeuehold(job.comment, job.num_restarts + 1, is_owners=False)
                self._slurm.update(name, {"Comment": comment, "Requeue": "1"})
                reach("packer.announced")
                self._slurm.requeue_held(name)
            elif job.priority != 0:
                self._hold(name, notes.admin_comment)
        except SlurmCommandError as error:
            if not cannot_wait(error):
                raise
            self._slurm.cancel(name)
            self._say(PackingEvent("cancelled", name, f"{what}. Slurm cannot requeue it, or hold it"))
            return
        reach("packer.held")
        self._slurm.update(name, {"AdminComment": with_guard(notes.admin_comment)})
        self._say(PackingEvent("held", name, what))

    def _hold(self, name: str, admin_comment: str) -> None:
        taking = with_record(admin_comment, replace(read_record(admin_comment), taking=True))
        self._slurm.update(name, {"AdminComment": taking})
        reach("packer.announced")
        self._slurm.hold(name)

    def _give_back(self, quota: QuotaView, rests: Callable[[str], bool]) -> None:
        """Hold who was granted his GPUs and cannot start as the partition is. He is tried again after a while."""
        now_s = self._clock()
        self.given_back = {name: gone for name, gone in self.given_back.items() if now_s < gone[0]}
        for name, job in quota.guaranteed.items():
            if fits_no_partition(job) and name in quota.admin_comments and not rests(name):
                with self._alone(name):
                    self._hold(name, quota.admin_comments[name])
                    self._slurm.update(name, {"AdminComment": with_guard(quota.admin_comments[name])})
                    why = f"Slurm cannot start it in its partition ({printable(job.reason)}): its quota is for others"
                    self.given_back[name] = now_s + self._rules.refused_s, why
                    self._say(PackingEvent("held", name, why))

    def _settle_excesses(self, quota: QuotaView, rests: Callable[[str], bool]) -> None:
        """What a job holds beyond its grant is granted, too, where its tenant has room for it; else the job is taken
        back, when two looks in a row say so.
        """
        before, self._excesses = self._excesses, set()
        for excess in quota.excesses:
            name, job = excess.job.name, quota.guaranteed[excess.job.name]
            start = name, job.num_restarts
            self._excesses.add(start)
            if rests(name) or name in quota.unguarded:
                continue
            with self._alone(name):
                if excess.is_within:
                    granted = with_granted(quota.admin_comments[name], excess.job.gpus)
                    self._slurm.update(name, {"AdminComment": granted})
                    self._say(PackingEvent("granted", name, f"{excess.reason}: it keeps them"))
                elif start in before:
                    self._take_back(name, job, excess, quota.admin_comments[name])

    def _take_back(self, name: str, job: Job, excess: Excess, admin_comment: str) -> None:
        """End a job that holds more than it was granted, and have it wait, held, for as much as it takes. Who dies in
        between finds it so again. What Slurm cannot requeue (salloc, srun) is cancelled.
        """
        reason = f"{excess.reason}. Submit it again with --nodes=N and --ntasks=N"
        held, granted = excess.job.gpus, excess.job.granted_gpus
        comment = with_requeuehold(job.comment, job.num_restarts + 1, is_owners=False)
        said = comment_without_place(comment, f"it held {count_words(held, 'GPU')} and {granted} were granted")
        taken = with_taken(admin_comment, held)
        try:
            self._slurm.update(name, {"Comment": said, "Requeue": "1", "AdminComment": taken})
            reach("packer.announced")
            self._slurm.requeue_held(name)
        except SlurmCommandError as error:
            if not cannot_wait(error):
                raise
            self._slurm.cancel(name)
            self._say(PackingEvent("cancelled", name, f"{reason}. Slurm cannot requeue it, or hold it"))
            return
        reach("packer.held")
        self._say(PackingEvent("taken back", name, reason))

    def _say_above(self, quota: QuotaView) -> None:
        above = above_quota(quota.quotas, [decision.job for decision in quota.decisions])
        for tenant, gpus in above.items():
            if self._above.get(tenant) != gpus:
                _log.warning("tenant=%s holds %d GPUs above its quota: nobody new becomes guaranteed", tenant, gpus)
        self._above = above

    def _move(self, name: str, job: Job, decision: QuotaDecision, snapshot: Snapshot) -> None:
        """A guaranteed job that may start as an opportunistic one becomes one that waits for a place."""
        wants = {"TresPerNode": job.gres_per_node, "TresPerJob": job.gres_per_job}
        cleared = {field: "" for field, gres in wants.items() if any(asked.name == "gpu" for asked in gres)}
        noted = {}
        if keeps_gres(snapshot):
            notes = self._slurm.notes(job.partitions).get(job.job_id)
            if notes is None:
                return  # it has gone
            noted["AdminComment"] = with_record(notes.admin_comment, PackingRecord(asked=frozenset({"gpu"})))
        if (gpus := gpus_of_a_node(job)) > 1:
            noted["Comment"] = comment_with_gpus(job.comment, gpus)
        self._slurm.update(name, {"Partition": self._partition, "Requeue": "1", **cleared, **noted})
        reach("packer.moved")
        self._say(PackingEvent("moved", name, decision.reason))

    def _upgrade_all(self, seen: PackingView, rests: Callable[[str], bool]) -> bool:
        """Take the next steps of all upgrades; whether GPUs are being kept, so that nobody may start just now."""
        quota, now_s = seen.quota, self._clock()
        look = _Look(
            SeenGpus(seen.readings, now_s, self._rules), seen.snapshot, quota.quotas.partitions,
            {decision.job.name: decision for decision in quota.decisions if decision.verdict is QuotaAction.UPGRADE},
            exempt_priority(seen.snapshot),
        )  # fmt: skip
        own = quota.placeholders
        running = {(job.job.job_id, job.job.num_restarts): job for job in seen.running}
        # Also of jobs that another packer serves, in another partition.
        alive = {(job.job_id, job.num_restarts) for job in seen.snapshot.jobs if job.state == "RUNNING"}
        for placeholder in own:
            if held_for(placeholder.comment) not in alive:
                with self._alone(str(placeholder.job_id)):
                    self._slurm.cancel(str(placeholder.job_id))
        for late in quota.upgraders:  # on a node that takes no jobs; Prologs would refuse it by now
            if late.is_pending and now_s - (late.submit_s or now_s) > _UPGRADE_VALID_S:
                with self._alone(str(late.job_id)):
                    self._slurm.cancel(str(late.job_id))
        upgrading = {upgrades(job.comment) for job in quota.upgraders}
        self._trials = {name: trial for name, trial in self._trials.items() if name in seen.jobs}
        self._said = {name: said for name, said in self._said.items() if name in seen.jobs}
        takes_gpus = False
        for key, job in running.items():
            held = [other for other in own if held_for(other.comment) == key]
            is_wanted = job.name in look.wanted and not rests(job.name)
            with self._alone(job.name):
                if changed := priority_of(job, look.exempt):
                    self._slurm.update(job.name, changed)
                steps = upgrade_steps(
                    job, [self._placeholder(other) for other in held], look.gpus,
                    {node.name: node for node in seen.snapshot.nodes}, is_wanted=is_wanted,
                    is_upgrading=key[0] in upgrading, rules=self._rules,
                )  # fmt: skip
                for step in steps:
                    self._do(step, job, look)
                takes_gpus |= any(isinstance(step, Keep) for step in steps) or any(other.is_pending for other in held)
        return takes_gpus

    def _placeholder(self, job: Job) -> Placeholder:
        spots = self._slurm.gpu_spots(str(job.job_id)) if job.is_running else ()
        spot = spots[0] if len(spots) == 1 else None
        return Placeholder(job.job_id, spot, job.submit_s or 0.0, job.is_pending)

    def _do(self, step: Step, job: OpportunisticJob, look: _Look) -> None:
        match step:
            case Keep(node, count):
                # Of two jobs on a node the other one comes next time: both would count the same CPUs and GPUs.
                for _ in range(0 if node in look.kept else count):
                    self._keep(job, node, look)
                    reach("packer.kept")
                look.kept.add(node)
            case Drop(job_ids):
                for job_id in job_ids:
                    self._slurm.cancel(str(job_id))
                reach("packer.dropped")
            case Upgrade():
                self._upgrade(job, look)
            case Note():
                self._note(job, UpgradedRecord(self._clock(), job.job.num_restarts), look)
                reach("packer.noted")
                decision = look.wanted.get(job.name)
                reason = decision.reason if decision else "its nodes call it guaranteed"
                self._say(
                    PackingEvent("upgraded", job.name, reason, job.record.placed.place if job.record.placed else None)
                )
            case GiveWay(reason):
                self._take_away(job, reason)
            case GiveUp(reason, rests):
                self._give_up(job, reason, look, rests=rests)

    def _note(self, job: OpportunisticJob, upgraded: UpgradedRecord | None, look: _Look) -> None:
        given_up = job.record.given_up if upgraded is None else None
        record = replace(job.record, upgraded=upgraded, given_up=given_up)
        noted = {"AdminComment": with_record(job.notes.admin_comment, record)}
        self._slurm.update(job.name, noted | priority_of(replace(job, record=record), look.exempt))

    def _give_up(self, job: OpportunisticJob, reason: str, look: _Look, *, rests: bool = True) -> None:
        """Note why, for who looks, and for the next packer. Its quota is for others meanwhile."""
        self._trials.pop(job.name, None)
        now = GivenUpRecord(self._clock() if rests else 0.0, job.job.num_restarts, rests, reason)
        if job.record.upgraded is None and now != job.record.given_up:
            self._note(replace(job, record=replace(job.record, given_up=now)), None, look)
        if self._said.get(job.name) != reason:
            self._said[job.name] = reason
            self._say(PackingEvent("not upgraded", job.name, reason))

    def _keep(self, job: OpportunisticJob, node: str, look: _Look) -> None:
        """Submit a placeholder on a node. It ends with the job, or is cancelled."""
        end_s = job.job.end_s
        minutes = [f"--time={max(1, math.ceil((end_s - self._clock()) / 60))}"] if end_s else []
        options = [
            f"--job-name=hetstream-keeps-gpu-for-{job.job.job_id}", f"--nodelist={node}", "--gres=gpu:1", *minutes,
            f"--comment={holds_comment(job.job.job_id, job.job.num_restarts)}",
        ]  # fmt: skip
        self._submit(_PLACEHOLDER, options, job, [node], look)

    def _upgrade(self, job: OpportunisticJob, look: _Look) -> None:
        """Submit what has root's Prolog call the job guaranteed, on all of its nodes."""
        count, at_s = self._trials.get(job.name, (0, 0.0))
        now_s = self._clock()
        if 0 <= now_s - at_s < self._rules.upgrade_s:
            return
        if count >= self._rules.most_upgrade_trials:
            reason = "its nodes do not call it guaranteed. Look there: journalctl -t hetstream-prolog"
            self._give_up(replace(job, record=replace(job.record, upgraded=None)), reason, look)
            return
        if not is_being_upgraded(job):
            self._note(job, UpgradedRecord(now_s, job.job.num_restarts, is_done=False), look)
            reach("packer.began")
        self._trials[job.name] = count + 1, now_s
        assert job.record.placed is not None
        place = job.record.placed.place
        options = [
            f"--job-name=hetstream-upgrades-{job.job.job_id}", f"--nodes={len(place.nodes)}", "--time=1",
            f"--nodelist={compress(place.nodes)}",
            f"--comment={upgrade_comment(job.job.job_id, place, now_s + _UPGRADE_VALID_S)}",
        ]  # fmt: skip
        self._submit(_UPGRADE, options, job, place.nodes, look)
        reach("packer.upgraded")

    def _submit(
        self, script: str, options: Sequence[str], job: OpportunisticJob, nodes: Collection[str], look: _Look
    ) -> None:
        """Submit a job of the packer's own, in the partition of guaranteed jobs and the tenant's account."""
        partition = _partition_of(nodes, look)
        if partition is None:
            self._give_up(job, f"no partition with quotas has all of {compress(nodes)}", look)
            return
        account = [f"--account={job.job.account}"] if job.job.account else []
        fixed = ["--ntasks-per-node=1", "--cpus-per-task=1", f"--mem={PLACEHOLDER_MB}", "--no-requeue", "--chdir=/"]
        quiet = ["--output=/dev/null", "--error=/dev/null", f"--partition={partition}"]
        self._slurm.submit_own(script, [*options, *fixed, *quiet, *account])


def _partition_of(nodes: Collection[str], look: _Look) -> str | None:
    """The highest partition with quotas that all of these nodes are in; None if there is none."""
    found = [
        partition
        for partition in look.snapshot.partitions
        if partition.is_up and partition.name in look.partitions and {*nodes} <= {*partition.nodes}
    ]
    return max(found, key=lambda partition: (partition.priority_tier, partition.name)).name if found else None


def _has_more(job: Job, gres: Sequence[Gres]) -> bool:
    """Whether these are more GPUs, or shares of them, than a job asks for by its record."""
    asked = replace(job, gres_held=None)
    is_more = total(gres, "gpu") > asked.count("gpu")
    return is_more or (takes_gpus(replace(job, gres_held=tuple(gres))) and not takes_gpus(asked))


def cannot_wait(error: SlurmCommandError) -> bool:
    """Return whether a job can neither be held nor requeued: it has no batch script, or is one of scrontab.

    Another refusal, such as one for want of rights, says nothing of the job.
    """
    is_requeue = "requeuehold" in error.argv and failure_of(error) is Failure.REFUSED
    return is_requeue or is_of_scrontab(error)


def waits(quota: QuotaView) -> Iterator[PackingEvent]:
    """Yield who waits for quota, and why."""
    for decision in quota.decisions:
        if decision.verdict in _WAITS:
            yield PackingEvent(_WAITS[decision.verdict], decision.job.name, decision.reason)
    for name, reason in quota.reasons.items():
        yield PackingEvent("waits", name, reason)


def would(quota: QuotaView) -> Iterator[PackingEvent]:
    """Yield what would be done, by a packer that only observes."""
    for name, (_, why) in quota.unguarded.items():
        yield PackingEvent("would hold", name, why)
    for excess in quota.excesses:
        yield PackingEvent(f"would {'grant' if excess.is_within else 'take back'}", excess.job.name, excess.reason)
    for decision in quota.decisions:
        if decision.verdict in _WOULD:
            yield PackingEvent(f"would {_WOULD[decision.verdict]}", decision.job.name, decision.reason)
