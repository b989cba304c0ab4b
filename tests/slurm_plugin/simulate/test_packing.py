"""Opportunistic jobs in the simulator: worked-out speeds, what guaranteed jobs feel, and laws for every list."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.base.errors import OptionsError
from hetstream.slurm_plugin.packing.decide import decide
from hetstream.slurm_plugin.packing.state import PackingRules
from hetstream.slurm_plugin.policy.policies import POLICIES
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.metrics import measure
from hetstream.slurm_plugin.simulate.scenario import Discipline, FailureOptions, Request, Scenario
from hetstream.slurm_plugin.simulate.sharing import PackingOptions, Sharing
from hetstream.slurm_plugin.simulate.usage_log import Outcome
from hetstream.slurm_plugin.simulate.workload import Workload, parse
from tests.slurm_plugin.simulate.loads import AT_ONCE, NO_CYCLES, jobs

# (opportunistic, share of a GPU that it keeps busy alone, memory on it)
Kind = tuple[bool, float, float]
RULES = PackingRules(settle_s=0, first_delay_s=60.0)
FREE = PackingOptions(interval_s=1.0, guaranteed_cost=0.0, overhead=0.0, least_left=0.0, rules=RULES)


def shared(load: Workload, *kinds: Kind) -> Workload:
    columns = [np.array(column) for column in zip(*kinds, strict=True)]
    return replace(load, sharing=Sharing(columns[0].astype(bool), columns[1].astype(float), columns[2].astype(float)))


def run(
    load: Workload,
    cluster: str,
    packing: PackingOptions | None = FREE,
    policy: str = "",
    discipline: Discipline = Discipline.FIFO,
    failures: FailureOptions | None = None,
) -> Outcome:
    scenario = Scenario(
        "test", Request.ELASTIC if policy else Request.TUNED, discipline, POLICIES[policy] if policy else None,
        queue=NO_CYCLES, workers=AT_ONCE, failures=failures or FailureOptions(), packing=packing,
    )  # fmt: skip
    return simulate(load, parse(cluster), scenario)


def ends(outcome: Outcome) -> list[float]:
    return [round(float(end), 6) for end in outcome.end_s]


def test_the_packers_own_decision_is_asked() -> None:
    assert PackingOptions().decide is decide


def test_a_job_has_what_the_guaranteed_one_leaves() -> None:
    load = shared(jobs((0, 100, 1), (0, 100, 1)), (False, 0.6, 0), (True, 1.0, 0))
    found = run(load, "gpus=1,cpus=4", replace(FREE, guaranteed_cost=0.01, overhead=0.05))
    # It is placed at 1 s. Until 100.99 s it has 0.4, less 5 % of that, and then all.
    assert found.start_s.tolist() == [0, 1]
    assert ends(found)[0] == pytest.approx(1 + 99 * 1.01)
    assert ends(found)[1] == pytest.approx(1 + 99 * 1.01 + 100 - 99 * 1.01 * 0.4 * 0.95)
    assert found.felt is not None
    assert found.felt.held_up_s.tolist() == pytest.approx([0.99, 0.0])


def test_a_trainer_that_waits_for_data_leaves_more() -> None:
    """Its data workers have 3 of the 6 CPUs that it could use."""
    load = shared(
        jobs((0, 100, 1), (0, 20, 1), ideal_cpus=[7, 1], trainer_cpus=[1, 1]), (False, 1.0, 0), (True, 1.0, 0)
    )
    found = run(load, "gpus=1,cpus=5", policy="fair")
    assert ends(found)[1] == pytest.approx(1 + 20 / 0.5)
    without = run(load, "gpus=1,cpus=5", None, policy="fair")
    assert ends(without)[1] > 150


def test_several_divide_what_is_left_and_a_gang_is_as_fast_as_on_its_slowest_gpu() -> None:
    load = shared(jobs((0, 100, 1), (0, 30, 2)), (False, 0.5, 0), (True, 1.0, 0))
    found = run(load, "gpus=2,cpus=8")
    assert ends(found)[1] == pytest.approx(1 + 30 / 0.5)
    load = shared(jobs((0, 100, 1), (0, 10, 1), (0, 10, 1)), (False, 0.5, 0), (True, 0.5, 0), (True, 0.5, 0))
    first, second = ends(run(load, "gpus=1,cpus=8", replace(FREE, rules=PackingRules(settle_s=0, most_used=1.01))))[1:]
    assert first == pytest.approx(1 + 1 + 9 / 0.5)  # alone for a second, then one of two
    assert second == pytest.approx(20 + 1)


def test_a_busy_gpu_takes_nobody() -> None:
    load = shared(jobs((0, 100, 1), (0, 10, 1)), (False, 0.8, 0), (True, 0.1, 0))
    assert run(load, "gpus=1,cpus=4").start_s.tolist() == [0, 101]


def test_gpus_that_are_kept_for_a_gang_are_used_meanwhile() -> None:
    load = shared(jobs((0, 100, 1), (1, 50, 2), (2, 30, 1)), (False, 0.9, 0), (False, 0.9, 0), (True, 0.9, 0))
    found = run(load, "gpus=2,cpus=8")
    assert found.start_s.tolist() == [0, 100, 3]
    assert ends(found)[2] == 33


def test_without_the_memory_a_job_is_paused_and_goes_on_elsewhere_with_its_progress() -> None:
    load = shared(jobs((0, 400, 1), (10, 1000, 1)), (True, 0.5, 20), (False, 0.1, 20))
    found = run(load, "gpus=1,cpus=4", replace(FREE, gpu_memory_gib=32.0))
    assert found.felt is not None
    assert found.felt.evictions.tolist() == [1, 0]
    # It ran from 1 to 10, and from the end of the other on.
    assert ends(found)[0] == pytest.approx(1011 + 400 - 9, abs=1)
    # With a second GPU it is taken away after 5 minutes, and begins on the other one a minute later.
    two = run(load, "2*gpus=1,cpus=4", replace(FREE, gpu_memory_gib=32.0))
    assert ends(two)[0] == pytest.approx(10 + 300 + 60 + 400 - 9, abs=2)


def test_a_job_that_lacks_cpus_takes_them_from_the_newest_opportunistic_ones() -> None:
    load = shared(
        jobs((0, 50, 1), (0, 50, 1), (10, 20, 1), ideal_cpus=[1, 1, 3], trainer_cpus=[1, 1, 3]),
        (True, 0.1, 0), (True, 0.1, 0), (False, 0.1, 0),
    )  # fmt: skip
    found = run(load, "gpus=2,cpus=4")
    assert found.start_s[2] == 10
    assert found.felt is not None
    assert found.felt.evictions.tolist() == [0, 1, 0]
    assert found.lost_s.tolist() == [0, 0, 0]


def test_preemption_drives_away_and_loses() -> None:
    load = shared(jobs((0, 50, 1), (10, 20, 1)), (True, 0.1, 0), (False, 0.1, 0))
    rules = PackingRules(settle_s=0, first_delay_s=0.0, most_used=0.05)
    found = run(load, "gpus=1,cpus=4", replace(FREE, takes_over=True, keeps_progress=False, rules=rules))
    assert found.start_s.tolist() == [1, 10]
    assert found.lost_s.tolist() == [9, 0]
    assert ends(found)[0] == pytest.approx(81, abs=1)


def test_a_node_that_fails_takes_its_opportunistic_jobs_along() -> None:
    load = shared(jobs((0, 5000, 1), (0, 5000, 1)), (False, 0.5, 0), (True, 0.4, 0))
    found = run(load, "gpus=1,cpus=4", failures=FailureOptions(3000.0, 60.0, 600.0))
    assert found.restarts.min() >= 1
    assert found.finished.all()


def test_what_no_gpus_suffice_for_is_left_out() -> None:
    load = shared(jobs((0, 10, 5), (0, 10, 4), (0, 10, 1)), (True, 1, 0), (True, 1, 0), (False, 1, 0))
    found = run(load, "2*gpus=2,cpus=4")
    assert list(found.rejected) == [0]
    assert found.finished.tolist() == [False, True, True]


def test_without_packing_classes_mean_nothing() -> None:
    load = jobs((0, 10, 1), (1, 10, 2), (2, 7, 1), (3, 20, 1))
    plain = run(load, "gpus=2,cpus=2", None)
    marked = run(shared(load, *[(True, 0.5, 0.0)] * 4), "gpus=2,cpus=2", None)
    assert plain.end_s.tolist() == marked.end_s.tolist()
    assert measure(plain).gpu_effective_shared is None


def test_the_figures_of_sharing() -> None:
    load = shared(jobs((0, 100, 1), (0, 30, 1)), (False, 0.5, 0), (True, 0.5, 0))
    found = measure(run(load, "gpus=1,cpus=4", replace(FREE, guaranteed_cost=0.01)))
    assert found.gpu_effective_shared == pytest.approx(30 / found.makespan_s)
    assert found.guaranteed_p99_held_up is not None
    assert 1.0 < found.guaranteed_p99_held_up <= 1.01
    assert (found.guaranteed_mean_jct_s, found.opportunistic_mean_jct_s) == pytest.approx((100.3, 31.0), abs=0.01)
    assert found.num_evictions == 0


@pytest.mark.parametrize(("name", "value"), [("overhead", -0.1), ("guaranteed_cost", 2.0), ("interval_s", 0.0)])
def test_numbers_that_mean_nothing_are_refused(name: str, value: float) -> None:
    with pytest.raises(OptionsError, match=name):
        PackingOptions(**{name: value})  # type: ignore[arg-type]


@st.composite
def lists(draw: st.DrawFn) -> Workload:
    size = draw(st.integers(2, 10))
    number = st.integers(0, 120)
    rows = [(float(draw(number)), float(draw(st.integers(1, 200))), draw(st.integers(1, 4))) for _ in range(size)]
    cpus = [float(draw(st.integers(1, 2))) for _ in rows]
    kinds: Sequence[Kind] = [
        (draw(st.booleans()), draw(st.sampled_from([0.1, 0.5, 1.0])), draw(st.sampled_from([0.0, 10.0, 25.0])))
        for _ in rows
    ]
    return shared(jobs(*rows, ideal_cpus=cpus, trainer_cpus=cpus), *kinds)


@pytest.mark.parametrize("memory_gib", [math.inf, 32.0])
@settings(deadline=None, max_examples=25)
@given(load=lists(), discipline=st.sampled_from(list(Discipline)))
def test_guaranteed_jobs_start_and_end_as_if_the_others_were_not_there(
    memory_gib: float, load: Workload, discipline: Discipline
) -> None:
    assert load.sharing is not None
    own = ~load.sharing.is_opportunistic
    found = run(load, "2*gpus=2,cpus=6", replace(FREE, gpu_memory_gib=memory_gib), discipline=discipline)
    assert found.finished.all() or found.rejected
    if own.any():
        alone = run(load.only(own), "2*gpus=2,cpus=6", None, discipline=discipline)
        assert found.end_s[own] == pytest.approx(alone.end_s, nan_ok=True)


@pytest.mark.parametrize(
    ("works_s", "units", "cpus"),
    [
        ((1, 45, 88, 4, 1, 22, 40, 46), (1, 2, 4, 1, 4, 3, 4, 3), (2, 2, 2, 2, 1, 1, 2, 2)),
        ((1, 135, 88, 4, 1, 6, 20, 61), (1, 2, 4, 1, 4, 1, 4, 4), (2, 2, 2, 2, 2, 2, 2, 2)),
    ],
)
def test_nothing_is_reserved_behind_opportunistic_jobs(
    works_s: tuple[int, ...], units: tuple[int, ...], cpus: tuple[int, ...]
) -> None:
    """They leave at once, so EASY plans as if they were not there: else a guaranteed job starts at another time."""
    rows = [
        (float(row > 1), float(work_s), count) for row, (work_s, count) in enumerate(zip(works_s, units, strict=True))
    ]
    each = [float(count) for count in cpus]
    use, memory_gib = (0.5, 0.5, 1.0, 0.1, 0.1, 0.1, 1.0, 0.1), (25.0, 25.0, 25.0, 10.0, 10.0, 0.0, 25.0, 10.0)
    kinds = [(row < 2, *of_gpu) for row, of_gpu in enumerate(zip(use, memory_gib, strict=True))]
    load = shared(jobs(*rows, ideal_cpus=each, trainer_cpus=each), *kinds)
    packing = replace(FREE, gpu_memory_gib=32.0)
    found = run(load, "2*gpus=2,cpus=6", packing, discipline=Discipline.EASY)
    alone = run(load.only(np.arange(8) > 1), "2*gpus=2,cpus=6", None, discipline=Discipline.EASY)
    assert found.end_s[2:] == pytest.approx(alone.end_s)


@settings(deadline=None, max_examples=25)
@given(load=lists(), cost=st.sampled_from([0.0, 0.01]))
def test_a_gpu_does_no_more_than_there_is_of_it(load: Workload, cost: float) -> None:
    assert load.sharing is not None
    whole = replace(load, sharing=replace(load.sharing, gpu_use=np.ones(len(load))))
    packing = replace(FREE, guaranteed_cost=cost, rules=PackingRules(settle_s=0, most_used=1.01))
    found = run(whole, "2*gpus=2,cpus=6", packing)
    assert found.use.effective_gpus.max(initial=0) <= 4 + 1e-9
    assert (found.use.shared_gpus <= found.use.effective_gpus + 1e-9).all()
    assert found.use.gpus.max(initial=0) <= 4
    again = run(whole, "2*gpus=2,cpus=6", packing)
    assert found.end_s.tobytes() == again.end_s.tobytes()
