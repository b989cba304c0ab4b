"""`bench-rap`: its whole course without a GPU, and what it makes of times."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import rap, rap_plan
from benchmarks.rap import PLANS, Measured, Row, report
from benchmarks.rap_mps import MPS
from benchmarks.rap_systems import SYSTEMS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.shows("`bench-rap` runs all baselines in one course")
def test_without_a_gpu_its_whole_course_runs_once_and_nothing_of_it_is_a_figure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.rap", "--quick", "--out", str(tmp_path)]
    environment = {"PATH": "/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((tmp_path / "rap.json").read_text())
    assert [row["value"] for row in document["rows"]] == [None] * len(PLANS)
    assert "there is no GPU here" in done.stdout
    dry_run = document["dry_run"]
    assert {*dry_run["systems"], *dry_run["missing"]} == {*SYSTEMS, MPS}
    assert "hetstream: longer than ideal" in dry_run["rows"]


@pytest.fixture
def measured() -> Measured:
    """A step of 10 ms; ours is 3 % longer."""
    step_s = {"ideal": 0.01, "sequential": 0.02, "low-priority stream": 0.0135, "hetstream": 0.0103}
    return Measured({name: [seconds, seconds] for name, seconds in step_s.items()}, alone_s=6e-3, fused_alone_s=1e-3)


def rows(measured: Measured, number: int) -> dict[str, Row]:
    return {row.system: row for row in report("case", PLANS[number], measured)}


@pytest.mark.shows("`bench-rap` runs all baselines in one course")
def test_goals_are_those_of_the_plan_and_beside_the_bound(measured: Measured) -> None:
    found = rows(measured, 0)
    gap = found["hetstream: longer than ideal"]
    assert (round(gap.value or 0, 6), gap.target, gap.met) == (3.0, "<= 3.24", True)
    stream = found["low-priority stream / hetstream"]
    assert (stream.target, stream.met) == (">= 1.3", True)
    assert found["sequential / hetstream: at most on one GPU"].value == pytest.approx(1.6)
    assert found["sequential / hetstream"].target is None
    assert rows(measured, 4)["hetstream: longer than ideal"].target == "<= 5"


def test_a_stream_is_to_be_beaten_only_where_there_is_enough_to_hide(measured: Measured) -> None:
    measured.alone_s = 4e-3
    measured.step_s["hetstream"] = [0.0103, 0.011]
    measured.missing = {MPS: "not installed"}
    found = rows(measured, 0)
    assert found["low-priority stream / hetstream"].target is None
    assert found["hetstream: longer than ideal"].met is False, "each repeat must reach it"
    assert found[MPS].note == "not installed"


def test_options_that_cannot_be_are_told_at_once() -> None:
    assert rap.plan_numbers("0, 4") == [0, 4]
    for text in ("9", "x", "", "0,,1", "-1"):
        with pytest.raises(argparse.ArgumentTypeError, match="give numbers of 0 to 4 with commas"):
            rap.plan_numbers(text)
    assert rap_plan.seconds("0.5") == 0.5
    for text in ("0", "-3", "nan", "inf", "x"):
        with pytest.raises(argparse.ArgumentTypeError, match="give a finite number of seconds above 0"):
            rap_plan.seconds(text)
