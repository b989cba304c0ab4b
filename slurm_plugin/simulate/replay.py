"""How well the simulator tells again what really happened: a site's export against its own replay. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.errors import SimulationInputError
from hetstream.slurm_plugin.simulate.cluster import Cluster
from hetstream.slurm_plugin.simulate.engine import Progress, simulate
from hetstream.slurm_plugin.simulate.outcome import Outcome
from hetstream.slurm_plugin.simulate.scenario import Discipline, QueueOptions, Request, Scenario
from hetstream.slurm_plugin.simulate.workload import Workload

Floats = npt.NDArray[np.float64]

# Pairs of starts that are compared, at most: drawn with a fixed seed.
_PAIRS = 200_000


@dataclass(frozen=True)
class ReplayError:
    """The simulator's own error; relative ones are (simulated - real) / real.

    Attributes:
        mean_jct, makespan: relative.
        mean_wait_s, real_mean_wait_s: simulated and real.
        median_start_s: of the absolute error of a job's start.
        order: share of pairs of jobs that start in the same order as they really did; pairs that started at the same
            time count as such.
        num_jobs: that were compared.
    """

    mean_jct: float
    makespan: float
    mean_wait_s: float
    real_mean_wait_s: float
    median_start_s: float
    order: float
    num_jobs: int


def recorded_scenario(queue: QueueOptions, seed: int = 0) -> Scenario:
    """Every job with the CPUs that it really had, under Slurm's backfill."""
    return Scenario("as recorded", Request.RECORDED, Discipline.EASY, queue=queue, seed=seed)


def replay(
    workload: Workload, cluster: Cluster, queue: QueueOptions, progress: Progress | None = None
) -> tuple[Outcome, ReplayError]:
    """Simulate what really happened, and compare.

    Raises:
        SimulationInputError: nothing is recorded, or no job fits the cluster.
    """
    outcome = simulate(workload, cluster, recorded_scenario(queue), progress)
    return outcome, error_of(outcome)


def error_of(outcome: Outcome) -> ReplayError:
    """Compare a run with what is recorded of its jobs.

    Raises:
        SimulationInputError: nothing is recorded, or no job ended.
    """
    load = outcome.workload
    if load.recorded is None:
        raise SimulationInputError("workload", ["it does not say what really happened"])
    done = outcome.finished
    if not done.any():
        raise SimulationInputError("workload", ["no job fits the cluster. Is it the cluster that the export is of?"])
    real, submit_s = load.recorded, load.submit_s[done]
    real_start_s, real_end_s = real.start_s[done], real.end_s[done]
    start_s, end_s = outcome.start_s[done], outcome.end_s[done]
    real_jct_s = float((real_end_s - submit_s).mean())
    real_makespan_s = float(real_end_s.max())
    return ReplayError(
        mean_jct=float((end_s - submit_s).mean()) / real_jct_s - 1,
        makespan=float(end_s.max()) / real_makespan_s - 1,
        mean_wait_s=float((start_s - submit_s).mean()),
        real_mean_wait_s=float((real_start_s - submit_s).mean()),
        median_start_s=float(np.median(np.abs(start_s - real_start_s))),
        order=same_order(start_s, real_start_s),
        num_jobs=int(done.sum()),
    )


def same_order(simulated: Floats, real: Floats) -> float:
    """Share of pairs of jobs that come in the same order in both; one that has two at one time agrees with any."""
    size = len(simulated)
    if size < 2:
        return 1.0
    draw = np.random.default_rng(0)
    if size * (size - 1) // 2 <= _PAIRS:
        first, other = np.triu_indices(size, 1)
    else:
        first, other = draw.integers(0, size, (2, _PAIRS))
        first, other = first[first != other], other[first != other]
    product = (simulated[first] - simulated[other]) * (real[first] - real[other])
    return float((product >= 0).mean())
