"""The second demo: its rows, its graph, and the whole of it."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

import pytest

DLRM = Path(__file__).resolve().parents[1] / "sbatch_templates" / "dlrm"
COUNTS = [f"I{number}" for number in range(1, 14)]
CATEGORIES = [f"C{number}" for number in range(1, 27)]


def prepare(folder: Path, *options: str) -> list[dict[str, str]]:
    argv = [sys.executable, str(DLRM / "prepare.py"), "rows.csv", "--rows", "300", *options]
    subprocess.run(argv, cwd=folder, check=True, timeout=60)
    with (folder / "rows.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_rows_of_the_second_demo_come_from_a_sample_or_from_the_generator(tmp_path: Path) -> None:
    sample = tmp_path / "sample.csv"
    values = [["0", *["", "260.0"] * 6, "-1", *["05db9164"] * 26], ["1", *["3"] * 13, *[""] * 26]]
    with sample.open("w", newline="") as file:
        csv.writer(file).writerows([["label", *COUNTS, *CATEGORIES], *values])
    rows = prepare(tmp_path, "--sample", str(sample))
    assert [row["row"] for row in rows] == [str(number) for number in range(300)]
    assert {row["I2"] for row in rows} == {"260.0", "3"}
    assert {row["C1"] for row in rows} == {"05db9164", ""}
    assert {row["label"] for row in rows} == {"0", "1"}
    made = prepare(tmp_path)
    assert made == prepare(tmp_path) != prepare(tmp_path, "--seed", "2")
    assert len({row["C1"] for row in made}) > 2


# What a sample changes is shown above; that the demo reads it is all that the slow one adds.
@pytest.mark.shows("Criteo's rows become a trained model: `make demo-dlrm`, also on Slurm")
@pytest.mark.shows("the second demo trains on data workers as in one process, batch by batch")
@pytest.mark.parametrize("with_sample", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_second_demo_runs_as_make_runs_it(tmp_path: Path, with_sample: bool) -> None:
    sample = tmp_path / "sample.csv"
    if with_sample:
        rows = prepare(tmp_path)
        with sample.open("w", newline="") as file:
            writer = csv.DictWriter(file, ["label", *COUNTS, *CATEGORIES], extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)
    options = ["--rows", "4000", "--sample", str(sample), "--work-dir", str(tmp_path / "work")]
    argv = [sys.executable, str(DLRM / "demo.py"), *options]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=200, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert ("drawn from those of sample.csv" in done.stdout) == with_sample
    assert "4,000 in each of 2 epochs: 0 lost, 0 twice" in done.stdout
    assert "the same, batch by batch, as in one process" in done.stdout
