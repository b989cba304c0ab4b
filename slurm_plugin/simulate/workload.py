"""The jobs that are simulated, as one array for each property. Pure; made by the readers.

A job is a gang of equal units: each unit has its GPUs, CPUs and memory on one node, and all start together. A unit is
a GPU with its trainer in the traces, and a node's share of a job in an export of sacct.

The speed law: without data workers a unit with c CPUs runs at min(1, c / ideal_cpus) of its ideal speed. With them, the
unit keeps trainer_cpus, and a job with w CPUs of data workers runs at min(1, w / demand) * (1 - overhead), where demand
is (ideal_cpus - trainer_cpus) * units. Where curves were measured, they say what data workers bring instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from hetstream.slurm_plugin.errors import SimulationInputError
from hetstream.slurm_plugin.simulate.curves import Curves
from hetstream.slurm_plugin.simulate.sharing import Sharing

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Recorded:
    """What really happened to each job, of a site's export.

    Attributes:
        start_s, end_s: in the clock of the workload.
        cpus: that each unit had.
        extra_cpus: that each job had besides, anywhere: other components of a heterogeneous job.
    """

    start_s: Floats
    end_s: Floats
    cpus: Floats
    extra_cpus: Floats


@dataclass(frozen=True)
class Workload:
    """Jobs in the order of their submission.

    Attributes:
        names: of the jobs, for reports.
        submit_s: from the first submission on, so that the first is 0.
        work_s: how long a job runs at its ideal speed, without data workers' overhead.
        units: of its gang.
        gpus: of each unit.
        ideal_cpus: with which a unit reaches its ideal speed.
        trainer_cpus: that a unit itself needs when data workers make its batches.
        overhead: share of the ideal speed that data workers cost.
        memory_gib: of each unit.
        worker_memory_gib: for each CPU of a data worker.
        network_gbps: that a unit takes in at its ideal speed from data workers on other nodes.
        limit_s: time limit; infinite where none is known.
        tenants, users: whose a job is, as numbers; `tenant_names` and `user_names` say who.
        is_het: whether it can only start as a heterogeneous job does, in a cycle of backfill.
        recorded: what really happened; None for a trace without it.
        curves: what data workers bring each job, where that was measured; None: it is in proportion.
        sharing: which of them are opportunistic, and what each is to a GPU; None: nothing is known, and none is.
    """

    names: tuple[str, ...]
    submit_s: Floats
    work_s: Floats
    units: Ints
    gpus: Ints
    ideal_cpus: Floats
    trainer_cpus: Floats
    overhead: Floats
    memory_gib: Floats
    worker_memory_gib: Floats
    network_gbps: Floats
    limit_s: Floats
    tenants: Ints
    users: Ints
    is_het: Bools
    tenant_names: tuple[str, ...] = ("",)
    user_names: tuple[str, ...] = ("",)
    recorded: Recorded | None = None
    curves: Curves | None = None
    sharing: Sharing | None = None

    def __len__(self) -> int:
        return len(self.names)

    @property
    def num_gpus(self) -> Ints:
        """Of each job."""
        return self.units * self.gpus

    @property
    def demand(self) -> Floats:
        """CPUs of data workers with which each job is at its best."""
        if self.curves is not None:
            return self.curves.cpus[:, -1]
        return np.maximum(0.0, self.ideal_cpus - self.trainer_cpus) * self.units

    def only(self, keep: npt.NDArray[Any]) -> Workload:
        """Some of the jobs, by a mask or by places, with their clock unchanged."""
        places = np.flatnonzero(keep) if keep.dtype == np.bool_ else keep
        changed: dict[str, Any] = {"names": tuple(self.names[place] for place in places)}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, np.ndarray):
                changed[field.name] = value[places]
        if self.recorded is not None:
            own = self.recorded
            changed["recorded"] = Recorded(
                own.start_s[places], own.end_s[places], own.cpus[places], own.extra_cpus[places]
            )
        if self.curves is not None:
            changed["curves"] = self.curves.rows(places)
        if self.sharing is not None:
            changed["sharing"] = self.sharing.rows(places)
        return replace(self, **changed)


_DEFAULTS: Mapping[str, float] = {
    "units": 1,
    "gpus": 1,
    "ideal_cpus": 1.0,
    "trainer_cpus": 1.0,
    "overhead": 0.0,
    "memory_gib": 0.0,
    "worker_memory_gib": 0.0,
    "network_gbps": 0.0,
    "limit_s": np.inf,
}


def build(
    names: Sequence[str],
    columns: Mapping[str, Sequence[float] | npt.NDArray[Any]],
    tenants: Sequence[str] = (),
    users: Sequence[str] = (),
    is_het: Sequence[bool] = (),
    recorded: Recorded | None = None,
    curves: Curves | None = None,
    sharing: Sharing | None = None,
) -> Workload:
    """Put a workload together: sorts it by submission and lets its clock begin at 0.

    Args:
        names: of the jobs.
        columns: `submit_s`, `work_s` and any of the other number columns of `Workload`.
        tenants, users: of each job; none: they are all one's.
        is_het: of each job.
        recorded: in the same clock as `submit_s`.
        curves: of each job.
        sharing: of each job.

    Raises:
        SimulationInputError: there is no job.
    """
    if not len(names):
        raise SimulationInputError("workload", ["there is no job in it"])
    size = len(names)
    values = {name: np.full(size, default, dtype=float) for name, default in _DEFAULTS.items()}
    values |= {name: np.asarray(column, dtype=float) for name, column in columns.items()}
    begin_s = float(values["submit_s"].min())
    order = np.argsort(values["submit_s"], kind="stable")
    tenant_names, tenant_of = _numbered(tenants, size)
    user_names, user_of = _numbered(users, size)
    whole = Workload(
        names=tuple(names),
        submit_s=values["submit_s"] - begin_s,
        work_s=values["work_s"],
        units=values["units"].astype(np.int64),
        gpus=values["gpus"].astype(np.int64),
        ideal_cpus=values["ideal_cpus"],
        trainer_cpus=np.minimum(values["trainer_cpus"], values["ideal_cpus"]),
        overhead=values["overhead"],
        memory_gib=values["memory_gib"],
        worker_memory_gib=values["worker_memory_gib"],
        network_gbps=values["network_gbps"],
        limit_s=values["limit_s"],
        tenants=tenant_of,
        users=user_of,
        is_het=np.array(is_het, dtype=bool) if len(is_het) else np.zeros(size, dtype=bool),
        tenant_names=tenant_names,
        user_names=user_names,
        recorded=recorded and replace(recorded, start_s=recorded.start_s - begin_s, end_s=recorded.end_s - begin_s),
        curves=curves,
        sharing=sharing,
    )
    return whole.only(order)


def _numbered(names: Sequence[str], size: int) -> tuple[tuple[str, ...], Ints]:
    """The different words in their order, and the number of each."""
    if not names:
        return ("",), np.zeros(size, dtype=np.int64)
    numbers: dict[str, int] = {}
    places = [numbers.setdefault(word, len(numbers)) for word in names]
    return tuple(numbers), np.array(places, dtype=np.int64)
