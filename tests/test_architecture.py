"""The import rules of docs/architecture.md, checked over the syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("slurm_plugin", "hetjob", "mpi_dataworkers", "checkpoint", "base")
# What each may import of hetstream. Everybody may import `base`, which imports nothing of ours.
MAY_IMPORT = {
    "slurm_plugin": {*ROOMS},
    "hetjob": {"hetjob", "mpi_dataworkers", "checkpoint", "base"},
    "mpi_dataworkers": {"mpi_dataworkers", "base"},
    "checkpoint": {"checkpoint", "base"},
    "base": {"base"},
}
# One library, one place. A path ending in "/" is a folder.
HOMES = {
    "zmq": ("mpi_dataworkers/transports/zmq.py",),
    "mpi4py": ("mpi_dataworkers/transports/mpi.py",),
    "torch": (
        "mpi_dataworkers/loader/",
        "mpi_dataworkers/ops/",
        "checkpoint/flash/",
        "checkpoint/convert/",
        "checkpoint/integrations/",
    ),
    "h5py": ("mpi_dataworkers/sources/", "checkpoint/formats/hdf5.py"),
    "PIL": ("mpi_dataworkers/sources/",),
    "horovod": ("mpi_dataworkers/horovod.py",),
    "lightning": ("checkpoint/integrations/lightning.py",),
    "transformers": ("checkpoint/integrations/huggingface.py",),
    "prometheus_client": (
        "mpi_dataworkers/dispatcher/exposition.py",
        "mpi_dataworkers/dispatcher/metrics.py",
        "slurm_plugin/render/metrics.py",
    ),
    "scipy": ("slurm_plugin/model/fit.py",),
    "pymoo": ("slurm_plugin/model/nsga2.py",),
    "pyslurm": ("slurm_plugin/client/pyslurm_backend.py",),
    "zstandard": ("mpi_dataworkers/transports/compression.py",),
    "xxhash": ("checkpoint/record/checksum.py", "mpi_dataworkers/ops/pickling.py"),
    "sqlite3": (
        "mpi_dataworkers/dispatcher/journal.py",
        "slurm_plugin/database.py",
        "slurm_plugin/insight/history.py",
        "slurm_plugin/daemon/store.py",
        "slurm_plugin/model/job_history.py",
    ),
}
FOLDERS = [ROOT / room for room in ROOMS[:-1]]
FILES = sorted(path for folder in [*FOLDERS, ROOT / "hetstream" / "base"] for path in folder.rglob("*.py"))


def imports_of(path: Path) -> Iterator[str]:
    """Every absolute module name that the file imports, at any depth: a lazy import is an import too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the absolute name"
            yield from (f"hetstream.{alias.name}" for alias in node.names if node.module == "hetstream")
            yield node.module or ""


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down_and_libraries_stay_home(path: Path) -> None:
    relative = path.relative_to(ROOT)
    own = relative.parts[0].replace("hetstream", "base")
    for name in imports_of(path):
        top, *below = name.split(".")
        assert top not in ROOMS, f"{relative} imports {name}: write hetstream.{name}"
        if top == "hetstream" and name != "hetstream":
            assert below[0] in MAY_IMPORT[own], f"{relative} imports {name}: {own} may import {sorted(MAY_IMPORT[own])}"
        assert top != "tests", f"{relative} imports {name}"
        homes = HOMES.get(top)
        if homes:
            place = str(relative)
            at_home = any(place == home or (home.endswith("/") and place.startswith(home)) for home in homes)
            assert at_home, f"{relative} imports {name}: its home is {', '.join(homes)}"


def test_the_package_leads_to_the_four_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "hetstream" / folder.name
        assert link.is_symlink()
        assert link.resolve() == folder
