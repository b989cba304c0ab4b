"""What the job side and the outside have in common: what a job has measured, Slurm, and processes it can stop.

`slurm_plugin/client/` implements the last two. The protocols cut the cycle between the packages: `hetjob` never imports
`slurm_plugin`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, Protocol

import msgspec

# What a job has measured of itself, for the site daemon's policies: a part of `ReportDemand` since version 2. Pure.
#
# Made by the job master (`hetjob/elastic/step_terms.py`), read by the daemon. What is not known is None or empty:
# nothing is guessed on this side.

_Count = Annotated[int, msgspec.Meta(ge=0, le=100_000)]
# No step takes 30 years. Ratios of what is far below are no numbers any more.
MOST = 1e15
_Positive = Annotated[float, msgspec.Meta(ge=1e-9, le=MOST)]
_NotNegative = Annotated[float, msgspec.Meta(ge=0, le=MOST)]

MAX_POINTS = 16

# Who says how much work is left, the best first.
RemainingSource = Literal["directive", "loader", "integration", "history", "time_limit"]


class SpeedPoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement.

    Attributes:
        cpus: of each data worker.
        workers: how many there were; 0 is the job's own loading.
        steps_per_s: that they could make for all trainers together, if nobody else held them up.
    """

    cpus: Annotated[int, msgspec.Meta(ge=1, le=100_000)]
    workers: _Count
    steps_per_s: _NotNegative


class RemainingWork(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How much is left to do.

    Attributes:
        steps: until the job's end, as the median of what is expected.
        total_steps: of the whole job; None where not known.
        sigma: of the logarithm of `steps`: 0 for a number that the user gave.
        source: who says so.
    """

    steps: _NotNegative
    sigma: Annotated[float, msgspec.Meta(ge=0, le=10)]
    source: RemainingSource
    total_steps: _Positive | None = None


class Measured(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a job has measured.

    Attributes:
        steps_per_s: taken by the trainers now.
        ideal_steps_per_s: that they would take if they never waited for data.
        points: speeds by size and number of data workers, at most `MAX_POINTS`.
        step_bytes: of a step on its way from data workers to trainers.
        gpus: that the trainers use.
        worker_memory_mb: that one data worker is submitted with.
        remaining: None where nothing says how much is left.
    """

    steps_per_s: _NotNegative
    ideal_steps_per_s: _Positive
    points: Annotated[tuple[SpeedPoint, ...], msgspec.Meta(max_length=MAX_POINTS)] = ()
    step_bytes: _NotNegative | None = None
    gpus: _Count = 0
    worker_memory_mb: Annotated[int, msgspec.Meta(ge=1, le=1 << 40)] | None = None
    remaining: RemainingWork | None = None


class Child(Protocol):
    """A process that was started and can be stopped; `subprocess.Popen` is one."""

    @property
    def pid(self) -> int:
        """Its process id on this host."""

    def poll(self) -> int | None:
        """Return its exit code, or None while it runs."""

    def terminate(self) -> None:
        """Ask it to end (SIGTERM)."""

    def kill(self) -> None:
        """End it (SIGKILL)."""

    def send_signal(self, sig: int) -> None:
        """Give it any signal."""


@dataclass(frozen=True)
class NodeSize:
    """What nodes of one kind have.

    Attributes:
        cpus: that one job can get of a node.
        memory_mb: the same for memory.
        has_gpus: whether it has GPUs.
        count: of such nodes.
    """

    cpus: int
    memory_mb: int
    has_gpus: bool
    count: int = 1

    def holds(self, cpus: int, memory_mb: float) -> int:
        """Return how many parts of this size all these nodes hold, were they empty."""
        return self.count * int(min(self.cpus // cpus, self.memory_mb // memory_mb if memory_mb else self.cpus))


@dataclass(frozen=True)
class PartitionLimits:
    """What one job can get on the nodes of a partition.

    Attributes:
        nodes: the kinds of its nodes; empty where they are not known.
        max_mb_per_cpu: `MaxMemPerCPU`; None without a limit.
        max_time_s: `MaxTime`; None without a limit.
        alone: the setting by which no job of others comes to a job's nodes, such as `OverSubscribe=EXCLUSIVE`; "" where
            one may.
        allocates_memory: a node's memory is divided among jobs (`SelectTypeParameters`), so that none comes to a job
            with all of it.
        threads_per_core: the most that a core of its nodes has (`ThreadsPerCore`).
    """

    nodes: tuple[NodeSize, ...]
    max_mb_per_cpu: int | None = None
    max_time_s: float | None = None
    alone: str = ""
    allocates_memory: bool = False
    threads_per_core: int = 1


@dataclass(frozen=True)
class ClusterLimits:
    """What a plan is checked against.

    Attributes:
        partitions: names of all partitions that the user can see.
        default_partition: where jobs go that name none; None when the cluster has no default.
        scheduler: `SchedulerType`, such as `sched/backfill`.
        limits: of the partitions of which they are known, by name.
        default_mb_per_cpu: memory for each CPU of a job that asks for none, by partition (`DefMemPerCPU`); a partition
            that gives it in another way is not there; None where it is not known.
        opportunistic: partitions of opportunistic jobs, as far as the site names them.
        release: of Slurm, such as (22, 5); (0, 0) where it is not known.
    """

    partitions: frozenset[str]
    default_partition: str | None
    scheduler: str | None
    limits: Mapping[str, PartitionLimits] = field(default_factory=dict)
    opportunistic: tuple[str, ...] = ()
    release: tuple[int, int] = (0, 0)
    default_mb_per_cpu: Mapping[str, int] | None = field(default_factory=dict)

    def limits_of(self, partitions: str) -> list[PartitionLimits]:
        """Return what is known of the partitions of a list; empty where something is not."""
        found = [self.limits.get(name) for name in partitions.split(",")]
        return [limits for limits in found if limits is not None] if all(found) else []


UNKNOWN_CLUSTER = ClusterLimits(frozenset(), None, None)


@dataclass(frozen=True)
class MarkedJob:
    """A job of this user that is not over.

    Attributes:
        job_id: its own.
        state: in Slurm's spelling.
        num_cpus: in all.
        elapsed_s: since its start.
        left_s: until its time limit ends it; None without a limit, or where nobody has said so.
    """

    job_id: str
    state: str
    num_cpus: int
    elapsed_s: float = 0.0
    left_s: float | None = None


@dataclass(frozen=True)
class SiteReading:
    """What the site daemon has read of a job's companions.

    Attributes:
        taken_s: when, or a little before, by the clock of this process that never goes back.
        jobs: those that were not over.
    """

    taken_s: float
    jobs: Sequence[MarkedJob]


@dataclass(frozen=True)
class JobDemand:
    """What a job has and wants.

    Attributes:
        minimum: data workers of component 1.
        current: data workers that it has or has asked Slurm for.
        wanted: those that it would have if the site did not limit it.
        cpus: of each.
        wait_share: of the last seconds that the trainer waited for data.
        measured: of its speed and its work; None while nothing is.
    """

    minimum: int
    current: int
    wanted: int
    cpus: int
    wait_share: float
    measured: Measured | None = None


class SiteLimit(Protocol):
    """What the site lets a job have, and knows of it; without a site daemon there is none. No method waits."""

    def report(self, demand: JobDemand) -> None:
        """Say how the job is."""

    def data_workers(self) -> int | None:
        """Data workers that this job may have now, those of component 1 among them; None without a limit."""

    def preferred_nodes(self) -> Sequence[str]:
        """Return where the next data workers would be best, one name each in this order; empty where nobody says so."""

    def marked(self, mark: str) -> SiteReading | None:
        """This job's companions with this word in their comment, in the daemon's last reading; None if it told none."""


class SlurmClient(Protocol):
    """The Slurm commands that jobs need. Every method raises `SlurmCommandError` when the command fails."""

    def cluster(self, name: str = "") -> ClusterLimits:
        """Partitions and scheduler of a cluster; without a name of the one that the environment names."""

    def submit(self, script: str, options: Sequence[str], key: str = "") -> str:
        """Submit a batch script and return its job id.

        Args:
            script: its text.
            options: of sbatch.
            key: a word that names this submission; one that was made already, and whose answer was lost, is not made
                again.
        """

    def update(self, job_id: str, fields: Mapping[str, str]) -> None:
        """Change fields of a job, as `scontrol update` names them."""

    def cancel(self, job_id: str) -> None:
        """Cancel a job and all its array tasks; one that has ended already is no error."""

    def ask_to_end(self, job_id: str) -> None:
        """Send SIGTERM to the batch script of a job, which goes on until it ends by itself."""

    def marked_jobs(self, mark: str) -> Sequence[MarkedJob]:
        """Return the jobs of this user that are not over and have this word in their comment."""

    def node_address(self, node: str) -> str:
        """Return the address (`NodeAddr`) under which other nodes reach this one."""

    def start_step(
        self, options: Sequence[str], command: Sequence[str], log: Path, *, in_background: bool = False
    ) -> Child:
        """Start a step of the job that this process belongs to, and return without waiting for it.

        Args:
            options: of srun. What the surrounding batch script or step asked for does not count here.
            command: the program and its arguments.
            log: file that its output is appended to.
            in_background: the step takes nothing from the job's other steps, and lives on when this process ends;
                otherwise it is ended with this process.
        """
