"""A path that is the user's where the program runs may be a stranger's on the next host: it is not run from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from hetstream.base.access import EVERYBODY, owners_of, strange_here, strange_value
from hetstream.mpi_dataworkers.ops.code_globals import Reached, is_own
from hetstream.mpi_dataworkers.ops.pickling import digest_of
from hetstream.mpi_dataworkers.ops.program import SettingsInForce, program_of, settings_of
from hetstream.mpi_dataworkers.process.config import python_environment
from hetstream.mpi_dataworkers.process.interpreter import EnvironmentWatch, PythonEnvironment
from hetstream.mpi_dataworkers.wire.messages import Program
from hetstream.slurm_plugin.submit import program
from tests.base.users import run_as

SOMEBODY, COLLEAGUE = 54321, 54322
NOTHING = Reached([], is_own)
ENTERING = """
import json, os, sys
from hetstream.mpi_dataworkers.ops.program import enter_program
from hetstream.mpi_dataworkers.wire.messages import Program
working_dir, entries, owners = json.loads(sys.argv[1])
owners = {place: [owner] for place, owner in owners.items()}
enter_program(Program(working_dir, entries, {}, True, owners))
print(json.dumps([os.getcwd(), [entry in sys.path for entry in entries]]))
"""
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")


def made(path: Path, owner: int, mode: int = 0o755) -> str:
    path.mkdir()
    os.chown(path, owner, owner)
    path.chmod(mode)
    return str(path)


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory of root's below /tmp, which others reach."""
    with TemporaryDirectory(prefix="strange-") as directory:
        Path(directory).chmod(0o755)
        yield Path(directory)


def test_a_place_is_strange_that_belongs_to_another_user_than_there(place: Path) -> None:
    theirs, own = made(place / "theirs", SOMEBODY), made(place / "own", 0)
    assert strange_here(own, [COLLEAGUE]) == ""
    assert strange_here(theirs, [SOMEBODY]) == "", "the environment of a colleague, as on the program's host"
    assert "belongs to" in strange_here(theirs, [0])
    assert "belongs to" in strange_here(theirs, [])
    assert "anybody can write" in strange_here(made(place / "open", 0, 0o1777), [0, EVERYBODY])
    assert strange_here(made(place / "opened by its user", 0, 0o777), [0]) == "", "the program imports from it, too"
    assert "is not on this host" in strange_here(str(place / "missing"), [0])
    assert owners_of(theirs) == [0, SOMEBODY]
    assert owners_of(str(place / "missing")) == []


def test_whoever_has_something_on_the_way_decides_where_it_leads(place: Path) -> None:
    """A stranger's directory or link leads to what is the user's when somebody looks, and elsewhere later."""
    own, theirs = made(place / "own", 0), made(place / "theirs", SOMEBODY)
    link, below = place / "link", f"{theirs}/link"
    run_as(SOMEBODY, lambda: os.symlink(own, below))
    link.symlink_to(own)
    os.chown(link, SOMEBODY, SOMEBODY, follow_symlinks=False)
    for path in (below, str(link)):
        for look in (strange_here, strange_value):
            assert "belongs to" in look(path, owners_of(own))
            assert look(path, owners_of(path)) == "", "as on the program's host"
    made(place / "open to all", 0, 0o777)
    inner = made(place / "open to all" / "inner", 0)
    for look in (strange_here, strange_value):
        assert "all can write to" in look(inner, [0])
        assert look(inner, owners_of(inner)) == "", "as on the program's host"
    assert owners_of(inner) == [EVERYBODY, 0]


def test_a_value_may_name_what_all_share_on_both_hosts_and_what_is_not_there_yet(place: Path) -> None:
    shared, own = made(place / "shared", 0, 0o1777), made(place / "own", 0)
    assert strange_value(shared, owners_of(shared)) == "", "TMPDIR=/tmp"
    assert "anybody can write" in strange_value(shared, [0])
    assert strange_value(f"{shared}/new", []) == "", "on neither host"
    assert "others could make it" in strange_value(f"{shared}/new", [0])
    assert strange_value(f"{own}/new", [0]) == "", "such as CUDA_HOME on a node without GPUs"
    assert strange_value("/dev/null", owners_of("/dev/null")) == ""
    assert strange_value("/dev/null/x", [0]) == ""


def test_variables_that_lead_to_a_strangers_cache_are_left_out(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What a library loads from its cache on this node is the user's, though the value is that of the program."""
    cache, own = place / "cache", made(place / "own", 0)
    made(cache, 0)
    values = {
        "ANY_HOME": str(cache), "SEVERAL": f"{own}:{cache}::/usr/bin", "HTTP": f"http:{cache}", "PLAIN": "3",
        "OWN": own, "SYSTEM": "/etc/ssl:/usr/bin",
    }  # fmt: skip
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    program, settings = program_of(NOTHING), settings_of(NOTHING)
    assert program.owners[str(cache)] == [0]
    os.chown(cache, SOMEBODY, SOMEBODY)  # as on the next node
    monkeypatch.setenv("OF_THIS_NODE", "/proc/1/root")
    in_force = SettingsInForce(program=program)
    in_force.apply(settings)
    left = {name: os.environ.get(name) for name in values}
    assert left == values | {"ANY_HOME": None, "SEVERAL": f"{own}::/usr/bin"}
    assert os.environ["OF_THIS_NODE"]
    (line,) = {record.getMessage() for record in caplog.records if "ANY_HOME" in record.getMessage()}
    assert f"{cache} belongs to" in line


def test_ranks_whose_hosts_know_other_owners_share_a_pipeline() -> None:
    one, other = Program("/", [], owners={"/x": [0]}), Program("/", [], owners={"/x": [0, 7]})
    assert digest_of(b"", [], one, b"") == digest_of(b"", [], other, b"")


def test_a_program_is_entered_without_strangers_places(tmp_path: Path) -> None:

    own, theirs, colleagues = (
        made(tmp_path / name, owner) for name, owner in (("own", 0), ("theirs", SOMEBODY), ("colleagues", COLLEAGUE))
    )
    missing = str(tmp_path / "missing")
    entries, owners = [own, theirs, colleagues, missing], [0, 0, COLLEAGUE, 0]
    for working_dir, owner, expected in ((own, 0, own), (theirs, 0, str(tmp_path)), (f"{own} (deleted)", -1, None)):
        given = json.dumps([working_dir, entries, dict(zip([working_dir, *entries], [owner, *owners], strict=True))])
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
    wanted = replace(wanted, owners={key: [0] for key in (str(python), str(python.parent), wanted.prefix)})
    monkeypatch.setattr("hetstream.mpi_dataworkers.process.interpreter.announced", lambda _: wanted)
    assert EnvironmentWatch(tmp_path / "address").target() is None
    ours = replace(wanted, owners={key: [SOMEBODY] for key in wanted.owners})
    monkeypatch.setattr("hetstream.mpi_dataworkers.process.interpreter.announced", lambda _: ours)
    assert EnvironmentWatch(tmp_path / "address").target() == ours, "that of a colleague is the same on both hosts"


def test_nor_are_strangers_places_on_its_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = made(tmp_path / "theirs", SOMEBODY)
    variables = {
        "PATH": f"{theirs}:/usr/bin", "LD_LIBRARY_PATH": theirs, "PYTHONPATH": f"/usr/lib:{theirs}",
        "PYTHONHOME": theirs, "VIRTUAL_ENV": "/env",
    }  # fmt: skip
    wanted = replace(
        PythonEnvironment.here(), variables=variables, owners={theirs: [0], "/usr/bin": [0], "/usr/lib": [0]}
    )
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
