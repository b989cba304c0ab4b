"""How many tests did not run, and why: a line for each reason at the end.

In continuous integration (CI=true) a skipped test fails unless its reason is in `skips_in_ci.txt`: a group of tests
that ran before does not vanish because a program or a package is missing on a machine.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

EXPECTED = Path(__file__).with_name("skips_in_ci.txt")


def expected_reasons(text: str) -> list[re.Pattern[str]]:
    """The patterns of a file, a line each; blank lines and those that begin with `#` are none."""
    lines = (line.strip() for line in text.splitlines())
    return [re.compile(line) for line in lines if line and not line.startswith("#")]


def reason_of(report: Any) -> str:
    """Why a test or a file was skipped; "" if it was not, or is expected to fail."""
    if not report.skipped or hasattr(report, "wasxfail"):
        return ""
    longrepr = report.longrepr
    text = str(longrepr[2] if isinstance(longrepr, tuple) else longrepr)
    return text.removeprefix("Skipped: ")


def refuse(report: Any) -> None:
    """Let a skipped test fail whose reason is not expected."""
    reason = reason_of(report)
    if reason and not any(pattern.search(reason) for pattern in expected_reasons(EXPECTED.read_text())):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped in continuous integration: {reason}\n"
            f"It ran there before. Install what is missing (tests/programs.py), or add the reason to {EXPECTED.name}."
        )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    report = yield
    if os.environ.get("CI"):
        refuse(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Iterator[Any]:
    report = yield
    if os.environ.get("CI"):
        refuse(report)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say how many tests were skipped, by reason, the most first."""
    counted = Counter(filter(None, map(reason_of, terminalreporter.stats.get("skipped", []))))
    if counted:
        terminalreporter.section("not run")
        for reason, count in counted.most_common():
            terminalreporter.write_line(f"{count:5d}  {reason}")
