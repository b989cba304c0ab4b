"""The documents: links lead somewhere, commands exist with the options that are shown, the sessions by hand work."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.utils.data import TensorDataset

from hetstream import DataLoader
from hetstream.mpi_dataworkers.features.graph import FeatureGraph, dense
from hetstream.slurm_plugin.cli import INTERNAL, UNLISTED, VERBS, build_parser
from tests import acceptance
from tests.devcluster.__main__ import build_parser as devcluster_parser

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("sbatch_templates/**/*.md")])
FAILURE_MODES = [path for path in DOCUMENTS if path.name.startswith("failure-modes")]
MOST_LINES_OF_A_PAGE, MOST_CHARACTERS_OF_A_CELL = 500, 200
NAMES = [str(path.relative_to(ROOT)) for path in DOCUMENTS]
FOLDERS = (
    "benchmarks",
    "checkpoint",
    "hetjob",
    "hetstream",
    "mpi_dataworkers",
    "sbatch_templates",
    "slurm_plugin",
    "tests",
)


def commands(path: Path) -> Iterator[list[str]]:
    """Every `hetstream` and `devcluster` command of the document's code blocks, without prompt, comment and output."""
    for block in re.findall(r"```(?:console|bash)\n(.*?)```", path.read_text(), re.DOTALL):
        for line in block.splitlines():
            text = re.sub(r"^[$#] ", "", line)
            if re.match(r"(hetstream|devcluster) \w", text):
                yield shlex.split(text, comments=True)


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text()):
        assert (path.parent / target).exists(), f"{path.name} links to {target}"


def anchors(path: Path) -> set[str]:
    """Of the document's headings, as GitHub makes them: a second heading of one name gets `-1`, and so on."""
    found: list[str] = []
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for heading in re.findall(r"^#{1,6} +(.+)", text, re.MULTILINE):
        shown = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.strip())
        found.append(re.sub(r"[^\w\- ]", "", shown.lower()).replace(" ", "-"))
    return {slug + f"-{before}" * (before > 0) for at, slug in enumerate(found) for before in [found[:at].count(slug)]}


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_anchors_of_links_lead_to_headings(path: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", path.read_text()):
        assert anchor in anchors(path.parent / target if target else path), f"{path.name}: {target}#{anchor}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_commands_exist_as_shown(path: Path) -> None:
    for words in commands(path):
        # Exits with 2 on a wrong option.
        if words[0] == "devcluster":
            devcluster_parser().parse_known_args(words[1:])
        else:
            assert words[1] in (*VERBS, INTERNAL), f"hetstream {words[1]}"
            build_parser(words[1]).parse_known_args(words[1:])


def public_options(parser: argparse.ArgumentParser) -> list[str]:
    """Of a verb, or of each of its actions."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found += [option for inner in action.choices.values() for option in public_options(inner)]
        elif action.option_strings and not isinstance(action, argparse._HelpAction):
            found.append(action.option_strings[-1])
    return found


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_verbs_and_options_in_the_text_exist(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for words in (inline.split() for inline in re.findall(r"`hetstream\s+([a-z][^`]*)`", text)):
        verb, options = words[0], [word.partition("=")[0] for word in words if word.startswith("--") and word != "--"]
        assert verb in (*VERBS, *UNLISTED), f"hetstream {verb}"
        if verb not in ("run", "sbatch", "convert", "migrate"):  # with options of programs, or of sbatch
            assert {*options} <= {*public_options(build_parser(verb)), "--help"}, f"hetstream {' '.join(words)}"


def test_the_tests_that_failure_modes_names_exist() -> None:
    text = "".join(path.read_text() for path in FAILURE_MODES)
    tests = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    for name in re.findall(r"`(test_\w+?)(?:\[\w+\])?`", text):
        assert f"def {name}(" in tests, name
    for path in re.findall(r"`(tests/[\w/.]+)`", text):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_pages_and_cells_are_short_enough_to_be_read(path: Path) -> None:
    lines = path.read_text().splitlines()
    if path.parent.name == "docs":
        assert len(lines) <= MOST_LINES_OF_A_PAGE, "split it by what the reader wants to do"
    if path in FAILURE_MODES:
        cells = [cell.strip() for line in lines if line.startswith("|") for cell in re.split(r"(?<!\\)\|", line)]
        assert [cell for cell in cells if len(cell) > MOST_CHARACTERS_OF_A_CELL] == [], "split the row"


@pytest.mark.parametrize("path", DOCUMENTS, ids=NAMES)
def test_the_tests_that_a_document_names_by_file_exist(path: Path) -> None:
    named = re.findall(r"`(tests/[\w/.]+)::(\w+)`", path.read_text())
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()]
    assert missing == []


def test_what_is_shown_is_printed_with_its_tests_and_no_test_is_imported() -> None:
    lines = acceptance.shown()
    assert len(lines) > 300
    command = [sys.executable, "-X", "importtime", "-m", "tests.acceptance", "dispatcher", "restart"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    printed = [line.removeprefix("* ") for line in done.stdout.splitlines() if line.startswith("* ")]
    assert printed == [line for line in lines if "dispatcher" in line and "restart" in line] != []
    assert all(f"  - `{test}`" in done.stdout for line in printed for test in lines[line])
    assert not re.search("test_|torch|pytest", done.stderr)


@pytest.mark.parametrize("arguments", ["", "text", "'a', 'b'", "''", repr("a" * 121)])
def test_a_mark_without_a_text_that_can_be_read_is_refused(arguments: str) -> None:
    with pytest.raises(ValueError, match="test_it: shows"):
        list(acceptance.marks_in(ast.parse(f"@pytest.mark.shows({arguments})\ndef test_it(): ...")))


def test_the_modules_that_texts_name_exist() -> None:
    """In docstrings, comments and documents: `store.py`, `dispatcher/state.py`."""
    ours = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    texts = [*ours, *(path for path in DOCUMENTS if path.name != "peers.md")]  # it names peers' files
    known = [f"/{path.relative_to(ROOT)}" for path in ours]
    for path in texts:
        for named in re.findall(r"`((?:\w+/)*\w+\.py)(?:`|::)", path.read_text()):
            assert any(module.endswith(f"/{named}") for module in known), f"{path.name}: {named}"


def test_the_first_program_of_the_user_guide_streams(tmp_path: Path) -> None:
    code, command = re.findall(
        r"```(?:python|console)\n(.*?)```", (ROOT / "docs/user-guide.md").read_text(), re.DOTALL
    )[:2]
    own = "import torch\ndataset, seen = torch.utils.data.TensorDataset(torch.arange(640)), []\n"
    own += "train = lambda batch: seen.extend(batch[0].tolist())\n"
    (tmp_path / "train.py").write_text(own + code + "assert sorted(seen) == list(range(640)) != seen\n")
    words = shlex.split(command.removeprefix("$ hetstream "))
    assert words[:1] == ["run"]
    words[words.index("python")] = sys.executable
    hetstream = Path(sys.executable).with_name("hetstream")
    done = subprocess.run([hetstream, *words], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 loader, 10 steps, 640 samples" in done.stderr


PROGRAM_OF_A_READER = """
import os
import h5py, numpy as np, torch
from PIL import Image
from hetstream import DataLoader

class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        yield from range(info.id, 64, info.num_workers) if info else range(64)

torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
num_steps, trained = 12, []
train = trained.append
dataset = texts = web = code = torch.utils.data.TensorDataset(torch.arange(256))
num_tokens = [index % 600 for index in range(256)]
num_tokens_of = lambda element: element
stream = Stream()
web_loader, code_loader = DataLoader(web, batch_size=8), DataLoader(code, batch_size=4)
files = ["a.txt", "b.txt"]
for file in files:
    with open(file, "w") as out:
        out.write("line\\n" * 100)
with h5py.File("clicks.h5", "w") as file:
    file["features"], file["label"] = np.zeros((4, 2)), np.zeros(4)
os.makedirs("train/cat")
os.mkdir("broken")
Image.new("RGB", (300, 300)).save("train/cat/1.png")
"""


def test_the_examples_in_python_run_as_they_are_printed(tmp_path: Path) -> None:
    """With data and a model of the reader's, and a service; each block has what those before it have made."""
    texts = [(ROOT / name).read_text() for name in ("README.md", "docs/user-guide.md", "docs/user-loader.md")]
    blocks = [block for text in texts for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL)]
    assert len(blocks) > 12
    first_batch = "next(iter(loader))\n"
    program = "".join(block + first_batch * ("\nloader = " in f"\n{block}") for block in blocks)
    program = program.replace('"file:/shared/address"', 'os.environ["HETSTREAM_SERVICE"]')
    (tmp_path / "train.py").write_text(PROGRAM_OF_A_READER + program + 'print("done")\n')
    hetstream = Path(sys.executable).with_name("hetstream")
    command = [hetstream, "run", "--data-workers", "1", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.split()[-1:]) == (0, ["done"]), done.stderr


def test_the_examples_of_the_feature_guide_run_as_they_are_printed(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs/features.md").read_text(), re.DOTALL)
    assert len(blocks) > 4
    rows = "".join(f"{row % 2},{'' if row % 3 else row},{row},{row:08x}\n" for row in range(5000))
    (tmp_path / "clicks.csv").write_text("label,age,price,page\n" + rows)
    (tmp_path / "train.py").write_text(
        "".join(blocks) + "assert sum(len(batch['label']) for batch in loader) == 5000\n"
    )
    hetstream = Path(sys.executable).with_name("hetstream")
    command = [hetstream, "run", "--data-workers", "1", sys.executable, "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([4096, 2]) torch.Size([4096])" in done.stdout


def test_the_reference_explains_every_statistic() -> None:
    reference = (ROOT / "docs/reference.md").read_text()
    [table] = re.findall(r"## Statistics\n(?:[^|\n]*\n)*((?:\|.*\n)+)", reference)
    named = [name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    texts = TensorDataset(torch.arange(8))
    graph = FeatureGraph.of({"x": dense("x")})
    with DataLoader(texts, batch_size=2, lengths=list(range(8)), bucket_boundaries=[4], features=graph) as loader:
        assert sorted(named) == sorted(loader.stats())


def test_the_program_of_the_checkpoint_guide_goes_on_where_it_ended(tmp_path: Path) -> None:
    [code] = re.findall(
        r"```python\n(from hetstream import FlashCheckpointer.*?)```",
        (ROOT / "docs/checkpoint.md").read_text(),
        re.DOTALL,
    )
    own = """
import sys, torch
from hetstream import DataLoader
seen, num_steps = [], int(sys.argv[1])
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.Adam(model.parameters())
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)
loader = DataLoader(torch.utils.data.TensorDataset(torch.arange(60)), batch_size=4, shuffle=True, seed=1)
def train(batch):
    seen.extend(batch[0].tolist())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    scheduler.step()
"""
    (tmp_path / "train.py").write_text(own + code + "loader.close()\nprint(step, *seen)\n")
    [reading] = re.findall(
        r"```python\n(from hetstream import CheckpointReader.*?)```",
        (ROOT / "docs/checkpoint.md").read_text(),
        re.DOTALL,
    )
    reads = "import torch\nmodel = torch.nn.Linear(1, 1)\nevaluate = lambda model: float(model.weight)\n"
    (tmp_path / "evaluate.py").write_text(reads + reading)
    said = []
    for num_steps in (7, 15):
        argv = [sys.executable, "train.py", str(num_steps)]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said.append([int(word) for word in done.stdout.split()])
    (first, *before), (second, *after) = said
    assert (first, second) == (7, 15)
    assert sorted(before + after) == list(range(60))
    done = subprocess.run(
        [sys.executable, "evaluate.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert int(lines[-1][0]) == 15
    assert len({value for _, value in lines}) == len(lines)
    [going_back] = re.findall(
        r"```python\n(steps = checkpointer.all_steps.*?)```", (ROOT / "docs/checkpoint.md").read_text(), re.DOTALL
    )
    back = (
        "from hetstream import FlashCheckpointer\n"
        "state = {'model': model, 'optimizer': optimizer, 'scheduler': scheduler, 'loader': loader}\n"
        "with FlashCheckpointer('checkpoints') as checkpointer:\n" + textwrap.indent(going_back, "    ")
    )
    (tmp_path / "train.py").write_text(own + back + "loader.close()\nprint(step)\n")
    said_of_steps = []
    for program in ("train.py", "evaluate.py"):
        argv = [sys.executable, program, "0"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said_of_steps.append([line.split()[0] for line in done.stdout.splitlines()])
    assert said_of_steps == [[lines[-2][0]], [one for one, _ in lines[:-1]]]


@pytest.mark.slow
def test_the_loop_with_epochs_and_validation_goes_on_in_mid_epoch(tmp_path: Path) -> None:
    text = (ROOT / "docs/checkpoint.md").read_text()
    [code] = re.findall(r"```python\n(with FlashCheckpointer[^`]*validation_loader.*?)```", text, re.DOTALL)
    own = """
import sys, torch
from hetstream import FlashCheckpointer
from hetstream import DataLoader
num_epochs, dies_at, num_taken = 3, int(sys.argv[1]), 0
torch.manual_seed(1)
model = torch.nn.Linear(1, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(torch.arange(40.0)[:, None] / 40)
loader = DataLoader(data, batch_size=4, shuffle=True, seed=1)
validation_loader = DataLoader(data, batch_size=8)
def train(batch):
    global num_taken
    num_taken += 1
    if num_taken == dies_at:
        raise SystemExit(5)
    optimizer.zero_grad()
    model(batch[0]).square().mean().backward()
    optimizer.step()
def validate(batch):
    return float(model(batch[0]).square().mean())
"""
    (tmp_path / "train.py").write_text(own + code + "print(step, num_taken, state['validated'])\n")

    def run(directory: str, dies_at: int) -> subprocess.CompletedProcess[str]:
        (tmp_path / directory).mkdir(exist_ok=True)
        argv = [sys.executable, str(tmp_path / "train.py"), str(dies_at)]
        return subprocess.run(argv, cwd=tmp_path / directory, capture_output=True, text=True, timeout=120, check=False)

    whole = run("whole", 0)
    assert whole.returncode == 0, whole.stderr
    assert "hetstream: a checkpoint every " in whole.stderr
    assert "; FlashCheckpointer(interval=) changes that" in whole.stderr
    assert run("again", 17).returncode == 5
    rest = run("again", 0)
    assert rest.returncode == 0, rest.stderr
    steps, taken, validated = rest.stdout.split(maxsplit=2)
    assert (steps, validated) == (whole.stdout.split()[0], whole.stdout.split(maxsplit=2)[2]) != ("0", "[]")
    assert 13 <= int(taken) < 30, "it did not begin again"


def test_the_messages_that_troubleshooting_quotes_are_in_the_source() -> None:
    """Words in backticks of the first column, but for commands and options."""
    source = ""
    for package in ("hetjob", "mpi_dataworkers", "slurm_plugin", "hetstream"):
        for path in [*(ROOT / package).rglob("*.py"), *(ROOT / package).rglob("*.lua")]:
            source += re.sub(r'"\n\s*f?"', "", path.read_text())  # of literals that go on in the next line
    quoted = []
    for line in (ROOT / "docs/troubleshooting.md").read_text().splitlines():
        column = line.split("|")[1] if line.startswith("| ") else ""
        quoted += [text for text in re.findall(r"`([^`]+)`", column) if " " in text and "=" not in text]
    found = [
        text for text in quoted if not text.startswith(("hetstream ", "source ", "module:", "conda ", "accelerate "))
    ]
    assert len(found) > 20
    for text in found:
        assert text.partition(" on HOST")[0] in source, text


def test_what_users_may_say_stays_little() -> None:
    """Before one more is added: can it be derived, or take the place of another?"""
    assert len(VERBS) <= 18
    options = [option for verb in VERBS for option in public_options(build_parser(verb))]
    assert len([option for option in options if option not in ("--version", "--verbose")]) <= 161
    text = (ROOT / "docs/reference.md").read_text()
    variables = text[text.index("## Environment variables") : text.index("The site's files")]
    assert len(re.findall(r"^\| `HETSTREAM_", variables, re.MULTILINE)) <= 17


def test_each_page_is_once_in_the_list_of_the_site() -> None:
    listed = re.findall(r"^ +- ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    pages = [str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")]
    assert sorted(listed) == sorted(page for page in pages if not page.startswith("measured/"))
