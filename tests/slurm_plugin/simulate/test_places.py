"""Nodes as places in the simulator: whole jobs by the daemon's placements, data workers by its rule for their nodes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.base.errors import OptionsError
from hetstream.slurm_plugin.placement import CHOICES
from hetstream.slurm_plugin.policy.policies import POLICIES, MoveCost, Rules
from hetstream.slurm_plugin.simulate.engine import simulate
from hetstream.slurm_plugin.simulate.scenario import Discipline, FailureOptions, Request, Scenario, WorkerOptions
from hetstream.slurm_plugin.simulate.usage_log import Outcome
from hetstream.slurm_plugin.simulate.workload import Workload, build, parse
from tests.slurm_plugin.simulate.loads import AT_ONCE, NO_CYCLES, jobs, workloads

ELASTIC = Scenario("test", Request.ELASTIC, Discipline.FIFO, POLICIES["srtf"], NO_CYCLES, AT_ONCE, placement="fgd")
TUNED = Scenario("test", Request.TUNED, Discipline.FIFO, queue=NO_CYCLES)
# A job of CPUs alone, then three of a GPU with 4 CPUs.
MIXED = build(
    ["cpus", "a", "b", "c"],
    {"submit_s": [0, 1, 2, 3], "work_s": [100] * 4, "gpus": [0, 1, 1, 1], "ideal_cpus": [4] * 4},
)


def run(load: Workload, cluster: str, scenario: Scenario) -> Outcome:
    return simulate(load, parse(cluster), scenario)


def test_fgd_keeps_cpus_beside_gpus_that_others_will_want() -> None:
    nodes = "gpus=1,cpus=4;gpus=2,cpus=16"
    plain = run(MIXED, nodes, TUNED)
    assert plain.node_of.tolist()[0] == 0, "it has the fewest GPUs"
    assert plain.start_s.tolist() == [0, 1, 2, 100], "and one GPU has no CPUs then"
    placed = run(MIXED, nodes, replace(TUNED, placement="fgd"))
    assert placed.node_of.tolist()[0] == 1
    assert placed.start_s.tolist() == [0, 1, 2, 3]


def test_each_placement_chooses_as_it_does_in_the_benchmark() -> None:
    # 4 CPUs without a GPU: on the second node the least is left of both together; on the last one most.
    load = build(["one"], {"submit_s": [0], "work_s": [1], "gpus": [0], "ideal_cpus": [4]})
    nodes = "gpus=1,cpus=32;gpus=4,cpus=4;gpus=8,cpus=96"
    assert run(load, nodes, replace(TUNED, placement="best-fit")).node_of.tolist() == [0]
    assert run(load, nodes, replace(TUNED, placement="dot-product")).node_of.tolist() == [1]
    found = {run(load, nodes, replace(TUNED, placement="random", seed=seed)).node_of[0] for seed in range(20)}
    assert found == {0, 1, 2}


def test_a_gang_that_no_node_holds_goes_to_the_fewest() -> None:
    load = jobs((0, 10, 6), (1, 10, 8))
    found = run(load, "2*gpus=8,cpus=8;2*gpus=2,cpus=2", replace(TUNED, placement="best-fit"))
    assert found.start_s.tolist() == [0, 1], "6 leave 2, and 8 are whole on the other node"
    wide = run(jobs((0, 10, 12)), "2*gpus=8,cpus=8;4*gpus=2,cpus=2", replace(TUNED, placement="best-fit"))
    assert wide.start_s.tolist() == [0]


def test_a_network_budget_leaves_data_workers_without_a_place() -> None:
    load = jobs((0, 100, 1), ideal_cpus=[14], trainer_cpus=[2], network_gbps=[12])
    nodes = "gpus=1,cpus=8,network_gbps=6;cpus=8"
    half = replace(ELASTIC, workers=replace(AT_ONCE, network_share=0.5))
    # 6 CPUs are on the trainer's node. Each of the others sends 1 Gb/s, and 3 may come.
    assert run(load, nodes, half).end_s.tolist() == pytest.approx([100 / 0.75])
    # Of those with 4 CPUs one fits there, and one more would send 4 Gb/s.
    whole = replace(half, workers=replace(half.workers, cpus=4))
    assert run(load, nodes, whole).end_s.tolist() == pytest.approx([100 * 12 / 4])
    # The link of the node that sends counts as well.
    narrow = "gpus=1,cpus=8,network_gbps=100;cpus=8,network_gbps=2"
    assert run(load, narrow, half).end_s.tolist() == pytest.approx([100 * 12 / 7])


def test_data_workers_that_must_go_elsewhere_pay_what_the_daemon_reckons_with() -> None:
    # The second job takes the CPUs of its node; the data workers there begin again on the third node.
    load = jobs((0, 200, 1), (50, 100, 1), ideal_cpus=[12, 8], trainer_cpus=[4, 8])
    nodes = "gpus=1,cpus=4;gpus=1,cpus=8;cpus=8"
    at_once = replace(ELASTIC, placement="best-fit")
    cost = MoveCost()
    move_s = cost.report_s + cost.cooldown_s + cost.drain_s
    assert run(load, nodes, at_once).end_s.tolist() == pytest.approx([200 + move_s, 150])
    slow = replace(at_once, workers=replace(AT_ONCE, start_s=20.0))
    assert run(load, nodes, slow).end_s.tolist() == pytest.approx([20 + 200 + move_s + 20, 150])
    quick = replace(at_once, rules=Rules(move=replace(cost, report_s=0.0, cooldown_s=0.0, drain_s=0.0)))
    assert run(load, nodes, quick).end_s.tolist() == pytest.approx([200, 150])
    # Half of them can stay.
    half = jobs((0, 200, 1), (50, 100, 1), ideal_cpus=[12, 4], trainer_cpus=[4, 4])
    wide = "gpus=1,cpus=4;gpus=1,cpus=8;cpus=4"
    assert run(half, wide, at_once).end_s.tolist() == pytest.approx([200 + move_s / 2, 150])


def test_the_trainers_own_node_comes_first_and_nothing_crosses_the_network_then() -> None:
    load = jobs((0, 100, 1), (0, 100, 1), ideal_cpus=[8, 8], trainer_cpus=[2, 2], network_gbps=[50, 50])
    found = run(load, "2*gpus=1,cpus=8,network_gbps=1", ELASTIC)
    assert found.end_s.tolist() == pytest.approx([100, 100])


def test_working_without_data_workers_counts_those_beside_the_trainer() -> None:
    load = jobs((0, 100, 1), ideal_cpus=[12], trainer_cpus=[2], overhead=[0.2])
    scenario = replace(ELASTIC, workers=replace(AT_ONCE, fallback=True))
    assert run(load, "gpus=1,cpus=12", scenario).end_s.tolist() == [100]
    assert run(load, "gpus=1,cpus=4;cpus=8", scenario).end_s.tolist() == pytest.approx([125])


def test_gpus_that_nobody_can_use_are_seen_over_time() -> None:
    # A job of 1 GPU takes all CPUs of its node, so the other GPU there, of 4 in all, is of no use.
    load = jobs((0, 100, 1), (500, 100, 1), ideal_cpus=[4, 4])
    seen = run(load, "2*gpus=2,cpus=4", replace(TUNED, sample_s=60.0)).fragmentation
    assert seen is not None
    by_time = dict(zip(seen.at_s.tolist(), seen.unusable_gpus.tolist(), strict=True))
    assert by_time[0.0] == 0.25
    assert by_time[max(at_s for at_s in by_time if 100 < at_s < 500)] == 0.0
    seen = run(MIXED, "2*gpus=2,cpus=64", replace(TUNED, sample_s=60.0)).fragmentation
    assert seen is not None
    assert seen.unusable_gpus.max() == 0.0, "a job of CPUs alone has no use for any GPU, which is no fragment"


def test_a_placement_that_there_is_not_is_refused() -> None:
    with pytest.raises(OptionsError, match="there is no placement 'worst-fit': there are fgd"):
        replace(TUNED, placement="worst-fit")


@settings(max_examples=40, deadline=None)
@given(
    workloads(),
    st.sampled_from(list(Discipline)),
    st.sampled_from([Request.TUNED, Request.HARDWARE, Request.FIXED, "srtf", "fair"]),
    st.sampled_from(list(CHOICES)),
    st.sampled_from([AT_ONCE, WorkerOptions(cpus=3, fallback=True)]),
    st.sampled_from([FailureOptions(), FailureOptions(node_mtbf_s=400.0, repair_s=60.0, checkpoint_s=20.0)]),
)
def test_books_balance_under_every_placement(
    load: Workload,
    discipline: Discipline,
    kind: Request | str,
    placement: str,
    workers: WorkerOptions,
    failures: FailureOptions,
) -> None:
    policy = POLICIES[kind] if isinstance(kind, str) else None
    request = kind if isinstance(kind, Request) else Request.ELASTIC
    scenario = Scenario(
        "test", request, discipline, policy, workers=workers, failures=failures, sample_s=50.0, placement=placement
    )
    found, again = (run(load, "3*gpus=4,cpus=24", scenario) for _ in range(2))
    assert found.end_s.tobytes() == again.end_s.tobytes()
    assert found.num_unfinished == 0
    plain = run(load, "3*gpus=4,cpus=24", replace(scenario, placement=None))
    assert found.rejected.keys() == plain.rejected.keys() or np.isfinite(failures.node_mtbf_s)
    seen = found.fragmentation
    assert seen is None or ((seen.unusable_gpus >= 0) & (seen.unusable_gpus <= 1)).all()
