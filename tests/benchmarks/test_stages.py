"""What `make bench-stages` makes of its measurements, and that it runs."""

from __future__ import annotations

import os
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.stages import ALONE, PAPER, Sample, picture, size_rows, table
from tests.benchmarks.test_quick import run

SAMPLES = [Sample(float(at), {"cpu": at // 4, "gpu": at // 9}, 0.9 - at / 50, at / 3) for at in range(40)]


def test_the_papers_figures_have_the_papers_ordering_and_savings() -> None:
    speeds = {(ALONE, 0): 10.0}
    speeds |= {("one stage", gpus): 10.0 * gain for gpus, (gain, _) in PAPER["one stage"].items()}
    speeds["two stages", 1] = 14.3
    rows = table(speeds)
    assert [row.met for row in rows if row.target] == [True] * 4
    savings = {(row.case, row.system): row.value for row in rows if row.case.endswith("savings")}
    for (case, name), value in savings.items():
        assert value == pytest.approx(PAPER[name][int(case[2])][1], abs=0.03)
    assert len(savings) == 4


def test_what_loses_is_said_to() -> None:
    rows = table({(ALONE, 0): 10.0, ("one stage", 1): 11.0, ("one stage", 2): 12.0, ("two stages", 1): 11.5})
    assert [row.met for row in rows if row.target] == [False, False, False]
    assert table({("two stages", 1): 11.5}) == [], "nothing to compare with"


def test_sizes_are_judged_by_the_costs() -> None:
    assert [row.met for row in size_rows("x", 0.034, Sample(9.0, {"cpu": 9, "gpu": 1}, 0.0, 12.0), 0.01)] == [True] * 3
    assert [row.met for row in size_rows("x", 0.034, Sample(9.0, {"cpu": 16, "gpu": 3}, 0.2, 8.0), 0.2)] == [False] * 3


def test_the_picture_has_a_line_for_each_stage() -> None:
    text = picture("a < b", SAMPLES, 12.5)
    ET.fromstring(text)
    assert "on CPUs" in text
    assert "on GPUs" in text
    assert "a &lt; b" in text


@pytest.mark.slow
@pytest.mark.slurm
@pytest.mark.skipif(os.geteuid() != 0, reason="booting Slurm needs root")
def test_it_runs(tmp_path: Path) -> None:
    rows = run("stages", tmp_path, "without,two stages")
    assert rows["two stages"]["value"] is not None
    assert (tmp_path / "stages.svg").exists()
