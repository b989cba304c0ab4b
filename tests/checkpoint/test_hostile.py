"""Everything that reads checkpoint directories, on thousands that were made to harm: `ls`, `verify`, `gc`, `convert`,
and a restore in a trainer. Each ends soon, takes little memory, says what is wrong in a line, and touches nothing else.

As root the devices are real and some files are another user's.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from tests.checkpoint import hostile_sources
from tests.checkpoint.hostile import KINDS, STEPS, become, change, write_valid
from tests.checkpoint.programs.commands import Result

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")
ROOT = Path(__file__).parents[2]
# Of a process that has torch and the commands loaded.
MAX_MORE_BYTES = 400 << 20
MAX_ACT_S = 60.0
MAX_SAID_BYTES = 64 << 10
# Beyond the first seeds: each of these has found a defect.
FOUND = (121, 491)
UNPRINTABLE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
STEP = STEPS[-1].directory_name
FILE, MANIFEST = f"{STEP}/rank-00000-of-00001.safetensors", f"{STEP}/rank-00000-of-00001.json"
PLACES = (
    *("owner.json", "history.jsonl", "handover.json", ".lock", ".commit", "latest", ".memory", "replicas", STEP),
    *(f"{STEP}.partial", f"{STEP}.deleted", FILE, MANIFEST, f"{STEP}/damaged.txt", f"{STEP}/.in-use"),
)
QUICK_PLACES = random.Random(1).sample([(place, kind) for place in PLACES for kind in KINDS], 10)


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """Where directories are made, beside a home with what nobody may touch."""
    home = tmp_path / "home"
    write_valid(home)
    (home / "profile").write_text("private\n")
    write_valid(tmp_path / "one", num_ranks=2)
    write_valid(tmp_path / "two")
    return tmp_path


def run(place: Path, names: Mapping[str, str]) -> list[Result]:
    """What all commands come to, in each of some directories."""
    argv = [sys.executable, "-m", "tests.checkpoint.programs.commands", str(place / "home")]
    argv += [str(place / name) for name in names]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return [Result(*json.loads(line)) for line in done.stdout.splitlines()]


def problems_of(result: Result) -> list[str]:
    """What is not as it should be."""
    said = Path(result.directory + ".said").read_text(errors="surrogateescape")
    found = []
    if result.exit_code:
        found.append(f"exit code {result.exit_code}: {said[-3000:]}")
    if "Traceback" in said and not result.exit_code:
        found.append(f"a traceback: {said[said.index('Traceback') :][:3000]}")
    if UNPRINTABLE.search(said):
        found.append(f"not printable: {UNPRINTABLE.findall(said)}")
    if "\nhetstream ckpt: all is well" in said:
        found.append("a line of the stranger's own")
    if result.num_bytes > MAX_MORE_BYTES:
        found.append(f"{result.num_bytes} bytes of memory")
    if result.touched:
        found.append(f"touched: {result.touched}")
    for act, came_to, took_s, begin, end in result.acts:
        told = said[begin:end]
        if took_s > MAX_ACT_S:
            found.append(f"{act} took {took_s:.0f} s")
        if end - begin > MAX_SAID_BYTES:
            found.append(f"{act} said {end - begin} bytes: {told[:500]}")
        if act.startswith(("to ", "gc")) and bool(re.search(r"^hetstream ckpt \w+: ", told, re.MULTILINE)) != (
            came_to == 1
        ):
            found.append(f"{act} ended with {came_to} and said: {told[:2000]}")
        if came_to not in (0, 1) and not isinstance(came_to, str):
            found.append(f"{act} ended with {came_to}: {told[:2000]}")
    return found


def check(place: Path, names: Mapping[str, str]) -> list[Result]:
    results = run(place, names)
    problems = {Path(one.directory).name: problems_of(one) for one in results}
    assert len(problems) == len(names)
    told = [f"{name} ({names[name]}): " + "\n".join(found) for name, found in problems.items() if found]
    assert not told, "\n\n".join(told)
    return results


def fuzz(place: Path, seeds: Iterable[int]) -> None:
    names = {}
    for seed in seeds:
        chance = random.Random(seed)
        name = f"seed-{seed}"
        shutil.copytree(place / chance.choice(("one", "two")), place / name, symlinks=True)
        names[name] = ", ".join(change(place / name, place / "home", chance))
    check(place, names)


def test_the_corpus_begins_with_directories_that_are_good(place: Path) -> None:
    for result in check(place, dict.fromkeys(("one", "two"), "good")):
        acts = {name: came_to for name, came_to, *_ in result.acts}
        assert acts.pop("restore") in ("step 20", "StateMismatch" if result.directory.endswith("one") else "step 20")
        assert set(acts.values()) <= {0} or acts.pop("to dcp") == 1  # which holds no sparse tensors


def test_directories_of_some_dozens_of_seeds_do_no_harm(place: Path) -> None:
    fuzz(place, (*range(16), *FOUND))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunk", range(20))
def test_directories_of_thousands_of_seeds_do_no_harm(place: Path, chunk: int) -> None:
    fuzz(place, range(100 + 100 * chunk, 200 + 100 * chunk))


def replaced(place: Path, pairs: list[tuple[str, str]]) -> None:
    names = {}
    for number, (where, kind) in enumerate(pairs):
        name = f"place-{number}"
        shutil.copytree(place / "two", place / name, symlinks=True)
        become(place / name / where, kind, place / "home")
        names[name] = f"{where} is {kind}"
    check(place, names)


def test_some_places_with_something_else_do_no_harm(place: Path) -> None:
    replaced(place, QUICK_PLACES)


@pytest.mark.slow
@pytest.mark.parametrize("where", PLACES)
def test_each_place_with_something_else_does_no_harm(place: Path, where: str) -> None:
    replaced(place, [(where, kind) for kind in KINDS])


@pytest.mark.shows("nothing of a checkpoint file is run; damaged and hostile files are refused")
@pytest.mark.slow
def test_sources_of_other_formats_that_are_bombs_do_no_harm(place: Path) -> None:
    names = {}
    for case, make in hostile_sources.MADE.items():
        make(place / f"source-{case}")
        names[f"source-{case}"] = case
    check(place, names)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(4))
def test_damaged_sources_of_other_formats_do_no_harm(place: Path, chunk: int) -> None:
    names = {}
    for kind, make in hostile_sources.GOOD.items():
        make(place / f"good-{kind}")
        for seed in range(50 * chunk, 50 * chunk + 50):
            name = f"source-{kind}-{seed}"
            hostile_sources.write_damaged(place / name, place / f"good-{kind}", random.Random(seed))
            names[name] = kind
    check(place, names)
