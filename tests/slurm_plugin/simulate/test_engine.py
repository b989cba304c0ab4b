"""The simulator against schedules that are worked out by hand, and against laws that hold for every schedule."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.base.errors import OptionsError
from hetstream.slurm_plugin.errors import SimulationFault
from hetstream.slurm_plugin.policy.policies import POLICIES, under_all_rules
from hetstream.slurm_plugin.policy.table import Allocation, JobTable, Policy, Pool, allocation
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.running import Cause
from hetstream.slurm_plugin.simulate.scenario import (
    CapOptions,
    Discipline,
    FailureOptions,
    QueueOptions,
    Request,
    Scenario,
    WorkerOptions,
)
from hetstream.slurm_plugin.simulate.usage_log import Outcome
from hetstream.slurm_plugin.simulate.workload import Cluster, Workload, build, curves_of, parse
from tests.slurm_plugin.simulate.loads import AT_ONCE, NO_CYCLES, jobs, workloads

SRTF, FAIR, MAXTP = POLICIES["srtf"], POLICIES["fair"], POLICIES["maxtp"]
ALL = [name for name in POLICIES if name in ("fair", "maxtp", "srtf", "dlrover", "share")]


def run(
    workload: Workload,
    cluster: str | Cluster,
    discipline: Discipline = Discipline.FIFO,
    policy: Policy | None = None,
    request: Request = Request.TUNED,
    workers: WorkerOptions = AT_ONCE,
    queue: QueueOptions = NO_CYCLES,
    failures: FailureOptions | None = None,
    seed: int = 0,
) -> Outcome:
    """One run, without the latencies of Slurm and of data workers unless they are asked for."""
    scenario = Scenario(
        "test", Request.ELASTIC if policy else request, discipline, policy, queue, workers,
        failures or FailureOptions(), seed,
    )  # fmt: skip
    return simulate(workload, parse(cluster) if isinstance(cluster, str) else cluster, scenario)


# A gang of 2 GPUs that waits for a job of 10 s, with a short and a long job of 1 GPU behind it.
QUEUE = jobs((0, 10, 1), (1, 10, 2), (2, 7, 1), (3, 20, 1))


@pytest.mark.shows("the simulator has queues, gangs, costs of start, failures, memory and network")
@pytest.mark.parametrize(
    ("discipline", "starts"),
    [
        # The gang blocks both; then it runs from 10 to 20.
        (Discipline.FIFO, [0, 10, 20, 20]),
        # The short one ends at 9, before the gang can start; the long one would delay it.
        (Discipline.EASY, [0, 10, 2, 20]),
        # The long one starts when the short one has ended, and the gang when the long one has.
        (Discipline.GREEDY, [0, 29, 2, 9]),
    ],
)
def test_each_discipline_starts_jobs_as_worked_out_by_hand(discipline: Discipline, starts: list[float]) -> None:
    found = run(QUEUE, "gpus=2,cpus=2", discipline)
    assert found.start_s.tolist() == starts
    assert found.end_s.tolist() == [start + work for start, work in zip(starts, QUEUE.work_s.tolist(), strict=True)]


def test_wrong_time_limits_let_easy_delay_the_first_job() -> None:
    load = jobs((0, 10, 1), (1, 10, 2), (3, 8.5, 1))
    assert run(load, "gpus=2,cpus=2", Discipline.EASY).start_s.tolist() == [0, 10, 20]
    # With limits three times too long the first job is planned to end at 30, and the last one at 28.5, which fits.
    wrong = run(load, "gpus=2,cpus=2", Discipline.EASY, queue=replace(NO_CYCLES, limit_factor=3.0))
    assert wrong.start_s.tolist() == [0, 11.5, 3]


def test_time_limits_that_are_known_are_what_easy_plans_with() -> None:
    # The first job may run to 30, so the last one, which may run to 23, seems to be in nobody's way.
    load = jobs((0, 10, 1), (1, 10, 2), (3, 8.5, 1), limit_s=[30, 30, 20])
    assert run(load, "gpus=2,cpus=2", Discipline.EASY).start_s.tolist() == [0, 11.5, 3]
    strict = jobs((0, 10, 1), (1, 10, 2), (3, 8.5, 1), limit_s=[10, 10, 20])
    assert run(strict, "gpus=2,cpus=2", Discipline.EASY).start_s.tolist() == [0, 10, 20]


def test_backfill_looks_at_the_queue_in_its_cycles_alone() -> None:
    load = jobs((0, 10, 1), (1, 10, 2), (2, 4, 1))
    found = run(load, "gpus=2,cpus=2", Discipline.EASY, queue=QueueOptions(interval_s=5.0))
    assert found.start_s.tolist() == [0, 10, 5]
    assert found.waited_s[2].tolist()[Cause.CYCLE] == 3


def test_the_scheduler_sees_a_submission_when_it_does() -> None:
    outcome = run(QUEUE, "1*gpus=2,cpus=64", queue=QueueOptions(interval_s=0.0, submit_s=0.5))
    assert outcome.start_s.tolist() == [0.5, 10.5, 20.5, 20.5], "who waits for others loses nothing by it"
    waited_s = outcome.start_s - QUEUE.submit_s
    assert outcome.waited_s.sum(axis=1) == pytest.approx(waited_s), "and it is time that they waited"


@pytest.mark.parametrize("discipline", list(Discipline))
def test_what_a_job_held_is_free_for_others_when_slurm_has_cleaned_up(discipline: Discipline) -> None:
    outcome = run(QUEUE, "1*gpus=2,cpus=64", discipline, queue=QueueOptions(interval_s=0.0, free_s=0.5))
    # As above, and half a second more for each end that somebody waits for.
    starts = {
        Discipline.FIFO: [0, 10.5, 21, 21], Discipline.EASY: [0, 10.5, 2, 21], Discipline.GREEDY: [0, 30, 2, 9.5]
    }  # fmt: skip
    assert outcome.start_s.tolist() == starts[discipline]
    assert outcome.finished.all()


def test_a_node_that_fails_is_no_matter_of_those_that_have_ended_there() -> None:
    load = jobs((0, 1, 1), (0, 100, 1))
    failures = FailureOptions(node_mtbf_s=40.0, repair_s=3.0, checkpoint_s=5.0)
    for seed in range(5):
        outcome = run(
            load, "2*gpus=1,cpus=4", queue=QueueOptions(interval_s=0.0, free_s=60.0), failures=failures, seed=seed
        )
        assert outcome.finished.all()


def test_a_heterogeneous_job_starts_from_backfill_alone() -> None:
    load = replace(jobs((1, 10, 1), (1, 10, 1)), is_het=np.array([True, False]))
    found = run(load, "gpus=2,cpus=2", Discipline.EASY, queue=QueueOptions(interval_s=30.0))
    assert (found.start_s + 1 - load.submit_s).tolist() == [1, 1], "the clock of a workload begins at its first job"
    late = replace(jobs((0, 1, 1), (7, 10, 1), (7, 10, 1)), is_het=np.array([False, True, False]))
    found = run(late, "gpus=2,cpus=2", Discipline.EASY, queue=QueueOptions(interval_s=30.0))
    assert found.start_s.tolist() == [0, 30, 7]
    assert found.waited_s[1, Cause.CYCLE] == 23


@pytest.mark.shows("the simulator tells waits by cause, slowdown, use and cost; table, JSON and CSV agree")
def test_waiting_is_told_apart_by_cause() -> None:
    # The first takes all CPUs and half of the GPUs; the second waits for CPUs, the third behind it.
    load = jobs((0, 10, 1), (0, 10, 1), (0, 10, 1), ideal_cpus=[8, 4, 4])
    found = run(load, "gpus=2,cpus=8")
    assert found.waited_s[1].tolist() == [0, 10, 0, 0, 0, 0]
    assert found.waited_s[2].tolist() == [0, 0, 0, 10, 0, 0]
    memory = run(jobs((0, 10, 1), (0, 10, 1), memory_gib=[6, 6]), "gpus=2,cpus=8,memory_gib=10")
    assert memory.waited_s[1, Cause.MEMORY] == 10
    reserved = run(QUEUE, "gpus=2,cpus=2", Discipline.EASY)
    # Up to 9 the short one has the other GPU; then it is kept for the gang, which has both from 10 to 20.
    assert reserved.waited_s[3].tolist() == [6 + 10, 0, 0, 0, 1, 0]


def test_a_gang_prefers_one_node_the_one_with_least_room() -> None:
    load = jobs((0, 10, 6), (1, 10, 2), (2, 10, 2), (3, 10, 6))
    found = run(load, "2*gpus=8,cpus=8")
    assert found.start_s.tolist() == [0, 1, 2, 3], "2 go beside 6, and 6 fit on the other node with 2"
    assert found.node_of[0] == found.node_of[1] != found.node_of[2] == found.node_of[3]


@pytest.mark.shows("the simulator has queues, gangs, costs of start, failures, memory and network")
def test_a_gang_holds_all_its_gpus_or_none() -> None:
    found = run(jobs((0, 10, 3), (0, 10, 12), (0, 10, 12)), "2*gpus=8,cpus=8", Discipline.GREEDY)
    assert found.start_s.tolist() == [0, 0, 10] or found.start_s.tolist() == [0, 10, 20]
    assert found.use.gpus.max() <= 16


@pytest.mark.parametrize(
    ("request_kind", "ends"),
    [(Request.TUNED, [100, 200]), (Request.HARDWARE, [400, 400]), (Request.FIXED, [100, 200])],
)
def test_fixed_requests_follow_the_speed_law(request_kind: Request, ends: list[float]) -> None:
    # Each wants 16 CPUs for its GPU, 4 of them for its trainer; the machine has 16 CPUs for 4 GPUs.
    load = jobs((0, 100, 1), (0, 100, 1), ideal_cpus=[16, 16], trainer_cpus=[4, 4])
    assert run(load, "gpus=4,cpus=16", request=request_kind).end_s.tolist() == ends


def test_fixed_data_workers_may_be_on_other_nodes_and_cost_their_overhead() -> None:
    load = jobs((0, 100, 1), ideal_cpus=[16], trainer_cpus=[4], overhead=[0.2])
    assert run(load, "2*gpus=4,cpus=8", request=Request.TUNED).rejected.keys() == {0}
    assert run(load, "2*gpus=4,cpus=8", request=Request.FIXED).end_s.tolist() == [125]


def test_water_filling_is_exact_for_equal_jobs() -> None:
    # Two jobs want 12 CPUs of data workers each, and there are 12: each runs at half its speed, and both end at 200.
    load = jobs((0, 100, 1), (0, 100, 1), ideal_cpus=[14, 14], trainer_cpus=[2, 2])
    found = run(load, "gpus=2,cpus=16", policy=FAIR)
    assert found.end_s.tolist() == pytest.approx([200, 200], rel=1e-12)


def test_srtf_and_maxtp_take_turns_as_their_closed_forms_say() -> None:
    # SRTF serves the job with less CPU work first: 50 x 12 before 100 x 12; then the other, alone.
    load = jobs((0, 100, 1), (0, 50, 1), ideal_cpus=[14, 14], trainer_cpus=[2, 2])
    assert run(load, "gpus=2,cpus=16", policy=SRTF).end_s.tolist() == pytest.approx([150, 50])
    # MaxTP serves the one that needs fewer CPUs for its GPU, whatever is left of it: 6 of 12, the other has the rest.
    load = jobs((0, 100, 1), (0, 50, 1), ideal_cpus=[8, 14], trainer_cpus=[2, 2])
    assert run(load, "gpus=2,cpus=16", policy=MAXTP).end_s.tolist() == pytest.approx([100, 100])


@pytest.mark.shows("the simulator has queues, gangs, costs of start, failures, memory and network")
def test_data_workers_start_after_their_time_and_cpus_that_are_taken_back_are_late() -> None:
    workers = WorkerOptions(round_s=0.0, start_s=20.0, take_back_s=5.0)
    load = jobs((0, 100, 1), ideal_cpus=[14], trainer_cpus=[2])
    assert run(load, "gpus=2,cpus=16", policy=SRTF, workers=workers).end_s.tolist() == [120]
    load = jobs((0, 100, 1), (60, 10, 1), ideal_cpus=[14, 14], trainer_cpus=[2, 2])
    found = run(load, "gpus=2,cpus=16", policy=SRTF, workers=workers)
    # Until 60 the first has done 40; then its data workers leave and 25 s later the second has them, to 95. The first
    # one's start again then, and from 115 on it does the 60 that are left.
    assert found.end_s.tolist() == [175, 95]
    assert found.cpus_taken_back == 12


def test_a_decision_that_is_taken_back_before_its_data_workers_started_costs_nothing() -> None:
    workers = WorkerOptions(round_s=0.0, start_s=20.0, take_back_s=0.0)
    load = jobs((0, 100, 1), (10, 10, 1), ideal_cpus=[14, 14], trainer_cpus=[2, 2])
    found = run(load, "gpus=2,cpus=16", policy=SRTF, workers=workers)
    # The first one's are still starting at 10: the second's start then, are ready at 30 and done at 40; 60 the first.
    assert found.end_s.tolist() == [160, 40]


def test_rounds_of_the_policy_hold_growth_up_and_no_shrinking() -> None:
    workers = WorkerOptions(round_s=30.0, start_s=0.0, take_back_s=0.0)
    load = jobs((0, 100, 1), (40, 12, 1), ideal_cpus=[14, 2], trainer_cpus=[2, 2])
    found = run(load, "gpus=2,cpus=16", policy=SRTF, workers=workers)
    assert found.end_s.tolist() == [100, 52]
    load = jobs((1, 100, 1), (41, 12, 1), (1, 200, 1), ideal_cpus=[14, 10, 2], trainer_cpus=[2, 2, 2])
    found = run(load, "gpus=3,cpus=16", policy=SRTF, workers=workers)
    assert found.num_moves >= 2
    assert found.use.cpus.max() <= 16


def test_a_trainer_takes_cpus_from_data_workers_at_once() -> None:
    # The second needs 10 CPUs on the node where data workers of the first have 12 of 16.
    load = jobs((0, 100, 1), (50, 10, 1), ideal_cpus=[14, 10], trainer_cpus=[2, 10])
    found = run(load, "gpus=2,cpus=16", policy=SRTF)
    assert found.start_s.tolist() == [0, 50]
    assert found.end_s.tolist()[1] == 60
    assert found.end_s.tolist()[0] == pytest.approx(50 + 10 + (50 - 10 * 4 / 12))


def test_data_workers_of_several_cpus_leave_what_fits_none() -> None:
    load = jobs((0, 100, 1), ideal_cpus=[14], trainer_cpus=[2])
    # Two nodes with 5 and 7 free CPUs: one data worker of 4 on each.
    found = run(load, parse("gpus=1,cpus=7;cpus=7"), policy=SRTF, workers=replace(AT_ONCE, cpus=4))
    assert found.end_s.tolist() == pytest.approx([100 * 12 / 8])


def test_data_workers_need_memory() -> None:
    load = jobs((0, 100, 1), ideal_cpus=[14], trainer_cpus=[2], memory_gib=[4], worker_memory_gib=[2])
    found = run(load, "gpus=1,cpus=16,memory_gib=16", policy=SRTF)
    assert found.end_s.tolist() == pytest.approx([200]), "12 GiB are for 6 of the 12 CPUs"


@pytest.mark.shows("the simulator has queues, gangs, costs of start, failures, memory and network")
def test_a_network_budget_holds_remote_data_workers_back() -> None:
    load = jobs((0, 100, 1), ideal_cpus=[14], trainer_cpus=[2], network_gbps=[12])
    # 6 CPUs are on the trainer's node and 6 elsewhere: these bring 6 Gb/s, of which half may come.
    cluster = "gpus=1,cpus=8,network_gbps=6;cpus=8"
    found = run(load, cluster, policy=SRTF, workers=replace(AT_ONCE, network_share=0.5))
    assert found.end_s.tolist() == pytest.approx([100 / 0.75])
    assert run(load, cluster, policy=SRTF).end_s.tolist() == pytest.approx([100])


def test_a_job_falls_back_to_working_without_data_workers_where_that_is_faster() -> None:
    load = jobs((0, 100, 1), ideal_cpus=[12], trainer_cpus=[2], overhead=[0.2])
    assert run(load, "gpus=1,cpus=12", policy=SRTF).end_s.tolist() == pytest.approx([125])
    assert run(load, "gpus=1,cpus=12", policy=SRTF, workers=replace(AT_ONCE, fallback=True)).end_s.tolist() == [100]
    remote = "gpus=1,cpus=4;cpus=8"
    assert run(load, remote, policy=SRTF, workers=replace(AT_ONCE, fallback=True)).end_s.tolist() == pytest.approx(
        [125]
    )


def test_the_shortest_first_comes_first_and_aging_lets_nobody_starve() -> None:
    rows = [(0.0, 100.0, 1), (1.0, 90.0, 1), *((float(at), 10.0, 1) for at in range(2, 400, 10))]
    impatient = run(jobs(*rows), "gpus=1,cpus=1", queue=QueueOptions(shortest_first=True, aging=0.0))
    aging = run(jobs(*rows), "gpus=1,cpus=1", queue=QueueOptions(shortest_first=True, aging=1.0))
    assert impatient.start_s[1] > 390
    assert aging.start_s[1] < 200


@pytest.mark.shows("the simulator has queues, gangs, costs of start, failures, memory and network")
def test_a_node_that_fails_costs_the_work_since_the_last_checkpoint() -> None:
    load = jobs((0, 1000, 1))
    failures = FailureOptions(node_mtbf_s=800.0, repair_s=50.0, checkpoint_s=100.0)
    found = run(load, "gpus=1,cpus=1", failures=failures, seed=3)
    assert found.restarts[0] >= 1
    assert 0 < found.lost_s[0] < 100 * found.restarts[0]
    away_s = 50.0 * found.restarts[0]
    assert found.end_s[0] == pytest.approx(1000 + found.lost_s[0] + away_s)
    # It waits for the node; in the time of a repair nothing else is lost.
    assert found.waited_s[0].sum() == pytest.approx(away_s)


@pytest.mark.parametrize("seed", range(6))
def test_a_node_that_is_away_has_no_cpus_for_fixed_data_workers(seed: int) -> None:
    # Of 3 nodes one is often away. The books are checked every 64 events, and at the end.
    load = jobs(*((7.0 * at, 100.0, 1) for at in range(40)), ideal_cpus=[6] * 40, trainer_cpus=[1] * 40)
    failures = FailureOptions(node_mtbf_s=400.0, repair_s=60.0, checkpoint_s=20.0)
    found = run(load, "3*gpus=4,cpus=24", Discipline.GREEDY, request=Request.FIXED, failures=failures, seed=seed)
    assert found.restarts.any()
    assert found.finished.all()


def test_a_job_that_no_checkpoint_saves_is_given_up() -> None:
    failures = FailureOptions(node_mtbf_s=1.0, repair_s=1.0, checkpoint_s=1e9)
    found = run(jobs((0, 1e5, 1)), "gpus=1,cpus=1", failures=failures)
    assert "given up" in found.rejected[0]
    assert not found.finished.any()


@pytest.mark.shows("a job larger than the simulated cluster is reported")
def test_jobs_larger_than_the_cluster_are_reported_and_nobody_waits_for_them() -> None:
    load = jobs((0, 10, 99), (0, 10, 1), (1, 10, 1), ideal_cpus=[1, 1, 99], memory_gib=[0, 0, 0])
    found = run(load, "2*gpus=8,cpus=8")
    assert found.rejected == {
        0: "larger than the cluster: not enough GPUs",
        2: "larger than the cluster: not enough CPUs",
    }
    assert found.end_s[1] == 10
    assert found.num_unfinished == 0


def test_jobs_that_nothing_can_move_any_more_are_told_and_not_waited_for() -> None:
    # The trainers have all CPUs: no data worker fits, and nothing will ever change that.
    found = run(jobs((0, 10, 1), ideal_cpus=[8], trainer_cpus=[4]), "gpus=1,cpus=4", policy=SRTF)
    assert found.num_unfinished == 1


def too_much(table: JobTable, pool: Pool, now_s: float) -> Allocation:
    return allocation(np.full(len(table), pool.cpus + 1, dtype=np.int64))


def too_little(table: JobTable, pool: Pool, now_s: float) -> Allocation:
    return allocation(np.full(len(table), -1, dtype=np.int64))


@pytest.mark.parametrize(
    ("policy", "said"), [(too_much, "gave 15 CPUs and there are 14"), (too_little, "less than no")]
)
def test_a_policy_that_breaks_the_rules_is_an_error(policy: Policy, said: str) -> None:
    with pytest.raises(SimulationFault, match=said):
        run(jobs((0, 10, 1), ideal_cpus=[8], trainer_cpus=[2]), "gpus=1,cpus=16", policy=policy)


@pytest.mark.shows("a policy that gives out too much ends at the event at which it does")
def test_a_policy_that_gives_out_too_much_is_caught_at_the_event_at_which_it_does() -> None:
    """It keeps to the pool until a trainer takes a part of it."""
    asked_at_s = []

    def stubborn(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        asked_at_s.append(now_s)
        return allocation(np.array([12] + [0] * (len(table) - 1), dtype=np.int64))

    load = jobs((0, 100, 1), (20, 5, 1), (50, 10, 1), ideal_cpus=[14, 2, 10], trainer_cpus=[2, 2, 9])
    with pytest.raises(SimulationFault, match="gave 12 CPUs and there are 5"):
        run(load, "gpus=3,cpus=16", policy=stubborn)
    assert asked_at_s == [0, 20, 50]


def test_an_end_is_no_question_to_the_policy_while_everybody_has_all_that_he_wants() -> None:
    asked_at_s = []

    def counted(table: JobTable, pool: Pool, now_s: float) -> Allocation:
        asked_at_s.append(now_s)
        return FAIR(table, pool, now_s)

    load = jobs((0, 10, 1), (0, 20, 1), (0, 30, 1), ideal_cpus=[4] * 3, trainer_cpus=[1] * 3)
    assert run(load, "gpus=3,cpus=12", policy=counted).end_s.tolist() == [10, 20, 30]
    assert asked_at_s == [0]
    asked_at_s.clear()
    assert run(load, "gpus=3,cpus=9", policy=counted).end_s.max() > 30
    assert len(asked_at_s) >= 2


def test_options_tell_all_their_problems() -> None:
    with pytest.raises(OptionsError, match=r"a policy belongs.*cpus of a data worker is 0.*interval_s is -1"):
        Scenario("bad", Request.ELASTIC, Discipline.FIFO, None, QueueOptions(interval_s=-1), WorkerOptions(cpus=0))


@settings(max_examples=60, deadline=None)
@given(
    workloads(),
    st.sampled_from(list(Discipline)),
    st.sampled_from([Request.TUNED, Request.HARDWARE, Request.FIXED, *ALL]),
    st.sampled_from([NO_CYCLES, QueueOptions(), QueueOptions(shortest_first=True)]),
    st.sampled_from([AT_ONCE, WorkerOptions(), WorkerOptions(cpus=3, fallback=True)]),
    st.sampled_from([FailureOptions(), FailureOptions(node_mtbf_s=400.0, repair_s=60.0, checkpoint_s=20.0)]),
)
def test_books_balance_and_the_same_input_gives_the_same_bytes(
    load: Workload,
    discipline: Discipline,
    kind: Request | str,
    queue: QueueOptions,
    workers: WorkerOptions,
    failures: FailureOptions,
) -> None:
    policy = POLICIES[kind] if isinstance(kind, str) else None
    request = kind if isinstance(kind, Request) else Request.ELASTIC
    cluster = parse("3*gpus=4,cpus=24")
    found = run(load, cluster, discipline, policy, request, workers, queue, failures)
    again = run(load, cluster, discipline, policy, request, workers, queue, failures)
    for one, other in ((found.start_s, again.start_s), (found.end_s, again.end_s), (found.use.cpus, again.use.cpus)):
        assert one.tobytes() == other.tobytes()
    assert found.num_unfinished == 0
    done = found.finished
    assert (found.start_s[done] >= load.submit_s[done]).all()
    fastest = load.work_s / np.where((load.demand > 0) & (request is Request.FIXED), 1 - load.overhead, 1.0)
    assert (found.end_s[done] - found.start_s[done] >= fastest[done] * (1 - 1e-9)).all()
    assert found.use.gpus.max() <= 12
    assert found.use.cpus.max() <= 72 + 1e-6
    assert (found.use.effective_gpus <= found.use.gpus + 1e-6).all()
    assert (np.diff(found.use.at_s) >= 0).all()
    # All time before the first start, and between two of them, has a cause.
    if math.isinf(failures.node_mtbf_s):
        assert found.waited_s.sum(axis=1)[done] == pytest.approx((found.start_s - load.submit_s)[done])
    if discipline is Discipline.FIFO and not queue.shortest_first and math.isinf(failures.node_mtbf_s):
        taken = [job for job in range(len(load)) if job not in found.rejected]
        assert (np.diff(found.start_s[taken]) >= 0).all()


@settings(max_examples=25, deadline=None)
@given(workloads(), st.sampled_from(list(Discipline)))
def test_with_enough_cpus_all_policies_are_one(load: Workload, discipline: Discipline) -> None:
    outcomes = [run(load, "3*gpus=4,cpus=200", discipline, POLICIES[name]) for name in ALL]
    for other in outcomes[1:]:
        assert other.end_s == pytest.approx(outcomes[0].end_s, rel=1e-9)


def test_a_run_of_a_year_is_not_looked_at_each_minute() -> None:
    load = jobs((0, 3e7, 1))
    outcome = simulate(load, parse("1*gpus=1,cpus=1"), Scenario("t", Request.TUNED, Discipline.FIFO, sample_s=60.0))
    seen = outcome.fragmentation
    assert seen is not None
    assert 500 <= len(seen.at_s) <= 2000
    assert np.ptp(np.diff(seen.at_s[:-1])) == 0, "at equal spans, so that their mean is one over time"
    assert seen.at_s[-1] > 2.5e7


def test_a_job_with_a_measured_curve_runs_as_fast_as_its_curve_says() -> None:
    # 100 s of work, with 8 CPUs at half speed and with 24 at three quarters: 16 are left for it, so 0.625.
    points = [((0.0, 0.0), (8.0, 0.5), (24.0, 0.75))]
    one_job = build(
        ["1"],
        {"submit_s": [0], "work_s": [100], "ideal_cpus": [25], "overhead": [0.25]},
        curves=curves_of(points, [1]),
    )
    for name in ALL:
        outcome = run(one_job, "gpus=1,cpus=17", policy=POLICIES[name])
        assert outcome.end_s.tolist() == pytest.approx([160.0]), name


@pytest.mark.parametrize("name", ALL)
def test_caps_of_users_and_tenants_hold_at_every_event(name: str) -> None:
    load = build(
        [str(place) for place in range(12)],
        {
            "submit_s": [3 * place for place in range(12)], "work_s": [40 + 5 * (place % 4) for place in range(12)],
            "ideal_cpus": [9] * 12, "trainer_cpus": [1] * 12,
        },
        tenants=["lab", "shop"] * 6,
        users=["ann", "bob", "cy"] * 4,
    )  # fmt: skip
    caps = CapOptions({"ann": 6, "*": 10}, {"lab": 12})
    scenario = Scenario("test", Request.ELASTIC, Discipline.EASY, under_all_rules(POLICIES[name]), caps=caps)
    # Division raises where a cap is exceeded.
    assert np.isfinite(simulate(load, parse("4*gpus=4,cpus=16"), scenario).end_s).all()


def test_a_policy_that_knows_no_caps_is_an_error_where_there_are_some() -> None:
    load = jobs((0, 10, 1), ideal_cpus=[9])
    scenario = Scenario("test", Request.ELASTIC, Discipline.FIFO, FAIR, caps=CapOptions({"*": 4}))
    with pytest.raises(SimulationFault, match="gave a user 8 CPUs: at most 4"):
        simulate(load, parse("gpus=1,cpus=16"), scenario)
