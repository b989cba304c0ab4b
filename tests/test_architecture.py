"""The import rules of docs/architecture.md, and what is too long to be read, checked over the syntax trees."""

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
# The same for the folders of a package, or of one of its folders. "" are the files beside them, of which one may be
# named, too.
MAY_IMPORT_WITHIN = {
    "mpi_dataworkers": {
        "": {"", "wire", "transports"},
        "wire": {"errors"},
        "order": {"errors", "wire"},
        "sources": {"errors", "generators"},
        "features": {"errors", "sources"},
        "gpu_features": {"errors", "features"},
        "transports": {"errors", "wire"},
        "ops": {"", "wire", "order", "sources"},
        "worker": {"", "wire", "order", "transports", "ops"},
        "dispatcher": {"", "wire", "order", "transports"},
        "loader": {"", "wire", "order", "transports", "ops", "features", "gpu_features"},
        "partitioner": {"", "ops", "loader"},
        "stages": {"", "wire", "ops", "loader", "worker"},
        "hook": {"", "wire", "loader", "partitioner"},
    },
    "hetjob": {
        "": {"", "site"},
        "site": {"errors", "ports"},
        "gpu": {"errors", "site"},
        "elastic": {"errors", "site"},
        "master": {"", "site", "elastic"},
        "local": {"", "master"},
    },
    "hetjob/gpu": {
        "": {"", "devices"},
        "devices": {"orders"},
        "startup": {"start"},
    },
    "checkpoint": {
        "": {""},
        "record": {"errors"},
        "policy": set(),
        "formats": {"errors", "record"},
        "disk": {"", "record", "policy", "formats"},
        "memory": {"", "record", "disk"},
        "tensors": {"errors", "record", "disk"},
        "replica": {"", "record", "disk", "memory"},
        "persist": {"", "record", "formats", "disk", "memory", "replica"},
        "convert": {"errors", "record", "formats", "disk", "tensors"},
        "flash": {"", "record", "policy", "formats", "disk", "memory", "tensors", "replica", "persist"},
        "integrations": {"flash"},
    },
    "checkpoint/flash": {
        "": {"", "save", "restore", "handover"},
        "save": {""},
        "restore": {""},
        "handover": set(),
    },
}
# One library, one place. A path ending in "/" is a folder.
HOMES = {
    "zmq": ("mpi_dataworkers/transports/zmq.py", "mpi_dataworkers/transports/zmq_frames.py"),
    "mpi4py": ("mpi_dataworkers/transports/mpi.py",),
    "torch": (
        "mpi_dataworkers/loader/",
        "mpi_dataworkers/ops/",
        "mpi_dataworkers/features/batches.py",
        "mpi_dataworkers/features/chains.py",
        "mpi_dataworkers/features/collate.py",
        "mpi_dataworkers/features/kernel.py",
        "mpi_dataworkers/features/kernels.py",
        "mpi_dataworkers/features/list_kernels.py",
        "mpi_dataworkers/features/native_groups.py",
        "mpi_dataworkers/features/reading.py",
        "mpi_dataworkers/features/value_kernels.py",
        "mpi_dataworkers/features/tiles.py",
        "mpi_dataworkers/features/transform.py",
        "mpi_dataworkers/gpu_features/arena.py",
        "mpi_dataworkers/gpu_features/captured.py",
        "mpi_dataworkers/gpu_features/corun.py",
        "mpi_dataworkers/gpu_features/fake_streams.py",
        "mpi_dataworkers/gpu_features/fused.py",
        "mpi_dataworkers/gpu_features/layer_hooks.py",
        "mpi_dataworkers/gpu_features/probing.py",
        "mpi_dataworkers/gpu_features/streams.py",
        "mpi_dataworkers/partitioner/",
        "hetjob/gpu/hooks.py",
        "hetjob/gpu/devices/cuda.py",
        "hetjob/gpu/devices/emulation.py",
        "hetjob/gpu/devices/host_pool.py",
        "checkpoint/tensors/",
        "checkpoint/flash/",
        "checkpoint/convert/",
        "checkpoint/integrations/",
    ),
    "triton": (
        "mpi_dataworkers/gpu_features/kernel.py",
        "mpi_dataworkers/gpu_features/offline.py",
        "mpi_dataworkers/gpu_features/probes.py",
    ),
    "sklearn": ("mpi_dataworkers/gpu_features/predictor.py",),
    "h5py": ("mpi_dataworkers/sources/", "checkpoint/formats/hdf5.py"),
    "PIL": ("mpi_dataworkers/sources/",),
    "pyarrow": ("mpi_dataworkers/sources/parquet.py",),
    "torchrec": ("mpi_dataworkers/features/batches.py",),
    "horovod": ("mpi_dataworkers/horovod.py",),
    "lightning": ("checkpoint/integrations/lightning.py",),
    "transformers": ("checkpoint/integrations/huggingface.py",),
    "prometheus_client": (
        "mpi_dataworkers/dispatcher/exposition.py",
        "mpi_dataworkers/dispatcher/metrics.py",
        "slurm_plugin/render/metrics.py",
        "slurm_plugin/render/gpu_metrics.py",
    ),
    "scipy": ("slurm_plugin/model/fit.py",),
    "pymoo": ("slurm_plugin/model/nsga2.py",),
    "pynvml": ("slurm_plugin/coordinator/nvml.py",),
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
# Optional parts of saving and restoring: what has them plugged in, and nothing else, may import them.
OPTIONAL = {
    "hetstream.checkpoint.replica": (
        "checkpoint/replica/",
        "checkpoint/flash/assembly.py",
        "checkpoint/persist/assembly.py",
    ),
    "hetstream.checkpoint.flash.handover": ("checkpoint/flash/handover/", "checkpoint/flash/assembly.py"),
    "hetstream.checkpoint.policy.handover": ("checkpoint/flash/handover/",),
    "hetstream.checkpoint.disk.handover_request": ("checkpoint/flash/handover/", "slurm_plugin/cli/migrate.py"),
}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 500, 60, 8
# What is longer, its limit, and why. A row that is needed no more is an error, too.
LONGER: dict[str, tuple[int, str]] = {
    "checkpoint/record/tree.py": (560, "one form of values: what is written and how it is read, side by side"),
    "slurm_plugin/insight/why.py": (785, "one question: what keeps a job from starting now, in kinds and in words"),
    "slurm_plugin/client/parse_text.py _job lines": (74, "one line for each field of the model"),
    "slurm_plugin/client/parse_json.py _job lines": (74, "one line for each field of the model"),
    "slurm_plugin/client/pyslurm_backend.py job_of lines": (72, "one line for each field of the model"),
    "hetjob/master/elastic.py": (520, "one loop: what it looks at, decides by and does each second, in this order"),
    "slurm_plugin/client/model.py": (739, "one model: jobs, nodes and their GPUs, which every reader fills alike"),
    "slurm_plugin/coordinator/server.py": (540, "one loop: who comes, what they say, what they are told"),
    "slurm_plugin/packing/quota_packer.py": (530, "one pair of hands: each thing that becomes of a job with quota"),
    "slurm_plugin/packing/packer.py Packer.__init__ parameters": (9, "what a site tells it, each with a name"),
    "mpi_dataworkers/loader/compared_pass.py": (560, "one pass: which steps are compared, by whom, and what follows"),
    "mpi_dataworkers/loader/client.py": (540, "one loader at its service: what it waits for, says and is told"),
    "mpi_dataworkers/sources/hdf5.py": (570, "one kind of file: which rows are read together, and where names lead"),
    "mpi_dataworkers/transports/mpi.py": (
        650,
        "the only home of mpi4py: a world of ranks, its messages, and both ends of a connection",
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
        parts = [places for part, places in OPTIONAL.items() if f"{name}.".startswith(f"{part}.")]
        for homes in [*parts, *([HOMES[top]] if top in HOMES else [])]:
            place = str(relative)
            at_home = any(place == home or (home.endswith("/") and place.startswith(home)) for home in homes)
            assert at_home, f"{relative} imports {name}: its home is {', '.join(homes)}"


@pytest.mark.parametrize("package", MAY_IMPORT_WITHIN)
def test_imports_within_a_package_point_down(package: str) -> None:
    table = MAY_IMPORT_WITHIN[package]
    wrong = []
    for path in sorted((ROOT / package).rglob("*.py")):
        inside = path.relative_to(ROOT / package)
        folder = inside.parts[0] if len(inside.parts) > 1 else ""
        allowed = table[folder] if folder else table.get(inside.stem, table[""])
        for name in imports_of(path):
            prefix = f"hetstream.{package.replace('/', '.')}."
            if name.startswith(prefix):
                parts = name.removeprefix(prefix).split(".")
                is_folder = (ROOT / package / parts[0]).is_dir()
                room, stem = (parts[0], "") if is_folder else ("", parts[0])
                if room != folder and room not in allowed and stem not in allowed:
                    wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong, "put what both need into a folder, or a file beside the folders, that both may import"


def test_the_package_leads_to_the_four_folders() -> None:
    for folder in FOLDERS:
        link = ROOT / "hetstream" / folder.name
        assert link.is_symlink()
        assert link.resolve() == folder


def test_no_file_and_no_function_is_too_long_to_be_read() -> None:
    found: dict[str, tuple[int, int]] = {}  # how long, and how long it may be without a reason
    more = [path for place in ("hetstream", "benchmarks", "sbatch_templates") for path in (ROOT / place).rglob("*.py")]
    for path in {*FILES, *more}:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        found[name] = len(text.splitlines()), MOST_LINES_OF_A_FILE
        for title, function in functions_in(ast.parse(text)):
            lines = (function.end_lineno or 0) - function.lineno + 1
            parameters = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            count = sum(parameter.arg not in ("self", "cls") for parameter in parameters)
            for measured, most, what in (
                (lines, MOST_LINES_OF_A_FUNCTION, "lines"),
                (count, MOST_PARAMETERS, "parameters"),
            ):
                key = f"{name} {title} {what}"
                found[key] = max(measured, found.get(key, (0, 0))[0]), most
    too_long = {key: size for key, (size, most) in found.items() if size > LONGER.get(key, (most, ""))[0]}
    assert not too_long, "split it by nouns, or give a reason in LONGER"
    unneeded = [key for key in LONGER if key not in found or found[key][0] <= found[key][1]]
    assert not unneeded, "take it out of LONGER"


def functions_in(node: ast.AST, title: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below a node, with the names of what it is in."""
    for child in ast.iter_child_nodes(node):
        inner = title
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{title}.{child.name}".lstrip(".")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner, child
        yield from functions_in(child, inner)
