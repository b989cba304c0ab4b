"""The nodes of the packer's state: Slurm's records and the nodes' readings, compared. Pure; called by `observe.py`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from hetstream.hetjob.site.gpus import GpuNow, ShowGpus
from hetstream.slurm_plugin.client.model import SHARING, Node, Snapshot
from hetstream.slurm_plugin.packing.jobs import OpportunisticJob, slots_of
from hetstream.slurm_plugin.packing.rules import PackingRules
from hetstream.slurm_plugin.packing.state import GpuNode, GpuUse, Place, SharedGpu


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
        """All nodes with GPUs for opportunistic jobs."""
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
