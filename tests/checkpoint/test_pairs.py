"""The table of pairs, docs/checkpoint-pairs.md: it says what is stored, and what is stored is what happens."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.checkpoint.pairs.programs import python_of
from tests.checkpoint.pairs.run import CELLS, DOCUMENT, GROUPS, WAYS, Cell, document_with, stored

ROOT = Path(__file__).parents[2]
# One of each kind of outcome, and a launcher.
QUICK = (
    Cell("FSDP2", 1, "SIGKILL", "other ranks"),
    Cell("DDP", 2, "SIGTERM once", "other ranks"),
    Cell("DDP", 1, "store removed", "memory"),
    Cell("torchrun", 2, "exception in the copy", "disk"),
)
INSTALLED = [
    pytest.param(
        framework,
        size,
        way,
        marks=pytest.mark.skipif(not python_of(framework), reason=f"{framework} is not installed"),
    )
    for framework, size in GROUPS
    for way in WAYS
]


def run(cells: list[Cell]) -> dict[str, str]:
    """What comes of some cells, in a process that may fork."""
    (python,) = {python_of(cell.framework) for cell in cells}
    argv = [python, "-m", "tests.checkpoint.pairs.run", "--cells", *(cell.name for cell in cells)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=580, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(line) for line in done.stdout.splitlines())


def test_the_document_says_what_is_stored() -> None:
    assert {*stored()} == {one.name for one in CELLS}
    assert DOCUMENT.read_text() == document_with(stored()), "run: python -m tests.checkpoint.pairs.run --document"


def test_no_pair_restores_other_bits_and_no_training_ends_but_with_a_reason() -> None:
    for name, outcome in stored().items():
        assert "WRONG" not in outcome, name
        assert "without a word" not in outcome, name


def test_some_pairs_are_as_stored() -> None:
    assert run([*QUICK]) == {cell.name: stored()[cell.name] for cell in QUICK}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("framework", "size", "way"), INSTALLED)
def test_all_pairs_are_as_stored(framework: str, size: int, way: str) -> None:
    group = [one for one in CELLS if (one.framework, one.size, one.way) == (framework, size, way)]
    cells = [one for one in group if os.geteuid() == 0 or one.event != "full memory"]  # which mounts
    assert run(cells) == {cell.name: stored()[cell.name] for cell in cells}
