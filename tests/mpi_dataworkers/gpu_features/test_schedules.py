"""Schedules of preprocessing beside a model's layers: never out of order, costs that add up, not worse than others."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.rap_cases import layers, problem_of, random_plan
from benchmarks.rap_highs import solve
from benchmarks.rap_plans import make_plan
from hetstream.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.operations import A100, operations_of
from hetstream.mpi_dataworkers.gpu_features.schedule import (
    Kernel,
    Layer,
    Operation,
    OperationPlacement,
    Problem,
    cost_of,
    least_exposed_s,
    problems_of,
    trees_of,
)
from hetstream.mpi_dataworkers.gpu_features.search import algorithm_1, fuse, gather, search

US = 1e-6


def chain(*kinds: str, memory_s: float = US, compute_s: float = US, first: int = 0) -> list[Operation]:
    """Operations of which each needs the one before it."""
    return [
        Operation(f"{first + at} {kind}", kind, first + at - 1 if at else -1, memory_s, compute_s)
        for at, kind in enumerate(kinds)
    ]


def chains(*all_kinds: str) -> tuple[Operation, ...]:
    """A chain for each text, of operations whose kinds are its letters."""
    found: list[Operation] = []
    for kinds in all_kinds:
        found += chain(*kinds, first=len(found))
    return tuple(found)


times = st.floats(0, 20).map(lambda number: number * US)
problems = st.builds(
    lambda steps, spaces, launch_s: Problem(
        tuple(
            Operation(f"{at} {kind}", kind, (parent % (at + 1)) - 1, memory_s, compute_s)
            for at, (kind, parent, memory_s, compute_s) in enumerate(steps)
        ),
        tuple(
            Layer(str(at), memory_s + compute_s, memory_s, compute_s) for at, (memory_s, compute_s) in enumerate(spaces)
        ),
        launch_s,
    ),
    st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 99), times, times), max_size=14),
    st.lists(st.tuples(times, times), min_size=1, max_size=4),
    times,
)


@pytest.mark.shows("schedules obey their laws, and the search is compared with HiGHS")
@settings(max_examples=60, deadline=None)
@given(problems, st.integers(0, 9))
def test_schedules_keep_dependencies_and_layers_and_say_what_they_cost(problem: Problem, seed: int) -> None:
    fused = fuse(problem, seed)
    papers = [algorithm_1(problem, fused, two_resources=both) for both in (False, True)]
    rounds = itertools.count()
    found = search(problem, seed=seed, limit_s=60, clock=lambda: float(next(rounds)))
    for kernels in (*papers, found.kernels):
        assert problems_of(problem, kernels) == []
        cost = cost_of(problem, kernels)
        assert cost.exposed_s >= least_exposed_s(problem) - 1e-12
        # What a layer has beyond its capacity is exposed, and nothing else.
        over = 0.0
        for layer, (memory_s, compute_s) in zip(problem.layers, cost.loads, strict=True):
            over += max(0.0, memory_s - layer.memory_s, compute_s - layer.compute_s)
        assert cost.exposed_s == pytest.approx(over, abs=1e-12)
        assert found.cost.rank[0] <= cost.rank[0], "never worse than the paper's"
        work = sum(each.memory_s for each in problem.operations) + problem.launch_s * len(kernels)
        assert sum(memory_s for memory_s, _ in cost.loads) == pytest.approx(work)


@settings(max_examples=40, deadline=None)
@given(problems, st.randoms(use_true_random=False))
def test_what_a_placement_counts_is_what_its_kernels_cost(problem: Problem, draw: Random) -> None:
    """Its sums are kept up to date by differences."""
    grid = OperationPlacement(problem, [len(problem.operations) + 1] * len(problem.layers))
    trees = list(range(len(grid.trees)))
    for attempt in range(3):
        draw.shuffle(trees)
        for tree in trees:
            if attempt:
                grid.remove(tree)
            grid.put(tree, lambda part: 1e-9 * (grid.counts[grid.kind_of[part]] + 1.0))
        kernels = grid.kernels()
        assert problems_of(problem, kernels) == []
        cost = cost_of(problem, kernels)
        assert grid.rank()[1] == cost.num_kernels
        assert grid.rank()[0] == pytest.approx(cost.exposed_s, abs=2e-12)


def test_a_schedule_that_cannot_be_carried_out_is_told_apart() -> None:
    problem = Problem(chains("ab", "a"), layers(), US)
    good = (Kernel(0, "a", (0, 2)), Kernel(1, "b", (1,)))
    assert problems_of(problem, good) == []
    for wrong, message in (
        ((Kernel(0, "a", (0, 2)),), "operation 1 b never runs"),
        ((*good, Kernel(2, "a", (2,))), "operation 2 a runs twice"),
        ((Kernel(0, "b", (1,)), Kernel(1, "a", (0, 2))), "operation 1 b runs before what it needs"),
        ((Kernel(1, "a", (0, 2)), Kernel(0, "b", (1,))), "kernel 1: its layer 0 is over when layer 1 has begun"),
        ((Kernel(0, "a", (0, 2)), Kernel(9, "b", (1,))), "kernel 1: there is no layer 9"),
        ((Kernel(0, "b", (0, 2)), Kernel(1, "b", (1,))), "operation 0 a is no b"),
        ((*good, Kernel(2, "a", ())), "kernel 2 is empty"),
    ):
        assert message in problems_of(problem, wrong)


def test_problems_that_make_no_sense_are_refused_at_once() -> None:
    good = chains("ab")
    for operations, message in (
        ((replace(good[0], parent=1), good[1]), "needs number 1, and is number 0 itself"),
        ((good[0], replace(good[1], memory_s=float("nan"))), "memory_s=nan"),
        ((good[0], replace(good[1], compute_s=-1.0)), "compute_s=-1.0"),
    ):
        with pytest.raises(FeatureError, match=message):
            Problem(operations, layers(), US)
    with pytest.raises(FeatureError, match="there is no layer"):
        Problem(good, (), US)
    with pytest.raises(FeatureError, match="launch_s=inf"):
        Problem(good, layers(), float("inf"))
    with pytest.raises(FeatureError, match="finite numbers of seconds"):
        Problem(good, (Layer("mlp", 1.0, float("nan"), 1.0),), US)
    assert search(Problem((), layers(), US)).kernels == ()


def test_kernels_are_as_large_as_they_get() -> None:
    """RAP's example of a conflict: FirstX before SigridHash in one feature, and after it in another."""
    problem = Problem(chains("ab", "ba", "ab"), layers(), US)
    sizes = sorted(len(operations) for _, operations in fuse(problem))
    assert sum(size**2 for size in sizes) == 14, (
        "both a before both b, and the other feature where it can join: 3, 2, 1"
    )
    alike = Problem(chains(*["abc"] * 20), layers(), US)
    assert [(kind, len(operations)) for kind, operations in fuse(alike)] == [("a", 20), ("b", 20), ("c", 20)]


@pytest.mark.shows("schedules obey their laws, and the search is compared with HiGHS")
def test_algorithm_1_cuts_a_kernel_where_a_layer_is_full() -> None:
    """A launch of 1 us and operations of 1 us each: 4 of 10 fit beside the first layer, 6 beside the second."""
    problem = Problem(chains(*["a"] * 10), (Layer("first", 1, 5 * US, 5 * US), Layer("second", 1, 8 * US, 8 * US)), US)
    kernels = algorithm_1(problem, fuse(problem))
    assert [(kernel.layer, len(kernel.operations)) for kernel in kernels] == [(0, 4), (1, 6)]
    assert cost_of(problem, kernels).exposed_s == 0


def test_two_resources_find_room_that_a_single_one_does_not_see() -> None:
    """Arithmetic beside embeddings, memory traffic beside MLPs: RAP's one number says that neither fits anywhere."""
    operations = (
        *chain("hash", memory_s=0.0, compute_s=8 * US),
        *chain("copy", memory_s=8 * US, compute_s=0.0, first=1),
    )
    rooms = (Layer("embedding", 20 * US, US, 10 * US), Layer("mlp", 20 * US, 10 * US, US))
    problem = Problem(operations, rooms, US)
    assert cost_of(problem, algorithm_1(problem, fuse(problem))).exposed_s > 7 * US
    assert search(problem).cost.exposed_s == 0


def test_trees_are_cut_into_paths_of_which_each_follows_its_parent() -> None:
    """A feature with two users: the taller one goes on, the other begins a path of its own."""
    operations = (
        Operation("0", "a", -1, US, US),
        Operation("1", "b", 0, US, US),
        Operation("2", "c", 0, US, US),
        Operation("3", "d", 2, US, US),
        Operation("4", "a", -1, US, US),
    )
    problem = Problem(operations, layers(), US)
    assert [[part.tolist() for part in parts] for parts in trees_of(problem)] == [[[0, 2, 3], [1]], [[4]]]
    assert problems_of(problem, search(problem).kernels) == []


def test_a_search_that_is_stopped_among_worse_schedules_gives_the_best() -> None:
    """It goes on with what is worse for a while; whenever the time is over, it is not worse than where it began."""
    problem = problem_of(operations_of(make_plan(random_plan(30)), 4096, 48.0, A100), A100, 0.95)
    ranks = []
    for limit_s in range(40, 340, 30):
        ticks = itertools.count()
        found = search(problem, limit_s=limit_s, clock=lambda ticks=ticks: float(next(ticks)))
        ranks.append(found.cost.rank)
    assert ranks == sorted(ranks, reverse=True)


@pytest.mark.shows("schedules obey their laws, and the search is compared with HiGHS")
@pytest.mark.slow
@pytest.mark.parametrize("pressure", [0.75, 0.95, 1.1])
def test_the_search_is_not_worse_than_an_exact_solver(pressure: float) -> None:
    problem = problem_of(operations_of(make_plan(random_plan(30)), 4096, 48.0, A100), A100, pressure)
    found = search(problem, limit_s=6)
    solved = solve(problem, [4] * len(problem.layers), limit_s=6)
    assert solved.kernels is not None
    assert problems_of(problem, solved.kernels) == []
    assert found.cost.rank[0] <= cost_of(problem, solved.kernels).rank[0]


def test_the_example_of_the_guide_runs_as_it_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).resolve().parents[3] / "docs/gpu-features.md").read_text()
    [example] = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "search(" in block]
    exec(example.replace("limit_s=2", "limit_s=0.2"), {})
    assert re.fullmatch(r"\d+ kernels, the step is \d+ us longer\n", capsys.readouterr().out)


def test_the_clock_ends_the_search_and_the_seed_decides() -> None:
    problem = problem_of(operations_of(make_plan(random_plan(120)), 4096, 48.0, A100), A100, 0.95)
    ticks = [itertools.count() for _ in range(2)]
    first, second = (search(problem, seed=4, limit_s=80, clock=lambda tick=tick: float(next(tick))) for tick in ticks)
    assert first == second
    assert first.reason == "the time was over"


def test_without_time_the_search_ends_with_the_first_schedules() -> None:
    problem = problem_of(operations_of(make_plan(random_plan(30)), 4096, 48.0, A100), A100, 0.95)
    found = search(problem, limit_s=0)
    assert problems_of(problem, found.kernels) == []
    assert found.reason == "the time was over"
    for limit_s in (-1.0, math.nan, "2"):
        with pytest.raises(FeatureError, match=f"limit_s={limit_s!r}: give a number, at least 0"):
            search(problem, limit_s=limit_s)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="operations='ab': give a tuple of Operation"):
        Problem("ab", layers(), US)  # type: ignore[arg-type]
    for kernels, words in (
        (3, "kernels=3: give a tuple of Kernel"),
        ((Kernel(99, "a", (0,)),), r"kernels\[0\]: layer=99: give a whole number, 0 to"),
        ((Kernel(0, "a", (9999,)),), r"kernels\[0\]: operation=9999: give a whole number, 0 to"),
    ):
        with pytest.raises(FeatureError, match=words):
            cost_of(problem, kernels)  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match=r"operation a: memory_s=1e\+300, compute_s=0: .* seconds, 0 to 1e\+09"):
        Problem((Operation("a", "a", -1, 1e300, 0),), layers(), US)
    with pytest.raises(FeatureError, match=r"operation a: kind=\[\]: a name"):
        Problem((Operation("a", [], -1, US, US),), layers(), US)  # type: ignore[arg-type]
    for made in (fuse, gather, search, least_exposed_s, lambda given: problems_of(problem, given)):
        with pytest.raises(FeatureError, match=r"(problem|operations|kernels)='x': give a "):
            made("x")  # type: ignore[operator]
    with pytest.raises(FeatureError, match="seed='x': give a whole number"):
        search(problem, seed="x")  # type: ignore[arg-type]
    with pytest.raises(FeatureError, match="operation a needs number nan"):
        Problem((Operation("a", "a", math.nan, US, US),), layers(), US)  # type: ignore[arg-type]


def test_a_closed_step_is_used_where_there_is_no_other() -> None:
    problem = Problem(chains("ab"), layers(), US)
    grid = OperationPlacement(problem, [1] * len(problem.layers))
    grid.put(0, lambda part: np.full((len(part), grid.num_steps), math.inf))
    assert problems_of(problem, grid.kernels()) == []
