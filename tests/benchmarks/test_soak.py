"""The soak in short: it finds nothing on a sound data plane, and its accounts notice what they should."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.soak import Growth, Usage, is_clean

ROOT = Path(__file__).resolve().parents[2]
CLEAN: dict[str, Any] = {
    "lost": 0,
    "given_twice": 0,
    "wrong_or_misplaced": [],
    "shared_memory_left": [],
    "processes_left": [],
    "trainer_exit_code": 0,
    "descriptor_growth": {"trainer": 2, "dispatcher": -1},
    "memory": {"trainer": Growth(60_000, 1 << 20).row()},
}
FINDINGS: dict[str, Any] = {
    "descriptor_growth": {"trainer": 25},
    "memory": {"trainer": Growth(60_000, 1 << 20).row(), "dispatcher": Growth(60_000, 6 << 20).row()},
}


@pytest.mark.parametrize("key", CLEAN)
def test_each_finding_fails_the_soak(key: str) -> None:
    assert is_clean(dict(CLEAN))
    assert is_clean(CLEAN | {"descriptor_growth": {}}), "no process lived long enough to tell"
    assert is_clean(CLEAN | {"memory": {}}), "none at all"
    assert not is_clean(CLEAN | {key: FINDINGS.get(key, 1)})


def usage(num_samples: int, held: Callable[[int], float]) -> Usage:
    """A sample each 1000 batches; what is held is a function of the batches."""
    done = [1000 * number for number in range(num_samples)]
    return Usage("trainer", done, [int(held(batches)) for batches in done])


def test_growth_is_that_of_the_second_half() -> None:
    warm = usage(41, lambda batches: min(batches, 20_000) * 5000)
    assert warm.growth() == Growth(20_000, 0)
    leaking = usage(41, lambda batches: max(batches, 20_000) * 5000)
    assert leaking.growth().batches == 20_000
    assert leaking.growth().grown_bytes == pytest.approx(100_000_000, rel=1e-6)
    assert usage(1, lambda _: 7).growth() == Growth(0, 0)
    # The trainer died: what the others see goes back a little.
    back = Usage("dispatcher", [0, 1000, 2000, 1600, 2600, 3000], [5] * 6)
    assert back.growth() == Growth(1000, 0)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_leak_of_a_hundred_bytes_for_each_batch_that_a_process_handled_is_one(share: float) -> None:
    chance = random.Random(5)
    size = int(75_000 / share) // 1000

    def held(leak_bytes: float) -> Callable[[int], float]:
        """With what allocators take and give back: steps of a MiB, and noise of half a MiB around them."""
        return lambda done: leak_bytes * share * done + (done // 30_000 % 2 << 20) + chance.uniform(0, 1 << 19)

    assert usage(size, held(100)).growth(share).verdict == "LEAKS"
    assert usage(size, held(0)).growth(share).verdict == "met"
    assert usage(size // 2, held(0)).growth(share).verdict == "not judged"


def test_a_life_too_short_to_be_judged_is_no_leak_and_says_so() -> None:
    row = Growth(34_000, 30 << 20).row()
    assert row == {"grown_mib": 30.0, "batches": 34_000, "mib_per_100k_batches": 88.24, "verdict": "not judged"}
    assert is_clean(CLEAN | {"memory": {"trainer": row}})


@pytest.mark.slow
def test_a_short_soak_is_exact_and_clean(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    command = [sys.executable, "-m", "benchmarks.soak", "--quick", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert sum(found["kills"].values()) > 4
    assert {"dispatcher", "trainer", "data worker process"} <= found["memory"].keys()
    assert "memory of dispatcher" in done.stdout
