"""A checkpointer of a test's own, with a directory of its own in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hetstream import CheckpointOptions, FlashCheckpointer
from hetstream.checkpoint.memory.view import StoreView, find_stores
from tests.checkpoint.processes import PYTHON_PATH
from tests.checkpoint.trainers import Trainers

WaitUntil = Callable[..., None]
ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def equal_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoint writers have the priority of the tests that wait for them; see `equal_priority/`."""
    former = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent / 'equal_priority'}{os.pathsep * bool(former)}{former}")


@pytest.fixture
def own_priority(equal_priority: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoint writers lower their priority, as they do for users."""
    monkeypatch.delenv("PYTHONPATH")


@pytest.fixture(scope="session")
def zygote() -> Iterator[subprocess.Popen[str]]:
    """A process that forks trainers; see `programs/zygote.py`."""
    argv = [sys.executable, "-m", "tests.checkpoint.programs.zygote"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "HETSTREAM_"))}
    environ["PYTHONPATH"] = PYTHON_PATH  # see `equal_priority`
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(argv, cwd=ROOT, env=environ, text=True, **pipes) as process:
        yield process


@pytest.fixture
def memory(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Path]:
    """A directory in place of /dev/shm, whose checkpoint writers have ended when the test has."""
    root = Path("/dev/shm") / f"hetstream-test-{os.getpid()}-{tmp_path.name}"[:100]
    root.mkdir(mode=0o700)
    yield root
    wait_until(
        lambda: not any(one.writer_alive for one in find_stores([root])), 60, "the end of all checkpoint writers"
    )
    for found in find_stores([root]):
        with StoreView(found.path) as view:
            view.remove()
    root.rmdir()


@pytest.fixture
def make(tmp_path: Path, memory: Path) -> Callable[..., FlashCheckpointer]:
    """A function that makes a checkpointer for the test's directory."""

    def made(**options: Any) -> FlashCheckpointer:
        names = {*CheckpointOptions.__dataclass_fields__}
        few = {name: options.pop(name) for name in [*options] if name in names}
        return FlashCheckpointer(tmp_path / "ckpt", options=CheckpointOptions(shared_memory=memory, **few), **options)

    return made


@pytest.fixture
def left_memory(wait_until: WaitUntil) -> Iterator[Path]:
    """A directory in place of /dev/shm for trainers that may die; what they leave in it goes with the test."""
    memory = Path(tempfile.mkdtemp(prefix="hetstream-test-", dir="/dev/shm"))
    yield memory
    # Checkpoint writers of dead trainers end by themselves.
    wait_until(
        lambda: not any(one.writer_alive for one in find_stores([memory])), 60, "the end of all checkpoint writers"
    )
    shutil.rmtree(memory)


@pytest.fixture
def trainers(zygote: subprocess.Popen[str], tmp_path: Path, left_memory: Path) -> Trainers:
    return Trainers(zygote, tmp_path, left_memory)
