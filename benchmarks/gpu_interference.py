"""What an opportunistic job costs a guaranteed one under several systems, for `benchmarks.gpu_sharing`.

The guaranteed job is busy in a given part of the time, with few long gaps (one behind each step) or with many short
ones (behind the batches that make up a step). Programs are started once and told what to do by files
(`clients/gpu_peers.py`), so that systems follow one another within seconds. Nothing of it has run on a GPU yet.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.gpu_laws import (
    ANTMAN_FIRST_PERCENT,
    LaunchRate,
    antman_percent,
    gaps_of,
    quantile,
    tgs_rate,
)
from benchmarks.gpu_machines import Machine, OutOfTime, Run, Training, until, wait_for_steps, wait_until_ready
from benchmarks.harness import Row, row_of, say
from benchmarks.rap_mps import mps_service
from hetstream.hetjob.gpu.orders import JobClass

PLANNED_S = 250.0
PLANNED_KILL_S = 45.0
DUTIES = (0.5, 0.3, 0.7)
BURSTS = 16
# Seconds of finding a pace, which are not measured, and of measuring, by system; they shrink and grow with the budget.
_TIMES: Mapping[str, tuple[float, float]] = {
    "alone": (0.3, 1.5),
    "packed": (0.5, 2.0),
    "AntMan": (4.0, 2.5),
    "TGS-like": (3.0, 2.5),
    "hetstream": (3.5, 3.5),
}
_MPS_S = (0.5, 1.5)
_QUICK = 0.3
# How often the coordinators of the other systems look at the guaranteed job. AntMan's files are written at most every
# 10 s, as published; with this it fares better than it would.
_LOOK_S = {"AntMan": 1.0, "TGS-like": 0.5}
_MPS = {
    "MPS": {},
    "MPS, 30 %": {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "30"},
    "MPS, priority": {"CUDA_MPS_CLIENT_PRIORITY": "1"},
}
# After the coordinator is killed, an opportunistic job has this long to stop: its orders lapse before.
_STOPPED_S = 1.0
_OVERHEAD_PAIRS = 6
# A program that was told to pause and has made no step for so long does.
_QUIET_S = 0.3


@dataclass(frozen=True)
class Shape:
    """How a guaranteed job uses the GPU: so much of the time, with long gaps or with short ones."""

    duty: float
    is_long: bool

    @property
    def name(self) -> str:
        """As rows call it."""
        return f"{self.duty:.0%} busy, {'few long' if self.is_long else 'many short'} gaps"


@dataclass(frozen=True)
class Seen:
    """Some time of the guaranteed job, and of the other one in it.

    Attributes:
        steps_s: how long each step took, from end to end.
        busy_s: how long it computed in each.
        per_s: steps a second of the other job.
    """

    steps_s: tuple[float, ...]
    busy_s: tuple[float, ...]
    per_s: float

    @property
    def mean_s(self) -> float:
        """Of a step."""
        return statistics.fmean(self.steps_s)


class Told:
    """A program that is told what to do: it has this file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._now: dict[str, Any] = {}
        self.tell(pause=True)

    def tell(self, **what: Any) -> None:
        """Change it; what is not named stays as it is."""
        self._now |= what
        fresh = self.path.with_suffix(".new")
        fresh.write_text(json.dumps(self._now))
        fresh.replace(self.path)


def interference(node: Machine, run: Run) -> Iterator[Row]:
    """What systems cost a guaranteed job with gaps, and what they let another one have of them."""
    shapes = [Shape(duty, is_long) for is_long in (True, False) for duty in DUTIES]
    shapes = shapes[:: len(shapes) - 1] if run.quick else shapes
    scale = _QUICK if run.quick else run.scale(PLANNED_S, 3.0)
    yield from _without_mps(node, run, shapes, scale)
    if not node.is_real:
        yield Row("interference", "MPS", None, "x step", note="MPS needs a real GPU")
        return
    try:
        yield from _with_mps(node, run, shapes, scale)
    except OutOfTime:
        raise
    except Exception as error:  # noqa: BLE001 - MPS is there or not, and may fail in many ways
        yield Row("interference", "MPS", None, "x step", note=f"{type(error).__name__}: {error}")


def _requests(node: Machine) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the guaranteed job trains, and the other one."""
    sizes = node.sizes
    if not node.is_real:
        burst = {**sizes.guaranteed, "rows": sizes.guaranteed["rows"] // 8}
        return {**burst, "bursts": BURSTS, "wait_ms": 0}, {**sizes.beside, "wait_ms": 0}
    burst = {**sizes.guaranteed, "rows": 1024, "layers": 4}
    return {**burst, "bursts": BURSTS, "wait_ms": 0}, {
        "model": "resnet50", "size": 64, "device": "cuda", "wait_ms": 0,
    }  # fmt: skip


@contextlib.contextmanager
def _told(
    node: Machine, name: str, job_class: JobClass | None, request: Mapping[str, Any], extra: Mapping[str, str]
) -> Iterator[tuple[Training, Told]]:
    told = Told(node.folder / f"{name}.control")
    asked = {**request, "control": str(told.path)}
    host_mib = 0 if job_class is None else 1024
    with node.train(job_class, asked, host_mib, extra) as training:
        yield training, told


def _warm(training: Training, told: Told) -> None:
    """Let a program make its first steps, and pause again."""
    told.tell(pause=False)
    wait_for_steps(training, 3)
    told.tell(pause=True)


def _without_mps(node: Machine, run: Run, shapes: list[Shape], scale: float) -> Iterator[Row]:
    ours, theirs = _requests(node)
    with contextlib.ExitStack() as stack:
        # First, as a coordinator would leave the GPU to a guaranteed program that was there before it.
        opportunistic = stack.enter_context(node.train(JobClass.OPPORTUNISTIC, theirs, 1024))
        with node.coordinator():
            wait_for_steps(opportunistic, 3)
        guaranteed, control = stack.enter_context(_told(node, "guaranteed", JobClass.GUARANTEED, ours, {}))
        other, pacing = stack.enter_context(_told(node, "other", None, theirs, {}))
        wait_until_ready(guaranteed, other)
        _warm(guaranteed, control)
        _warm(other, pacing)
        solo_per_s = _solo(other, pacing, 2 * scale)
        busy_s = _busy_s(guaranteed, control, scale)
        for shape in shapes:
            control.tell(gaps_s=gaps_of(busy_s, shape.duty, BURSTS, is_long=shape.is_long), pause=False)
            seen = {}
            try:
                before = _alone(guaranteed, scale)
                seen["packed"] = _packed(guaranteed, other, pacing, scale)
                for system in ("AntMan", "TGS-like"):
                    seen[system] = _paced(node, guaranteed, other, pacing, system, before.mean_s, scale)
                with node.coordinator():
                    seen["hetstream"] = _window(guaranteed, opportunistic, *_scaled("hetstream", scale))
                after = _alone(guaranteed, scale)
            finally:
                control.tell(pause=True)
            yield from _rows(shape, (before, after), seen, solo_per_s, is_judged=node.is_real and not run.quick)


def _with_mps(node: Machine, run: Run, shapes: list[Shape], scale: float) -> Iterator[Row]:
    """The same with programs under MPS, which is read when they begin: each has its own."""
    ours, theirs = _requests(node)
    with mps_service() as environment, contextlib.ExitStack() as stack:
        guaranteed, control = stack.enter_context(_told(node, "guaranteed-mps", None, ours, environment))
        others = {
            name: stack.enter_context(_told(node, f"other-{number}", None, theirs, {**environment, **extra}))
            for number, (name, extra) in enumerate(_MPS.items())
        }
        _warm(guaranteed, control)
        for other, pacing in others.values():
            _warm(other, pacing)
        solo_per_s = _solo(*others["MPS"], 2 * scale)
        busy_s = _busy_s(guaranteed, control, scale)
        for shape in shapes:
            control.tell(gaps_s=gaps_of(busy_s, shape.duty, BURSTS, is_long=shape.is_long), pause=False)
            before = _alone(guaranteed, scale)
            seen = {}
            for name, (other, pacing) in others.items():
                pacing.tell(pause=False)
                seen[name] = _window(guaranteed, other, *(seconds * scale for seconds in _MPS_S))
                pacing.tell(pause=True)
            after = _alone(guaranteed, scale)
            control.tell(pause=True)
            yield from _rows(shape, (before, after), seen, solo_per_s, is_judged=node.is_real and not run.quick)


def _scaled(system: str, scale: float) -> tuple[float, float]:
    settle_s, measure_s = _TIMES[system]
    return settle_s * scale, measure_s * scale


def _busy_s(guaranteed: Training, control: Told, scale: float) -> float:
    """How long the guaranteed job computes in a step without gaps."""
    control.tell(gaps_s=None, pause=False)
    busy_s = statistics.median(_window(guaranteed, None, 0.2, scale).busy_s)
    control.tell(pause=True)
    return busy_s


def _solo(other: Training, pacing: Told, measure_s: float) -> float:
    """Steps a second of the other job while nobody else is there."""
    pacing.tell(pacing="", pause=False)
    seen = _window(other, None, 0.2, measure_s)
    pacing.tell(pause=True)
    return 1 / seen.mean_s


def _alone(guaranteed: Training, scale: float) -> Seen:
    return _window(guaranteed, None, *_scaled("alone", scale))


def _packed(guaranteed: Training, other: Training, pacing: Told, scale: float) -> Seen:
    pacing.tell(pacing="", pause=False)
    seen = _window(guaranteed, other, *_scaled("packed", scale))
    pacing.tell(pause=True)
    return seen


def _paced(
    node: Machine, guaranteed: Training, other: Training, pacing: Told, system: str, alone_s: float, scale: float
) -> Seen:
    """Beside a job that AntMan's or a TGS-like coordinator holds back."""
    look = _antman(node, pacing) if system == "AntMan" else _tgs(pacing)
    last_s = time.monotonic()

    def each_look() -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _LOOK_S[system]:
            began_ns, last_s = time.monotonic_ns() - int(_LOOK_S[system] * 1e9), time.monotonic()
            ends = [end_ns for end_ns, _ in guaranteed.steps() if end_ns >= began_ns]
            if len(ends) > 1:
                look((ends[-1] - ends[0]) / (len(ends) - 1) / 1e9 / alone_s)

    pacing.tell(pause=False)
    seen = _window(guaranteed, other, *_scaled(system, scale), meanwhile=each_look)
    pacing.tell(pacing="", pause=True)
    until_paused(other)
    return seen


def _antman(node: Machine, pacing: Told) -> Callable[[float], None]:
    """Writes AntMan's file; what it returns takes the guaranteed job's slowdown."""
    path, percent = node.folder / "antman.json", ANTMAN_FIRST_PERCENT
    path.write_text(json.dumps({"perfControl": percent}))
    pacing.tell(pacing="antman", antman=str(path))

    def look(slowdown: float) -> None:
        nonlocal percent
        percent = antman_percent(percent, slowdown)
        fresh = path.with_suffix(".new")
        fresh.write_text(json.dumps({"perfControl": percent}))
        fresh.replace(path)

    return look


def _tgs(pacing: Told) -> Callable[[float], None]:
    """Lets the job launch so often; what it returns takes the guaranteed job's slowdown."""
    rate = LaunchRate()
    pacing.tell(pacing="tgs", rate_per_s=rate.per_s)

    def look(slowdown: float) -> None:
        nonlocal rate
        rate = tgs_rate(rate, slowdown)
        pacing.tell(rate_per_s=rate.per_s)

    return look


def until_paused(other: Training) -> None:
    """Wait until a program that was told to pause makes no more steps."""
    seen, since_s = -1, 0.0

    def is_quiet() -> bool:
        nonlocal seen, since_s
        steps, now_s = len(other.steps()), time.monotonic()
        if steps != seen:
            seen, since_s = steps, now_s
        return now_s - since_s >= _QUIET_S

    until(is_quiet)


def _window(
    guaranteed: Training, other: Training | None, settle_s: float, measure_s: float,
    meanwhile: Callable[[], None] = lambda: None,
) -> Seen:  # fmt: skip
    """Look at both from a while on. It lasts longer if there are not three steps by then."""
    began_ns = time.monotonic_ns() + int(settle_s * 1e9)
    ended_ns = began_ns + int(measure_s * 1e9)
    next_look_s = time.monotonic()

    def is_over() -> bool:
        nonlocal next_look_s
        if time.monotonic() < next_look_s:
            return False
        next_look_s = time.monotonic() + 0.02
        meanwhile()
        if guaranteed.process.poll() is not None:
            raise RuntimeError(f"a training program ended early: {guaranteed.last_words()}")
        if time.monotonic_ns() < ended_ns:
            return False
        return sum(end_ns >= began_ns for end_ns, _ in guaranteed.steps()) > 3

    until(is_over)
    steps = [step for step in guaranteed.steps() if step[0] >= began_ns]
    first_ns, last_ns = steps[0][0], steps[-1][0]
    made = sum(first_ns < end_ns <= last_ns for end_ns, _ in other.steps()) if other else 0
    ends = [end_ns for end_ns, _ in steps]
    return Seen(
        tuple((after - before) / 1e9 for before, after in itertools.pairwise(ends)),
        tuple(busy_ns / 1e9 for _, busy_ns in steps[1:]),
        made / ((last_ns - first_ns) / 1e9),
    )


def _rows(
    shape: Shape, alone: tuple[Seen, Seen], seen: Mapping[str, Seen], solo_per_s: float, *, is_judged: bool
) -> Iterator[Row]:
    both_s = alone[0].steps_s + alone[1].steps_s
    alone_s, alone_p99_s = statistics.fmean(both_s), quantile(both_s, 0.99)
    left = 1 - statistics.fmean(alone[0].busy_s + alone[1].busy_s) / alone_s
    drift = alone[1].mean_s / alone[0].mean_s - 1
    case = f"interference: {shape.name}"
    least = 0.85 if shape.is_long else 0.5
    for system, found in seen.items():
        goals = is_judged and system == "hetstream"
        part = found.per_s / solo_per_s
        note = f"{len(found.steps_s)} steps; alone {alone_s * 1e3:.1f} ms, {1 - left:.0%} busy, {drift:+.1%} afterwards"
        figures = (
            ("guaranteed, mean step / alone", found.mean_s / alone_s, {"at_most": 1.03}, note),
            ("guaranteed, p99 / p99 alone", quantile(found.steps_s, 0.99) / alone_p99_s, {"at_most": 1.10}, ""),
            ("opportunistic / solo", part, {}, ""),
            ("opportunistic / what is left", part / left, {"at_least": least}, ""),
        )
        say(f"  {case}, {system}: " + ", ".join(f"{value:.2f}" for _, value, _, _ in figures))
        for what, value, goal, remark in figures:
            yield replace(row_of(case, f"{system}: {what}", [value], "x", **(goal if goals else {})), note=remark)


def coordinator_killed(node: Machine, run: Run) -> Iterator[Row]:
    """What an agent and a coordinator cost a guaranteed job that is alone; and `kill -9` of the coordinator."""
    scale = _QUICK if run.quick else run.scale(PLANNED_KILL_S, 3.0)
    ours, theirs = _requests(node)
    with (
        _told(node, "bare", None, ours, {}) as (bare, bare_control),
        _told(node, "shared", JobClass.GUARANTEED, ours, {}) as (shared, control),
    ):
        _warm(bare, bare_control)
        _warm(shared, control)
        ratios = []
        with node.coordinator():
            for _ in range(2 if run.quick else _OVERHEAD_PAIRS):
                pair = []
                for training, told in ((bare, bare_control), (shared, control)):
                    told.tell(gaps_s=None, pause=False)
                    pair.append(statistics.median(_window(training, None, 0.2, 1.2 * scale).steps_s))
                    told.tell(pause=True)
                ratios.append(pair[1] / pair[0])
        goal = 1.005 if node.is_real and not run.quick else None
        median = statistics.median(ratios)
        row = Row("agent", "guaranteed job alone, hetstream / no agent", median, "x step", (min(ratios), max(ratios)))
        yield replace(row, samples=tuple(ratios), **({"target": f"<= {goal:g}", "met": median <= goal} if goal else {}))
        busy_s = _busy_s(shared, control, scale)
        control.tell(gaps_s=gaps_of(busy_s, 0.5, BURSTS, is_long=True), pause=False)
        yield from _killed(node, run, shared, theirs, scale)


def _killed(node: Machine, run: Run, guaranteed: Training, theirs: Mapping[str, Any], scale: float) -> Iterator[Row]:
    alone = _window(guaranteed, None, 0.3, 2 * scale)
    with node.coordinator() as coordinator, node.train(JobClass.OPPORTUNISTIC, theirs, 1024) as other:
        wait_for_steps(other, 3)
        beside = _window(guaranteed, other, 2 * scale, 2 * scale)
        coordinator.kill()
        coordinator.wait()
        killed_ns = time.monotonic_ns()
        after = _window(guaranteed, None, 0.1, _STOPPED_S + 2 * scale)
        ends = [end_ns for end_ns, _ in other.steps() if end_ns > killed_ns]
        is_alive = other.process.poll() is None
    case = "coordinator killed"
    late = sum(end_ns > killed_ns + _STOPPED_S * 1e9 for end_ns in ends)
    last_ms = (ends[-1] - killed_ns) / 1e6 if ends else 0.0
    goal = 1.03 if not run.quick else None
    row = row_of(case, "guaranteed, afterwards / alone", [after.mean_s / alone.mean_s], "x step", at_most=goal)
    yield replace(row, note=f"{len(after.steps_s)} steps; {beside.mean_s / alone.mean_s:.3f} before it was killed")
    row = row_of(case, f"opportunistic, from {_STOPPED_S:g} s on", [float(late)], "steps", at_most=0)
    yield replace(row, note="it pauses" if is_alive else "it has ended")
    yield Row(case, "opportunistic, its last step", last_ms, "ms", note=f"{beside.per_s:.1f} steps a second before")
