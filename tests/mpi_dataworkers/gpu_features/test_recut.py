"""Where a graph is cut while a program trains: decisions on what was seen, in a world of which the truth is known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
import torch
from random_features import as_bytes, random_batch, random_graph

from benchmarks.rap_plans import PLANS, make_plan
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.cut import CutGraph, DataWorkersPart, TrainersPart
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features import hybrid
from hetstream.mpi_dataworkers.gpu_features.capacity import HostClock
from hetstream.mpi_dataworkers.gpu_features.hybrid import (
    CutCosts,
    HybridFeatures,
    Recut,
    Recutter,
    Seen,
    carried_over,
    trainers,
)
from hetstream.mpi_dataworkers.gpu_features.operations import A100, Batches
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer
from hetstream.mpi_dataworkers.loader.features import PartTimes

PLAN = make_plan(PLANS[0])
COUNT = len(PLAN.steps)
ROWS = 4096
EVERY_S = 6.0  # of the looks: longer than a change takes to settle


@dataclass
class World:
    """A program that trains. Its truth differs from the model: both sides take other factors of it, and noise.

    Attributes:
        step_s: of the training loop alone.
        loading_s: of a data worker, besides its part.
        slower: how many times a modelled second each side takes: data workers, trainer.
    """

    recutter: Recutter
    step_s: float = 0.002
    loading_s: float = 0.001
    slower: tuple[float, float] = (1.5, 1.0)
    num_data_workers: int = 4
    bytes_per_s: float | None = None
    batches: Batches = field(default_factory=lambda: Batches(ROWS))
    noise: float = 0.01
    now: float = 0.0
    draw: random.Random = field(default_factory=lambda: random.Random(0))

    def whole_s(self, cut: CutGraph) -> float:
        return self._seen(cut).whole_s

    def _seen(self, cut: CutGraph) -> Seen:
        features = self.recutter.features
        cost = CutCosts(features.graph, self.batches, features.gpu, features.layers).of(trainers(cut))
        data_worker_s, trainer_s = self.slower[0] * cost.data_worker_s, self.slower[1] * cost.trainer_s
        own_s = self.step_s + trainer_s + cost.exposed_s
        made_s = (self.loading_s + data_worker_s) / max(1, self.num_data_workers)
        if self.bytes_per_s is not None:
            made_s = max(made_s, cost.handed_bytes / self.bytes_per_s)
        wait_s = max(0.0, made_s - own_s) if self.num_data_workers else made_s
        return Seen(
            self.step_s + cost.exposed_s,
            wait_s,
            trainer_s,
            data_worker_s,
            self.num_data_workers,
            self.bytes_per_s,
            8,
            self.batches,
        )

    def look(self) -> Recut:
        """One look, with its noise."""
        seen = self._seen(self.recutter.cut)
        noisy = {
            name: getattr(seen, name) * self.draw.uniform(1 - self.noise, 1 + self.noise)
            for name in ("step_s", "wait_s", "trainer_s", "data_worker_s")
        }
        self.now += EVERY_S
        return self.recutter.decide(replace(seen, **noisy), self.now)

    def run(self, num: int = 40) -> list[Recut]:
        """So many looks; the changes among them."""
        return [found for found in (self.look() for _ in range(num)) if found.cut is not None]


def kept(recutter: Recutter) -> int:
    return len(trainers(recutter.cut))


def test_a_trainer_that_starves_takes_operators_and_one_that_is_fed_gives_them_back() -> None:
    world = World(Recutter(HybridFeatures(PLAN)), num_data_workers=1)
    [*changes] = world.run()
    assert 1 <= len(changes) <= 3
    assert 0 < kept(world.recutter) < COUNT
    assert "by the cost model, with 1 data worker" in changes[0].reason
    best = min(world.whole_s(cut_of(world, moved)) for moved in range(COUNT + 1))
    assert world.whole_s(world.recutter.cut) < best * 1.1
    world.num_data_workers = 8
    [*changes] = world.run()
    assert 1 <= len(changes) <= 3
    assert kept(world.recutter) < 0.1 * COUNT
    assert "with 8 data workers" in changes[0].reason


def cut_of(world: World, moved: int) -> CutGraph:
    costs = CutCosts(world.recutter.features.graph, world.batches)
    return costs.cut(costs.kept(moved))


def test_when_all_data_workers_are_gone_the_gpu_has_the_graph_and_when_they_come_they_take_what_it_exposes() -> None:
    whole = CutCosts(PLAN, Batches(ROWS), A100).of(frozenset())
    tight = (Layer("layer", 1e-2, 1e-5, 1e-5),)
    features = HybridFeatures(PLAN, A100, tight)
    world = World(Recutter(features), slower=(1.0, 0.05), num_data_workers=0)
    assert len(world.run(2)) == 1
    assert kept(world.recutter) == COUNT
    exposed = world.look()
    assert exposed.share > hybrid.LEAST_GAIN / 10, "what data workers could take is told"
    world.num_data_workers, world.step_s = 6, 0.002
    world.run()
    assert kept(world.recutter) < COUNT
    assert whole.exposed_s == 0


@pytest.mark.shows("what exceeds the GPU's leftover goes to data workers, and is decided anew while it runs")
@pytest.mark.parametrize("seed", range(6))
def test_decisions_settle_near_the_best_cut_and_do_not_swing(seed: int) -> None:
    draw = random.Random(seed)
    world = World(
        Recutter(HybridFeatures(PLAN)),
        step_s=draw.uniform(0.001, 0.03),
        loading_s=draw.uniform(0, 0.02),
        slower=(draw.uniform(0.3, 3), draw.uniform(0.3, 3)),
        num_data_workers=draw.choice((0, 1, 2, 4)),
        bytes_per_s=draw.choice((None, 1e9, 1e10)),
        noise=0.02,
        draw=draw,
    )
    changes = world.run(60)
    assert len(changes) <= 4, [change.reason for change in changes]
    best = min(world.whole_s(cut_of(world, moved)) for moved in range(COUNT + 1))
    assert world.whole_s(world.recutter.cut) <= best * 1.12


def test_a_change_that_makes_steps_longer_is_taken_back_and_tried_ever_later() -> None:
    world = World(Recutter(HybridFeatures(PLAN)), num_data_workers=1)
    world.run(2)
    assert kept(world.recutter) > 0
    world.step_s *= 5  # as if what it took from the trainer were far more than was measured
    [back] = world.run(2)
    assert kept(world.recutter) == 0
    assert "as before, a step took" in back.reason
    world.step_s /= 5
    looks = [world.look() for _ in range(int(hybrid.RETRY_S / EVERY_S) - 1)]
    assert all(look.cut is None for look in looks)
    assert any("did not pay, the next try is in" in look.reason for look in looks)
    assert world.run(10)


def test_nothing_changes_for_a_gain_that_is_too_small_or_that_batches_made_again_would_eat() -> None:
    recutter = Recutter(HybridFeatures(PLAN))
    cost = CutCosts(PLAN, Batches(ROWS)).of(frozenset())
    seen = Seen(0.01, 0.0, 0.0, cost.data_worker_s, 4, None, 8, Batches(ROWS))
    assert recutter.decide(seen, 0.0).reason == f"data workers have {COUNT} of {COUNT} operators: " + (
        "no other cut is predicted to be faster"
    )
    starving = replace(seen, wait_s=0.02, num_data_workers=1)
    few = recutter.decide(replace(starving, batches_ahead=10**6), 1.0)
    assert few.cut is None
    assert "but 1000000 batches would be made again" in few.reason
    assert "if the next look says so, too" in recutter.decide(starving, 2.0).reason
    assert recutter.decide(seen, 3.0).cut is None, "it did not"
    assert recutter.decide(starving, 4.0).cut is None
    assert recutter.decide(starving, 5.0).cut is not None
    assert "the cut is new, measuring for 5 s" in recutter.decide(starving, 6.0).reason


def test_longer_lists_are_other_costs() -> None:
    graph = FeatureGraph.of(
        {f"ids{at}": jagged(f"ids{at}") >> ops.Ngram(3) >> ops.SigridHash(1, 1000) for at in range(12)}
    )
    world = World(Recutter(HybridFeatures(graph)), batches=Batches(ROWS, 2.0), loading_s=0.0, num_data_workers=4)
    assert not world.run(5)
    world.batches = Batches(ROWS, 40.0)
    assert world.run()
    assert 0 < kept(world.recutter) < len(graph.steps)


def test_another_graph_is_cut_where_the_one_before_is_until_it_is_decided() -> None:
    world = World(Recutter(HybridFeatures(PLAN)), num_data_workers=1)
    world.run()
    before = trainers(world.recutter.cut)
    gone, new = sorted(before)[0], FeatureGraph.of({"new": dense("new") >> ops.Clamp(0.0, 1.0)})
    steps = tuple(step for step in PLAN.steps if step.name != gone and step.of != gone)
    left = {step.name for step in steps} | {node.name for node in PLAN.inputs}
    outputs = tuple(output for output in PLAN.outputs if left.issuperset(output.of))
    graph = FeatureGraph((*PLAN.inputs, *new.inputs), (*steps, *new.steps), (*outputs, *new.outputs))
    made = world.recutter.with_graph(graph)
    assert trainers(made.cut) == {step.name for step in steps} & before
    assert "new.Clamp" not in trainers(made.cut), "what is new is the data workers'"
    world.recutter = made
    world.num_data_workers = 8
    assert world.run()


def test_cuts_that_are_carried_over_make_the_bytes_of_the_whole() -> None:
    for seed in range(20):
        draw = random.Random(seed)
        (graph, _), (other, chains) = random_graph(draw), random_graph(draw)
        cut = CutGraph(graph, tuple(step.name for step in graph.steps if draw.random() < 0.3))
        made, batch = carried_over(cut, other), random_batch(chains, 5, draw)
        found = TrainersPart(made)(DataWorkersPart(made)(batch))
        assert as_bytes(found) == as_bytes(FeatureTransform(other)(batch)), f"seed {seed}"
        assert carried_over(cut, graph) == CutGraph(graph, cut.first) or trainers(carried_over(cut, graph)) == trainers(
            cut
        )


def test_what_cannot_be_followed_is_refused() -> None:
    with pytest.raises(FeatureError, match="layers leave something of a GPU; give gpu="):
        HybridFeatures(PLAN, layers=(Layer("all", 1.0, 1.0, 1.0),))
    with pytest.raises(FeatureError, match="graph is a Tensor; give a FeatureGraph"):
        HybridFeatures(torch.ones(1))  # type: ignore[arg-type]


class Behind:
    """The clock of a device that is some marks behind the host; a part takes it as many seconds as it is told."""

    def __init__(self) -> None:
        self.marks, self.num_over = 0, 0

    def mark(self) -> int:
        self.marks += 1
        return self.marks - 1

    def is_over(self, mark: int) -> bool:
        return mark < self.num_over

    def seconds(self, first: int, second: int) -> float:
        assert self.is_over(second), "the host would have waited"
        return float(second - first) * 100 + first


def test_a_devices_time_is_that_of_the_last_part_that_it_has_finished_and_nobody_waits() -> None:
    """A GPU is launched in no time: the host's time alone would say that its part costs nothing."""
    clock = Behind()
    times = PartTimes(clock)
    for _ in range(3):
        with times:
            pass
        assert times.most_s == times.host_s < 50
    clock.num_over = 4
    with times:
        pass
    assert times.device_s == times.most_s == 102
    clock.num_over = 0
    for _ in range(100):
        with times:
            pass
    assert times.device_s == 102, "what is long on its way is given up"
    own = PartTimes(HostClock())
    with own:
        pass
    assert 0 < own.device_s <= own.host_s < 10
