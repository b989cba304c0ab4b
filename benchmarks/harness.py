"""Run systems in turn, reduce the repeats to rows, print them as a table and write them as JSON.

Called by every benchmark in this folder. One system is one client program (`benchmarks/clients/`) that runs in its own
process group, measures one or more cases and prints one JSON object a case. The harness never measures a time itself
and knows no target in seconds: a target is a ratio between two systems of the same repeat, or a count or rate that an
issue names (`Goal`).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.running import ROOT, ClientFailed, Sample, run_client

# A window in which others used more of the pinned cores than this is measured again, so many times in all.
QUIET_LOAD = 0.05
MAX_TRIES = 2


@dataclass(frozen=True)
class System:
    """One system under test, a peer or a limit.

    Attributes:
        name: what the table calls it.
        argv: the client program; the harness appends the request as one JSON argument.
        missing: why it cannot run here; such a system becomes rows without a value.
        cases: the cases it takes part in, or None for all.
    """

    name: str
    argv: tuple[str, ...] = ()
    missing: str = ""
    cases: tuple[str, ...] | None = None

    def takes(self, case: str) -> bool:
        """Say whether this system has a row for the case."""
        return self.cases is None or case in self.cases


@dataclass(frozen=True)
class Metric:
    """A column of the clients' samples that becomes rows: its key, its unit and the cases it is shown for."""

    key: str
    unit: str
    cases: tuple[str, ...]


@dataclass(frozen=True)
class Target:
    """A goal for `system` as a multiple of `against`, for one metric of one case, repeat by repeat.

    With `at_least` the ratio must reach it; with `at_most` it must not exceed it; with neither it is only shown.
    """

    case: str
    system: str
    against: str
    metric: str
    at_least: float | None = None
    at_most: float | None = None

    def __post_init__(self) -> None:
        if self.at_least is not None and self.at_most is not None:
            raise ValueError(f"target {self.system} / {self.against}: give at_least or at_most, one of them")

    @property
    def goal(self) -> str | None:
        """The goal as text."""
        if self.at_least is not None:
            return f">= {self.at_least:g}"
        return None if self.at_most is None else f"<= {self.at_most:g}"

    def met_by(self, ratio: float) -> bool | None:
        """Compare a median ratio with the goal, if there is one."""
        if self.at_least is not None:
            return ratio >= self.at_least
        return None if self.at_most is None else ratio <= self.at_most


@dataclass(frozen=True)
class Goal:
    """A number for one row of one system, which holds on every machine: a count that must be 0, a rate by contract.

    With `at_least` the median must reach it; with `at_most` no repeat may exceed it. Exactly one of them is given.
    """

    case: str
    system: str
    unit: str
    at_least: float | None = None
    at_most: float | None = None

    def judge(self, row: Row) -> Row:
        """The row with this goal, if it is the one that is meant."""
        if (row.case, row.system, row.unit) != (self.case, self.system, self.unit) or row.value is None:
            return row
        if self.at_least is not None:
            return replace(row, target=f">= {self.at_least:,g}", met=row.value >= self.at_least)
        most = self.at_most or 0.0
        return replace(row, target=f"<= {most:,g}", met=max(row.samples) <= most)


@dataclass(frozen=True)
class Row:
    """One line of the table and one entry of `rows` in the JSON file.

    Attributes:
        case: what was moved or computed.
        system: who did it; `A / B` for a ratio.
        value: the median over the repeats, or None when there is none (`note` says why).
        unit: of value and spread; `x` for a ratio.
        spread: the smallest and the largest repeat.
        target: the goal as text.
        met: whether the median reaches the goal; None without a goal.
        note: why a value is missing, or what else a reader must know.
        samples: every repeat, in order.
    """

    case: str
    system: str
    value: float | None
    unit: str
    spread: tuple[float, float] | None = None
    target: str | None = None
    met: bool | None = None
    note: str = ""
    samples: tuple[float, ...] = ()


def row_of(
    case: str, system: str, values: Sequence[float], unit: str, *,
    at_least: float | None = None, at_most: float | None = None,
) -> Row:  # fmt: skip
    """A row of values that were not collected from clients; with a goal, each of them must reach it."""
    if not values:
        return Row(case, system, None, unit, note="never happened")
    spread = (min(values), max(values))
    target, met = None, None
    if at_least is not None:
        target, met = f">= {at_least:g}", spread[0] >= at_least
    elif at_most is not None:
        target, met = f"<= {at_most:g}", spread[1] <= at_most
    return Row(case, system, statistics.median(values), unit, spread, target, met, samples=tuple(values))


@dataclass
class Results:
    """Samples by (case, system, repeat), and for each system the last failure."""

    samples: dict[tuple[str, str, int], Sample] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)

    def of(self, case: str, system: str, metric: str) -> dict[int, float]:
        """Return repeat -> value for one metric."""
        return {
            repeat: sample[metric]
            for (sample_case, sample_system, repeat), sample in self.samples.items()
            if (sample_case, sample_system) == (case, system) and metric in sample
        }

    def quiet(self, case: str, systems: Sequence[str], repeat: int) -> bool:
        """Say whether none of the systems was measured beside much other load in this repeat."""
        loads = [self.samples[case, system, repeat].get("other_load", 0.0) for system in systems]
        return max(loads) <= QUIET_LOAD


# ---------------------------------------------------------------------------------------------------------- running


def collect(
    systems: Sequence[System],
    cases: Mapping[str, Mapping[str, Any]],
    request: Mapping[str, Any],
    repeats: int,
    deadline_s: float,
    describe: Callable[[str, Sample], str],
) -> Results:
    """Run every system once a repeat, one at a time, so that drift of the machine hits all alike.

    Odd repeats run in reverse order: no system always comes after the same neighbour. A system that failed is not run
    again. Progress goes to stderr, one line a run, with `describe(case, sample)` for each case.
    """
    results = Results()
    runnable = [system for system in systems if not system.missing]
    for system in systems:
        if system.missing:
            say(f"  {system.name}: not run: {system.missing}")
    number, total = 0, len(runnable) * repeats
    for repeat in range(repeats):
        for system in runnable if repeat % 2 == 0 else list(reversed(runnable)):
            number += 1
            mine = {case: options for case, options in cases.items() if system.takes(case)}
            if system.name in results.failures or not mine:
                continue
            try:
                measured = quietest(system, {**request, "cases": mine}, deadline_s)
            except ClientFailed as error:
                results.failures[system.name] = str(error)
                say(f"  [{number}/{total}] {system.name}: FAILED: {error}")
                continue
            for case, sample in measured.items():
                results.samples[case, system.name, repeat] = sample
            summary = ", ".join(f"{case} {describe(case, sample)}" for case, sample in measured.items())
            beside = max((sample.get("other_load", 0.0) for sample in measured.values()), default=0.0)
            loud = f" (other processes used {beside:.0%} of the cores)" if beside > QUIET_LOAD else ""
            say(f"  [{number}/{total}] {system.name}: {summary}{loud}")
    return results


def by_system(results: Results) -> None:
    """Give each system its own samples where a client measures several in turns, which is what is fair to short times.

    Such a client names the system in the case: `CASE|SYSTEM`; with a comma first, as in `CASE|, idle`, what follows is
    a part of its own name.
    """
    for (case, system, repeat), sample in list(results.samples.items()):
        plain, bar, named = case.partition("|")
        if bar:
            del results.samples[case, system, repeat]
            results.samples[plain, system + named if named.startswith(",") else named, repeat] = sample


def quietest(system: System, request: Mapping[str, Any], deadline_s: float) -> dict[str, Sample]:
    """Run a client, and again while other processes used too much of its cores; for each case take the calmest run.

    How a run is chosen depends on the load beside it alone, never on what was measured.
    """
    calmest: dict[str, Sample] = {}
    for _ in range(MAX_TRIES):
        for case, sample in run_client(system.argv, request, deadline_s).items():
            if case not in calmest or sample.get("other_load", 0.0) < calmest[case].get("other_load", 0.0):
                calmest[case] = sample
        if all(sample.get("other_load", 0.0) <= QUIET_LOAD for sample in calmest.values()):
            break
    return calmest


def disturbance(results: Results) -> str:
    """Say how much other processes used of the pinned cores while the kept samples were taken."""
    loads = [sample["other_load"] for sample in results.samples.values() if "other_load" in sample]
    if not loads:
        return "The load beside the measurements was not recorded."
    share = sum(load > QUIET_LOAD for load in loads) / len(loads)
    text = f"Other processes used {statistics.median(loads):.0%} of the pinned cores in the median window"
    return f"{text}, at most {max(loads):.0%}; more than {QUIET_LOAD:.0%} in {share:.0%} of the windows."


def say(text: str) -> None:
    """Print progress to stderr: stdout carries the table alone."""
    print(text, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------------- reducing


def rows_of(
    results: Results, systems: Sequence[System], metrics: Sequence[Metric], targets: Sequence[Target]
) -> list[Row]:
    """Reduce the samples: for each metric and case one row a system, and after them the ratios with a target.

    A target of a system that was not asked for gives no row; of one that is missing or failed, a row without a value.
    """
    rows: list[Row] = []
    present = {system.name for system in systems}
    for metric in metrics:
        for case in metric.cases:
            rows += [
                _measured(results, system, metric, case)
                for system in systems
                if _applies(results, system, metric, case)
            ]
            rows += [
                _ratio(results, target)
                for target in targets
                if (target.case, target.metric) == (case, metric.key) and {target.system, target.against} <= present
            ]
    return rows


def _applies(results: Results, system: System, metric: Metric, case: str) -> bool:
    """A system that ran without this metric has none (a memory copy has no producer); one that did not run says why."""
    own = [sample for (of_case, name, _), sample in results.samples.items() if (of_case, name) == (case, system.name)]
    return system.takes(case) and (not own or any(metric.key in sample for sample in own))


def _measured(results: Results, system: System, metric: Metric, case: str) -> Row:
    values = tuple(results.of(case, system.name, metric.key).values())
    if not values:
        reason = system.missing or results.failures.get(system.name, "its client printed no sample of this case")
        return Row(case, system.name, None, metric.unit, note=reason)
    note = "failed in a later repeat" if system.name in results.failures else ""
    spread = (min(values), max(values))
    return Row(case, system.name, statistics.median(values), metric.unit, spread, note=note, samples=values)


def _ratio(results: Results, target: Target) -> Row:
    """Pair the repeats: both values of a ratio come from the same minute of the machine.

    Where there are repeats in which neither value was taken beside much other load, only those count.
    """
    own = results.of(target.case, target.system, target.metric)
    other = results.of(target.case, target.against, target.metric)
    name = f"{target.system} / {target.against}"
    pairs = [repeat for repeat in sorted(own.keys() & other.keys()) if other[repeat] > 0]
    quiet = [repeat for repeat in pairs if results.quiet(target.case, (target.system, target.against), repeat)]
    ratios = tuple(own[repeat] / other[repeat] for repeat in quiet or pairs)
    if not ratios:
        absent = target.system if not own else target.against
        note = f"no value of {absent}: not compared"
        return Row(target.case, name, None, "x", target=target.goal, note=note)
    median = statistics.median(ratios)
    spread = (min(ratios), max(ratios))
    note = "" if len(quiet) == len(pairs) else f"{len(quiet)} of {len(pairs)} repeats undisturbed"
    return Row(target.case, name, median, "x", spread, target.goal, target.met_by(median), note, ratios)


# ---------------------------------------------------------------------------------------------------------- reporting


def table(rows: Iterable[Row], titles: tuple[str, str] = ("median", "min .. max")) -> str:
    """Lay the rows out for a terminal; a lost target reads LOST. The titles are those of value and spread."""
    lines = [("case", "system", titles[0], "unit", titles[1], "target", "")]
    for row in rows:
        verdict = {None: "", True: "met", False: "LOST"}[row.met]
        spread = f"{_figure(row.spread[0])} .. {_figure(row.spread[1])}" if row.spread else ""
        value = "-" if row.value is None else _figure(row.value)
        remark = " ".join(filter(None, [verdict, row.note]))
        lines.append((row.case, row.system, value, row.unit, spread, row.target or "", remark))
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    out = []
    for *cells, remark in lines:
        padded = [
            text.rjust(width) if column in (2, 4) else text.ljust(width)
            for column, (text, width) in enumerate(zip(cells, widths, strict=True))
        ]
        out.append("  ".join([*padded, remark]).rstrip())
    out.insert(1, "-" * len(out[0]))
    return "\n".join(out)


def _figure(value: float) -> str:
    """Three significant digits, without an exponent: no run of these benchmarks supports a fourth."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 1 else f"{value:.3f}"


def parser(summary: str, repeats: int) -> argparse.ArgumentParser:
    """Build the command line that all benchmarks share."""
    own = argparse.ArgumentParser(description=summary)
    own.add_argument("--quick", action="store_true", help="one short repeat: shows that it runs, measures nothing")
    own.add_argument("--repeats", type=int, default=repeats, help="how often each system runs (default: %(default)s)")
    own.add_argument("--systems", default="", metavar="A,B", help="only systems whose name contains one of these words")
    own.add_argument("--out", type=Path, default=ROOT / "build" / "bench", help="folder of the report")
    return own


def add_folder(own: argparse.ArgumentParser) -> None:
    """Add `--folder`, for benchmarks of disks."""
    own.add_argument("--folder", help="on the disk that is meant; default: a temporary one in /var/tmp")


@contextlib.contextmanager
def folder_of(args: argparse.Namespace) -> Iterator[str]:
    """The folder that was given, or a temporary one."""
    if args.folder:
        yield args.folder
        return
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        yield folder


def chosen(systems: Sequence[System], words: str) -> list[System]:
    """Apply `--systems`.

    Raises:
        SystemExit: when no system matches, with the names there are.
    """
    wanted = [word.strip().lower() for word in words.split(",") if word.strip()]
    kept = [system for system in systems if not wanted or any(word in system.name.lower() for word in wanted)]
    if not kept:
        raise SystemExit(f"--systems {words}: no such system; there are {', '.join(system.name for system in systems)}")
    return kept


def finish(
    name: str,
    out: Path,
    rows: Sequence[Row],
    failures: Mapping[str, str],
    context: Mapping[str, Any],
    titles: tuple[str, str] = ("median", "min .. max"),
) -> int:
    """Print the report and write it as `NAME.txt`, and with every repeat as `NAME.json`.

    Args:
        name: of the benchmark.
        out: folder of the files.
        rows: the table.
        failures: systems that failed while running, with the reason.
        context: `machine`, `versions` and `notes` of the file; the notes are printed too.
        titles: of the columns with value and spread.

    Returns:
        1 when a system failed; a lost target or a missing peer is a result, not a failure.
    """
    command = shlex.join(["python", "-m", f"benchmarks.{name}", *sys.argv[1:]])
    text = "\n".join([*provenance(command, context), table(rows, titles), *_verdicts(rows, failures, context["notes"])])
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}.json"
    path.write_text(json.dumps({"command": command, **context, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    path.with_suffix(".txt").write_text(text + "\n")
    print(text)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    print(f"wrote {shown} and .txt")
    return 1 if failures else 0


def added(name: str, out: Path, rows: Sequence[Row], notes: Sequence[str]) -> tuple[list[Row], list[str]]:
    """Rows and notes behind those of the report that `out` has, if any: a run in parts makes one report."""
    path = out / f"{name}.json"
    if not path.exists():
        return [*rows], [*notes]
    before = json.loads(path.read_text())
    kept = [note for note in before["notes"] if note not in notes]
    return [*(Row(**row) for row in before["rows"]), *rows], [*notes, *kept, f"Added to: {before['command']}"]


def provenance(command: str, context: Mapping[str, Any]) -> list[str]:
    """What was run when, where and with what: the head of a report."""
    where, used = context["machine"], context["versions"]
    return [
        f"{command}   {time.strftime('%Y-%m-%d')}",
        f"{where['cores']} cores, {where['cpu']}, {where['memory_gib']} GiB, "
        f"load average before {where['load_average_at_start']}",
        ", ".join(f"{name} {number}" for name, number in used.items()),
        "",
    ]


def _verdicts(rows: Sequence[Row], failures: Mapping[str, str], notes: Sequence[str]) -> list[str]:
    lost = [row for row in rows if row.met is False]
    goals = [row for row in rows if row.target is not None]
    not_compared = [row for row in goals if row.met is None]
    met = f"{len(goals) - len(lost) - len(not_compared)} of {len(goals)} targets met"
    return [
        *(f"  {note}" for note in notes),
        met + (f", {len(not_compared)} not compared" if not_compared else ""),
        *(f"FAILED: {system}: {reason}" for system, reason in failures.items()),
        *(
            f"LOST: {row.case}: {row.system} is {_figure(row.value or 0.0)} {row.unit}, target {row.target}"
            + f"; {row.note}" * bool(row.note)
            for row in lost
        ),
    ]
