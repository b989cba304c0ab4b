"""The table of pairs: a framework, a number of ranks and what happens, and how a training goes on in three ways.

    python -m tests.checkpoint.pairs.run                      all of it; the outcomes are stored
    python -m tests.checkpoint.pairs.run --only DDP SIGKILL   cells whose name has all of these words: printed alone
    python -m tests.checkpoint.pairs.run --document           the tables of docs/checkpoint-pairs.md from what is stored

Each cell is a training of real processes, to which something happens at one exact step, and a second one, which says
where it goes on and whether each bit is as it was saved. It is told from memory at once; from disk, when the savers
have ended and the memory is gone; and with another number of ranks.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from checkpoint import faults
from checkpoint.view import find_stores
from tests.checkpoint.pairs.trainer import EVENTS, FRAMEWORKS, Job, forget_memory, train

HERE = Path(__file__).parent
OUTCOMES = HERE / "outcomes.json"
DOCUMENT = HERE.parents[2] / "docs" / "checkpoint-pairs.md"
SIZES = (1, 2)
WAYS = ("memory", "disk", "other ranks")
TIMEOUT_S = 120.0
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
        return f"{self.framework}, {self.size} rank{'s' * (self.size > 1)}, {self.event}, {self.way}"


CELLS = [
    Cell(framework, size, event, way) for framework in FRAMEWORKS for size in SIZES for event in EVENTS for way in WAYS
]


def outcome_of(cell: Cell, place: Path) -> str:
    """Run one cell.

    Args:
        cell: which.
        place: an empty directory of its own.
    """
    memory = place / "memory"
    memory.mkdir(mode=0o700)
    fault = ""
    if cell.event == "full disk":
        fault = f"persist.writing:4:full:{place / 'full'}"
    codes = _start(place, cell, "first", cell.event, cell.size, fault)
    if any(code not in (0, -9) for code in codes):
        return f"the training ends: {_last_words(place, 'first')}"
    if cell.way != "memory":
        _await_savers(memory)
    if cell.way == "disk":
        forget_memory(memory)
    size = cell.size if cell.way != "other ranks" else 3 - cell.size
    codes = _start(place, cell, "second", "", size)
    _await_savers(memory)
    if any(codes):
        return f"refused: {_last_words(place, 'second')}"
    return _told(_lines(place / "first.out"), _lines(place / "second.out")[-1])


def _told(first: Sequence[Mapping[str, Any]], second: Mapping[str, Any]) -> str:
    taken = {line["taken"]: line for line in first if "taken" in line}
    last, step = max(taken), second["restored"]
    if not step:
        return f"begins anew, {last} steps are lost"
    if second["bits"] != taken[step]["bits"]:
        return f"WRONG: step {step} is restored with other bits"
    behind = "the last step" if step == last else f"{last - step} step(s) before the last"
    return f"{behind}, from {second['source']}"


def _start(place: Path, cell: Cell, name: str, event: str, size: int, fault: str = "") -> list[int]:
    """Run all ranks side by side; their exit codes."""
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            job = Job(
                cell.framework,
                event,
                rank,
                size,
                place / "ckpt",
                place / "memory",
                place / f"{name}.out",
                place / f"{name}.meeting",
            )
            _be(job, place / f"{name}.{rank}.said", fault)
        children.append(child)
    deadline_s = time.monotonic() + TIMEOUT_S
    codes: dict[int, int] = {}
    while len(codes) < size:
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
    return [codes[child] for child in children]


def _be(job: Job, said: Path, fault: str) -> None:
    """In the child: be the rank."""
    code = 1
    try:
        descriptor = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.environ["HETSTREAM_CKPT_FAULT"] = fault  # for its saver
        faults._faults.clear()
        train(job)
        code = 0
    except BaseException:  # noqa: BLE001, the end of a process
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def _await_savers(memory: Path) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while any(one.saver_alive for one in find_stores([memory])):
        if time.monotonic() > deadline_s:
            raise TimeoutError(f"savers of {memory} have not ended within {TIMEOUT_S:g} s")
        time.sleep(0.02)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _last_words(place: Path, name: str) -> str:
    """The error of the first rank that says one, without the names of places."""
    for said in sorted(place.glob(f"{name}.*.said")):
        errors = re.findall(r"^[\w.]+(?:Error|Mismatch|Checkpoint|Ranks|Full|InUse): .*", said.read_text(), re.M)
        if errors:
            told = re.sub(rf"{re.escape(str(place))}/?", "", errors[-1]).rpartition("checkpoint.errors.")[2]
            return re.sub(r"hetstream-ckpt-[\w.+-]+", "STORE", told)[:300]
    return "without a word"


def run(cells: Sequence[Cell]) -> Iterator[tuple[Cell, str]]:
    """Run some, one after the other."""
    for cell in cells:
        with tempfile.TemporaryDirectory(prefix="hetstream-pairs-", dir="/dev/shm") as place:
            yield cell, outcome_of(cell, Path(place))


def stored() -> dict[str, str]:
    """What came last time, by name of the cell."""
    return json.loads(OUTCOMES.read_text()) if OUTCOMES.exists() else {}


def tables(outcomes: Mapping[str, str]) -> str:
    """The part of the document that follows from the outcomes."""
    text = []
    for framework in FRAMEWORKS:
        for size in SIZES:
            text += [
                f"### {framework}, {size} rank{'s' * (size > 1)}",
                "",
                f"| what happens at a step | at once | from disk | with {3 - size} rank{'s' * (size == 1)} |",
                "|---|---|---|---|",
            ]
            for event in EVENTS:
                row = [outcomes[Cell(framework, size, event, way).name] for way in WAYS]
                text.append(f"| {event} | {' | '.join(row)} |")
            text.append("")
    return "\n".join(text)


def document_with(outcomes: Mapping[str, str]) -> str:
    """The document as it should be."""
    head, rest = DOCUMENT.read_text().split(_BEGIN)
    return f"{head}{_BEGIN}\n\n{tables(outcomes)}\n{_END}{rest.split(_END)[1]}"


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="WORD", help="cells whose name has all of these")
    parser.add_argument("--document", action="store_true")
    options = parser.parse_args()
    if options.document:
        DOCUMENT.write_text(document_with(stored()))
        return
    cells = [cell for cell in CELLS if all(word in cell.name for word in options.only or ())]
    outcomes = stored()
    for cell, outcome in run(cells):
        print(json.dumps([cell.name, outcome]), flush=True)
        outcomes[cell.name] = outcome
        if not options.only:
            OUTCOMES.write_text(
                json.dumps({one.name: outcomes[one.name] for one in CELLS if one.name in outcomes}, indent=1) + "\n"
            )


if __name__ == "__main__":
    main()
