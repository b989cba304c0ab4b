"""Decides anew, while a program trains, where its feature graph is cut: (what was seen, now) -> Recut with its reason.
Pure; the clock is an argument.

A step takes the longest of what goes on at the same time: the training loop with its own part of the graph, the data
workers, the wire. What each part takes is measured at the cut in force; for other cuts it grows with the operators as
`CutCosts` says. Without data workers everything is done one after the other.

A change has batches made again, so it must pay: it is predicted to make steps shorter by `LEAST_GAIN`, and to regain
within `HORIZON_S` what is thrown away. If steps are longer after it, it is taken back, and tried again ever later.

Called by `loader/feature_recuts.py`, in a thread: with many operators it takes seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hetstream.mpi_dataworkers.features.cut_graph import CutGraph
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.cut_costs import CutCost, CutCosts, carried_over, trainers
from hetstream.mpi_dataworkers.gpu_features.hybrid import HybridFeatures
from hetstream.mpi_dataworkers.gpu_features.operations import Batches

# By which share steps are to be shorter; below it measurements differ from each other as much.
LEAST_GAIN = 0.05
# What a change throws away must come back within this time.
HORIZON_S = 60.0
# The steps after a change say nothing of it until what was made ahead is used up.
SETTLE_S = 5.0
# What did not pay is tried again after this long, then twice as long, and so on.
RETRY_S, LONGEST_RETRY_S = 120.0, 7200.0
# So many looks in a row must say so: one may have fallen on something else.
_LOOKS = 2
# Cuts that are predicted to be as good as this are alike: that one is taken which leaves the least to data workers.
_ALIKE = 0.01
# A side that has had nothing yet is taken to be this much of what the other one needs: a trial says how it is.
_HOPE = 0.5
# A trainer that waits for this share of its time has data workers that do what they can.
_WAITING_SHARE = 0.1
# Batches of which something has changed by this share are others.
_OTHER_BATCHES = 0.2


@dataclass(frozen=True)
class Seen:
    """What was seen of a loader since the last look. Seconds are of one step.

    Attributes:
        step_s: of the training loop alone, without what follows.
        wait_s: in which it waited for data.
        trainer_s: in which it computed its part of the graph.
        data_worker_s: of a data worker, for its part.
        num_data_workers: that deliver; 0: this process makes the batches, one after the other.
        wire_bytes_per_s: at which batches come; None where none has come from afar.
        batches_ahead: finished ones that wait: a change throws them away.
        batches: what they are like.
    """

    step_s: float
    wait_s: float
    trainer_s: float
    data_worker_s: float
    num_data_workers: int
    wire_bytes_per_s: float | None
    batches_ahead: int
    batches: Batches

    @property
    def whole_s(self) -> float:
        """From one step to the next."""
        return self.step_s + self.wait_s + self.trainer_s


@dataclass(frozen=True)
class Recut:
    """What to do.

    Attributes:
        cut: to use from the next step on; None to keep the one in force.
        reason: one line for the user.
        share: of the training loop's time that its own part takes: what more data workers could take from it.
    """

    cut: CutGraph | None
    reason: str
    share: float = 0.0


@dataclass(frozen=True)
class _Rates:
    """What a modelled second really takes on each side, and what a data worker and a training loop do besides."""

    seen: Seen
    data_worker: float
    trainer: float
    loading_s: float
    alone_s: float

    def own_s(self, cost: CutCost) -> float:
        return self.alone_s + self.features_s(cost)

    def features_s(self, cost: CutCost) -> float:
        return self.trainer * cost.trainer_s + cost.exposed_s

    def made_s(self, cost: CutCost) -> float:
        """How often a batch comes, at the best."""
        wire = self.seen.wire_bytes_per_s
        made_s = (self.loading_s + self.data_worker * cost.data_worker_s) / max(1, self.seen.num_data_workers)
        return made_s if wire is None else max(made_s, cost.handed_bytes / wire)

    def step_s(self, cost: CutCost) -> float:
        own_s, made_s = self.own_s(cost), self.made_s(cost)
        return max(own_s, made_s) if self.seen.num_data_workers else own_s + made_s


class Recutter:
    """Decides for one graph.

    Args:
        features: what the loader was given.
        cut: of that graph, in force; default: the trainer has nothing.

    Attributes:
        cut: in force, once the caller has carried out what `decide` says.
    """

    def __init__(self, features: HybridFeatures, cut: CutGraph | None = None) -> None:
        self.features = features
        self.cut = cut or CutGraph(features.graph)
        self._costs: CutCosts | None = None
        self._factors: tuple[float | None, float | None] = None, None  # of data workers and trainer, as seen last
        self._loading_s = 0.0
        self._changed_at: float | None = None
        self._previous: tuple[CutGraph, Seen] | None = None  # of before the last change, until that is judged
        self._retry_at = float("-inf")
        self._num_disappointments = 0
        self._num_data_workers: int | None = None
        self._num_looks = 0  # in a row that said the same

    def with_graph(self, graph: FeatureGraph) -> Recutter:
        """The same for another graph, whose cut is this one's until it is decided anew."""
        features = HybridFeatures(graph, self.features.gpu, self.features.layers)
        made = Recutter(features, carried_over(self.cut, graph))
        made._factors, made._loading_s = self._factors, self._loading_s
        return made

    def decide(self, seen: Seen, now: float) -> Recut:
        """Keep the cut, or take another one."""
        costs, kept = self._costs_of(seen.batches), trainers(self.cut)
        present = costs.of(kept)
        rates = self._learned(seen, present)
        share = min(1.0, rates.features_s(present) / max(seen.whole_s, 1e-9))
        cut, reason = self._decide(costs, rates, kept, now)
        if cut is not None:
            self._previous = self.cut, seen
            self.cut, self._changed_at, self._num_looks = cut, now, 0
        return Recut(cut, f"data workers have {_moved(self.cut)} of {len(costs.order)} operators: {reason}", share)

    def _decide(self, costs: CutCosts, rates: _Rates, kept: frozenset[str], now: float) -> tuple[CutGraph | None, str]:
        seen = rates.seen
        if self._changed_at is not None and now - self._changed_at < SETTLE_S:
            return None, f"the cut is new, measuring for {SETTLE_S:g} s"
        if seen.num_data_workers != self._num_data_workers:
            self._num_data_workers, self._retry_at, self._num_disappointments = seen.num_data_workers, float("-inf"), 0
            self._previous = None
        if self._previous is not None:
            return self._judge(*self._previous, seen, now)
        best, best_s = self._best(costs, rates, kept)
        now_s = rates.step_s(costs.of(kept))
        if best == kept:
            self._num_looks = 0
            return None, "no other cut is predicted to be faster"
        would = f"a step takes {best_s * 1e3:.3g} ms instead of {now_s * 1e3:.3g} ms"
        by = f"by the cost model, {_workers(seen.num_data_workers)}"
        lost_s = seen.batches_ahead * rates.made_s(costs.of(best))
        refusal = ""
        if now_s < best_s * (1 + LEAST_GAIN):
            refusal = f"too little to gain, {would} with another cut, {by}"
        elif (1 - best_s / now_s) * HORIZON_S < lost_s:
            refusal = f"{would} with another cut, {by}, but {seen.batches_ahead} batches would be made again in "
            refusal += f"{lost_s:.3g} s"
        elif now < self._retry_at:
            refusal = f"another cut did not pay, the next try is in {self._retry_at - now:.0f} s"
        self._num_looks = 0 if refusal else self._num_looks + 1
        if refusal or self._num_looks < _LOOKS:
            return None, refusal or f"{would} with another cut, {by}, if the next look says so, too"
        return costs.cut(best), f"before it were {_moved(self.cut)}, {would}, {by}"

    def _judge(self, before: CutGraph, then: Seen, seen: Seen, now: float) -> tuple[CutGraph | None, str]:
        """Whether the last change has made steps longer, while nothing else has changed."""
        took = f"a step took {seen.whole_s * 1e3:.3g} ms, and {then.whole_s * 1e3:.3g} ms before the last change"
        if seen.whole_s <= then.whole_s * (1 + LEAST_GAIN):
            self._previous = None
            return None, took
        self._num_looks += 1
        if self._num_looks < _LOOKS:
            return None, took
        self._retry_at = now + min(LONGEST_RETRY_S, RETRY_S * 2**self._num_disappointments)
        self._num_disappointments += 1
        return before, f"as before, {took}"

    def _costs_of(self, batches: Batches) -> CutCosts:
        known = self._costs
        if known is None or _are_other(known.batches, batches):
            known = CutCosts(self.features.graph, batches, self.features.gpu, self.features.layers)
            self._costs = known
        return known

    def _learned(self, seen: Seen, present: CutCost) -> _Rates:
        """What is known of both sides; of one that has nothing at this cut, what was seen of it before."""
        data_worker, trainer = self._factors
        if present.data_worker_s > 0:
            data_worker = seen.data_worker_s / present.data_worker_s
        if present.trainer_s > 0:
            trainer = seen.trainer_s / present.trainer_s
        self._factors = data_worker, trainer
        num = max(1, seen.num_data_workers)
        if seen.num_data_workers == 0:
            self._loading_s = max(0.0, seen.wait_s - seen.data_worker_s)
        elif seen.wait_s > _WAITING_SHARE * seen.whole_s and not _is_wire_busy(seen, present):
            self._loading_s = max(0.0, num * seen.whole_s - seen.data_worker_s)
        else:  # they have time left: it is this at most
            self._loading_s = min(self._loading_s, max(0.0, num * seen.whole_s - seen.data_worker_s))
        if data_worker is None:
            data_worker = _HOPE * trainer if trainer is not None and self.features.gpu is None else 1.0
        if trainer is None:  # a GPU's own time is the layers' to say
            trainer = _HOPE * data_worker if self.features.gpu is None else 0.0
        # What the model says that layers do not hide is in the loop's own time.
        return _Rates(seen, data_worker, trainer, self._loading_s, max(0.0, seen.step_s - present.exposed_s))

    def _best(self, costs: CutCosts, rates: _Rates, kept: frozenset[str]) -> tuple[frozenset[str], float]:
        found = {each: rates.step_s(costs.of(each)) for each in (kept, *self._candidates(costs, rates))}
        least_s = min(found.values())
        alike = [each for each, seconds in found.items() if seconds <= least_s * (1 + _ALIKE)]
        best = kept if kept in alike else max(alike, key=lambda each: (len(each), -found[each], sorted(each)))
        return best, found[best]

    def _candidates(self, costs: CutCosts, rates: _Rates) -> Iterator[frozenset[str]]:
        """All, nothing, and where one side begins to take longer than the other, or than training hides."""
        count = len(costs.order)
        yield costs.kept(0)
        yield costs.kept(count)
        for is_enough in (
            lambda cost: rates.own_s(cost) <= rates.made_s(cost),
            lambda cost: cost.exposed_s <= 0,
        ):
            first, last = 0, count
            while first < last:
                middle = (first + last) // 2
                if is_enough(costs.of(costs.kept(middle))):
                    last = middle
                else:
                    first = middle + 1
            yield costs.kept(first)
            yield costs.kept(max(0, first - 1))


def _moved(cut: CutGraph) -> int:
    return len(cut.graph.steps) - len(trainers(cut))


def _workers(num: int) -> str:
    return f"with {num} data worker{'s' * (num > 1)}" if num else "without data workers"


def _is_wire_busy(seen: Seen, present: CutCost) -> bool:
    """Whether the trainer waits for batches on their way, and not for data workers."""
    wire = seen.wire_bytes_per_s
    return wire is not None and present.handed_bytes / wire > (1 - _WAITING_SHARE) * seen.whole_s


def _are_other(batches: Batches, others: Batches) -> bool:
    pairs = (batches.rows, others.rows), (batches.list_length, others.list_length)
    return any(abs(before - after) > _OTHER_BATCHES * max(before, after) for before, after in pairs)
