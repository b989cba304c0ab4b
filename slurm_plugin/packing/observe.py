"""What the packer sees: Slurm's records, its own notes in them and the nodes' readings, as one state. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Set
from dataclasses import dataclass, field

from hetstream.hetjob.site.messages import GpuNow, ShowGpus
from hetstream.slurm_plugin.client.model import SHARING, Node, Snapshot
from hetstream.slurm_plugin.packing.jobs import OpportunisticJob, Settlement, settlement_of, slots_of, waiting_job
from hetstream.slurm_plugin.packing.quota_file import QuotaView, Tenants, is_upgraded, quota_view
from hetstream.slurm_plugin.packing.state import (
    GpuNode,
    GpuUse,
    PackingRules,
    PackingState,
    Place,
    PlacedJob,
    SharedGpu,
)

# The nodes of the packer's state: Slurm's records and the nodes' readings, compared. Pure.


class SeenNodes:
    """Makes the state's nodes."""

    def __init__(
        self, snapshot: Snapshot, readings: ShowGpus | None, partitions: Collection[str], now_s: float
    ) -> None:
        self._up = {
            partition.name for partition in snapshot.partitions if partition.is_up and partition.name in partitions
        }
        self._nodes = [node for node in snapshot.nodes if not set(partitions).isdisjoint(node.partitions)]
        self._read = {node.node: node for node in readings.nodes} if readings else {}
        self._shares = readings.wait_shares if readings else {}
        self._now_s = now_s

    def made(
        self,
        jobs: Iterable[OpportunisticJob],
        placed: Iterable[OpportunisticJob],
        starting: Iterable[OpportunisticJob],
        rules: PackingRules,
        switches: Mapping[str, tuple[str, ...]],
    ) -> tuple[GpuNode, ...]:
        """Return all nodes with GPUs for opportunistic jobs."""
        not_before = _not_before(jobs, rules)
        known = Counter(
            spot
            for job in placed
            if job.job.is_running and job.record.placed
            for spot in job.record.placed.place.gpus()
        )
        cpus, memory_mb = Counter[str](), Counter[str]()
        for job in starting:  # Slurm counts them when they have started
            place = job.record.placed.place if job.record.placed else Place((), ())
            for name in place.nodes:
                cpus[name] += -(-job.job.num_cpus // len(place.nodes))
                memory_mb[name] += -(-job.job.memory_mb // len(place.nodes))
        found = []
        for node in self._nodes:
            slots = slots_of(node.gres)
            used = slots_of(node.gres_used)
            gpus = tuple(
                self._gpu(node, index, count - max(0, used[index] - known[node.name, index]), not_before)
                for index, count in sorted(slots.items())
            )
            if gpus:
                found.append(
                    GpuNode(
                        node.name, node.cpus_free - cpus[node.name], node.memory_free_mb - memory_mb[node.name], gpus,
                        switches.get(node.name, ()), self._closed(node),
                        (node.reservation or "of others") if node.is_reserved else "",
                    )
                )  # fmt: skip
        return tuple(found)

    def _closed(self, node: Node) -> str:
        if not node.is_usable:
            return node.state
        return "" if self._up.intersection(node.partitions) else "partition down"

    def _gpu(self, node: Node, index: int, slots: int, not_before: Mapping[tuple[str, int], float]) -> SharedGpu:
        reading = self._reading(node.name, index)
        in_use = _in_use(node)
        closed = ""
        if node.mig:
            closed = "of nodes with parts of GPUs (MIG)"
        elif reading and in_use is not None and index in in_use and not reading.is_reserved:
            closed = "that Slurm gave to a job of which the node knows nothing (Prolog)"
        return SharedGpu(
            index,
            max(0, slots),
            in_use is None or index in in_use or bool(reading and reading.is_reserved),
            self._use(node.name, reading) if reading else None,
            not_before.get((node.name, index), 0.0),
            closed,
        )

    def _reading(self, node: str, index: int) -> GpuNow | None:
        read = self._read.get(node)
        return next((gpu for gpu in read.gpus if gpu.index == index), None) if read else None

    def _use(self, node: str, reading: GpuNow) -> GpuUse:
        shares = [self._shares[job] for job in reading.guaranteed if job in self._shares]
        read_s = self._now_s - max(0.0, self._read[node].age_s)
        return GpuUse(read_s, reading.used_share, reading.free_bytes, max(shares, default=None), reading.closed)


def _in_use(node: Node) -> set[int] | None:
    """Numbers of the GPUs that Slurm has given to jobs of their own; None where it does not say which."""
    found = [gres for gres in node.gres_used if (gres.name == "gpu" or gres.name in SHARING) and gres.count > 0]
    # Since 24.11 the parts of shared GPUs are listed type by type: with several types a place is no number of a device.
    types = {gres.name: len({other.type for other in node.gres if other.name == gres.name}) for gres in found}
    if any(not gres.indices or (gres.name in SHARING and types[gres.name] > 1) for gres in found):
        return None
    if (node.gpus_allocated or 0) > node.gpus_in_use():
        return None
    return {index for gres in found for index in gres.indices}


def _not_before(jobs: Iterable[OpportunisticJob], rules: PackingRules) -> dict[tuple[str, int], float]:
    """Until when GPUs rest: those that somebody was evicted from, and those that have just got a job.

    Not those whose job its owner has requeued: with that he would keep them from everybody.

    No longer if the job was evicted often: that may be its own fault, and it would close one GPU after the other.
    """
    found: dict[tuple[str, int], float] = {}
    for job in jobs:
        placed, gone = job.record.placed, job.record.evicted
        rests = [(gone.place, gone.at_s + rules.first_delay_s)] if gone and gone.place else []
        rests += [(placed.place, placed.at_s + rules.settle_s)] if placed else []
        for place, until_s in rests:
            for spot in place.gpus():
                found[spot] = max(found.get(spot, 0.0), until_s)
    return found


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
