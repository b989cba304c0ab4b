"""What samples make or change in the file system is seen; what Python does by itself is not."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.mpi_dataworkers.ops.changes import acts_on_files


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


ACTS: dict[str, tuple[Callable[[], object], str]] = {
    "empty file": (lambda: Path("new").touch(), "open"),
    "append": (lambda: Path("file").open("a").close(), "open"),
    "copy": (lambda: shutil.copy("file", "new"), "open"),
    "directory": (lambda: os.mkdir("new"), "os.mkdir"),
    "link": (lambda: os.symlink("file", "new"), "os.symlink"),
    "second name": (lambda: os.link("file", "new"), "os.link"),
    "rename": (lambda: os.replace("file", "new"), "os.rename"),
    "remove": (lambda: os.remove("file"), "os.remove"),
    "remove directory": (lambda: shutil.rmtree("directory"), "os.rmdir"),
    "truncate": (lambda: os.truncate("file", 0), "os.truncate"),
}


@pytest.mark.parametrize("name", ACTS)
def test_what_samples_do_to_files_is_seen_though_no_byte_is_written(name: str, place: Path) -> None:
    act, event = ACTS[name]
    with acts_on_files() as found:
        act()
    assert found.act.startswith(f"{event} '{place}/")


def test_what_changes_nothing_and_what_python_does_by_itself_is_not_told(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "fresh_module.py").write_text("open('made_by_import', 'w').close()")
    monkeypatch.syspath_prepend(place)
    with acts_on_files() as found:
        os.makedirs("directory", exist_ok=True)
        (place / "file").read_text()
        with open(os.devnull, "w") as nowhere:
            nowhere.write("x")
        with tempfile.TemporaryFile() as file:
            file.write(b"x")
        with tempfile.NamedTemporaryFile():
            pass
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "own").touch()
        import fresh_module  # type: ignore[import-not-found] # noqa: F401, it writes its byte code
    assert found.act == ""
    Path("new").touch()
    assert found.act == "", "no sample is made"
