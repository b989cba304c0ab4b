"""The packer's decision: rules one by one, gangs, reasons, and what holds in every state."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetstream.slurm_plugin.packing.decide import PackingPlan, decide
from hetstream.slurm_plugin.packing.state import (
    GpuNode,
    GpuUse,
    PackingRules,
    PackingState,
    Place,
    PlacedJob,
    SharedGpu,
    WaitingJob,
)

GIB = 1 << 30
NOW_S = 1_795_000_000.0


def use(**more: Any) -> GpuUse:
    return replace(GpuUse(NOW_S - 5, 0.3, 40 * GIB), **more)


def gpu(index: int, **more: Any) -> SharedGpu:
    return replace(SharedGpu(index, 2, True, use()), **more)


def node(name: str, *gpus: SharedGpu, **more: Any) -> GpuNode:
    return replace(GpuNode(name, 16, 64000, gpus), **more)


def job(name: str = "7", **more: Any) -> WaitingJob:
    return replace(WaitingJob(name, NOW_S - 60, gpu_bytes=8 * GIB, cpus=4, memory_mb=8000), **more)


def plan(nodes: list[GpuNode], *waiting: WaitingJob, placed: tuple[PlacedJob, ...] = ()) -> PackingPlan:
    return decide(PackingState(tuple(nodes), waiting, placed), NOW_S)


def places(found: PackingPlan) -> dict[str, Place]:
    return {placement.job: placement.place for placement in found.placements}


@pytest.mark.shows("the packer decides by use, memory and CPUs, and never puts two guaranteed jobs on a GPU")
@pytest.mark.parametrize(
    ("node_change", "gpu_change", "use_change", "job_change", "reason"),
    [
        ({"closed": "DRAIN"}, {}, {}, {}, "on nodes out of use (DRAIN)"),
        ({"cpus_free": 3}, {}, {}, {}, "on nodes with less than 4 CPUs free"),
        ({"memory_free_mb": 7999}, {}, {}, {}, "on nodes with less than 8,000 MB free"),
        ({}, {"closed": "that are parts of a GPU (MIG)"}, {}, {}, "that are parts of a GPU (MIG)"),
        ({}, {"slots": 0}, {}, {}, "with as many opportunistic jobs as they may have"),
        ({}, {"not_before_s": NOW_S + 1}, {}, {}, "rest after an eviction"),
        ({}, {"use": None}, {}, {}, "of which nothing was read in the last 30 s"),
        ({}, {}, {"read_s": NOW_S - 31}, {}, "of which nothing was read in the last 30 s"),
        ({}, {}, {"read_s": NOW_S + 1}, {}, "of which nothing was read in the last 30 s"),
        ({}, {}, {"used_share": 0.8}, {}, "in use for 80% of the last 10 s or more"),
        ({}, {}, {"used_share": float("nan")}, {}, "in use for 80% of the last 10 s or more"),
        ({}, {}, {"free_bytes": 8 * GIB - 1}, {}, "with less than 8.0 GiB free beside others"),
        ({}, {}, {"closed": "of a job without an agent"}, {}, "1 of a job without an agent"),
        ({}, {}, {}, {"is_guaranteed": True}, "that a guaranteed job has"),
        ({}, {}, {}, {"only_nodes": ("g2",)}, "on nodes that it does not ask for"),
        ({}, {}, {}, {"gpus": 2}, "it needs 2 GPUs of one node at once, and 1 of 1 could take it now"),
        ({}, {}, {}, {"num_nodes": 2}, "it needs 1 GPU with the same numbers on each of 2 nodes at once"),
        ({}, {}, {}, {"not_before_s": NOW_S + 30}, "it was evicted, and is placed again in 30 s at the earliest"),
        ({}, {}, {}, {"closed": "it depends on another job"}, "it depends on another job"),
    ],
)  # fmt: skip
def test_each_rule_keeps_a_job_waiting_and_says_so(
    node_change: dict[str, Any],
    gpu_change: dict[str, Any],
    use_change: dict[str, Any],
    job_change: dict[str, Any],
    reason: str,
) -> None:
    assert places(plan([node("g1", gpu(0))], job())) == {"7": Place(("g1",), (0,))}
    one = node("g1", replace(gpu(0, use=use(**use_change)), **gpu_change), **node_change)
    found = plan([one], job(**job_change))
    assert not found.placements
    assert reason in found.reasons["7"]


def test_without_any_gpu_the_reason_says_that() -> None:
    assert plan([], job()).reasons == {"7": "there is no GPU that opportunistic jobs may use"}


@pytest.mark.shows("jobs whose trainers starve are packed first")
def test_the_gpu_whose_trainer_starves_comes_first() -> None:
    gpus = [gpu(0), gpu(1, use=use(wait_share=0.9)), gpu(2, use=use(wait_share=0.2))]
    assert places(plan([node("g1", *gpus)], job()))["7"].indices == (1,)


def test_the_least_used_gpu_comes_first_and_company_counts() -> None:
    gpus = [gpu(0, use=use(used_share=0.1)), gpu(1, use=use(used_share=0.4)), gpu(2, use=use(used_share=0.6))]
    companion = PlacedJob("3", Place(("g1",), (0,)))
    assert places(plan([node("g1", *gpus)], job()))["7"].indices == (0,)
    assert places(plan([node("g1", *gpus)], job(), placed=(companion,)))["7"].indices == (1,)


def test_what_other_jobs_declared_is_not_free() -> None:
    companion = PlacedJob("3", Place(("g1",), (0,)), gpu_bytes=33 * GIB)
    found = plan([node("g1", gpu(0))], job(), placed=(companion,))
    assert "less than 8.0 GiB free" in found.reasons["7"]


def test_a_gpu_gets_one_job_at_a_time_and_the_longest_waiting_first() -> None:
    found = plan([node("g1", gpu(0))], job("8"), job("7", submit_s=NOW_S - 600))
    assert places(found) == {"7": Place(("g1",), (0,))}
    assert "have just got a job" in found.reasons["8"]


@pytest.mark.shows("the packer decides by use, memory and CPUs, and never puts two guaranteed jobs on a GPU")
def test_two_guaranteed_jobs_never_meet() -> None:
    """One that has quota by now, one of Slurm's, and one placed in the same call."""
    upgraded = PlacedJob("3", Place(("g1",), (1,)), is_guaranteed=True)
    gpus = [gpu(0), gpu(1, has_guaranteed=False), gpu(2, has_guaranteed=False)]
    found = plan([node("g1", *gpus)], *(job(name, is_guaranteed=True) for name in "789"), placed=(upgraded,))
    assert places(found) == {"7": Place(("g1",), (2,))}


def test_a_gang_of_one_node_gets_near_gpus_that_leave_alike() -> None:
    shares = {0: 0.1, 1: 0.7, 2: 0.15, 3: 0.12}
    gpus = [gpu(index, use=use(used_share=share)) for index, share in shares.items()]
    assert places(plan([node("g1", *gpus)], job(gpus=2)))["7"].indices == (2, 3)


@pytest.mark.shows("the packer decides by use, memory and CPUs, and never puts two guaranteed jobs on a GPU")
def test_a_gang_over_nodes_gets_the_same_numbers_below_the_lowest_switch() -> None:
    def row(name: str, switch: str, *indices: int) -> GpuNode:
        return node(name, *(gpu(index) for index in indices), switches=("core", switch))

    nodes = [row("g1", "a", 0, 1), row("g2", "b", 0, 1), row("g3", "b", 1, 2), row("g4", "c", 0, 1)]
    assert places(plan(nodes, job(num_nodes=2)))["7"] == Place(("g2", "g3"), (1,))
    assert places(plan(nodes, job(num_nodes=3, gpus=2)))["7"] == Place(("g1", "g2", "g4"), (0, 1))
    assert "with the same numbers on each of 4 nodes" in plan(nodes, job(num_nodes=4, gpus=2)).reasons["7"]


def test_who_breaks_orders_or_is_paused_for_long_is_evicted() -> None:
    place = Place(("g1",), (0,))
    running = (
        PlacedJob("1", place, complaint="it goes on although it should pause"),
        PlacedJob("2", place, paused_s=301),
        PlacedJob("3", place, paused_s=299),
    )
    found = plan([node("g1", gpu(0, use=None))], placed=running)
    assert [(eviction.job, eviction.reason.split(",")[0]) for eviction in found.evictions] == [
        ("1", "it goes on although it should pause"),
        ("2", "it was paused for 301 s"),
    ]


def test_delays_grow_to_a_limit() -> None:
    rules = PackingRules()
    assert [rules.delay_s(count) for count in (0, 1, 2, 3, 7, 1000)] == [0, 120, 240, 480, 3600, 3600]


# What holds in every state.

SHARES = st.sampled_from([0.0, 0.3, 0.79, 0.8, 1.0])
USES = st.none() | st.builds(
    GpuUse,
    st.sampled_from([NOW_S - 40, NOW_S - 5, NOW_S]),
    SHARES,
    st.integers(0, 4).map(lambda count: count * 8 * GIB),
    st.none() | SHARES,
    st.sampled_from(["", "", "of a job without an agent"]),
)
GPUS = st.builds(
    SharedGpu, st.just(0), st.integers(0, 3), st.booleans(), USES, st.sampled_from([0.0, 0.0, NOW_S + 9]),
    st.sampled_from(["", "", "", "MIG"]),
)  # fmt: skip


@st.composite
def states(draw: st.DrawFn) -> PackingState:
    nodes = []
    for number in range(draw(st.integers(0, 4))):
        gpus = [replace(draw(GPUS), index=index) for index in range(draw(st.integers(0, 4)))]
        switches = draw(st.sampled_from([(), ("a",), ("a", "b"), ("a", "c")]))
        closed = draw(st.sampled_from(["", "", "", "DRAIN"]))
        cpus = draw(st.integers(0, 16))
        nodes.append(GpuNode(f"g{number}", cpus, 1000 * cpus, tuple(gpus), switches, closed))
    waiting = [
        WaitingJob(
            f"{number}", NOW_S - draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 3)),
            draw(st.integers(0, 3)) * 8 * GIB, draw(st.integers(1, 6)), draw(st.integers(0, 6)) * 1000,
            draw(st.booleans()), draw(st.sampled_from([0.0, 0.0, NOW_S + 5])),
        )
        for number in range(draw(st.integers(0, 8)))
    ]  # fmt: skip
    placed = [
        PlacedJob(f"p{number}", Place((one.name,), (0,)), 8 * GIB, draw(st.booleans()), draw(SHARES) * 1000)
        for number, one in enumerate(nodes)
        if one.gpus and draw(st.booleans())
    ]
    return PackingState(tuple(nodes), tuple(waiting), tuple(placed))


@pytest.mark.shows("the packer decides by use, memory and CPUs, and never puts two guaranteed jobs on a GPU")
@settings(deadline=None, max_examples=150)
@given(states())
def test_in_every_state_no_rule_is_broken(state: PackingState) -> None:
    rules = PackingRules()
    found = decide(state, NOW_S, rules)
    gpus = {(one.name, card.index): card for one in state.nodes for card in one.gpus}
    nodes = {one.name: one for one in state.nodes}
    jobs = {one.job: one for one in state.waiting}
    # Everybody is placed or told why not, never both.
    assert sorted([*places(found), *found.reasons]) == sorted(jobs)
    assert all(found.reasons.values())
    assert len(places(found)) == len(found.placements)
    cpus, memory, num_jobs, declared, guaranteed = Counter[str](), Counter[str](), *(Counter[Any]() for _ in range(3))
    for one in state.placed:
        for spot in one.place.gpus():
            num_jobs[spot] += 1
            declared[spot] += one.gpu_bytes
            guaranteed[spot] += one.is_guaranteed
    before = dict(guaranteed)
    for name, place in places(found).items():
        one = jobs[name]
        assert not one.not_before_s > NOW_S
        # The whole gang, at once, on different GPUs of different nodes.
        assert (len(set(place.nodes)), len(set(place.indices))) == (one.num_nodes, one.gpus)
        for there in place.nodes:
            cpus[there] += one.cpus
            memory[there] += one.memory_mb
        for spot in place.gpus():
            card = gpus[spot]
            assert card.use is not None
            assert 0 <= NOW_S - card.use.read_s <= rules.oldest_s
            assert card.use.used_share < rules.most_used
            assert (card.closed, card.use.closed, nodes[spot[0]].closed) == ("", "", "")
            assert card.not_before_s <= NOW_S
            num_jobs[spot] += 1
            declared[spot] += one.gpu_bytes
            guaranteed[spot] += one.is_guaranteed
            assert num_jobs[spot] <= min(card.slots, rules.most_jobs)
            assert declared[spot] <= card.use.free_bytes or not one.gpu_bytes
            assert guaranteed[spot] == before.get(spot, 0) or guaranteed[spot] + card.has_guaranteed == 1
    assert all(cpus[name] <= one.cpus_free and memory[name] <= one.memory_free_mb for name, one in nodes.items())
    assert {eviction.job for eviction in found.evictions} == {one.job for one in state.placed if one.paused_s > 300}


@settings(deadline=None, max_examples=60)
@given(states())
def test_the_same_state_gives_the_same_plan_in_any_order(state: PackingState) -> None:
    turned = replace(state, nodes=state.nodes[::-1], waiting=state.waiting[::-1])
    first, second = decide(state, NOW_S), decide(turned, NOW_S)
    assert places(first) == places(second)
    assert first.reasons.keys() == second.reasons.keys()


@settings(deadline=None, max_examples=60)
@given(states())
def test_a_job_that_waits_finds_no_room_after_the_others_were_placed(state: PackingState) -> None:
    """Nobody is left out who could have started beside those that do."""
    found = decide(state, NOW_S)
    chosen = places(found)
    placed = [
        PlacedJob(one.job, chosen[one.job], one.gpu_bytes, one.is_guaranteed)
        for one in state.waiting
        if one.job in chosen
    ]
    fresh = {spot for one in placed for spot in one.place.gpus()}
    taken = {
        name: [one for one in state.waiting if one.job in chosen and name in chosen[one.job].nodes]
        for name in (one.name for one in state.nodes)
    }
    nodes = tuple(
        replace(
            one,
            cpus_free=one.cpus_free - sum(other.cpus for other in taken[one.name]),
            memory_free_mb=one.memory_free_mb - sum(other.memory_mb for other in taken[one.name]),
            gpus=tuple(replace(card, closed="fresh") if (one.name, card.index) in fresh else card for card in one.gpus),
        )
        for one in state.nodes
    )
    waiting = tuple(one for one in state.waiting if one.job in found.reasons)
    assert not decide(PackingState(nodes, waiting, (*state.placed, *placed)), NOW_S).placements
