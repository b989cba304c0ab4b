"""What jobs that share a GPU do to each other: the model, its numbers, and what a workload says of it. Pure.

A GPU's time is 1. A job alone keeps `gpu_use` of it busy at its ideal speed, and in proportion less at a lower one: a
trainer that waits for data leaves the more. Opportunistic jobs divide what the guaranteed job leaves; a gang is as fast
as on its slowest GPU. docs/simulate.md says where each number is from.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from hetstream.base.errors import OptionsError
from hetstream.slurm_plugin.packing.decide import PackingPlan, decide
from hetstream.slurm_plugin.packing.state import PackingRules, PackingState

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Sharing:
    """What each job of a workload is to a GPU.

    Attributes:
        is_opportunistic: it runs on what others leave.
        gpu_use: share of the time of each of its GPUs that it keeps busy at its ideal speed.
        gpu_memory_gib: of each of its GPUs.
    """

    is_opportunistic: Bools
    gpu_use: Floats
    gpu_memory_gib: Floats

    def rows(self, places: npt.NDArray[np.int64]) -> Sharing:
        """Return the same of these jobs."""
        return Sharing(self.is_opportunistic[places], self.gpu_use[places], self.gpu_memory_gib[places])


@dataclass(frozen=True)
class GpuLoad:
    """GPUs at one moment, and the opportunistic jobs on them: a line for each job and GPU.

    Attributes:
        has_host: of each GPU, whether a guaranteed job has it.
        host_use: of each GPU, the share of its time that this job keeps busy now.
        gpu: of each line.
        use: of each line, the share of a GPU that the job would keep busy alone.
    """

    has_host: Bools
    host_use: Floats
    gpu: Ints
    use: Floats

    def num_jobs(self) -> Floats:
        """Opportunistic jobs of each GPU."""
        return np.bincount(self.gpu, minlength=len(self.has_host)).astype(float)

    def demand(self) -> Floats:
        """Return what the opportunistic jobs of each GPU would keep busy together."""
        found: Floats = np.bincount(self.gpu, self.use, minlength=len(self.has_host)).astype(float)
        return found


# (GPUs, options) -> the speed of each line, and of the guaranteed job of each GPU, as factors of their own speeds.
SpeedLaw = Callable[[GpuLoad, "PackingOptions"], tuple[Floats, Floats]]
Decide = Callable[[PackingState, float, PackingRules | None], PackingPlan]


def isolated(load: GpuLoad, options: PackingOptions) -> tuple[Floats, Floats]:
    """With a coordinator on each node: the guaranteed job is hardly slower, and the others have what it leaves."""
    left = np.where(load.has_host, np.maximum(options.least_left, 1.0 - load.host_use), 1.0)
    num_jobs, demand = load.num_jobs(), load.demand()
    is_shared = load.has_host | (num_jobs > 1)
    share = np.minimum(1.0, left[load.gpu] / np.maximum(demand[load.gpu], 1e-9))
    lines = share * np.where(is_shared[load.gpu], 1.0 - options.overhead, 1.0)
    hosts = np.where(num_jobs > 0, 1.0 / (1.0 + options.guaranteed_cost), 1.0)
    return lines, hosts


@dataclass(frozen=True)
class Felt:
    """What sharing did to jobs.

    Attributes:
        is_opportunistic: which jobs shared what others leave.
        held_up_s: of each guaranteed job, how much longer it ran because others were on its GPUs.
        evictions: of each job.
    """

    is_opportunistic: Bools
    held_up_s: Floats
    evictions: Ints


@dataclass(frozen=True)
class PackingOptions:
    """Opportunistic jobs on GPUs that guaranteed ones have.

    Attributes:
        interval_s: the packer looks so often, when something has changed.
        guaranteed_cost: a guaranteed job's mini-batches take so much longer while somebody shares its GPU.
        overhead: share of its speed that sharing costs an opportunistic job besides.
        least_left: share of a GPU that opportunistic jobs have together at the least, in idle gaps.
        gpu_memory_gib: of each GPU.
        rules: of the packer.
        decide: who goes where: the packer's own function, unless another scheduler is played.
        law: see `SpeedLaw`.
        keeps_progress: a job that is taken away goes on from where it was; else from its begin.
        takes_over: a guaranteed job that comes to a GPU drives the others away instead of sharing it.
    """

    interval_s: float = 10.0
    guaranteed_cost: float = 0.005
    overhead: float = 0.05
    least_left: float = 0.05
    gpu_memory_gib: float = math.inf
    rules: PackingRules = field(default_factory=PackingRules)
    decide: Decide = decide
    law: SpeedLaw = isolated
    keeps_progress: bool = True
    takes_over: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value:g}: must be from 0 to 1"
            for name, value in (
                ("guaranteed_cost", self.guaranteed_cost), ("overhead", self.overhead), ("least_left", self.least_left),
            )
            if not 0 <= value <= 1
        ]  # fmt: skip
        if not 1 <= self.interval_s <= 1e6:
            problems.append(f"interval_s is {self.interval_s:g}: must be from 1 to 1e6")
        if not self.gpu_memory_gib > 0:
            problems.append(f"gpu_memory_gib is {self.gpu_memory_gib:g}: must be above 0")
        if problems:
            raise OptionsError("; ".join(problems))
