"""One word for one thing: names that other words have replaced stay away. CONTRIBUTING.md has the table."""

from __future__ import annotations

import ast
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("benchmarks", "checkpoint", "hetjob", "hetstream", "mpi_dataworkers", "sbatch_templates", "slurm_plugin")
# Words of others' interfaces: torch.distributed.checkpoint's, tf.data service's.
FOREIGN = ("state_dict_saver", "consumer_index", "num_consumers")
# Variables that say nothing of what they hold.
PRONOUNS = {"one", "rest", "told", "words"}
# A retired class's name in lower case, as a variable has it, where it is a plain word: `pass` is one of Python's.
PLAIN = {
    "pass": FOLDERS,
    "verdict": FOLDERS,
    "turn": ("benchmarks", "hetjob", "hetstream", "mpi_dataworkers", "sbatch_templates", "slurm_plugin"),
}


def retired() -> list[str]:
    """The first column of the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    words = re.findall(r"^\| `(\w+)` \|", text[text.index("## Words") :], re.M)
    assert len(words) > 10
    return words


def parts(name: str) -> set[str]:
    """What a name is made of, in lower case and singular: `LoaderLeft`, `_loader_left`."""
    pieces = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {piece.lower().removesuffix("s") for piece in pieces}


def lower_case(word: str) -> str:
    """What a variable of a class is called: `SessionRecord`, `session_record`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).lower()


def is_variable_of(name: str, words: set[str]) -> bool:
    """Whether a name, with its unit, is one of these: `_TURN_S`, `turns`."""
    stem = name.lower().strip("_")
    return not {stem, stem.removesuffix("s"), stem.removesuffix("_s")}.isdisjoint(words)


def names(path: Path) -> Iterator[str]:
    yield path.stem
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.NAME and token.string not in FOREIGN:
            yield token.string


def variables(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Parameters and local names that a module sets, with their lines; not the fields of its classes."""
    fields = {id(field) for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for field in node.body}
    fields = {id(node.target) for node in ast.walk(tree) if isinstance(node, ast.AnnAssign) and id(node) in fields}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and id(node) not in fields:
            yield node.id, node.lineno


@pytest.mark.parametrize("name", ["turn", "turns", "_TURN_S", "_session_record"])
def test_a_retired_class_leaves_no_variable(name: str) -> None:
    assert is_variable_of(name, {"turn", "session_record"})
    assert not is_variable_of(f"re{name}", {"turn", "session_record"})


@pytest.mark.parametrize("folder", FOLDERS)
def test_retired_words_are_in_no_name(folder: str) -> None:
    gone = retired()
    general = {word for word in gone if word.islower()}
    exact = {*gone} - general
    variables = {lower_case(word) for word in exact}
    variables -= {word for word, folders in PLAIN.items() if folder in folders}
    found = set()
    for path in sorted((ROOT / folder).rglob("*.py")):
        if not path.is_symlink():
            found |= {
                f"{path.relative_to(ROOT)}: {name}"
                for name in names(path)
                if name in exact or parts(name) & general or is_variable_of(name, variables)
            }
    assert not found


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "benchmarks"])
def test_a_variable_is_named_after_what_it_holds(folder: str) -> None:
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        if not path.is_symlink():
            tree = ast.parse(path.read_text())
            found += [f"{path.relative_to(ROOT)}:{line}: {name}" for name, line in variables(tree) if name in PRONOUNS]
    assert not found


@pytest.mark.parametrize("folder", [folder for folder in FOLDERS if folder != "benchmarks"])
def test_a_number_is_told_with_its_noun_in_the_right_form(folder: str) -> None:
    """`count_words` and `list_words` of `hetstream/base/text.py` write "1 worker" and "2 workers"."""
    found = []
    for path in sorted((ROOT / folder).rglob("*.py")):
        tree = ast.parse(path.read_text())
        found += [
            f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
            if "(s)" in node.value.replace("DataLoader worker (pid(s)", "")  # torch's own message
        ]
    for path in sorted((ROOT / folder).rglob("*.lua")):
        found += [
            f"{path.relative_to(ROOT)}: {text}" for text in re.findall(r'"[^"\n]*\(s\)[^"\n]*"', path.read_text())
        ]
    assert not found


def test_retired_words_are_in_no_text_for_users() -> None:
    words = "|".join(word for word in retired() if word.islower())
    files = subprocess.run(
        ["git", "ls-files", "README.md", "docs", "sbatch_templates"], cwd=ROOT, capture_output=True, text=True
    )
    if files.returncode:
        pytest.skip("no git checkout")
    found = []
    for name in files.stdout.split():
        path = ROOT / name
        if path.suffix in (".md", ".sbatch", ".py"):
            text = re.sub("|".join(FOREIGN), "", path.read_text())
            found += [f"{name}: {match}" for match in re.findall(rf"\b(?:{words})s?\b", text, re.I)]
    assert not found
