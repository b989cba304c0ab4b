"""Features on several GPUs: what is sent, and moves that never make the slowest GPU slower."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rap_cases import layers
from benchmarks.rap_map import model_of
from benchmarks.rap_map_bound import least_exposed_s as least_of_any
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.launches import (
    GpuGroup,
    Mapping,
    Model,
    Sparse,
    balanced,
    data_local,
    data_parallel,
    estimate_s,
)
from hetstream.mpi_dataworkers.gpu_features.schedule import Layer, Operation, Problem, filled_s, least_exposed_s
from hetstream.mpi_dataworkers.gpu_features.search import fuse, gather

US = 1e-6
ROOM = (Layer("all", 100 * US, 10 * US, 10 * US),)


def cluster(num_gpus: int) -> GpuGroup:
    """GPUs that leave 10 us each, and send 1 MB in 1 us; an exchange takes 2 us more."""
    return GpuGroup(num_gpus, ROOM, launch_s=0.0, link_bytes_per_s=1e12, message_s=2 * US)


def feature(name: str, work_s: float, *tables: int, num_bytes: float = 1e6) -> Sparse:
    """A feature with one operator."""
    return Sparse(name, (Operation(name, "hash", -1, work_s, work_s),), tables, num_bytes)


def test_what_each_mapping_sends() -> None:
    model = Model(cluster(4), (feature("a", US, 0), feature("b", US, 1, 2)))
    assert all(exchange.duration_s(model.cluster) == 0 for exchange in model.exchanges(data_local(model)))
    parallel = model.exchanges(data_parallel(model))
    # A quarter of each feature is on the right GPU already; b goes to two GPUs.
    assert [exchange.received for exchange in parallel] == [750e3, 750e3, 750e3, 0]
    assert [exchange.sent for exchange in parallel] == [500e3, 500e3, 500e3, 750e3]
    elsewhere = model.exchanges(Mapping(((3,), (1,))))
    assert [(exchange.sent, exchange.received) for exchange in elsewhere] == [(0, 1e6), (1e6, 0), (0, 1e6), (1e6, 0)]
    assert elsewhere[0].duration_s(model.cluster) == pytest.approx(3 * US)


def test_a_feature_leaves_a_crowded_gpu_where_sending_it_is_worth_it() -> None:
    """18 us of work beside 10 us of room: 8 are exposed. One feature elsewhere costs 3 us of exchange."""
    crowded = Model(cluster(2), tuple(feature(f"f{at}", 9 * US, 0) for at in range(2)))
    chosen = balanced(crowded)
    assert chosen.moves == 1
    assert sorted(chosen.places or ()) == [(0,), (1,)]
    assert max(crowded.exposed_s(chosen, estimate_s)) == pytest.approx(3 * US)
    heavy = tuple(feature(f"f{at}", 6 * US, 0, num_bytes=1e9) for at in range(2))
    assert balanced(Model(cluster(2), heavy)).moves == 0, "a feature of a gigabyte stays"


@pytest.mark.shows("features are placed on eight GPUs of a model")
def test_a_table_whose_rows_are_on_all_gpus_is_fed_by_the_gpus_that_have_time() -> None:
    """It begins on both GPUs; the crowded one then gets it from the other."""
    model = Model(cluster(2), (feature("shared", 6 * US, 0, 1), feature("own", 12 * US, 0, num_bytes=6e6)))
    chosen = balanced(model)
    assert chosen.places == ((1,), (0,))
    before, after = (max(model.exposed_s(each, estimate_s)) for each in (data_local(model), chosen))
    assert before == pytest.approx(8 * US)
    assert after == pytest.approx(5 * US)


features = st.lists(
    st.tuples(st.floats(0, 9), st.sets(st.integers(0, 3), min_size=1), st.floats(0, 5)), min_size=1, max_size=9
)


@pytest.mark.shows("features are placed on eight GPUs of a model")
@settings(max_examples=50, deadline=None)
@given(features)
def test_moves_never_make_the_slowest_gpu_slower_and_lose_nothing(drawn: list[tuple[float, set[int], float]]) -> None:
    model = Model(
        cluster(4),
        tuple(
            feature(f"f{at}", work * US, *sorted(tables), num_bytes=size * 1e6)
            for at, (work, tables, size) in enumerate(drawn)
        ),
    )
    chosen = balanced(model)
    found = chosen.places or ()
    assert all(places and set(places) <= {0, 1, 2, 3} and len(set(places)) == len(places) for places in found)
    local, moved = (max(model.exposed_s(each, estimate_s)) for each in (data_local(model), chosen))
    assert moved <= local + 1e-12
    assert least_of_any(model) <= moved + 1e-12
    exchanges = model.exchanges(chosen)
    assert sum(each.sent for each in exchanges) == pytest.approx(sum(each.received for each in exchanges))


@pytest.mark.shows("features are placed on eight GPUs of a model")
def test_no_mapping_is_better_than_the_bound() -> None:
    for seed in range(25):
        draw = random.Random(seed)
        sparse = tuple(
            Sparse(
                f"f{at}",
                tuple(
                    Operation(f"f{at}.{number}", "hash", number - 1, draw.uniform(0, 4) * US, draw.uniform(0, 4) * US)
                    for number in range(draw.randint(1, 4))
                ),
                (draw.choice((0, 0, 1)),) if draw.random() < 0.8 else (0, 1),
                draw.choice((1e5, 1e6, 3e6)),
            )
            for at in range(5)
        )
        dense = (Operation("dense", "clamp", -1, 2 * US, US),)
        whole = replace(cluster(2), launch_s=draw.choice((0.0, US)), free_link_s=draw.choice((0.0, 3 * US)))
        model = Model(whole, sparse, dense)
        every = (Mapping(places) for places in itertools.product(((0,), (1,), (0, 1)), repeat=len(sparse)))
        least = min(max(model.exposed_s(each, least_exposed_s)) for each in every)
        assert least_of_any(model) <= least + 1e-12, f"seed {seed}"
        chosen = balanced(model)
        assert max(model.exposed_s(chosen, estimate_s)) <= max(model.exposed_s(data_local(model), estimate_s)) + 1e-12


def test_an_exchange_for_the_next_batch_is_hidden_where_links_are_free() -> None:
    model = Model(replace(cluster(2), free_link_s=4 * US), (feature("a", 16 * US, 0), feature("b", 16 * US, 0)))
    in_step, ahead = data_parallel(model), data_parallel(model, in_step=False)
    assert max(model.exposed_s(in_step, estimate_s)) == pytest.approx((6 + 3) * US)
    assert max(model.exposed_s(ahead, estimate_s)) == pytest.approx(6 * US)
    assert balanced(Model(model.cluster, (feature("a", 18 * US, 0),))).places is None, "each computes its own rows"


def test_launches_fill_what_layers_leave_of_both_resources() -> None:
    """Six launches of 5 us fit in neither layer: one leaves no traffic, the other one no arithmetic."""
    operations = tuple(Operation(f"x{at}", f"kind{at}", at - 1, 0.0, 0.0) for at in range(6))
    problem = Problem(operations, (Layer("a", US, 30 * US, 10 * US), Layer("b", US, 10 * US, 30 * US)), 5 * US)
    assert least_exposed_s(problem) == pytest.approx(10 * US)
    assert filled_s(problem, 2) == pytest.approx(-10 * US), "so much is left"


def test_tables_must_be_somewhere() -> None:
    for tables in ((), (4,), (0, -1)):
        with pytest.raises(FeatureError, match="clicks: tables="):
            Model(cluster(4), (feature("clicks", US, *tables),))


def test_launches_are_estimated_near_what_fusing_finds() -> None:
    model = model_of(2, 0.7, 48.0)
    problem = model.problem(data_local(model), 1)
    launches = len(gather(problem.operations))
    assert launches <= 1.3 * len(fuse(problem))
    whole = Problem(problem.operations, layers(), 5 * US)
    assert estimate_s(whole) >= least_exposed_s(whole)
    assert gather(()) == []


def test_long_chains_among_short_ones_are_not_left_over() -> None:
    """One chain of a and b in turn, beside many of one c: what most of them are is not what must be next."""
    short = [Operation(f"short{at}", "c", -1, US, US) for at in range(3)]
    long = [Operation(f"long{at}", "ab"[at % 2], len(short) + at - 1 if at else -1, US, US) for at in range(4)]
    last = Operation("last", "c", len(short) + 3, US, US)
    operations = (*short, *long, last)
    assert [kind for kind, _ in gather(operations, powers=(0,))] == ["c", "a", "b", "a", "b", "c"]
    assert [kind for kind, _ in gather(operations)] == ["a", "b", "a", "b", "c"]


# The search takes 13 s of CPU time for each.
@pytest.mark.slow
@pytest.mark.parametrize(("as_published", "length"), [(True, 1.0), (False, 48.0)], ids=["as published", "long lists"])
def test_skewed_features_of_eight_gpus_are_spread(as_published: bool, length: float) -> None:
    """As Figure 12: one GPU has features with more operators."""
    model = model_of(4, 0.9, length, as_published=as_published)
    mappings = data_parallel(model), data_local(model), balanced(model)
    parallel, local, own = (max(model.exposed_s(each, estimate_s)) for each in mappings)
    assert parallel > 4.3 * own
    assert local > 4 * own


def test_clusters_and_features_that_cannot_be_are_refused() -> None:
    known: dict[str, Any] = {"num_gpus": 2, "layers": ROOM, "launch_s": 0.0, "link_bytes_per_s": 1e12, "message_s": US}
    for name, value in (
        ("num_gpus", 0),
        ("num_gpus", 2.5),
        ("link_bytes_per_s", 0.0),
        ("link_bytes_per_s", -1.0),
        ("link_bytes_per_s", math.nan),
        ("message_s", math.nan),
        ("message_s", -US),
        ("free_link_s", math.inf),
    ):
        with pytest.raises(FeatureError, match=f"Cluster: {name}={value}: give a"):
            GpuGroup(**known | {name: value})
    for num_bytes in (math.nan, -1.0):
        with pytest.raises(FeatureError, match="feature a: num_bytes="):
            feature("a", US, 0, num_bytes=num_bytes)
    with pytest.raises(FeatureError, match=r"feature a: tables=\(0, 0\).*each once"):
        Model(cluster(2), (feature("a", US, 0, 0),))
    with pytest.raises(FeatureError, match=r"sparse\[0\]=3: give a Sparse"):
        Model(cluster(2), (3,))  # type: ignore[arg-type]
    for mapping_of in (balanced, data_local, data_parallel):
        with pytest.raises(FeatureError, match="model='model': give a Model"):
            mapping_of("model")  # type: ignore[operator]
    with pytest.raises(FeatureError, match="problem='x': give a Problem"):
        estimate_s("x")  # type: ignore[arg-type]


@pytest.mark.shows("wrong types and senseless numbers are refused at every entry of GPU features")
def test_a_mapping_of_another_model_is_refused() -> None:
    model = Model(cluster(4), (feature("a", US, 0), feature("b", US, 1, 2)))
    for mapping, words in (
        ("x", "mapping='x': give a Mapping"),
        (Mapping(((0,),)), "places of 1 features, and the model 2: it is another model's"),
        (Mapping(((0,), (4,))), r"feature b: places=\(4,\) of 4 GPUs: name one at least"),
        (Mapping(((0,), ())), r"feature b: places=\(\) of 4 GPUs"),
        (Mapping(((0,), ("1",))), r"feature b: places\[0\]='1': give a int"),  # type: ignore[arg-type]
        (Mapping((0, 1)), r"mapping.places\[0\]=0: give a tuple"),  # type: ignore[arg-type]
    ):
        for used in (
            model.exchanges,
            lambda each: model.problem(each, 0),
            lambda each: model.exposed_s(each, estimate_s),
        ):
            with pytest.raises(FeatureError, match=words):
                used(mapping)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="gpu=4: give a whole number, 0 to 3"):
        model.problem(data_local(model), 4)
    with pytest.raises(FeatureError, match="exposed=3: give a function"):
        model.exposed_s(data_local(model), 3)  # type: ignore[arg-type]
