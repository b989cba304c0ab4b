"""`hetstream run --explain`: what of a program's forward could move to data workers, and why not more."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hetstream.base.errors import UsageError
from hetstream.base.text import size_words
from hetstream.hetjob.convert.spec import AUTO
from hetstream.mpi_dataworkers.hook import environment
from hetstream.mpi_dataworkers.partitioner.analysis import Findings
from hetstream.mpi_dataworkers.partitioner.cut import CutDecision
from hetstream.mpi_dataworkers.partitioner.program import Kind
from hetstream.slurm_plugin.cli.screen import wants_color, width_of_output
from hetstream.slurm_plugin.render.tables import Column, Report, Section, as_json, as_table

# Data workers that are reckoned with where the user names no number.
_USUAL = 4


def run_explained(args: argparse.Namespace) -> int:
    """Run the program for three steps, and report.

    Args:
        args: of `hetstream run`.
    """
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise UsageError("no program: write hetstream run --explain python train.py")
    data_workers = _USUAL if args.data_workers in (None, AUTO) else args.data_workers
    if data_workers < 1:
        raise UsageError(f"--data-workers={data_workers}: at least 1")
    found = _findings(command, args.offload or "auto")
    report = report_of(found, found.decide(data_workers, args.offload == "all"))
    print("\n".join(as_table(report, wants_color(), width_of_output())))
    if args.json:
        args.json.write_text(as_json(report) + "\n")
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
            f"{shlex.join(command)} ended with exit code {done.returncode} before a model had been trained for three "
            "steps on the batches of a DataLoader, so there is nothing to explain"
        )


def report_of(found: Findings, decision: CutDecision) -> Report:
    """Return the answer, as table and JSON."""
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
        Column("operator", "OPERATOR", left=True, cuts=True),
        Column("line", "LINE", left=True, priority=1, cuts=True),
        Column("trainer_s", "TRAINER ms", _milliseconds),
        Column("data_worker_s", "DATA WORKER ms", _milliseconds),
        Column("value_bytes", "VALUE", lambda value: "-" if value is None else size_words(value), priority=2),
        Column("side", "SIDE", left=True),
        Column("reason", "REASON", left=True, wraps=True),
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
    return Report({"verb": "run"}, summary, lines, [Section("operators", columns, rows, empty="no operators")])


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
