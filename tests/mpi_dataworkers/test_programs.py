"""Programs and data worker processes: each program has its own, which see what the trainer sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import children_of

READ = """
import sys
import dataset
from hetstream import DataLoader

def said(loader):
    return [value for batch in loader for value in batch]

with DataLoader(dataset.Data(), batch_size=2, collate_fn=list, service=sys.argv[1]) as loader:
    print(said(loader), flush=True)
    for line in sys.stdin:
        print(said(loader), flush=True)
    print("local", loader.stats()["local_steps"])
"""

LINES = """
from pathlib import Path

_records = None

class Data:
    def __len__(self): return 8
    def __getitem__(self, index):
        global _records
        if _records is None:
            _records = Path("records").read_text().split()
        return _records[index]
"""


def records(word: str) -> str:
    return " ".join(f"{word}{number}" for number in range(8))


def expected(word: str) -> str:
    return str(records(word).split())


class Program:
    """A training program that can be told to read once more."""

    def __init__(self, source: str, directory: Path, *arguments: str, **files: str) -> None:
        directory.mkdir(exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("__", ".")).write_text(text)
        script = directory / "train.py"
        script.write_text(source)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("HETSTREAM_", "SLURM_"))
        }
        self.process = subprocess.Popen(
            [sys.executable, str(script), *arguments],
            cwd=directory,
            env=environment | {"PYTHONDONTWRITEBYTECODE": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def again(self) -> str:
        assert self.process.stdin
        print(file=self.process.stdin, flush=True)
        return self.line()

    def rest(self) -> str:
        return self.process.communicate(timeout=100)[0].strip()


@pytest.fixture
def start() -> Iterator[Callable[..., Program]]:
    """Start programs, ended after the test."""
    started: list[Program] = []

    def begin(*arguments: Any, **files: str) -> Program:
        started.append(Program(*arguments, **files))
        return started[-1]

    yield begin
    for one in started:
        one.process.kill()
        one.process.communicate()


def test_programs_one_after_the_other_get_their_own_records_and_code(service: Any, start: Any, tmp_path: Path) -> None:
    service.start_workers(2)
    for folder, word in (("one", "a"), ("two", "b"), ("one", "c")):
        # The third has the first one's folder and code, and another file under the same name.
        program = start(READ, tmp_path / folder, service.name, dataset__py=LINES, records=records(word))
        assert program.rest() == f"{expected(word)}\nlocal 0"
    edited = LINES.replace("_records[index]", "_records[index] + '!'")
    program = start(READ, tmp_path / "one", service.name, dataset__py=edited)
    assert program.rest() == f"{[one + '!' for one in records('c').split()]}\nlocal 0"
    assert "in the place of" not in service.log("dispatcher"), "a fresh process is no replacement of a dead one"
    assert " lost" not in service.log("dispatcher")


def test_programs_at_the_same_time_have_their_own_processes(
    service: Any, start: Any, tmp_path: Path, wait_until: Any
) -> None:
    supervisor = service.start_workers()
    one = start(READ, tmp_path / "one", service.name, dataset__py=LINES, records=records("a"))
    assert one.line() == expected("a")
    other = LINES.replace("_records[index]", "_records[index] + '!'")
    two = start(READ, tmp_path / "two", service.name, dataset__py=other, records=records("b"))
    shouted = str([word + "!" for word in records("b").split()])
    assert two.line() == shouted
    assert len(children_of(supervisor.pid)) == 2
    for _ in range(3):
        assert (one.again(), two.again()) == (expected("a"), shouted)
    for killed in children_of(supervisor.pid):
        os.kill(killed, signal.SIGKILL)
    assert (one.again(), two.again()) == (expected("a"), shouted)
    service.kill_dispatcher()
    service.start_dispatcher()
    assert (one.again(), two.again()) == (expected("a"), shouted)
    assert two.rest() == "local 0"
    wait_until(lambda: len(children_of(supervisor.pid)) == 1, timeout_s=30, what="the end of the second process")
    assert one.again() == expected("a")
    assert one.rest() == "local 0"


RELOADS = """
import importlib, sys
from pathlib import Path
import dataset
from hetstream import DataLoader

source = Path(dataset.__file__)
for number in range(3):
    with DataLoader(dataset.Data(), batch_size=2, collate_fn=list, service=sys.argv[1]) as loader:
        print([value for batch in loader for value in batch], loader.stats()["local_steps"])
    source.write_text(source.read_text().replace("_records[index]", f"_records[index] + '{number}'"))
    importlib.reload(dataset)
dataset.Data.__getitem__ = lambda self, index: dataset.SCALE * index
dataset.SCALE = 7
with DataLoader(dataset.Data(), batch_size=2, collate_fn=list, service=sys.argv[1]) as loader:
    print([value for batch in loader for value in batch], loader.stats()["local_steps"])
"""


def test_a_module_that_is_reloaded_in_mid_run_is_the_new_one(service: Any, start: Any, tmp_path: Path) -> None:
    service.start_workers()
    program = start(RELOADS, tmp_path / "one", service.name, dataset__py=LINES, records=records("a"))
    words = records("a").split()
    *read, patched = program.rest().splitlines()
    assert read == [f"{[word + end for word in words]} 0" for end in ("", "0", "10")]
    assert patched == f"{[7 * index for index in range(8)]} 0"


SETTINGS = """
import os, sys
import torch
import config, data
from config import options
from hetstream import DataLoader

loader = DataLoader(data.Data(), batch_size=1, collate_fn=list, service=sys.argv[1])
def show():
    for batch in loader:
        print(batch[0])
        break
show()
config.SIZE = 7
options["scale"] = 3
data.Data.factor = 5
os.environ["MY_SCALE"] = "9"
torch.set_default_dtype(torch.float64)
sys.argv.append("more")
show()
del os.environ["MY_SCALE"]
config.helper = config.other
torch.set_default_dtype(torch.float32)
show()
loader.close()
"""

DATA = """
import os, sys
import torch
import config
from config import options

class Data:
    factor = 1
    def __len__(self): return 2
    def __getitem__(self, index):
        scale = os.environ.get("MY_SCALE", "unset")
        return (config.SIZE, options["scale"], config.options is options, self.factor, scale,
                torch.zeros(1).dtype == torch.float64, len(sys.argv), config.helper())
"""

CONFIG = """
SIZE = 1
options = {"scale": 1}
def helper(): return "helper"
def other(): return "other"
"""


@pytest.mark.shows("what is registered for torch's `default_collate`, settings of torch and the umask travel")
def test_data_workers_see_what_the_program_has_set(service: Any, start: Any, tmp_path: Path) -> None:
    service.start_workers()
    program = start(SETTINGS, tmp_path / "one", service.name, data__py=DATA, config__py=CONFIG)
    assert program.rest().splitlines() == [
        "(1, 1, True, 1, 'unset', False, 2, 'helper')",
        "(7, 3, True, 5, '9', True, 3, 'helper')",
        "(7, 3, True, 5, 'unset', False, 3, 'other')",
    ]


SPAWNS = """
import sys
from typing import NamedTuple
import torch
from hetstream import DataLoader

class Sample(NamedTuple):
    value: int

class Data:
    def __len__(self): return 4
    def __getitem__(self, index): return Sample(index)

def collate(samples):
    return samples

def main(rank, service):
    with DataLoader(Data(), batch_size=2, collate_fn=collate, service=service) as loader:
        batches = list(loader)
        assert all(type(sample) is Sample for batch in batches for sample in batch)
        print(len(batches), loader.stats()["local_steps"], flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(main, (sys.argv[1],))
"""


def test_the_script_of_a_spawned_process_travels_by_value(service: Any, start: Any, tmp_path: Path) -> None:
    service.start_workers()
    assert start(SPAWNS, tmp_path / "one", service.name).rest() == "2 0"


TOGGLES = """
import sys
import dataset
from hetstream import DataLoader

class Script:
    mode = "train"
    def __len__(self): return 40
    def __getitem__(self, index): return type(self).mode, Script.mode, dataset.read(index)

def fast(index): return "fast"

def loader(name):
    return DataLoader(Script(), batch_size=2, sampler=range(40), collate_fn=list, service=sys.argv[1], job_name=name)

read = dataset.read
with loader("train") as training, loader("validation") as validation:
    open_pass = iter(training)
    seen = [next(open_pass)]
    Script.mode, dataset.read = "validation", fast
    print({sample for batch in validation for sample in batch})
    Script.mode, dataset.read = "train", read
    seen += open_pass
    print({sample for batch in seen + list(training) for sample in batch})
    print("local", training.stats()["local_steps"] + validation.stats()["local_steps"])
"""


def test_a_pass_keeps_what_the_program_changes_for_another(service: Any, start: Any, tmp_path: Path) -> None:
    service.start_workers()
    program = start(TOGGLES, tmp_path / "one", service.name, dataset__py="def read(index): return 'whole'\n")
    assert program.rest().splitlines() == [
        "{('validation', 'validation', 'fast')}",
        "{('train', 'train', 'whole')}",
        "local 0",
    ]
