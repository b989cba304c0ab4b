"""What a program has outside of its process: data workers leave it alone, as torch's worker processes do."""

from __future__ import annotations

import contextlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.managers import SharedMemoryManager
from multiprocessing.shared_memory import ShareableList, SharedMemory
from pathlib import Path

import pytest

from hetstream.mpi_dataworkers.errors import PipelineError
from hetstream.mpi_dataworkers.ops.import_effects import without_effects

HETSTREAM = Path(sys.executable).with_name("hetstream")

SEGMENTS = """
import sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import ShareableList, SharedMemory
from torch.utils.data import DataLoader, Dataset

class Named(Dataset):
    def __init__(self, name, words): self.name, self.words, self.held = name, words, None
    def __len__(self): return 8
    def __getitem__(self, index):
        if self.held is None:
            self.held = SharedMemory(self.name), ShareableList(name=self.words)
        own = SharedMemory(create=True, size=8)
        other = SharedMemory(own.name)
        if index % 2:
            own, other = other, own
        own.close()
        other.close()
        other.unlink()
        return self.held[0].buf[index] + len(self.held[1][0])

resource_tracker.ensure_running()  # torch's worker processes share it, as they do where the program made the segments
for epoch in range(2):
    print([batch.tolist() for batch in DataLoader(Named(*sys.argv[1:]), 4, num_workers=2)])
for name in sys.argv[1:]:
    resource_tracker.register("/" + name, "shared_memory")
    resource_tracker.unregister("/" + name, "shared_memory")
"""


def run(directory: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [str(HETSTREAM), "run", "--data-workers", "1", "--", sys.executable, "train.py", *words]
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, timeout=300, check=False)


def test_a_segment_that_samples_attach_to_stays_the_programs(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SEGMENTS)
    with SharedMemoryManager() as manager:
        segment, text = manager.SharedMemory(8), manager.ShareableList(["abc"])
        segment.buf[:8] = bytes(range(8))
        done = run(tmp_path, segment.name, text.shm.name)  # until what unlinks, which holds stderr, has ended, too
        assert done.stdout == "[[3, 4, 5, 6], [7, 8, 9, 10]]\n" * 2, done.stderr
        assert done.returncode == 0
        assert "local" not in done.stderr
        assert "resource_tracker" not in done.stderr
        SharedMemory(segment.name).close()
        ShareableList(name=text.shm.name).shm.close()


FRESH = """
import logging, os, shutil
import in_library
shutil.rmtree("out", ignore_errors=True)
os.makedirs("out")
logger = logging.getLogger("mine")
logger.addHandler(logging.FileHandler("train.log", mode="w"))
"""

DATA = """
import os, fresh, torch
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return index, os.path.exists("out/kept")
"""

TRAIN = """
import fresh
from data import Data
from torch.utils.data import DataLoader
open("out/kept", "w").close()
fresh.logger.warning("begins")
for epoch in range(2):
    print([batch[1].tolist() for batch in DataLoader(Data(), 4, num_workers=1)])
print(open("train.log").read(), end="")
"""


def test_what_modules_do_to_files_when_they_are_imported_is_done_once(tmp_path: Path) -> None:
    for name, text in {"fresh": FRESH, "data": DATA, "train": TRAIN, "in_library": ""}.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = run(tmp_path)
    assert done.stdout == "[[True, True, True, True], [True, True, True, True]]\n" * 2 + "begins\n", done.stderr
    (said,) = [line for line in done.stderr.splitlines() if "stays local" in line]
    assert "the program's modules cannot be imported in a data worker: fresh (" in said
    assert f"{tmp_path}/fresh.py, line 4" in said
    assert "shutil.rmtree 'out'" in said
    assert 'below `if __name__ == "__main__":`' in said


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where modules are imported from, with a file, a directory and a library."""
    (tmp_path / "file").write_text("text")
    (tmp_path / "directory").mkdir()
    libraries = tmp_path / "site-packages"
    libraries.mkdir()
    (libraries / "caching_library.py").write_text("open('cache', 'w').close()")
    (tmp_path / "imported_by_own.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(libraries)
    yield tmp_path
    for name in ("own_module", "caching_library", "imported_by_own"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    "line",
    [
        "open('file', 'w')",
        "open('file', 'a')",
        "open('file', 'r+b')",
        "open('new', 'x')",
        "os.close(os.open('new', os.O_CREAT | os.O_RDONLY))",
        "pathlib.Path('file').write_text('')",
        "pathlib.Path('file').touch()",
        "pathlib.Path('file').unlink()",
        "os.remove('file')",
        "os.rmdir('directory')",
        "os.replace('file', 'new')",
        "os.mkdir('new')",
        "os.makedirs('directory/new', exist_ok=True)",
        "os.symlink('file', 'new')",
        "os.link('file', 'new')",
        "os.truncate('file', 0)",
        "os.chmod('file', 0o600)",
        "shutil.rmtree('directory', ignore_errors=True)",
        "shutil.copy('file', 'new')",
        "tempfile.mkdtemp(dir='.')",
        "logging.FileHandler('train.log', mode='w')",
        "sqlite3.connect('new')",
        "subprocess.run(['touch', 'new'], check=True)",
        "os.system('touch new')",
        'exec(\'open("new", "w")\')',
    ],
)
@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_module_is_stopped_before_it_changes_anything(places: Path, line: str, is_hidden: bool) -> None:
    imports = "import logging, os, pathlib, shutil, sqlite3, subprocess, tempfile\n"
    text = f"try:\n    {line}\nexcept Exception:\n    pass" if is_hidden else f"class Made:\n    {line}\n"
    (places / "own_module.py").write_text(imports + text)
    before = {path: path.stat() for path in places.iterdir() if path.name != "__pycache__"}
    with (
        pytest.raises(PipelineError, match=r"own_module \(.*own_module.py, line [23]\) would change"),
        without_effects(),
    ):
        importlib.import_module("own_module")
    assert "own_module" not in sys.modules
    after = {path: path.stat() for path in places.iterdir() if path.name != "__pycache__"}
    assert {path: (was.st_ino, was.st_mtime_ns, was.st_size) for path, was in before.items()} == {
        path: (now.st_ino, now.st_mtime_ns, now.st_size) for path, now in after.items()
    }


def test_a_module_that_hides_everything_is_found_out(places: Path) -> None:
    (places / "own_module.py").write_text("import os\ntry:\n    os.remove('file')\nexcept:\n    pass\n")
    with pytest.raises(PipelineError, match=r"os\.remove 'file'"), without_effects():
        importlib.import_module("own_module")
    assert (places / "file").exists()


HARMLESS = """
import contextlib, os, shutil, sqlite3, sys, tempfile
import imported_by_own
import caching_library
os.makedirs("directory", exist_ok=True)
shutil.rmtree("none", ignore_errors=True)
with contextlib.suppress(OSError): os.remove("none")
with contextlib.suppress(OSError): os.mkdir("directory")
with contextlib.suppress(OSError): os.symlink("file", "directory")
with contextlib.suppress(OSError): open("file", "x")
open("file").close()
open(os.devnull, "w").close()
os.fdopen(os.dup(2), "w").close()
tempfile.TemporaryFile().close()
sqlite3.connect(":memory:").close()
sqlite3.connect("file:file?mode=ro", uri=True).close()
"""


def test_what_changes_nothing_and_what_libraries_do_goes_on(places: Path) -> None:
    (places / "own_module.py").write_text(HARMLESS)
    with without_effects():
        importlib.import_module("own_module")
    assert (places / "cache").exists()
    assert [path.name.partition(".")[0] for path in (places / "__pycache__").iterdir()]
    with contextlib.suppress(FileNotFoundError), without_effects():
        (places / "none").unlink()
    (places / "file").write_text("no module runs: this process writes as it likes")
