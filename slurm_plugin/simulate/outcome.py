"""What a simulation found: times of each job, and the cluster's use over time. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.simulate.cluster import Cluster
from hetstream.slurm_plugin.simulate.scenario import Scenario
from hetstream.slurm_plugin.simulate.sharing import Felt
from hetstream.slurm_plugin.simulate.workload import Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Use:
    """The cluster's use; a value holds from its time to the next.

    Attributes:
        at_s: times, ascending.
        gpus: that running jobs hold, or that opportunistic jobs alone are on.
        effective_gpus: the same, each times its job's speed.
        cpus: that trainers and data workers hold.
        productive_cpus: that the speeds need.
        shared_gpus: of effective_gpus, those by jobs that share what others leave.
        num_waiting, num_running: jobs.
    """

    at_s: Floats
    gpus: Floats
    effective_gpus: Floats
    cpus: Floats
    productive_cpus: Floats
    shared_gpus: Floats
    num_waiting: Floats
    num_running: Floats

    def total(self, values: Floats, begin_s: float, end_s: float) -> float:
        """The integral of one of the columns over a window."""
        bounds = np.append(self.at_s, np.inf)
        widths = np.clip(bounds[1:], begin_s, end_s) - np.clip(bounds[:-1], begin_s, end_s)
        return float(values @ widths)


@dataclass(frozen=True)
class FragmentationSamples:
    """Nodes over time: freeCPU/CPU - freeGPU/GPU of each node with GPUs.

    Attributes:
        at_s: when they were looked at.
        indicator: mean of its absolute value over the nodes.
        cpus_gone: share of nodes with all CPUs taken and more than a quarter of the GPUs free.
        gpus_gone: share of nodes with all GPUs taken and more than a quarter of the CPUs free.
        unusable_gpus: share of all GPUs that are free where the jobs of this workload cannot use them (FGD's measure).
    """

    at_s: Floats
    indicator: Floats
    cpus_gone: Floats
    gpus_gone: Floats
    unusable_gpus: Floats


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        start_s: of each job, the first one; NaN if it never did.
        end_s: of each job; NaN if it did not.
        waited_s: (jobs, causes), all its time without running.
        node_of: the first node of the job's first start; -1 if it never did.
        rejected: places of jobs that are larger than the cluster, with the resource that they exceed.
        restarts: of each job, by failures of nodes.
        lost_s: work of each job that failures of nodes undid.
        use: see there.
        fragmentation: None if it was not sampled.
        num_events: times at which something happened.
        num_job_events: submissions, starts, ends and changes of speed of jobs.
        num_moves: changes of a running job's number of data workers.
        cpus_started, cpus_taken_back: of data workers.
        felt: what sharing GPUs did to jobs; None without packing.
    """

    workload: Workload
    cluster: Cluster
    scenario: Scenario
    start_s: Floats
    end_s: Floats
    waited_s: Floats
    node_of: Ints
    rejected: dict[int, str]
    restarts: Ints
    lost_s: Floats
    use: Use
    fragmentation: FragmentationSamples | None
    num_events: int
    num_job_events: int
    num_moves: int
    cpus_started: float
    cpus_taken_back: float
    felt: Felt | None = None

    @property
    def finished(self) -> npt.NDArray[np.bool_]:
        """Which jobs ended."""
        return np.isfinite(self.end_s)

    @property
    def num_unfinished(self) -> int:
        """Jobs that were taken and never ended: nothing more could happen."""
        return len(self.workload) - int(self.finished.sum()) - len(self.rejected)
