"""Functions that wait for a module."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetstream.base.process import when_imported

NAME = "hetstream_test_waited_for"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that nobody has imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    path = tmp_path / f"{NAME}.py"
    path.write_text("value = 1\n")
    importlib.invalidate_caches()
    yield path
    sys.modules.pop(NAME, None)


def test_the_function_is_called_once_with_the_whole_module(module: Path) -> None:
    seen: list[int] = []
    before = list(sys.meta_path)
    for _ in range(2):
        when_imported(NAME, lambda module: seen.append(module.value))
    assert importlib.import_module(NAME).value == 1
    assert seen == [1]
    assert sys.meta_path == before
    when_imported(NAME, lambda module: seen.append(module.value + 1))
    assert seen == [1, 2]


def test_a_program_that_only_looks_for_the_module_loses_nothing(module: Path) -> None:
    """As transformers does for torch."""
    seen: list[str] = []
    when_imported(NAME, lambda module: seen.append(module.__name__))
    for _ in range(2):
        assert importlib.util.find_spec(NAME) is not None
    assert seen == []
    found = importlib.import_module(NAME)
    assert seen == [NAME]
    assert found.__spec__ is not None
    assert type(found.__loader__).__module__ == "_frozen_importlib_external"


def test_a_module_that_fails_is_waited_for_further(module: Path) -> None:
    seen: list[str] = []
    when_imported(NAME, lambda module: seen.append(module.__name__))
    module.write_text("raise ValueError\n")
    with pytest.raises(ValueError):  # noqa: PT011
        importlib.import_module(NAME)
    assert seen == []
    module.write_text("value = 22  # of another length\n")
    importlib.invalidate_caches()
    importlib.import_module(NAME)
    assert seen == [NAME]
