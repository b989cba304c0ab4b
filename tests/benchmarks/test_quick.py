"""Each benchmark runs from its command line with --quick and writes its file. The figures mean nothing here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(name: str, out: Path, systems: str) -> dict[str, dict[str, object]]:
    """Run a benchmark; return its rows by system (the last case wins)."""
    command = [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--out", str(out), "--systems", systems]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads((out / f"{name}.json").read_text())
    assert "--quick" in document["command"]
    assert document["versions"]["hetstream"]
    return {row["system"]: row for row in document["rows"]}


@pytest.mark.parametrize("systems", ["memcpy,raw,queue", "torch"])
def test_transport_limits_and_peers(tmp_path: Path, systems: str) -> None:
    rows = run("transport", tmp_path, systems)
    assert rows
    assert all(row["value"] is not None for row in rows.values()), rows
