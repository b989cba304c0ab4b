"""What each job of a workload holds from its start to its end in one scenario. Pure; used by the engine."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.simulate.cluster import Cluster
from hetstream.slurm_plugin.simulate.nodes import Shape
from hetstream.slurm_plugin.simulate.scenario import Scenario
from hetstream.slurm_plugin.simulate.workload import Workload

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Asked:
    """Of each job.

    Attributes:
        is_opportunistic: it holds no GPU, shares those that the packer finds, and loads its data itself.
        speed: with what it holds, as a share of the ideal.
        demand: CPUs of data workers with which it is at its best.
        shapes: the different shapes.
        shape_of: the number of its shape.
    """

    is_opportunistic: Bools
    speed: Floats
    demand: Floats
    shapes: list[Shape]
    shape_of: list[int]


def asked_of(workload: Workload, cluster: Cluster, scenario: Scenario) -> Asked:
    """What the jobs hold under this scenario."""
    packed = np.zeros(len(workload), dtype=bool)
    if scenario.packing is not None and workload.sharing is not None:
        packed = workload.sharing.is_opportunistic & (workload.num_gpus > 0)
    columns = (
        workload.units,
        np.where(packed, 0, workload.gpus),
        np.where(packed, workload.ideal_cpus, scenario.unit_cpus(workload, cluster)),
        workload.memory_gib,
        np.where(packed, 0.0, scenario.extra_cpus(workload)),
    )
    table = np.stack([np.asarray(column, dtype=float) for column in columns], axis=1)
    unique, inverse = np.unique(table, axis=0, return_inverse=True)
    return Asked(
        is_opportunistic=packed,
        speed=np.where(packed, 1.0, scenario.fixed_speed(workload, cluster)),
        demand=np.where(packed, 0.0, workload.demand),
        shapes=[Shape(int(units), *shape) for units, *shape in unique.tolist()],
        shape_of=inverse.reshape(-1).tolist(),
    )
