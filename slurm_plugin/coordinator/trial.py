"""Opportunistic jobs that are alone on a GPU divide its memory by trial: for the best total speed. Pure.

Some jobs hardly notice that half of their tensors are on the host, others become several times slower. Which is which
shows only when it is tried: a part of the memory is moved from one job to another, and stays there if the sum of the
jobs' speeds, each against the best that it has shown, is larger than before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from hetstream.slurm_plugin.coordinator.measurements import SharingJob
from hetstream.slurm_plugin.coordinator.memory import divided

_MOVED = 0.1
# A new division is judged by mini-batches that were begun and ended under it.
_BATCHES = 4
_GAIN = 0.02


@dataclass(frozen=True)
class Trial:
    """Where the search is.

    Attributes:
        best: limits that have done best so far, in bytes.
        best_ns: how long the jobs' mini-batches took under them; empty: not measured.
        tried: limits that are being tried.
        moves: pairs of jobs, from which to which memory is moved, that are still to be tried.
        counts: mini-batches that each job had made when the trial began.
        fastest_ns: shortest mini-batch of each job so far.
    """

    best: Mapping[str, int] = field(default_factory=dict)
    best_ns: Mapping[str, int] = field(default_factory=dict)
    tried: Mapping[str, int] = field(default_factory=dict)
    moves: tuple[tuple[str, str], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    fastest_ns: Mapping[str, int] = field(default_factory=dict)


def advance(trial: Trial, capacity_bytes: int, demands: Mapping[str, int], jobs: tuple[SharingJob, ...]) -> Trial:
    """The next state: begun anew when other jobs are there, and one move further when the last one can be judged."""
    names = {job.name for job in jobs}
    if set(trial.tried) != names:
        limits = divided(capacity_bytes, demands)
        return Trial(limits, {}, limits, _all_moves(names), _counts(jobs))
    durations = {job.name: job.statistics.mini_batch_ns for job in jobs if job.statistics}
    made = {name: count - trial.counts.get(name, 0) for name, count in _counts(jobs).items()}
    if len(durations) < len(names) or min(made.values()) < _BATCHES or min(durations.values()) <= 0:
        return trial
    fastest_ns = {name: min(ns, trial.fastest_ns.get(name, ns)) for name, ns in durations.items()}
    if not trial.best_ns or _speed(durations, fastest_ns) > _speed(trial.best_ns, fastest_ns) * (1 + _GAIN):
        # What has helped is done again, as long as it helps.
        trial = replace(trial, best=trial.tried, best_ns=durations)
    else:
        trial = replace(trial, moves=trial.moves[1:])
    tried = _moved(trial.best, trial.moves[0], capacity_bytes) if trial.moves else dict(trial.best)
    return replace(trial, tried=tried, counts=_counts(jobs), fastest_ns=fastest_ns)


def _speed(durations: Mapping[str, int], fastest_ns: Mapping[str, int]) -> float:
    """Sum of the jobs' speeds, each against its best."""
    return sum(fastest_ns[name] / duration_ns for name, duration_ns in durations.items())


def _moved(limits: Mapping[str, int], move: tuple[str, str], capacity_bytes: int) -> dict[str, int]:
    giver, getter = move
    amount = min(limits[giver], int(_MOVED * capacity_bytes))
    return {**limits, giver: limits[giver] - amount, getter: limits[getter] + amount}


def _all_moves(names: set[str]) -> tuple[tuple[str, str], ...]:
    return tuple((giver, getter) for giver in sorted(names) for getter in sorted(names) if giver != getter)


def _counts(jobs: tuple[SharingJob, ...]) -> dict[str, int]:
    return {job.name: job.statistics.boundaries if job.statistics else 0 for job in jobs}
