"""Decides where a feature graph is cut: the trainer's GPU keeps what fits beside training, data workers get the rest.
Pure.

Called by programs when they make a loader. `Recutter` decides anew while a program trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features.cut import CutGraph, behind
from hetstream.mpi_dataworkers.features.graph import FeatureGraph
from hetstream.mpi_dataworkers.gpu_features.operations import CPU_CORE, Batches, Device, operations_of, sizes_of
from hetstream.mpi_dataworkers.gpu_features.schedule import (
    Layer,
    Operation,
    Problem,
    check_graph,
    check_is,
    check_number,
    cost_of,
    least_exposed_s,
    trees_of,
)
from hetstream.mpi_dataworkers.gpu_features.search import algorithm_1, fuse

# What the two parts of a cut feature graph cost, by which operators the trainer keeps. Pure.


@dataclass(frozen=True)
class CutCost:
    """What a cut costs for each batch, by the model.

    Attributes:
        data_worker_s: of a CPU core, for the data workers' part.
        trainer_s: of a CPU core, if the trainer's part ran on one.
        exposed_s: by which a training step is longer, where the trainer's part runs beside the layers of a model.
        handed_bytes: that data workers hand over.
    """

    data_worker_s: float
    trainer_s: float
    exposed_s: float
    handed_bytes: float


class CutCosts:
    """What each cut of a graph costs. Cuts that were asked for are remembered.

    Args:
        graph: the graph.
        batches: what it is computed for.
        gpu: the trainer's; None where the trainer's part runs on a CPU.
        layers: of the model, with what each leaves of the GPU; () where that is not known.

    Attributes:
        order: operators in the order in which they move to data workers: by feature, the dearest one first, each after
            the one that it needs. So features move whole, few of them, and what stays is a part that can be cut off.

    Raises:
        FeatureError: something is of another type.
    """

    def __init__(
        self, graph: FeatureGraph, batches: Batches, gpu: Device | None = None, layers: Sequence[Layer] = ()
    ) -> None:
        check_is("batches", batches, Batches, "Batches(rows=...)")
        self.graph, self.batches = graph, batches
        on_a_core = operations_of(graph, batches.rows, batches.list_length, CPU_CORE)
        self._core_s = {each.name: each.alone_s + CPU_CORE.launch_s for each in on_a_core}
        self._sizes = sizes_of(graph, batches.rows, batches.list_length)
        device = gpu or CPU_CORE
        operations = on_a_core if gpu is None else operations_of(graph, batches.rows, batches.list_length, gpu)
        self._hides = gpu is not None and bool(layers)
        self._problem = Problem(operations, tuple(layers) or (Layer("none", 0.0, 0.0, 0.0),), device.launch_s)
        self.order = _order(self._problem)
        self._known: dict[frozenset[str], CutCost] = {}

    def kept(self, num_moved: int) -> frozenset[str]:
        """Return what the trainer keeps when the first `num_moved` operators have moved."""
        return frozenset(self.order[num_moved:])

    def cut(self, kept: frozenset[str]) -> CutGraph:
        """Return the graph, cut so that the trainer has these operators."""
        order = self.graph.order
        return CutGraph(self.graph, tuple(step.name for step in order if step.name in kept and step.of not in kept))

    def of(self, kept: frozenset[str]) -> CutCost:
        """Return what a cut costs."""
        if kept not in self._known:
            moved_s = sum(seconds for name, seconds in self._core_s.items() if name not in kept)
            handed = sum(self._sizes[name].num_bytes for name in _handed(self.cut(kept)))
            trainer_s = sum(self._core_s[name] for name in kept)
            self._known[kept] = CutCost(moved_s, trainer_s, self.exposed_s(kept), handed)
        return self._known[kept]

    def exposed_s(self, kept: frozenset[str]) -> float:
        """Return what the paper's schedule exposes, with both resources: `search` finds better ones, in more time."""
        if not self._hides or not kept:
            return 0.0
        problem = self._of_trainer(kept)
        return cost_of(problem, algorithm_1(problem, fuse(problem), two_resources=True)).exposed_s

    def least_exposed_s(self, kept: frozenset[str]) -> float:
        """No schedule exposes less; it is known at once."""
        return least_exposed_s(self._of_trainer(kept)) if self._hides else 0.0

    def _of_trainer(self, kept: frozenset[str]) -> Problem:
        places: dict[int, int] = {}
        found: list[Operation] = []
        for at, each in enumerate(self._problem.operations):
            if each.name in kept:
                places[at] = len(found)
                parent = places.get(each.parent, -1)
                found.append(Operation(each.name, each.kind, parent, each.memory_s, each.compute_s))
        return Problem(tuple(found), self._problem.layers, self._problem.launch_s)


def trainers(cut: CutGraph) -> frozenset[str]:
    """Return the operators of the trainer's part, by their names in the whole graph."""
    return behind(cut.graph, cut.first)


def carried_over(cut: CutGraph, graph: FeatureGraph) -> CutGraph:
    """Return another graph, cut where this one is: the trainer keeps the operators that it has, and those that need
    them.

    What is new goes to data workers, until it is decided anew.
    """
    kept = trainers(cut)
    before = {step for step in cut.graph.steps if step.name in kept}
    return CutGraph(graph, tuple(step.name for step in graph.steps if step in before))


def _handed(cut: CutGraph) -> list[str]:
    """The features that data workers hand over, by their names in the whole graph."""
    made = [name for output in cut.data_workers.outputs for name in output.of] if cut.data_workers is not None else []
    return [*made, *(name for name, _ in cut.passed)]


def _order(problem: Problem) -> list[str]:
    def seconds(tree: Sequence[int]) -> float:
        return sum(problem.operations[at].alone_s for at in tree)

    trees = [sorted(int(at) for part in parts for at in part) for parts in trees_of(problem)]
    ordered = sorted(trees, key=lambda tree: (-seconds(tree), tree))
    return [problem.operations[at].name for tree in ordered for at in tree]


@dataclass(frozen=True)
class HybridFeatures:
    """A feature graph whose cut follows what is measured while the program trains: a loader's `features`.

    Attributes:
        graph: the graph.
        gpu: the trainer's GPU, such as `operations.H200`; None where it is not known, or the trainer has none.
        layers: of the model, with what each leaves of that GPU; () where that is not known: then what counts is by how
            much steps are measured to be longer.

    Raises:
        FeatureError: there are layers, and no GPU that they leave something of; or something is of another type, or
            numbers of a layer are negative, infinite or NaN.
    """

    graph: FeatureGraph
    gpu: Device | None = None
    layers: tuple[Layer, ...] = ()

    def __post_init__(self) -> None:
        _check("HybridFeatures", self.graph, self.gpu, self.layers)
        if self.layers and self.gpu is None:
            raise FeatureError("HybridFeatures: layers leave something of a GPU; give gpu=, such as operations.H200")
        if self.layers:
            Problem((), tuple(self.layers), 0.0)  # which looks at their numbers


@dataclass(frozen=True)
class HybridDecision:
    """Where a graph is cut.

    Attributes:
        cut: the graph in two parts; a loader's `features`.
        exposed_s: by which a training step is longer, by the cost model.
        whole_exposed_s: the same with the whole graph on the GPU.
        reason: why it is cut there.
    """

    cut: CutGraph
    exposed_s: float
    whole_exposed_s: float
    reason: str


def decide(
    graph: FeatureGraph, batches: Batches, device: Device, layers: Sequence[Layer], allowed_s: float = 0.0
) -> HybridDecision:
    """Cut a graph so that what the GPU computes makes a training step no longer than is allowed.

    Features go to data workers whole, those that cost the GPU most first, so that few of them move. Of the last one as
    many operators stay as fit: data workers have those that come first.

    Args:
        graph: the graph.
        batches: what it is computed for.
        device: the trainer's GPU.
        layers: of the model, with what each leaves of the GPU.
        allowed_s: by which a training step may become longer.

    Raises:
        FeatureError: a number is negative, infinite or NaN, something is of another type, or there is no layer.
    """
    _check("decide", graph, device, layers)
    if device is None or not isinstance(batches, Batches):
        raise FeatureError(f"decide: {batches!r} on {device!r}: give Batches(rows=...) and a Device")
    if not layers:
        raise FeatureError("there is no layer: nothing is known of what the GPU leaves")
    check_number("allowed_s", allowed_s)
    costs = CutCosts(graph, batches, device, layers)
    whole_exposed_s = exposed_s = costs.exposed_s(costs.kept(0))
    moved, count = 0, len(costs.order)
    if exposed_s > allowed_s:
        # Between these lies how many have to move, at least.
        first, moved, exposed_s = 1, count, 0.0
        while first < moved:
            middle = (first + moved) // 2
            kept = costs.kept(middle)
            if costs.least_exposed_s(kept) <= allowed_s and (less_s := costs.exposed_s(kept)) <= allowed_s:
                moved, exposed_s = middle, less_s
            else:
                first = middle + 1
    reason = _reason(moved, count, exposed_s, whole_exposed_s, allowed_s)
    return HybridDecision(costs.cut(costs.kept(moved)), exposed_s, whole_exposed_s, reason)


def _check(who: str, graph: object, gpu: object, layers: object) -> None:
    """Raise FeatureError where something is of another type; a layer's own numbers are the `Problem`'s to check."""
    check_graph(who, graph)
    if gpu is not None and not isinstance(gpu, Device):
        raise FeatureError(f"{who}: the GPU is {gpu!r}; give a Device, such as operations.H200")
    if layers is not None and not isinstance(layers, Sequence):
        raise FeatureError(f"{who}: layers={layers!r}: give a tuple of Layer")


def _reason(moved: int, count: int, exposed_s: float, whole_exposed_s: float, allowed_s: float) -> str:
    allowed = f"{allowed_s * 1e6:.3g} us are allowed"
    if not moved:
        return f"all {count} operators fit beside training: it is {exposed_s * 1e6:.3g} us longer, and {allowed}"
    whole = f"with the whole graph on the GPU a step is {whole_exposed_s * 1e6:.3g} us longer, and {allowed}"
    if moved == count:
        return f"{whole}: no operator fits, data workers have all {count}"
    return f"{whole}: data workers have {moved} of {count} operators, and it is {exposed_s * 1e6:.3g} us longer"


# Decides anew, while a program trains, where its feature graph is cut: (what was seen, now) -> Recut with its reason.
# Pure; the clock is an argument.
#
# A step takes the longest of what goes on at the same time: the training loop with its own part of the graph, the data
# workers, the wire. What each part takes is measured at the cut in force; for other cuts it grows with the operators as
# `CutCosts` says. Without data workers everything is done one after the other.
#
# A change has batches made again, so it must pay: it is predicted to make steps shorter by `LEAST_GAIN`, and to regain
# within `HORIZON_S` what is thrown away. If steps are longer after it, it is taken back, and tried again ever later.
#
# Called by `loader/features.py`, in a thread: with many operators it takes seconds.

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
        """Return how often a batch comes, at the best."""
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
        """Return the same for another graph, whose cut is this one's until it is decided anew."""
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
