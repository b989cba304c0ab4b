"""`make bench-features`: what does a feature graph take for 100 features, beside a loop over them?

The eleven operators alone, at 1, 8 and 64 values in a row, and whole chains of them, with torch and in native code;
beside each operator as a program writes it for one feature after the other with torch, NumPy and pandas. One thread,
CPU time. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import harness, machine
from benchmarks.clients import feature_loops as loops
from benchmarks.harness import Row
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.batches import Jagged
from hetstream.mpi_dataworkers.features.graph import Feature, FeatureGraph, dense, jagged
from hetstream.mpi_dataworkers.features.native import compiler
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.slurm_plugin.render.charts import STYLE

NUM_FEATURES = 100
ROWS = 1024  # of the operators alone
WIDTHS = (1, 8, 64)
CHAIN_ROWS = (256, 1024, 4096)
OWN, NATIVE = "hetstream", "hetstream, native"
TORCH, NUMPY, PANDAS = "torch loop", "NumPy loop", "pandas loop"
# One pass over memory, and the results' tensors: nobody who gives a tensor for each feature takes less.
LEAST = "least possible"
# What must be reached, times the loop's; by native code where there is a compiler.
GOAL = 3.0
# Of one timing of one system.
WINDOW_S = 0.04
OPERATORS: Mapping[str, Callable[[int], ops.Operator]] = {
    "Logit": lambda _: ops.Logit(loops.EPS),
    "BoxCox": lambda _: ops.BoxCox(loops.LMBDA),
    "Onehot": lambda _: ops.Onehot(0.0, 2.0, loops.NUM_CLASSES),
    "SigridHash": lambda number: ops.SigridHash(number, 1000 + number),
    "FirstX": lambda _: ops.FirstX(loops.FIRST),
    "Clamp": lambda number: ops.Clamp(0.1, 0.5 + number),
    "Bucketize": lambda _: ops.Bucketize(loops.BORDERS),
    "Ngram": lambda _: ops.Ngram(loops.WINDOW),
    "MapId": lambda _: ops.MapId(loops.TABLE),
    "FillNull": lambda number: ops.FillNull(float(number), nan=True),
    "Cast": lambda _: ops.Cast("int64"),
}
OF_LISTS = ("SigridHash", "FirstX", "Ngram", "MapId")


@dataclass
class Work:
    """One batch, and everybody who can compute its features; each gives its results in the same order.

    Attributes:
        systems: by name.
        num_bytes: of what goes in and what comes out.
        num_results: tensors that come out.
    """

    systems: dict[str, Callable[[], Any]]
    num_bytes: int
    num_results: int


def lists(draw: np.random.Generator, rows: int, width: int) -> Jagged:
    """Ids in lists of `width` on average, 0 to twice as many."""
    lengths = draw.integers(0, 2 * width + 1, rows)
    ids = draw.integers(-(2**40), 2**40, int(lengths.sum()))
    ids[::2] %= 4000  # half of them have places in the table of MapId
    return Jagged(torch.from_numpy(ids), torch.from_numpy(lengths))


def reals(draw: np.random.Generator, rows: int, width: int) -> torch.Tensor:
    """Values between -0.5 and 2.5."""
    shape = (rows,) if width == 1 else (rows, width)
    return torch.from_numpy(draw.uniform(-0.5, 2.5, shape).astype(np.float32))


def source(name: str, values: Any) -> Feature:
    """The input of a feature like this."""
    if isinstance(values, Jagged):
        return jagged(name)
    return dense(name, width=1 if values.dim() == 1 else values.shape[1])


def looped(loop: loops.Loop, features: list[tuple[Any, Any]]) -> Callable[[], list[Any]]:
    """A loop over the features."""
    return lambda: [loop(values, lengths, number) for number, (values, lengths) in enumerate(features)]


def size_of(found: Any) -> int:
    """Bytes of tensors, and of tuples of them."""
    if isinstance(found, torch.Tensor):
        return found.numel() * found.element_size()
    return sum(map(size_of, found)) if isinstance(found, tuple | list) else 0


def operator_work(name: str, width: int, native: bool) -> Work:
    """One operator on all features."""
    draw = np.random.default_rng(1)
    make = lists if name in OF_LISTS else reals
    batch = {f"x{number}": make(draw, ROWS, width) for number in range(NUM_FEATURES)}
    if name == "FillNull":
        for values in batch.values():
            values.view(-1)[::7] = np.nan
    graph = FeatureGraph.of(
        {f"y{at}": source(key, values) >> OPERATORS[name](at) for at, (key, values) in enumerate(batch.items())}
    )
    own = FeatureTransform(graph)
    pairs = [tuple(value) if isinstance(value, Jagged) else (value, None) for value in batch.values()]
    arrays = [(one.numpy(), None if lengths is None else lengths.numpy()) for one, lengths in pairs]
    systems: dict[str, Callable[[], Any]] = {
        OWN: lambda: own(batch),
        TORCH: looped(loops.TORCH[name], pairs),
        NUMPY: looped(loops.NUMPY[name], arrays),
    }
    if native:
        fast = FeatureTransform(graph, native=True)
        systems[NATIVE] = lambda: fast(batch)
        check(fast(batch), systems[TORCH](), name)
    if width == 8 and name in (found := loops.pandas_loops()):
        import pandas as pd

        series = [
            (pd.Series(array.reshape(-1), None if lengths is None else np.repeat(np.arange(ROWS), lengths)), None)
            for array, lengths in arrays
        ]
        systems[PANDAS] = looped(found[name], series)
    check(own(batch), systems[TORCH](), name)
    result = list(own(batch).values())
    return Work(systems, size_of(list(batch.values())) + size_of(result), len(result))


def chain_work(rows: int, native: bool) -> Work:
    """Eight operators on each of 50 columns of reals, and five on each of 50 lists of ids of 8 on average."""
    draw = np.random.default_rng(1)
    batch: dict[str, Any] = {f"f{number}": reals(draw, rows, 1) for number in range(NUM_FEATURES // 2)}
    batch |= {f"i{number}": lists(draw, rows, 8) for number in range(NUM_FEATURES // 2)}
    outputs: dict[str, Feature] = {}
    for number in range(NUM_FEATURES // 2):
        filled = dense(f"f{number}") >> OPERATORS["FillNull"](number)
        clamped = filled >> OPERATORS["Clamp"](number)
        outputs |= {
            f"a{number}": clamped >> ops.Logit(loops.EPS),
            f"b{number}": clamped >> ops.BoxCox(loops.LMBDA),
            f"c{number}": filled >> OPERATORS["Onehot"](number),
            f"d{number}": clamped >> OPERATORS["Bucketize"](number) >> ops.Cast("int64"),
            f"e{number}": clamped >> ops.Cast("int64"),
        }
        first = jagged(f"i{number}") >> ops.FirstX(loops.FIRST)
        outputs |= {
            f"g{number}": first >> OPERATORS["SigridHash"](number) >> OPERATORS["MapId"](number),
            f"h{number}": jagged(f"i{number}") >> ops.Ngram(loops.WINDOW) >> OPERATORS["SigridHash"](number),
        }
    graph = FeatureGraph.of(outputs)
    own = FeatureTransform(graph)
    systems: dict[str, Callable[[], Any]] = {
        OWN: lambda: own(batch),
        TORCH: lambda: chain_loop(loops.TORCH, batch, lambda found: found),
        NUMPY: lambda: chain_loop(loops.NUMPY, batch, lambda found: found.numpy()),
    }
    if native:
        systems[NATIVE] = partial(FeatureTransform(graph, native=True), batch)
        check(systems[NATIVE](), systems[TORCH](), NATIVE)
    check(own(batch), systems[TORCH](), "chains")
    result = list(own(batch).values())
    return Work(systems, size_of(list(batch.values())) + size_of(result), len(result))


def chain_loop(
    by: Mapping[str, loops.Loop], batch: Mapping[str, Any], form: Callable[[torch.Tensor], Any]
) -> list[Any]:
    """The same as `chain_work`'s graph, feature by feature."""
    found = []
    for number in range(NUM_FEATURES // 2):
        filled = by["FillNull"](form(batch[f"f{number}"]), None, number)
        clamped = by["Clamp"](filled, None, number)
        found += [by["Logit"](clamped, None, number), by["BoxCox"](clamped, None, number)]
        found.append(by["Onehot"](filled, None, number))
        found += [by["Cast"](by["Bucketize"](clamped, None, number), None, number), by["Cast"](clamped, None, number)]
        values, lengths = (form(part) for part in batch[f"i{number}"])
        first = by["SigridHash"](by["FirstX"](values, lengths, number), None, number)
        found.append(by["MapId"](first, None, number))
        found.append(by["SigridHash"](by["Ngram"](values, lengths, number), None, number))
    return found


def check(own: Mapping[str, Any], others: list[Any], name: str) -> None:
    """Both have computed the same.

    Raises:
        AssertionError: they have not.
    """
    for mine, other in zip(own.values(), others, strict=True):
        values = mine.values if isinstance(mine, Jagged) else mine
        torch.testing.assert_close(
            values, other, rtol=1e-4, atol=1e-5, equal_nan=True, check_dtype=False, msg=lambda said: f"{name}: {said}"
        )


def cpu_ms(work: Callable[[], object], window_s: float) -> float:
    """CPU-ms of a call, over a window of calls."""
    count, began = 0, time.thread_time()
    while True:
        work()
        count += 1
        spent = time.thread_time() - began
        if spent >= window_s:
            return spent / count * 1e3


def memcpy_ms(num_bytes: int, window_s: float) -> float:
    """CPU-ms to read and write so many bytes in all."""
    here = torch.ones(max(1, num_bytes // 2), dtype=torch.uint8)
    there = torch.ones_like(here)
    return cpu_ms(lambda: there.copy_(here), window_s)


def measure(case: str, work: Work, repeats: int, window_s: float) -> list[Row]:
    """Rows of one case: each system in turn, as often as asked for."""
    spent: dict[str, list[float]] = {name: [] for name in work.systems}
    copied: list[float] = []
    for run in work.systems.values():
        run()  # compiles, and takes its memory
    least: list[float] = []
    for repeat in range(repeats):
        names = list(work.systems) if repeat % 2 == 0 else list(reversed(work.systems))
        for name in names:
            spent[name].append(cpu_ms(work.systems[name], window_s))
        copied.append(memcpy_ms(work.num_bytes, window_s / 4))
        least.append(copied[-1] + cpu_ms(lambda: torch.empty((work.num_results, 1)).unbind(), window_s / 4))
    rows = [harness.row_of(case, name, values, "CPU-ms/batch") for name, values in spent.items()]
    judged = NATIVE if NATIVE in spent else OWN
    bounds = [other / each for other, each in zip(spent[TORCH], least, strict=True)]
    for name in (OWN, NATIVE):
        if name in spent:
            ratios = [other / own for other, own in zip(spent[TORCH], spent[name], strict=True)]
            row = harness.row_of(case, f"{TORCH} / {name}", ratios, "x")
            if name == judged:
                met = row.value >= GOAL
                bound = "" if met else f"{LEAST}: {statistics.median(bounds):.3g} x"
                row = Row(**{**vars(row), "target": f">= {GOAL:g}", "met": met, "note": bound})
            rows.append(row)
            shares = [100 * each / own for each, own in zip(copied, spent[name], strict=True)]
            rows.append(harness.row_of(case, f"{name}: of memcpy", shares, "%"))
    rows.append(harness.row_of(case, f"{TORCH} / {LEAST}", bounds, "x"))
    harness.say(f"  {case}: " + ", ".join(f"{name} {statistics.median(values):.2f}" for name, values in spent.items()))
    return rows


def picture(rows: list[Row]) -> str:
    """Bars: how many times the loop's rate each operator has at 8 values in a row, and the chains."""
    bars = [
        row
        for row in rows
        if row.unit == "x" and row.value and not row.system.endswith(LEAST)
        if "width 8" in row.case or "chains" in row.case
    ]
    parts = []
    for at, row in enumerate(bars):
        y, length = 30 + 16 * at, min(340.0, 34.0 * (row.value or 0.0))
        kind = row.system.removeprefix(f"{TORCH} / {OWN}")
        label = f"{row.case.removesuffix(', width 8')}{kind}"
        parts.append(f'<text x="196" y="{y + 10}" text-anchor="end" style="font-size:10px">{escape(label)}</text>')
        parts.append(f'<rect class="f{int(kind == "")}" x="200" y="{y}" width="{length:.0f}" height="12"/>')
        parts.append(f'<text x="{205 + length:.0f}" y="{y + 10}" style="font-size:10px">{row.value:.1f} x</text>')
    height = 40 + 16 * len(bars)
    goal = 200 + 34 * GOAL
    line = f'<path d="M{goal:.0f} 26V{height - 10}" stroke="currentColor" stroke-dasharray="3 3"/>'
    title = f"Times the rate of a torch loop, {NUM_FEATURES} features (line: the goal)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}"><style>{STYLE}</style>'
        f'<text x="10" y="16" style="font-weight:bold">{escape(title)}</text>{"".join(parts)}{line}</svg>\n'
    )


def main() -> int:
    """Run the benchmark."""
    own = harness.parser("Feature graphs beside loops over features.", repeats=5)
    args = own.parse_args()
    torch.set_num_threads(1)
    core = machine.two_cores()[0]
    os.sched_setaffinity(0, {core})
    native = compiler() is not None
    repeats, window_s = (1, 0.001) if args.quick else (args.repeats, WINDOW_S)
    words = [word.strip().lower() for word in args.systems.split(",") if word.strip()]
    cases: dict[str, Callable[[], Work]] = {
        f"{name}, width {width}": lambda name=name, width=width: operator_work(name, width, native)  # type: ignore[misc]
        for name in OPERATORS
        for width in WIDTHS
    }
    cases |= {
        f"chains, {rows} rows": lambda rows=rows: chain_work(rows, native)  # type: ignore[misc]
        for rows in CHAIN_ROWS
    }
    rows: list[Row] = []
    for case, make in cases.items():
        if not words or any(word in case.lower() for word in words):
            rows += measure(case, make(), repeats, window_s)
    context = {
        "machine": machine.describe(own=[core]),
        "versions": machine.versions("torch", "numpy", "pandas"),
        "notes": [
            f"{NUM_FEATURES} features; operators alone: {ROWS} rows of 1, 8 or 64 values (lists: so many on average).",
            "Chains: 8 operators on each of 50 columns of reals, 5 on each of 50 lists of ids, 8 ids on average.",
            "One thread; CPU time of the calls. Loops: one feature after the other, as feature_loops.py has them.",
            "Of memcpy: time to read and write as many bytes as go in and come out, as a share of the time taken.",
            "Native: native=True, without what compiling takes.",
            f"The goal is that of native code. {LEAST}: memcpy, and a view of one tensor for each result.",
        ],
    }
    if rows and not args.quick:
        args.out.mkdir(parents=True, exist_ok=True)
        Path(args.out / "features.svg").write_text(picture(rows))
    return harness.finish("features", args.out, rows, {}, context)


if __name__ == "__main__":
    sys.exit(main())
