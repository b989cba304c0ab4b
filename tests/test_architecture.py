"""The import rules of docs/architecture.md, checked over the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("slurm_plugin", "hetjob", "mpi_dataworkers", "checkpoint", "hetstream")
# "hetstream" is hetstream.base: everybody may import it, and it imports nothing of ours.
MAY_IMPORT = {
    "slurm_plugin": {"slurm_plugin", "hetjob", "mpi_dataworkers", "checkpoint", "hetstream"},
    "hetjob": {"hetjob", "mpi_dataworkers", "checkpoint", "hetstream"},
    "mpi_dataworkers": {"mpi_dataworkers", "hetstream"},
    "checkpoint": {"checkpoint", "hetstream"},
    "hetstream": {"hetstream"},
}
# One library, one place. A path ending in "/" is a folder.
HOMES = {
    "zmq": ("mpi_dataworkers/transports/zmq.py",),
    "mpi4py": ("mpi_dataworkers/transports/mpi.py",),
    "torch": ("mpi_dataworkers/loader/", "mpi_dataworkers/ops/", "checkpoint/flash/", "checkpoint/integrations/"),
    "h5py": ("mpi_dataworkers/sources/", "checkpoint/formats/hdf5.py"),
    "PIL": ("mpi_dataworkers/sources/",),
    "horovod": ("mpi_dataworkers/horovod.py",),
    "lightning": ("checkpoint/integrations/lightning.py",),
    "transformers": ("checkpoint/integrations/huggingface.py",),
    "prometheus_client": (
        "mpi_dataworkers/dispatcher/exposition.py",
        "mpi_dataworkers/dispatcher/metrics.py",
        "slurm_plugin/metrics.py",
    ),
    "pyslurm": ("slurm_plugin/client/pyslurm_backend.py",),
    "zstandard": ("mpi_dataworkers/transports/compression.py",),
    "xxhash": ("checkpoint/checksum.py", "mpi_dataworkers/ops/pickling.py"),
    "sqlite3": ("mpi_dataworkers/dispatcher/journal.py", "slurm_plugin/history.py", "slurm_plugin/daemon/store.py"),
}
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> Iterator[str]:
    """Every absolute module name that the file imports, at any depth: a lazy import is an import too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the absolute name"
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_and_libraries_stay_home(path: Path) -> None:
    relative = path.relative_to(ROOT)
    own = relative.parts[0]
    for name in imports_of(path):
        top = name.split(".")[0]
        if top in PACKAGES:
            assert top in MAY_IMPORT[own], f"{relative} imports {name}: {own} may import {sorted(MAY_IMPORT[own])}"
        assert top != "tests", f"{relative} imports {name}"
        homes = HOMES.get(top)
        if homes:
            place = str(relative)
            at_home = any(place == home or (home.endswith("/") and place.startswith(home)) for home in homes)
            assert at_home, f"{relative} imports {name}: its home is {', '.join(homes)}"
