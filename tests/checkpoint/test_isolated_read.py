"""Reading in a process of its own: what it gives and raises, and what ends with it alone."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import pickle
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from hetstream.checkpoint.disk import rank_file
from hetstream.checkpoint.disk.isolated_read import read_apart
from hetstream.checkpoint.errors import DamagedCheckpoint, NoCheckpoint

WaitUntil = Callable[..., None]


def test_what_it_gives_and_what_is_meant_for_the_user_comes_back(tmp_path: Path) -> None:
    assert read_apart(tmp_path, lambda: {"pid": os.getpid()})["pid"] != os.getpid()

    def refuse() -> None:
        raise NoCheckpoint("there is none")

    with pytest.raises(NoCheckpoint, match="there is none"):
        read_apart(tmp_path, refuse)
    with pytest.raises(FileNotFoundError) as error:
        read_apart(tmp_path, lambda: (tmp_path / "none").read_bytes())
    assert error.value.filename == str(tmp_path / "none")


def test_what_a_library_did_not_expect_is_one_line(tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("no such operator\nregistered at: a\nregistered at: b")

    with pytest.raises(DamagedCheckpoint) as error:
        read_apart(tmp_path, fail)
    assert str(error.value).startswith(f"{tmp_path} cannot be converted: RuntimeError: no such operator. ")
    assert "\n" not in str(error.value)


def test_a_library_that_does_not_survive_ends_alone(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="ended with SIGSEGV: it is damaged, or a trap"):
        read_apart(tmp_path, lambda: (faulthandler.disable(), ctypes.string_at(0)))
    with pytest.raises(DamagedCheckpoint, match="ended with exit code 3"):
        read_apart(tmp_path, lambda: os._exit(3))


def test_memory_beyond_the_bounds_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpoint, match="bytes of memory to read: it is damaged, or a trap"):
        read_apart(tmp_path, lambda: len(bytearray(1 << 40)))


def test_a_loop_in_a_library_ends_with_its_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no handler of Python runs: the hash of a tuple that holds itself 2**60 times."""
    monkeypatch.setattr(rank_file, "_BASE_CPU_S", 1)
    levels = b"".join(b"h%ch%c\x86q%c0" % (n, n, n + 1) for n in range(60))
    data = b"\x80\x02)q\x000" + levels + b"}h\x3cNs."

    def work() -> object:
        return pickle.loads(data)

    with pytest.raises(DamagedCheckpoint, match="more than 1 s of processor time"):
        read_apart(tmp_path, work)


def test_who_is_interrupted_cleans_up(tmp_path: Path, wait_until: WaitUntil) -> None:
    """Ctrl-C at a terminal comes to both; `kill -INT` to one alone."""
    begun, cleaned = tmp_path / "begun", tmp_path / "cleaned"

    def work() -> None:
        try:
            begun.touch()
            threading.Event().wait(60)
        finally:
            cleaned.touch()

    def interrupt() -> None:
        wait_until(begun.exists, 30, "the work")
        while not is_over.is_set():
            os.kill(os.getpid(), signal.SIGINT)
            is_over.wait(10)  # Python drops an interrupt that meets its own work after a fork

    is_over = threading.Event()
    thread = threading.Thread(target=interrupt)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            read_apart(tmp_path, work)
    finally:  # else it would interrupt other tests
        is_over.set()
        thread.join()
        signal.signal(signal.SIGINT, before)
    assert cleaned.exists()
