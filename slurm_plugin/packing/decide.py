"""Which opportunistic jobs go where, who is taken away, and why the others wait: (state, time) -> plan. Pure.

In doubt nobody is placed: a GPU of which nothing was read lately takes nobody, and nobody is evicted because of what is
not known. A job gets all that it needs at once, or nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations

from hetstream.base.text import count_words
from hetstream.slurm_plugin.packing.state import (
    GpuNode,
    PackingRules,
    PackingState,
    Place,
    PlacedJob,
    SharedGpu,
    WaitingJob,
    by_number,
)

_GIB = 1 << 30
# GPUs beyond those that a job needs, the best ones, among which combinations are sought; of gangs, whose nodes must
# have the same numbers free, more.
_SPARE_GPUS = 4
_SPARE_GPUS_OF_GANGS = 8
# Most sets of GPU numbers that are tried for a gang over several nodes.
_MOST_SETS = 200
# GPUs that differ by less in what they leave count as alike: then the nearer ones are better.
_ALIKE = 0.1


@dataclass(frozen=True, slots=True)
class PackedStart:
    """A job that is to start, where, and why there."""

    job: str
    place: Place
    reason: str


@dataclass(frozen=True, slots=True)
class Eviction:
    """A job that is to be requeued, and why."""

    job: str
    reason: str


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """What is to be done.

    Attributes:
        placements: in the order in which they are to be made.
        evictions: likewise.
        reasons: why each of the other waiting jobs waits, by its id.
    """

    placements: tuple[PackedStart, ...] = ()
    evictions: tuple[Eviction, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)


def decide(state: PackingState, now_s: float, rules: PackingRules | None = None) -> PackingPlan:
    """Return what is to be done now.

    Args:
        state: the cluster.
        now_s: the time, in seconds since the epoch.
        rules: other than the usual ones.
    """
    rules = rules or PackingRules()
    placements: list[PackedStart] = []
    reasons: dict[str, str] = {}
    nodes = [_Room(node, state.placed, now_s, rules) for node in state.nodes]
    # Room only shrinks: where one job finds none, others that ask alike find none.
    refused: dict[object, str] = {}
    for job in sorted(state.waiting, key=lambda job: (job.submit_s, by_number(job.job))):
        shape = _shape(job)
        reason = job.closed or _too_early(job, now_s) or refused.get(shape, "")
        if not reason and len(placements) >= rules.most_placements:
            reason = f"{len(placements)} other jobs are placed now; it comes next"
        if reason:
            reasons[job.job] = reason
            continue
        found = _find(nodes, job)
        if found is None:
            reasons[job.job] = refused[shape] = _why_not(nodes, job)
            continue
        place, left = found
        for room in nodes:
            if room.node.name in place.nodes:
                room.take(job, place)
        placements.append(PackedStart(job.job, place, f"{left:.0%} of the busiest of its GPUs is left to it"))
    evictions = tuple(
        Eviction(job.job, reason) for job in state.placed if (reason := _why_evict(job, rules))
    )  # fmt: skip
    return PackingPlan(tuple(placements), evictions, reasons)


def verdicts(
    state: PackingState, job: WaitingJob, now_s: float, rules: PackingRules | None = None
) -> list[tuple[str, SharedGpu, str]]:
    """Return what each GPU, with its node, says to a waiting job: why it does not take it; empty if it does.

    Args:
        state: the cluster.
        job: any of its waiting jobs.
        now_s: the time.
        rules: other than the usual ones.
    """
    rooms = [_Room(node, state.placed, now_s, rules or PackingRules()) for node in state.nodes]
    return [
        (room.node.name, gpu, room.why_not(job) or room.why_not_gpu(gpu, job))
        for room in rooms
        for gpu in room.node.gpus
    ]


def _shape(job: WaitingJob) -> object:
    """What a job asks for; equal for jobs that ask alike."""
    only = frozenset(job.only_nodes)
    return job.num_nodes, job.gpus, job.gpu_bytes, job.cpus, job.memory_mb, job.is_guaranteed, only, job.reservations


def _too_early(job: WaitingJob, now_s: float) -> str:
    left_s = job.not_before_s - now_s
    return f"it was evicted, and is placed again in {left_s:.0f} s at the earliest" if left_s > 0 else ""


def _why_evict(job: PlacedJob, rules: PackingRules) -> str:
    if job.complaint:
        return job.complaint
    if job.paused_s > rules.most_paused_s:
        return f"it was paused for {job.paused_s:.0f} s, and may do better elsewhere"
    return ""


class _Room:
    """What a node has for jobs that are still to be placed."""

    def __init__(self, node: GpuNode, placed: Iterable[PlacedJob], now_s: float, rules: PackingRules) -> None:
        self.node = node
        self.cpus = node.cpus_free
        self.memory_mb = node.memory_free_mb
        self._now_s, self._rules = now_s, rules
        self._num_jobs: Counter[int] = Counter()
        self._declared_bytes: Counter[int] = Counter()
        self._guaranteed = {gpu.index for gpu in node.gpus if gpu.has_guaranteed}
        self._fresh: set[int] = set()  # got a job in this call
        for job in placed:
            if node.name in job.place.nodes:
                self._count(job.place.indices, job.gpu_bytes, job.is_guaranteed)

    def take(self, job: WaitingJob, place: Place) -> None:
        """A job comes."""
        self.cpus -= job.cpus
        self.memory_mb -= job.memory_mb
        self._count(place.indices, job.gpu_bytes, job.is_guaranteed)
        self._fresh.update(place.indices)

    def why_not(self, job: WaitingJob) -> str:
        """Return why the node takes no such job; empty if it may."""
        if self.node.closed:
            return f"on nodes out of use ({self.node.closed})"
        if job.reservations and self.node.reservation not in job.reservations:
            return f"on nodes outside of its reservation ({','.join(job.reservations)})"
        if self.node.reservation and not job.reservations:
            return "on nodes that are reserved for others"
        if job.only_nodes and self.node.name not in job.only_nodes:
            return "on nodes that it does not ask for"
        if self.cpus < job.cpus:
            return f"on nodes with less than {count_words(job.cpus, 'CPU')} free"
        if self.memory_mb < job.memory_mb:
            return f"on nodes with less than {job.memory_mb:,} MB free"
        return ""

    def why_not_gpu(self, gpu: SharedGpu, job: WaitingJob) -> str:
        """Return why the GPU takes no such job; empty if it does."""
        rules, use, index = self._rules, gpu.use, gpu.index
        if gpu.closed:
            return gpu.closed
        if use is None or not 0 <= self._now_s - use.read_s <= rules.oldest_s:
            return f"of which nothing was read in the last {rules.oldest_s:.0f} s"
        if use.closed:
            return use.closed
        if job.is_guaranteed and index in self._guaranteed:
            return "that a guaranteed job has"
        if self._num_jobs[index] >= min(gpu.slots, rules.most_jobs):
            return "with as many opportunistic jobs as they may have"
        if index in self._fresh or self._now_s < gpu.not_before_s:
            return "that have just got a job, or rest after an eviction"
        if not use.used_share < rules.most_used:
            return f"in use for {rules.most_used:.0%} of the last 10 s or more"
        if use.free_bytes - self._declared_bytes[index] < job.gpu_bytes:
            return f"with less than {job.gpu_bytes / _GIB:.1f} GiB free beside others"
        return ""

    def left(self, job: WaitingJob) -> dict[int, float]:
        """Return numbers of the GPUs that take the job, and the share of each that it would have."""
        if self.why_not(job):
            return {}
        return {gpu.index: self._share(gpu) for gpu in self.node.gpus if not self.why_not_gpu(gpu, job)}

    def _share(self, gpu: SharedGpu) -> float:
        """What the GPU leaves: idle time, or the time that its trainers wait for data if that is more."""
        assert gpu.use is not None
        idle = max(1.0 - gpu.use.used_share, gpu.use.wait_share or 0.0)
        return idle / (1 + self._num_jobs[gpu.index])

    def _count(self, indices: Iterable[int], gpu_bytes: int, is_guaranteed: bool) -> None:
        for index in indices:
            self._num_jobs[index] += 1
            self._declared_bytes[index] += gpu_bytes
            if is_guaranteed:
                self._guaranteed.add(index)


def _find(nodes: list[_Room], job: WaitingJob) -> tuple[Place, float] | None:
    """The best place for a job, and the share of its busiest GPU that it would have; None if there is none."""
    left = {room.node.name: shares for room in nodes if len(shares := room.left(job)) >= job.gpus}
    if len(left) < job.num_nodes:
        return None
    if job.num_nodes == 1:
        best = {name: _best_set(shares, job.gpus) for name, shares in left.items()}
        name = min(left, key=lambda name: (_rank(best[name], left[name]), name))
        return Place((name,), best[name]), min(left[name][index] for index in best[name])
    switches = {room.node.name: room.node.switches for room in nodes}
    tried: Counter[tuple[int, ...]] = Counter()
    for shares in left.values():
        tried.update(_sets(shares, job.gpus, _SPARE_GPUS_OF_GANGS))
    found: list[tuple[tuple[int, float], tuple[str, ...], tuple[int, ...]]] = []
    for indices, num_nodes in tried.most_common(_MOST_SETS):
        if num_nodes >= job.num_nodes:
            lowest = {
                name: min(shares[index] for index in indices)
                for name, shares in left.items()
                if shares.keys() >= {*indices}
            }
            distance, chosen = _nearest(lowest, switches, job.num_nodes)
            found.append(((distance, -min(lowest[name] for name in chosen)), chosen, indices))
    if not found:
        return None
    (_, less), chosen, indices = min(found)
    return Place(chosen, indices), -less


def _sets(shares: Mapping[int, float], count: int, spare: int) -> list[tuple[int, ...]]:
    """Sets of GPUs of a node, of those that leave most and no more than `spare` others."""
    best = sorted(shares, key=lambda index: (-shares[index], index))[: count + spare]
    return list(combinations(sorted(best), count))


def _best_set(shares: Mapping[int, float], count: int) -> tuple[int, ...]:
    return min(_sets(shares, count, _SPARE_GPUS), key=lambda indices: _rank(indices, shares))


def _rank(indices: tuple[int, ...], shares: Mapping[int, float]) -> tuple[float, int, float]:
    """The less, the better: what the busiest of them leaves, how far they are apart, and what all leave."""
    found = [shares[index] for index in indices]
    return -(min(found) // _ALIKE), indices[-1] - indices[0], -sum(found)


def _nearest(
    shares: Mapping[str, float], switches: Mapping[str, tuple[str, ...]], count: int
) -> tuple[int, tuple[str, ...]]:
    """The best nodes below one switch, as low as can be, and how many levels that is above the lowest."""
    depth = max(len(switches[name]) for name in shares)
    for common in range(depth, -1, -1):
        below: dict[tuple[str, ...], list[str]] = {}
        for name in sorted(shares, key=lambda name: (-shares[name], name)):
            if len(switches[name]) >= common:
                below.setdefault(switches[name][:common], []).append(name)
        groups = [names[:count] for names in below.values() if len(names) >= count]
        if groups:
            best = max(groups, key=lambda names: min(shares[name] for name in names))
            return depth - common, tuple(sorted(best))
    # All of them are below no switch at all.
    raise ValueError(f"{count_words(len(shares), 'node')}: fewer than {count}")


def _why_not(nodes: list[_Room], job: WaitingJob) -> str:
    """Why a job finds no place, for people."""
    reasons: Counter[str] = Counter()
    num_gpus = 0
    for room in nodes:
        why_not = room.why_not(job)
        for gpu in room.node.gpus:
            num_gpus += 1
            reasons[why_not or room.why_not_gpu(gpu, job)] += 1
    if not num_gpus:
        return "there is no GPU that opportunistic jobs may use"
    num_open = reasons.pop("", 0)
    counted = "; ".join(f"{count} {reason}" for reason, count in reasons.most_common())
    if not num_open:
        return f"no GPU of {num_gpus} takes it now: {counted}"
    asks = f"it needs {count_words(job.gpus, 'GPU')} of one node"
    if job.num_nodes > 1:
        asks = f"it needs {count_words(job.gpus, 'GPU')} with the same numbers on each of {job.num_nodes} nodes"
    return f"{asks} at once, and {num_open} of {num_gpus} could take it now" + (f": {counted}" if counted else "")
