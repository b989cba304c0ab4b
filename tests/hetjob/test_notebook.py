"""`with hetstream.data_workers(2):`, in a real Jupyter kernel and in a program."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

import hetstream
from hetstream.errors import MasterError, UsageError

CELLS = [
    """
import os, time, torch, hetstream
from hetstream import DataLoader

class Squares:
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.tensor([index, index**2, os.getpid()])

def new_loader():
    return DataLoader(Squares(), batch_size=4, shuffle=True, seed=3)

alone = torch.cat([*new_loader()])
""",
    """
others = set()
with hetstream.data_workers(1):
    loader, deadline = new_loader(), time.monotonic() + 60
    while not others and time.monotonic() < deadline:
        loader.set_epoch(0)
        given = torch.cat([*loader])
        assert given[:, :2].equal(alone[:, :2])
        others = {*given[:, 2].tolist()} - {os.getpid()}
        time.sleep(0.5)
    loader.close()
print(len(others))
""",
    """
print({*torch.cat([*new_loader()])[:, 2].tolist()} == {os.getpid()}, "HETSTREAM_SERVICE" in os.environ)
""",
]
# The program ends within the block in one of these ways.
KILLED = """
import os, signal, sys, time, hetstream
if __name__ == "__main__":
    with hetstream.data_workers(1):
        print(os.environ["HETSTREAM_SERVICE"].removeprefix("file:"), flush=True)
        time.sleep(60)
"""


@pytest.mark.shows("in a notebook `with hetstream.data_workers(2):` has data workers make the batches, the same ones")
def test_a_cell_has_data_workers_for_a_block(tmp_path: Path) -> None:
    places = dict.fromkeys(("HOME", "IPYTHONDIR", "JUPYTER_RUNTIME_DIR"), str(tmp_path))
    environ = {name: value for name, value in os.environ.items() if name != "HETSTREAM_SERVICE"} | places
    written = tmp_path / "cells.ipynb"
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS]), written)
    execute = Path(sys.executable).with_name("jupyter-execute")  # nbclient's, in a process of its own
    command = [execute, "--inplace", "--kernel_name=python3", "--timeout=120", written]
    subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, check=True, timeout=200)
    cells = nbformat.read(written, as_version=4).cells
    said = ["".join(out.text for out in cell.outputs if out.get("name") == "stdout") for cell in cells]
    assert said == ["", "1\n", "True False\n"]


def processes_of(directory: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if directory.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("name", ["SIGKILL", "SIGINT"])
def test_nothing_outlives_the_block(name: str, tmp_path: Path, wait_until: Callable[..., None]) -> None:
    (tmp_path / "program.py").write_text(KILLED)
    environ = {**os.environ, "TMPDIR": str(tmp_path)}
    environ.pop("HETSTREAM_SERVICE", None)
    command = [sys.executable, "program.py"]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as program:
        assert program.stdout is not None
        directory = str(Path(program.stdout.readline().strip()).parent)
        wait_until(lambda: len(processes_of(directory)) >= 2, what="dispatcher and data worker")
        program.send_signal(signal.Signals[name])
        program.wait(30)
    wait_until(lambda: not processes_of(directory), what="their end")
    assert Path(directory).exists() == (name == "SIGKILL"), "the next command removes what a killed one has left"


def test_what_cannot_be_meant_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[Any] = [0, 1.5, "2", True, 10**7]
    for number in numbers:
        with (
            pytest.raises(UsageError, match=r"data_workers\(count=.*\): a whole"),
            hetstream.data_workers(number),
        ):
            pass
    monkeypatch.setenv("HETSTREAM_SERVICE", "file:/somewhere")
    with pytest.raises(MasterError, match="has data workers already"), hetstream.data_workers(2):
        pass
