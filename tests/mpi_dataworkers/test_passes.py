"""A pass under the start-up hook begins with what the program has, whatever samples of earlier passes have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.hook import environment

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.shows("a loader whose samples change what makes them is local, or refused, from its first step")
@pytest.mark.shows("what samples of a pass have left in memory is gone in the next one, wherever they have left it")
@pytest.mark.parametrize("how", ["both", "anew", pytest.param("seeded", marks=pytest.mark.slow)])
def test_a_pass_has_nothing_that_samples_of_an_earlier_one_left(
    how: str, service: Any, tmp_path: Path, run_program: Any
) -> None:
    service.start_workers(2)
    source = (PROGRAMS / "leaving.py").read_text()
    plain = run_program(source, tmp_path, how)
    assert (plain.returncode, plain.stderr) == (0, "")
    found = run_program(source, tmp_path, how, **environment(service.name, {}))
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == plain.stdout.splitlines()
    lines = found.stderr.splitlines()
    said = {line.split()[4]: line for line in lines}
    repeated = {kind for kind, line in said.items() if "is another one when its process makes it a second time" in line}
    changed = {kind for kind, line in said.items() if "what makes its samples is changed by them" in line}
    assert repeated == {"Remembering", "Library"}, found.stderr
    assert changed == {"Array", "Tensor", "Objects", "Global", "OfClass", "Default"}
    service.stop()
    loaders = json.loads((service.directory / "work" / "summary.json").read_text())["loaders"]
    streamed = [line for line in plain.stdout.splitlines() if line.split()[0] == "8"]
    assert sum(loader["steps"] for loader in loaders) == len(streamed), "of the others all were streamed"
    assert sum(loader["local_steps"] for loader in loaders) == 0
