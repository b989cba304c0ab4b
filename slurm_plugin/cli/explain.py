"""`hetstream explain`: what of a program's forward could move to data workers, and why not more."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.base.text import size_words
from hetstream.mpi_dataworkers.hook import environment
from hetstream.mpi_dataworkers.partitioner.analysis import Findings
from hetstream.mpi_dataworkers.partitioner.cut import Decision
from hetstream.mpi_dataworkers.partitioner.program import Kind
from hetstream.slurm_plugin.cli.output import EXIT_CODES, add_output_arguments, emit
from hetstream.slurm_plugin.render.tables import Column, Report, Section

EPILOG = f"""\
The program trains for three steps, in which its forward is captured and measured, and is then ended. What it prints
goes to stderr.

examples:
  hetstream explain train.py --epochs 3
  hetstream explain --data-workers 8 train.py
  hetstream explain --json train.py | jq '.operators[] | select(.side == "trainer") | .reason'

{EXIT_CODES}"""


def add_explain_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the verb."""
    parser.description = (
        "Show which operators of a model's forward could run in data workers, what they cost, and why the others stay."
    )
    parser.epilog = EPILOG
    parser.usage = "%(prog)s [options] [--] train.py [ARGUMENTS]"
    parser.add_argument(
        "--data-workers", type=int, default=4, metavar="N", help="decide for so many processes (default %(default)s)"
    )
    parser.add_argument("--offload", choices=("auto", "all"), default="auto", help="as of hetstream run (default auto)")
    add_output_arguments(parser)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the Python script and its arguments")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the program for three steps, and report."""
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("no program: write hetstream explain train.py")
    if args.data_workers < 1:
        raise UsageError(f"--data-workers={args.data_workers}: at least 1")
    found = _findings([sys.executable, *command], args.offload)
    decision = found.decide(args.data_workers, args.offload == "all")
    emit(args, report_of(found, decision))
    return 0


def _findings(command: list[str], offload: str) -> Findings:
    with TemporaryDirectory(prefix="hetstream-explain-") as directory:
        path = Path(directory) / "findings.json"
        variables = environment(None, os.environ, offload=offload, in_process_loaders=True) | {
            "HETSTREAM_EXPLAIN": str(path)
        }
        done = subprocess.run(command, env=os.environ | variables, stdout=sys.stderr.fileno(), check=False)
        if path.exists():
            return Findings.from_json(path.read_text())
        raise UsageError(
            f"{command[1]} ended with exit code {done.returncode} before a model had been trained for three steps on "
            "the batches of a DataLoader, so there is nothing to explain"
        )


def report_of(found: Findings, decision: Decision) -> Report:
    """The answer, as table and JSON."""
    rows = []
    for operator in found.graph.operators:
        if operator.kind is Kind.OPERATOR:
            cost, verdict = found.costs.get(operator.name), found.verdicts[operator.name]
            is_moved = operator.name in decision.moved
            rows.append(
                {
                    "operator": operator.target,
                    "line": operator.line,
                    "source": operator.source,
                    "trainer_s": cost.trainer_s if cost else None,
                    "data_worker_s": cost.data_worker_s if cost else None,
                    "value_bytes": cost.value_bytes if cost else None,
                    "is_sent": operator.name in decision.sent,
                    "side": "data worker" if is_moved else "trainer",
                    "reason": verdict.reason if is_moved or not verdict.moves else "it may move, and that does not pay",
                }
            )
    columns = [
        Column("operator", "OPERATOR", left=True),
        Column("line", "LINE", left=True),
        Column("trainer_s", "TRAINER ms", _milliseconds),
        Column("data_worker_s", "DATA WORKER ms", _milliseconds),
        Column("value_bytes", "VALUE", lambda value: "-" if value is None else size_words(value)),
        Column("side", "SIDE", left=True),
        Column("reason", "REASON", left=True),
    ]
    reason = found.reason or decision.reason
    summary: dict[str, Any] = {
        "module": found.module,
        "reason": reason,
        "why_not_all": found.why_not_all or None,
        "num_moved": len(decision.moved),
        "bytes_added": decision.bytes_added,
        "leaves": _leaves(found),
        "step_s_before": decision.before.total_s,
        "step_s_after": decision.after.total_s,
    }
    lines = [f"{found.module}: {reason}"]
    if found.why_not_all:
        lines.append(f"the table has the forward's beginning alone; of the rest torch.compile says {found.why_not_all}")
    if decision.moved:
        lines.append(
            f"{len(decision.moved)} of {len(rows)} operators move; {decision.bytes_added:+,} bytes for each batch"
        )
    lines += [f"{leaf['leaf']}, {leaf['bytes']:,} bytes of the batch" for leaf in summary["leaves"]]
    return Report({"verb": "explain"}, summary, lines, [Section("operators", columns, rows, empty="no operators")])


def _leaves(found: Findings) -> list[dict[str, Any]]:
    """What becomes of the tensors of the batch that the forward takes."""
    leaves = []
    for operator in found.graph.operators:
        if operator.kind is Kind.LEAF:
            cost = found.costs.get(operator.name)
            leaves.append({"leaf": operator.target, "bytes": cost.value_bytes if cost else 0})
    return leaves


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e3 * seconds:.3f}"
