"""The oldest torch that is declared is one that the tests run on."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def planned(*settings: str, target: str = "test-all") -> str:
    """What `make test-all`, or another target, would do."""
    argv = ["make", "--dry-run", "--always-make", target, *settings]
    return subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout


def declared() -> str:
    [version] = re.findall(r'^torch = \["torch>=(\d+\.\d+\.\d+)"\]$', (ROOT / "pyproject.toml").read_text(), re.M)
    return f"torch=={version}"


def test_the_tests_run_on_the_oldest_torch_that_is_declared() -> None:
    plan = planned()
    assert f'.venv-oldest-torch/bin/pip install -q --disable-pip-version-check "{declared()}"' in plan
    assert ".venv-oldest-torch/bin/pytest" in plan


def test_as_many_files_at_a_time_as_in_the_tests_on_the_pinned_torch() -> None:
    [pinned] = re.findall(r"^\s*\.venv/bin/pytest (.*)-m ", planned(target="test"), re.M)
    [oldest] = re.findall(r"^\.venv-oldest-torch/bin/pytest (.*)-m ", planned(target="test-oldest-torch"), re.M)
    assert oldest == pinned


def test_where_the_oldest_torch_is_the_only_one_it_has_no_tests_of_its_own() -> None:
    plan = planned(f"TORCH={declared()}")
    assert f'.venv/bin/pip install -q --disable-pip-version-check "{declared()}"' in plan
    assert ".venv-oldest-torch" not in plan


def test_where_another_torch_is_asked_for_the_oldest_is_tested_too() -> None:
    plan = planned("TORCH=torch==99.0.0")
    assert '.venv/bin/pip install -q --disable-pip-version-check "torch==99.0.0"' in plan
    assert f'.venv-oldest-torch/bin/pip install -q --disable-pip-version-check "{declared()}"' in plan
    assert ".venv-oldest-torch/bin/pytest" in plan
