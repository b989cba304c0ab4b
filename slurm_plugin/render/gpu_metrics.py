"""Prometheus metrics of a node's shared GPUs, for `hetstream gpu exporter`.

A scrape shows the newest reading. While the coordinator does not answer, `hetstream_gpu_up` is 0 and nothing else is
shown.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from hetstream.base.errors import HetstreamError
from hetstream.base.installed import install_command
from hetstream.slurm_plugin.coordinator.look import look
from hetstream.slurm_plugin.coordinator.table import GpuRow, GpuTable, ProcessRow
from hetstream.slurm_plugin.errors import ServeError

try:
    from prometheus_client.core import Metric

    from hetstream.mpi_dataworkers.dispatcher.exposition import Column, PrintableCollector, families
except ImportError as error:
    raise ServeError(f"metrics need the package prometheus-client. Run: {install_command('metrics')}") from error

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


class GpuCollector(PrintableCollector):
    """Reads the coordinator, and turns the newest reading into metrics.

    Args:
        socket: of the coordinator.
        coordinator_uid: user that it may run as, beside root and this user.
        public: who sees the metrics may see all processes. The coordinator shows each user his own.
    """

    def __init__(self, socket: str, coordinator_uid: int | None, *, public: bool) -> None:
        self._socket, self._coordinator_uid, self._public = socket, coordinator_uid, public
        self.reading = GpuReading()

    def read(self) -> None:
        """Ask the coordinator now."""
        try:
            self.reading = GpuReading(look(self._socket, self._coordinator_uid))
        except HetstreamError as error:
            if self.reading.table is not None:
                _log.warning("the GPUs' coordinator was not read: %s", error)
            self.reading = GpuReading()

    def collect(self) -> Iterator[Metric]:
        """The metrics; called by prometheus_client for each scrape."""
        table = self.reading.table
        up: list[Column[GpuReading]] = [
            ("hetstream_gpu_up", "Whether the coordinator answered the last time (1) or not (0).", _is_up)
        ]
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


def _is_up(reading: GpuReading) -> float:
    return float(reading.table is not None)
