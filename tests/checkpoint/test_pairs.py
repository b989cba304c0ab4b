"""The table of pairs, docs/checkpoint-pairs.md: it says what is stored, and what is stored is what happens."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoint.pairs.run import CELLS, DOCUMENT, Cell, document_with, stored

ROOT = Path(__file__).parents[2]
# One of each kind of outcome.
QUICK = (
    Cell("FSDP2", 1, "SIGKILL", "other ranks"),
    Cell("FSDP2", 2, "exception in the copy", "disk"),
    Cell("DDP", 2, "SIGTERM once", "other ranks"),
)
GROUPS = sorted({(one.framework, one.size) for one in CELLS})


def run(*words: str) -> dict[str, str]:
    """What comes of the cells whose name has all of these words, in a process that may fork."""
    argv = [sys.executable, "-m", "tests.checkpoint.pairs.run", "--only", *words]
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


@pytest.mark.parametrize("cell", QUICK, ids=lambda cell: cell.name)
def test_some_pairs_are_as_stored(cell: Cell) -> None:
    assert run(cell.name) == {cell.name: stored()[cell.name]}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("framework", "size"), GROUPS)
def test_all_pairs_are_as_stored(framework: str, size: int) -> None:
    words = f"{framework}, {size} rank"
    found = run(words)
    assert found == {name: outcome for name, outcome in stored().items() if name.startswith(words)}
