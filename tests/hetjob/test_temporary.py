"""Directories of commands: removed at their end, and by the next command after a kill; nothing else is touched."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.hetjob.job.processes import remove_leftovers, temporary_directory

HOLD = """
import sys
from hetstream.hetjob.job.processes import temporary_directory
with temporary_directory() as directory:
    (directory / "dispatcher").mkdir()
    (directory / "dispatcher" / "journal").write_text("keys")
    print(directory, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def test_a_directory_is_gone_with_its_command(place: Path) -> None:
    with temporary_directory() as directory:
        assert directory.stat().st_mode & 0o777 == 0o700
        (directory / "inner").mkdir()
        (directory / "inner" / "file").touch()
        assert remove_leftovers(place) == [], "it is in use"
    assert list(place.iterdir()) == []


def test_what_a_killed_command_left_goes_with_the_next(place: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as one:
        assert one.stdout is not None
        left = Path(one.stdout.readline().strip())
        assert remove_leftovers(place) == []
        one.kill()
        one.communicate()
    assert (left / "dispatcher" / "journal").exists()
    outside = place / "outside"
    outside.write_text("kept")
    (left / "link").symlink_to(outside)
    with temporary_directory() as directory:
        assert [path for path in place.iterdir() if path.is_dir()] == [directory]
    assert outside.read_text() == "kept"


def test_what_is_not_such_a_directory_stays(place: Path) -> None:
    (place / "hetstream-mine").mkdir()  # without a lock file: of something else
    (place / "hetstream-file").touch()
    (place / "elsewhere").mkdir()
    (place / "elsewhere" / ".in-use").touch(0o600)
    (place / "hetstream-link").symlink_to(place / "elsewhere")
    open_to_all = place / "hetstream-open"
    open_to_all.mkdir()
    (open_to_all / ".in-use").touch(0o600)
    open_to_all.chmod(0o777)
    before = sorted(place.rglob("*"))
    assert remove_leftovers(place) == []
    assert sorted(place.rglob("*")) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's directory")
def test_another_users_directory_stays(place: Path) -> None:
    theirs = place / "hetstream-theirs"
    theirs.mkdir()
    (theirs / ".in-use").touch(0o600)
    os.chown(theirs, 65534, 65534)
    assert remove_leftovers(place) == []
    assert theirs.exists()


def test_hetstream_run_cleans_up_after_one_that_was_killed(place: Path, wait_until: Callable[..., None]) -> None:
    hetstream = str(Path(sys.executable).with_name("hetstream"))
    words = [hetstream, "run", "--data-workers", "1", "--", "sleep", "600"]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as killed:
        wait_until(lambda: list(place.glob("hetstream-*/address")), timeout_s=60, what="the service")
        killed.kill()
    (left,) = place.glob("hetstream-*")
    subprocess.run([*words[:5], "true"], check=True, capture_output=True, timeout=60)
    assert not left.exists()
    assert not list(place.glob("hetstream-*"))
