"""The soak in short: it finds nothing on a sound data plane, and its accounts notice what they should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import Usage, is_clean

ROOT = Path(__file__).resolve().parents[2]
CLEAN: dict[str, Any] = {
    "lost": 0,
    "given_twice": 0,
    "wrong_or_misplaced": [],
    "shared_memory_left": [],
    "processes_left": [],
    "trainer_exit_code": 0,
    "descriptor_growth": {"trainer": 2, "dispatcher": -1},
}


@pytest.mark.parametrize("key", CLEAN)
def test_each_finding_fails_the_soak(key: str) -> None:
    assert is_clean(dict(CLEAN))
    assert is_clean(CLEAN | {"descriptor_growth": {}}), "no process lived long enough to tell"
    assert not is_clean(CLEAN | {key: {"trainer": 25} if key == "descriptor_growth" else 1})


def test_the_slope_is_that_of_the_second_half() -> None:
    usage = Usage("trainer", list(range(0, 1000, 100)), [i * 2**20 for i in (9, 9, 9, 9, 9, 10, 11, 12, 13, 14)])
    assert usage.slope() == pytest.approx(1000.0)


@pytest.mark.slow
def test_a_short_soak_is_exact_and_clean(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--batches", "40000", "--kills", "10", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sum(json.loads(out.read_text())["kills"].values()) > 5
