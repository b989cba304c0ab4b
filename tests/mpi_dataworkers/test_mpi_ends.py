"""However a trainer of an MPI world ends: its exit handlers run to their ends, and its exit code is the launcher's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.mpi_dataworkers.conftest import PROGRAMS
from tests.mpi_dataworkers.test_mpi import BIN, MPIEXEC, in_world

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec beside Python: pip install 'hetstream[mpi]'"),
]


# What the launcher returns for each end of `programs/mpi_ends.py`.
CODES = {
    "ends_without_close": 0,
    "closes": 0,
    "closes_within_a_pass": 0,
    "leaves_a_pass_open": 0,
    "reads_nothing": 0,
    "makes_a_loader_for_each_pass": 0,
    "exits_with_a_code": 7,
    "closed_by_a_handler": 0,
    "closed_by_a_handler_of_before": 0,
    "finalizes_mpi": 0,
    "raises": 1,
    "one_ends_early": 0,
}


@pytest.mark.shows("over MPI every message is matched before anybody finalises, however the program ends")
@pytest.mark.parametrize("trainers", [1, 2])
@pytest.mark.parametrize("end", CODES)
def test_an_end_is_the_programs(service: Any, tmp_path: Path, end: str, trainers: int) -> None:
    program = [str(BIN / "python"), str(PROGRAMS / "mpi_ends.py"), end, str(tmp_path), str(trainers)]
    worker = [str(BIN / "hetstream"), "internal", "worker", "--mpi", "--service", service.name]
    before = set(Path("/dev/shm").glob("mpich_shm_*"))
    try:
        done = in_world(
            *("-n", str(trainers), *program, ":", "-n", "2", *worker),
            HETSTREAM_SERVICE=service.name,
            HETSTREAM_TRANSPORT="mpi,tcp",
        )
        assert done.returncode == CODES[end], done.stdout + done.stderr
        handled = {path.name: path.read_text() for path in tmp_path.glob("handler-of-*")}
        ended = range(1 if end == "raises" else trainers)
        assert handled == {f"handler-of-{rank}": "ended" for rank in ended}, done.stdout + done.stderr
        assert ("ValueError: of the program" in done.stderr) == (end == "raises"), done.stderr
    finally:
        for left in set(Path("/dev/shm").glob("mpich_shm_*")) - before:
            assert end == "raises", "MPICH leaves it behind when a world is aborted, and only then"
            left.unlink()
