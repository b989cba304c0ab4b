"""Where to cut: which of the operators that may move do move. Pure; called by `partition.py`, also when rates change.

The largest cut is not always the fastest one. A step takes as long as the slowest of three: the trainer, the data
workers, and the wire between them. What a set of moved operators costs each of them is a sum, so the cheapest set for
given prices of a second of each is a minimum cut: an operator that moves takes with it whatever leads to it, and a
value that is needed on the other side is sent once. `choose_cut` tries a range of prices and takes the set with the
fastest step.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from hetstream.mpi_dataworkers.partitioner.program import ForwardGraph, Kind

# The cheapest way to part a graph in two (Dinic's method). Pure and exact.

INFINITE = float("inf")
# Capacities are seconds. Less than this is the rounding of sums.
_NOTHING = 1e-15


class FlowNetwork:
    """Nodes and what may flow between them; nodes are whatever can be a key."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._edges_of: list[list[int]] = []
        self._head: list[int] = []
        self._left: list[float] = []  # an edge and its reverse stand side by side

    def _number(self, node: Hashable) -> int:
        if node not in self._numbers:
            self._numbers[node] = len(self._edges_of)
            self._edges_of.append([])
        return self._numbers[node]

    def add(self, tail: Hashable, head: Hashable, capacity: float) -> None:
        """Add an edge; none is made for a capacity of 0."""
        if capacity < 0:
            raise ValueError(f"an edge's capacity must be at least 0, it is {capacity}")
        if capacity == 0:
            return
        first, second = self._number(tail), self._number(head)
        for start, end, amount in ((first, second, capacity), (second, first, 0.0)):
            self._edges_of[start].append(len(self._head))
            self._head.append(end)
            self._left.append(amount)

    def source_side(self, source: Hashable, sink: Hashable) -> set[Hashable]:
        """Return the nodes on the source's side of the smallest minimum cut."""
        start, end = self._number(source), self._number(sink)
        while (levels := self._levels(start))[end] >= 0:
            places = [0] * len(self._edges_of)
            while self._push(start, end, levels, places):
                pass
        return {node for node, number in self._numbers.items() if levels[number] >= 0}

    def _levels(self, start: int) -> list[int]:
        levels = [-1] * len(self._edges_of)
        levels[start] = 0
        waiting = deque([start])
        while waiting:
            node = waiting.popleft()
            for edge in self._edges_of[node]:
                head = self._head[edge]
                if self._left[edge] > _NOTHING and levels[head] < 0:
                    levels[head] = levels[node] + 1
                    waiting.append(head)
        return levels

    def _push(self, start: int, end: int, levels: list[int], places: list[int]) -> bool:
        """Push along one path, without recursion: a forward is thousands of operators deep."""
        path: list[int] = []
        node = start
        while node != end:
            edges = self._edges_of[node]
            while places[node] < len(edges):
                edge = edges[places[node]]
                if self._left[edge] > _NOTHING and levels[self._head[edge]] == levels[node] + 1:
                    break
                places[node] += 1
            else:
                if not path:
                    return False
                edge = path.pop()
                node = self._head[edge ^ 1]
                places[node] += 1
                continue
            path.append(edge)
            node = self._head[edge]
        amount = min(self._left[edge] for edge in path)
        for edge in path:
            self._left[edge] -= amount
            self._left[edge ^ 1] += amount
        return True


# What a cut gains where it runs: blocks of steps with it and blocks without, in turn. Pure; called by `partition.py`.
#
# An operator's own time says what a cut should gain. What it costs the trainer to take the values in, to hand them over
# and to ask the guards, no operator says. So both are measured by the trainer's own clock. In a block without the cut
# data workers compute nothing of it and the model has its own forward, as if there had never been a cut.

# A cut must make a step at least this much faster.
LEAST_GAIN = 0.02
# The first steps of a block are not counted: they pay for the change, and have batches from before.
_NOT_COUNTED, _COUNTED = 4, 10
# A round is a block without the cut and one with it. What is not clear after these counts as no gain.
_MOST_ROUNDS = 2


@dataclass(frozen=True)
class CutAssessment:
    """Whether a cut pays.

    Attributes:
        pays: it does.
        with_cut_s, without_s: the trainer's own time for a step.
        is_clear: it is more, or less, than by how much blocks of the same kind differ.
        reason: in words, for the user.
    """

    pays: bool
    with_cut_s: float
    without_s: float
    is_clear: bool
    reason: str


def judged(with_cut_s: list[float], without_s: list[float]) -> CutAssessment:
    """Return whether a cut pays, from a step's time in each block.

    Args:
        with_cut_s: in the blocks with the cut, at least one.
        without_s: in those without, at least one.
    """
    sides = with_cut_s, without_s
    with_s, own_s = (statistics.median(side) for side in sides)
    noise_s = statistics.median(abs(value - statistics.median(side)) for side in sides for value in side)
    over_s = own_s - with_s - LEAST_GAIN * own_s
    is_clear = abs(over_s) >= noise_s
    reason = f"with the cut a step takes {1e3 * with_s:.2f} ms, without {1e3 * own_s:.2f} ms"
    if not is_clear:
        reason += f", and steps of the same kind differ by {1e3 * noise_s:.2f} ms"
    return CutAssessment(is_clear and over_s >= 0, with_s, own_s, is_clear, reason)


class CutTrial:
    """Steps that are measured with the cut and without it, in turn.

    Attributes:
        uses_cut: whether the steps that begin now are to be ones with the cut.
        verdict: of the trial; None as long as it goes on.
    """

    def __init__(self) -> None:
        self.uses_cut = True
        self.verdict: CutAssessment | None = None
        self._blocks: dict[bool, list[float]] = {True: [], False: []}
        self._block: list[float] = []
        self._before: tuple[float, float] | None = None
        self._num_steps = 0  # of the block

    def next_step(self, now_s: float, wait_s: float) -> None:
        """A step begins.

        Args:
            now_s: the time.
            wait_s: how long the trainer has waited for data in all, which is no part of a step's own time.
        """
        if self._before is not None and self._num_steps >= _NOT_COUNTED:
            self._block.append(now_s - self._before[0] - (wait_s - self._before[1]))
        self._before = now_s, wait_s
        self._num_steps += 1
        if len(self._block) < _COUNTED:
            return
        self._blocks[self.uses_cut].append(statistics.median(self._block))
        if self.uses_cut and (rounds := len(self._blocks[False])):
            verdict = judged(self._blocks[True], self._blocks[False])
            if verdict.is_clear or rounds == _MOST_ROUNDS:
                self.verdict = verdict
                return
        self.uses_cut = not self.uses_cut
        self._block, self._num_steps = [], 0


# Prices of a second of the data workers and of the wire, in seconds of the trainer.
_DATA_PRICES = (0.0, 0.1, 0.25, 0.5, 0.8, 1.2, 2.0, 5.0)
_WIRE_PRICES = (0.0, 0.1, 0.3, 0.7, 1.5, 4.0)
# Cuts that are tried beside the best one that prices find; a forward of 1,000 operators takes 2 ms for each.
_MOST_TRIALS = 400


@dataclass(frozen=True)
class OperatorCost:
    """What an operator takes for one batch.

    Attributes:
        trainer_s: on the trainer's critical path.
        data_worker_s: in a data worker.
        value_bytes: its value's size, which is sent where the other side needs it.
    """

    trainer_s: float = 0.0
    data_worker_s: float = 0.0
    value_bytes: int = 0


@dataclass(frozen=True)
class Rates:
    """What the decision depends on beside the operators.

    Attributes:
        step_s: the trainer's time for a step with nothing moved, without waiting for data.
        batch_s: a data worker's time for a batch with nothing moved.
        num_data_workers: processes that make batches.
        wire_bytes_per_s: what comes to the trainer at most.
        receive_bytes_per_s: what the trainer takes in, on its critical path.
        batch_bytes: size of a batch with nothing moved.
    """

    step_s: float
    batch_s: float
    num_data_workers: int
    wire_bytes_per_s: float = 1e9
    receive_bytes_per_s: float = 1e10
    batch_bytes: int = 0


@dataclass(frozen=True)
class Step:
    """What one training step takes of each of the three.

    Attributes:
        trainer_s, data_workers_s, wire_s: seconds.
    """

    trainer_s: float
    data_workers_s: float
    wire_s: float

    @property
    def total_s(self) -> float:
        """They work at the same time: the slowest of them is the step's time."""
        return max(self.trainer_s, self.data_workers_s, self.wire_s)


@dataclass(frozen=True)
class CutDecision:
    """Which operators move.

    Attributes:
        moved: their names; whatever leads to one of them is moved or an input.
        sent: names of the values that are sent, in the graph's order.
        before, after: what a step takes with nothing moved, and with this cut.
        bytes_added: to a batch.
        reason: why, for the user.
    """

    moved: frozenset[str]
    sent: tuple[str, ...]
    before: Step
    after: Step
    bytes_added: int
    reason: str


class Cutter:
    """The problem of one forward: decides for any rates.

    Args:
        graph: the forward.
        movable: names of what may move, inputs included.
        costs: what each of them takes; nothing where one is missing.
    """

    def __init__(self, graph: ForwardGraph, movable: frozenset[str], costs: Mapping[str, OperatorCost]) -> None:
        self._graph = graph
        self._costs = costs
        self._by_name = graph.by_name()
        self._candidates = [
            operator for operator in graph.operators if operator.kind is Kind.OPERATOR and operator.name in movable
        ]
        self._users: dict[str, list[str]] = {operator.name: [] for operator in graph.operators}
        for operator in graph.operators:
            for name in dict.fromkeys(operator.inputs):
                self._users[name].append(operator.name)
        self._returned = frozenset(graph.outputs)

    def decide(self, rates: Rates) -> CutDecision:
        """Return the cut with the fastest step, and nothing where none is faster by 2 %."""
        nothing = self._decision(frozenset(), rates, "")
        if not self._candidates:
            return self._decision(frozenset(), rates, "no operator of the forward may move")
        if rates.num_data_workers == 0:
            return self._decision(frozenset(), rates, "there are no data workers")
        found = {self._cheapest(data, wire, rates) for data in _DATA_PRICES for wire in _WIRE_PRICES}
        decisions = [self._decision(moved, rates, "") for moved in found if moved]
        best = self._improved(min(decisions, key=_rank, default=nothing), rates)
        gain = 1 - best.after.total_s / nothing.after.total_s if nothing.after.total_s else 0.0
        if gain < LEAST_GAIN:
            text = f"no cut makes a step of {1e3 * nothing.after.total_s:.2f} ms faster by {LEAST_GAIN:.0%}"
            return self._decision(frozenset(), rates, f"{text}: {_limit(nothing.after)}")
        text = (
            f"a step takes {1e3 * nothing.after.total_s:.2f} ms with nothing moved and "
            f"{1e3 * best.after.total_s:.2f} ms with {len(best.moved)} operators moved; now {_limit(best.after)}"
        )
        return self._decision(best.moved, rates, text)

    def _improved(self, best: CutDecision, rates: Rates) -> CutDecision:
        """Move one operator more or less, as long as that makes a step faster: prices do not find every cut."""
        tried: set[frozenset[str]] = set()
        while len(tried) < _MOST_TRIALS:
            near = [moved for moved in self._near(best.moved) if moved not in tried][: _MOST_TRIALS - len(tried)]
            if not near:
                break
            tried.update(near)
            better = min((self._decision(moved, rates, "") for moved in near), key=_rank)
            if better.after.total_s >= best.after.total_s:
                break
            best = better
        return best

    def _near(self, moved: frozenset[str]) -> list[frozenset[str]]:
        """Cuts that differ by one operator, with those whose values cannot be sent apart from it."""
        found: dict[frozenset[str], None] = {}
        for operator in self._candidates:
            name = operator.name
            changed = moved - self._after(name) if name in moved else moved | self._before(name)
            if all(not self._by_name[member].several or changed.issuperset(self._users[member]) for member in changed):
                found[changed] = None
        return list(found)

    def _after(self, name: str) -> set[str]:
        """An operator and all that it leads to."""
        found, waiting = {name}, [name]
        while waiting:
            new = set(self._users[waiting.pop()]) - found
            found |= new
            waiting += new
        return found

    def _before(self, name: str) -> set[str]:
        """An operator and all operators that lead to it."""
        found, waiting = {name}, [name]
        while waiting:
            inputs = self._by_name[waiting.pop()].inputs
            new = {needed for needed in inputs if self._by_name[needed].kind is Kind.OPERATOR} - found
            found |= new
            waiting += new
        return found

    def largest(self, rates: Rates) -> CutDecision:
        """Everything that may move and works on the batch, whatever it costs: the same cut in every run."""
        of_batch = {operator.name for operator in self._graph.operators if operator.kind is Kind.LEAF}
        for operator in self._graph.operators:
            if of_batch.intersection(operator.inputs):
                of_batch.add(operator.name)
        moved: set[str] = set()
        for operator in reversed(self._candidates):  # with what leads to it, constants too
            if operator.name in of_batch or any(user in moved for user in self._users[operator.name]):
                moved.add(operator.name)
        several = [operator.name for operator in self._candidates if operator.several]
        while cannot := [name for name in several if self._is_sent(name, frozenset(moved))]:
            for name in cannot:
                moved -= self._after(name)
        reason = "everything that may move was asked for" if moved else "no operator of the forward may move"
        return self._decision(frozenset(moved), rates, reason)

    def nothing(self, rates: Rates, reason: str) -> CutDecision:
        """Return the cut that moves nothing."""
        return self._decision(frozenset(), rates, reason)

    def _cost(self, name: str) -> OperatorCost:
        return self._costs.get(name, OperatorCost())

    def _cheapest(self, data_price: float, wire_price: float, rates: Rates) -> frozenset[str]:
        """The minimum cut for these prices of a second."""
        network = FlowNetwork()
        moving, staying = ("moving", ""), ("staying", "")
        movable = {operator.name for operator in self._candidates}
        per_byte = wire_price / rates.wire_bytes_per_s + 1 / rates.receive_bytes_per_s
        for operator in self._candidates:
            name, cost = operator.name, self._cost(operator.name)
            network.add(moving, name, cost.trainer_s)
            network.add(name, staying, data_price * cost.data_worker_s / rates.num_data_workers)
            for needed in operator.inputs:
                if needed in movable:
                    network.add(name, needed, INFINITE)
            self._add_value(network, name, movable, per_byte)
        side = network.source_side(moving, staying)
        return frozenset(movable & {name for name in side if isinstance(name, str)})

    def _add_value(self, network: FlowNetwork, name: str, movable: set[str], per_byte: float) -> None:
        """A value is sent once, when one of its users stays."""
        # Several values are not sent, each of them is: whoever takes one of them moves along.
        price = INFINITE if self._by_name[name].several else per_byte * self._cost(name).value_bytes
        users = self._users[name]
        sent = ("sent", name)
        if name in self._returned or any(user not in movable for user in users):
            network.add(name, ("staying", ""), price)
        elif users:
            network.add(name, sent, price)
            for user in users:
                network.add(sent, user, INFINITE)

    def _decision(self, moved: frozenset[str], rates: Rates, reason: str) -> CutDecision:
        sent = tuple(operator.name for operator in self._graph.operators if self._is_sent(operator.name, moved))
        added = sum(self._cost(name).value_bytes for name in sent)
        trainer_s = rates.step_s - sum(self._cost(name).trainer_s for name in moved)
        data_s = rates.batch_s + sum(self._cost(name).data_worker_s for name in moved)
        workers = max(1, rates.num_data_workers)
        before = Step(rates.step_s, rates.batch_s / workers, rates.batch_bytes / rates.wire_bytes_per_s)
        after = Step(
            max(0.0, trainer_s) + added / rates.receive_bytes_per_s,
            data_s / workers,
            (rates.batch_bytes + added) / rates.wire_bytes_per_s,
        )
        return CutDecision(moved, sent, before, after, added, reason)

    def _is_sent(self, name: str, moved: frozenset[str]) -> bool:
        if name not in moved:
            return False
        return name in self._returned or any(user not in moved for user in self._users[name])


def _rank(decision: CutDecision) -> tuple[float, int, int]:
    """The fastest step first; of equal ones, the one with fewer bytes and operators."""
    return decision.after.total_s, decision.bytes_added, len(decision.moved)


def _limit(step: Step) -> str:
    if step.trainer_s >= max(step.data_workers_s, step.wire_s):
        return "the trainer is the slowest"
    return "the data workers are the slowest" if step.data_workers_s >= step.wire_s else "the wire is the slowest"
