"""`make bench-fusion`: what does it bring to move the 141 tensors of a batch together?

GoldMiner's Figure 12 asks it of DeepFM: there the fused transfer trains up to 1.3 times as fast. Here the same bytes
are moved in one step of 141 tensors, and in 141 steps of one tensor each; by hetstream, and by plain requests and
answers over TCP. docs/benchmarks-data.md explains the rows.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from html import escape
from typing import Any

from benchmarks import harness, machine
from benchmarks.harness import Metric, Row, System, Target
from hetstream.slurm_plugin.render.charts import STYLE

CASES: Mapping[str, Mapping[str, Any]] = {
    "9.6 MB": {"num_bytes": 9_633_792},
    "1 MB": {"num_bytes": 1 << 20},
    "0.1 MB": {"num_bytes": 141 * 744},
}
COUNT = "141"
PAPERS_GAIN = 1.3
FUSED, UNFUSED = "141 tensors together", "one by one"
OWN, RPC = "hetstream", "requests over TCP"
METRICS = (
    Metric("batches_per_s", "batches/s", tuple(CASES)),
    Metric("cpu_ms_per_batch", "CPU-ms/batch", tuple(CASES)),
)
TARGETS = tuple(
    target
    for case in CASES
    for target in (
        Target(case, f"{OWN}, {FUSED}", f"{OWN}, {UNFUSED}", "batches_per_s", at_least=PAPERS_GAIN),
        Target(case, f"{RPC}, {FUSED}", f"{RPC}, {UNFUSED}", "batches_per_s"),
        Target(case, f"{OWN}, {FUSED}", f"{RPC}, {UNFUSED}", "batches_per_s", at_least=PAPERS_GAIN),
        Target(case, f"{OWN}, {UNFUSED}", f"{OWN}, {FUSED}", "cpu_ms_per_batch"),
    )
)


def picture(rows: list[Row]) -> str:
    """A bar for each gain in batches a second."""
    bars = [row for row in rows if row.value and f", {FUSED} / " in row.system]
    highest = max([PAPERS_GAIN, *(row.value or 0.0 for row in bars)])
    parts = []
    for at, row in enumerate(bars):
        y, length = 30 + 20 * at, 250 * (row.value or 0.0) / highest
        name = escape(f"{row.case}: {row.system.replace(f', {FUSED}', '')}")
        parts.append(
            f'<text x="296" y="{y + 11}" text-anchor="end" style="font-size:10px">{name}</text>'
            f'<rect class="f{int(not row.system.startswith(OWN))}" x="300" y="{y}" width="{length:.0f}" height="14"/>'
            f'<text x="{305 + length:.0f}" y="{y + 11}" style="font-size:10px">{row.value:.1f} x</text>'
        )
    height, goal = 40 + 20 * len(bars), 300 + 250 * PAPERS_GAIN / highest
    parts.append(f'<path d="M{goal:.0f} 26V{height - 10}" stroke="currentColor" stroke-dasharray="3 3"/>')
    title = "141 tensors together: batches a second, times those of one by one (line: the paper's gain)"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 {height}"><style>{STYLE}</style>'
        f'<text x="10" y="16" style="font-weight:bold">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )


def main() -> int:
    """Run the benchmark."""
    args = harness.parser("141 tensors together, and one by one.", repeats=5).parse_args()
    own = (sys.executable, "-m", "benchmarks.clients.fusion")
    systems = [
        System(f"{name}, {how}", (*own, word, form, COUNT))
        for name, word in ((OWN, "hetstream"), (RPC, "rpc"))
        for how, form in ((FUSED, "fused"), (UNFUSED, "unfused"))
    ]
    wanted = harness.chosen(systems, args.systems)
    client_core, producer_core = machine.two_cores()
    request = {
        "seconds": 0.1 if args.quick else 1.0,
        "warmup_s": 0.05 if args.quick else 0.3,
        "client_core": client_core,
        "producer_core": producer_core,
    }
    results = harness.collect(
        wanted,
        CASES,
        request,
        1 if args.quick else args.repeats,
        120.0,
        lambda _case, sample: f"{sample['batches_per_s']:.0f} batches/s",
    )
    context = {
        "machine": machine.describe(client=[client_core], producer=[producer_core]),
        "versions": machine.versions("torch", "numpy"),
        "notes": [
            "A batch is 141 float32 tensors of equal size. One by one: a step, or a request, for each of them.",
            f"GoldMiner's Figure 12: up to {PAPERS_GAIN:g} times the training speed of DeepFM, model included.",
            "hetstream one by one still puts small steps that are made in quick succession into one message.",
            harness.disturbance(results),
        ],
    }
    rows = harness.rows_of(results, wanted, METRICS, TARGETS)
    if not args.quick:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "fusion.svg").write_text(picture(rows))
    return harness.finish("fusion", args.out, rows, results.failures, context)


if __name__ == "__main__":
    sys.exit(main())
