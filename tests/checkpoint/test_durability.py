"""What a power cut would find: a SIGKILL loses nothing that was not synced, so the order of the calls is looked at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from hetstream.checkpoint.record.layout import Generation
from tests.checkpoint.parts import write_checkpoint


def path_of(name: Any, directory: int | None) -> Path:
    """The whole path of a name, which may be one in an open directory."""
    return Path(name) if directory is None else Path(os.readlink(f"/proc/self/fd/{directory}"), name)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Path]]:
    """Every sync and every move that follows: `sync PATH`, `from PATH`, `to PATH`."""
    found: list[tuple[str, Path]] = []
    real = {name: getattr(os, name) for name in ("fsync", "fdatasync", "rename", "replace")}

    def sync(name: str) -> Any:
        def synced(descriptor: int) -> None:
            real[name](descriptor)
            found.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

        return synced

    def move(name: str) -> Any:
        def moved(source: Any, target: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None) -> None:
            whole = path_of(source, src_dir_fd)
            if not whole.is_symlink():
                found.append(("from", whole))
            real[name](source, target, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd)
            found.append(("to", path_of(target, dst_dir_fd)))

        return moved

    for name in real:
        monkeypatch.setattr(os, name, (sync if "sync" in name else move)(name))
    return found


@pytest.mark.shows("`latest` moves last, by rename, after every file was synced, and never back")
@pytest.mark.shows("tensor files are synced, and no file is written in place")
def test_latest_moves_when_every_file_and_directory_is_on_disk(calls: list[tuple[str, Path]], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, Generation(1, 120), world_size=2)
    moved = calls.index(("to", tmp_path / "latest"))
    before = calls[:moved]
    partial = tmp_path / "step-0000000120.1.partial"
    files = [path for kind, path in before if kind == "from" and path.is_relative_to(partial)]
    assert len(files) == 1 + 2 * 2, "two files of two ranks, and their directory"
    for number, (kind, path) in enumerate(before):
        if kind == "from":  # a name never comes to what is not on disk itself
            assert ("sync", path) in before[:number], path
        if kind == "to":
            assert ("sync", path.parent) in before[number:], path
    assert calls[moved + 1 :] == [("sync", tmp_path)], "and then latest itself"
