"""What is compared: how jobs ask for CPUs, who divides data workers, in which order jobs start. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from hetstream.base.errors import OptionsError
from hetstream.slurm_plugin.placement import CHOICES
from hetstream.slurm_plugin.policy.policies import Rules
from hetstream.slurm_plugin.policy.table import Policy
from hetstream.slurm_plugin.simulate.sharing import PackingOptions
from hetstream.slurm_plugin.simulate.workload import MOST, Cluster, Workload

Floats = npt.NDArray[np.float64]
# An error of e^10 says all there is.
MOST_SIGMA = 10.0


class Discipline(Enum):
    """Which waiting jobs may start.

    FIFO: the first alone, at once; it blocks all others. EASY: others too, if the planned start of the first does not
    move. GREEDY: whatever fits, in order. The last two happen in Slurm's cycles of backfill.
    """

    FIFO = "fifo"
    EASY = "easy"
    GREEDY = "greedy"


class Request(Enum):
    """CPUs that a job asks for at its start, for each unit.

    TUNED: those of its ideal speed. HARDWARE: the cluster's CPUs per GPU. FIXED: its trainer's on the unit's node and
    all of its data workers' CPUs anywhere, at once and to the end. ELASTIC: its trainer's alone; a policy divides the
    rest among data workers. RECORDED: what it really had.
    """

    TUNED = "tuned"
    HARDWARE = "hardware"
    FIXED = "fixed"
    ELASTIC = "elastic"
    RECORDED = "recorded"


@dataclass(frozen=True)
class QueueOptions:
    """The GPU queue.

    Attributes:
        shortest_first: jobs of less CPU work come first (work x CPUs at the ideal speed); otherwise who came first.
        aging: seconds of work that a second of waiting weighs up, in a queue with the shortest first.
        interval_s: of backfill (Slurm's bf_interval); 0: at every event.
        max_job_test: jobs that one cycle looks at (bf_max_job_test).
        limit_factor: time limits by true run times, where the workload knows no limit.
        submit_s: from a submission until the scheduler looks at the job for the first time.
        free_s: from the end of a job until others can start on what it held.
    """

    shortest_first: bool = False
    aging: float = 1.0
    interval_s: float = 30.0
    max_job_test: int = 500
    limit_factor: float = 1.0
    submit_s: float = 0.0
    free_s: float = 0.0


@dataclass(frozen=True)
class WorkerOptions:
    """Data workers.

    Attributes:
        cpus: of one data worker.
        round_s: longest time until the policy is asked again when something has changed; 0: at once.
        start_s: from the decision to the first batch.
        take_back_s: that a data worker takes to leave before its CPUs go to another one.
        fallback: a job whose own nodes have all the CPUs that it wants works without data workers' overhead.
        network_share: of each node's link that batches may take; infinite links know no budget.
        estimate_sigma: error of the remaining time that policies are told, as sigma of a log-normal factor.
    """

    cpus: int = 1
    round_s: float = 30.0
    start_s: float = 20.0
    take_back_s: float = 5.0
    fallback: bool = False
    network_share: float = 1.0
    estimate_sigma: float = 0.0


@dataclass(frozen=True)
class FailureOptions:
    """Nodes that fail.

    Attributes:
        node_mtbf_s: mean time between failures of one node; infinite for none.
        repair_s: that it is away.
        checkpoint_s: a job that is on it starts again, with the work up to its last checkpoint.
    """

    node_mtbf_s: float = math.inf
    repair_s: float = 3600.0
    checkpoint_s: float = 1800.0


@dataclass(frozen=True)
class CapOptions:
    """CPUs of data workers at most, by the name of a user or tenant; `policy.caps.EVERYBODY` for those not named.

    Attributes:
        user, tenant: empty for none.
    """

    user: Mapping[str, int] = field(default_factory=dict)
    tenant: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """One run.

    Attributes:
        name: of the policy, for tables.
        request: see there.
        discipline: see there.
        policy: who divides data workers, for `Request.ELASTIC`.
        seed: of all that is drawn.
        sample_s: how often the fragmentation of nodes is looked at; 0 for never.
        rules: that `comparison.scenario_of` puts a policy under.
        caps: that the policy keeps to; a policy without rules knows none.
        hold_s: how long a policy holds to an answer that depends on time: it is asked again in each round until nothing
            moves, and then after so long. Infinite: it is asked again when something has changed.
        placement: of whole jobs, a name of `placement.choices`; data workers then have nodes, too. None: jobs go where
            least is left, and of data workers only the number of CPUs counts.
        packing: opportunistic jobs share GPUs; None: they are jobs like all others.
    """

    name: str
    request: Request
    discipline: Discipline
    policy: Policy | None = None
    queue: QueueOptions = field(default_factory=QueueOptions)
    workers: WorkerOptions = field(default_factory=WorkerOptions)
    failures: FailureOptions = field(default_factory=FailureOptions)
    seed: int = 0
    sample_s: float = 0.0
    rules: Rules = field(default_factory=Rules)
    caps: CapOptions = field(default_factory=CapOptions)
    hold_s: float = math.inf
    placement: str | None = None
    packing: PackingOptions | None = None

    def __post_init__(self) -> None:
        problems = []
        if (self.policy is not None) != (self.request is Request.ELASTIC):
            problems.append(f"request {self.request.value}: a policy belongs to an elastic request, and to no other")
        if not 1 <= self.workers.cpus <= MOST:
            problems.append(f"cpus of a data worker is {self.workers.cpus}: must be at least 1, and at most {MOST:g}")
        amounts = {
            "interval_s": self.queue.interval_s, "limit_factor": self.queue.limit_factor, "aging": self.queue.aging,
            "submit_s": self.queue.submit_s, "free_s": self.queue.free_s,
            "max_job_test": self.queue.max_job_test, "round_s": self.workers.round_s, "start_s": self.workers.start_s,
            "take_back_s": self.workers.take_back_s, "network_share": self.workers.network_share,
            "estimate_sigma": self.workers.estimate_sigma, "repair_s": self.failures.repair_s,
            "sample_s": self.sample_s,
        }  # fmt: skip
        problems += [
            f"{name} is {value:g}: must be from 0 to {MOST:g}"
            for name, value in amounts.items()
            if not 0 <= value <= MOST
        ]
        if self.workers.estimate_sigma > MOST_SIGMA:
            problems.append(f"estimate_sigma is {self.workers.estimate_sigma:g}: must be at most {MOST_SIGMA:g}")
        if not self.failures.node_mtbf_s > 0 or not self.failures.checkpoint_s > 0:
            problems.append("node_mtbf_s and checkpoint_s must be above 0")
        if not self.hold_s > 0:
            problems.append(f"hold_s is {self.hold_s:g}: must be above 0")
        if self.placement is not None and self.placement not in CHOICES:
            problems.append(f"there is no placement {self.placement!r}: there are {', '.join(CHOICES)}")
        if problems:
            raise OptionsError("; ".join(problems))

    def unit_cpus(self, workload: Workload, cluster: Cluster) -> Floats:
        """CPUs that each unit holds on its node."""
        if self.request is Request.TUNED:
            return workload.ideal_cpus
        if self.request is Request.HARDWARE:
            ratio = np.floor(cluster.num_cpus / max(1.0, cluster.num_gpus))
            return np.where(workload.gpus > 0, ratio * workload.gpus, workload.ideal_cpus)
        if self.request is Request.RECORDED and workload.recorded is not None:
            return workload.recorded.cpus
        return workload.trainer_cpus

    def extra_cpus(self, workload: Workload) -> Floats:
        """CPUs that each job holds anywhere besides."""
        if self.request is Request.RECORDED and workload.recorded is not None:
            return workload.recorded.extra_cpus
        return workload.demand if self.request is Request.FIXED else np.zeros(len(workload))

    def fixed_speed(self, workload: Workload, cluster: Cluster) -> Floats:
        """Of each job with what it holds from its start to its end, as a share of the ideal."""
        demand = workload.demand
        if self.request is Request.ELASTIC:
            return np.where(demand > 0, 0.0, 1.0)
        if self.request is Request.FIXED:
            return np.where(demand > 0, 1.0 - workload.overhead, 1.0)
        cpus = self.unit_cpus(workload, cluster) + self.extra_cpus(workload) / workload.units
        return np.minimum(
            1.0, np.divide(cpus, workload.ideal_cpus, out=np.ones_like(cpus), where=workload.ideal_cpus > 0)
        )
