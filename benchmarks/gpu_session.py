"""`make gpu`: the first minutes on a machine with a GPU, by one command, which ends by itself within nine minutes.

Stages, most evidence first, each a program of its own with a limit: one that fails or hangs costs only itself. Each
writes `NAME.json` at once, and a second call goes on with what is missing. Nothing has to be installed but torch:
`make gpu-wheels` fetches what else is needed beforehand (`gpu_wheels.py`). Only Python's own library is used here.
Without a GPU it is a dry run: stages start and say that there is none. docs/gpu-session.md explains the stages.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_wheels import ROOT, unpacked
from benchmarks.processes import all_processes, state_of

# A machine is lent for so long at a time that a command of 600 s is cut off: this leaves it a minute.
BUDGET_S = 525.0
# Of a stage's limit, what a program that is told its time has to end by itself and to write its report.
_TO_END_S = 12.0
# A program that is killed within a call to the driver may not end at all. It is waited for so long, twice at most.
_ENDS_S = 2.0
OK, LOST, FAILED, LATE, SKIPPED, DRY = "ok", "LOST", "FAILED", "LATE", "SKIPPED", "dry run"
_DONE = (OK, LOST)
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# A test that hangs costs only itself, as far as Python can end it, and each is named as soon as it has ended.
_PYTEST = ("-m", "pytest", "-v", "-p", "no:cacheprovider", "-W", "default", "-o", "timeout=40", "-m", "gpu")
_EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


@dataclass(frozen=True)
class Stage:
    """One program and its limit.

    Attributes:
        name: of the stage and its files.
        argv: for Python; `{out}` is the stage's folder, `{seconds}` the time that it has.
        limit_s: after which it is ended, with all that it started.
        least_s: with less time than this it is not begun.
        asks: what it answers.
        like: without a GPU it is left out: what there is to see then, that stage shows.
        environ: variables of its environment.
    """

    name: str
    argv: tuple[str, ...]
    limit_s: float
    least_s: float
    asks: str
    like: str = ""
    environ: Mapping[str, str] = field(default_factory=dict)


def _tests(*paths: str) -> tuple[str, ...]:
    return (*_PYTEST, "--junitxml={out}/tests.xml", *paths)


def _sharing(words: str, *more: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.gpu_sharing", "--systems", words, "--out", "{out}", "--seconds", "{seconds}", *more)


def _rap(plan: int, *more: str) -> tuple[str, ...]:
    return ("-m", "benchmarks.rap", "--plans", str(plan), "--out", "{out}", "--seconds", "{seconds}", *more)


_CUDA_TESTS = _tests("tests/hetjob/gpu/test_cuda.py")
STAGES = (
    Stage("imports", ("benchmarks/clients/gpu_imports.py",), 60, 10, "Is all there that the others need?"),
    Stage("probe", ("benchmarks/clients/gpu_probe.py",), 70, 20, "What can the GPU, its driver and PyTorch do?"),
    Stage("memory", _CUDA_TESTS, 60, 20, "Limits, the host's pool, marks and captures of an agent"),
    Stage(
        "kernel",
        _tests("tests/mpi_dataworkers/gpu_features/test_on_a_gpu.py"),
        100,
        30,
        "Is the fused kernel right, also beside training and captured?",
        "memory",
    ),
    Stage(
        "checkpoints",
        _tests("tests/checkpoint/test_gpu.py", "tests/mpi_dataworkers/test_device.py"),
        50,
        20,
        "Are saves from the GPU's memory, and batches that go there, whole?",
        "memory",
    ),
    Stage(
        "RAP quick",
        _rap(0, "--quick", "--systems", "sequential,low-priority,hetstream"),
        70,
        40,
        "Preprocessing beside training, ten steps of plan 0",
    ),
    Stage("real jobs", _sharing("real jobs"), 100, 60, "AntMan's table 2: what B and A lose"),
    Stage("release", _sharing("release"), 70, 30, "How soon a job gives memory back, and takes it again", "real jobs"),
    Stage("killed", _sharing("killed"), 45, 30, "What jobs do when their coordinator dies", "real jobs"),
    Stage("allocator", _sharing("allocator"), 30, 15, "Does the model serve requests as PyTorch does?", "real jobs"),
    Stage("expandable", _CUDA_TESTS, 40, 15, "The same as `memory`, with segments that grow", "memory", _EXPANDABLE),
    Stage(
        "interference", _sharing("interference"), 130, 60, "What opportunistic jobs cost guaranteed ones", "real jobs"
    ),
    Stage("RAP plan 2", _rap(2, "--repeats", "1"), 120, 60, "All systems beside each other", "RAP quick"),
    Stage(
        "feed",
        ("-m", "benchmarks.gpu_feed", "--out", "{out}", "--seconds", "{seconds}"),
        90,
        50,
        "A ResNet-50 fed with photographs: images a second, and how long the GPU is idle",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Line:
    """A line of the table.

    Attributes:
        what: was measured; "" for the stage as a whole.
        verdict: of it.
        figure, goal: with their units; "" where there are none.
    """

    what: str
    verdict: str
    figure: str = ""
    goal: str = ""


@dataclass(frozen=True)
class Result:
    """What a stage came to; its JSON file.

    Attributes:
        stage: its name.
        verdict: one of those above.
        why: it failed or was left out.
        seconds: that it took.
        gpu: the card and its driver; "" for a dry run.
        at: when it ended, in UTC.
        lines: of the table.
        found: what its program has written or printed, as JSON.
        said: the end of what it printed.
    """

    stage: str
    verdict: str
    why: str = ""
    seconds: float = 0.0
    gpu: str = ""
    at: str = ""
    lines: tuple[Line, ...] = ()
    found: Any = None
    said: str = ""

    @classmethod
    def read(cls, path: Path) -> Result | None:
        """From its file; None where there is none that is whole."""
        try:
            found = json.loads(path.read_text())
            return cls(**{**found, "lines": tuple(Line(**line) for line in found["lines"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None


def main() -> int:
    """Run the stages that are asked for, or missing."""
    own = argparse.ArgumentParser(description="First contact with a GPU: everything that has to be known, in order.")
    own.add_argument("--stages", default="", metavar="A,B", help="only these, also if they have been run")
    own.add_argument("--again", action="store_true", help="all stages, also those that have been run")
    own.add_argument("--out", type=Path, default=ROOT / "build/gpu", help="folder of the results")
    own.add_argument("--bundle", type=Path, help="keep all results as gpu.json and gpu.tar.gz there, too")
    own.add_argument(
        "--budget", type=float, default=BUDGET_S, metavar="S", help="seconds for all (default: %(default)s)"
    )
    own.add_argument("--list", action="store_true", help="name the stages")
    args = own.parse_args()
    if args.list:
        for stage in STAGES:
            print(f"{stage.name:13} {stage.limit_s:4.0f} s  {stage.asks}")
        return 0
    end_s = time.monotonic() + args.budget
    stages = chosen(args.stages)
    args.out.mkdir(parents=True, exist_ok=True)
    gpu, why_none = card()
    print(f"GPU: {gpu or f'none, so this is a dry run: {why_none}'}", flush=True)
    session = Session(args.out, gpu, _environment(args.out))
    kept = {} if args.again or args.stages else session.kept(stages)
    results = []
    with _descendants_end_here():
        for stage in stages:
            result = kept.get(stage.name) or session.run(stage, end_s - time.monotonic())
            results.append(result)
            if args.bundle:
                bundle(args.out, args.bundle)
    print(table(results, kept), flush=True)
    return 1 if any(result.verdict in (FAILED, LATE) for result in results) else 0


def chosen(words: str) -> list[Stage]:
    """The stages of these names, in their order; all for "".

    Raises:
        SystemExit: there is no such stage.
    """
    names = [word.strip() for word in words.split(",") if word.strip()]
    known = [stage.name for stage in STAGES]
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--stages: there is no {', '.join(unknown)}; there are {', '.join(known)}")
    return [stage for stage in STAGES if not names or stage.name in names]


def card() -> tuple[str, str]:
    """The first GPU with its driver, by nvidia-smi, or why there is none."""
    argv = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", str(error)
    lines = done.stdout.strip().splitlines()
    return (
        (lines[0].strip(), "") if done.returncode == 0 and lines else ("", (done.stderr or done.stdout).strip()[:200])
    )


def allowed_s(stage: Stage, left_s: float) -> float:
    """How long a stage may take of what is left; 0: too little is left to begin it."""
    return 0.0 if left_s < stage.least_s else min(stage.limit_s, left_s)


def filled(stage: Stage, out: Path, seconds: float) -> list[str]:
    """The words of a stage's program."""
    return [word.replace("{out}", str(out)).replace("{seconds}", f"{seconds:.0f}") for word in stage.argv]


class Session:
    """Runs stages, and keeps what they come to.

    Args:
        out: folder of the results.
        gpu: the card; "" for a dry run.
        environ: of the programs.
    """

    def __init__(self, out: Path, gpu: str, environ: Mapping[str, str]) -> None:
        self._out, self._gpu, self._environ = out, gpu, environ

    def kept(self, stages: Sequence[Stage]) -> dict[str, Result]:
        """What has been found on this card before, and needs not be run again."""
        found = {stage.name: Result.read(self._path(stage)) for stage in stages}
        return {
            name: result
            for name, result in found.items()
            if result is not None and result.verdict in _DONE and result.gpu == self._gpu != ""
        }

    def run(self, stage: Stage, left_s: float) -> Result:
        """Run a stage, and write what it came to."""
        began_s = time.monotonic()
        limit_s = allowed_s(stage, left_s)
        print(f"{stage.name}: {stage.asks} (at most {limit_s:.0f} s)", flush=True)
        if not self._gpu and stage.like:
            result = Result(stage.name, SKIPPED, f"no GPU; what starts it is what starts {stage.like}")
        elif not limit_s:
            result = Result(stage.name, SKIPPED, f"{left_s:.0f} s are left, and it needs {stage.least_s:.0f}")
        else:
            result = self._ran(stage, limit_s)
        ended = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime())
        result = replace(result, seconds=round(time.monotonic() - began_s, 1), gpu=self._gpu, at=ended)
        fresh = self._path(stage).with_suffix(".new")
        fresh.write_text(json.dumps(asdict(result), indent=1) + "\n")
        fresh.replace(self._path(stage))
        print(f"  {result.verdict} after {result.seconds:.0f} s{f': {result.why}' if result.why else ''}", flush=True)
        return result

    def _path(self, stage: Stage) -> Path:
        return self._out / f"{_file_name(stage)}.json"

    def _ran(self, stage: Stage, limit_s: float) -> Result:
        folder = self._out / _file_name(stage)
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            if old.is_file():
                old.unlink()
        argv = [sys.executable, *filled(stage, folder, max(1.0, limit_s - _TO_END_S))]
        log = self._out / f"{_file_name(stage)}.log"
        with log.open("w") as said:
            said.write(f"$ {' '.join(argv)}\n")
            said.flush()
            environ = {**self._environ, **stage.environ}
            code = _run(argv, environ, said.fileno(), limit_s)
        text = log.read_text(errors="replace")
        return judged(stage, code, folder, text, limit_s, is_dry=not self._gpu)


def judged(stage: Stage, code: int | None, folder: Path, text: str, limit_s: float, *, is_dry: bool) -> Result:
    """What a program came to, by its code (None: it was ended), its files and what it printed."""
    said = text[-6000:]
    words = text.strip().splitlines()[-1] if text.strip() else "it printed nothing"
    if (tests := folder / "tests.xml").exists():
        lines, found = _of_tests(_in_report(tests))
    elif shown := re.findall(r"^\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED)", text, re.MULTILINE):
        how = {"PASSED": "passed", "FAILED": "failure: ", "ERROR": "error: ", "SKIPPED": "skipped: "}
        lines, found = _of_tests({name: how[word] for name, word in shown})
    elif reports := sorted(folder.glob("*.json")):
        lines, found = _of_rows(reports, text)
    else:
        lines, found = _of_printed(text)
    why = ""
    if code is None:
        verdict, why = LATE, f"ended after {limit_s:.0f} s: {words[:200]}"
    elif code:
        verdict, why = FAILED, next((line.what for line in lines if line.what and line.verdict == FAILED), words)[:300]
    elif is_dry:
        verdict = DRY
    elif lines and lines[0].verdict == FAILED:  # there is a card, and torch does not see it, or a package is missing
        verdict, why = FAILED, f"nothing was shown: {next(_reasons(found), words)}"[:300]
    else:
        verdict = LOST if any(line.verdict == LOST for line in lines) else OK
    return Result(stage.name, verdict, why, lines=lines, found=found, said=said)


def _reasons(found: Any) -> Iterator[str]:
    """Why tests, rows or facts are not there."""
    if isinstance(found, dict):
        yield from (how for how in found.values() if isinstance(how, str) and how != "passed")
    for document in found if isinstance(found, list) else ():
        yield from (row["note"] for row in document["rows"] if row.get("note"))


def _in_report(path: Path) -> dict[str, str]:
    """The tests of a report of pytest's, and how they ended."""
    try:
        cases = list(ElementTree.parse(path).getroot().iter("testcase"))
    except ElementTree.ParseError:
        return {}
    found: dict[str, str] = {}
    for case in cases:
        child = next((each for each in case if each.tag in ("failure", "error", "skipped")), None)
        message = (child.get("message") or "").partition("\n")[0] if child is not None else ""
        found[case.get("name", "")] = "passed" if child is None else f"{child.tag}: {message}"
    return found


def _of_tests(found: dict[str, str]) -> tuple[tuple[Line, ...], Any]:
    """Tests by their names."""
    failed = [name for name, how in found.items() if how.startswith(("failure", "error"))]
    passed = sum(how == "passed" for how in found.values())
    skipped = len(found) - passed - len(failed)
    figure = f"{passed} of {len(found)} tests pass" + (f", {skipped} skipped" if skipped else "")
    lines = [Line("", OK if passed and not failed else FAILED, figure, "all")]
    return (*lines, *(Line(f"{name}: {found[name]}"[:200], FAILED) for name in failed)), found


def _of_rows(reports: Sequence[Path], text: str) -> tuple[tuple[Line, ...], Any]:
    """The goals of a benchmark's report, and what it says has failed."""
    found, lines = [], []
    for path in reports:
        try:
            document = json.loads(path.read_text())
            rows = document["rows"]
        except (ValueError, KeyError, TypeError):  # no report, such as an allocator's history
            continue
        found.append(document)
        for row in rows:
            if row["target"] is None:
                continue
            value = "none" if row["value"] is None else f"{row['value']:.4g} {row['unit']}"
            verdict = {True: OK, False: LOST, None: "no value"}[row["met"]]
            lines.append(Line(f"{row['case']}: {row['system']}", verdict, value, row["target"]))
        with_value = sum(row["value"] is not None for row in rows)
        lines.append(Line("", OK if with_value else FAILED, f"{with_value} of {len(rows)} rows have a value"))
    lines += [Line(line[:300], FAILED) for line in text.splitlines() if line.startswith("FAILED: ")]
    return tuple(sorted(lines, key=lambda line: line.what != "")), found


def _of_printed(text: str) -> tuple[tuple[Line, ...], Any]:
    """JSON objects that a program has printed, one a line, in one."""
    found: dict[str, Any] = {}
    for line in text.splitlines():
        if line.startswith("{"):
            with contextlib.suppress(ValueError):
                found |= json.loads(line)
    known = sum(not isinstance(fact, str) for fact in found.values())
    figure = found.get("summary", f"{known} of {len(found)} facts are known")
    return (Line("", OK if known else FAILED, figure),) if found else (), found


def _run(argv: Sequence[str], environ: Mapping[str, str], out: int, limit_s: float) -> int | None:
    """Run a program to its end, and end whatever it leaves. Its code; None: it was ended, too."""
    before = _children()
    process = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=out,
        stderr=out,
        start_new_session=True,
        preexec_fn=_ends_with_this,
    )
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_ENDS_S)
        _end_descendants(before)


def _children() -> set[int]:
    return {pid for pid in all_processes() if state_of(pid)[1:2] == [str(os.getpid())]}


def _end_descendants(before: set[int]) -> None:
    """End what a stage has started in process groups of its own: orphans become this process's children."""
    end_s = time.monotonic() + _ENDS_S
    while (left := _children() - before) and time.monotonic() < end_s:
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.01)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _ends_with_this() -> None:
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@contextlib.contextmanager
def _descendants_end_here() -> Iterator[None]:
    """Have orphans become children of this process, and end with it: else one would keep the GPU."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
        _prctl(_PR_SET_CHILD_SUBREAPER, 0)


def _environment(out: Path) -> dict[str, str]:
    """With this checkout, and the packages that this Python has not."""
    place, names = unpacked(out / "packages")
    if names:
        print(f"Python {platform.python_version()} has no {', '.join(names)}: unpacked", flush=True)
    paths = [str(ROOT), place, os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}


def bundle(out: Path, into: Path) -> None:
    """All results in two files: a machine may give back only a few."""
    into.mkdir(parents=True, exist_ok=True)
    found = [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]
    (into / "gpu.json").write_text(json.dumps(found, indent=1) + "\n")
    with tarfile.open(into / "gpu.tar.gz", "w:gz") as packed:
        for path in sorted(out.rglob("*")):
            if path.is_file() and path.relative_to(out).parts[0] != "packages":
                packed.add(path, str(path.relative_to(out)))


def table(results: Sequence[Result], kept: Mapping[str, Result]) -> str:
    """All that was found: a line for each stage, and one for each goal of it."""
    rows = [("stage", "verdict", "figure", "goal", "seconds")]
    for result in results:
        first = result.lines[0] if result.lines and not result.lines[0].what else Line("", result.verdict)
        seconds = f"{result.seconds:.0f}" + (" before" if result.stage in kept else "")
        why = result.why if result.verdict not in (*_DONE, DRY) else ""
        rows.append((result.stage, result.verdict, why or first.figure, first.goal, seconds))
        rows += [(f"  {line.what}", line.verdict, line.figure, line.goal, "") for line in result.lines if line.what]
    widths = [min(78, max(len(row[column]) for row in rows)) for column in range(4)]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, (*widths, 0), strict=True)).rstrip() for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _file_name(stage: Stage) -> str:
    number = [each.name for each in STAGES].index(stage.name) + 1 if stage in STAGES else 0
    return f"{number:02}-{stage.name.replace(' ', '-').lower()}"


if __name__ == "__main__":
    sys.exit(main())
