"""How much memory is left, with files as the kernel writes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from checkpoint import memory


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The root of control groups; the process is in job/step."""
    (tmp_path / "meminfo").write_text("MemTotal:       99 kB\nMemAvailable:    50 kB\n")
    (tmp_path / "own").write_text("1:name=systemd:/elsewhere\n0::/job/step\n")
    (tmp_path / "groups" / "job" / "step").mkdir(parents=True)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_GROUP", tmp_path / "own")
    monkeypatch.setattr(memory, "_GROUPS", tmp_path / "groups")
    return tmp_path / "groups"


def limit(group: Path, most: str, current: int, cache: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{current}\n")
    (group / "memory.stat").write_text(f"anon 7\ninactive_file {cache}\n")


def test_without_limits_the_host_counts(groups: Path) -> None:
    limit(groups / "job", "max", 1, 0)
    assert memory.available_bytes() == 50 << 10


def test_the_jobs_limit_holds_for_its_steps(groups: Path) -> None:
    limit(groups / "job", "30000", 20000, 5000)
    limit(groups / "job" / "step", "max", 20000, 5000)
    assert memory.available_bytes() == 15000


def test_a_group_over_its_limit_has_nothing_left(groups: Path) -> None:
    limit(groups / "job" / "step", "100", 200, 0)
    assert memory.available_bytes() == 0


def test_what_cannot_be_read_does_not_limit(groups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MEMINFO", groups / "missing")
    (groups / "job" / "memory.max").write_text("nonsense")
    assert memory.available_bytes() == sys.maxsize
