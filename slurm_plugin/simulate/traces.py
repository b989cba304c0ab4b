"""Philly's trace, exports of sacct and a table of our own, as workloads: lines of text -> Workload. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from hetstream.hetjob.gpu.orders import JobClass
from hetstream.slurm_plugin.errors import SimulationInputError
from hetstream.slurm_plugin.simulate.sacct import REQUIRED as SACCT_COLUMNS
from hetstream.slurm_plugin.simulate.sacct import Assumptions, read_sacct
from hetstream.slurm_plugin.simulate.sharing import Sharing
from hetstream.slurm_plugin.simulate.workload import (
    AS_UTF_8,
    NUL,
    Lines,
    Points,
    Workload,
    build,
    curves_of,
    parse_curve,
    quoted,
    read,
)

Floats = npt.NDArray[np.float64]
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
    """A model for each job: one of the two classes with even chances, and any model of the class."""
    heavy = draw.random(num_jobs) < 0.5
    place = draw.random(num_jobs)
    return [
        (HEAVY if is_heavy else LIGHT)[int(at * len(HEAVY if is_heavy else LIGHT))]
        for is_heavy, at in zip(heavy.tolist(), place.tolist(), strict=True)
    ]


def with_models(submit_s: Floats, work_s: Floats, num_gpus: Ints, draw: np.random.Generator) -> Workload:
    """A workload of jobs of which only times and GPUs are known: each gets a model."""
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
    return (f"{len(lines.bad):,} line(s) are wrong and left out",) if lines.bad else ()


READERS: Mapping[str, Reader] = {
    "csv": _own,
    "philly": _philly,
    "sacct": _sacct,
}
