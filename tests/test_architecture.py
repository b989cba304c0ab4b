"""The import rules of docs/architecture.md, and what is too long to be read, checked over the syntax trees."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
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
        "sources": {"errors", "generators", "threads"},
        "features": {"errors", "compiling", "sources"},
        "images": {"errors", "compiling", "generators", "sources"},
        "gpu_features": {"errors", "features"},
        "transports": {"errors", "wire"},
        "process": {"errors", "wire", "transports"},
        "ops": {"errors", "generators", "threads", "wire", "order", "sources", "process"},
        "dispatcher": {"errors", "wire", "order", "transports", "process"},
        "loader": {"", "wire", "order", "transports", "process", "ops", "features", "gpu_features"},
        "embedding": {"errors", "wire", "transports", "process"},
        "worker": {"", "wire", "order", "transports", "sources", "process", "ops", "loader"},
        "partitioner": {"errors", "process", "ops", "loader"},
        "hook": {"errors", "wire", "process", "loader", "partitioner"},
    },
    "hetjob": {
        "": {""},
        "site": {"errors", "ports"},
        "job": {"errors", "ports", "site"},
        "gpu": {"errors", "site"},
        "elastic": {"errors", "ports", "site"},
        "convert": {"errors", "ports", "site", "job"},
        "master": {"", "site", "job", "elastic", "convert"},
    },
    "hetjob/gpu": {
        "": {""},
        "startup": {"start"},
    },
    "slurm_plugin": {
        "": {""},
        "placement": set(),
        "packaging": set(),
        "client": {"errors"},
        "policy": {"errors"},
        "coordinator": {"errors"},
        "submit": {"errors", "client"},
        "packing": {"errors", "client"},
        "install": {"", "client", "packing"},
        "insight": {"", "client", "packing"},
        "daemon": {"", "client", "placement", "policy", "insight"},
        "simulate": {"errors", "client", "placement", "policy", "packing", "insight"},
        "render": {"errors", "client", "coordinator", "insight", "simulate"},
        "cli": {
            "",
            "client",
            "placement",
            "policy",
            "coordinator",
            "submit",
            "packing",
            "install",
            "insight",
            "daemon",
            "simulate",
            "render",
        },
    },
    "checkpoint": {
        "": {""},
        "record": {"errors"},
        "policy": set(),
        "disk": {"", "record", "policy"},
        "memory": {"", "record", "disk"},
        "tensors": {"errors", "record", "disk"},
        "replica": {"", "record", "disk", "memory"},
        "persist": {"", "record", "disk", "memory", "replica"},
        "convert": {"errors", "record", "disk", "tensors"},
        "flash": {"", "record", "policy", "disk", "memory", "tensors", "replica", "persist"},
        "integrations": {"flash"},
    },
}
# One library, one place. A path ending in "/" is a folder.
HOMES = {
    "shtab": ("slurm_plugin/cli/completion.py",),
    "argparse_manpage": ("slurm_plugin/cli/completion.py",),
    "zmq": ("mpi_dataworkers/transports/zmq.py",),
    "mpi4py": ("mpi_dataworkers/transports/mpi.py",),
    "torch": (
        "mpi_dataworkers/loader/",
        "mpi_dataworkers/ops/",
        "mpi_dataworkers/embedding/",
        "mpi_dataworkers/features/batches.py",
        "mpi_dataworkers/features/graph.py",
        "mpi_dataworkers/features/kernels.py",
        "mpi_dataworkers/features/native.py",
        "mpi_dataworkers/features/transform.py",
        "mpi_dataworkers/images/",
        "mpi_dataworkers/gpu_features/arena.py",
        "mpi_dataworkers/gpu_features/captured.py",
        "mpi_dataworkers/gpu_features/corun.py",
        "tests/mpi_dataworkers/gpu_features/fake_streams.py",
        "mpi_dataworkers/gpu_features/fused.py",
        "mpi_dataworkers/gpu_features/capacity.py",
        "mpi_dataworkers/gpu_features/streams.py",
        "mpi_dataworkers/partitioner/",
        "hetjob/gpu/hooks.py",
        "hetjob/gpu/cuda.py",
        "hetjob/gpu/emulation.py",
        "checkpoint/tensors/",
        "checkpoint/flash/",
        "checkpoint/convert/",
        "checkpoint/integrations/",
    ),
    "triton": (
        "mpi_dataworkers/gpu_features/kernel.py",
        "tests/mpi_dataworkers/gpu_features/offline.py",
        "mpi_dataworkers/gpu_features/probes.py",
    ),
    "h5py": ("mpi_dataworkers/sources/",),
    "PIL": ("mpi_dataworkers/images/",),
    "pyarrow": ("mpi_dataworkers/sources/tables.py",),
    "torchrec": ("mpi_dataworkers/features/batches.py", "mpi_dataworkers/embedding/modules.py"),
    "horovod": ("mpi_dataworkers/horovod.py",),
    "lightning": ("checkpoint/integrations/lightning.py",),
    "transformers": ("checkpoint/integrations/huggingface.py",),
    "prometheus_client": ("hetstream/base/prometheus.py",),
    "pynvml": ("slurm_plugin/coordinator/gpus.py",),
    "pyslurm": ("slurm_plugin/client/pyslurm_backend.py",),
    "zstandard": ("mpi_dataworkers/transports/sockets.py",),
    "xxhash": ("checkpoint/record/layout.py", "mpi_dataworkers/ops/pickling.py"),
    "sqlite3": (
        "mpi_dataworkers/dispatcher/server.py",
        "slurm_plugin/database.py",
        "slurm_plugin/insight/observation.py",
        "slurm_plugin/daemon/store.py",
        "slurm_plugin/past_jobs.py",
    ),
}
# Optional parts of saving and restoring: what has them plugged in, and nothing else, may import them.
OPTIONAL = {
    "hetstream.checkpoint.replica": (
        "checkpoint/replica/",
        "checkpoint/flash/ownership.py",
        "checkpoint/persist/store_writer.py",
    ),
}
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION, MOST_PARAMETERS = 900, 60, 8
# What is longer, its limit, and why. A row that is needed no more is an error, too.
LONGER: dict[str, tuple[int, str]] = {
    "benchmarks/clients/embedding_train.py train lines": (65, "one loop over steps, as a reader of it wants to see it"),
    "benchmarks/embedding.py main lines": (69, "what the report says, a row or a note each"),
    "mpi_dataworkers/wire/messages.py": (1400, "one list: all that is said on the wire"),
    "slurm_plugin/client/parse_text.py _job lines": (74, "one line for each field of the model"),
    "slurm_plugin/client/parse_json.py _job lines": (74, "one line for each field of the model"),
    "slurm_plugin/client/pyslurm_backend.py job_of lines": (72, "one line for each field of the model"),
    "mpi_dataworkers/embedding/modules.py EmbeddingBag.__init__ parameters": (17, "torch's own, and five more"),
    "mpi_dataworkers/embedding/modules.py Embedding.__init__ parameters": (15, "torch's own, and five more"),
    "slurm_plugin/packing/packer.py Packer.__init__ parameters": (9, "what a site tells it, each with a name"),
}
# Files below this length that one file of their folder imports, and no other, belong into that one.
LEAST_LINES_OF_A_FILE = 100
# What is shorter, and why. A row that is needed no more is an error, too.
SHORTER: dict[str, str] = {
    "mpi_dataworkers/embedding/placement.py": "pure, and client.py is connections",
    "mpi_dataworkers/dispatcher/metrics.py": "server.py loads without prometheus-client, which is an extra",
    "mpi_dataworkers/gpu_features/probes.py": "in Triton's language: capacity.py loads without Triton",
}
FOLDERS = [ROOT / room for room in ROOMS[:-1]]
FILES = sorted(path for folder in [*FOLDERS, ROOT / "hetstream" / "base"] for path in folder.rglob("*.py"))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@functools.cache
def import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Import | ast.ImportFrom)]


def imports_of(path: Path) -> Iterator[str]:
    """Every absolute module name that the file imports, at any depth: a lazy import is an import too."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        else:
            assert node.level == 0, f"{path}:{node.lineno}: relative import; write the absolute name"
            yield from (f"hetstream.{alias.name}" for alias in node.names if node.module == "hetstream")
            yield node.module or ""


def test_imports_point_down_and_libraries_stay_home() -> None:
    wrong = [offence for path in FILES for offence in offences_of(path)]
    assert not wrong, "\n".join(wrong)


def offences_of(path: Path) -> Iterator[str]:
    relative = path.relative_to(ROOT)
    own = relative.parts[0].replace("hetstream", "base")
    for name in imports_of(path):
        top, *below = name.split(".")
        if top in ROOMS:
            yield f"{relative} imports {name}: write hetstream.{name}"
        if top == "hetstream" and name != "hetstream" and below[0] not in MAY_IMPORT[own]:
            yield f"{relative} imports {name}: {own} may import {sorted(MAY_IMPORT[own])}"
        if top == "tests":
            yield f"{relative} imports {name}"
        parts = [places for part, places in OPTIONAL.items() if f"{name}.".startswith(f"{part}.")]
        for homes in [*parts, *([HOMES[top]] if top in HOMES else [])]:
            place = str(relative)
            if not any(place == home or (home.endswith("/") and place.startswith(home)) for home in homes):
                yield f"{relative} imports {name}: its home is {', '.join(homes)}"


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


@pytest.mark.parametrize("folder", [folder.name for folder in FOLDERS])
def test_a_folder_is_imported_by_one_name(folder: str) -> None:
    """From the root `import checkpoint` finds the folder: an `except` would not catch the other copy's classes."""
    command = [sys.executable, "-c", f"import {folder}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert f"import hetstream.{folder} instead of {folder}" in ended.stderr


def test_no_file_and_no_function_is_too_long_to_be_read() -> None:
    found: dict[str, tuple[int, int]] = {}  # how long, and how long it may be without a reason
    more = [path for place in ("hetstream", "benchmarks", "sbatch_templates") for path in (ROOT / place).rglob("*.py")]
    for path in {*FILES, *more}:
        name, text = str(path.relative_to(ROOT)), path.read_text()
        found[name] = len(text.splitlines()), MOST_LINES_OF_A_FILE
        for title, function in functions_in(tree_of(path)):
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
    assert not too_long, "split it by reasons to change, or say in LONGER why not"
    unneeded = [key for key in LONGER if key not in found or found[key][0] <= found[key][1]]
    assert not unneeded, "take it out of LONGER"


def test_no_file_is_a_part_of_another() -> None:
    importers: dict[str, set[Path]] = {}
    for path in FILES:
        for name in names_from(path):
            importers.setdefault(name, set()).add(path)
    found = set()
    for path in FILES:
        by = importers.get(module_of(path), set())
        is_short = len(path.read_text().splitlines()) < LEAST_LINES_OF_A_FILE
        # What a registry lists has one importer by design.
        if (
            is_short
            and path.name != "__init__.py"
            and len(by) == 1
            and next(iter(by)).parent == path.parent
            and (next(iter(by)).name != "registry.py")
        ):
            found.add(str(path.relative_to(ROOT)))
    assert found == {*SHORTER}, "move it into the file that imports it, or give a reason in SHORTER"


def test_no_file_imports_itself_around_a_circle() -> None:
    modules = {module_of(path): path for path in FILES}
    imported = {name: {other for other in names_from(path) if other in modules} for name, path in modules.items()}
    assert not circle_in(imported)


def module_of(path: Path) -> str:
    relative = path.relative_to(ROOT).with_suffix("")
    parts = relative.parts if relative.parts[0] == "hetstream" else ("hetstream", *relative.parts)
    return ".".join(parts).removesuffix(".__init__")


def names_from(path: Path) -> Iterator[str]:
    """Modules that the file may import, at any depth: of `from a import b` both a and a.b."""
    for node in import_statements(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def circle_in(arrows: dict[str, set[str]]) -> set[str]:
    """What is left when, again and again, all that leads nowhere is taken away."""
    left = dict(arrows)
    while ends := {name for name, others in left.items() if not (others - {name}) & left.keys()}:
        left = {name: others for name, others in left.items() if name not in ends}
    return {*left}


def functions_in(node: ast.AST, title: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Every function below a node, with the names of what it is in."""
    for child in ast.iter_child_nodes(node):
        inner = title
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{title}.{child.name}".lstrip(".")
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner, child
        yield from functions_in(child, inner)
