"""The packer's hands: reads Slurm and the nodes' readings, has `decide` decide, and carries it out by Slurm's commands.

It keeps nothing that matters: what it must remember stands in the jobs (`notes.py`), but for those that it has just had
requeued, of which a slurmctld that is killed can forget all. A command that fails concerns its own job; the others go
on. It starts no process but Slurm's commands, each with a deadline.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Protocol

from hetstream.base.errors import HetstreamError
from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.site.messages import ShowGpus
from hetstream.mpi_dataworkers.process.faults import reach
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.client.run import Failure, failure_of
from hetstream.slurm_plugin.client.slurm_units import compress
from hetstream.slurm_plugin.packing.decide import PackedStart, PackingPlan, decide
from hetstream.slurm_plugin.packing.jobs import (
    OpportunisticJob,
    Settlement,
    evicted,
    is_cut_short,
    keeps_gres,
    served_jobs,
    takes_gpus,
    wrong_place,
)
from hetstream.slurm_plugin.packing.notes import (
    PackingRecord,
    PlacedRecord,
    comment_with,
    comment_without_place,
    gres_of,
    limit_of,
    with_guard,
    with_hold,
    with_record,
)
from hetstream.slurm_plugin.packing.observe import PackingView, view
from hetstream.slurm_plugin.packing.quota import Quotas
from hetstream.slurm_plugin.packing.quota_file import Tenants
from hetstream.slurm_plugin.packing.quota_packer import QuotaPacker, QuotaSlurm, cannot_wait, waits, would
from hetstream.slurm_plugin.packing.state import PackingEvent, PackingRules

_log = logging.getLogger(__name__)

# A job that still runs this time after its requeue goes on: Slurm ends one within KillWait, which is 30 s.
_ENDS_S = 600.0


class PackerSlurm(QuotaSlurm, Protocol):
    """What the packer asks of Slurm; `PackingSlurm` does it."""

    def snapshot(self) -> Snapshot:
        """Return the cluster."""

    def switches(self) -> dict[str, tuple[str, ...]]:
        """Above each node, the highest first."""


class Packer:
    """Packs until somebody stops it.

    Args:
        slurm: the cluster.
        readings: what nodes told of their GPUs. It may raise HetstreamError; then nothing is known of any GPU.
        partitions: whose jobs it places, and nobody else's.
        say: told of each event.
        acting: whether it changes anything.
        quotas: of the tenants, for the cluster as it is; None: there are none.
        qos: whose jobs are opportunistic, too. It places none of them by that, and holds who came past the guard.
        rules: other than the usual ones.
        clock: seconds since the epoch.
    """

    def __init__(
        self,
        slurm: PackerSlurm,
        readings: Callable[[], ShowGpus],
        partitions: Collection[str],
        say: Callable[[PackingEvent], object],
        *,
        acting: bool,
        quotas: Callable[[Snapshot], Quotas] | None = None,
        qos: Collection[str] = (),
        rules: PackingRules | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._slurm = slurm
        self._readings = readings
        self._partitions, self._qos = frozenset(partitions), frozenset(name.lower() for name in qos)
        self._say = say
        self._acting = acting
        self._rules = rules or PackingRules()
        self._clock = clock
        self._quotas = quotas or (lambda _: Quotas())
        self._quota_packer = QuotaPacker(
            slurm, min(self._partitions, default=""), say, alone=self._alone, take_away=self._take_away,
            rules=self._rules, clock=clock,
        )  # fmt: skip
        self._right: set[tuple[int, int]] = set()  # numbers of jobs, and of their starts, that run where they should
        # Of jobs that it had requeued, until they wait and that is noted, name and when: a killed slurmctld may forget
        # both. By the job's own number; the last task of an array has the array's, which means all tasks to Slurm.
        self._taken: dict[int, tuple[str, float]] = {}
        self._refused: dict[str, tuple[float, str]] = {}
        self._said: dict[str, object] = {}
        self._said_unread = ""
        self._num_unanswered = 0  # commands of this look
        self.stopping = threading.Event()

    def run(self, interval_s: float, why_wait: Callable[[], str] = str) -> None:
        """Go on until `stopping` is set. What fails is said, and tried again the next time.

        Args:
            interval_s: between two looks.
            why_wait: asked before each look; a text has it left out, and is said once.
        """
        said = ""
        while not self.stopping.is_set():
            try:
                reason = why_wait()
                if reason != said:
                    _log.warning("%s", reason or "it waits no longer")
                said = reason
                if not reason:
                    self.step()
            except HetstreamError as error:
                _log.warning("nothing is placed this time: %s", error)
            self.stopping.wait(interval_s)

    def see(self) -> PackingView:
        """Return what there is now.

        Raises:
            HetstreamError: Slurm does not tell.
        """
        readings = self._read_gpus()
        snapshot = self._slurm.snapshot()
        now_s = self._clock()
        tenants = Tenants(self._quotas(snapshot), os.geteuid(), opportunistic_qos=self._qos)
        notes = self._slurm.notes(self._partitions | tenants.partitions(snapshot))
        gone = self._refused | self._quota_packer.given_back
        refused = {name: text for name, (until_s, text) in gone.items() if now_s < until_s}
        tenants = replace(tenants, notes=notes, refused=refused)
        snapshot = self._quota_packer.with_given_gpus(snapshot, tenants)
        jobs = [self._announced(job) for job in served_jobs(snapshot, notes, self._partitions, now_s)]
        ended = {number for number, of_job in notes.items() if of_job.has_ended}
        there = {job.job.job_id for job in jobs if job.job.is_running or job.record.placed}
        self._taken = {
            number: (name, at_s)
            for number, (name, at_s) in self._taken.items()
            if number in ended or (number in there and now_s - at_s < _ENDS_S)
        }
        switches = self._slurm.switches()
        seen = view(snapshot, jobs, readings, self._partitions, now_s, switches, self._rules, tenants)
        waiting = tuple(
            replace(job, closed=self._refused[job.job][1]) if self._rests(job.job) else job
            for job in seen.state.waiting
        )
        lost = tuple(name for number, (name, _) in self._taken.items() if number in ended)
        return replace(seen, state=replace(seen.state, waiting=waiting), lost=lost)

    def step(self) -> tuple[PackingView, PackingPlan]:
        """Look, decide and act once.

        Raises:
            HetstreamError: Slurm does not tell what there is.
        """
        seen = self.see()
        plan = decide(seen.state, self._clock(), self._rules)
        if self._acting:
            self._act(seen, plan)
        else:
            self._say_once(would(seen.quota))
            self._say_once(PackingEvent("would take back", amiss.job.name, amiss.reason) for amiss in seen.settlements)
            self._say_once(
                PackingEvent("would place", placed.job, placed.reason, placed.place) for placed in plan.placements
            )
            self._say_once(PackingEvent("would evict", gone.job, gone.reason) for gone in plan.evictions)
        self._say_once(PackingEvent("waits", job, reason) for job, reason in plan.reasons.items())
        self._say_once(waits(seen.quota))
        self._said = {job: said for job, said in self._said.items() if job in seen.names}
        self._refused = {job: refused for job, refused in self._refused.items() if job in seen.names}
        return seen, plan

    def _read_gpus(self) -> ShowGpus | None:
        try:
            readings = self._readings()
        except HetstreamError as error:
            if str(error) != self._said_unread:
                self._said_unread = str(error)
                _log.warning("nothing is known of any GPU, so nobody is placed: %s", error)
            return None
        self._said_unread = ""
        return readings

    def _act(self, seen: PackingView, plan: PackingPlan) -> None:
        """What is amiss first, then evictions, so that nobody is placed beside somebody who has to go."""
        self._num_unanswered = 0
        for amiss in seen.settlements:
            with self._alone(amiss.job.name):
                self._settle(amiss)
        for name in seen.lost:
            with self._alone(name):
                self._slurm.requeue_held(name)
                self._say(PackingEvent("taken back", name, "it has ended: slurmctld forgot that it was to requeue it"))
        leaving = {eviction.job for eviction in plan.evictions}
        for job in seen.running:
            with self._alone(job.name):
                is_taken = job.name in leaving or job.job.job_id in self._taken
                self._verify(self._kept(job) if job.record.taking and not is_taken else job)
        self._right &= {(job.job.job_id, job.job.num_restarts) for job in seen.running}
        for eviction in plan.evictions:
            job = seen.jobs[eviction.job]
            with self._alone(job.name):
                self._take_away(job, eviction.reason)
        self._quota_packer.act(seen, self._rests)
        for placement in plan.placements:
            if self.stopping.is_set():
                return
            job = seen.jobs[placement.job]
            with self._alone(job.name):
                self._place(job, placement, forgets=not keeps_gres(seen.snapshot))

    def _rests(self, name: str) -> bool:
        """Whether Slurm has refused a job lately."""
        return self._clock() < self._refused.get(name, (0.0,))[0]

    @contextlib.contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """What Slurm refuses concerns this job alone. If it does not answer for a second job, this look has ended."""
        try:
            yield
        except SlurmCommandError as error:
            text = f"Slurm refused: {error}"
            failure = failure_of(error)
            rest_s = self._rules.busy_s if failure is Failure.BUSY else self._rules.refused_s
            self._refused[name] = self._clock() + rest_s, text
            self._say(PackingEvent("refused", name, text))
            if failure is not Failure.REFUSED:
                self._num_unanswered += 1
            if self._num_unanswered > 1:  # each attempt takes long: all jobs would be tried in vain, and then wait
                raise

    def _settle(self, amiss: Settlement) -> None:
        """Have a job wait again that did not come to run, runs without a place, or was requeued by Slurm.

        Without a place it may be any kind of job: an allocation, or a job of scrontab, is cancelled.
        """
        job = amiss.job
        try:
            if not job.job.is_pending:
                self._requeue(job, {"Requeue": "1"})
            elif not job.is_held:
                self._announce(job, {} if job.notes.can_be_requeued else {"Requeue": "1"})
                self._slurm.hold(job.whole_name)
                reach("packer.held")
        except SlurmCommandError as error:
            if not amiss.word or not cannot_wait(error):
                raise
            self._slurm.cancel(job.whole_name)
            self._say(PackingEvent("cancelled", job.name, f"{amiss.reason}. Slurm cannot requeue it, or hold it"))
            return
        self._note(job, amiss.record, is_kept=amiss.is_kept, word=amiss.word)
        self._say(PackingEvent("taken back", job.name, amiss.reason))

    def _verify(self, job: OpportunisticJob) -> None:
        """Compare a job that has started with what was asked for: rc 0 of `scontrol update` is no proof."""
        start = job.job.job_id, job.job.num_restarts
        if start in self._right and not takes_gpus(job.job):
            return
        problem = wrong_place(job, self._slurm.got(job.name))
        if problem:
            self._take_away(job, problem)
            return
        if job.record.limit:
            self._give_time(job)
        self._right.add(start)
        place = job.record.placed.place if job.record.placed else None
        self._say(PackingEvent("started", job.name, "Slurm gave it what it was placed on", place))

    def _give_time(self, job: OpportunisticJob) -> None:
        """Its own time limit, for one that has started: if its CPUs are needed before that ends, Slurm preempts it."""
        fields = {"AdminComment": with_record(job.notes.admin_comment, replace(job.record, limit=""))}
        if is_cut_short(job):
            fields["TimeLimit"] = job.record.limit
        reach("packer.started")
        self._slurm.update(job.name, fields)

    def _take_away(self, job: OpportunisticJob, reason: str) -> None:
        self._requeue(job)
        self._note(job, evicted(job, self._clock(), self._rules))
        self._say(PackingEvent("evicted", job.name, reason, job.record.placed.place if job.record.placed else None))

    def _requeue(self, job: OpportunisticJob, more: Mapping[str, str] | None = None) -> None:
        self._announce(job, more)
        # Also if no answer comes: it may have been heard.
        self._taken[job.job.job_id] = job.whole_name, self._clock()
        try:
            self._slurm.requeue_held(job.whole_name)
        except SlurmCommandError as error:
            if failure_of(error) is Failure.REFUSED:
                del self._taken[job.job.job_id]
            raise
        reach("packer.requeued")

    def _announced(self, job: OpportunisticJob) -> OpportunisticJob:
        """A job, with the announcement that slurmctld may have forgotten."""
        return replace(job, record=replace(job.record, taking=True)) if job.job.job_id in self._taken else job

    def _announce(self, job: OpportunisticJob, more: Mapping[str, str] | None = None) -> None:
        """Write down that the packer itself is about to hold a job: Slurm cannot tell whose hold one is."""
        record = replace(job.record, taking=True)
        self._slurm.update(job.name, {"AdminComment": with_record(job.notes.admin_comment, record), **(more or {})})
        reach("packer.announced")

    def _kept(self, job: OpportunisticJob) -> OpportunisticJob:
        """A job that runs on although it was to be taken away: whoever holds it from now on is not the packer."""
        record = replace(job.record, taking=False)
        self._slurm.update(job.name, {"AdminComment": with_record(job.notes.admin_comment, record)})
        return replace(job, record=record)

    def _place(self, job: OpportunisticJob, placement: PackedStart, *, forgets: bool) -> None:
        """Give a held job its place, and release it. It says that it can do with less time than it will have: backfill
        plans whole nodes, and starts nothing there that would run into the planned start of another job.
        """
        if job.has_gres:  # 22.05 adds to what it asks for already
            self._slurm.update(job.name, {"TresPerNode": ""})
            reach("packer.cleared")
        place, record = placement.place, job.record
        first = record.placed is None and record.evicted is None
        nodelist = job.job.required_nodes if first else record.nodelist
        placed = PlacedRecord(place, self._clock(), job.job.num_restarts)
        asked = record.asked | (frozenset() if forgets else {f"p{index}" for index in place.indices})
        limit_s, least_s = job.job.time_limit_s, self._rules.least_limit_s
        limit = limit_of(limit_s) if limit_s is None or limit_s > least_s else ""
        record = PackingRecord(placed, record.evicted, nodelist, asked=asked, limit=limit)
        fields = {
            "ReqNodeList": compress(place.nodes),
            "Gres": gres_of(place),
            "Comment": comment_with(job.job.comment, place),
            "AdminComment": with_record(job.notes.admin_comment, record),
            **({"TimeMin": limit_of(least_s)} if limit else {}),
        }
        self._slurm.update(job.name, fields)
        reach("packer.updated")
        self._slurm.release(job.name)
        reach("packer.released")
        self._say(PackingEvent("placed", job.name, placement.reason, place))

    def _note(self, job: OpportunisticJob, record: PackingRecord, *, is_kept: bool = False, word: str = "") -> None:
        """Write down that a job has no place; without one in its Comment no Prolog gives it a GPU."""
        comment = comment_without_place(with_hold(job.job.comment) if is_kept else job.job.comment, word)
        noted = with_record(job.notes.admin_comment, record)
        time = {"TimeLimit": job.record.limit} if job.record.limit else {}
        self._slurm.update(job.name, {"Comment": comment, "AdminComment": with_guard(noted) if word else noted, **time})

    def _say_once(self, events: Iterable[PackingEvent]) -> None:
        """Say what is new; numbers in a reason change all the time."""
        for event in events:
            gist = event.event, event.place, re.sub(r"[\d.,]+", "", event.reason)
            if self._said.get(event.job) != gist:
                self._said[event.job] = gist
                self._say(event)
