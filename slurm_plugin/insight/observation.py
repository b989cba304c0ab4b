"""A cluster as dashboards show it: (snapshot, what trainers told) -> totals, fragmentation, who waits for what. Pure.

Used by `hetstream report`, `hetstream serve` and `hetstream exporter`, so that all three show the same figures. A
`Sample` is the part that is kept: a few numbers of one moment, whatever the size of the cluster.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from hetstream.base import typed_json
from hetstream.base.errors import HetstreamError
from hetstream.base.process import sleep_in_parts
from hetstream.slurm_plugin.client.counted import cpus_asked, held_by, num_of_jobs, whole_if_near
from hetstream.slurm_plugin.client.model import Cluster, Job, Snapshot
from hetstream.slurm_plugin.database import BUSY_TIMEOUT_S, DatabaseFile, create_private
from hetstream.slurm_plugin.errors import NodesHidden
from hetstream.slurm_plugin.insight.fragmentation import Fragmentation, measure
from hetstream.slurm_plugin.insight.node_table import alike_jobs
from hetstream.slurm_plugin.insight.shared_gpus import SharedGpus
from hetstream.slurm_plugin.insight.why import Explainer

# Between these lie the classes of GoldMiner's indicator, from "CPUs gone" over "in step" to "GPUs gone".
CLASS_EDGES = (-0.5, -0.25, 0.25, 0.5)
NUM_CLASSES = len(CLASS_EDGES) + 1


@dataclass(frozen=True, slots=True)
class Waiting:
    """The pending jobs that wait for one thing.

    Attributes:
        num_jobs: array tasks count one by one.
        cpus, gpus: what they ask for together.
        waited_s: how long they have waited since they could have started, all together.
        longest_s: the longest of them.
    """

    num_jobs: int = 0
    cpus: int = 0
    gpus: float = 0
    waited_s: float = 0.0
    longest_s: float = 0.0

    @property
    def mean_s(self) -> float:
        """How long one has waited, on average."""
        return self.waited_s / self.num_jobs if self.num_jobs else 0.0


@dataclass(frozen=True, slots=True)
class WaitingJob:
    """One pending record.

    Attributes:
        cause: the first thing that it waits for, in the words of `hetstream why`: `GPUs`, `memory`, `priority`, ...;
            `GPUs or CPUs` where more of either would let it start.
        waited_s: since it could have started; 0 if its time has not come.
    """

    job: Job
    cause: str
    waited_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """What is kept of one moment. Totals are of what counts; see `client/counted.py`.

    Attributes:
        taken_s: seconds since the epoch.
        cpu_load: threads that want a CPU, which may be more than there are; None where no node tells.
        indicator: the mean of GoldMiner's indicator without its sign; None without GPUs.
        classes: how many nodes with GPUs are in each class of the indicator; see `class_of`.
        num_running: jobs at work: neither one that completes nor one that is suspended is.
        gpus_measured: GPUs of the jobs whose trainers tell how long they wait; an instance of MIG as its share.
        gpus_starved: of those, as many as their wait shares make up.
        waiting: cause -> the jobs that wait for it.
    """

    taken_s: float
    cpus: int
    cpus_allocated: int
    gpus: int
    gpus_allocated: int
    memory_mb: int
    memory_allocated_mb: int
    cpu_load: float | None
    stranded_cpus: int
    stranded_gpus: int
    indicator: float | None
    classes: tuple[int, ...]
    num_running: int
    gpus_measured: float
    gpus_starved: float
    waiting: dict[str, Waiting]


@dataclass(frozen=True)
class Observation:
    """Everything seen at one moment.

    Attributes:
        waiting: pending records, the longest wait first.
        wait_shares: label of a running job -> share of time that its trainers wait for data.
        shared: the shared GPUs; None: there is no site daemon that would know them.
    """

    snapshot: Snapshot
    fragmentation: Fragmentation
    waiting: tuple[WaitingJob, ...]
    wait_shares: Mapping[str, float]
    sample: Sample
    shared: SharedGpus | None = None


def observe(snapshot: Snapshot, wait_shares: Mapping[str, float], shared: SharedGpus | None = None) -> Observation:
    """Look at a snapshot.

    Args:
        snapshot: the cluster.
        wait_shares: what trainers told; see `utilisation.py`.
        shared: what the site daemon told of shared GPUs.
    """
    alike = alike_jobs(snapshot.jobs)
    found = measure(
        snapshot.nodes,
        snapshot.jobs,
        snapshot.partitions,
        alike,
        snapshot.config,
        others_are_hidden=snapshot.hides_jobs,
    )
    explainer = Explainer(snapshot, alike)
    now_s = snapshot.taken_s
    pending: list[WaitingJob] = []
    causes: dict[str, list[Waiting]] = {}
    for group in alike:
        names = [" or ".join(kinds) for kinds in explainer.causes_of(group)]
        waiting = [WaitingJob(job, cause, waited_s(job, now_s)) for job, cause in zip(group, names, strict=True)]
        pending += waiting
        for cause in set(names):
            causes.setdefault(cause, []).append(
                _together([pending_job for pending_job in waiting if pending_job.cause == cause])
            )
    # The longest wait first; of equal ones the smaller number.
    pending.sort(key=lambda pending_job: pending_job.job.job_id)
    pending.sort(key=lambda pending_job: pending_job.waited_s, reverse=True)
    sums = {cause: _sum(parts) for cause, parts in causes.items()}
    return Observation(
        snapshot, found, tuple(pending), wait_shares, _sample(snapshot, found, sums, wait_shares), shared
    )


def waited_s(job: Job, now_s: float) -> float:
    """Return how long a pending job has waited since it could have started; since its submission where Slurm does not
    say.
    """
    since_s = job.submit_s if job.eligible_s is None else job.eligible_s
    return max(0.0, now_s - since_s) if since_s is not None else 0.0


def class_of(indicator: float) -> int:
    """Return the class of an indicator: 0 is CPUs gone, 2 in step, 4 GPUs gone. An edge belongs to the worse class."""
    if indicator < 0:
        return sum(indicator > edge for edge in CLASS_EDGES[:2])
    return 2 + sum(indicator >= edge for edge in CLASS_EDGES[2:])


def _sample(
    snapshot: Snapshot, found: Fragmentation, waiting: dict[str, Waiting], wait_shares: Mapping[str, float]
) -> Sample:
    total = found.total
    classes = [0] * NUM_CLASSES
    for node in found.gpu_nodes:
        classes[class_of(node.indicator or 0.0)] += 1
    running = [job for job in snapshot.jobs if job.holds_resources]
    measured = {job.label: held_by(job).gpus for job in running if job.label in wait_shares}
    there = {row.node for row in found.counted_nodes}
    loads = [node.cpu_load for node in snapshot.nodes if node.name in there and node.cpu_load is not None]
    return Sample(
        taken_s=snapshot.taken_s,
        cpus=total("cpus"),
        cpus_allocated=total("cpus") - total("cpus_free"),
        gpus=total("gpus"),
        gpus_allocated=total("gpus") - total("gpus_free"),
        memory_mb=total("memory_mb"),
        memory_allocated_mb=total("memory_mb") - total("memory_free_mb"),
        cpu_load=sum(loads) if loads else None,
        stranded_cpus=total("stranded_cpus"),
        stranded_gpus=total("stranded_gpus"),
        indicator=found.mean_abs_indicator,
        classes=tuple(classes),
        num_running=num_of_jobs(job for job in running if job.is_at_work),
        gpus_measured=whole_if_near(sum(measured.values())),
        gpus_starved=sum(gpus * wait_shares[label] for label, gpus in measured.items()),
        waiting=waiting,
    )


def _together(alike: Sequence[WaitingJob]) -> Waiting:
    """Jobs that ask alike."""
    counts = [pending_job.job.num_records for pending_job in alike]
    num_jobs, job = sum(counts), alike[0].job
    return Waiting(
        num_jobs=num_jobs,
        cpus=cpus_asked(job) * num_jobs,
        gpus=whole_if_near(job.gpus * num_jobs),
        waited_s=sum(pending_job.waited_s * count for pending_job, count in zip(alike, counts, strict=True)),
        longest_s=max(pending_job.waited_s for pending_job in alike),
    )


def _sum(parts: Sequence[Waiting]) -> Waiting:
    return Waiting(
        num_jobs=sum(part.num_jobs for part in parts),
        cpus=sum(part.cpus for part in parts),
        gpus=whole_if_near(sum(part.gpus for part in parts)),
        waited_s=sum(part.waited_s for part in parts),
        longest_s=max(part.longest_s for part in parts),
    )


# Samples of a cluster over time, in a small SQLite file. Written and read by the report, the page and the exporter.
#
# One row for each sample, about 500 bytes; what is older than `KEEP_S` goes when a new one comes. Several processes may
# use one file. It holds no names of users or jobs.

KEEP_S = 92 * 86400.0


class History(DatabaseFile):
    """The file, made with mode 0600 where it does not exist.

    Args:
        path: in a directory that exists.

    Raises:
        HistoryError: it cannot be used, or is another program's.
    """

    APPLICATION_ID = 0x68657473  # "hets"

    def __init__(self, path: Path) -> None:
        super().__init__(path, "history", "Give another file")
        self._open(self._connect, self._prepare)

    def _connect(self) -> sqlite3.Connection:
        create_private(self.path)
        return sqlite3.connect(self.path, timeout=BUSY_TIMEOUT_S, isolation_level=None)

    def _prepare(self) -> None:
        if self._is_new():
            self._make("samples (taken_s real primary key, sample text not null)")

    def append(self, sample: Sample) -> None:
        """Keep a sample, and drop those that are too old.

        Raises:
            HistoryError: it cannot be written.
        """
        with self._named(), self._changing():  # of both, so that they are waited for once
            self._database.execute(
                "insert or replace into samples values (?, ?)", (sample.taken_s, msgspec.json.encode(sample).decode())
            )
            self._database.execute("delete from samples where taken_s < ?", (sample.taken_s - KEEP_S,))

    def since(self, start_s: float) -> list[Sample]:
        """Return the samples from a moment on, the oldest first.

        Raises:
            HistoryError: it cannot be read.
        """
        with self._named():
            rows = self._database.execute(
                "select sample from samples where taken_s >= ? order by taken_s", (start_s,)
            ).fetchall()
            return [typed_json.decode(text, Sample) for (text,) in rows]


# Reads the cluster again and again, and goes on when slurmctld does not answer. Used by the exporter and the page.
#
# It never changes anything in Slurm, and asks at most once in an interval, however often somebody looks at the result.

logger = logging.getLogger(__name__)

MIN_INTERVAL_S = 5.0


@dataclass(frozen=True)
class Reading:
    """How the newest attempt went.

    Attributes:
        observation: None if Slurm could not be read, or was not yet.
        error: what failed, in one line: reading, or keeping what was read; empty if nothing did.
        num_errors: kind of error -> how often, since the start.
        read_s: how long it took.
        success_s: when one last succeeded, in seconds since the epoch; None if none did.
    """

    observation: Observation | None = None
    error: str = ""
    num_errors: Mapping[str, int] = field(default_factory=dict)
    read_s: float = 0.0
    success_s: float | None = None


class Monitor:
    """Makes readings.

    Args:
        cluster: whom to ask.
        wait_shares: what running jobs' trainers tell; see `utilisation.py`.
        history: where samples are kept, or nowhere.
        shared: tells of shared GPUs; nobody does.
    """

    def __init__(
        self,
        cluster: Cluster,
        wait_shares: Callable[[Iterable[Job]], Mapping[str, float]],
        history: History | None,
        shared: Callable[[], SharedGpus | None] = lambda: None,
    ) -> None:
        self._cluster = cluster
        self._wait_shares = wait_shares
        self._history = history
        self._shared = shared
        self._errors: Counter[str] = Counter()
        self._success_s: float | None = None
        self._said_hidden = False

    def readings(self, interval_s: float, sleep: Callable[[float], object] = sleep_in_parts) -> Iterator[Reading]:
        """Yield a reading now, and then one in each interval, without end."""
        while True:
            reading = self.read()
            yield reading
            sleep(max(MIN_INTERVAL_S, interval_s - reading.read_s))

    def read(self) -> Reading:
        """Return one reading. A failure is part of it: an exporter that dies with slurmctld cannot say that it is down.

        Raises:
            NodesHidden: there is nothing to read for this user.
        """
        begin_s = time.monotonic()
        observation, error = None, ""
        try:
            snapshot = self._cluster.snapshot()
            if snapshot.hidden and not self._said_hidden:
                self._said_hidden = True
                logger.warning("%s: all figures are of what this user may see", snapshot.hidden)
            observation = observe(snapshot, self._wait_shares(snapshot.jobs), self._shared())
            self._success_s = snapshot.taken_s
            if self._history:
                self._history.append(observation.sample)
        except NodesHidden:
            raise
        except HetstreamError as exc:
            error = self._count(exc)
            logger.warning("the cluster was not read: %s", exc)
        except Exception as exc:  # counted and logged with its traceback; the next one may go well
            error = self._count(exc)
            logger.exception("the cluster was not read")
        return Reading(observation, error, dict(self._errors), time.monotonic() - begin_s, self._success_s)

    def _count(self, exc: Exception) -> str:
        self._errors[type(exc).__name__] += 1
        return str(exc)
