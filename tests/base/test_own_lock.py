"""A lock that nobody but its user can hold."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hetstream.base.files import UntrustedFile
from hetstream.base.locks import keep_to_owner, own_lock
from tests.base.users import STRANGER, needs_root, run_as

HOLD = (
    "import sys; from pathlib import Path; from hetstream.base.locks import own_lock\n"
    "with own_lock(Path(sys.argv[1]), 60.0):\n    print('held', flush=True); sys.stdin.read()"
)


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    tmp_path.chmod(0o1777)
    return tmp_path / "lock"


def holder(lock: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"held\n"
    return process


def test_two_processes_do_not_hold_it_at_once(lock: Path) -> None:
    with holder(lock) as first:
        with pytest.raises(TimeoutError, match="fuser -v"), own_lock(lock, 0.1):
            pytest.fail("two processes hold one lock")
        first.communicate()
    with own_lock(lock, 60.0):
        assert lock.exists()
    assert not lock.exists(), "nothing is left"


def test_it_goes_with_a_process_that_is_killed(lock: Path) -> None:
    with holder(lock) as first:
        first.send_signal(signal.SIGKILL)
        first.communicate()
    assert lock.exists()
    with own_lock(lock, 0.0):
        pass
    assert not lock.exists()


def test_who_waited_while_it_was_removed_takes_the_one_that_is_there(lock: Path) -> None:
    """The file that was opened has no name any more when the wait is over."""
    total = lock.with_name("total")
    total.write_text("0")
    count = (
        "import sys; from pathlib import Path; from hetstream.base.locks import own_lock\n"
        "total = Path(sys.argv[2])\n"
        "for _ in range(200):\n"
        "    with own_lock(Path(sys.argv[1]), 60.0):\n        total.write_text(str(int(total.read_text()) + 1))"
    )
    processes = [subprocess.Popen([sys.executable, "-c", count, str(lock), str(total)]) for _ in range(3)]
    assert [process.wait(120) for process in processes] == [0, 0, 0]
    assert total.read_text() == "600"


@pytest.mark.shows("locks of `/dev/shm` and squatted names there hold no trainer up")
@needs_root
def test_a_stranger_cannot_hold_it(lock: Path) -> None:
    def hold() -> None:
        descriptor = os.open(lock.parent, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.close(descriptor)
        with pytest.raises(PermissionError):
            os.open(lock, os.O_RDONLY)

    for parent in lock.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    with own_lock(lock, 1.0):
        run_as(STRANGER, hold)
    directory = os.open(lock.parent, os.O_RDONLY)
    try:
        fcntl.flock(directory, fcntl.LOCK_EX)  # whose holder may be anybody
        with own_lock(lock, 0.0):
            pass
    finally:
        os.close(directory)


@pytest.mark.parametrize("kind", ["open to others", "link", "directory", "pipe"])
def test_what_others_have_put_there_is_no_lock(lock: Path, kind: str) -> None:
    other = lock.with_name("other")
    if kind == "open to others":
        lock.touch(0o600)
        lock.chmod(0o644)
    elif kind == "link":
        lock.symlink_to(other)
    elif kind == "directory":
        lock.mkdir()
    else:
        os.mkfifo(lock, 0o600)
    with pytest.raises(OSError, match=f"{lock}"), own_lock(lock, 0.0):
        pytest.fail("it is held")
    assert not other.exists()
    assert lock.exists() or lock.is_symlink()


@needs_root
def test_a_strangers_file_is_no_lock(lock: Path) -> None:
    lock.touch(0o600)
    os.chown(lock, STRANGER, STRANGER)
    with pytest.raises((UntrustedFile, PermissionError)), own_lock(lock, 0.0):
        pytest.fail("it is held")


def test_a_file_of_ours_under_the_name_of_a_lock_keeps_its_mode(tmp_path: Path) -> None:
    """Somebody has given it that name, too (link(2)), and waits for what becomes of it."""
    page, lock = tmp_path / "page.html", tmp_path / "lock"
    page.write_text("for all\n")
    page.chmod(0o644)
    os.link(page, lock)
    with open(lock) as file:
        keep_to_owner(file.fileno())
        assert page.stat().st_mode & 0o777 == 0o644
        page.unlink()
        keep_to_owner(file.fileno())
        assert lock.stat().st_mode & 0o777 == 0o600
