"""Injection points: what a request does, when, and once."""

from __future__ import annotations

import errno
import os
import signal
from pathlib import Path

import pytest

from hetstream.base.errors import OptionsError
from hetstream.base.faults import InjectionPoints

POINTS = {"here": "nothing is done", "there": "all is done"}


def test_without_a_request_nothing_happens() -> None:
    points = InjectionPoints("VARIABLE", POINTS, "")
    for point in POINTS:
        points.reach(point)


@pytest.mark.parametrize("text", ["here", "here:0:kill:/x", "here:1:explode:/x", "nowhere:1:kill:/x", "here:1:kill:"])
def test_what_is_malformed_is_refused(text: str) -> None:
    with pytest.raises(OptionsError, match=r"^VARIABLE: .* is not POINT:COUNT:ACTION:FILE .* of here, there$"):
        InjectionPoints("VARIABLE", POINTS, text)


def test_it_happens_at_its_pass_and_once(tmp_path: Path) -> None:
    requests = f"here:2:full:{tmp_path}/first,here:3:full:{tmp_path}/first,there:1:full:{tmp_path}/other"
    points = InjectionPoints("VARIABLE", POINTS, requests)
    points.reach("here")
    with pytest.raises(OSError, match="No space") as raised:
        points.reach("here")
    assert raised.value.errno == errno.ENOSPC
    assert (tmp_path / "first").read_text() == str(os.getpid())
    points.reach("here")
    points.clear()
    points.reach("there")


def test_what_is_requested_after_a_clear_counts_passes_anew(tmp_path: Path) -> None:
    points = InjectionPoints("VARIABLE", POINTS, f"here:1:full:{tmp_path}/first")
    for name in ("second", "third"):
        with pytest.raises(OSError, match="No space"):
            points.reach("here")
        points.reach("here")
        points.clear()
        points.request(f"here:1:full:{tmp_path}/{name}")


@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit", 70)])
def test_a_process_dies_of_it(action: str, status: int, tmp_path: Path) -> None:
    points = InjectionPoints("VARIABLE", POINTS, f"here:1:{action}:{tmp_path}/marker")
    child = os.fork()
    if child == 0:
        points.reach("here")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == status
