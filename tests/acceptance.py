"""What hetstream does, and the tests that show it: `python -m tests.acceptance [WORD ...]` prints it as Markdown.

A test says what it shows by `@pytest.mark.shows("what is shown")`. The marks are read from the syntax trees, so no test
is imported. With words, only lines that have all of them are printed.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MOST_CHARACTERS = 120


def shown() -> dict[str, list[str]]:
    """What is shown -> the tests that show it, as pytest takes them; in the order of files and lines."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for name, text in marks_in(ast.parse(path.read_text())):
            found.setdefault(text, []).append(f"{path.relative_to(ROOT)}::{name}")
    return found


def marks_in(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, str]]:
    """Each test below a node with what it shows.

    Raises:
        ValueError: a mark has no text of its own, or one that is too long to be read.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from marks_in(node, f"{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.shows":
                    text = mark.args[0].value if len(mark.args) == 1 and isinstance(mark.args[0], ast.Constant) else ""
                    if not isinstance(text, str) or not 0 < len(text) <= MOST_CHARACTERS:
                        raise ValueError(
                            f"{inside}{node.name}: shows() takes one text of 1 to {MOST_CHARACTERS} letters"
                        )
                    yield f"{inside}{node.name}", text


def page(words: list[str]) -> str:
    """All of it as Markdown: each line stands below the folder that most of its tests are in."""
    parts: dict[str, list[str]] = {}
    for text, tests in shown().items():
        if all(word.lower() in text.lower() for word in words):
            folders = Counter("/".join(test.split("/")[:-1][:2]) for test in tests)
            part = parts.setdefault(folders.most_common(1)[0][0], [])
            part += [f"* {text}", *(f"  - `{test}`" for test in tests)]
    lines = ["# What hetstream does, and the tests that show it"]
    for folder in sorted(parts):
        lines += ["", f"## {folder}", "", *parts[folder]]
    return "\n".join(lines)


if __name__ == "__main__":
    print(page(sys.argv[1:]))
