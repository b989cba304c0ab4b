"""What torch and Triton compile is loaded only from where nobody else has a hand in it. As root: two users."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hetstream.mpi_dataworkers.errors import FeatureError
from hetstream.mpi_dataworkers.features import compiled_cache
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
from hetstream.mpi_dataworkers.gpu_features.fused import triton_launch
from tests.base.users import STRANGER, VICTIM, needs_root, run_as
from tests.programs import needs

INDUCTOR, TRITON = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"
PROGRAM = """
import sys, torch
from hetstream.mpi_dataworkers.features import operators as ops
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense
from hetstream.mpi_dataworkers.features.transform import FeatureTransform
graph = FeatureGraph.of({"y": dense("x") >> ops.FillNull(0.5, nan=True) >> ops.Clamp(0.01, 3.0)})
transform = FeatureTransform(graph, compiled=True)
for rows in (100, 300):
    print(transform({"x": torch.ones(rows)})["y"][:1].item())
print(sorted({line.split()[-1] for line in open("/proc/self/maps") if line.rstrip().endswith(".so")}), file=sys.stderr)
"""
POISON = "\nimport os\nopen('{said}', 'a').write('%d\\n' % os.getuid())\n"


def made(path: Path, uid: int, mode: int) -> Path:
    """A directory of a user."""
    path.mkdir()
    os.chown(path, uid, uid)
    path.chmod(mode)
    return path


@pytest.fixture(autouse=True)
def place(common_place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files are, root's and sticky, as /tmp; no cache is named."""
    for name in (INDUCTOR, TRITON, "TRITON_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(common_place))
    monkeypatch.setenv("HOME", str(common_place / "home"))
    compiled_cache._of_this_process.cache_clear()
    return common_place


def told(prepare: Callable[[], str], variable: str) -> str:
    """What a victim is told, and where the cache is then."""
    reading, writing = os.pipe()
    run_as(VICTIM, lambda: os.write(writing, f"{prepare()}|{os.environ.get(variable, '')}".encode()) and None)
    os.close(writing)
    with open(reading) as stream:
        return stream.read()


@needs_root
def test_it_is_a_directory_that_nobody_else_can_enter(place: Path) -> None:
    default = str(place / "torchinductor_victim")
    for _ in range(2):
        assert (
            told(lambda: compiled_cache.prepare_inductor(default), INDUCTOR) == f"|{place}/hetstream-inductor-{VICTIM}"
        )
    assert stat.S_IMODE((place / f"hetstream-inductor-{VICTIM}").stat().st_mode) == 0o700


@needs_root
def test_torchs_own_place_is_nobodys_choice_although_torch_writes_it_down(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = str(place / "torchinductor_victim")
    monkeypatch.setenv(INDUCTOR, default)
    made(place / "torchinductor_victim", STRANGER, 0o777)
    assert told(lambda: compiled_cache.prepare_inductor(default), INDUCTOR) == f"|{place}/hetstream-inductor-{VICTIM}"


@needs_root
@pytest.mark.parametrize("taken", ["a directory", "a link", "a file", "one's own, and open once"])
def test_a_name_that_somebody_took_is_left_to_him(place: Path, taken: str) -> None:
    path = place / f"hetstream-inductor-{VICTIM}"
    mine = made(place / "mine", VICTIM, 0o700)
    if taken == "a directory":
        made(path, STRANGER, 0o777)
    elif taken == "a link":
        run_as(STRANGER, lambda: path.symlink_to(mine))
    elif taken == "a file":
        run_as(STRANGER, path.touch)
    else:
        made(path, VICTIM, 0o777)
    why, _, cache = told(lambda: compiled_cache.prepare_inductor("/x"), INDUCTOR).partition("|")
    assert why == ""
    assert cache.startswith(f"{place}/hetstream-inductor-")
    assert Path(cache) != path
    assert stat.S_IMODE(Path(cache).stat().st_mode) == 0o700
    assert Path(cache).stat().st_uid == VICTIM


CHOICES = {
    "a stranger's": (STRANGER, 0o755, "belongs to user"),
    "a stranger's, sticky": (STRANGER, 0o1777, "another user's"),
    "everybody's": (VICTIM, 0o777, "no sticky bit"),
    "one's own": (VICTIM, 0o755, ""),
}


@pytest.mark.shows("what torch and Triton compile is loaded only from where nobody else has a hand in it")
@needs_root
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("variable", [INDUCTOR, TRITON])
def test_one_that_was_chosen_is_used_or_nothing_is_compiled(
    place: Path, monkeypatch: pytest.MonkeyPatch, choice: str, variable: str
) -> None:
    uid, mode, expected = CHOICES[choice]
    path = made(place / "chosen", uid, mode)
    monkeypatch.setenv(variable, str(path))
    prepare = compiled_cache.prepare_triton if variable == TRITON else lambda: compiled_cache.prepare_inductor("/x")
    why, _, cache = told(prepare, variable).partition("|")
    assert cache == str(path)
    assert (f"{variable} leads to {path}" in why) == bool(expected)
    if expected:
        assert any(text in why for text in (expected, "another user's"))


@needs_root
def test_tritons_place_at_home_stays_unless_others_can_change_it(place: Path) -> None:
    home = made(place / "home", VICTIM, 0o755)
    assert told(compiled_cache.prepare_triton, TRITON) == "|"
    made(home / "open", VICTIM, 0o700)
    shutil.rmtree(home / ".triton")
    made(home / ".triton", STRANGER, 0o755)
    assert told(compiled_cache.prepare_triton, TRITON) == f"|{place}/hetstream-triton-{VICTIM}"


@needs_root
def test_a_user_without_a_home_directory_has_tritons_cache_elsewhere(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    assert told(compiled_cache.prepare_triton, TRITON) == f"|{place}/hetstream-triton-{VICTIM}"


@needs_root
def test_where_compilers_files_can_be_swapped_nothing_is_compiled(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(made(place / "open", 0, 0o777)))
    graph = FeatureGraph.of({"y": dense("x", "int64") >> ops.Clamp(0, 5)})
    assert FeatureTransform(graph, compiled=True)({"x": torch.tensor([9])})["y"].tolist() == [5]
    assert "the graph runs without torch.compile: compilers make their files in" in caplog.text
    with pytest.raises(FeatureError, match="Set TMPDIR to another place"):
        triton_launch()


@pytest.mark.shows("what torch and Triton compile is loaded only from where nobody else has a hand in it")
@needs_root
@pytest.mark.slow
@needs("g++")
@pytest.mark.timeout(400)
def test_what_a_stranger_planted_in_torchs_own_place_is_not_run(place: Path) -> None:
    """The same program, run by her with the victim's name before; headers that torch compiles lie there, too."""
    said, planted = place / "said", place / "torchinductor_root"
    environ = {**os.environ, "TMPDIR": str(place), "USER": "root", "LOGNAME": "root", "HOME": str(place)}

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-c", PROGRAM]
        return subprocess.run(argv, env=environ | more, capture_output=True, text=True, timeout=180, check=True)

    own = made(place / "own", 0, 0o700)
    run(**{INDUCTOR: str(own)})
    shutil.copytree(own, planted, dirs_exist_ok=True)
    programs = [*planted.rglob("*.py")]
    assert programs
    for path in programs:
        path.write_text(path.read_text() + POISON.format(said=said))
    headers = planted / "precompiled_headers"
    headers.mkdir(exist_ok=True)
    for path in (planted, *planted.rglob("*")):
        os.chown(path, STRANGER, STRANGER)
        path.chmod(0o777)
    done = run()
    assert done.stdout.split() == ["1.0", "1.0"]
    assert not said.exists()
    assert str(planted) not in done.stderr
    assert [*headers.iterdir()] == []
    assert f"{place}/hetstream-inductor-0/" in done.stderr
