"""What Triton compiles is loaded only from where nobody else has a hand in it. As root: two users."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.gpu_features.fused import triton_launch
from hetstream.mpi_dataworkers.gpu_features.triton_cache import _of_this_process, prepare_triton
from tests.base.users import STRANGER, VICTIM, needs_root, run_as

TRITON, TRITON_HOME = "TRITON_CACHE_DIR", "TRITON_HOME"


def made(path: Path, uid: int, mode: int) -> Path:
    """A directory of a user."""
    path.mkdir()
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


@pytest.fixture(autouse=True)
def place(common_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are, root's and sticky, as /tmp; no cache is named."""
    for name in (TRITON, TRITON_HOME):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(common_place))
    monkeypatch.setenv("HOME", str(common_place / "home"))
    _of_this_process.cache_clear()
    return common_place


def told() -> str:
    """What a victim is told, and where the cache is then."""
    reading, writing = os.pipe()
    run_as(VICTIM, lambda: os.write(writing, f"{prepare_triton()}|{os.environ.get(TRITON, '')}".encode()) and None)
    os.close(writing)
    with open(reading) as stream:
        return stream.read()


@needs_root
def test_without_a_home_directory_it_is_one_that_nobody_else_can_enter(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    for _ in range(2):
        assert told() == f"|{place}/hetstream-triton-{VICTIM}"
    assert stat.S_IMODE((place / f"hetstream-triton-{VICTIM}").stat().st_mode) == 0o700


@needs_root
@pytest.mark.parametrize("taken", ["a directory", "a link", "a file", "one's own, and open once"])
def test_a_name_that_somebody_took_is_left_to_him(place: Path, monkeypatch: pytest.MonkeyPatch, taken: str) -> None:
    monkeypatch.delenv("HOME")
    path = place / f"hetstream-triton-{VICTIM}"
    mine = made(place / "mine", VICTIM, 0o700)
    if taken == "a directory":
        made(path, STRANGER, 0o777)
    elif taken == "a link":
        run_as(STRANGER, lambda: path.symlink_to(mine))
    elif taken == "a file":
        run_as(STRANGER, path.touch)
    else:
        made(path, VICTIM, 0o777)
    why, _, cache = told().partition("|")
    assert why == ""
    assert cache.startswith(f"{place}/hetstream-triton-")
    assert Path(cache) != path
    assert stat.S_IMODE(Path(cache).stat().st_mode) == 0o700
    assert Path(cache).stat().st_uid == VICTIM


CHOICES = {
    "a stranger's": (STRANGER, 0o755, "belongs to user"),
    "a stranger's, sticky": (STRANGER, 0o1777, "another user's"),
    "everybody's": (VICTIM, 0o777, "no sticky bit"),
    "one's own": (VICTIM, 0o755, ""),
}


@pytest.mark.shows("what Triton compiles is loaded only from where nobody else has a hand in it")
@needs_root
@pytest.mark.parametrize("choice", CHOICES)
def test_one_that_was_chosen_is_used_or_nothing_is_compiled(
    place: Path, monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    uid, mode, expected = CHOICES[choice]
    path = made(place / "chosen", uid, mode)
    monkeypatch.setenv(TRITON, str(path))
    why, _, cache = told().partition("|")
    assert cache == str(path)
    assert (f"{TRITON} leads to {path}" in why) == bool(expected)
    if expected:
        assert any(text in why for text in (expected, "another user's"))


@pytest.mark.shows("what Triton compiles is loaded only from where nobody else has a hand in it")
@needs_root
def test_tritons_place_at_home_stays_unless_others_can_change_it(place: Path) -> None:
    home = made(place / "home", VICTIM, 0o755)
    assert told() == "|"
    made(home / "open", VICTIM, 0o700)
    shutil.rmtree(home / ".triton")
    made(home / ".triton", STRANGER, 0o755)
    assert told() == f"|{place}/hetstream-triton-{VICTIM}"


@needs_root
def test_where_compilers_files_can_be_swapped_nothing_is_compiled(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(made(place / "open", 0, 0o777)))
    with pytest.raises(FeatureError, match="Set TMPDIR to another place"):
        triton_launch()
