"""Exact Pareto fronts of (cost, gain): what costs no more and brings no less than anything else. Pure.

Both are exact and take one sort: a million points take a fraction of a second. Costs are to be small, gains large.
"""

from __future__ import annotations

import numpy as np

from benchmarks.resource_model.terms import Array, Indices


def front(costs: Array, gains: Array) -> Indices:
    """Indices of the points that no other point beats, by growing cost; of equal points the first.

    Args:
        costs, gains: shape (n,), finite.
    """
    order = np.lexsort((np.arange(len(costs)), -gains, costs))
    if not len(order):
        return order
    best_before = np.maximum.accumulate(np.concatenate([[-np.inf], gains[order][:-1]]))
    found: Indices = order[gains[order] > best_before]
    return found


def hypervolume(costs: Array, gains: Array, worst_cost: float, worst_gain: float) -> float:
    """Area that the points dominate, seen from a point that is worse than all: how good a front is, as one number."""
    inside = (costs <= worst_cost) & (gains >= worst_gain)
    chosen = front(costs[inside], gains[inside])
    if not len(chosen):
        return 0.0
    cost, gain = costs[inside][chosen], gains[inside][chosen]
    widths = np.diff(np.append(cost, worst_cost))
    return float((widths * (gain - worst_gain)).sum())


def upper_hull(costs: Array, gains: Array) -> Indices:
    """Of a front by growing cost, the points of its concave hull: each upgrade brings less a cost than the one before.

    Args:
        costs, gains: a front as `front` orders it.
    """
    kept: list[int] = []
    for index in range(len(costs)):
        while len(kept) >= 2:
            (before, last) = kept[-2], kept[-1]
            if (gains[last] - gains[before]) * (costs[index] - costs[last]) > (gains[index] - gains[last]) * (
                costs[last] - costs[before]
            ):
                break
            kept.pop()
        kept.append(index)
    return np.array(kept, dtype=np.intp)
