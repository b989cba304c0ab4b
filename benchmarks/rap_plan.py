"""`python -m benchmarks.rap_plan`: schedules of preprocessing beside a model's layers: ours, the paper's, and HiGHS's.

Predicted times, of one training step on one GPU; nothing is measured but what the searches themselves take.
docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks import harness, machine
from benchmarks.harness import Row
from benchmarks.rap_cases import BATCH, problem_of, random_plan
from benchmarks.rap_highs import solve
from benchmarks.rap_plans import PLANS, PlanSize, make_plan
from hetstream.mpi_dataworkers.gpu_features.operations import A100, operations_of
from hetstream.mpi_dataworkers.gpu_features.schedule import Cost, Problem, cost_of, least_exposed_s, problems_of
from hetstream.mpi_dataworkers.gpu_features.search import algorithm_1, fuse, search

SIZES = (78, 117, 208, 390, 780, 1560)
# Needed, of what a model leaves: with a third of it free, tight, and more than there is.
PRESSURES = (0.75, 0.95, 1.1)
TIGHT = 0.95  # of plans, and of what is larger than so many operators
LARGE = 300
MOST_S = 30.0
LIMIT_S = 15.0
# Steps of a layer in the integer program, and in the search at least.
STEPS = 4
OWN, PAPER, PAPER_TWO, HIGHS = "hetstream", "RAP's Algorithm 1", "Algorithm 1, two resources", "HiGHS"


@dataclass(frozen=True)
class Result:
    """What one of them has found for a problem."""

    cost: Cost | None
    spent_s: float
    note: str = ""


def run(problem: Problem, limit_s: float) -> dict[str, Result]:
    """All of them on one problem.

    Raises:
        AssertionError: a schedule cannot be carried out.
    """
    began = time.perf_counter()
    fused = fuse(problem)
    papers = [algorithm_1(problem, fused, two_resources=both) for both in (False, True)]
    paper_s = time.perf_counter() - began
    began = time.perf_counter()
    found = search(problem, limit_s=limit_s)
    own_s = time.perf_counter() - began
    solved = solve(problem, [STEPS] * len(problem.layers), limit_s)
    for kernels in (*papers, found.kernels, *([solved.kernels] if solved.kernels else [])):
        assert not problems_of(problem, kernels), problems_of(problem, kernels)
    state = "proved to be the best" if solved.is_best else f"not proved; the least is {solved.bound_s * 1e6:.1f} us"
    return {
        OWN: Result(found.cost, own_s, found.reason),
        PAPER: Result(cost_of(problem, papers[0]), paper_s),
        PAPER_TWO: Result(cost_of(problem, papers[1]), paper_s),
        HIGHS: Result(solved.cost, solved.spent_s, state if solved.cost else f"no schedule in {limit_s:g} s"),
    }


def rows_of(case: str, problem: Problem, results: dict[str, Result]) -> list[Row]:
    """The rows of a problem; a schedule is better that exposes less, to the picosecond."""
    rows: list[Row] = []
    own = results[OWN]
    assert own.cost is not None
    for name, result in results.items():
        if result.cost is None:
            rows.append(Row(case, name, None, "us exposed", note=result.note))
            continue
        rows.append(Row(case, name, result.cost.exposed_s * 1e6, "us exposed", note=result.note))
        rows.append(Row(case, name, result.cost.num_kernels, "kernels"))
        if name != OWN:
            less = (own.cost.exposed_s - result.cost.exposed_s) * 1e6
            met = own.cost.rank[0] <= result.cost.rank[0]
            rows.append(Row(case, f"{OWN} less {name}", less, "us exposed", target="<= 0", met=met))
    rows.append(Row(case, "no schedule is better than", least_exposed_s(problem) * 1e6, "us exposed"))
    longer = 100 * own.cost.exposed_s / problem.training_s
    rows.append(Row(case, f"{OWN}: training step is longer", longer, "%"))
    rows.append(Row(case, OWN, own.spent_s, "s", target=f"< {MOST_S:g}", met=own.spent_s < MOST_S))
    rows.append(Row(case, HIGHS, results[HIGHS].spent_s, "s"))
    return rows


def seconds(text: str) -> float:
    """A time limit.

    Raises:
        ArgumentTypeError: it is none.
    """
    try:
        limit_s = float(text)
    except ValueError:
        limit_s = math.nan
    if not 0 < limit_s < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a finite number of seconds above 0")
    return limit_s


def main() -> int:
    """Run the benchmark."""
    own = harness.parser("Schedules of preprocessing beside a model's layers.", repeats=1)
    own.add_argument("--limit", type=seconds, default=LIMIT_S, help="seconds of each search (default: %(default)s)")
    own.add_argument("--add", action="store_true", help="to the report that --out has, if any: for runs in parts")
    args = own.parse_args()
    limit_s = 0.3 if args.quick else args.limit
    wanted = [text.strip().lower() for text in args.systems.split(",") if text.strip()]
    sizes: Sequence[PlanSize] = [*map(random_plan, SIZES), *PLANS]
    rows: list[Row] = []
    for size in sizes[:2] if args.quick else sizes:
        operations = operations_of(make_plan(size), BATCH, sum(size.list_length) / 2, A100)
        for pressure in PRESSURES if size.num_operators < LARGE and size not in PLANS else (TIGHT,):
            case = f"{size.name}, {pressure:.0%} needed"
            if wanted and not any(text in case.lower() for text in wanted):
                continue
            problem = problem_of(operations, A100, pressure)
            results = run(problem, limit_s)
            rows += rows_of(case, problem, results)
            found = (f"{name} {each.cost.exposed_s * 1e6:.1f}" for name, each in results.items() if each.cost)
            harness.say(f"  {case}: {', '.join(found)} us")
    notes = [
        "Predicted: what the preprocessing of a batch makes a training step longer, on one GPU.",
        f"Plans: {BATCH} rows, A100; random ones have lists of 32 to 64 ids. Needed: of what the model leaves.",
        "Layers: durations and room for memory traffic (embeddings) or arithmetic (MLPs) of RAP's published "
        "program, scaled; of the other resource 90 % (assumed).",
        f"Limits: {limit_s:g} s for the search, and for HiGHS as much.",
        "Algorithm 1 begins with kernels that are as large as they get; its time is not the solver's.",
    ]
    if args.add:
        rows, notes = harness.added("rap_plan", args.out, rows, notes)
    context = {"machine": machine.describe(), "versions": machine.versions("numpy", "scipy"), "notes": notes}
    return harness.finish("rap_plan", args.out, rows, {}, context, ("value", ""))


if __name__ == "__main__":
    sys.exit(main())
