"""The table of pairs: a framework, a number of ranks and what happens, and how a training goes on in three ways.

    python -m tests.checkpoint.pairs.run                      all that this Python can run; the outcomes are stored
    python -m tests.checkpoint.pairs.run --only DDP SIGKILL   cells whose name has all of these words: printed alone,
                                                              and stored with --store
    python -m tests.checkpoint.pairs.run --document           the tables of docs/checkpoint-pairs.md from what is stored

Each cell is a training of real processes, to which something happens at one exact step, and a second one, which says
where it goes on and whether each bit is as it was saved. It is told from memory at once; from disk, when the checkpoint
writers have ended and the memory is gone; and with another number of ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from hetstream.base.text import count_words
from hetstream.checkpoint.memory.store_files import FALLBACK
from tests.checkpoint.mounted import fill, mounted_memory
from tests.checkpoint.pairs import writer
from tests.checkpoint.pairs.programs import FRAMEWORKS, python_of, start, warm_up
from tests.checkpoint.pairs.trainer import EVENTS, Job, forget_memory

HERE = Path(__file__).parent
OUTCOMES = HERE / "outcomes.json"
DOCUMENT = HERE.parents[2] / "docs" / "checkpoint-pairs.md"
SIZES = (1, 2)
WAYS = ("memory", "disk", "other ranks")
TIMEOUT_S = 120.0
_NUM_AT_ONCE = 3
GROUPS = [(framework, size) for framework in FRAMEWORKS for size in SIZES]
_HEAD = ("| what happens at a step | at once | from disk | with the other number of ranks |", "|---|---|---|---|")
_BEGIN, _END = "<!-- tables: python -m tests.checkpoint.pairs.run --document -->", "<!-- end of tables -->"


class Cell(NamedTuple):
    """One pair.

    Attributes:
        framework: of the program.
        size: number of ranks.
        event: what happens.
        way: how the next training restores.
    """

    framework: str
    size: int
    event: str
    way: str

    @property
    def name(self) -> str:
        """As it is stored."""
        return f"{self.framework}, {_ranks(self.size)}, {self.event}, {self.way}"


CELLS = [
    Cell(framework, size, event, way)
    for framework, size in GROUPS
    for event in (*EVENTS, *(writer.EVENTS if framework == "DDP" else ()))
    for way in WAYS
]


def outcome_of(cell: Cell, place: Path) -> str:
    """Run one cell.

    Args:
        cell: which.
        place: an empty directory of its own.
    """
    memory = place / "memory"
    if cell.event == "full memory":
        with mounted_memory(memory, "128k"):
            fill(memory)
            outcome = _outcome_in(cell, place, memory)
            assert os.listdir(memory) == ["filler"]
            return outcome
    memory.mkdir(mode=0o700)
    return _outcome_in(cell, place, memory)


def _outcome_in(cell: Cell, place: Path, memory: Path) -> str:
    fault = f"persist.writing:4:full:{place / 'full'}" if cell.event == "full disk" else ""
    _start(place, cell, "first", cell.event, cell.size, fault)
    first = _lines(place / "first.out")
    if not any("ends" in line for line in first):
        return f"the training ends: {_last_words(place, 'first')}"
    if cell.way != "memory":
        _await(place, is_writer=True)
    if cell.way == "disk":
        for held in (memory, place / "ckpt" / FALLBACK):
            forget_memory(held)
    size = cell.size if cell.way != "other ranks" else 3 - cell.size
    codes = _start(place, cell, "second", "", size)
    _await(place, is_writer=True)
    if any(codes):
        return f"refused: {_last_words(place, 'second')}"
    return _told(first, next(line for line in _lines(place / "second.out") if "restored" in line))


def _told(first: Sequence[Mapping[str, Any]], second: Mapping[str, Any]) -> str:
    taken = {line["taken"]: line for line in first if "taken" in line}
    last, step = max(taken), second["restored"]
    if not step:
        return f"begins anew, {last} steps are lost"
    if second["bits"] != taken[step]["bits"]:
        return f"WRONG: step {step} is restored with other bits"
    behind = "the last step" if step == last else f"{count_words(last - step, 'step')} before the last"
    left = ". The launcher dies, and the program is not told" if any("is_left" in line for line in first) else ""
    return f"{behind}, from {second['source']}{left}"


def _start(place: Path, cell: Cell, name: str, event: str, size: int, fault: str = "") -> list[int]:
    """Run all ranks side by side, or their launcher; the exit codes."""
    directory, memory, out, meeting = place / "ckpt", place / "memory", place / f"{name}.out", place / f"{name}.meeting"
    job = Job(cell.framework, event, 0, size, directory, memory, out, meeting)
    children = start(job, place / name, {"HETSTREAM_CKPT_FAULT": fault})
    deadline_s = time.monotonic() + TIMEOUT_S
    codes: dict[int, int] = {}
    while len(codes) < len(children):
        for child in children:
            if child not in codes:
                pid, status = os.waitpid(child, os.WNOHANG)
                if pid:
                    codes[child] = os.waitstatus_to_exitcode(status)
                elif time.monotonic() > deadline_s:
                    os.kill(child, 9)
                    os.waitpid(child, 0)
                    codes[child] = 124
        time.sleep(0.02)
    _await(place, is_writer=False)  # whom a launcher has left behind
    return [codes[child] for child in children]


def _await(place: Path, *, is_writer: bool) -> None:
    """Wait until no process of this place is there: its writers, those that are starting included, or all others."""
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(
        (b"hetstream.checkpoint.persist.writer" in line) == is_writer for line in _command_lines(str(place).encode())
    ):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"processes of {place} have not ended within {TIMEOUT_S:g} s")
        time.sleep(0.02)


def _command_lines(word: bytes) -> Iterator[bytes]:
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            line = one.read_bytes()
            if word in line:
                yield line


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _last_words(place: Path, name: str) -> str:
    """The error of the first rank that says one, without the names of places."""
    for said in sorted(place.glob(f"{name}.*.said")):
        errors = re.findall(r"^[\w.]+(?:Error|Mismatch|Checkpoint|Ranks|Full|InUse): .*", said.read_text(), re.M)
        if errors:
            told = re.sub(rf"{re.escape(str(place))}/?", "", errors[-1]).rpartition("hetstream.checkpoint.errors.")[2]
            return re.sub(r"hetstream-ckpt-[\w.+-]+", "STORE", told)[:300]
    return "without a word"


def run(cells: Sequence[Cell]) -> Iterator[tuple[Cell, str]]:
    """Run some; while one waits, the next one runs."""
    for framework in {cell.framework: True for cell in cells}:
        warm_up(framework)
    with ProcessPoolExecutor(_NUM_AT_ONCE, multiprocessing.get_context("fork")) as pool:
        yield from zip(cells, pool.map(_outcome_of, cells), strict=True)


def _outcome_of(cell: Cell) -> str:
    with tempfile.TemporaryDirectory(prefix="hetstream-pairs-", dir="/dev/shm") as place:
        return outcome_of(cell, Path(place))


def stored() -> dict[str, str]:
    """What came last time, by name of the cell."""
    return json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}


def tables(outcomes: Mapping[str, str]) -> str:
    """The part of the document that follows from the outcomes."""
    counted = Counter(outcomes[cell.name] for cell in CELLS)
    text = ["| outcome | cells |", "|---|---|"]
    text += [f"| {outcome} | {num_cells} |" for outcome, num_cells in counted.most_common()]
    text += [f"| all | {len(CELLS)} |", ""]
    alike: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for framework, size in GROUPS:
        rows = tuple(_rows(outcomes, framework, size, EVENTS))
        alike.setdefault(rows, {}).setdefault(framework, []).append(size)
    for rows, frameworks in alike.items():
        whose = ", ".join(f"{framework} ({_ranks(*sizes)})" for framework, sizes in frameworks.items())
        text += [f"### {whose}", "", *_HEAD, *rows, ""]
    text += ["### While the writer starts, ends, or is not there", ""]
    sizes: dict[tuple[str, ...], list[int]] = {}
    for size in SIZES:
        sizes.setdefault(tuple(_rows(outcomes, "DDP", size, writer.EVENTS)), []).append(size)
    for rows, alike_sizes in sizes.items():
        text += [f"DDP, {_ranks(*alike_sizes)}:", "", *_HEAD, *rows, ""]
    return "\n".join(text)


def _rows(outcomes: Mapping[str, str], framework: str, size: int, events: Iterable[str]) -> Iterator[str]:
    alike: dict[str, list[str]] = {}
    for event in events:
        row = [outcomes[Cell(framework, size, event, way).name] for way in WAYS]
        alike.setdefault(" | ".join(row), []).append(event)
    for row_text, whose in alike.items():
        yield f"| {'; '.join(whose)} | {row_text} |"


def _ranks(*sizes: int) -> str:
    return f"{' and '.join(map(str, sizes))} rank{'s' * (sizes[-1] > 1)}"


def document_with(outcomes: Mapping[str, str]) -> str:
    """The document as it should be."""
    head, rest = DOCUMENT.read_text().split(_BEGIN)
    return f"{head}{_BEGIN}\n\n{tables(outcomes)}\n{_END}{rest.split(_END)[1]}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cells whose name has all of these")
    parser.add_argument("--cells", nargs="+", metavar="NAME", help="these")
    parser.add_argument("--store", action="store_true", help="those, too")
    parser.add_argument("--document", action="store_true", help="write it from what is stored, and run nothing")
    options = parser.parse_args()
    if options.document:
        DOCUMENT.write_text(document_with(stored()))
        return
    cells = [
        cell
        for cell in CELLS
        if all(word in cell.name for word in options.only or ()) and cell.name in (options.cells or (cell.name,))
        if python_of(cell.framework) == sys.executable
    ]
    outcomes = stored()
    for cell, outcome in run(cells):
        print(json.dumps([cell.name, outcome]), flush=True)
        outcomes[cell.name] = outcome
        if options.store or not (options.only or options.cells):
            OUTCOMES.write_text(
                json.dumps({one.name: outcomes[one.name] for one in CELLS if one.name in outcomes}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
