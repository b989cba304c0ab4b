"""Programs and scripts that hetstream makes in temporary directories, where TMPDIR is a place that others can change.

The kernel says what was made there, even for a moment, as it would say to whoever waits for his moment.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hetstream.base.files import temporary_place
from tests.base.users import STRANGER, VICTIM, needs_root, run_as

HETSTREAM = str(Path(sys.executable).with_name("hetstream"))
ROOT = Path(__file__).parents[2]
SCRIPT = "#!/bin/bash\n#HETSTREAM --data-workers=2 --data-worker-partition=cpu\nsrun python train.py\n"
TOOLS = {
    "sinfo": 'printf "gpu*\\ncpu\\n"',
    "scontrol": 'case "$*" in "write batch_script 7 "*) shift 3; echo "$1" >> made; cp train.sbatch "$1";; esac',
    "sbatch": 'for word; do case "$word" in *train.sbatch) echo "$word" >> made; grep -q hetjob "$word" || exit 1; '
    "esac; done; echo 9",
}
BATCH_SCRIPT = "from hetstream.slurm_plugin.client.slurm import CommandSlurm; print(CommandSlurm().batch_script('7'))"
LIBRARY = """
from hetstream.mpi_dataworkers.features import native
made = native.library()
assert made is not None
print(made._name, file=open("made", "w"))
"""
MIGRATE = """
from types import SimpleNamespace
from hetstream.slurm_plugin.cli.migrate import _submit
conversion = SimpleNamespace(plan=None, script=b"# hetjob", environ_of_sbatch=dict)
print(_submit(conversion, [], "train.sbatch", [], "."))
"""
RESUME = """
import torch
from hetstream.checkpoint.integrations.huggingface import FlashCheckpointCallback
from types import SimpleNamespace
callback = FlashCheckpointCallback("ckpt")
parts = dict.fromkeys(("model", "optimizer", "scheduler", "generators"), {"a": torch.ones(1)})
callback._checkpointer.load = lambda: SimpleNamespace(state={**parts, "trainer": {}})
print(callback.resume_folder(), file=open("made", "w"))
callback._checkpointer.close()
"""
PROGRAMS = {
    "features as machine code": [sys.executable, "-c", LIBRARY],
    "a converted script": [HETSTREAM, "sbatch", "train.sbatch"],
    "the script of plain sbatch": [HETSTREAM, "internal", "filter", "", "train.sbatch", "train.sbatch"],
    "the script of a job that moves": [sys.executable, "-c", BATCH_SCRIPT],
    "the script that hetstream migrate submits": [sys.executable, "-c", MIGRATE],
    "the folder from which transformers resume": [sys.executable, "-c", RESUME],
}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A directory with a script, and Slurm's commands, which write down what they are given."""
    (tmp_path / "tools").mkdir()
    for name, text in TOOLS.items():
        (tmp_path / "tools" / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / "tools" / name).chmod(0o755)
    (tmp_path / "train.sbatch").write_text(SCRIPT)
    return tmp_path


def shared(path: Path, owner: int, mode: int) -> Path:
    """A directory for the temporary files of several users."""
    path.mkdir()
    os.chown(path, owner, owner)
    path.chmod(mode)
    return path


@contextlib.contextmanager
def made_in(directory: Path) -> Iterator[list[str]]:
    """Names of all that is made in a directory meanwhile; not those with which Python tries whether it can write."""
    names: list[str] = []
    watch = ctypes.CDLL(None).inotify_init1(os.O_NONBLOCK)
    create_or_moved_here = 0x100 | 0x80
    ctypes.CDLL(None).inotify_add_watch(watch, os.fsencode(directory), create_or_moved_here)
    try:
        yield names
        with contextlib.suppress(BlockingIOError):
            events = os.read(watch, 1 << 20)
            while events:
                length = struct.unpack("iIII", events[:16])[3]
                names.append(events[16 : 16 + length].rstrip(b"\0").decode())
                events = events[16 + length :]
        names[:] = [name for name in names if not re.fullmatch("[a-z0-9_]{8}", name)]
    finally:
        os.close(watch)


@pytest.mark.shows("what is run is not made in a TMPDIR where others could swap it")
@needs_root
@pytest.mark.parametrize(
    "program",
    [pytest.param(name, marks=pytest.mark.slow if PROGRAMS[name][-1] is RESUME else ()) for name in PROGRAMS],
)
@pytest.mark.parametrize(("owner", "mode"), [(0, 0o777), (STRANGER, 0o1777)], ids=["no sticky bit", "a stranger's"])
def test_nothing_that_is_run_is_made_where_others_could_swap_it(
    work: Path, program: str, owner: int, mode: int
) -> None:
    if PROGRAMS[program][-1] is RESUME:
        pytest.importorskip("transformers")
    place = shared(work / "scratch", owner, mode)
    environ = {**os.environ, "TMPDIR": str(place), "PATH": f"{work}/tools:{os.environ['PATH']}"}
    environ["HETSTREAM_FILTER_NONCE"] = "abc"
    with made_in(place) as names:
        done = subprocess.run(
            PROGRAMS[program], cwd=work, env=environ, capture_output=True, text=True, timeout=120, check=False
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert names == []
    if program == "the script of plain sbatch":
        said = done.stdout
        (left,) = re.findall(r"rmdir -- (\S+)", said)  # by the shell of cli_filter.lua, behind sbatch
        shutil.rmtree(left)
    else:
        said = (work / "made").read_text()
    assert "/tmp/" in said
    assert str(place) not in said


@pytest.mark.shows("what is run is not made in a TMPDIR where others could swap it")
@needs_root
def test_another_place_is_taken_where_tmpdir_is_not_safe(
    common_place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    theirs = shared(common_place / "theirs", STRANGER, 0o1777)
    mine = shared(common_place / "mine", VICTIM, 0o700)

    def look() -> None:
        for place, expected in ((mine, mine), (common_place, common_place), (theirs, Path("/tmp"))):
            monkeypatch.setattr("tempfile.tempdir", str(place))
            assert temporary_place() == expected
            assert temporary_place() == expected
        assert [record.message for record in caplog.records if "temporary files are in /tmp, and not" in record.message]
        assert len(caplog.records) == 1

    run_as(VICTIM, look)


@pytest.mark.shows("what is run is not made in a TMPDIR where others could swap it")
def test_every_named_temporary_file_says_where() -> None:
    """A new one without a place would be made in TMPDIR, whoever may write there."""
    found = [
        f"{path.relative_to(ROOT)}:{call.lineno}"
        for path in _sources()
        for call in ast.walk(ast.parse(path.read_text()))
        if isinstance(call, ast.Call)
        and isinstance(call.func, ast.Attribute)
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "tempfile"
        and call.func.attr not in ("gettempdir", "TemporaryFile")
        and not any(keyword.arg == "dir" for keyword in call.keywords)
    ]
    assert found == []


def _sources() -> Iterator[Path]:
    for room in ("slurm_plugin", "hetjob", "mpi_dataworkers", "checkpoint", "hetstream/base"):
        yield from (ROOT / room).rglob("*.py")
