"""Which terms the observations cannot tell apart, and which configuration to try next. Pure.

Slopes that are confused still predict well where the observations lie, and mean nothing elsewhere: if only the number
of data workers has varied, the term of loading and the constant are known, and what trainer CPUs bring is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.resource_model.step_time import Side, StepTimeModel
from benchmarks.resource_model.terms import Array, Configurations, Indices

# A direction of the scaled columns with less than this share of the strongest one is lost in any noise.
_LOST = 1e-3
# A configuration is like the observed ones if it goes no further along a lost direction than so many times theirs.
_AS_FAR = 3.0
# A term takes part in such a direction with more than this weight.
_PART = 0.2
# As if the prior knew each slope to within a hundred times of what one observation tells: it only breaks ties.
_RIDGE = 1e-4


def lost_directions(columns: Array) -> tuple[Array, Array, Array]:
    """What observations say of the slopes, and what not.

    Args:
        columns: shape (n, k), each row divided by its measured time.

    Returns:
        The inverse of what they say, shape (k, k), without the lost directions; those as columns, shape (k, m), of
        unit length where each column has it; and how far rows like the observed ones go along them, shape (m,).
    """
    norms = np.linalg.norm(columns, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    _, strengths, directions = np.linalg.svd(columns / scale, full_matrices=True)
    padded = np.zeros(columns.shape[1])
    padded[: len(strengths)] = strengths
    is_lost = padded <= _LOST * padded[0]
    kept = directions[~is_lost] / scale
    inverse: Array = (kept / padded[~is_lost, None] ** 2).T @ kept
    lost = (directions[is_lost] / scale).T
    # As far as any observation, and rounding; a column that no observation had counts as soon as it is there.
    seen = np.maximum(_AS_FAR * np.abs(columns @ lost).max(axis=0, initial=0.0), _LOST / np.sqrt(len(columns)))
    return inverse, lost, seen


def confused_terms(columns: Array, names: tuple[str, ...]) -> tuple[float, tuple[tuple[str, ...], ...]]:
    """The condition of scaled columns, and groups of terms that they cannot tell apart.

    Args:
        columns: shape (n, k), each row divided by its measured time.
        names: of the k terms.

    Returns:
        The condition number, and for each lost direction the terms that take part in it; terms whose column is zero
        everywhere are a group of one.
    """
    norms = np.linalg.norm(columns, axis=0)
    absent = tuple((name,) for name, norm in zip(names, norms, strict=True) if norm <= 0)
    present = [index for index, norm in enumerate(norms) if norm > 0]
    if not present:
        return float("inf"), absent
    unit = columns[:, present] / norms[present]
    _, strengths, directions = np.linalg.svd(unit, full_matrices=True)
    padded = np.zeros(len(present))
    padded[: len(strengths)] = strengths
    condition = float(padded[0] / padded[-1]) if padded[-1] > 0 else float("inf")
    if absent:
        condition = float("inf")
    lost = directions[padded < _LOST * padded[0]]
    # Several lost directions together span what is confused: a term is in it by its share of that space.
    groups: list[tuple[str, ...]] = []
    if len(lost):
        share = np.sqrt((lost**2).sum(axis=0))
        groups.append(tuple(names[present[index]] for index in np.flatnonzero(share > _PART)))
    return condition, (*absent, *groups)


@dataclass(frozen=True)
class Probe:
    """A configuration that is worth a try.

    Attributes:
        index: in the candidates.
        gain: how much more all slopes of its side are known after it, as a logarithm (of the determinant).
        reason: for people.
    """

    index: int
    gain: float
    reason: str


def propose_probes(
    model: StepTimeModel, seen: Configurations, candidates: Configurations, num: int = 1
) -> tuple[Probe, ...]:
    """The candidates that tell most about the model's slopes, the best first (D-optimal, one after the other).

    Args:
        model: fitted to `seen`.
        seen: configurations that were measured.
        candidates: those that are allowed.
        num: how many at most.
    """
    compute, loading = model.sides(candidates)
    sides = [(model.compute, np.ones(len(candidates), dtype=np.bool_) if model.loading is None else loading <= compute)]
    if model.loading is not None:
        sides.append((model.loading, loading > compute))
    found: list[Probe] = []
    for side, shows in sides:
        found += _of_side(model, side, seen, candidates, np.flatnonzero(shows), num)
    return tuple(sorted(found, key=lambda probe: (-probe.gain, probe.index))[:num])


def _of_side(
    model: StepTimeModel, side: Side, seen: Configurations, candidates: Configurations, allowed: Indices, num: int
) -> list[Probe]:
    """The best of the candidates on which this side is the slower one, and so can be seen."""
    if not len(allowed):
        return []
    family, workload = model.family, model.workload
    known = _scaled(family.columns(side.terms, seen, workload), model.step_s(seen))
    new = _scaled(family.columns(side.terms, candidates[allowed], workload), model.step_s(candidates[allowed]))
    scale = np.maximum(np.linalg.norm(np.concatenate([known, new]), axis=0), 1e-300)
    known, new = known / scale, new / scale
    information = known.T @ known + _RIDGE * np.eye(known.shape[1])
    why = f"{', '.join(side.confused[0])} cannot be told apart yet" if side.confused else "it narrows the estimate most"
    found: list[Probe] = []
    for _ in range(min(num, len(allowed))):
        inverse = np.linalg.inv(information)
        gains = np.log1p(np.einsum("ni,ij,nj->n", new, inverse, new))
        best = int(np.argmax(gains))
        found.append(Probe(int(allowed[best]), float(gains[best]), why))
        information = information + np.outer(new[best], new[best])
    return found


def _scaled(columns: Array, times: Array) -> Array:
    positive = np.where(times > 0, times, 1.0)
    found: Array = columns / positive[:, None]
    return found
