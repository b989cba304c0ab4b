"""Exports of sacct, Philly's trace and a table of our own, as workloads: lines of text -> Workload. Pure.

An export of a site's own jobs (`sacct -P`) comes with what really happened.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetstream.base.text import count_words, shortened
from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.client.accounting import SACCT_FIELDS, SACCT_STATES, Usage, usages_of
from hetstream.slurm_plugin.client.slurm_units import megabytes, moment, moments, text_or_empty, tres
from hetstream.slurm_plugin.errors import SimulationInputError, UnreadableAnswer
from hetstream.slurm_plugin.simulate.engine import Progress, simulate
from hetstream.slurm_plugin.simulate.scenario import Discipline, QueueOptions, Request, Scenario
from hetstream.slurm_plugin.simulate.sharing import Sharing
from hetstream.slurm_plugin.simulate.usage_log import Outcome
from hetstream.slurm_plugin.simulate.workload import (
    AS_UTF_8,
    MOST,
    MOST_SHOWN,
    NUL,
    Cluster,
    Lines,
    Points,
    Recorded,
    Workload,
    build,
    curves_of,
    parse_curve,
    quoted,
    read,
)

SACCT_COLUMNS = ("Submit", "Start", "End", "State", "NNodes", "AllocCPUS", "AllocTRES")
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
    """Return the jobs that ran and ended, and notes of what was left out or assumed.

    Raises:
        SimulationInputError: with all that is wrong.
    """
    lines = read(source, text, SACCT_COLUMNS, None, delimiter="|")
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
    left_out["heterogeneous, of which a component did not run and end"] += len(gangs) - len(whole)
    jobs = [_gang(job, parts) if job in leader_of.values() else parts[0] for job, parts in whole.items()]
    lines.good(skip_bad)
    if not jobs:
        raise SimulationInputError(source, ["no job in it has run and ended"])
    notes = [f"{count_words(count, 'job')} {what}: left out" for what, count in sorted(left_out.items()) if count]
    if lines.records and "JobID" not in names:
        notes.append("without the column JobID, components of heterogeneous jobs count as jobs of their own")
    if num_earlier:
        notes.append(
            f"left out: {count_words(num_earlier, 'earlier run')} of requeued jobs; each job counts with its last start"
        )
    if num_resized:
        notes.append(
            f"resized: {count_words(num_resized, 'job')}; each of their sizes counts as a job, submitted when it began"
        )
    notes += [f"left out as wrong: {count_words(len(lines.bad), 'line')}"] if lines.bad else []
    differ = [part.differs for parts in whole.values() for part in parts if part.differs]
    if differ:
        notes.append(
            f"{count_words(len(differ), 'job')} ran for another time than from Start to End (first {differ[0]}), "
            "after a clock change or because they were suspended: ElapsedRaw counts"
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


def recorded_scenario(queue: QueueOptions) -> Scenario:
    """Return every job with the CPUs that it really had, under Slurm's backfill."""
    return Scenario("as recorded", Request.RECORDED, Discipline.EASY, queue=queue)


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


Ints = npt.NDArray[np.int64]

# GoldMiner's models and the CPUs that they are taken to need, for jobs of which only times and GPUs are known.
#
# The paper gives bounds, not figures: the CPUs per GPU here are assumed, so that its two cross-checks are met (run time
# under the machines' ratio, and CPUs per GPU of its fixed data workers). docs/simulate.md has the table.


class Model(NamedTuple):
    """A model: CPUs per GPU at its ideal speed, of them the trainer's own, and what data workers cost."""

    name: str
    ideal_cpus: float
    trainer_cpus: float
    overhead: float


HEAVY = (
    Model("WDL", 36, 3, 0),
    Model("DeepFM", 64, 4, 0),
    Model("AlexNet", 40, 4, 0.127),
    Model("DIN", 24, 2, 0),
    Model("ShuffleNet", 22, 3, 0),
    Model("ResNet18", 27, 3, 0.063),
)
LIGHT = (Model("Inception", 10, 2, 0), Model("ResNet50", 12, 2, 0), Model("VGG16", 10, 2, 0), Model("Bert", 4, 1, 0))


def draw_models(num_jobs: int, draw: np.random.Generator) -> list[Model]:
    """Return a model for each job: one of the two classes with even chances, and any model of the class."""
    heavy = draw.random(num_jobs) < 0.5
    place = draw.random(num_jobs)
    return [
        (HEAVY if is_heavy else LIGHT)[int(at * len(HEAVY if is_heavy else LIGHT))]
        for is_heavy, at in zip(heavy.tolist(), place.tolist(), strict=True)
    ]


def with_models(submit_s: Floats, work_s: Floats, num_gpus: Ints, draw: np.random.Generator) -> Workload:
    """Return a workload of jobs of which only times and GPUs are known: each gets a model."""
    models = draw_models(len(submit_s), draw)
    return build(
        [f"{place}:{model.name}" for place, model in enumerate(models)],
        {
            "submit_s": submit_s,
            "work_s": work_s,
            "units": num_gpus,
            "ideal_cpus": [model.ideal_cpus for model in models],
            "trainer_cpus": [model.trainer_cpus for model in models],
            "overhead": [model.overhead for model in models],
        },
    )


@dataclass(frozen=True)
class Trace:
    """A workload that was read.

    Attributes:
        form: which reader it was.
        notes: what was assumed, and what was left out.
    """

    form: str
    workload: Workload
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReadOptions:
    """How to read.

    Attributes:
        seed: of what a trace does not say, such as models.
        skip_bad: leave out lines that are wrong, instead of refusing the file.
        assumptions: of an export of sacct.
    """

    seed: int = 0
    skip_bad: bool = False
    assumptions: Assumptions = field(default_factory=Assumptions)


Rows = list[tuple[int, Mapping[str, str]]]
Reader = Callable[[str, Iterable[str], ReadOptions], Trace]

# Columns of our own table: docs/simulate.md.
OWN_REQUIRED = ("submit_s", "run_s", "num_gpus")
OWN_OPTIONAL = (
    "job", "cpus_per_gpu", "trainer_cpus_per_gpu", "overhead", "memory_gib_per_gpu", "worker_memory_gib_per_cpu",
    "network_gbps_per_gpu", "time_limit_s", "tenant", "user", "heterogeneous", "curve",
    "job_class", "gpu_use", "gpu_memory_gib",
)  # fmt: skip
_PHILLY = ("job_id", "submit_s", "duration_s", "num_gpus")

_YES, _NO = ("1", "yes", "true"), ("", "0", "no", "false")
_CLASSES = tuple(kind.value for kind in (JobClass.GUARANTEED, JobClass.OPPORTUNISTIC))


def read_trace(source: str, text: str, form: str = "auto", options: ReadOptions | None = None) -> Trace:
    """Read a trace.

    Args:
        source: for messages.
        text: the whole file.
        form: a key of `READERS`, or `auto`: by its columns.
        options: see there.

    Raises:
        SimulationInputError: with all that is wrong.
    """
    if form == "auto":
        form = _form_of(source, text.split("\n", 1)[0])
    # Lines end as csv means it, not at every character that Unicode calls a line end.
    return READERS[form](source, text.split("\n"), options or ReadOptions())


def _form_of(source: str, head: str) -> str:
    if "\0" in head:
        raise SimulationInputError(source, [f"line 1: {NUL}. {AS_UTF_8}"])
    names = {name.strip() for name in head.replace("|", ",").split(",")}
    columns = {
        "philly": _PHILLY,
        "csv": OWN_REQUIRED,
        "sacct": SACCT_COLUMNS,
    }
    for form, required in columns.items():
        if set(required) <= names:
            return form
    if not any(names & set(required) for required in columns.values()):
        forms = "; ".join(f"{form}: {', '.join(required)}" for form, required in columns.items())
        shown = f"it begins with {quoted(head)}" if head.strip() else "it is empty"
        raise SimulationInputError(
            source, [f"line 1: {shown}, and must name the columns of one of these forms: {forms}"]
        )
    nearest = max(columns, key=lambda form: len(names & set(columns[form])) / len(columns[form]))
    missing = ", ".join(sorted(set(columns[nearest]) - names))
    raise SimulationInputError(
        source, [f"line 1: the columns are of no known form. It is nearest to {nearest}, and lacks {missing}"]
    )


def _numbers(lines: Lines, names: Iterable[str], defaults: Mapping[str, float] | None = None) -> dict[int, list[float]]:
    """The values of number columns of each line, with a complaint for each that is wrong."""
    columns = list(names)
    given = defaults or {}
    return {
        line: [lines.number(line, record, name, given.get(name, np.nan)) for name in columns]
        for line, record in lines.records
    }


def _whole(lines: Lines, name: str, least: int = 0) -> None:
    """Complain of numbers that are not whole, or too small."""
    for line, record in lines.records:
        if line not in lines.bad:
            value = float(record[name].strip())
            if value != int(value) or value < least:
                lines.complain(line, f"{name} is {record[name]}: must be a whole number of {least} or more")


def _above_zero(lines: Lines, name: str) -> None:
    for line, record in lines.records:
        if line not in lines.bad and not float(record[name].strip()) > 0:
            lines.complain(line, f"{name} is {record[name]}: must be above 0")


def _philly(source: str, text: Iterable[str], options: ReadOptions) -> Trace:
    lines = read(source, text, _PHILLY, None)
    values = _numbers(lines, _PHILLY[1:])
    _whole(lines, "num_gpus", 1)
    _above_zero(lines, "duration_s")
    rows = lines.good(options.skip_bad)
    table = np.array([values[line] for line, _ in rows])
    draw = np.random.default_rng([options.seed, 4])
    workload = with_models(table[:, 0], table[:, 1], table[:, 2].astype(np.int64), draw)
    note = f"the trace says nothing of CPUs: models are drawn with seed {options.seed}, half of them CPU-intensive"
    return Trace("philly", workload, (note, *_left_out(lines)))


def _own(source: str, text: Iterable[str], options: ReadOptions) -> Trace:
    lines = read(source, text, OWN_REQUIRED, (*OWN_REQUIRED, *OWN_OPTIONAL))
    defaults = {
        "cpus_per_gpu": -1.0, "trainer_cpus_per_gpu": -1.0, "overhead": 0.0, "memory_gib_per_gpu": 0.0,
        "worker_memory_gib_per_cpu": 0.0, "network_gbps_per_gpu": 0.0, "time_limit_s": np.inf,
        "gpu_use": 1.0, "gpu_memory_gib": 0.0,
    }  # fmt: skip
    names = (*OWN_REQUIRED, *defaults)
    values = _numbers(lines, names, defaults)
    _whole(lines, "num_gpus")
    _above_zero(lines, "run_s")
    points: dict[int, Points] = {}
    for line, record in lines.records:
        number = dict(zip(names, values[line], strict=True))
        measured = _measured(lines, line, record)
        if line in lines.bad:
            continue
        cpus, trainer, overhead = (number[name] for name in ("cpus_per_gpu", "trainer_cpus_per_gpu", "overhead"))
        if measured:
            trainer = 1.0 if trainer < 0 else trainer
            cpus = trainer + measured[-1][0] if cpus < 0 else cpus
            overhead = 1.0 - measured[-1][1]
        else:
            cpus = 1.0 if cpus < 0 else cpus
            trainer = cpus if trainer < 0 else trainer
        if overhead >= 1:
            lines.complain(line, f"overhead is {overhead:g}: must be below 1")
        if trainer > cpus:
            lines.complain(line, "trainer_cpus_per_gpu is more than cpus_per_gpu")
        if record.get("heterogeneous", "").strip().lower() not in (*_YES, *_NO):
            lines.complain(line, f"heterogeneous is {record['heterogeneous']!r}: must be yes or no")
        if _class_of(record) not in _CLASSES:
            lines.complain(line, f"job_class is {quoted(record['job_class'])}: must be {' or '.join(_CLASSES)}")
        if not 0 < number["gpu_use"] <= 1:
            lines.complain(line, f"gpu_use is {number['gpu_use']:g}: must be above 0, and at most 1")
        values[line][3:6] = cpus, trainer, overhead
        points[line] = measured or ((0.0, 0.0), (cpus - trainer, 1.0 - overhead))
    rows = lines.good(options.skip_bad)
    table = np.array([values[line] for line, _ in rows]).T
    submit, run, gpus, cpus, trainer, overhead, memory, worker_memory, network, limit, use, gpu_memory = table
    columns = {
        # A job without GPUs is one unit; of others each GPU is one.
        "submit_s": submit, "work_s": run, "units": np.maximum(1, gpus), "gpus": np.minimum(1, gpus),
        "ideal_cpus": cpus, "trainer_cpus": trainer, "overhead": overhead,
        "memory_gib": memory, "worker_memory_gib": worker_memory, "network_gbps": network, "limit_s": limit,
    }  # fmt: skip
    has_curves = any(record.get("curve", "").strip() for _, record in rows)
    workload = build(
        [row.get("job", "") or str(place) for place, (_, row) in enumerate(rows, start=1)],
        columns,
        tenants=[row.get("tenant", "") for _, row in rows],
        users=[row.get("user", "") for _, row in rows],
        is_het=[row.get("heterogeneous", "").strip().lower() in _YES for _, row in rows],
        curves=curves_of([points[line] for line, _ in rows], columns["units"]) if has_curves else None,
        sharing=Sharing(np.array([_class_of(row) == _CLASSES[1] for _, row in rows]), use, gpu_memory),
    )
    return Trace("csv", workload, _left_out(lines))


def _class_of(record: Mapping[str, str]) -> str:
    return record.get("job_class", "").strip().lower() or _CLASSES[0]


def _measured(lines: Lines, line: int, record: Mapping[str, str]) -> Points | None:
    """The curve of a line of our own table; None, perhaps with a complaint, if it has none."""
    text = record.get("curve", "").strip()
    if not text:
        return None
    if record.get("overhead", "").strip():
        lines.complain(line, "it has a curve and an overhead: the last point of the curve says what data workers cost")
    try:
        return parse_curve(text)
    except ValueError as error:
        lines.complain(line, f"curve: {error}")
        return None


def _sacct(source: str, text: Iterable[str], options: ReadOptions) -> Trace:
    workload, notes = read_sacct(source, text, options.assumptions, options.skip_bad)
    return Trace("sacct", workload, notes)


def _left_out(lines: Lines) -> tuple[str, ...]:
    return (f"left out as wrong: {count_words(len(lines.bad), 'line')}",) if lines.bad else ()


READERS: Mapping[str, Reader] = {
    "csv": _own,
    "philly": _philly,
    "sacct": _sacct,
}
