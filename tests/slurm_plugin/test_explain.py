"""`hetstream run --explain`: what of a program's forward could move, as table, JSON and drawing."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from hetstream.mpi_dataworkers.partitioner.analysis import Findings, Offload, classify
from hetstream.mpi_dataworkers.partitioner.cut import OperatorCost, Rates
from hetstream.mpi_dataworkers.partitioner.program import ForwardGraph, Kind, Operator
from hetstream.slurm_plugin.cli.explain import report_of
from hetstream.slurm_plugin.render.tables import as_table

ROOT = Path(__file__).resolve().parents[2]
HETSTREAM = str(Path(sys.executable).with_name("hetstream"))


def findings() -> Findings:
    graph = ForwardGraph(
        (
            Operator("w", "layer.weight", kind=Kind.PARAMETER),
            Operator("x", "argument 0", kind=Kind.LEAF),
            Operator("log", "aten.log.default", ("x",), line="train.py:7", source="y = x.log() < 1 & 2"),
            Operator("dense", "aten.linear.default", ("log", "w"), line="train.py:8", source="return self.layer(y)"),
        ),
        ("dense",),
    )
    costs = {"x": OperatorCost(value_bytes=400), "log": OperatorCost(0.02, 0.03, 400)}
    return Findings("Model", "", graph, classify(graph, Offload.AUTO), costs, Rates(0.1, 0.01, 0))


def test_findings_are_read_as_they_were_written() -> None:
    assert Findings.from_json(findings().to_json()) == findings()
    refused = Findings("the model", "it reads a file (train.py:3)")
    assert Findings.from_json(refused.to_json()) == refused


def test_each_operator_has_its_line_its_side_and_the_reason() -> None:
    found = findings()
    lines = as_table(report_of(found, found.decide(4, everything=False)), color=False)
    assert lines[1] == "1 of 2 operators move; +400 bytes for each batch"
    assert lines[2] == "argument 0, 400 bytes of the batch"
    log, dense = lines[-2:]
    assert " ".join(log.split()) == "aten.log.default train.py:7 20.000 30.000 400 B data worker depends on no state"
    assert dense.endswith("trainer      it needs w: a parameter, which each step changes")


def test_of_a_forward_of_which_only_the_beginning_was_captured_it_says_so() -> None:
    found = replace(findings(), why_not_all="that it decides by the data (train.py:9)")
    assert Findings.from_json(found.to_json()) == found
    report = report_of(found, found.decide(4, everything=False))
    assert report.summary["why_not_all"] == "that it decides by the data (train.py:9)"
    said = "the table has the forward's beginning alone; of the rest torch.compile says that it decides by the data ("
    assert as_table(report, color=False)[1].startswith(said)


def test_a_forward_that_was_not_captured_is_a_reason() -> None:
    refused = Findings("the model", "it reads a file (train.py:3)")
    lines = as_table(report_of(refused, refused.decide(4, everything=False)), color=False)
    assert lines == ["the model: it reads a file (train.py:3)", "", "no operators"]


def test_a_program_is_run_for_three_steps(tmp_path: Path) -> None:
    words = ["run", "--data-workers=4", "--explain", "--json", str(tmp_path / "found.json"), "--offload", "all", "--"]
    program = [sys.executable, "-m", "benchmarks.partition_programs", "dlrm"]
    done = subprocess.run(
        [HETSTREAM, *words, *program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("Dlrm: ")
    answer = json.loads((tmp_path / "found.json").read_text())
    assert answer["summary"]["module"] == "Dlrm"
    sides = {row["operator"]: row["side"] for row in answer["operators"]}
    assert (sides["clamp"], sides["_C._nn.linear"]) == ("data worker", "trainer")
    assert any(row["line"].startswith("recommenders.py:") for row in answer["operators"])


def test_a_program_that_trains_nothing_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("print('nothing')\n")
    argv = [HETSTREAM, "run", "--explain", sys.executable, str(tmp_path / "train.py")]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "ended with exit code 0 before a model had been trained for three steps" in done.stderr
    assert done.stdout == ""
