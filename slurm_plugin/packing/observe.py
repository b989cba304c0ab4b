"""What the packer sees: Slurm's records, its own notes in them and the nodes' readings, as one state. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field

from hetstream.hetjob.site.gpus import ShowGpus
from hetstream.slurm_plugin.client.model import Snapshot
from hetstream.slurm_plugin.packing.jobs import OpportunisticJob, Settlement, settlement_of, waiting_job
from hetstream.slurm_plugin.packing.nodes import SeenNodes
from hetstream.slurm_plugin.packing.rules import PackingRules
from hetstream.slurm_plugin.packing.state import PackingState, PlacedJob
from hetstream.slurm_plugin.packing.tenants import QuotaView, Tenants, is_upgraded, quota_view


@dataclass(frozen=True)
class PackingView:
    """What is seen at one moment.

    Attributes:
        state: for `decide`.
        jobs: all that are served, by name.
        settlements: what is amiss.
        running: jobs to be compared with what Slurm gave them.
        lost: names of jobs that were to be requeued, and have ended.
        quota: who has quota, and who waits for it.
        snapshot, readings: what all this was made of.
    """

    state: PackingState
    quota: QuotaView
    snapshot: Snapshot
    readings: ShowGpus | None = None
    jobs: Mapping[str, OpportunisticJob] = field(default_factory=dict)
    settlements: tuple[Settlement, ...] = ()
    running: tuple[OpportunisticJob, ...] = ()
    lost: tuple[str, ...] = ()

    @property
    def names(self) -> Set[str]:
        """Of all jobs that it is about."""
        quota = self.quota
        return self.jobs.keys() | quota.guaranteed.keys() | quota.unguarded.keys() | quota.reasons.keys() | {*self.lost}


def view(
    snapshot: Snapshot,
    jobs: Iterable[OpportunisticJob],
    readings: ShowGpus | None,
    partitions: Collection[str],
    now_s: float,
    switches: Mapping[str, tuple[str, ...]] | None = None,
    rules: PackingRules | None = None,
    tenants: Tenants | None = None,
) -> PackingView:
    """Put together what was read.

    Args:
        snapshot: of Slurm.
        jobs: see `served_jobs`.
        readings: what nodes told; None: nobody knows.
        partitions: whose nodes are used.
        now_s: the time, in seconds since the epoch.
        switches: above each node.
        rules: other than the usual ones.
        tenants: with quotas; None: there are none.
    """
    rules = rules or PackingRules()
    jobs = list(jobs)
    settlements = dict[str, Settlement]()  # one for all components of a heterogeneous job
    placed, starting, waiting = [], [], []
    for job in jobs:
        amiss = settlement_of(job, now_s, rules)
        if amiss:
            settlements.setdefault(job.whole_name, amiss)
        elif job.record.placed and not job.is_held:
            placed.append(job)
            starting += [job] if job.job.is_pending else []
        elif job.job.is_pending:
            waiting.append(job)
    sharing = _sharing(readings, rules)
    nodes = SeenNodes(snapshot, readings, partitions, now_s).made(jobs, placed, starting, rules, switches or {})
    state = PackingState(
        nodes,
        tuple(waiting_job(job, snapshot, now_s, rules) for job in waiting),
        tuple(_placed(job, sharing) for job in placed),
    )
    running = tuple(job for job in placed if job.job.is_running and job.job.state != "COMPLETING")
    quota = quota_view(snapshot, jobs, readings, tenants or Tenants(), now_s, rules)
    by_name = {job.name: job for job in jobs}
    return PackingView(state, quota, snapshot, readings, by_name, tuple(settlements.values()), running)


def _placed(job: OpportunisticJob, sharing: Mapping[tuple[str, str], tuple[float, str]]) -> PlacedJob:
    assert job.record.placed is not None
    place, number = job.record.placed.place, str(job.job.job_id)
    readings = [sharing[node, number] for node in place.nodes if (node, number) in sharing]  # others know nothing of it
    paused_s = max((paused_s for paused_s, _ in readings), default=0.0)
    complaint = next((complaint for _, complaint in readings if complaint), "")
    return PlacedJob(job.name, place, job.wish.gpu_bytes, is_upgraded(job), paused_s, complaint)


def _sharing(readings: ShowGpus | None, rules: PackingRules) -> dict[tuple[str, str], tuple[float, str]]:
    """What each node has said lately of each opportunistic job, by number: for how long it was paused, a complaint."""
    found: dict[tuple[str, str], tuple[float, str]] = {}
    for node in readings.nodes if readings else ():
        for gpu in node.gpus if node.age_s <= rules.oldest_s else ():
            for job in gpu.sharing:
                paused_s, complaint = found.get((node.node, job.job), (0.0, ""))
                text = f"{node.node}: {job.complaint}" if job.complaint else ""
                found[node.node, job.job] = max(paused_s, job.paused_s), complaint or text
    return found
