"""The reference of `rap_plan.py`: the same schedules as an integer program, given to HiGHS by SciPy.

An operation has a variable for each step, 1 if it has run by then, so that what it needs has run one step earlier: the
tightest way to write it that we know. A kernel's variable is 1 where any of its operations runs. What a layer has too
much in either resource is its exposed time, and the sum of those is minimised; a launch costs a thousandth of itself
besides, so that of two schedules that expose the same the one with fewer kernels is better, as in the search.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import optimize, sparse

from hetstream.mpi_dataworkers.gpu_features.schedule import Cost, Kernel, OperationPlacement, Problem, cost_of

_SCALE = 1e6  # its tolerances are made for numbers near 1: seconds become microseconds


@dataclass(frozen=True)
class Solved:
    """What HiGHS has found.

    Attributes:
        kernels: None where it has no schedule.
        cost: of them.
        is_best: whether nothing is better on this grid.
        bound_s: no schedule on this grid exposes less, as far as it has proved.
        spent_s: seconds.
    """

    kernels: tuple[Kernel, ...] | None
    cost: Cost | None
    is_best: bool
    bound_s: float
    spent_s: float


class _Rows:
    """Constraints, as they are made."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.values: list[float] = []
        self.lower: list[float] = []
        self.upper: list[float] = []

    def add(self, terms: Sequence[tuple[int, float]], lower: float, upper: float) -> None:
        """`lower <= sum of value * variable <= upper`."""
        for column, value in terms:
            self.rows.append(len(self.lower))
            self.columns.append(column)
            self.values.append(value)
        self.lower.append(lower)
        self.upper.append(upper)

    def constraint(self, num_variables: int) -> optimize.LinearConstraint:
        """All of them."""
        shape = (len(self.lower), num_variables)
        matrix = sparse.csr_matrix((self.values, (self.rows, self.columns)), shape=shape)
        return optimize.LinearConstraint(matrix, self.lower, self.upper)


def solve(problem: Problem, steps: Sequence[int], limit_s: float) -> Solved:
    """The best schedule on a grid, as far as HiGHS gets.

    Args:
        problem: the problem.
        steps: how many each layer has.
        limit_s: of HiGHS; making the program is not counted.
    """
    grid = OperationPlacement(problem, steps)
    num, last = len(problem.operations), grid.num_steps - 1
    kernels_at = num * (last + 1)
    exposed_at = kernels_at + len(grid.kinds) * (last + 1)
    num_variables = exposed_at + len(problem.layers)
    rows = _constraints(grid, kernels_at, exposed_at)
    price = np.zeros(num_variables)
    price[kernels_at:exposed_at] = problem.launch_s * _SCALE / 1000
    price[exposed_at:] = 1.0
    lower, upper = np.zeros(num_variables), np.ones(num_variables)
    upper[exposed_at:] = np.inf
    lower[np.arange(num) * (last + 1) + last] = 1  # everything has run in the end
    whole = np.zeros(num_variables)
    whole[:kernels_at] = 1
    began = time.monotonic()
    result = optimize.milp(
        price,
        integrality=whole,
        bounds=optimize.Bounds(lower, upper),
        constraints=rows.constraint(num_variables),
        options={"time_limit": limit_s, "mip_rel_gap": 1e-6},
    )
    spent_s = time.monotonic() - began
    bound_s = max(0.0, float(result.mip_dual_bound or 0.0)) / _SCALE
    if result.x is None:
        return Solved(None, None, False, bound_s, spent_s)
    has_run = result.x[:kernels_at].reshape(num, last + 1) > 0.5
    for at, step in enumerate(has_run.argmax(axis=1).tolist()):
        grid.put_operation(at, step)
    kernels = grid.kernels()
    return Solved(kernels, cost_of(problem, kernels), result.status == 0, bound_s, spent_s)


def _constraints(grid: OperationPlacement, kernels_at: int, exposed_at: int) -> _Rows:
    problem, rows, num_steps = grid.problem, _Rows(), grid.num_steps

    def run_at(at: int, step: int, value: float) -> list[tuple[int, float]]:
        """Terms that are `value` if the operation runs at this very step."""
        here = at * num_steps + step
        return [(here, value)] if step == 0 else [(here, value), (here - 1, -value)]

    for at, operation in enumerate(problem.operations):
        for step in range(num_steps):
            here = at * num_steps + step
            if step:
                rows.add([(here, 1.0), (here - 1, -1.0)], 0, np.inf)
            if operation.parent >= 0:
                needed = [] if step == 0 else [(operation.parent * num_steps + step - 1, 1.0)]
                rows.add([(here, -1.0), *needed], 0, np.inf)
            kernel = kernels_at + int(grid.kind_of[at]) * num_steps + step
            rows.add([(kernel, 1.0), *run_at(at, step, -1.0)], 0, np.inf)
    for layer in range(len(problem.layers)):
        steps = np.flatnonzero(grid.layer_of_step == layer).tolist()
        launches = [
            (kernels_at + kind * num_steps + step, problem.launch_s * _SCALE)
            for kind in range(len(grid.kinds))
            for step in steps
        ]
        for resource in range(2):
            load = list(launches)
            for at in range(len(problem.operations)):
                # Within a layer the differences between steps add up to one.
                load.append((at * num_steps + steps[-1], grid.work[at, resource] * _SCALE))
                if steps[0]:
                    load.append((at * num_steps + steps[0] - 1, -grid.work[at, resource] * _SCALE))
            rows.add([*load, (exposed_at + layer, -1.0)], -np.inf, grid.capacity[layer, resource] * _SCALE)
    return rows
