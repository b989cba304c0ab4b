"""`python -m benchmarks.rap_map`: which of eight GPUs computes which feature, as in RAP's Figure 12. Simulated.

The tables of GPU 0 have features with more operators than others. Three mappings: every GPU takes its own rows (DP), a
feature is computed where its table is (DL), and that with moves. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from benchmarks import harness, machine
from benchmarks.harness import Row
from benchmarks.rap_cases import BATCH, layers, scaled
from benchmarks.rap_map_bound import least_exposed_s
from benchmarks.rap_plans import PLANS, TERABYTE_IDS, PlanSize, make_plan
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, jagged
from hetstream.mpi_dataworkers.features.operators import Ngram
from hetstream.mpi_dataworkers.gpu_features import launches as mapping
from hetstream.mpi_dataworkers.gpu_features.launches import Exchange, GpuGroup, Mapping, Model, Sparse
from hetstream.mpi_dataworkers.gpu_features.operations import A100, length_after, operations_of
from hetstream.mpi_dataworkers.gpu_features.schedule import Operation, Problem
from hetstream.mpi_dataworkers.gpu_features.search import gather, search

GPUS = 8
# NVIDIA's data sheet of the A100: NVLink carries 600 GB/s, half of it in each direction. What one exchange takes
# besides is assumed.
LINK_BYTES_PER_S, MESSAGE_S = 300e9, 20e-6
# In these layers of the model nothing goes over the links.
QUIET_LAYERS = ("mlp_fwd", "mlp_bwd")
# RAP's published program for plan 0: beside the exchange of gradients, 1.61 ms in which the GPU is idle, 74 of its
# Ngrams fit, for 4096 rows.
PUBLISHED_NGRAM_S, PUBLISHED_ROWS = 1.61e-3 / 74, 4096
# Operators as fast as memory lets them be, or as slow as the published ones; ids in a list, one as in the paper's data.
SETTINGS = (("RAP's operators", 1.0), ("fast operators", 1.0), ("fast operators", 48.0))
# Operators of a feature on GPU 0, times those of a feature elsewhere.
SKEWS = (2, 3, 4)
# What all GPUs together need of what the model leaves on all of them.
PRESSURES = (0.7, 0.9)
ROW_WISE = 4  # features whose table has rows on every GPU
# Of the search of a schedule, in CPU time, so that other processes change nothing: first of every GPU's, then of those
# that are the slowest.
LIMIT_S, SLOWEST_LIMIT_S = 0.3, 3.0
OPERATORS = 10  # of a feature, on average
DP, DL, OWN, DP_AHEAD = "data-parallel", "data-local", "hetstream", "data-parallel, exchange hidden"
BOUND = "no mapping is better than"
LEAST_US = 1.0  # what nothing counts as, in ratios
# Figure 12's reductions of what is exposed.
GOALS = {DP: 4.3, DL: 4.0}


def features(count: int, operators: int, list_length: float, seed: int) -> list[tuple[tuple[Operation, ...], float]]:
    """Sparse features with so many operators on average, and the bytes of each result, for the rows of all GPUs."""
    size = PlanSize(f"{count} features", TERABYTE_IDS, 0, count, count * operators, list_length=(32, 64))
    found: list[list[Operation]] = []
    places: list[tuple[int, int]] = []
    graph = make_plan(size, seed)
    lengths = {node.name: list_length for node in graph.inputs}
    for step in graph.order:
        lengths[step.name] = length_after(step.operator, lengths[step.of])
    for operation in operations_of(graph, BATCH * GPUS, list_length, A100):
        number = len(found) if operation.parent < 0 else places[operation.parent][0]
        if number == len(found):
            found.append([])
        parent = -1 if operation.parent < 0 else places[operation.parent][1]
        places.append((number, len(found[number])))
        memory_s, compute_s = operation.memory_s, operation.compute_s
        found[number].append(Operation(operation.name, operation.kind, parent, memory_s, compute_s))
    return [(tuple(chain), BATCH * GPUS * (lengths[chain[-1].name] + 1) * 8) for chain in found]


def model_of(skew: int, pressure: float, list_length: float, seed: int = 0, *, as_published: bool = False) -> Model:
    """Features on eight GPUs, and a model that leaves as much as `pressure` says."""
    num = PLANS[3].num_sparse
    own = num // GPUS
    chains = features(own, OPERATORS * skew, list_length, seed)
    chains += features(num - own, OPERATORS, list_length, seed + 1)
    slower = slowdown() if as_published else 1.0
    sparse = [
        Sparse(
            f"sparse{at}", slow(chain, slower), (at // own,) if at < num - ROW_WISE else tuple(range(GPUS)), num_bytes
        )
        for at, (chain, num_bytes) in enumerate(chains)
    ]
    dense_plan = PlanSize("dense", TERABYTE_IDS, PLANS[3].num_dense, 0, PLANS[3].num_dense * OPERATORS)
    dense = slow(operations_of(make_plan(dense_plan), BATCH, 1.0, A100), slower)
    model = Model(cluster_of(1.0), tuple(sparse), dense)
    needed = _needed_s(model)
    factor = max(needed[name] / sum(getattr(layer, name) for layer in layers()) for name in needed) / pressure
    return Model(cluster_of(factor), model.sparse, dense)


def cluster_of(factor: float) -> GpuGroup:
    """Eight GPUs whose model takes, and leaves, so many times what the published one does."""
    found = tuple(scaled(layer, factor) for layer in layers())
    quiet_s = sum(layer.duration_s for layer in found if layer.name in QUIET_LAYERS)
    return GpuGroup(GPUS, found, A100.launch_s, LINK_BYTES_PER_S, MESSAGE_S, quiet_s)


def slowdown() -> float:
    """How many times as long as by the cost model RAP's Ngram takes."""
    graph = FeatureGraph.of({"ids": jagged("ids") >> Ngram(3)})
    [ngram] = operations_of(graph, PUBLISHED_ROWS, 1.0, A100)
    return PUBLISHED_NGRAM_S / ngram.alone_s


def slow(operations: Sequence[Operation], times: float) -> tuple[Operation, ...]:
    """Operations that take so many times as long."""
    return tuple(replace(each, memory_s=each.memory_s * times, compute_s=each.compute_s * times) for each in operations)


def _needed_s(model: Model) -> dict[str, float]:
    """What each GPU needs if all of them do the same, each with its own kernels, by resource."""
    local = mapping.data_local(model)
    launches = max(len(gather(model.problem(local, gpu).operations, powers=(0,))) for gpu in range(1, GPUS))
    needed = {}
    for name in ("memory_s", "compute_s"):
        sparse = sum(getattr(each, name) for feature in model.sparse for each in feature.operations)
        own = sum(getattr(each, name) for each in model.dense)
        needed[name] = sparse / GPUS + own + launches * A100.launch_s
    return needed


def main() -> int:
    """Run the benchmark."""
    own = harness.parser("Which of eight GPUs computes which feature. Simulated.", repeats=1)
    own.add_argument("--add", action="store_true", help="to the report that --out has, if any: for runs in parts")
    args = own.parse_args()
    limits_s = (0.05, 0.05) if args.quick else (LIMIT_S, SLOWEST_LIMIT_S)
    wanted = [text.strip().lower() for text in args.systems.split(",") if text.strip()]
    cases = list(itertools.product(SETTINGS, SKEWS, PRESSURES))
    rows: list[Row] = []
    for (operators, list_length), skew, pressure in cases[:1] if args.quick else cases:
        case = f"{operators}, lists of {list_length:g}, skew {skew} at {pressure:.0%}"
        if wanted and not any(text in case.lower() for text in wanted):
            continue
        exposed: dict[str, list[float]] = {name: [] for name in (DP, DL, OWN, DP_AHEAD, BOUND)}
        spent: list[float] = []
        moves: list[float] = []
        for seed in range(1 if args.quick else args.repeats):
            model = model_of(skew, pressure, list_length, 10 * seed, as_published=operators == SETTINGS[0][0])
            began = time.perf_counter()
            chosen = mapping.balanced(model)
            spent.append(time.perf_counter() - began)
            moves.append(chosen.moves)
            mappings = {DP: mapping.data_parallel(model), DL: mapping.data_local(model), OWN: chosen}
            mappings[DP_AHEAD] = mapping.data_parallel(model, in_step=False)
            known: _Schedules = {}
            for name, each in mappings.items():
                exposed[name].append(slowest_s(model, each, *limits_s, known) * 1e6)
            exposed[BOUND].append(least_exposed_s(model) * 1e6)
        rows += rows_of(case, exposed, spent, moves)
    notes = [
        "Simulated: a cost model of eight A100s, no GPU. What the slowest GPU's training step is longer, in us: the "
        "exchange of features, and preprocessing that its layers leave no room for. Each GPU's schedule is searched.",
        f"{PLANS[3].num_sparse} sparse features of {OPERATORS} operators on average, "
        f"{ROW_WISE} of them on tables whose rows are on all GPUs; {PLANS[3].num_dense} dense ones. GPU 0: features "
        f"with SKEW times the operators. {BATCH} rows for each GPU.",
        f"RAP's operators: all take {slowdown():.0f} times what memory and arithmetic allow, so that Ngram takes the "
        f"{PUBLISHED_NGRAM_S * 1e6:.1f} us of RAP's published program.",
        f"NVLink: {LINK_BYTES_PER_S / 1e9:g} GB/s in each direction (data sheet); {MESSAGE_S * 1e6:g} us an exchange "
        "(assumed). The data-parallel mapping exchanges in the step, as the paper says of its baselines; the others "
        "for the next batch, beside the MLPs. Room: as in rap_plan, scaled so that all GPUs together need so much, "
        "with the launches of a plain greedy fusion: a schedule that needs fewer of them has more room than that.",
        "SKEW at so many percent: what all GPUs together need of what the model leaves on all of them.",
        "Figure 12 (measured there, one skew that the paper does not give): 4.3 x less than DP, 4.0 x less than DL.",
    ]
    if args.add:
        rows, notes = harness.added("rap_map", args.out, rows, notes)
    context = {"machine": machine.describe(), "versions": machine.versions("numpy"), "notes": notes}
    return harness.finish("rap_map", args.out, rows, {}, context)


# Of each problem, what its best schedule exposes, and how long that was searched for.
_Schedules = dict[Problem, tuple[float, float]]


def slowest_s(
    model: Model, chosen: Mapping, limit_s: float, slowest_limit_s: float, known: _Schedules | None = None
) -> float:
    """What the slowest GPU's training step is longer; a schedule for it is searched for longer than for others."""
    schedules: _Schedules = {} if known is None else known
    exchanges = model.exchanges(chosen)
    taken = Exchange.duration_s if chosen.in_step else Exchange.exposed_s

    def exposed_s(gpu: int, of_search_s: float) -> tuple[float, float]:
        problem = model.problem(chosen, gpu)
        best_s, searched_s = schedules.get(problem, (math.inf, 0.0))
        if searched_s < of_search_s:
            found = search(problem, limit_s=of_search_s, clock=time.process_time)
            best_s, searched_s = min(best_s, found.cost.exposed_s), of_search_s
            schedules[problem] = best_s, searched_s
        return best_s + taken(exchanges[gpu], model.cluster), searched_s

    found = [exposed_s(gpu, limit_s) for gpu in range(model.cluster.num_gpus)]
    while True:
        worst = max(range(len(found)), key=lambda gpu: found[gpu][0])
        if found[worst][1] >= slowest_limit_s:
            return found[worst][0]
        found[worst] = exposed_s(worst, slowest_limit_s)


def rows_of(case: str, exposed: dict[str, list[float]], spent: list[float], moves: list[float]) -> list[Row]:
    """Rows of a case; what nothing is exposed of counts as `LEAST_US`."""
    rows = [harness.row_of(case, name, values, "us exposed, simulated") for name, values in exposed.items()]
    for name, goal in GOALS.items():
        pairs = [
            (other, own, least) for other, own, least in zip(exposed[name], exposed[OWN], exposed[BOUND], strict=True)
        ]
        ratios = [other / max(own, LEAST_US) for other, own, _ in pairs if other]
        most = [other / max(least, LEAST_US) for other, _, least in pairs if other]
        if not ratios:
            rows.append(Row(case, f"{name} / {OWN}", None, "x", note="nothing is exposed: nothing to gain"))
            continue
        possible = statistics.median(most)
        note = f"no mapping has more than {possible:.3g}" + ", so none reaches it" * (possible < goal)
        rows.append(replace(harness.row_of(case, f"{name} / {OWN}", ratios, "x", at_least=goal), note=note))
    rows.append(harness.row_of(case, OWN, spent, "s for the mapping"))
    rows.append(harness.row_of(case, OWN, moves, "moves"))
    text = ", ".join(f"{name} {min(values):.1f} .. {max(values):.1f}" for name, values in exposed.items())
    harness.say(f"  {case}: {text} us")
    return rows


if __name__ == "__main__":
    sys.exit(main())
