"""Tests that did not run are counted by reason, and in continuous integration none vanishes."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import programs
from tests.conftest import slow_tests
from tests.skips import EXPECTED, expected_reasons

TESTS = Path(__file__).parent
SUITE = """
import pytest
@pytest.mark.parametrize("number", range(3))
def test_of_a_program(number):
    pytest.skip("lua5.9 is not here: apt-get install lua5.9")
@pytest.mark.skipif(True, reason="no CUDA device")
def test_of_a_gpu():
    pass
@pytest.mark.xfail(reason="known")
def test_of_a_known_fault():
    assert False
def test_that_runs():
    pass
"""
FILE_WITHOUT_A_PACKAGE = "import pytest\npytest.importorskip('no_such_package')\ndef test(): pass\n"


def pytest_over(directory: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("CI", "PYTEST"))} | environ
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.skips", "-p", "no:cacheprovider", *arguments, directory]
    root = {"PYTHONPATH": str(TESTS.parent)}
    return subprocess.run(argv, env=environ | root, cwd=directory, capture_output=True, text=True, timeout=120)


@pytest.mark.shows("skipped tests are counted by reason; in continuous integration a group that vanishes fails")
@pytest.mark.parametrize("processes", [("-n", "2"), pytest.param((), marks=pytest.mark.slow)])
def test_skips_are_counted_by_reason(processes: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = pytest_over(tmp_path, *processes)
    assert done.returncode == 0, done.stdout
    assert "\n    3  lua5.9 is not here: apt-get install lua5.9\n    1  no CUDA device\n" in done.stdout


@pytest.mark.shows("skipped tests are counted by reason; in continuous integration a group that vanishes fails")
@pytest.mark.parametrize("processes", [("-n", "2"), pytest.param((), marks=pytest.mark.slow)])
def test_in_continuous_integration_a_group_that_vanishes_fails(processes: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "test_suite.py").write_text(SUITE)
    done = pytest_over(tmp_path, *processes, CI="true")
    assert done.returncode == 1
    assert "3 failed, 1 passed, 1 skipped, 1 xfailed" in done.stdout
    assert "skipped in continuous integration: lua5.9 is not here" in done.stdout
    (tmp_path / "test_suite.py").write_text(FILE_WITHOUT_A_PACKAGE)
    assert pytest_over(tmp_path, *processes).returncode == 5, "no test ran"
    assert pytest_over(tmp_path, *processes, CI="true").returncode not in (0, 5)


def test_what_continuous_integration_runs_says_that_it_is(tmp_path: Path) -> None:
    """Its command with a `make` that prints what it is told, and without a CI of the environment's."""
    (tmp_path / "make").write_text('#!/bin/sh\necho "CI=$CI $*"\n')
    (tmp_path / "make").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for said, expected in (({}, "true"), ({"CI": "2"}, "2")):
        done = subprocess.run(
            [TESTS.parent / ".ci/run"], env=environ | said, capture_output=True, text=True, check=True, timeout=60
        )
        assert done.stdout == f"CI={expected} test\n"


@pytest.mark.shows("`make test` installs the programs that its tests want, and says what it cannot have")
def test_what_skips_for_want_of_a_program_asks_for_one_that_make_test_installs() -> None:
    """No function, with its marks, and no other statement looks for a program itself and skips."""
    found = []
    for path in TESTS.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
            if "which" in names and names & {"skip", "skipif"} and path.name != "programs.py":
                found.append(
                    f"{path.relative_to(TESTS)}:{node.lineno}: @needs(...) or require(...) of tests/programs.py"
                )
    assert found == []


def test_a_missing_program_has_a_reason_that_helps(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert programs.why_missing("lua5.1") == "lua5.1 is not here: apt-get install lua5.1"
    with pytest.raises(KeyError):
        programs.why_missing("no-such-program")


@pytest.mark.shows("`make test` installs the programs that its tests want, and says what it cannot have")
@pytest.mark.skipif(os.geteuid() != 0, reason="installing needs root")
def test_what_cannot_be_installed_is_said_and_the_others_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With an apt-get that knows one package, and that alone: it is installed, each other is one line."""
    (tmp_path / "apt-get").write_text(
        '#!/bin/sh\ncase "$*" in *"--no-install-recommends lua5.4") ;; *) exit 100 ;; esac\n'
        f'printf "#!/bin/sh\\n" > {tmp_path}/lua5.4; /bin/chmod +x {tmp_path}/lua5.4\n'
    )
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("tests.devcluster.install.POLICY_FILE", tmp_path / "policy-rc.d")
    programs.main([])
    reasons = [line for line in capsys.readouterr().err.splitlines() if line.endswith("Its tests are skipped")]
    assert len(reasons) == len(programs.PACKAGES) - 1
    assert not any("lua5.4" in reason for reason in reasons)


def test_expected_reasons_are_patterns_of_a_line_each() -> None:
    patterns = expected_reasons(EXPECTED.read_text())
    assert any(pattern.search("no CUDA device") for pattern in patterns)
    assert not any(pattern.search("lua5.4 is not here: apt-get install lua5.4") for pattern in patterns)


def test_what_is_called_slow_is_there() -> None:
    slow, one_of = slow_tests()
    assert one_of, "a few cases are quick, the others slow"
    for line in {*slow, *one_of}:
        path, _, name = line.partition("[")[0].partition("::")
        assert f"def {name}(" in (TESTS.parent / path).read_text(), line
