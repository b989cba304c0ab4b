"""`make bench-embedding`: what does a training pay for embeddings that lie on CPU nodes?

DLRM and DeepFM on batches like Criteo's, on hosts of their own (network namespaces) over links of 1 and 10 Gbit/s.
Needs root for those, and the environment of peers' tests for torchrec. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from typing import Any

from benchmarks import harness, machine
from benchmarks.clients.embedding_models import HOT_ROWS, Criteo, hot_share, sizes
from benchmarks.harness import Goal, Metric, Row, System, Target

AHEAD, LESS, NONE_KEPT, KEPT = (
    "servers, 16 ahead",
    "servers, 1 ahead",
    "servers, on demand",
    "servers, on demand, cache",
)
MADE, LARGE, LOCAL = "servers, 16 ahead, lookups made", "servers, 16 ahead, 20 % cache", "hetstream in the ranks"
MODULE, TORCHREC, RPC = "nn.EmbeddingBag in one process", "torchrec", "torch RPC server"
NOBODY, WIRE = "limit: step without embeddings", "limit: one TCP connection"
BOUND = "limit: max(in-process step, bytes / link)"
SERVER_SYSTEMS = (AHEAD, LESS, NONE_KEPT, KEPT, MADE, LARGE)
SHARE, LARGE_SHARE = 0.05, 0.2
BATCH_SIZE, DIM, WIDTH, DIVISOR, ACCELERATOR_MS = 2048, 64, 64, 40, 5.0
ADD, KILL, SAVE, QUIET = (
    "a server is added",
    "a server is killed",
    "generation, restored on 3 servers",
    "nothing happens",
)
EQUAL = "losses"
# A step's rows at least, or there is no step: so nothing of use stays between two.
_STEP_SHARE = 0.015
_TOLERANCE = 1e-5


def _systems() -> list[System]:
    root = "" if os.geteuid() == 0 else "network namespaces need root"
    torchrec = root or ("" if importlib.util.find_spec("torchrec") else "not installed: make .venv-peers-tests/.ready")
    client = ("unshare", "--net", sys.executable, "-m", "benchmarks.clients.embedding")
    names = (NOBODY, WIRE, MODULE, LOCAL, *SERVER_SYSTEMS, RPC, TORCHREC)
    return [System(name, (*client, name), torchrec if name == TORCHREC else root) for name in names]


def _options(world: int) -> dict[str, dict[str, Any]]:
    """What each system is asked for."""
    served = {"holder": "hetstream", "servers": 2}
    first, second = machine.two_cores()
    # One trainer has a core; of several ranks and servers nobody does.
    cores = ([first], [second]) if world == 1 else ([first, second], [first, second])
    return {
        "": {"world": world, "cores": cores[0], "server_cores": cores[1]},
        NOBODY: {"holder": "nobody"},
        WIRE: {"holder": "wire"},
        MODULE: {"holder": "module"},
        LOCAL: {"holder": "hetstream"},
        AHEAD: served,
        LESS: served | {"lookahead": 1},
        KEPT: served | {"lookahead": 0},
        NONE_KEPT: served | {"lookahead": 0, "cache_share": _STEP_SHARE},
        MADE: served | {"lookups_made": True},
        LARGE: served | {"cache_share": LARGE_SHARE},
        RPC: {"holder": "rpc"},
        TORCHREC: {"holder": "torchrec"},
    }


def _cases(quick: bool) -> dict[str, dict[str, Any]]:
    steps = {"warmup": 4, "steps": 4} if quick else {"warmup": 60, "steps": 80}
    cases: dict[str, dict[str, Any]] = {}
    for model, world, mbit in (
        ("DLRM", 1, 1000), ("DLRM", 1, 10_000), ("DLRM", 2, 1000), ("DLRM", 4, 1000),
        ("DeepFM", 1, 1000), ("accelerator", 1, 1000), ("accelerator", 1, 10_000),
    ):  # fmt: skip
        case = f"{model}, {world} rank{'s' * (world > 1)}, {mbit // 1000} Gbit/s"
        options = _options(world)
        cases[case] = {"model": model, "mbit": mbit, **steps, **options.pop(""), **options}
    return dict(list(cases.items())[:1]) if quick else cases


def _events(quick: bool) -> dict[str, dict[str, Any]]:
    own = {**_options(1)[""], "holder": "hetstream", "model": "accelerator", "mbit": 10_000, "warmup": 50}
    events = {QUIET: "none", ADD: "add", KILL: "kill", SAVE: "save"}
    steps = {"none": 400, "save": 100}
    return {
        case: {**own, "event": event, "steps": 100 if quick else steps.get(event, 800)}
        for case, event in events.items()
    }


def main() -> int:
    """Run the benchmark."""
    parser = harness.parser("Embeddings on CPU nodes.", repeats=1)
    parser.add_argument("--part", choices=("steps", "losses", "events"), help="one of the three (default: all)")
    parser.add_argument("--cases", default="", metavar="A;B", help="only cases that begin so")
    parser.add_argument("--add", action="store_true", help="to the report that there is: it is made in parts")
    args = parser.parse_args()
    every = _systems()
    systems = harness.chosen(every, args.systems)
    cases = _cases(args.quick) if args.part in (None, "steps") else {}
    if args.cases:
        cases = {case: options for case, options in cases.items() if case.startswith(tuple(args.cases.split(";")))}
    single = [case for case, options in cases.items() if options["world"] == 1]
    request = {
        "dim": DIM, "width": WIDTH, "batch_size": BATCH_SIZE, "divisor": DIVISOR, "cache_share": SHARE,
        "lookahead": 16, "lookups_made": False, "accelerator_ms": ACCELERATOR_MS,
    }  # fmt: skip
    described = machine.describe(trainer=machine.two_cores()[:1], servers=machine.two_cores()[1:])
    taking_part = [
        System(one.name, one.argv, one.missing, tuple(single if one.name in (MODULE, RPC) else cases))
        for one in systems
    ]
    repeats = 1 if args.quick else args.repeats
    results = harness.collect(
        taking_part, cases, request, repeats, 1500.0,
        lambda _case, sample: f"{sample.get('step_ms', sample.get('mbit_s', 0)):.1f}",
    )  # fmt: skip
    _bound(results)
    bounded = tuple({case for case, name, _ in results.samples if name == BOUND})
    shown = [*taking_part, *([System(BOUND, cases=bounded)] if bounded else [])]
    names = tuple(cases)
    metrics = [
        Metric("own_ms", "ms a step, less what others took", names),
        Metric("step_ms", "ms a step", names),
        Metric("mb_a_step", "MB a step received or sent", names),
        Metric("hits_percent", "% of rows at hand", names),
        Metric("wait_ms", "ms a step waiting for rows", names),
        Metric("wait_percent", "% of a step waiting for rows", names),
        Metric("cpu_ms", "CPU-ms a step of rank 0", names),
        Metric("mbit_s", "Mbit/s", names),
        Metric("gain", "x on demand, by bytes and CPU time alone", names),
    ]
    rows = harness.rows_of(results, shown, metrics, _targets(cases, single))
    goals = [
        Goal(case, system, "% of a step waiting for rows", at_most=5)
        for case in single
        for system in (AHEAD, MADE)
        if _wire_allows(results, case)
    ]
    notes = _notes()
    if args.part in (None, "losses"):
        rows += _losses(every, request, results, notes)
    if args.part in (None, "events"):
        rows += _event_rows(every, request, args.quick, repeats, results)
        goals += [
            Goal(ADD, AHEAD, "ms, longest step", at_most=100),
            Goal(KILL, AHEAD, "s waiting for rows, all steps", at_most=3),
            Goal(SAVE, AHEAD, "steps that differ", at_most=0),
        ]  # fmt: skip
    for goal in goals:
        rows = [goal.judge(row) for row in rows]
    if args.add:
        rows, notes = harness.added("embedding", args.out, rows, notes)
    context = {
        "machine": described,
        "versions": machine.versions("torch", "torchrec", "fbgemm-gpu-cpu"),
        "notes": notes,
    }
    return harness.finish("embedding", args.out, rows, results.failures, context)


def _targets(cases: dict[str, dict[str, Any]], single: list[str]) -> list[Target]:
    targets = []
    for case in cases:
        targets += [Target(case, TORCHREC, AHEAD, "own_ms"), Target(case, KEPT, AHEAD, "own_ms")]
        # How much faster: 3 where the link is the slow one.
        slow = case in single and cases[case]["mbit"] == 1000
        targets.append(Target(case, NONE_KEPT, AHEAD, "own_ms", at_least=3.0 if slow else None))
    for case in single:
        targets += [
            Target(case, RPC, AHEAD, "own_ms"), Target(case, AHEAD, BOUND, "own_ms"),
            Target(case, LOCAL, MODULE, "own_ms", at_most=1.2), Target(case, LARGE, MODULE, "own_ms", at_most=1.2),
            Target(case, MADE, MODULE, "own_ms", at_most=1.2),
        ]  # fmt: skip
    return targets


def _bound(results: harness.Results) -> None:
    """Add what no step on servers is shorter than with the bytes that it moves, and shares of waiting."""
    for (case, system, repeat), sample in list(results.samples.items()):
        if "wait_ms" in sample:
            results.samples[case, system, repeat] = {
                **sample,
                "wait_percent": 100 * sample["wait_ms"] / sample["step_ms"],
            }
        of = {name: results.samples.get((case, name, repeat)) for name in (AHEAD, NONE_KEPT, LOCAL, WIRE)}
        if system == AHEAD and of[LOCAL] and of[WIRE]:
            wire_ms = 8e3 * of[AHEAD]["mb_a_step"] / of[WIRE]["mbit_s"]
            bound = {"own_ms": max(of[LOCAL]["own_ms"], wire_ms), "mb_a_step": of[AHEAD]["mb_a_step"]}
            if of[NONE_KEPT]:
                fetch_ms = 8e3 * of[NONE_KEPT]["mb_a_step"] / of[WIRE]["mbit_s"]
                bound["gain"] = (of[LOCAL]["own_ms"] + fetch_ms) / bound["own_ms"]
            results.samples[case, BOUND, repeat] = {**bound, "wire_ms": wire_ms}


def _wire_allows(results: harness.Results, case: str) -> bool:
    """Whether the link moves a step's bytes within what the rest of the step takes."""
    bounds = [sample for (of, name, _), sample in results.samples.items() if (of, name) == (case, BOUND)]
    return all(sample["wire_ms"] < sample["own_ms"] for sample in bounds)


def _losses(systems: list[System], request: dict[str, Any], results: harness.Results, notes: list[str]) -> list[Row]:
    """Compare losses: with one rank each bit, with several within a tolerance."""
    rows = []
    for world in (1, 2):
        options = _options(world)
        options[MODULE] = {"holder": "module", "dense": True, "world": 1}
        case = f"{EQUAL}, {world} rank{'s' * (world > 1)}"
        asked = {case: {"model": "DLRM", "mbit": 10_000, "warmup": 5, "steps": 20, **options.pop(""), **options}}
        names = {MODULE, LOCAL, AHEAD, NONE_KEPT, TORCHREC} | ({RPC} if world == 1 else set())
        found = harness.collect(
            [one for one in systems if one.name in names], asked, request, 1, 600.0,
            lambda _case, sample: f"{sample['losses'][-1]:.9g}",  # type: ignore[index]
        )  # fmt: skip
        results.failures |= found.failures
        of = {name: sample["losses"] for (_, name, _), sample in found.samples.items()}
        for name in of.keys() - {MODULE}:
            differ = max(abs(one - other) for one, other in zip(of[name], of[MODULE], strict=True))  # type: ignore[call-overload]
            is_ours, most = name in (LOCAL, AHEAD, NONE_KEPT), 0.0 if world == 1 else _TOLERANCE
            unit = "millionths that a loss differs at most"
            rows.append(harness.row_of(case, name, [1e6 * differ], unit, at_most=1e6 * most if is_ours else None))
    notes.append(
        "Losses: 25 steps beside nn.EmbeddingBag with dense gradients in one process, whose bits are to be met with "
        f"one rank; with two ranks (the mean of both) {_TOLERANCE:g} is allowed. Other rows have nn.EmbeddingBag "
        "with sparse gradients, which is faster."
    )
    return rows


def _event_rows(
    systems: list[System], request: dict[str, Any], quick: bool, repeats: int, results: harness.Results
) -> list[Row]:
    cases = _events(quick)
    (system,) = [one for one in systems if one.name == AHEAD]
    found = harness.collect([system], cases, request, repeats, 1500.0, lambda _case, sample: f"{sample['step_ms']:.1f}")
    results.failures |= found.failures
    metrics = (
        Metric("usual_ms", "ms, median step", (QUIET, ADD, KILL)),
        Metric("pause_ms", "ms, longest step", (QUIET, ADD, KILL)),
        Metric("lost_s", "s lost in longer steps", (QUIET, ADD, KILL)),
        Metric("waited_s", "s waiting for rows, all steps", (QUIET, ADD, KILL)),
        Metric("rows_there", "rows on the new server", (ADD,)),
        Metric("save_ms", "ms, save", (SAVE,)),
        Metric("load_ms", "ms, restore", (SAVE,)),
        Metric("steps_that_differ", "steps that differ", (SAVE,)),
    )
    return harness.rows_of(found, [system], metrics, ())


def _notes() -> list[str]:
    nums = sizes(DIVISOR)
    share = hot_share(Criteo(DIVISOR).batches(0, 100, BATCH_SIZE), sum(nums))
    link = "A link's figure is what one TCP connection reaches with the sender and the receiver on a core each."
    return [
        f"Batches: {BATCH_SIZE} samples of all ranks together, 13 dense features and 26 ids; the Kaggle set's "
        f"categories, large ones / {DIVISOR}: {sum(nums):,} rows of {DIM} float32. Made up after Zipf's law: "
        f"{HOT_ROWS:.0%} of rows take {share:.1%} of the accesses. They are made before, so no loader is in a step.",
        f"Both models have hidden layers of {WIDTH}, as one CPU core is no accelerator. SGD everywhere.",
        f"EMULATED in rows of `accelerator`: instead of a model, a sleep of {ACCELERATOR_MS:g} ms and a linear layer, "
        "so that the share of embeddings is what a fast accelerator sees. Hosts are network namespaces, links of "
        f"1 and 10 Gbit/s are token buckets. {link}",
        "EMULATED: `lookups made`: unique ids are found before, as data workers elsewhere find them (`with_lookups`).",
        f"Servers: 2; the cache has {SHARE:.0%} of all rows ({LARGE_SHARE:.0%} where named); on demand without a cache "
        "it has room for a step.",
        "With one rank the trainer has one core and the servers the other one. With 2 and 4 ranks all share two cores, "
        "so those rows say what ranks and servers cost, and not how they scale.",
        "torchrec shards row-wise among ranks and has no servers. The RPC server answers each batch as torch's "
        "tutorials have it: all rows of a batch, uncached, and all their gradients.",
        "Events: accelerator, one rank, 10 Gbit/s. A killed server is started again at once, as `hetstream run` does "
        "it. Longer steps: what each takes above the median; `nothing happens` has the machine's noise.",
        "Less what others took: a step without the time that the trainer's thread was ready and other programs had its "
        "core (/proc/thread-self/schedstat). Targets are judged by it.",
    ]


if __name__ == "__main__":
    sys.exit(main())
