"""A fitted model of a training step's time: predictions, and how sure they are. Made by `fit.py`; pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.resource_model.terms import Array, Configurations, Family, Term, Workload


@dataclass(frozen=True)
class Side:
    """One side of the maximum: computing, or loading.

    Attributes:
        terms: whose slopes these are.
        slopes: shape (k,), none negative.
        covariance: of the slopes, shape (k, k), also of those that are at their bound of 0; without what the
            observations say nothing of.
        noise: standard deviation of a measurement around the model, relative to it; NaN where the observations are too
            few to say.
        num_observations: that this side was fitted to.
        condition: of the scaled columns: above 1e8 or so some slopes mean nothing by themselves.
        confused: names of terms that these observations cannot tell apart, a tuple for each group.
        half_width: of an interval that holds 95 of 100 of what is measured, in standard deviations: Student's t of the
            observations beyond what the slopes need.
        unseen: directions of the slopes of which the observations say nothing, shape (k, m): so far may the columns of
            a step of one second go along each at the most for its prediction to be known: `seen`, shape (m,).
        seen: see there.
    """

    terms: tuple[Term, ...]
    slopes: Array
    covariance: Array
    noise: float
    num_observations: int
    condition: float
    confused: tuple[tuple[str, ...], ...] = ()
    half_width: float = 1.96
    unseen: Array | None = None
    seen: Array | None = None

    @property
    def is_known(self) -> bool:
        """Whether there were observations, and they can tell all terms apart."""
        return self.num_observations > 0 and not self.confused


@dataclass(frozen=True)
class StepTimeModel:
    """What a job's step takes.

    Attributes:
        family, workload: of the job.
        compute: a step that waits for no data.
        loading: the data of one step; None if the family has no such terms. Where no observation was bound by data it
            is as slow as the observations allow.
    """

    family: Family
    workload: Workload
    compute: Side
    loading: Side | None

    def sides(self, configurations: Configurations) -> tuple[Array, Array]:
        """Seconds for computing and for loading, each of shape (n,); never negative."""
        compute = _times(self.family, self.compute, configurations, self.workload)
        if self.loading is None:
            return compute, np.zeros(len(configurations))
        return compute, _times(self.family, self.loading, configurations, self.workload)

    def step_s(self, configurations: Configurations) -> Array:
        """Seconds a step, shape (n,): loading goes on beside computing, so the slower side counts."""
        return np.maximum(*self.sides(configurations))

    def samples_per_s(self, configurations: Configurations) -> Array:
        """Throughput (equation 1 of the paper), shape (n,)."""
        return configurations.trainers * self.workload.batch / self.step_s(configurations)

    def interval_s(self, configurations: Configurations) -> tuple[Array, Array]:
        """Within which 95 of 100 measurements of a step lie, as (n,) and (n,); infinite where too little is known.

        That is: with no more observations than slopes, or where a configuration differs from all that were measured in
        something that they cannot tell apart.
        """
        step = self.step_s(configurations)
        compute, loading = self.sides(configurations)
        spread = self._spread(self.compute, configurations)
        if self.loading is not None:
            spread = np.where(loading > compute, self._spread(self.loading, configurations), spread)
        return np.maximum(0.0, step - spread), step + spread

    def _spread(self, side: Side, configurations: Configurations) -> Array:
        """Half the width of the interval of one side."""
        if not np.isfinite(side.noise):
            return np.full(len(configurations), np.inf)
        columns = self.family.columns(side.terms, configurations, self.workload)
        of_slopes = np.einsum("ni,ij,nj->n", columns, side.covariance, columns)
        times = columns @ side.slopes
        found: Array = side.half_width * np.sqrt(np.maximum(0.0, of_slopes) + (side.noise * times) ** 2)
        if side.unseen is not None and side.seen is not None:
            along = np.abs(columns @ side.unseen) > side.seen * np.maximum(times, 1e-300)[:, None]
            found[along.any(axis=1)] = np.inf
        return found


def _times(family: Family, side: Side, configurations: Configurations, workload: Workload) -> Array:
    found: Array = family.columns(side.terms, configurations, workload) @ side.slopes
    return found
