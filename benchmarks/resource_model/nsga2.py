"""Joint plans by NSGA-II, as DLRover-RM makes them. Pure; the home of pymoo, which is installed apart.

For one job `plan.py` is exact and faster. This is for joint spaces that are too large to enumerate, and it is scored
against `joint.joint_front` where both can run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.resource_model.joint import Candidates
from benchmarks.resource_model.terms import Array, ModelError


def joint_front(
    jobs: Sequence[Candidates], capacity: float, *, population: int = 100, generations: int = 100, seed: int = 0
) -> tuple[Array, Array]:
    """Costs and values of the choices that the search has found, within the capacity.

    Raises:
        ModelError: pymoo is not installed.
    """
    try:
        from pymoo.algorithms.moo.nsga2 import NSGA2
        from pymoo.core.problem import Problem
        from pymoo.operators.crossover.sbx import SBX
        from pymoo.operators.mutation.pm import PM
        from pymoo.operators.repair.rounding import RoundingRepair
        from pymoo.operators.sampling.rnd import IntegerRandomSampling
        from pymoo.optimize import minimize
    except ImportError as error:
        raise ModelError(
            "joint plans by NSGA-II need pymoo, which is not installed here. Run: pip install pymoo"
        ) from error

    class Choices(Problem):  # type: ignore[misc]  # pymoo has no types
        def __init__(self) -> None:
            most = np.array([len(job.costs) - 1 for job in jobs])
            super().__init__(n_var=len(jobs), n_obj=2, n_ieq_constr=1, xl=np.zeros(len(jobs)), xu=most, vtype=int)

        def _evaluate(self, plans: Any, out: dict[str, Any], *_: Any, **__: Any) -> None:
            chosen = plans.astype(int)
            cost = sum(choices.costs[chosen[:, job]] for job, choices in enumerate(jobs))
            value = sum(choices.values[chosen[:, job]] for job, choices in enumerate(jobs))
            out["F"] = np.column_stack([cost, -value])
            out["G"] = (cost - capacity)[:, None]

    algorithm = NSGA2(
        pop_size=population,
        sampling=IntegerRandomSampling(),
        crossover=SBX(prob=0.9, eta=3.0, vtype=float, repair=RoundingRepair()),
        mutation=PM(prob=1.0, eta=3.0, vtype=float, repair=RoundingRepair()),
        eliminate_duplicates=True,
    )
    result = minimize(Choices(), algorithm, ("n_gen", generations), seed=seed, verbose=False)
    if result.F is None:
        return np.zeros(0), np.zeros(0)
    objectives = np.atleast_2d(result.F)
    return objectives[:, 0], -objectives[:, 1]
