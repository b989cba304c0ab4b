"""What running jobs use of the cluster, written down at every event. Pure; called by the engine."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.placement import TypicalShapes
from hetstream.slurm_plugin.simulate.division import unusable_gpus
from hetstream.slurm_plugin.simulate.packing import Packing
from hetstream.slurm_plugin.simulate.running import Nodes, Running
from hetstream.slurm_plugin.simulate.scenario import Scenario
from hetstream.slurm_plugin.simulate.sharing import Felt
from hetstream.slurm_plugin.simulate.workload import Cluster, Workload

# What a simulation found: times of each job, and the cluster's use over time. Pure.

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
        num_running: jobs.
    """

    at_s: Floats
    gpus: Floats
    effective_gpus: Floats
    cpus: Floats
    productive_cpus: Floats
    shared_gpus: Floats
    num_running: Floats

    def total(self, values: Floats, begin_s: float, end_s: float) -> float:
        """Return the integral of one of the columns over a window."""
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


_COLUMNS = 7


class UsageTotals:
    """The cluster's use up to now.

    Args:
        running: the jobs.
        packing: those that share GPUs; None if there are none.
    """

    def __init__(self, running: Running, packing: Packing | None) -> None:
        self._running, self._packing = running, packing
        self._rows = array("d")
        # GPUs, effective ones, CPUs, productive ones, effective GPUs of the jobs that share.
        self._used = [0.0] * 5

    def record(self, now_s: float, is_known: bool) -> None:
        """Write down what is used from now on.

        Args:
            now_s: the time.
            is_known: all that has changed was counted.
        """
        if not is_known or self._packing is not None:
            self.add_up()
        self._rows.extend((now_s, *self._used, self._running.count))

    def add_up(self) -> None:
        """Count what all running jobs use."""
        running, packing = self._running, self._packing
        top = running.top
        gpus, speed = running.gpus[:top], running.speed[:top]
        cpus = np.add.reduce(running.held_cpus[:top]) + np.add.reduce(running.target[:top])
        useful = speed @ running.useful_cpus[:top]
        self._used = [float(np.add.reduce(gpus)), float(gpus @ speed), float(cpus), float(useful), 0.0]
        if packing is not None:
            shared = float(running.shared_gpus[:top] @ speed)
            self._used[0] += packing.num_idle_used()
            self._used[1] += shared
            self._used[4] = shared

    def count(self, gpus: float, speed: float, cpus: float, useful_cpus: float) -> None:
        """A job starts; with negative values, one leaves."""
        used = self._used
        used[0] += gpus
        used[1] += gpus * speed
        used[2] += cpus
        used[3] += useful_cpus * speed

    def use(self) -> Use:
        """Return all that was written down."""
        return Use(*np.frombuffer(self._rows, dtype=np.float64).reshape(-1, _COLUMNS).T.copy())


# Looks at the nodes of a run, at equal spans: what is stranded on them. Pure.

# Looks that are kept; a run that takes longer is looked at half as often, from its begin on.
_MOST = 2000


class FragmentationSampler:
    """The looks of one run.

    Args:
        typical: shapes of the jobs that come.
        every_s: between two looks; 0 for none.

    Attributes:
        next_s: when the next one is due; infinite for never.
    """

    def __init__(self, typical: TypicalShapes, every_s: float) -> None:
        self.next_s = 0.0 if every_s else math.inf
        self._typical = typical
        self._every_s = every_s
        self._found: list[tuple[float, ...]] = []

    def look(self, nodes: Nodes, used_cpus: npt.NDArray[np.float64] | None, now_s: float) -> None:
        """Look at the nodes that have GPUs; the next look is due later.

        Args:
            nodes: without data workers.
            used_cpus: that data workers have of each node; None for none.
            now_s: the time.
        """
        own = nodes.cluster
        free_cpus = np.maximum(0.0, nodes.cpus)
        if used_cpus is not None:
            free_cpus = free_cpus - used_cpus
        seen = (own.gpus > 0) & (own.cpus > 0) & nodes.is_up
        cpus, gpus = free_cpus[seen] / own.cpus[seen], nodes.gpus[seen] / own.gpus[seen]
        if len(cpus):
            cpus_gone = (cpus < 0.5 / own.cpus[seen]) & (gpus > 0.25)
            gpus_gone = (gpus < 0.5 / own.gpus[seen]) & (cpus > 0.25)
            found = (float(np.abs(cpus - gpus).mean()), float(cpus_gone.mean()), float(gpus_gone.mean()))
            self._found.append((now_s, *found, unusable_gpus(self._typical, nodes)))
        if len(self._found) > _MOST:
            self._found = self._found[::2]
            self._every_s *= 2
        self.next_s = now_s + self._every_s

    def samples(self) -> FragmentationSamples | None:
        """Return all that are kept; None if there are none."""
        return FragmentationSamples(*np.array(self._found).T) if self._found else None
