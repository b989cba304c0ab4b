"""A pass under the start-up hook begins with what the program has, whatever samples of earlier passes have left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hetstream.mpi_dataworkers.hook import environment

PROGRAMS = Path(__file__).parent / "programs"


@pytest.mark.parametrize("how", ["both", "anew", pytest.param("seeded", marks=pytest.mark.slow)])
def test_a_pass_has_nothing_that_samples_of_an_earlier_one_left(
    how: str, service: Any, tmp_path: Path, run_program: Any
) -> None:
    service.start_workers(2)
    source = (PROGRAMS / "leaving.py").read_text()
    plain = run_program(source, tmp_path, how)
    assert (plain.returncode, plain.stderr) == (0, "")
    found = run_program(source, tmp_path, how, **environment(service.name, {}))
    assert (found.returncode, found.stderr) == (0, ""), found.stderr
    assert found.stdout.splitlines() == plain.stdout.splitlines()
    service.stop()
    loaders = json.loads((service.directory / "work" / "summary.json").read_text())["loaders"]
    assert sum(loader["steps"] for loader in loaders) == len(plain.stdout.splitlines()), "all were streamed"
    assert sum(loader["local_steps"] + loader["differing_steps"] for loader in loaders) == 0
