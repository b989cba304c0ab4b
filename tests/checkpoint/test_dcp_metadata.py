"""The metadata of torch.distributed.checkpoint, a pickle that each release of Python writes in its own way: they are
read, and nothing that a pickle asks for beyond them is looked up or called."""

from __future__ import annotations

import enum
import functools
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

from hetstream.checkpoint.convert.weights import read_dcp
from hetstream.checkpoint.errors import DamagedCheckpoint

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
ROOT = Path(__file__).parents[2]
STATE = {"model": {"weight": torch.arange(12.0).view(3, 4)}, "names": [1, "x"]}
WRITE = """
import sys, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed.checkpoint as dcp
state = {"model": {"weight": torch.arange(12.0).view(3, 4)}, "names": [1, "x"]}
dcp.save(state, checkpoint_id=sys.argv[1])
"""


class ByAttribute(pickle.Pickler):
    """Writes the members of enums as Python 3.11.0 to 3.11.3 do (`Enum.__reduce_ex__` there)."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, enum.Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


class Asks:
    """Pickled as the result of a call."""

    def __init__(self, function: Any, *values: Any) -> None:
        self.call = function, values

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    dcp.save(STATE, checkpoint_id=tmp_path / "dcp")
    return tmp_path / "dcp"


def check(path: Path) -> None:
    state = read_dcp(path)
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])  # type: ignore[call-overload]
    assert state["names"] == STATE["names"]


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_members_of_enums_by_attribute_are_read(plain: Path, protocol: int) -> None:
    found = pickle.loads((plain / ".metadata").read_bytes())
    out = io.BytesIO()
    ByAttribute(out, protocol).dump(found)
    assert b"getattr" in out.getvalue()
    (plain / ".metadata").write_bytes(out.getvalue())
    check(plain)


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (_MEM_FORMAT_ENCODING, "__class__"),
        (_MEM_FORMAT_ENCODING, "mro"),
        (_MEM_FORMAT_ENCODING, "_member_map_"),
        (_MEM_FORMAT_ENCODING.TORCH_CONTIGUOUS_FORMAT, "__class__"),
        (torch.Size, "__subclasses__"),
        (dcp.Metadata, "__init__"),
        ("text", "format"),
    ],
)
def test_no_other_attribute_is_given(plain: Path, value: Any, name: str) -> None:
    (plain / ".metadata").write_bytes(pickle.dumps(Asks(getattr, value, name)))
    with pytest.raises(DamagedCheckpoint, match="nothing of it was run: UnpicklingError: it names the attribute"):
        read_dcp(plain)


def test_a_path_that_doubles_itself_takes_no_memory(plain: Path) -> None:
    """Where it was saved is named by a path, which nobody needs: its parts are never joined."""
    # One path of two parts, 60 times put together from itself: 2**60 letters, if it were made.
    calls = b"cpathlib\nPosixPath\nq\x00" + b"h\x00X\x01\x00\x00\x00aX\x01\x00\x00\x00b\x86Rq\x01"
    calls += b"0" + b"".join(b"h\x00h%ch%c\x86Rq%c0" % (n, n, n + 1) for n in range(1, 61))
    (plain / ".metadata").write_bytes(b"\x80\x02" + calls + pickle.dumps(None, 2)[2:])
    with pytest.raises(DamagedCheckpoint, match="nothing of it was run"):
        read_dcp(plain)


@functools.cache
def _old_python() -> str:
    """A Python that writes members of enums by attribute and can use the packages of this environment, as Debian 12's;
    "" where there is none."""
    for path in ("/usr/bin/python3", "/usr/bin/python3.11"):
        if os.access(path, os.X_OK):
            argv = [path, "-c", "import sys; print(*sys.version_info[:3])"]
            version = tuple(map(int, subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()))
            if (3, 11, 0) <= version < (3, 11, 4) and sys.version_info[:2] == (3, 11):
                return path
    return ""


def _run_old(*argv: str) -> subprocess.CompletedProcess[str]:
    if not _old_python():
        pytest.skip("no Python 3.11.0 to 3.11.3 that can use this environment's packages, such as Debian 12's")
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(Path(torch.__file__).parents[1])])}
    return subprocess.run([_old_python(), *argv], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_what_an_old_python_has_written_is_read(tmp_path: Path) -> None:
    done = _run_old("-c", WRITE, str(tmp_path / "dcp"))
    assert done.returncode == 0, done.stderr
    assert b"getattr" in (tmp_path / "dcp" / ".metadata").read_bytes()
    check(tmp_path / "dcp")


def test_an_old_python_converts_what_a_newer_one_has_written_and_its_own(plain: Path, tmp_path: Path) -> None:
    for source in (plain, tmp_path / "own"):
        target = tmp_path / f"{source.name}.pt"
        if source != plain:
            assert _run_old("-c", WRITE, str(source)).returncode == 0
        done = _run_old(
            "-m", "hetstream.slurm_plugin.cli", "ckpt", "convert", str(source), str(target), "--to", "torch"
        )
        assert done.returncode == 0, done.stderr
        back = torch.load(target, weights_only=True)
        assert torch.equal(back["model"]["weight"], STATE["model"]["weight"])  # type: ignore[call-overload]
