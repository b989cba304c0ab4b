"""`import hetstream`: what it offers, what it brings, and what it never meets."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import hetstream
import hetstream.errors as errors_of_all
from hetstream import HetstreamError

ROOT = Path(__file__).resolve().parents[1]


def run(code: str, *, cwd: Path | None = None) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


MODULES: dict[str, str] = vars(hetstream)["_MODULES"]


@pytest.mark.parametrize("name", MODULES)
def test_every_name_is_there(name: str) -> None:
    home = importlib.import_module(f"hetstream.{MODULES[name]}")
    assert getattr(hetstream, name) is getattr(home, name)
    assert name in dir(hetstream)


def test_a_star_brings_the_names_of_users_and_one_error_to_catch() -> None:
    code = "before = {*globals()}\nfrom hetstream import *\nprint(*sorted({*globals()} - before - {'before'}))"
    assert run(code).split() == sorted([*MODULES, "__version__"])
    assert dir(hetstream) == sorted([*MODULES, "__version__", "errors"])
    assert run("import hetstream; print(hetstream.errors.NoCheckpoint.__name__)") == "NoCheckpoint"


def test_editors_see_what_is_there() -> None:
    tree = ast.parse((ROOT / "hetstream" / "__init__.py").read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    assert "__version__: str" in [ast.unparse(node) for node in block.body]
    imports = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    seen = {(alias.name, alias.asname): node.module for node in imports for alias in node.names if alias.asname}
    assert seen == {(name, name): f"hetstream.{module}" for name, module in MODULES.items()}


def test_every_error_is_a_hetstream_error_and_is_there_once() -> None:
    seen: dict[str, type] = {}
    for path in sorted({*ROOT.glob("*/errors.py"), ROOT / "hetstream/base/errors.py"} - {ROOT / "hetstream/errors.py"}):
        relative = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        module = importlib.import_module(f"hetstream.{relative.removeprefix('hetstream.')}")
        own = {name: kind for name, kind in vars(module).items() if getattr(kind, "__module__", "") == module.__name__}
        errors = [name for name, kind in own.items() if isinstance(kind, type) and issubclass(kind, BaseException)]
        assert sorted(errors) == module.__all__, "what an editor sees of it"
        assert not {name for name in errors if name not in (module.__doc__ or "")}, "the tree in its docstring"
        for name, kind in own.items():
            if isinstance(kind, type) and issubclass(kind, BaseException):
                assert issubclass(kind, HetstreamError)
                assert getattr(errors_of_all, name) is kind
                assert name not in seen, "one name, one error"
                seen[name] = kind
    assert len(seen) > 50


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'dataloader'"):
        hetstream.dataloader  # noqa: B018


def test_importing_it_brings_neither_torch_nor_zmq() -> None:
    code = "import sys, hetstream; from hetstream.errors import NoCheckpoint; from hetstream import Every; "
    assert run(code + "print({'torch', 'zmq', 'numpy'} & {*sys.modules})") == "set()"


def test_the_loader_is_generic() -> None:
    code = "import torch\nfrom hetstream import DataLoader\n"
    code += "def train(batches: DataLoader[torch.Tensor]) -> None: ...\nprint(train.__annotations__['batches'])"
    assert run(code) == "hetstream.mpi_dataworkers.loader.data_loader.DataLoader[torch.Tensor]"


@pytest.mark.parametrize(
    "name",
    [
        "checkpoint",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("hetjob", "mpi_dataworkers", "slurm_plugin")),
    ],
)
def test_a_module_of_the_user_never_meets_ours(name: str, tmp_path: Path) -> None:
    (tmp_path / f"{name}.py").write_text("MINE = True\n")
    code = f"import {name}; from hetstream import DataLoader, FlashCheckpointer; assert {name}.MINE; "
    assert run(code + "from hetstream.slurm_plugin.cli import main; main(['--version'])", cwd=tmp_path)


def test_it_is_a_command_too(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "hetstream", "--version"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == f"hetstream {version('hetstream')}\n"


def test_the_version_is_read_when_it_is_asked_for() -> None:
    assert hetstream.__version__ == version("hetstream")
    assert "__version__" in dir(hetstream)
    code = "import sys, hetstream; before = 'importlib.metadata' in sys.modules; print(before, hetstream.__version__)"
    assert run(code) == f"False {version('hetstream')}"


def test_a_checkout_that_nobody_has_installed_has_its_commands(tmp_path: Path) -> None:
    """As on a machine with a GPU that is lent: PYTHONPATH leads to the checkout, and no metadata is there."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "def version(name):\n    raise metadata.PackageNotFoundError(name)\nmetadata.version = version\n"
    )
    environ = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    argv = [sys.executable, "-m", "hetstream", "--version"]
    done = subprocess.run(argv, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.stdout == "hetstream 0+unknown\n", done.stderr


# What the extras of pyproject.toml bring, but torch, by the names under which it is imported.
OPTIONAL = "accelerate h5py lightning mpi4py PIL prometheus_client pyarrow pynvml sklearn transformers triton zstandard"
WITHOUT = f"""
import sys

class Missing:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {OPTIONAL.split()}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing)
from hetstream import *
from hetstream.mpi_dataworkers.sources.tables import CsvDataset, ParquetDataset
import hetstream, hetstream.mpi_dataworkers.gpu_features.corun, hetstream.slurm_plugin.coordinator.server

loader = DataLoader([1.0, 2.0, 3.0], batch_size=3)
print([batch.tolist() for batch in loader])
for read in (
    lambda: ImageFolder(".", EvaluationRecipe()),
    lambda: ParquetDataset("x.parquet", {{"a": "int64"}}),
):
    try:
        read()
    except Exception as error:
        print(type(error).__name__, str(error).split(",")[0])
"""


@pytest.mark.shows("a loader needs none of the optional packages")
def test_optional_packages_are_needed_by_what_uses_them_alone(tmp_path: Path) -> None:
    (tmp_path / "x.parquet").write_bytes(b"none")
    assert run(WITHOUT, cwd=tmp_path).splitlines() == [
        "[[1.0, 2.0, 3.0]]",
        "ImportError images need Pillow",
        "ImportError Parquet files need pyarrow",
    ]


@pytest.mark.shows("on macOS and Windows a loader makes its batches in the program (emulated)")
@pytest.mark.parametrize("system", ["macos", "windows"])
def test_a_script_can_be_tried_on_another_system(system: str) -> None:
    program = ROOT / "tests" / "mpi_dataworkers" / "programs" / "elsewhere.py"
    done = subprocess.run([sys.executable, str(program), system], capture_output=True, text=True, check=False)
    assert done.stdout == "True 3\n", done.stderr


def test_without_torch_the_error_names_the_extra() -> None:
    code = "import sys; sys.modules['torch'] = None\ntry:\n    from hetstream import DataLoader\n"
    code += "except ImportError as error:\n    print(error)"
    assert run(code) == "hetstream.DataLoader needs torch, which is not installed. Run: pip install 'hetstream[torch]'"
