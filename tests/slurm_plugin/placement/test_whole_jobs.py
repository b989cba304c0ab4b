"""Placements of whole jobs and gangs: what is taken comes back, and fragments are what they are said to be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks.frag import arrivals, replay
from benchmarks.openb import made_up_cluster, made_up_jobs
from hetstream.slurm_plugin.placement import (
    CHOICES,
    WHOLE,
    FragmentationGradient,
    Nodes,
    Shape,
    Spot,
    TypicalShapes,
    place_gang,
    room_for,
)

TYPES = st.sampled_from([frozenset(), frozenset({1}), frozenset({2}), frozenset({1, 2})])
WHOLE_GPUS = st.builds(
    Shape, st.integers(0, 40).map(lambda cpus: 1000 * cpus), st.integers(0, 64), st.sampled_from([0, 1, 2, 4]),
    st.just(WHOLE), TYPES,
)  # fmt: skip
PARTS = st.builds(Shape, st.integers(0, 8000), st.integers(0, 64), st.just(1), st.sampled_from([200, 460, 500]))
SHAPES = st.one_of(WHOLE_GPUS, PARTS)


def cluster(num: int = 6) -> Nodes:
    kinds = [(32_000, 256, 4, 1), (64_000, 256, 8, 2), (16_000, 128, 2, 1), (64_000, 512, 0, 0)]
    return Nodes(*zip(*(kinds[one % len(kinds)] for one in range(num)), strict=True))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SHAPES, max_size=40), st.sampled_from(list(CHOICES)), st.integers(0, 99))
def test_a_job_gets_what_it_asks_for_or_nothing_and_all_of_it_comes_back(
    shapes: list[Shape], name: str, seed: int
) -> None:
    nodes = cluster()
    chosen = CHOICES[name].make(nodes, TypicalShapes(shapes), seed)
    given_out: list[tuple[Spot, Shape]] = []
    for shape in shapes:
        room = nodes.fits(shape)
        spot = chosen.choose(shape)
        assert (spot is None) == (not room.any())
        if spot is None:
            continue
        assert room[spot.node]
        assert len(set(spot.devices)) == shape.gpus
        nodes.take(spot, shape)
        given_out.append((spot, shape))
        assert (nodes.cpus_free >= 0).all()
        assert (nodes.gpus_free >= 0).all()
    for spot, shape in given_out:
        nodes.give_back(spot, shape)
    fresh = cluster()
    for field in ("cpus_free", "memory_free_mb", "gpus_free"):
        assert np.array_equal(getattr(nodes, field), getattr(fresh, field))


def test_what_is_not_there_is_neither_taken_nor_given_back() -> None:
    nodes = cluster()
    big = Shape(33_000, 0, 1)
    with pytest.raises(ValueError, match="has no room"):
        nodes.take(Spot(0, (0,)), big)
    with pytest.raises(ValueError, match="has no room"):
        nodes.take(Spot(0, ()), Shape(1000, 0, 1))
    with pytest.raises(ValueError, match="did not give"):
        nodes.give_back(Spot(0), Shape(1000))
    assert nodes.gpu_allocation == 0.0
    for wrong in ({"cpus": -1}, {"cpus": 1, "gpus": 2, "share": 500}, {"cpus": 1, "share": 0}):
        with pytest.raises(ValueError, match=r"share|part"):
            Shape(**wrong)


def measured(shapes: list[Shape], covered: list[Shape], cpus: int, gpus: list[int], kind: int) -> float:
    """The definition, word by word."""
    found = 0.0
    for shape in covered:
        fits = (
            shape.gpus > 0
            and cpus >= shape.cpus
            and sum(one >= shape.share for one in gpus) >= shape.gpus
            and (not shape.gpu_types or kind in shape.gpu_types)
        )
        lost = sum(one for one in gpus if one < shape.share) if fits else sum(gpus)
        found += lost * shapes.count(shape) / sum(one in covered for one in shapes)
    return found


@pytest.mark.shows("whole jobs are placed by FGD, best fit, dot product and chance, within budgets")
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(SHAPES, min_size=1, max_size=12),
    st.integers(0, 40_000),
    st.lists(st.integers(0, WHOLE), min_size=4, max_size=4),
    st.sampled_from([1, 2]),
)
def test_fragments_are_what_the_definition_says(shapes: list[Shape], cpus: int, gpus: list[int], kind: int) -> None:
    plain = [Shape(one.cpus, 0, one.gpus, one.share, one.gpu_types) for one in shapes]
    typical = TypicalShapes(plain)
    found = typical.fragments(np.array([cpus]), np.array([gpus]), np.array([kind]))
    assert found[0] == pytest.approx(measured(plain, list(typical.shapes), cpus, gpus, kind))
    assert typical.frequency.sum() == pytest.approx(1.0)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(SHAPES, min_size=1, max_size=30), st.integers(0, 1 << 20))
def test_what_is_kept_of_nodes_is_what_a_fresh_look_finds(shapes: list[Shape], seed: int) -> None:
    nodes, generator = cluster(), np.random.default_rng(seed)
    typical = TypicalShapes(shapes)
    kept = FragmentationGradient(nodes, typical)
    given_out: list[tuple[Spot, Shape]] = []
    for shape in shapes * 2:
        spot = kept.choose(shape)
        assert spot == FragmentationGradient(nodes, typical).choose(shape)
        if spot is not None:
            nodes.take(spot, shape)
            given_out.append((spot, shape))
        if given_out and generator.random() < 0.3:
            nodes.give_back(*given_out.pop(int(generator.integers(len(given_out)))))


def test_fgd_keeps_whole_gpus_whole_and_cpus_beside_gpus() -> None:
    nodes = Nodes([32_000, 32_000, 64_000], [512] * 3, [4, 4, 0])
    typical = TypicalShapes([Shape(8000, 0, 1)] * 5 + [Shape(2000, 0, 1, 460)] * 5)
    fgd = FragmentationGradient(nodes, typical)
    assert fgd.choose(Shape(20_000)) == Spot(2)
    first = fgd.choose(Shape(2000, 0, 1, 460))
    assert first is not None
    nodes.take(first, Shape(2000, 0, 1, 460))
    second = fgd.choose(Shape(2000, 0, 1, 460))
    assert second == first  # the other half of the same device


def test_the_same_seed_gives_the_same_places() -> None:
    made_up, _ = made_up_cluster(1)
    small = type(made_up)(*(getattr(made_up, name)[:40] for name in ("cpus", "memory_mb", "num_gpus", "gpu_type")))
    coming = arrivals(made_up_jobs("default", 1)[:400], sum(small.num_gpus), 7)
    for name in CHOICES:
        one, two = (replay(small, coming, name, 7) for _ in range(2))
        assert (one.gpus, one.cpus_free, one.indicator) == (two.gpus, two.cpus_free, two.indicator)


@pytest.mark.shows("whole jobs are placed by FGD, best fit, dot product and chance, within budgets")
def test_on_a_full_cluster_fgd_gives_out_more_than_best_fit_and_that_more_than_chance() -> None:
    made_up, _ = made_up_cluster(2)
    kept = [place for place, gpus in enumerate(made_up.num_gpus) if gpus][:150]
    fields = ("cpus", "memory_mb", "num_gpus", "gpu_type")
    small = type(made_up)(*(tuple(getattr(made_up, name)[place] for place in kept) for name in fields))
    found = {
        name: np.mean([
            replay(small, arrivals(made_up_jobs("cpu250", seed)[:1500], sum(small.num_gpus), seed), name, seed).gpus
            for seed in range(2)
        ])
        for name in ("fgd", "best-fit", "random")
    }  # fmt: skip
    assert found["fgd"] >= found["best-fit"] - 0.3
    assert found["best-fit"] > found["random"]


@pytest.mark.shows("data workers go to the trainer's node first, then where least other traffic is")
def test_data_workers_do_not_make_the_nodes_more_uneven() -> None:
    made_up, _ = made_up_cluster(3)
    small = type(made_up)(*(getattr(made_up, name)[:150] for name in ("cpus", "memory_mb", "num_gpus", "gpu_type")))
    jobs = [Shape(min(96_000, 2 * one.cpus), one.memory_mb, one.gpus, one.share) if one.share == WHOLE and one.gpus
            else one for one in made_up_jobs("default", 3)[:1500]]  # fmt: skip
    coming = arrivals(jobs, sum(small.num_gpus), 3)
    whole, split = (replay(small, coming, "fgd", 3, split=one) for one in (False, True))
    assert split.indicator <= whole.indicator
    assert split.gpus >= whole.gpus
    assert split.cpus_free <= whole.cpus_free


@pytest.mark.shows("data workers go to the trainer's node first, then where least other traffic is")
@pytest.mark.parametrize(("num_gpus", "num_nodes"), [(1, 1), (4, 1), (8, 1), (9, 2), (16, 2), (17, 3), (24, 3)])
def test_a_gang_is_on_one_node_if_any_fits_it_else_on_the_fewest(num_gpus: int, num_nodes: int) -> None:
    nodes = Nodes([64_000] * 5, [512] * 5, [8, 4, 8, 8, 4])
    placement = CHOICES["best-fit"].make(nodes, TypicalShapes([]), 0)
    found = place_gang(nodes, Shape(4000, 8, 1), num_gpus, placement)
    assert found is not None
    assert len(found) == num_nodes
    assert sum(shape.gpus for _, shape in found) == num_gpus
    for spot, shape in found:
        nodes.take(spot, shape)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.integers(0, 8), min_size=1, max_size=7), st.integers(1, 20))
def test_a_gang_gets_all_or_nothing_and_never_more_nodes_than_it_needs(free: list[int], num_gpus: int) -> None:
    nodes = Nodes([64_000] * len(free), [512] * len(free), [8] * len(free))
    for node, left in enumerate(free):
        if left < 8:
            nodes.take(Spot(node, tuple(range(8 - left))), Shape(0, 0, 8 - left))
    placement = CHOICES["fgd"].make(nodes, TypicalShapes([Shape(4000, 0, 1)]), 0)
    per_gpu = Shape(4000, 0, 1)
    assert room_for(nodes, per_gpu).tolist() == free
    found = place_gang(nodes, per_gpu, num_gpus, placement)
    held = np.cumsum(sorted(free, reverse=True))
    if num_gpus > held[-1]:
        assert found is None
        return
    assert found is not None
    assert len(found) == int(np.searchsorted(held, num_gpus)) + 1
    assert len({spot.node for spot, _ in found}) == len(found)
    assert sum(shape.gpus for _, shape in found) == num_gpus
    for spot, shape in found:
        nodes.take(spot, shape)


def test_a_gang_has_whole_gpus() -> None:
    nodes = cluster()
    placement = CHOICES["fgd"].make(nodes, TypicalShapes([]), 0)
    with pytest.raises(ValueError, match="whole GPUs"):
        place_gang(nodes, Shape(1000, 0, 1, 500), 2, placement)


def test_a_thousand_decisions_on_a_large_cluster_are_no_matter() -> None:
    made_up, _ = made_up_cluster(0)
    coming = made_up_jobs("default", 0)
    outcome = replay(made_up, coming[:1000], "fgd", 0)
    assert outcome.decisions_per_s > 20  # thousands on an idle core


def test_growth_is_asked_for_once_where_nodes_are_alike() -> None:
    nodes = Nodes([64_000] * 500, [512] * 500, [8] * 500)
    looked: list[int] = []

    class Counting(TypicalShapes):
        def fragments(self, cpus_free, gpus_free, gpu_type):  # type: ignore[no-untyped-def]
            looked.append(len(cpus_free))
            return super().fragments(cpus_free, gpus_free, gpu_type)

    fgd = FragmentationGradient(nodes, Counting([Shape(8000, 0, 1)]))
    for _ in range(3):
        spot = fgd.choose(Shape(8000, 0, 1))
        assert spot is not None
        nodes.take(spot, Shape(8000, 0, 1))
    assert looked == [1, 1, 1, 1, 1, 1]
