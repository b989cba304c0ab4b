"""Prometheus metrics of a cluster, for `hetstream exporter`.

A scrape shows the newest reading and asks Slurm nothing. When slurmctld does not answer, `hetstream_up` is 0 and what
was seen before is not shown as if it were now. Units are Prometheus's: seconds, bytes, ratios.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from hetstream.base import prometheus
from hetstream.base.errors import HetstreamError
from hetstream.base.prometheus import Column, Metric, ReadingCollector, families
from hetstream.slurm_plugin.client.counted import Counted, counted
from hetstream.slurm_plugin.client.model import Partition
from hetstream.slurm_plugin.coordinator.table import GpuRow, GpuTable, ProcessRow, look
from hetstream.slurm_plugin.insight.fragmentation import NodeFragmentation
from hetstream.slurm_plugin.insight.observation import Observation, Reading, Waiting
from hetstream.slurm_plugin.render.page import cannot_listen

MB_BYTES = 1024 * 1024
# One rule for all: `client/counted.py`.
_WHICH = "of the nodes on which jobs can start, and what jobs hold on others."

_READING: list[Column[Reading]] = [
    ("hetstream_up", "Whether slurmctld answered the last time (1) or not (0).", lambda r: float(bool(r.observation))),
    ("hetstream_read_duration_seconds", "Time that the last reading of the cluster took.", lambda r: r.read_s),
    ("hetstream_last_read_timestamp_seconds", "When a reading last succeeded.", lambda r: r.success_s),
]
_CLUSTER: list[Column[Observation]] = [
    ("hetstream_cluster_nodes", "Nodes on which jobs can start.", lambda o: len(o.fragmentation.nodes)),
    (
        "hetstream_cluster_nodes_out_of_use",
        "Nodes on which no job can start.",
        lambda o: len(o.fragmentation.left_out),
    ),
    ("hetstream_cluster_cpus", f"CPUs {_WHICH}", lambda o: o.sample.cpus),
    ("hetstream_cluster_cpus_allocated", "Of those, held by jobs.", lambda o: o.sample.cpus_allocated),
    ("hetstream_cluster_gpus", f"GPUs {_WHICH}", lambda o: o.sample.gpus),
    ("hetstream_cluster_gpus_allocated", "Of those, held by jobs.", lambda o: o.sample.gpus_allocated),
    (
        "hetstream_cluster_memory_bytes",
        f"Memory {_WHICH}",
        lambda o: o.sample.memory_mb * MB_BYTES,
    ),
    (
        "hetstream_cluster_memory_allocated_bytes",
        "Of that, held by jobs.",
        lambda o: o.sample.memory_allocated_mb * MB_BYTES,
    ),
    ("hetstream_cluster_cpu_load", "Threads that want a CPU, on all these nodes.", lambda o: o.sample.cpu_load),
    ("hetstream_cluster_stranded_gpus", "Free GPUs that no pending job can use.", lambda o: o.sample.stranded_gpus),
    ("hetstream_cluster_stranded_cpus", "Free CPUs that no pending job can use.", lambda o: o.sample.stranded_cpus),
    (
        "hetstream_cluster_fragmentation_ratio",
        "Mean over nodes with GPUs of |freeCPU/CPU - freeGPU/GPU|.",
        lambda o: o.sample.indicator,
    ),
    (
        "hetstream_cluster_cpus_gone_ratio",
        "Share of nodes with GPUs: all CPUs taken, more than 25 % of the GPUs free.",
        lambda o: o.fragmentation.share_without_cpus,
    ),
    (
        "hetstream_cluster_gpus_gone_ratio",
        "Share of nodes with GPUs: all GPUs taken, more than 25 % of the CPUs free.",
        lambda o: o.fragmentation.share_without_gpus,
    ),
    ("hetstream_cluster_running_jobs", "Running jobs.", lambda o: o.sample.num_running),
    (
        "hetstream_cluster_gpus_measured",
        "GPUs of hetstream jobs whose trainers tell how long they wait.",
        lambda o: o.sample.gpus_measured,
    ),
    ("hetstream_cluster_gpus_starved", "Of those, as many as wait for data.", lambda o: o.sample.gpus_starved),
]
_WAITING: list[Column[Waiting]] = [
    ("hetstream_pending_jobs", "Pending jobs, by what they wait for first.", lambda w: w.num_jobs),
    ("hetstream_pending_cpus", "CPUs that they ask for.", lambda w: w.cpus),
    ("hetstream_pending_gpus", "GPUs that they ask for.", lambda w: w.gpus),
    ("hetstream_pending_wait_mean_seconds", "How long they have waited so far, on average.", lambda w: w.mean_s),
    ("hetstream_pending_wait_longest_seconds", "The longest of them.", lambda w: w.longest_s),
]
_NODE: list[Column[NodeFragmentation]] = [
    ("hetstream_node_cpus", f"CPUs {_WHICH}", lambda n: n.cpus),
    ("hetstream_node_cpus_free", "Of those, held by no job.", lambda n: n.cpus_free),
    ("hetstream_node_gpus", f"GPUs {_WHICH}", lambda n: n.gpus),
    ("hetstream_node_gpus_free", "Of those, held by no job.", lambda n: n.gpus_free),
    ("hetstream_node_memory_bytes", f"Memory {_WHICH}", lambda n: n.memory_mb * MB_BYTES),
    ("hetstream_node_memory_free_bytes", "Of that, held by no job.", lambda n: n.memory_free_mb * MB_BYTES),
    ("hetstream_node_fragmentation_ratio", "freeCPU/CPU - freeGPU/GPU, -1 to 1.", lambda n: n.indicator),
    ("hetstream_node_stranded_gpus", "Free GPUs that no pending job can use.", lambda n: n.stranded_gpus),
    ("hetstream_node_stranded_cpus", "Free CPUs that no pending job can use.", lambda n: n.stranded_cpus),
]
_PARTITION: list[Column[Counted]] = [
    ("hetstream_partition_cpus", f"CPUs {_WHICH}", lambda there: there.cpus),
    ("hetstream_partition_cpus_allocated", "Of those, held by jobs of any partition.", lambda there: there.cpus_held),
    ("hetstream_partition_gpus", f"GPUs {_WHICH}", lambda there: there.gpus),
    ("hetstream_partition_gpus_allocated", "Of those, held by jobs of any partition.", lambda there: there.gpus_held),
]


class ClusterCollector(ReadingCollector):
    """Turns the newest reading into metrics."""

    def __init__(self) -> None:
        super().__init__(Reading())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus_client for each scrape."""
        reading: Reading = self.reading
        yield from families(_READING, [], [([], reading)])
        errors: list[Column[int]] = [("hetstream_read_errors_total", "Readings that failed.", lambda count: count)]
        yield from families(errors, ["kind"], [([kind], count) for kind, count in reading.num_errors.items()])
        seen = reading.observation
        if seen is None:
            return
        yield from families(_CLUSTER, [], [([], seen)])
        yield from families(_WAITING, ["cause"], [([cause], waiting) for cause, waiting in seen.sample.waiting.items()])
        yield from families(_NODE, ["node"], [([node.node], node) for node in seen.fragmentation.counted_nodes])
        partitions = [([partition.name], _counted_in(partition, seen)) for partition in seen.snapshot.partitions]
        yield from families(_PARTITION, ["partition"], partitions)


class MetricsServer(prometheus.MetricsServer):
    """As the one of `base`.

    Raises:
        ServeError: the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, collector: ReadingCollector) -> None:
        try:
            super().__init__(host, port, collector)
        except OSError as error:
            raise cannot_listen(host, port, error) from error


def _counted_in(partition: Partition, seen: Observation) -> Counted:
    return counted(node for node in seen.snapshot.nodes if partition.name in node.partitions)


# Prometheus metrics of a node's shared GPUs, for `hetstream gpu exporter`.
#
# A scrape shows the newest reading. While the coordinator does not answer, `hetstream_gpu_up` is 0 and nothing else is
# shown.

_log = logging.getLogger(__name__)

_GPU: list[Column[GpuRow]] = [
    ("hetstream_gpu_memory_bytes", "Memory that the GPU's jobs may hold together.", lambda g: g.capacity_bytes),
    ("hetstream_gpu_memory_free_bytes", "Of that, left by its jobs' peaks and by others.", lambda g: g.free_bytes),
    ("hetstream_gpu_memory_used_bytes", "Memory in use by whomever, as the driver counts it.", lambda g: g.used_bytes),
    (
        "hetstream_gpu_memory_agentless_bytes",
        "Memory that processes without an agent hold, as the driver counts it.",
        lambda g: g.agentless_bytes,
    ),
    (
        "hetstream_gpu_utilisation_ratio",
        "Share of the last ten seconds in which anything ran on the GPU.",
        lambda g: g.utilisation,
    ),
    ("hetstream_gpu_lost", "Whether the GPU answers no more.", lambda g: g.is_lost),
    (
        "hetstream_gpu_guaranteed_idle_ratio",
        "Share of the guaranteed job's mini-batches in which it leaves the GPU idle.",
        lambda g: g.idle_share,
    ),
]
_PROCESS: list[Column[ProcessRow]] = [
    ("hetstream_gpu_process_held_bytes", "Memory of the GPU that the process holds.", lambda p: p.held_bytes),
    ("hetstream_gpu_process_limit_bytes", "Most that it may hold; none: all that there is.", lambda p: p.limit_bytes),
    ("hetstream_gpu_process_host_bytes", "What its last mini-batch had on the host.", lambda p: p.host_bytes),
    (
        "hetstream_gpu_process_busy_share_ratio",
        "Share of the guaranteed job's busy time that it may use.",
        lambda p: p.share,
    ),
    ("hetstream_gpu_process_may_run", "Whether it may launch work (1) or pauses (0).", lambda p: p.verdict != "pause"),
    ("hetstream_gpu_process_batches_total", "Mini-batches that it has made.", lambda p: p.num_batches),
    ("hetstream_gpu_process_batch_seconds", "How long one takes now.", lambda p: p.batch_s),
    ("hetstream_gpu_process_batch_alone_seconds", "How long one takes alone.", lambda p: p.alone_s),
    ("hetstream_gpu_process_paused_seconds_total", "How long it was held up.", lambda p: p.paused_s),
    ("hetstream_gpu_process_disobedient", "Whether it does not keep to its orders.", lambda p: p.is_disobedient),
]


@dataclass(frozen=True)
class GpuReading:
    """What was seen last; without a table the coordinator did not answer."""

    table: GpuTable | None = None


class GpuCollector(ReadingCollector):
    """Reads the coordinator, and turns the newest reading into metrics.

    Args:
        socket: of the coordinator.
        coordinator_uid: user that it may run as, beside root and this user.
        public: who sees the metrics may see all processes. The coordinator shows each user his own.
    """

    def __init__(self, socket: str, coordinator_uid: int | None, *, public: bool) -> None:
        super().__init__(GpuReading())
        self._socket, self._coordinator_uid, self._public = socket, coordinator_uid, public

    def read(self) -> None:
        """Ask the coordinator now."""
        try:
            self.reading = GpuReading(look(self._socket, self._coordinator_uid))
        except HetstreamError as error:
            if self.reading.table is not None:
                _log.warning("the GPUs' coordinator was not read: %s", error)
            self.reading = GpuReading()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics; called by prometheus_client for each scrape."""
        table: GpuTable | None = self.reading.table
        text = "Whether the coordinator answered the last time (1) or not (0)."
        up: list[Column[GpuReading]] = [("hetstream_gpu_up", text, lambda reading: float(reading.table is not None))]
        yield from families(up, [], [([], self.reading)])
        gpus = table.gpus if table else ()
        yield from families(_GPU, ["gpu"], [([row.gpu], row) for row in gpus])
        if not self._public:
            return
        yield from families(
            _PROCESS,
            ["gpu", "job", "class", "pid"],
            [([row.gpu, p.job, p.job_class, str(p.pid)], p) for row in gpus for p in row.processes],
        )
