"""A loader that cuts its feature graph, and its job's elastic controller: what one does, the other sees."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import pytest

from benchmarks.rap_plans import PLANS, make_plan
from hetstream.hetjob.elastic.controller import Controller
from hetstream.hetjob.elastic.snapshot import Action, Companion, CompanionState, Limits, Snapshot
from hetstream.hetjob.elastic.step_terms import StepTerm, StepTerms
from hetstream.mpi_dataworkers.dispatcher.client import load_of
from hetstream.mpi_dataworkers.features.cut import CutGraph
from hetstream.mpi_dataworkers.gpu_features.hybrid import CutCosts, HybridFeatures, Recutter, Seen, trainers
from hetstream.mpi_dataworkers.gpu_features.operations import A100, Batches
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer
from hetstream.mpi_dataworkers.wire.messages import FeatureCut, LoaderStats, LoaderStatus, Status

PLAN = make_plan(PLANS[0])
BATCHES = Batches(1 << 15)
GPU = HybridFeatures(PLAN, replace(A100, bytes_per_s=3e10), (Layer("mlp", 5e-3, 1e-3, 1e-3),))
COUNT = len(PLAN.steps)


@dataclass
class Job:
    """A training job with a GPU, in seconds of the clock; it knows what everything really takes.

    Attributes:
        room: data workers that the cluster has room for.
    """

    room: int
    limits: Limits = field(default_factory=lambda: Limits(0, 16))
    step_s: float = 0.005
    loading_s: float = 0.001
    now: float = 0.0
    workers: int = 0
    pending: int = 0
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.recutter = Recutter(GPU, CutGraph(PLAN, tuple(step.name for step in PLAN.steps)))
        self.controller = Controller(self.limits)
        self.share = 0.0
        self.costs = CutCosts(PLAN, BATCHES, GPU.gpu, GPU.layers)

    def seen(self) -> Seen:
        cost = self.costs.of(trainers(self.recutter.cut))
        own_s = self.step_s + cost.exposed_s
        made_s = (self.loading_s + cost.data_worker_s) / max(1, self.workers)
        wait_s = max(0.0, made_s - own_s) if self.workers else made_s
        return Seen(own_s, wait_s, 1e-6, cost.data_worker_s, self.workers, None, 4, BATCHES)

    def second(self) -> None:
        self.now += 1.0
        seen = self.seen()
        if self.now % 2 == 0:
            decided = self.recutter.decide(seen, self.now)
            self.share = decided.share
            if decided.cut is not None:
                self.reasons.append(decided.reason)
        row = LoaderStatus(
            "job", 0, 0, 1, "h", 1, 0, 5, 90, 1, 8, 1, 1 / seen.whole_s, 1e3, seen.wait_s / seen.whole_s, LoaderStats(),
            features=FeatureCut(COUNT, self.kept, self.share, self.reasons[-1] if self.reasons else ""),
        )  # fmt: skip
        load = load_of("cpu", Status(1, 9.0, [], [row], 0, 0, 1, 0, 1.0))
        rate = 1 / (self.loading_s + seen.data_worker_s)
        working = [Companion(str(at), 1, CompanionState.WORKING, 0.0, rate) for at in range(self.workers)]
        waiting = [Companion(f"p{at}", 1, CompanionState.PENDING, self.now) for at in range(self.pending)]
        snapshot = Snapshot(
            load.reading,
            load.steps_per_s,
            load.wait_share,
            (*working, *waiting),
            features_share=load.features_share,
            features_on_trainer=load.features_on_trainer,
        )
        decision = self.controller.decide(snapshot, self.now)
        if decision.action is Action.GROW:
            self.pending += decision.count
            self.reasons.append(decision.reason)
        elif decision.action is Action.DRAIN:
            self.workers -= decision.count
        elif decision.action is Action.CANCEL:
            self.pending -= decision.count
        started = min(self.pending, self.room - self.workers)
        self.pending, self.workers = self.pending - started, self.workers + started

    @property
    def kept(self) -> int:
        return len(trainers(self.recutter.cut))

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.second()


@pytest.mark.shows("a feature graph is cut anew while it is read, and no byte changes")
@pytest.mark.shows("what exceeds the GPU's leftover goes to data workers, and is decided anew while it runs")
def test_data_workers_come_for_what_the_gpu_exposes_and_the_cut_moves_to_them_and_back_when_they_are_gone() -> None:
    job = Job(room=16)
    exposed_s = job.seen().step_s - job.step_s
    assert exposed_s > 0.1 * job.step_s
    job.run(300)
    assert job.workers > 0
    assert job.kept < COUNT
    assert any("for features that it computes itself" in reason for reason in job.reasons), job.reasons
    with_workers = job.seen()
    assert with_workers.step_s - job.step_s < 0.1 * exposed_s, "the GPU has what fits"
    assert with_workers.wait_s < 0.1 * with_workers.whole_s
    job.room = job.workers = job.pending = 0
    job.run(60)
    assert job.kept == COUNT, "nobody else is there"
    assert "without data workers" in job.reasons[-1] or any("without data workers" in each for each in job.reasons[-3:])


def test_where_no_cpu_is_to_be_had_the_gpu_keeps_the_graph() -> None:
    for job in (Job(room=0), Job(room=16, limits=Limits(0, 0))):
        job.run(200)
        assert job.kept == COUNT
        assert job.workers == 0


def test_a_share_that_makes_no_sense_counts_as_nothing() -> None:
    for share in (math.nan, -1.0, 7.0, math.inf):
        row = LoaderStatus(
            "job", 0, 0, 1, "h", 1, 0, 5, 90, 1, 8, 1, 9.0, 1e3, 0.25, LoaderStats(), 0.1,
            features=FeatureCut(9, 9, share, "so"),
        )  # fmt: skip
        load = load_of("cpu", Status(1, 9.0, [], [row], 0, 0, 1, 0, 1.0))
        assert (load.wait_share, load.features_share) == (0.25, 0.0)


def test_the_parts_of_a_step_say_what_the_trainer_computes_of_its_graph() -> None:
    terms, unknown = StepTerms(), StepTerm("T_data", None, None, "it was not seen")
    for number in range(9):
        row = LoaderStatus(
            "job", 0, 0, 1, "h", 1, 0, 5, 90, 0, 8, 1, 4.0, 1e3, 0.5, LoaderStats(), 0.03 + 0.001 * (-1) ** number,
            features=FeatureCut(9, 4, 0.2, "data workers have 5 of 9 operators:\x1b no other cut"),
        )  # fmt: skip
        terms.note([row], unknown, 6.0 * number)
    [term] = [term for term in terms.told if term.name == "T_features"]
    assert term.seconds == pytest.approx(0.012, rel=0.02)  # a fifth of 60 ms from one step to the next
    assert term.reason == r"data workers have 5 of 9 operators:\x1b no other cut"
