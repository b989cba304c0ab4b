"""AntMan's table 2 with its jobs, for `benchmarks.gpu_sharing`: a graph network A, and a ResNet-50 B that comes later.

Both programs are ready before A begins, so that B comes at 60 % of A's steps to the moment, and what is timed is
neither imports nor the start of CUDA. Each mode makes the same steps on the same data: losses can be compared.
Nothing of it has run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_laws import extrapolated_s, largest_difference, least_s
from benchmarks.gpu_machines import Machine, OutOfTime, Run, Training, until, wait_for_steps, wait_until_ready
from benchmarks.harness import Row, row_of, say
from hetstream.base.errors import HetstreamError
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.coordinator.gpus import driver, resume, suspend

PLANNED_S = 170.0
# Of A's steps, when B comes: AntMan's B came after 26 of 43 minutes.
_ARRIVAL = 0.6
# How long A and B run alone, and how long UMem's B may run until it is stopped and extrapolated.
_A_S, _B_S, _UMEM_S = 6.0, 9.0, 60.0
_QUICK_S = 1.5
# Steps at the beginning of a job that are not timed: libraries and the host's memory are made ready in them.
_WARM = 2
_LEAST_STEPS = _WARM + 4
_LOSSES_AT_MOST = 1e-3
_SUSPEND = "suspend A"
_MODES = ("Preempt", "Pack", "UMem", "hetstream", _SUSPEND)


@dataclass(frozen=True)
class Jobs:
    """What A and B train.

    Attributes:
        small, large: their requests.
        host_mib: memory of the host that may stand in.
    """

    small: Mapping[str, Any]
    large: Mapping[str, Any]
    host_mib: int


@dataclass(frozen=True)
class Done:
    """One job of one mode.

    Attributes:
        steps: that it made.
        took_s: from the end of its first steps to its end; None: it failed.
        losses: of all steps.
        first_s: how long its first steps took.
        note: why it failed, or what else a reader must know.
    """

    steps: int
    took_s: float | None
    losses: tuple[float, ...] = ()
    first_s: float = 0.0
    note: str = ""


@dataclass(frozen=True)
class Alone:
    """Both jobs, one after the other.

    Attributes:
        a, b: of them.
        size: of B's batches, where it was found; else 0.
        left_part: of the time, that B leaves.
        note: what both are.
    """

    a: Done
    b: Done
    size: int
    left_part: float
    note: str


def jobs_of(node: Machine) -> Jobs:
    """A and B for a machine: AntMan's on a real GPU (3.5 GB, and 90 % of the memory), else those of table 2."""
    if not node.is_real:
        sizes = node.sizes
        small, large = {**sizes.small, "wait_ms": 0}, {**sizes.large, "wait_ms": 40}
        return Jobs(small, large, sizes.host_mib)
    gcn = {"model": "gcn", "nodes": 350_000, "degree": 16, "width": 512, "device": "cuda", "wait_ms": 0}
    resnet = {"model": "resnet50", "device": "cuda", "wait_ms": 60}
    resnet |= {"fill_bytes": node.sizes.capacity_bytes * 9 // 10, "try_sizes": (32, 128)}
    return Jobs(gcn, resnet, 6 * 1024)


def real_jobs(node: Machine, run: Run) -> Iterator[Row]:
    """Table 2 with a graph network and a ResNet-50: Preempt, FIFO, Pack, UMem, hetstream, suspended by the driver."""
    jobs = jobs_of(node)
    scale = run.scale(PLANNED_S, 1.0)
    a_s, b_s, most_s = (_QUICK_S, _QUICK_S, 4 * _QUICK_S) if run.quick else (_A_S, _B_S, _UMEM_S)
    a_s, b_s, most_s = (seconds * scale for seconds in (a_s, b_s, most_s))
    alone = _alone(node, jobs, a_s, b_s)
    say(f"  alone: {alone.note}")
    yield from _fifo(alone)
    seen: dict[str, dict[str, Done]] = {}
    for mode in _MODES:
        try:
            seen[mode] = _beside(node, jobs, alone, mode, most_s)
        except OutOfTime:
            raise
        except Exception as error:  # noqa: BLE001 - whatever a GPU says of one mode, the others go on
            seen[mode] = {name: Done(0, None, note=f"{type(error).__name__}: {error}") for name in "AB"}
        say(f"  {mode}: " + ", ".join(f"{name} {done.took_s} s {done.note}" for name, done in seen[mode].items()))
        against = seen.get("Preempt", {}).get("B")
        yield from _rows(mode, seen[mode], alone, against, is_judged=not run.quick and node.is_real)


def _alone(node: Machine, jobs: Jobs, a_s: float, b_s: float) -> Alone:
    """FIFO: A to its end, then B."""
    go = _Go(node.folder, "alone")
    with (
        node.train(None, {**jobs.small, "seconds": a_s, "least_steps": _LEAST_STEPS, "go": go.a}, 0) as first,
        node.train(None, {**jobs.large, "seconds": b_s, "least_steps": _LEAST_STEPS, "go": go.b}, 0) as second,
    ):
        wait_until_ready(first, second)
        go.let("a")
        a = _done(first)
        go.let("b")
        b = _done(second)
    for name, done in (("A", a), ("B", b)):
        if done.took_s is None:
            raise HetstreamError(f"{name} failed alone: {done.note}")
    busy_s = sum(busy_ns for _, busy_ns in second.steps()[_WARM:]) / 1e9
    size = int(second.said("size") or 0)
    parts = []
    for name, done, job in (("A", a, first), ("B", b, second)):
        peak = job.said("peak")
        parts.append(
            f"{name} {done.steps} steps, {done.took_s:.1f} s" + (f", {int(peak) / 1e9:.1f} GB" if peak else "")
        )
    note = "; ".join(parts) + (f", {size} samples in a batch" if size else "")
    return Alone(a, b, size, max(0.01, 1 - busy_s / (b.took_s or 1)), note)


def _fifo(alone: Alone) -> Iterator[Row]:
    wait_s = (alone.a.took_s or 0) * (1 - _ARRIVAL)
    b_s = alone.b.took_s or 1.0
    yield replace(row_of("real jobs: A", "FIFO / alone", [1.0], "x time"), note=alone.note)
    yield replace(row_of("real jobs: B", "FIFO / alone", [1 + wait_s / b_s], "x time"), note="it waits for A's end")


def _beside(node: Machine, jobs: Jobs, alone: Alone, mode: str, most_s: float) -> dict[str, Done]:
    """Both jobs in one mode."""
    library = driver() if mode == _SUSPEND else None
    go = _Go(node.folder, mode)
    small = {**jobs.small, "steps": alone.a.steps, "go": go.a}
    large = {name: value for name, value in jobs.large.items() if name != "fill_bytes"}
    large |= {"steps": alone.b.steps, **({"size": alone.size} if alone.size else {})}
    # On an emulated GPU whatever B computes, also its model, tells the coordinator that it is there.
    large["go" if node.is_real else "to_gpu"] = go.b
    host_mib = jobs.host_mib if mode in ("UMem", "hetstream") else 0
    is_shared = mode == "hetstream"
    with contextlib.ExitStack() as stack:
        if is_shared:
            stack.enter_context(node.coordinator())
        first = stack.enter_context(node.train(JobClass.OPPORTUNISTIC if is_shared else None, small, host_mib))
        second = stack.enter_context(node.train(JobClass.GUARANTEED if is_shared else None, large, host_mib))
        wait_until_ready(first)
        wait_until_ready(second, word="ready" if node.is_real else "imported")
        go.let("a")
        wait_for_steps(first, max(_WARM + 1, int(alone.a.steps * _ARRIVAL)))
        if mode == "Preempt":
            return _preempted(node, first, second, go, small, stack)
        note = ""
        if library:
            began_s = time.monotonic()
            suspend(first.process.pid, library)
            note = f"suspended in {time.monotonic() - began_s:.2f} s"
        go.let("b")
        b = _done(second, most_s if mode == "UMem" else None)
        if library:
            began_s = time.monotonic()
            resume(first.process.pid, library)
            note += f", resumed in {time.monotonic() - began_s:.2f} s"
        if "stopped" in b.note:
            note = "B was stopped"
        a = _done(first)
    return {"A": replace(a, note=" ".join(filter(None, [a.note, note]))), "B": b}


def _preempted(
    node: Machine, first: Training, second: Training, go: _Go, small: Mapping[str, Any], stack: contextlib.ExitStack
) -> dict[str, Done]:
    """A is ended and, as Slurm requeues it, begins again when B has ended; all its steps are lost."""
    began_ns = first.steps()[_WARM - 1][0]
    first.process.kill()
    first.process.wait()
    again = stack.enter_context(node.train(None, {**small, "to_gpu": go.again}, 0))
    go.let("b")
    b = _done(second)
    go.let("again")
    a = _done(again)
    if a.took_s is not None:
        took_s = (again.steps()[-1][0] - began_ns) / 1e9
        a = replace(a, took_s=took_s, note="begun again after B, with CUDA's start; its steps were lost")
    return {"A": a, "B": b}


def _rows(
    mode: str, seen: Mapping[str, Done], alone: Alone, preempted: Done | None, *, is_judged: bool
) -> Iterator[Row]:
    a, b = seen["A"], seen["B"]
    is_ours = mode == "hetstream"
    goal_b = 1.01 if is_ours and is_judged else None
    against = preempted if is_ours and preempted and preempted.took_s else alone.b
    name = "Preempt" if against is not alone.b else "alone"
    yield _ratio("B", f"{mode} / {name}", b, against, goal_b)
    a_row = _ratio("A", f"{mode} / alone", a, alone.a, 1.03 if is_ours and is_judged else None)
    if is_ours:
        a_s, b_s = alone.a.took_s or 1.0, alone.b.took_s or 1.0
        least = _ARRIVAL + least_s((1 - _ARRIVAL) * a_s, b_s, alone.left_part) / a_s
        a_row = replace(a_row, note=f"at least {least:.2f}: B leaves {alone.left_part:.0%}. {a_row.note}".strip())
        yield Row("real jobs: B", f"hetstream: its first {_WARM} steps", b.first_s, "s", note="not timed in the others")
    yield a_row
    if mode == "Pack":
        is_out = float(b.took_s is None and "memory" in b.note.lower())
        row = row_of("real jobs: B", "Pack runs out of memory", [is_out], "times", at_least=1)
        yield replace(row, note=b.note)
    if mode in ("hetstream", _SUSPEND):
        yield from (_losses(name, mode, done, own) for name, done, own in (("A", a, alone.a), ("B", b, alone.b)))


def _ratio(job: str, system: str, done: Done, against: Done, at_most: float | None) -> Row:
    case = f"real jobs: {job}"
    if done.took_s is None or not against.took_s:
        return Row(case, system, None, "x time", target=f"<= {at_most:g}" if at_most else None, note=done.note)
    took_s = extrapolated_s(done.took_s, done.steps - _WARM, against.steps - _WARM)
    return replace(row_of(case, system, [took_s / against.took_s], "x time", at_most=at_most), note=done.note)


def _losses(job: str, mode: str, done: Done, alone: Done) -> Row:
    case, system = f"real jobs: losses of {job}", f"{mode}: largest difference from alone"
    if not done.losses:
        return Row(case, system, None, "x", note=done.note or "no losses")
    found = largest_difference(done.losses, alone.losses)
    note = "the same to the bit" if done.losses == alone.losses else "not the same to the bit"
    return replace(row_of(case, system, [found], "x", at_most=_LOSSES_AT_MOST), note=note)


class _Go:
    """Files that programs wait for."""

    def __init__(self, folder: Path, mode: str) -> None:
        self.a, self.b, self.again = (str(folder / f"{mode}.{name}") for name in ("a", "b", "again"))

    def let(self, name: str) -> None:
        """Let one of them go on."""
        Path(getattr(self, name)).touch()


def _done(job: Training, most_s: float | None = None) -> Done:
    """A job at its end; after some time it is stopped, and how long the rest would take is extrapolated."""
    began_s = time.monotonic()

    def is_late() -> bool:
        """One that has not made enough steps to be extrapolated gets as long again."""
        late_s = time.monotonic() - began_s - (most_s or math.inf)
        return late_s > 0 and (len(job.steps()) > _WARM or late_s > (most_s or 0))

    until(lambda: job.process.poll() is not None or is_late())
    is_stopped = job.process.poll() is None
    if is_stopped:
        job.process.kill()
        job.process.wait()
    steps = job.steps()
    if is_stopped and len(steps) <= _WARM:
        return Done(len(steps), None, note=f"stopped after {len(steps)} steps: too few to be extrapolated")
    if job.process.returncode and not is_stopped:
        why = job.last_words().splitlines()
        return Done(len(steps), None, note=why[-1] if why else f"it ended with {job.process.returncode}")
    took_s = (steps[-1][0] - steps[_WARM - 1][0]) / 1e9
    first_s = (steps[_WARM - 1][0] - steps[0][0] + steps[0][1]) / 1e9
    losses = tuple(json.loads(job.said("losses") or "[]"))
    note = f"stopped after {len(steps)} steps, and extrapolated" if is_stopped else ""
    return Done(len(steps), took_s, losses, first_s, note)
