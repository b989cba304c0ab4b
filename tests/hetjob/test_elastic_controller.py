"""The elastic controller's decisions, alone and in a model of a job with an arbitrary load."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.hetjob.elastic.controller import (
    MEASURE_S,
    STARVING_SHARE,
    Controller,
    Stage,
    demand_per_s,
    needed,
    slowest,
)
from hetstream.hetjob.elastic.snapshot import Action, Companion, CompanionState, Decision, Limits, Snapshot
from hetstream.hetjob.elastic.tuning import LocalLoading, SizeSearch, growth_paid, remote_pays, trainer_cpus_needed

PENDING, STARTING, WORKING, DRAINING = CompanionState
HOLD, GROW, DRAIN, CANCEL = Action


@dataclass
class Job:
    """A model of a training job: seconds a step takes the trainer, a data worker's CPU, and local loading.

    Attributes:
        most_per_s: what all data workers together can make, as of a slow disk.
        shared_s: of a step, however many data workers there are, as of a link that all share.
        receive_s: what taking a batch of a data worker in costs the trainer, as over a slow network.
        room: companions that the cluster has room for; others wait in the queue.
    """

    step_s: Callable[[float], float] = lambda _: 0.01
    make_s: float = 0.1
    local_s: float = 0.1
    most_per_s: float = math.inf
    shared_s: float = 0.0
    scale: float = 1.0
    room: int = 1000
    fixed: int = 0
    start_s: float = 3.0
    receive_s: float = 0.0
    companions: list[Companion] = field(default_factory=list)
    number: int = 0

    def cpus_speed(self, cpus: int) -> float:
        return float(cpus**self.scale)

    def snapshot(self, now: float, site_limit: int | None = None) -> Snapshot:
        working = [one for one in self.companions if one.state is WORKING]
        step_s = self.step_s(now)
        power = self.fixed + sum(self.cpus_speed(one.cpus) for one in working)
        most = min(1 / (self.shared_s + self.make_s / power), self.most_per_s) if power else 0.0
        taken = min(1 / (step_s + self.receive_s), most) if power else 1 / (step_s + self.local_s)
        unit = most / power if power else 0.0
        return Snapshot(
            reading=True,
            steps_per_s=taken,
            wait_share=max(0.0, 1 - taken * step_s),
            companions=tuple(
                replace(one, rate_per_s=unit * self.cpus_speed(one.cpus) if one.state is WORKING else 0.0)
                for one in self.companions
            ),
            fixed=self.fixed,
            fixed_rate_per_s=self.fixed * unit,
            site_limit=site_limit,
        )

    def carry_out(self, decision: Decision, now: float) -> None:
        for _ in range(decision.count if decision.action is GROW else 0):
            self.number += 1
            self.companions.append(Companion(str(self.number), decision.cpus, PENDING, now))
        for one in [one for one in self.companions if one.job_id in decision.jobs]:
            self.companions.remove(one)
            if decision.action is DRAIN:
                self.companions.append(replace(one, state=DRAINING, since=now))

    def pass_time(self, now: float) -> None:
        after = []
        for one in self.companions:
            running = sum(other.state is not PENDING for other in after)
            if one.state is DRAINING and now - one.since > 1:
                continue
            if one.state is PENDING and running < self.room:
                one = replace(one, state=STARTING, since=now)
            elif one.state is STARTING and now - one.since >= self.start_s:
                one = replace(one, state=WORKING, since=now)
            after.append(one)
        self.companions = after


@dataclass
class History:
    """What a run showed: (time, decision) of each change, and data workers over time."""

    changes: list[tuple[float, Decision]]
    counts: list[int]
    controller: Controller
    job: Job

    @property
    def working(self) -> int:
        return self.job.fixed + sum(one.state is WORKING for one in self.job.companions)


def run(
    job: Job, limits: Limits, for_s: float, site_limit: Callable[[float], int | None] = lambda _: None,
    killed_at: float = math.inf, forgets: bool = False,
) -> History:  # fmt: skip
    controller, changes, counts, now = Controller(limits), [], [], 0.0
    while now < for_s:
        if now == killed_at:
            controller = Controller(limits, None if forgets else controller.memory())
        job.pass_time(now)
        snapshot = job.snapshot(now, site_limit(now))
        decision = controller.decide(snapshot, now)
        assert decision.reason
        if decision.is_change:
            changes.append((now, decision))
            assert decision.count > 0
            assert decision.action is GROW or len(decision.jobs) == decision.count
        job.carry_out(decision, now)
        counts.append(job.snapshot(now).num_data_workers)
        now += 1.0
    return History(changes, counts, controller, job)


def test_a_starving_job_measures_grows_once_and_is_fed() -> None:
    history = run(Job(), Limits(0, 16), 200)
    assert [(decision.action, decision.count) for _, decision in history.changes] == [(GROW, 1), (GROW, 7), (GROW, 3)]
    assert history.changes[0][1].reason == "the trainer waits 91% of the time with local loading, at 9.1 steps/s"
    assert history.job.snapshot(200).wait_share <= STARVING_SHARE
    assert history.controller.stage is Stage.COUNT


def test_a_job_that_local_loading_feeds_gets_no_data_workers() -> None:
    history = run(Job(local_s=0.0001), Limits(0, 16), 100)
    assert history.changes == []
    assert history.controller.stage is Stage.LOCAL


def test_data_workers_that_do_not_pay_go_and_are_not_tried_again_soon() -> None:
    history = run(Job(most_per_s=9.2), Limits(0, 16), 500)
    assert history.working == 0
    assert history.controller.stage is Stage.LOCAL
    assert [decision.action for _, decision in history.changes] == [GROW, GROW, DRAIN, DRAIN]
    assert "as many as with local loading" in history.changes[-1][1].reason


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
def test_a_controller_that_was_killed_still_knows_what_local_loading_costs() -> None:
    def gains_nothing() -> Job:
        return Job(receive_s=0.1, make_s=0.02)

    for killed_at in (10.0, 20.0, 40.0, 60.0):
        history = run(gains_nothing(), Limits(0, 16), 200, killed_at=killed_at)
        assert (history.working, history.controller.stage) == (0, Stage.LOCAL)
        assert len(history.changes) == 2, "it is not tried again before its time"
    # What happens without: companions that it finds keep it from measuring local loading.
    assert run(gains_nothing(), Limits(0, 16), 200, killed_at=20.0, forgets=True).working == 1
    assert len(run(gains_nothing(), Limits(0, 16), 200, killed_at=60.0, forgets=True).changes) == 4


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
def test_a_controller_that_was_killed_goes_on_with_the_size_that_it_had_found() -> None:
    for killed_at in range(5, 60, 5):
        history = run(Job(), Limits(0, 8, 1, 4), 200, killed_at=float(killed_at))
        assert history.controller.cpus == 4
    assert run(Job(), Limits(0, 8, 1, 4), 200, killed_at=60.0, forgets=True).controller.cpus == 1


def test_a_controller_that_begins_long_after_the_host_did_counts_idleness_from_its_first_look() -> None:
    """Loaders and data workers take a moment to register again after a job master was killed."""
    found = Companion("7", 1, STARTING, 50_000.0)
    controller = Controller(Limits(0, 4))
    for second in range(300):
        decision = controller.decide(Snapshot(False, 0.0, 0.0, (found,)), 50_000.0 + second)
        assert not decision.is_change, decision.reason
    idle = controller.decide(Snapshot(False, 0.0, 0.0, (found,)), 50_301.0)
    assert idle.reason == "no loader has read for 300 s"


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
def test_what_the_trainer_uses_is_its_peak_of_the_last_minute() -> None:
    controller, companion = Controller(Limits(0, 4)), Companion("7", 1, WORKING, 0.0, 10)
    uses = {range(0, 20): 7.9, range(20, 100): 1.1, range(100, 101): 2.3, range(101, 155): 0.5}
    needed_cpus = []
    for second in range(155):
        used = next(used for seconds, used in uses.items() if second in seconds)
        controller.decide(Snapshot(True, 9, 0.0, (companion,), trainer_cpus=used), second)
        needed_cpus.append(controller.trainer_cpus)
    assert (needed_cpus[15], needed_cpus[60], needed_cpus[99], needed_cpus[-1]) == (10, 10, 2, 3)


def test_a_trainer_that_is_held_up_elsewhere_gets_no_more_and_gives_back_what_does_not_pay() -> None:
    history = run(Job(receive_s=0.1), Limits(0, 16), 200)
    assert max(history.counts) <= 8
    assert history.working == 0
    history = run(Job(receive_s=0.03), Limits(0, 16), 200)
    assert history.working > 0


def test_a_load_that_alternates_slowly_is_not_taken_for_data_workers_that_do_not_pay() -> None:
    job = Job(lambda now: 0.025 if now % 16 < 8 else 0.2)
    history = run(job, Limits(0, 8, cooldown_s=5.0), 300)
    assert history.working == 5
    assert "drain" not in [decision.action.value for _, decision in history.changes]


def test_more_data_workers_that_make_nothing_faster_go_again() -> None:
    history = run(Job(most_per_s=25, local_s=0.3), Limits(0, 16), 100)
    grown, back = history.changes[1][1], history.changes[2][1]
    assert (grown.action, grown.count) == (GROW, 7)
    assert back.action is GROW or back.action is DRAIN
    assert history.working <= 8


def test_a_job_with_component_1_needs_no_baseline_and_keeps_it() -> None:
    history = run(Job(fixed=2, step_s=lambda _: 0.2), Limits(2, 8), 100)
    assert history.changes == []
    history = run(Job(fixed=2), Limits(2, 8), 60)
    assert history.changes[0][0] <= MEASURE_S + 1
    assert history.working == 8


def test_load_that_goes_gives_the_cpus_back() -> None:
    history = run(Job(step_s=lambda now: 0.02 if now < 100 else 0.05), Limits(0, 16), 300)
    assert history.counts[95] == 6
    assert history.working == 3
    assert history.changes[-1][1].action is DRAIN
    assert history.changes[-1][1].reason == "the trainer waits 0% of the time, 3 data workers are enough"


@pytest.mark.shows("what comes and goes is companions, which can be cancelled while they are pending")
def test_companions_that_wait_in_the_queue_are_not_added_to_and_are_taken_back() -> None:
    history = run(Job(room=2, step_s=lambda now: 0.02 if now < 150 else 0.2), Limits(0, 16), 120)
    assert len(history.changes) == 2
    history = run(Job(room=2, step_s=lambda now: 0.02 if now < 150 else 0.2), Limits(0, 16), 300)
    assert CANCEL in [decision.action for _, decision in history.changes]
    assert history.working == 1


def test_the_site_limit_holds_at_once() -> None:
    history = run(Job(), Limits(0, 16), 200, lambda now: 4 if now < 100 else 2 if now < 150 else 0)
    assert max(history.counts[:100]) == 4
    assert max(history.counts[115:150]) == 2
    assert history.counts[-1] == 0
    assert history.changes[-1][1].reason == "at most 0 data workers are allowed"


def test_what_a_job_would_have_without_the_site_is_known() -> None:
    history = run(Job(), Limits(0, 16), 100, lambda _: 2)
    snapshot = history.job.snapshot(100, 2)
    assert history.working == 2
    assert history.controller.wanted(snapshot, 100) == 11
    assert Controller(Limits(0, 4)).wanted(snapshot, 0) == 1
    assert Controller(Limits(0, 4)).wanted(Snapshot(True, 9, 0.0), 0) == 0


def test_size_search_goes_on_while_the_speed_grows_with_the_cpus() -> None:
    assert run(Job(scale=1.0), Limits(0, 8, 1, 4), 200).controller.cpus == 4
    assert run(Job(scale=0.5), Limits(0, 8, 1, 4), 200).controller.cpus == 1
    search = SizeSearch(1, 6)
    assert search.measured(10) == "10.0 steps/s with 1 CPU: next 2 are tried"
    assert search.measured(18) == "18.0 steps/s with 2 CPUs, 1.8 times as many as with 1: next 4 are tried"
    assert search.measured(25) == "25.0 steps/s with 4 CPUs, 1.4 times as many as with 2: 2 it is"
    assert search.best == 2
    with pytest.raises(ValueError, match="is over"):
        search.measured(1)


def test_refused_submissions_are_tried_again_later_and_later() -> None:
    controller, job = Controller(Limits(0, 4)), Job()
    attempts = []
    for second in range(200):
        decision = controller.decide(job.snapshot(second), second)
        if decision.is_change:
            attempts.append(second)
            controller.refused(second)
    delays = [later - earlier for earlier, later in pairwise(attempts)]
    assert delays[1:4] == [20, 40, 80]
    controller.accepted()
    assert controller.refused(200.0) == 10


def test_what_does_not_leave_is_cancelled() -> None:
    controller = Controller(Limits(0, 4))
    stuck = Companion("7", 1, DRAINING, 0.0)
    assert controller.decide(Snapshot(True, 1, 0.0, (stuck,)), 59).action is HOLD
    decision = controller.decide(Snapshot(True, 1, 0.0, (stuck,)), 61)
    assert (decision.action, decision.jobs) == (CANCEL, ("7",))


def test_without_a_reading_loader_nothing_changes_for_minutes() -> None:
    controller = Controller(Limits(0, 4))
    snapshot = Snapshot(False, 0, 0.0, (Companion("7", 1, WORKING, 0.0),))
    assert controller.decide(snapshot, 0).reason == "no loader reads"
    assert controller.decide(snapshot, 299).action is HOLD
    assert controller.decide(snapshot, 301).jobs == ("7",)


def test_rates_become_needs() -> None:
    one = Companion("1", 1, WORKING, 0.0, rate_per_s=10)
    snapshot = Snapshot(True, 10, 0.8, (one,))
    assert demand_per_s(snapshot) == pytest.approx(50)
    assert needed(snapshot, 1, 1.0) == 5
    assert needed(snapshot, 2, 1.1) == 3
    assert needed(Snapshot(True, 10, 0.8), 1, 1.0) is None
    assert slowest([one, Companion("2", 1, WORKING, 5.0, 3), Companion("3", 1, WORKING, 1.0, 10)], 2)[0].job_id == "2"
    assert not growth_paid(10, 10.5, 1, 8)
    assert growth_paid(10, 30, 1, 8)
    assert not remote_pays(10, 10.4)
    assert trainer_cpus_needed(1.7) == 3
    assert LocalLoading.seen(0, 1) is None


def test_limits_that_contradict_each_other_are_refused() -> None:
    for bad in ((3, 2), (-1, 2), (0, 2, 0, 1), (0, 2, 4, 2), (0, 2, 1, 1, 0.0)):
        with pytest.raises(ValueError, match=r"must|<="):
            Limits(*bad)  # type: ignore[arg-type]


loads = st.lists(st.tuples(st.integers(3, 60), st.sampled_from([0.005, 0.01, 0.03, 0.1, 0.4])), min_size=1, max_size=6)


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@settings(max_examples=60, deadline=None)
@given(
    load=loads,
    make_s=st.floats(0.01, 0.4),
    local_s=st.floats(0.001, 0.4),
    most_per_s=st.sampled_from([5.0, 30.0, math.inf]),
    room=st.integers(0, 20),
    fixed=st.integers(0, 3),
    more=st.integers(0, 12),
    cpus=st.sampled_from([(1, 1), (1, 4), (2, 2)]),
    cooldown_s=st.sampled_from([1.0, 5.0, 10.0, 30.0]),
    site=st.none() | st.integers(0, 10),
    killed_at=st.sampled_from([math.inf, 7.0, 33.0, 120.0]),
)
def test_any_load_stays_within_the_limits_and_changes_once_a_cooldown(
    load: list[tuple[int, float]], make_s: float, local_s: float, most_per_s: float, room: int, fixed: int, more: int,
    cpus: tuple[int, int], cooldown_s: float, site: int | None, killed_at: float,
) -> None:  # fmt: skip
    period = sum(duration for duration, _ in load)

    def step_s(now: float) -> float:
        at = now % period
        for duration, seconds in load:
            if at < duration:
                return seconds
            at -= duration
        return load[-1][1]

    maximum = max(1, fixed + more)
    job = Job(step_s, make_s, local_s, most_per_s, room=room, fixed=fixed)
    history = run(job, Limits(fixed, maximum, *cpus, cooldown_s), 400, lambda _: site, killed_at)
    assert max(history.counts) <= max(fixed, min(maximum, site if site is not None else maximum))
    assert min(history.counts) >= fixed
    times = [time for time, _ in history.changes]
    assert all(later - earlier >= cooldown_s for earlier, later in pairwise(times))


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@settings(max_examples=40, deadline=None)
@given(
    step_s=st.floats(0.005, 0.4), make_s=st.floats(0.01, 0.4), local_s=st.floats(0.001, 0.4),
    noise=st.floats(0, 0.1), room=st.integers(0, 20), cpus=st.sampled_from([(1, 1), (1, 4)]),
)  # fmt: skip
def test_a_steady_load_converges(
    step_s: float, make_s: float, local_s: float, noise: float, room: int, cpus: tuple[int, int]
) -> None:
    job = Job(lambda now: step_s * (1 + noise * math.sin(now)), make_s, local_s, room=room)
    history = run(job, Limits(0, 12, *cpus), 550)
    late = [decision for time, decision in history.changes if time > 350]
    assert late == []


@pytest.mark.shows("the elastic controller finds a job's number of data workers, one change a cooldown")
@settings(max_examples=60, deadline=None)
@given(half_s=st.integers(2, 12), slow_s=st.floats(0.05, 0.4), make_s=st.floats(0.02, 0.2))
def test_a_load_that_alternates_faster_than_it_calms_down_keeps_what_it_needs(
    half_s: int, slow_s: float, make_s: float
) -> None:
    job = Job(lambda now: 0.02 if now % (2 * half_s) < half_s else slow_s, make_s, local_s=make_s)
    history = run(job, Limits(0, 12), 600)
    assert [decision.action for time, decision in history.changes if time > 300] == []


def test_holes_that_end_are_no_sign_that_data_workers_do_not_pay() -> None:
    """Two of four companions run at a time, for 60 s; in between all wait for 30 s, and the trainer loads locally."""
    job = Job(step_s=lambda _: 0.02, room=2)
    controller, changes = Controller(Limits(0, 4)), []
    for now in range(1200):
        job.pass_time(float(now))
        if now % 90 == 60:  # their time is over: others take their places, as the job master does
            job.companions = [replace(one, state=PENDING, since=float(now)) for one in job.companions]
        job.room = 0 if now % 90 >= 60 else 2
        decision = controller.decide(job.snapshot(float(now)), float(now))
        if decision.is_change:
            changes.append(decision)
        job.carry_out(decision, float(now))
    assert [one.action for one in changes] == [GROW, GROW], [one.reason for one in changes]
    assert len(job.companions) == 4
