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
    (tmp_path / "home" / ".cache").mkdir(parents=True)
    (tmp_path / "home" / ".cache" / "index").write_text("text")
    (tmp_path / "home" / ".cache" / "lock").write_text("")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(libraries)
    yield tmp_path
    for name in ("own_module", "caching_library", "imported_by_own"):
        sys.modules.pop(name, None)


def standing(places: Path) -> dict[Path, tuple[int, ...]]:
    """Every file outside of the cache, and the one in it that says something; bytes by size and time."""
    outside = [path for path in places.rglob("*") if not {"__pycache__", ".cache"} & set(path.parts)]
    found = {path: path.stat() for path in [*outside, places / "home" / ".cache" / "index"]}
    return {path: (now.st_ino, now.st_mtime_ns, now.st_size, now.st_mode) for path, now in found.items()}


@pytest.mark.parametrize(
    "line",
    [
        "open('file', 'w')",
        "os.open('file', os.O_WRONLY | os.O_APPEND)",
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
        # A cache is no licence to take anything, nor a way to what lies elsewhere.
        "open(CACHE + '/index', 'w')",
        "os.remove(CACHE + '/index')",
        "os.replace('file', CACHE + '/new')",
        "open(CACHE + '/own', 'w').close(); os.replace(CACHE + '/own', 'new')",
        "open(CACHE + '/own', 'w').close(); os.replace(CACHE + '/own', CACHE + '/index')",
        "os.link('file', CACHE + '/link'); open(CACHE + '/link', 'w')",
        "os.symlink(os.path.abspath('file'), CACHE + '/link'); open(CACHE + '/link', 'w')",
        "os.symlink(os.path.abspath('new'), CACHE + '/link'); open(CACHE + '/link', 'w')",
        "os.symlink(os.path.abspath('directory'), CACHE + '/link'); open(CACHE + '/link/new', 'w')",
        "os.mkdir(CACHE + '/../new')",
        "os.mkdir(CACHE + '2')",
        "tempfile.mkdtemp(prefix='../')",
        "subprocess.run(['touch', 'new'], check=True)",
        "os.system('touch new')",
        'exec(\'open("new", "w")\')',
    ],
)
@pytest.mark.parametrize("is_hidden", [False, True])
def test_a_module_is_stopped_before_it_changes_anything(places: Path, line: str, is_hidden: bool) -> None:
    imports = (
        "import logging, os, pathlib, shutil, sqlite3, subprocess, tempfile; CACHE = os.path.expanduser('~/.cache')\n"
    )
    text = f"try:\n    {line}\nexcept Exception:\n    pass" if is_hidden else f"class Made:\n    {line}\n"
    (places / "own_module.py").write_text(imports + text)
    before = standing(places)
    with (
        pytest.raises(PipelineError, match=r"own_module \(.*own_module.py, line [23]\) would change"),
        without_effects(),
    ):
        importlib.import_module("own_module")
    assert "own_module" not in sys.modules
    assert standing(places) == before


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


OWN = """
import logging, os, shutil, sqlite3, tempfile
cache = os.path.join(os.path.expanduser("~/.cache"), "mine")
os.makedirs(cache, exist_ok=True)
with open(cache + "/index.tmp", "w") as stream: stream.write("built")
os.replace(cache + "/index.tmp", cache + "/index")
with open(cache + "/index") as stream: INDEX = stream.read()
os.chmod(cache + "/index", 0o600)
os.remove(cache + "/index")
os.close(os.open(cache + "/../lock", os.O_RDWR | os.O_CREAT | os.O_TRUNC))
sqlite3.connect(cache + "/table").close()
with tempfile.TemporaryDirectory() as directory:
    os.makedirs(directory + "/a/b")
    shutil.copy("file", directory + "/a")
    os.rename(directory + "/a/file", directory + "/moved")
with tempfile.NamedTemporaryFile() as stream: stream.write(b"x")
kept = tempfile.mkdtemp()
shutil.rmtree(kept)
"""


def test_a_module_makes_what_it_likes_where_nobody_looks_for_it(places: Path) -> None:
    (places / "own_module.py").write_text(OWN)
    before = standing(places)
    with without_effects():
        module = importlib.import_module("own_module")
    assert module.INDEX == "built"
    assert standing(places) == before
    assert [path.name for path in (places / "home" / ".cache" / "mine").iterdir()] == ["table"]
    assert not Path(module.kept).exists()


APPENDS = """
import io, logging, os, pathlib
logger = logging.getLogger("appends")
logger.propagate = False
handler = logging.FileHandler("train.log")
logger.addHandler(handler)
logger.warning("imported")
table = open("table.csv", "a+")
if not table.tell(): table.write("header\\n")
lines = pathlib.Path("lines").open("ab", buffering=0)
lines.write(b"imported\\n")
with open("closed", mode="at") as closed: closed.write("imported\\n")
new = open("new", "a")
new.write("imported\\n")
gone = io.open("gone", "a")
kept = open
def work():
    logger.warning("a sample")
    table.write("row\\n")
    table.flush()
    lines.write(b"a sample\\n")
    new.write("a sample\\n")
    gone.write("a sample\\n")
    for stream in table, lines, new, gone: stream.close()
    handler.close()
    with kept("by_sample", "a") as stream: stream.write("a sample\\n")
"""


def test_what_a_module_appends_at_import_is_there_once_and_what_samples_append_comes(places: Path) -> None:
    for name in ("train.log", "table.csv", "lines", "closed", "gone"):
        (places / name).write_text("by the program\n")
    (places / "own_module.py").write_text(APPENDS)
    before = standing(places)
    pythons = open
    with without_effects():
        module = importlib.import_module("own_module")
        (places / "gone").unlink()  # by the program meanwhile
    assert open is pythons
    assert {**standing(places), places / "gone": before[places / "gone"]} == before
    module.work()
    texts = {name: (places / name).read_text() for name in ("train.log", "table.csv", "lines", "closed", "by_sample")}
    assert texts == {
        "train.log": "by the program\na sample\n",
        "table.csv": "by the program\nrow\n",
        "lines": "by the program\na sample\n",
        "closed": "by the program\n",
        "by_sample": "a sample\n",
    }
    assert not (places / "new").exists()
    assert not (places / "gone").exists()


def test_what_cannot_be_appended_to_is_the_programs_error(places: Path) -> None:
    text = "ERRORS = []\nfor name in ('directory', 'none/new'):\n"
    text += "    try: open(name, 'a')\n    except OSError as error: ERRORS.append(type(error).__name__)\n"
    (places / "own_module.py").write_text(text)
    with without_effects():
        assert importlib.import_module("own_module").ERRORS == ["IsADirectoryError", "FileNotFoundError"]


LOGGING = """
import logging, os
os.makedirs("out", exist_ok=True)
logging.basicConfig(filename="out/train.log", level=logging.INFO, format="%(message)s")
logging.info("imported")
with open("out/table.csv", "a") as table: table.write("step,loss\\n")
"""

LOGGED_DATA = """
import logging, torch
import fresh
class Data(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        logging.info("sample %d", index)
        return index
"""

LOGGED_TRAIN = """
import sys
from data import Data
from torch.utils.data import DataLoader
for epoch in range(2):
    print([batch.tolist() for batch in DataLoader(Data(), 4, num_workers=1)])
"""


def test_a_program_whose_modules_append_to_its_log_is_served(tmp_path: Path) -> None:
    for name, text in {"fresh": LOGGING, "data": LOGGED_DATA, "train": LOGGED_TRAIN}.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = run(tmp_path)
    assert done.stdout == "[[0, 1, 2, 3], [4, 5, 6, 7]]\n" * 2, done.stderr
    assert "local" not in done.stderr
    log = (tmp_path / "out" / "train.log").read_text().splitlines()
    assert log[0] == "imported"
    said = [line for line in log[1:] if "samples of a DataLoader write to files" in line]
    assert len(said) == 1, "the program's own logger has it, too"
    assert set(log[1:]) - {*said} == {f"sample {index}" for index in range(8)}
    assert (tmp_path / "out" / "table.csv").read_text() == "step,loss\n"
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["table.csv", "train.log"]


def test_what_changes_nothing_and_what_libraries_do_goes_on(places: Path) -> None:
    (places / "own_module.py").write_text(HARMLESS)
    with without_effects():
        importlib.import_module("own_module")
    assert (places / "cache").exists()
    assert [path.name.partition(".")[0] for path in (places / "__pycache__").iterdir()]
    with contextlib.suppress(FileNotFoundError), without_effects():
        (places / "none").unlink()
    (places / "file").write_text("no module runs: this process writes as it likes")
