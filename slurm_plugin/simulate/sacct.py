"""A site's own jobs, from an export of `sacct -P`: lines of text -> Workload, with what really happened. Pure."""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetstream.base.text import shortened
from hetstream.slurm_plugin.client.accounting import SACCT_FIELDS, SACCT_STATES, Usage, usages_of
from hetstream.slurm_plugin.client.slurm_units import megabytes, moment, moments, text_or_empty, tres
from hetstream.slurm_plugin.errors import SimulationInputError, UnreadableAnswer
from hetstream.slurm_plugin.simulate.engine import Progress, simulate
from hetstream.slurm_plugin.simulate.scenario import Discipline, QueueOptions, Request, Scenario
from hetstream.slurm_plugin.simulate.usage_log import Outcome
from hetstream.slurm_plugin.simulate.workload import (
    MOST,
    MOST_SHOWN,
    Cluster,
    Lines,
    Recorded,
    Workload,
    build,
    quoted,
    read,
)

REQUIRED = ("Submit", "Start", "End", "State", "NNodes", "AllocCPUS", "AllocTRES")
EXPORT = (
    f"sacct --allusers --duplicates --parsable2 --starttime=now-30days --endtime=now --state={SACCT_STATES} --format="
    "JobID,JobIDRaw,User,Account,Partition,State,Submit,Start,End,ElapsedRaw,NNodes,AllocCPUS,AllocTRES,TotalCPU,"
    "TRESUsageInAve,TimelimitRaw,AdminComment"
)
_COMPONENT = re.compile(r"(\d+)\+\d+")
# A clock may be set by so much between two entries without being said to jump.
_CLOCK_S = 2.0
# A clock change moves local time by an hour at the most, and by quarters of one.
_LARGEST_CHANGE_S, _CHANGE_STEP_S = 3600.0, 900.0
_MB_PER_GIB = 1024


@dataclass(frozen=True)
class Assumptions:
    """What an export does not say.

    Attributes:
        gpu_share: how busy the GPUs of a job were of which nobody measured it. 1: it gains nothing.
        least_share: a measured share below this counts as this: who uses no GPU gains none from data workers.
        trainer_cpus: that a trainer needs for each GPU while data workers make its batches.
    """

    gpu_share: float = 1.0
    least_share: float = 0.1
    trainer_cpus: float = 3.0


@dataclass(frozen=True, slots=True)
class _Job:
    usage: Usage
    submit_s: float
    start_s: float
    end_s: float  # as ElapsedRaw has it
    num_nodes: int
    limit_s: float
    memory_gib: float
    extra_cpus: float = 0.0
    is_het: bool = False
    differs: str = ""  # how, where End - Start is another time than ElapsedRaw


class _Run(NamedTuple):
    """A line of a job, and those of its steps."""

    line: int
    record: Mapping[str, str]
    steps: list[Mapping[str, str]]


# Stands for a component that cannot be replayed.
_LEFT_OUT = _Job(Usage("", "", "", "", "", 0, 0.0, 0.0, 0.0), 0.0, 0.0, 0.0, 0, 0.0, 0.0)


def read_sacct(
    source: str, text: Iterable[str], assumptions: Assumptions, skip_bad: bool
) -> tuple[Workload, tuple[str, ...]]:
    """The jobs that ran and ended, and notes of what was left out or assumed.

    Raises:
        SimulationInputError: with all that is wrong.
    """
    lines = read(source, text, REQUIRED, None, delimiter="|")
    names = set(lines.records[0][1]) if lines.records else set()
    if lines.records and not names & {"JobIDRaw", "JobID"}:
        raise SimulationInputError(source, ["line 1: there is no column JobIDRaw. Export with: " + EXPORT])
    runs, leader_of = _runs(lines)
    left_out: Counter[str] = Counter()
    gangs: dict[str, list[_Job]] = {}
    in_part: Counter[str] = Counter()
    num_resized = num_earlier = 0
    for job, of_job in runs.items():
        sizes = _sizes(of_job)[-1:] if job in leader_of else _sizes(of_job)
        num_resized += len(sizes) > 1
        num_earlier += len(of_job) - len(sizes)
        for number, (line, record, steps) in enumerate(sizes, 1):
            found = _job(lines, line, job, record, steps, in_part if job in leader_of else left_out)
            gang = leader_of.get(job, job if number == len(sizes) else f"{job} size {number}")
            if found is not None:
                gangs.setdefault(gang, []).append(found)
            elif job in leader_of:
                gangs.setdefault(gang, []).append(_LEFT_OUT)
    whole = {job: parts for job, parts in gangs.items() if _LEFT_OUT not in parts}
    left_out["heterogeneous, of which a component did not run and end,"] += len(gangs) - len(whole)
    jobs = [_gang(job, parts) if job in leader_of.values() else parts[0] for job, parts in whole.items()]
    lines.good(skip_bad)
    if not jobs:
        raise SimulationInputError(source, ["no job in it has run and ended"])
    notes = [f"{count:,} job(s) {what} and are left out" for what, count in sorted(left_out.items()) if count]
    if lines.records and "JobID" not in names:
        notes.append("without the column JobID, components of heterogeneous jobs count as jobs of their own")
    if num_earlier:
        notes.append(
            f"{num_earlier:,} earlier run(s) of requeued jobs are left out: each job counts with its last start"
        )
    if num_resized:
        notes.append(
            f"{num_resized:,} job(s) were resized: each of their sizes counts as a job, submitted when it began"
        )
    notes += [f"{len(lines.bad):,} line(s) are wrong and left out"] if lines.bad else []
    differ = [part.differs for parts in whole.values() for part in parts if part.differs]
    if differ:
        notes.append(
            f"{len(differ):,} job(s) ran for another time than from Start to End (first {differ[0]}), after a clock "
            "change or because they were suspended: ElapsedRaw counts"
        )
    return _workload(jobs, assumptions), (*notes, *_said(jobs, assumptions))


def _runs(lines: Lines) -> tuple[dict[str, list[_Run]], dict[str, str]]:
    """The lines of each job with those of their steps, and of each component the heterogeneous job that it is of."""
    runs: dict[str, list[_Run]] = {}
    leader_of: dict[str, str] = {}
    for line, record in lines.records:
        job, _, step = (record.get("JobIDRaw") or record.get("JobID", "")).partition(".")
        if step:
            if job in runs:
                runs[job][-1].steps.append(record)
        else:
            runs.setdefault(job, []).append(_Run(line, record, []))
            if component := _COMPONENT.fullmatch(record.get("JobID", "")):
                leader_of[job] = component[1]
    return runs, leader_of


def _sizes(runs: Sequence[_Run]) -> list[_Run]:
    """What became of a job: the last of its lines, and those before it that ended as it got another size.

    A job that was requeued has a line for each of its starts; the last one is what became of it. 22.05 lets each size
    begin with the job, and count from there.
    """
    first = len(runs) - 1
    while first and runs[first - 1].record["State"].startswith("RESIZING"):
        first -= 1
    found = [*runs[first : first + 1]]
    for before, run in pairwise(runs[first:]):
        record = run.record
        with contextlib.suppress(ValueError):  # a time that is none is told with its line
            started_s, resized_s = moment(record["Start"]), moment(before.record["End"])
            if started_s is not None and resized_s is not None and started_s < resized_s:
                record = {**record, "Start": before.record["End"]}
                if said := record.get("ElapsedRaw", ""):
                    record["ElapsedRaw"] = f"{float(said) - (resized_s - started_s):.0f}"
        found.append(run._replace(record=record))
    return found


def _job(
    lines: Lines, line: int, job: str, record: Mapping[str, str], steps: Iterable[Mapping[str, str]], out: Counter[str]
) -> _Job | None:
    """One job; None, with a complaint or a count, where it cannot be replayed."""
    before = len(lines.problems)
    if not job:
        lines.complain(line, "there is no job id")
        return None
    times = [_moments(lines, line, record, name) for name in ("Submit", "Start", "End")]
    num_nodes, cpus = lines.number(line, record, "NNodes"), lines.number(line, record, "AllocCPUS", 0.0)
    if cpus % 1:
        lines.complain(line, f"AllocCPUS is {quoted(record['AllocCPUS'])}: must be a whole number")
    said_s = lines.number(line, record, "ElapsedRaw", 0.0)
    elapsed_s = said_s if record.get("ElapsedRaw", "").strip() else None
    submit_s, start_s, end_s = _meant(times, elapsed_s)
    if cpus:
        _check_clocks(lines, line, (submit_s, start_s, end_s), elapsed_s)
    if len(lines.problems) > before:
        return None
    if submit_s is None:
        lines.complain(line, "Submit is empty")
        return None
    if start_s is None or cpus == 0:
        out["never started"] += 1
        return None
    if end_s is None:
        out["still ran"] += 1
        return None
    limit = text_or_empty(record.get("TimelimitRaw", "").replace("Partition_Limit", ""))
    limit_min = lines.number(line, {"TimelimitRaw": limit}, "TimelimitRaw", 0.0)
    filled = {name: record.get(name, "") for name in SACCT_FIELDS} | {"JobIDRaw": job, "AllocCPUS": f"{cpus:.0f}"}
    stepped = [{name: step.get(name, "") for name in SACCT_FIELDS} | {"JobIDRaw": f"{job}.0"} for step in steps]
    try:
        usage = usages_of([filled, *stepped])[0]
        memory_gib = megabytes(tres(record["AllocTRES"]).get("mem", "")) / _MB_PER_GIB
    except UnreadableAnswer as error:
        # What follows the cause there is the whole line; here its number says which one it is.
        lines.complain(line, shortened(str(error.__cause__ or error), MOST_SHOWN))
        return None
    except ValueError as error:
        lines.complain(line, f"AllocTRES: {shortened(str(error), MOST_SHOWN)}")
        return None
    if usage.gpus > MOST:
        lines.complain(line, f"AllocTRES says {usage.gpus:g} GPUs: must be at most {MOST:g}")
    if len(lines.problems) > before:
        return None
    between_s, ran_s = end_s - start_s, end_s - start_s if elapsed_s is None else elapsed_s
    if ran_s < 1:
        out["ran for less than a second"] += 1
        return None
    differs = ""
    if abs(ran_s - between_s) > _CLOCK_S:
        differs = f"line {line}: {between_s:,.0f} s from Start to End, ElapsedRaw {ran_s:,.0f} s"
    limit_s, start_s = limit_min * 60 or np.inf, max(start_s, submit_s)
    nodes = max(1, int(num_nodes))
    return _Job(usage, submit_s, start_s, start_s + ran_s, nodes, limit_s, memory_gib, differs=differs)


def _meant(times: Sequence[tuple[float, ...]], elapsed_s: float | None) -> tuple[float | None, ...]:
    """Which moments Submit, Start and End mean, where local time says one hour twice.

    Those that are in order, and of these the ones that ElapsedRaw fits best.
    """

    def wrong(chosen: tuple[float | None, ...]) -> tuple[bool, float]:
        known = [at_s for at_s in chosen if at_s is not None]
        is_out_of_order = any(after < before - _CLOCK_S for before, after in pairwise(known))
        _, start_s, end_s = chosen
        if start_s is None or end_s is None or elapsed_s is None:
            return is_out_of_order, 0.0
        return is_out_of_order, abs(end_s - start_s - elapsed_s)

    return min(product(*(meanings or (None,) for meanings in times)), key=wrong)


def _check_clocks(lines: Lines, line: int, times: tuple[float | None, ...], elapsed_s: float | None) -> None:
    """Complain of a job whose times are in another order than they can be, even if the clock was changed as it ran."""
    submit_s, start_s, end_s = times
    if submit_s is not None and start_s is not None and start_s < submit_s - _CLOCK_S:
        lines.complain(line, f"it started {submit_s - start_s:.0f} s before it was submitted: a clock jumped")
    if start_s is not None and end_s is not None and end_s < start_s - _CLOCK_S:
        change_s = (elapsed_s or 0.0) - (end_s - start_s)
        steps = change_s / _CHANGE_STEP_S
        is_change = change_s <= _LARGEST_CHANGE_S + _CLOCK_S and abs(steps - round(steps)) <= _CLOCK_S / _CHANGE_STEP_S
        if not elapsed_s or not is_change:
            lines.complain(line, f"it ended {start_s - end_s:.0f} s before it started: a clock jumped")


def _moments(lines: Lines, line: int, record: Mapping[str, str], name: str) -> tuple[float, ...]:
    """What a time may mean; nothing where there is none, or with a complaint where it is no time of a job."""
    try:
        found = moments(record[name])
    except ValueError:
        lines.complain(line, f"{name} is {quoted(record[name])}: must be like 2026-11-20T16:00:15")
        return ()
    if any(not 0 <= at_s <= MOST for at_s in found):
        lines.complain(line, f"{name} is {quoted(record[name])}: must be between 1970 and 2286. A clock was wrong")
        return ()
    return found


def _gang(job: str, components: list[_Job]) -> _Job:
    """A heterogeneous job: units are those of the components with GPUs; the CPUs of the others may be anywhere."""
    trainers = [part for part in components if part.usage.gpus > 0] or components[:1]
    gpus = sum(part.usage.gpus for part in trainers)
    busy = [part.usage.gpu_share for part in trainers]
    known = [share * part.usage.gpus for share, part in zip(busy, trainers, strict=True) if share is not None]
    usage = replace(
        trainers[0].usage,
        job=job,
        gpus=gpus,
        cpus=sum(part.usage.cpus for part in trainers),
        gpu_share=sum(known) / gpus if gpus and len(known) == len(busy) else None,
    )
    return _Job(
        usage,
        min(part.submit_s for part in components),
        max(part.start_s for part in components),
        max(part.end_s for part in components),
        sum(part.num_nodes for part in trainers),
        max(part.limit_s for part in components),
        sum(part.memory_gib for part in trainers),
        float(sum(part.usage.cpus for part in components) - usage.cpus),
        is_het=True,
    )


def _workload(jobs: list[_Job], assumptions: Assumptions) -> Workload:
    gpus = np.array([np.ceil(job.usage.gpus) for job in jobs])
    nodes = np.array([job.num_nodes for job in jobs], dtype=float)
    cpus = np.array([job.usage.cpus for job in jobs], dtype=float)
    # A unit is a node's share of the job; where its GPUs do not divide evenly, each GPU is one.
    units = np.where((gpus > 0) & (gpus % nodes > 0), gpus, nodes)
    unit_cpus, unit_gpus = cpus / units, gpus / units
    share = np.array([_share(job.usage, assumptions) for job in jobs])
    start_s, end_s = np.array([job.start_s for job in jobs]), np.array([job.end_s for job in jobs])
    # What other components had was for this one: its data workers.
    extra_cpus = np.array([job.extra_cpus for job in jobs])
    whole_cpus = unit_cpus + extra_cpus / units
    keeps = np.minimum(unit_cpus, np.maximum(1.0, assumptions.trainer_cpus * unit_gpus))
    is_starved = (share < 1) & (gpus > 0)
    return build(
        [job.usage.job for job in jobs],
        {
            "submit_s": np.array([job.submit_s for job in jobs]),
            "work_s": (end_s - start_s) * share,
            "units": units,
            "gpus": unit_gpus,
            "ideal_cpus": whole_cpus / share,
            "trainer_cpus": np.where(is_starved, keeps, unit_cpus),
            "memory_gib": np.array([job.memory_gib for job in jobs]) / units,
            "limit_s": np.array([job.limit_s for job in jobs]),
        },
        tenants=[job.usage.account for job in jobs],
        users=[job.usage.user for job in jobs],
        is_het=[job.is_het for job in jobs],
        recorded=Recorded(start_s, end_s, unit_cpus, extra_cpus),
    )


def _share(usage: Usage, assumptions: Assumptions) -> float:
    if usage.gpus <= 0:
        return 1.0
    share = assumptions.gpu_share if usage.gpu_share is None else usage.gpu_share
    return min(1.0, max(assumptions.least_share, share))


def _said(jobs: list[_Job], assumptions: Assumptions) -> list[str]:
    with_gpus = [job for job in jobs if job.usage.gpus > 0]
    known = sum(job.usage.gpu_share is not None for job in with_gpus)
    notes = [f"of {len(with_gpus):,} jobs with GPUs the use of the GPUs is known of {known:,}"]
    if known < len(with_gpus):
        notes.append(f"the others are taken to keep them {100 * assumptions.gpu_share:.0f} % busy (--gpu-busy)")
    notes.append("what GPUs were idle is taken as waiting for data: the gain is the most that data workers can bring")
    return notes


# How well the simulator tells again what really happened: a site's export against its own replay. Pure.

Floats = npt.NDArray[np.float64]

# Pairs of starts that are compared, at most: drawn with a fixed seed.
_PAIRS = 200_000


@dataclass(frozen=True)
class ReplayError:
    """The simulator's own error; relative ones are (simulated - real) / real.

    Attributes:
        mean_jct, makespan: relative.
        mean_wait_s, real_mean_wait_s: simulated and real.
        median_start_s: of the absolute error of a job's start.
        order: share of pairs of jobs that start in the same order as they really did; pairs that started at the same
            time count as such.
        num_jobs: that were compared.
    """

    mean_jct: float
    makespan: float
    mean_wait_s: float
    real_mean_wait_s: float
    median_start_s: float
    order: float
    num_jobs: int


def recorded_scenario(queue: QueueOptions, seed: int = 0) -> Scenario:
    """Every job with the CPUs that it really had, under Slurm's backfill."""
    return Scenario("as recorded", Request.RECORDED, Discipline.EASY, queue=queue, seed=seed)


def replay(
    workload: Workload, cluster: Cluster, queue: QueueOptions, progress: Progress | None = None
) -> tuple[Outcome, ReplayError]:
    """Simulate what really happened, and compare.

    Raises:
        SimulationInputError: nothing is recorded, or no job fits the cluster.
    """
    outcome = simulate(workload, cluster, recorded_scenario(queue), progress)
    return outcome, error_of(outcome)


def error_of(outcome: Outcome) -> ReplayError:
    """Compare a run with what is recorded of its jobs.

    Raises:
        SimulationInputError: nothing is recorded, or no job ended.
    """
    load = outcome.workload
    if load.recorded is None:
        raise SimulationInputError("workload", ["it does not say what really happened"])
    done = outcome.finished
    if not done.any():
        raise SimulationInputError("workload", ["no job fits the cluster. Is it the cluster that the export is of?"])
    real, submit_s = load.recorded, load.submit_s[done]
    real_start_s, real_end_s = real.start_s[done], real.end_s[done]
    start_s, end_s = outcome.start_s[done], outcome.end_s[done]
    real_jct_s = float((real_end_s - submit_s).mean())
    real_makespan_s = float(real_end_s.max())
    return ReplayError(
        mean_jct=float((end_s - submit_s).mean()) / real_jct_s - 1,
        makespan=float(end_s.max()) / real_makespan_s - 1,
        mean_wait_s=float((start_s - submit_s).mean()),
        real_mean_wait_s=float((real_start_s - submit_s).mean()),
        median_start_s=float(np.median(np.abs(start_s - real_start_s))),
        order=same_order(start_s, real_start_s),
        num_jobs=int(done.sum()),
    )


def same_order(simulated: Floats, real: Floats) -> float:
    """Share of pairs of jobs that come in the same order in both; one that has two at one time agrees with any."""
    size = len(simulated)
    if size < 2:
        return 1.0
    draw = np.random.default_rng(0)
    if size * (size - 1) // 2 <= _PAIRS:
        first, other = np.triu_indices(size, 1)
    else:
        first, other = draw.integers(0, size, (2, _PAIRS))
        first, other = first[first != other], other[first != other]
    product = (simulated[first] - simulated[other]) * (real[first] - real[other])
    return float((product >= 0).mean())
