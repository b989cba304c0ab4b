"""Finds, in the syntax trees, each call that reaches a file, a directory, a socket or a program by its name. Pure."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("slurm_plugin", "hetjob", "mpi_dataworkers", "checkpoint", "hetstream/base", "tests/devcluster")
# By the module that they are of, however it is imported. What only looks (`os.stat`, `exists`) opens nothing.
FUNCTIONS = {
    "": "open",
    "io": "open open_code",
    "os": "open mkdir makedirs listdir scandir walk unlink remove removedirs rename renames replace rmdir link symlink "
    "mkfifo mknod chmod chown lchown truncate utime posix_spawn posix_spawnp execl execle execlp execlpe execv "
    "execve execvp execvpe spawnl spawnv spawnve spawnvp system popen chdir chroot",
    "shutil": "rmtree copy copy2 copyfile copytree copymode copystat move chown make_archive unpack_archive",
    "tempfile": "mkstemp mkdtemp mktemp NamedTemporaryFile TemporaryFile SpooledTemporaryFile TemporaryDirectory",
    "subprocess": "run Popen call check_call check_output getoutput getstatusoutput",
    "asyncio": "start_unix_server open_unix_connection create_subprocess_exec create_subprocess_shell",
    "fcntl": "flock lockf",
    "sqlite3": "connect",
    "glob": "glob iglob",
    "ctypes": "CDLL PyDLL",
    "ctypes.cdll": "LoadLibrary",
    "torch": "load save",
    "torch.ops": "load_library",
    "torch.utils.cpp_extension": "load load_inline",
    "multiprocessing.shared_memory": "SharedMemory",
    "numpy": "load save memmap fromfile loadtxt genfromtxt",
    "h5py": "File",
    "pyarrow.parquet": "ParquetFile read_table",
    "PIL.Image": "open",
    "runpy": "run_path run_module",
    "importlib.util": "spec_from_file_location",
    "logging": "FileHandler",
}
_MODULES = {module: frozenset(names.split()) for module, names in FUNCTIONS.items()}
# Methods of a path by their names. `Directory`'s own take names in a directory that is open: they have an argument
# where a path's have none, or one more.
_PATHS = (
    "open read_text read_bytes write_text write_bytes mkdir rmdir iterdir rglob glob symlink_to hardlink_to touch "
    "chmod exec_module open_safe"
)
METHODS = frozenset(_PATHS.split())
_WITH_ARGUMENTS = {"unlink": 0, "rename": 1, "replace": 1, "connect": 1, "connect_ex": 1, "bind": 1}


class Sites(ast.NodeVisitor):
    """Where a module reaches something by name: counts of (function, call)."""

    def __init__(self, tree: ast.Module) -> None:
        self.found: Counter[str] = Counter()
        self._scopes: list[str] = []
        self._called: set[ast.expr] = set()
        self._modules: dict[str, str] = {"open": "open"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for name in node.names:
                    self._modules[name.asname or name.name.partition(".")[0]] = (
                        name.name if name.asname else name.name.partition(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for name in node.names:
                    full_name = f"{node.module}.{name.name}".removeprefix("hetstream.base.posix.")
                    self._modules[name.asname or name.name] = full_name
        self.visit(tree)

    def _in(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> None:
        self._scopes.append(node.name)
        self.generic_visit(node)
        self._scopes.pop()

    visit_FunctionDef = visit_AsyncFunctionDef = visit_ClassDef = _in

    def visit_Call(self, node: ast.Call) -> None:
        self._called.add(node.func)
        if _reaches(self._full_name(node.func), node.func, node):
            self.note(node)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        # Handed to somebody who calls it: `callback(path.unlink)`, `map(os.unlink, paths)`.
        is_handed = node not in self._called and isinstance(node.ctx, ast.Load) and node.attr.islower()
        if is_handed and node.attr != "memmap" and _reaches(self._full_name(node), node, None):
            self.note(node)
        self.generic_visit(node)

    def note(self, node: ast.expr) -> None:
        """Count a call."""
        self.found[".".join(self._scopes)] += 1

    def _full_name(self, called: ast.expr) -> str:
        """`os.open` for `o.open` after `import os as o`; empty of what is no module's."""
        parts = []
        while isinstance(called, ast.Attribute):
            parts.append(called.attr)
            called = called.value
        if not isinstance(called, ast.Name) or called.id not in self._modules:
            return ""
        return ".".join([self._modules[called.id], *reversed(parts)])


def _reaches(full_name: str, function: ast.expr, call: ast.Call | None) -> bool:
    module, _, name = full_name.rpartition(".")
    if name in _MODULES.get(module, ()):
        return not (call and any(keyword.arg and keyword.arg.endswith("dir_fd") for keyword in call.keywords))
    if module == "hetstream.base.files.Directory" and name in ("open", "open_safe"):
        return True
    if full_name and not full_name.startswith("pathlib.") and not module.rpartition(".")[2].isupper():
        return False  # a function of some module, which has calls of its own
    if not isinstance(function, ast.Attribute):
        return False
    if function.attr not in _WITH_ARGUMENTS:
        is_own = isinstance(function.value, ast.Name) and function.value.id == "self"
        return function.attr in METHODS and (call is not None or not (is_own or function.attr == "open"))
    if call is None:
        return function.attr == "unlink"
    is_spread = any(isinstance(argument, ast.Starred) for argument in call.args)
    return len(call.args) == _WITH_ARGUMENTS[function.attr] and not is_spread


def sites() -> dict[str, Counter[str]]:
    """File -> function -> how many such calls."""
    return {
        str(path.relative_to(ROOT)): found
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.is_symlink() and (found := Sites(ast.parse(path.read_text())).found)
    }


# What a shell script or a Lua plugin reaches by name, found in its text without comments: a word of each pattern.
SCRIPTS = {
    ".sh": re.compile(
        r"(?<![\w./-])(?:mkdir|rmdir|mv|rm|cp|ln|cat|tee|touch|mktemp|chmod|chown|sed|awk|find|logger|exec|eval|source"
        r"|install|dd|truncate|mkfifo)(?=\s)|(?<![\w.])\.(?=\s)|>>?(?![&=]|\s*/dev/null)|<(?![=<]|\s*/dev/null)"
    ),
    ".lua": re.compile(
        r"\b(?:io\.(?:open|popen|lines|input|output)|os\.(?:execute|remove|rename|tmpname)"
        r"|dofile|loadfile|loadstring|require|package\.\w+)\b"
    ),
}
_COMMENTS = {".sh": re.compile(r"(?:^|\s)#.*$", re.M), ".lua": re.compile(r"--.*$", re.M)}


def script_sites() -> dict[str, Counter[str]]:
    """File -> word -> how often; of the scripts that Slurm runs on nodes and loads into its daemons and commands."""
    return {
        str(path.relative_to(ROOT)): found
        for path in sorted((ROOT / "slurm_plugin").rglob("*"))
        if path.suffix in SCRIPTS and (found := words_in(path.read_text(), path.suffix))
    }


def words_in(text: str, kind: str) -> Counter[str]:
    """The words by which a script of a kind reaches something by its name."""
    return Counter(found[0] for found in SCRIPTS[kind].finditer(_COMMENTS[kind].sub("", text)))
