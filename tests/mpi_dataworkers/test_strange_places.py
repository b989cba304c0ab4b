"""A path that is the user's where the program runs may be a stranger's on the next host: it is not run from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetstream.base.access import owner_of, strange_here
from hetstream.mpi_dataworkers.config import python_environment
from hetstream.mpi_dataworkers.interpreter import Follower, PythonEnvironment
from hetstream.slurm_plugin import program

SOMEBODY, COLLEAGUE = 54321, 54322
ENTERING = """
import json, os, sys
from hetstream.mpi_dataworkers.ops.program import enter_program
from hetstream.mpi_dataworkers.wire.messages import Program
working_dir, entries, owners = json.loads(sys.argv[1])
enter_program(Program(working_dir, entries, {}, True, owners))
print(json.dumps([os.getcwd(), [entry in sys.path for entry in entries]]))
"""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def made(path: Path, owner: int, mode: int = 0o755) -> str:
    path.mkdir()
    os.chown(path, owner, owner)
    path.chmod(mode)
    return str(path)


def test_a_place_is_strange_that_belongs_to_another_user_than_there(tmp_path: Path) -> None:
    theirs, own = made(tmp_path / "theirs", SOMEBODY), made(tmp_path / "own", 0)
    assert strange_here(own, COLLEAGUE) == ""
    assert strange_here(theirs, SOMEBODY) == "", "the environment of a colleague, as on the program's host"
    assert "belongs to" in strange_here(theirs, 0)
    assert "belongs to" in strange_here(theirs, -1)
    assert "anybody can write" in strange_here(made(tmp_path / "open", 0, 0o1777), 0)
    assert strange_here(made(tmp_path / "opened by its user", 0, 0o777), 0) == "", "the program imports from it, too"
    assert "is not on this host" in strange_here(str(tmp_path / "missing"), 0)
    assert owner_of(theirs) == SOMEBODY
    assert owner_of(str(tmp_path / "missing")) == -1


def test_a_program_is_entered_without_strangers_places(tmp_path: Path) -> None:

    own, theirs, colleagues = (
        made(tmp_path / name, owner) for name, owner in (("own", 0), ("theirs", SOMEBODY), ("colleagues", COLLEAGUE))
    )
    missing = str(tmp_path / "missing")
    entries, owners = [own, theirs, colleagues, missing], [0, 0, COLLEAGUE, 0]
    for working_dir, owner, expected in ((own, 0, own), (theirs, 0, str(tmp_path)), (f"{own} (deleted)", -1, None)):
        given = json.dumps([working_dir, entries, [owner, *owners]])
        done = subprocess.run([sys.executable, "-c", ENTERING, given], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == [expected or str(tmp_path), [True, False, True, False]]
        assert f"{theirs} belongs to" in done.stderr
        assert "missing" not in done.stderr


def test_a_strangers_python_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made(tmp_path / "env", SOMEBODY)
    made(tmp_path / "env" / "bin", SOMEBODY)
    python = tmp_path / "env" / "bin" / "python"
    python.symlink_to(sys.executable)
    here = PythonEnvironment.here()
    wanted = replace(
        here, executable=str(python), prefix=str(tmp_path / "env"), variables={"PATH": f"{python.parent}:/usr/bin"}
    )
    wanted = replace(wanted, owners=dict.fromkeys((str(python), str(python.parent), wanted.prefix), 0))
    monkeypatch.setattr("hetstream.mpi_dataworkers.interpreter.announced", lambda _: wanted)
    assert Follower(tmp_path / "address").target() is None
    ours = replace(wanted, owners=dict.fromkeys(wanted.owners, SOMEBODY))
    monkeypatch.setattr("hetstream.mpi_dataworkers.interpreter.announced", lambda _: ours)
    assert Follower(tmp_path / "address").target() == ours, "that of a colleague is the same on both hosts"


def test_nor_are_strangers_places_on_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = made(tmp_path / "theirs", SOMEBODY)
    variables = {
        "PATH": f"{theirs}:/usr/bin", "LD_LIBRARY_PATH": theirs, "PYTHONPATH": f"/usr/lib:{theirs}",
        "PYTHONHOME": theirs, "VIRTUAL_ENV": "/env",
    }  # fmt: skip
    wanted = replace(PythonEnvironment.here(), variables=variables, owners={theirs: 0, "/usr/bin": 0, "/usr/lib": 0})
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda _executable, _argv, environ: started.append(environ))
    program.become(wanted, [])
    kept = {name: started[0].get(name) for name in variables}
    assert kept == {
        "PATH": "/usr/bin", "LD_LIBRARY_PATH": None, "PYTHONPATH": "/usr/lib", "PYTHONHOME": None,
        "VIRTUAL_ENV": "/env",
    }  # fmt: skip


def test_entries_of_paths_begin_where_the_program_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = python_environment({"PYTHONPATH": ".:/mine", "LD_LIBRARY_PATH": ":/opt/x", "PATH": "bin:/bin", "HOME": "/"})
    assert found["PYTHONPATH"] == f"{tmp_path}:/mine"
    assert found["LD_LIBRARY_PATH"] == f"{tmp_path}:/opt/x"
    assert found["PATH"] == f"{tmp_path}/bin:/bin"
