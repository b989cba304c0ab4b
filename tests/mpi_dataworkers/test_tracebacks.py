"""What user code raises in a data worker reads as it does from torch's worker processes: in lines, with its files."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.mpi_dataworkers.conftest import run_program

# Each of these datasets is of the script, of a function in it, or of a cell of a notebook.
SCRIPT = """
import json, linecache, sys, time, traceback
import torch
import hetstream

class Missing(KeyError):
    pass

class Odd(Exception):
    def __init__(self, code):
        super().__init__("it has a text of its own")

class Told(Exception):
    message = "as some libraries have it"
    def __init__(self, *, message):
        super().__init__(message)

class Failing(torch.utils.data.Dataset):
    def __init__(self, error): self.error = error
    def __len__(self): return 4
    def __getitem__(self, index):
        if index == 2:
            self.fail()
        return index
    def fail(self):
        if self.error == "lookup":
            return {"a": 1}["missing"]  # of the script
        raise {"missing": Missing("key 7"), "odd": Odd(7), "told": Told(message="told")}[self.error]

def local():
    class Local(Failing):
        def fail(self):
            return (lambda: {}["local"])()  # of a function
    return Local("")

def of_a_cell():
    lines = [line + "\\n" for line in (
        "class Cell(Failing):", "    def fail(self):", "        return {}['of a cell']  # of a cell")]
    linecache.cache["<cell 7>"] = (sum(map(len, lines)), None, lines, "<cell 7>")
    exec(compile("".join(lines), "<cell 7>", "exec"), globals())
    return Cell("")

def collate(samples):
    if 2 in samples:
        raise ValueError("of two\\nlines")
    return samples

def raised_by(loader):
    try:
        for batch in loader: pass
    except Exception as error:
        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return type(error).__qualname__, text, isinstance(error, KeyError)

def run(dataset, collate_fn=None):
    of_torch = raised_by(torch.utils.data.DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=collate_fn))
    with hetstream.DataLoader(dataset, batch_size=2, collate_fn=collate_fn, service=sys.argv[1]) as loader:
        ours, until = raised_by(loader), time.monotonic() + 100
        while "in a data worker" not in ours[1] and time.monotonic() < until:
            ours = raised_by(loader)  # the trainer made the step, as no data worker knows the program yet
    return of_torch, ours

if __name__ == "__main__":
    datasets = {error: Failing(error) for error in ("lookup", "missing", "odd", "told")}
    datasets |= {"local": local(), "cell": of_a_cell()}
    results = {name: run(dataset) for name, dataset in datasets.items()}
    results["collate"] = run(list(range(4)), collate)
    print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def raised(three: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    done = run_program(SCRIPT, tmp_path_factory.mktemp("script"), three.name)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def frames_of_the_program(text: str) -> dict[str, str]:
    """Each frame in the program's own code, by its name: file, line, source, and marks below it."""
    _, _, original = text.rpartition("Traceback (most recent call last):\n")
    pattern = r'  File "(?:[^"]*/train\.py|<cell 7>)", line \d+, in (\S+)\n    .*\n(?:    +[~^]+\n)?'
    return {match[1]: match[0] for match in re.finditer(pattern, original)}


FRAMES = {
    "lookup": ["__getitem__", "fail"],
    "missing": ["__getitem__", "fail"],
    "odd": ["__getitem__", "fail"],
    "told": ["__getitem__", "fail"],
    "local": ["__getitem__", "fail", "<lambda>"],
    "cell": ["__getitem__", "fail"],
    "collate": ["collate"],
}


@pytest.mark.shows("errors read as in torch, a `KeyError` in lines, with file and line of the script")
@pytest.mark.parametrize("name", FRAMES)
def test_an_error_reads_as_torch_shows_it(raised: Any, name: str) -> None:
    of_torch, ours = raised[name]
    assert ours[0] == of_torch[0], ours[1]
    found = frames_of_the_program(ours[1])
    assert list(found) == FRAMES[name], ours[1]
    # torch loses the text of an exception that makes its own, and puts that of a subclass of KeyError into one line.
    assert found == frames_of_the_program(of_torch[1] if name not in ("odd", "missing") else raised["told"][0][1])
    assert max(map(len, ours[1].splitlines())) < 250, "it is in lines"


@pytest.mark.shows("errors read as in torch, a `KeyError` in lines, with file and line of the script")
def test_a_key_error_is_told_in_lines(raised: Any) -> None:
    for name, kind, key in (("lookup", "KeyError", "'missing'"), ("missing", "Missing", "'key 7'")):
        assert raised[name][1][2]
        assert re.search(rf"^(__main__\.)?{kind}: {key}\n\nin a data worker", raised[name][1][1], re.MULTILINE)
