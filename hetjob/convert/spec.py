"""What the user asks of hetstream for one job.

Second arrow of the job line: directives -> JobSpec. Made of what `directives.py` has found, read by `convert.py`. It
never sees the script.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from hetstream.base.errors import ConfigError
from hetstream.hetjob.convert.directives import OPTIONS, WITH_VALUE, Directive, written
from hetstream.hetjob.convert.sbatch_options import SbatchOptions, megabytes, time_limit_s
from hetstream.hetjob.errors import DataWorkersMissing, DirectiveError
from hetstream.hetjob.job.job import RULE, is_directory_pattern
from hetstream.mpi_dataworkers.process.config import OFFLOADS, checked_cache
from hetstream.mpi_dataworkers.threads import MAX_THREADS

DEFAULT_DATA_WORKER_CPUS = 4  # enough to hide one another's reads; small enough to fit between other jobs
DEFAULT_GPU_DATA_WORKER_CPUS = 2  # one for the stage, one for receiving and sending batches
DEFAULT_TRAINER_CPUS_PER_GPU = 2  # one for the training loop, one for receiving and pinning batches
NO_RESERVATION = "none"
# As `gpu.orders.JobClass` has them.
GUARANTEED, OPPORTUNISTIC = "guaranteed", "opportunistic"
AUTO = "auto"
# The elastic controller stops where more do not pay; this only bounds its mistakes.
_AUTO_COUNTS = "0-16"
_COUNTS_RULE = "MIN is at least 0, MAX at least 1 and not below MIN"
_CHECKPOINT_RULE = (
    "--checkpoint=DIR and --checkpoint-size=SIZE belong together: the memory that checkpoints take counts into the "
    "job's request. A model under Adam in 32 bits has about 12 bytes for each parameter; hetstream ckpt ls shows it"
)
_EMBEDDING_RULE = (
    "--embedding-servers=MIN[-MAX] and --embedding-server-memory=SIZE belong together: rows of embedding tables lie in "
    "that memory"
)


_MOST_STEPS = 10**12
# As far ahead as backfill looks unless a site says otherwise (bf_window): it finds no longer hole.
_LONGEST_HOLE_S = 86400.0
_SIZES = ("data-worker-mem", "gpu-data-worker-mem", "checkpoint-size", "checkpoint-shared")
# What of an embedding server's memory is not for rows: Python with its libraries, and messages on their way.
EMBEDDING_SERVER_BASE_MB = 256
_NUMBERS = (
    "data-worker-threads", "data-worker-cooldown", "trainer-cpus", "checkpoint-replicas", "total-steps", "total-epochs",
    "gpu-data-worker-cpus",
)  # fmt: skip


@dataclass(frozen=True)
class JobSpec:
    """The wish of one script; each attribute is the option of the same name.

    Attributes:
        data_workers_min: data workers in component 1, started together with the trainer. 0: no component 1.
        data_workers_max: data workers in all; those above the minimum are companion jobs.
        data_worker_cpus: CPUs of one data worker.
        data_worker_smallest_cpus: CPUs of the smallest companion that is tried; None for `data_worker_cpus`.
        data_worker_cooldown: seconds from one change of the number of companions to the next at the least, or None.
        data_worker_time_min: least time of a companion as Slurm writes times, or None for the job's.
        data_worker_partition: Slurm partition, or None for the cluster's default.
        data_worker_mem: memory of one data worker as Slurm writes sizes, or None.
        data_worker_constraint: node features, or None.
        data_worker_account: account, or None for the job's.
        data_worker_qos: QOS, or None for the job's.
        data_worker_reservation: reservation, `none` for none, or None for the job's.
        trainer_cpus: CPUs of one trainer task, or None for 2 per GPU.
        checkpoint: checkpoint directory as written, or None for a job without checkpoint writers.
        checkpoint_size: what one trainer task saves, as Slurm writes sizes.
        checkpoint_shared: what of it is equal on all ranks, as Slurm writes sizes, or None for nothing.
        checkpoint_replicas: other hosts that keep what one trainer task saves, 0 or 1.
        data_worker_threads: threads of each process of a data worker, which has so many times fewer of them than CPUs.
        total_steps: steps of the training loop in all, or None where not known.
        total_epochs: the same in epochs.
        offload: what of a model's forward may run in data workers; None leaves it to the environment.
        cache: where fronts of samples are kept, for `checked_cache`; None leaves it to the environment.
        stream_in_process_loaders: whether DataLoaders with `num_workers=0` are streamed, too.
        jobs_dir: holds the job's directory, or None for `.hetstream` where sbatch is called.
        journal_dir: holds the dispatcher's journal, or None for the job's directory.
        on_memory_warning: `warn` or `migrate`, or None for `warn`.
        gpu_data_workers_min, gpu_data_workers_max: data workers with a GPU, all of them companion jobs.
        gpu_data_worker_gres: the GPU of each, as Slurm writes generic resources.
        gpu_data_worker_cpus: CPUs of each.
        gpu_data_worker_mem: memory of each as Slurm writes sizes, or None.
        gpu_data_worker_partition: Slurm partition, or None for the trainer's.
        embedding_servers_min: embedding servers in a component of their own, started together with the trainer.
        embedding_servers_max: in all; those above the minimum are companion jobs.
        embedding_server_memory: of each, as Slurm writes sizes.
        embedding_server_partition: Slurm partition, or None for the data workers'.
        embedding_dir: holds what they keep on disk, or None for `hetstream-embedding` where sbatch is called.
        job_class: `guaranteed` or `opportunistic`; None: as its partition or QOS says.
        opportunistic_after: wait for quota after which it starts as an opportunistic job, as Slurm writes times.
    """

    data_workers_min: int = 0
    data_workers_max: int = 0
    data_worker_cpus: int = DEFAULT_DATA_WORKER_CPUS
    data_worker_partition: str | None = None
    data_worker_mem: str | None = None
    data_worker_constraint: str | None = None
    data_worker_account: str | None = None
    data_worker_qos: str | None = None
    trainer_cpus: int | None = None
    checkpoint: str | None = None
    checkpoint_size: str | None = None
    checkpoint_shared: str | None = None
    checkpoint_replicas: int = 0
    data_worker_threads: int = 1
    data_worker_smallest_cpus: int | None = None
    data_worker_cooldown: int | None = None
    data_worker_python: str | None = None
    data_worker_reservation: str | None = None
    total_steps: int | None = None
    total_epochs: int | None = None
    jobs_dir: str | None = None
    journal_dir: str | None = None
    data_worker_time_min: str | None = None
    on_memory_warning: str | None = None
    gpu_data_workers_min: int = 0
    gpu_data_workers_max: int = 0
    gpu_data_worker_gres: str = "gpu:1"
    gpu_data_worker_cpus: int = DEFAULT_GPU_DATA_WORKER_CPUS
    gpu_data_worker_mem: str | None = None
    gpu_data_worker_partition: str | None = None
    offload: str | None = None
    cache: str | None = None
    stream_in_process_loaders: bool = False
    job_class: str | None = None
    opportunistic_after: str | None = None
    embedding_servers_min: int = 0
    embedding_servers_max: int = 0
    embedding_server_memory: str | None = None
    embedding_server_partition: str | None = None
    embedding_dir: str | None = None

    def __post_init__(self) -> None:
        low, high = self.data_workers_min, self.data_workers_max
        is_of_class = self.job_class is not None or self.opportunistic_after is not None
        enough = 0 <= low <= high and (self.has_master or self.checkpoint is not None or is_of_class)
        problems = [] if enough else [f"--data-workers={low}-{high}: {_COUNTS_RULE}"]
        least, most = self.gpu_data_workers_min, self.gpu_data_workers_max
        if not 0 <= least <= most:
            problems.append(f"--gpu-data-workers={least}-{most}: {_COUNTS_RULE}")
        elif most and not high:
            problems.append(f"--gpu-data-workers={least}-{most}: only with --data-workers, which make their batches")
        problems += self._problems_of_embedding_servers()
        if (self.checkpoint is None) != (self.checkpoint_size is None):
            problems.append(_CHECKPOINT_RULE)
        if self.checkpoint_replicas and self.checkpoint is None:
            problems.append(f"--checkpoint-replicas={self.checkpoint_replicas}: only with --checkpoint=DIR")
        size_mb, shared_mb = megabytes(self.checkpoint_size or ""), megabytes(self.checkpoint_shared or "")
        if self.checkpoint_shared is not None and self.checkpoint is None:
            problems.append(f"--checkpoint-shared={self.checkpoint_shared}: only with --checkpoint=DIR")
        elif size_mb and shared_mb and shared_mb > size_mb:
            problems.append(
                f"--checkpoint-shared={self.checkpoint_shared}: at most --checkpoint-size={self.checkpoint_size}, of "
                "which it is a part"
            )
        cpus, threads = self.data_worker_cpus, self.data_worker_threads
        if cpus > 0 and threads > 0 and cpus % threads:
            problems.append(f"--data-worker-threads={threads}: must divide --data-worker-cpus={cpus}")
        smallest = self.data_worker_smallest_cpus
        if smallest is not None and (not 1 <= smallest <= cpus or (threads > 0 and smallest % threads)):
            problems.append(
                f"--data-worker-cpus={smallest}-{cpus}: MIN is at least 1, at most N, and a multiple of "
                "--data-worker-threads"
            )
        if self.data_worker_time_min is not None and low == high:
            problems.append(
                f"--data-worker-time-min={self.data_worker_time_min}: only data workers that join later run in holes. "
                f"Use --data-workers={low}-MAX with a MAX above {low}"
            )
        if self.on_memory_warning == "migrate" and (self.checkpoint is None or low == high):
            problems.append(
                "--on-memory-warning=migrate: only with --checkpoint=DIR, from which the new job goes on, and with "
                "--data-workers=MIN-MAX, as the memory of other jobs is not watched"
            )
        if self.job_class == OPPORTUNISTIC and self.opportunistic_after is not None:
            problems.append(
                f"--opportunistic-after={self.opportunistic_after}: only for a guaranteed job; --job-class="
                f"{OPPORTUNISTIC} starts as one at once"
            )
        if self.job_class == OPPORTUNISTIC and low:
            problems.append(
                f"--data-workers={low}-{high}: an opportunistic job starts when the site finds a GPU for it, and no "
                f"component of a heterogeneous job can: use --data-workers=0-{high}"
            )
        for option in OPTIONS:
            value = getattr(self, option.replace("-", "_"), None)
            rule = None if value is None else _broken_rule(option, value)
            if rule:
                problems.append(f"--{option}={value!r}: {rule}")
        if problems:
            raise DirectiveError("; ".join(problems))

    def _problems_of_embedding_servers(self) -> list[str]:
        low, high = self.embedding_servers_min, self.embedding_servers_max
        if high:
            from hetstream.mpi_dataworkers.wire.messages import EMBEDDING_PARTS  # few jobs need what it loads

            problems = [] if self.embedding_server_memory else [_EMBEDDING_RULE]
            if self.job_class == OPPORTUNISTIC:
                problems.append(
                    f"--embedding-servers={low}-{high}: an opportunistic job starts when the site finds a GPU for it, "
                    "and no component of a heterogeneous job can"
                )
            if not 1 <= low <= high <= EMBEDDING_PARTS:
                problems.append(
                    f"--embedding-servers={low}-{high}: MIN is at least 1, as trainers wait for them, and MAX is not "
                    f"below MIN and at most {EMBEDDING_PARTS}, the parts of a table"
                )
            return problems
        others = ("embedding-server-memory", "embedding-server-partition", "embedding-dir")
        given = [name for name in others if getattr(self, name.replace("-", "_")) is not None]
        return [f"--{name}: only with --embedding-servers=MIN[-MAX]" for name in given]

    @property
    def has_components(self) -> bool:
        """Whether the job becomes a heterogeneous one."""
        return self.data_workers_min > 0 or self.embedding_servers_min > 0

    @property
    def has_master(self) -> bool:
        """Whether the job has a job master: whether anything runs for it beside its trainers."""
        return self.data_workers_max > 0 or self.embedding_servers_max > 0

    @property
    def companions(self) -> int:
        """How many data workers may join as companion jobs."""
        return self.data_workers_max - self.data_workers_min


def _broken_rule(option: str, value: int | str) -> str | None:
    """The rule that one option's value breaks, in words; --data-workers has two values and its own rule."""
    if isinstance(value, bool):
        return None
    if option == "checkpoint-replicas":
        return None if value in (0, 1) else "0 or 1, as one other host keeps each generation"
    if isinstance(value, int):
        if option == "data-worker-threads" and value > MAX_THREADS:
            return f"at most {MAX_THREADS}"
        if option in ("total-steps", "total-epochs") and value > _MOST_STEPS:
            return f"at most {_MOST_STEPS}"
        return None if value >= 1 else "at least 1"
    if option == "gpu-data-worker-gres":
        is_one = re.fullmatch(r"(gres/)?gpu(:[\w.-]*[A-Za-z_.-][\w.-]*)?(:1)?", value, re.ASCII)
        return (
            None if is_one else "one GPU, such as gpu:1 or gpu:a100:1: one data worker uses one, and more come for more"
        )
    if option == "embedding-server-memory" and not (megabytes(value) or 0) > EMBEDDING_SERVER_BASE_MB:
        return f"a size such as 64G, above {EMBEDDING_SERVER_BASE_MB}M"
    if option in _SIZES:
        return None if megabytes(value) else "a size such as 16G or 8000M"
    if option == "data-worker-time-min":
        is_hole = 0 < (time_limit_s(value) or 0.0) <= _LONGEST_HOLE_S
        return None if is_hole else "a time above 0, such as 2:00 (minutes and seconds) or 1:30:00, and at most a day"
    if option == "job-class":
        return None if value in (GUARANTEED, OPPORTUNISTIC) else f"{GUARANTEED} or {OPPORTUNISTIC}"
    if option == "opportunistic-after":
        return None if time_limit_s(value) else "a time above 0 such as 30:00 (minutes and seconds) or 2:00:00"
    if option == "on-memory-warning":
        return None if value in ("warn", "migrate") else "warn or migrate"
    if option == "data-worker-python":
        return _broken_command(value)
    if option == "offload":
        return None if value in OFFLOADS else f"one of {', '.join(OFFLOADS)}"
    if option == "cache":
        return _broken_cache(value)
    if option in ("jobs-dir", "journal-dir"):
        return None if is_directory_pattern(value) else RULE
    return None if value and all(ord(char) >= 32 for char in value) else "a name, not empty and on one line"


def _broken_cache(text: str) -> str | None:
    try:
        checked_cache(text)
    except ConfigError:
        return "memory:SIZE (memory:8G), or an absolute directory on the nodes' own disk with or without :SIZE, or off"
    return None


def _broken_command(text: str) -> str | None:
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        return f"{error}; quote it as a shell does"
    fits = bool(arguments) and all(ord(char) >= 32 for char in text)
    return None if fits else "a path or a command, not empty and on one line"


def parse_value(name: str, text: str | None) -> dict[str, Any]:
    """Turn one option's text into the JobSpec fields that it sets.

    Args:
        name: of the option.
        text: its value; None where it was given none.

    Raises:
        ValueError: the text breaks the option's form; the message is the rule.
    """
    if (text is None) == (name in WITH_VALUE):
        raise ValueError(f"needs a value: {written(name)}" if text is None else "takes no value")
    if text is None:
        return {name.replace("-", "_"): True}
    if name in ("data-workers", "gpu-data-workers", "embedding-servers"):
        counts = _AUTO_COUNTS if (name, text) == ("data-workers", AUTO) else text
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", counts, re.ASCII)
        if not match:
            raise ValueError(
                f"write MIN or MIN-MAX, such as 4, 2-8 or 0-8{', or auto' if name == 'data-workers' else ''}"
            )
        low, high = int(match[1]), int(match[2] or match[1])
        if not low <= high > 0:
            raise ValueError(_COUNTS_RULE)
        field = name.replace("-", "_")
        return {f"{field}_min": low, f"{field}_max": high}
    if name == "data-worker-cpus":
        match = re.fullmatch(r"(?:(\d+)-)?(\d+)", text, re.ASCII)
        if not match:
            raise ValueError("write a whole number, or MIN-N")
        if match[1] is not None and not 1 <= int(match[1]) <= int(match[2]):
            raise ValueError("MIN is at least 1 and at most N")
        if int(match[2]) < 1:
            raise ValueError("at least 1")
        return {"data_worker_cpus": int(match[2]), "data_worker_smallest_cpus": int(match[1]) if match[1] else None}
    value: int | str = text
    if name in _NUMBERS:
        if not (text.isascii() and text.isdigit()):
            raise ValueError("write a whole number")
        value = int(text)
    rule = _broken_rule(name, value)
    if rule:
        raise ValueError(rule)
    return {name.replace("-", "_"): value}


# Options that say something of a job without data workers, too.
_WITHOUT_WORKERS = (
    *("jobs-dir", "job-class", "opportunistic-after"),
    *(name for name in OPTIONS if name.startswith(("checkpoint", "embedding"))),
)


def read_spec(directives: Sequence[Directive], name: str, counts_from_history: bool = False) -> JobSpec | None:
    """Put the directives together; of two with one name the later wins, so append the command line's.

    Args:
        directives: of the script first, of the command line last.
        name: the script's name, for messages.
        counts_from_history: whether past jobs were to say how many data workers, where nobody else does.

    Returns:
        None when there is no directive at all: the script is not ours.

    Raises:
        DirectiveError: unknown options and wrong values, all of them at once.
        DataWorkersMissing: past jobs have not said how many, and nothing else is wrong.
    """
    if not directives:
        return None
    problems: list[str] = []
    fields: dict[str, Any] = {}
    for directive in directives:
        place = f"{directive.origin}: --{directive.name}"
        if directive.name not in OPTIONS:
            close = get_close_matches(directive.name, OPTIONS, n=1)
            problems.append(
                f"{place} is unknown (did you mean --{close[0]}?)"
                if close
                else f"{place} is unknown; valid are {', '.join(f'--{known}' for known in OPTIONS)}"
            )
        else:
            try:
                fields |= parse_value(directive.name, directive.value)
            except ValueError as error:
                value = directive.value or ""
                given = "" if directive.value is None else f"={value if value.isprintable() else repr(value)}:"
                problems.append(f"{place}{given} {error}")
    names = {directive.name for directive in directives}
    needs_data_workers = names - {*_WITHOUT_WORKERS}
    # An unknown option may be this one misspelt.
    is_missing = names <= OPTIONS.keys() and bool(needs_data_workers) and "data-workers" not in names
    if is_missing and not counts_from_history:
        fields |= parse_value("data-workers", AUTO)
        is_missing = False
    kind = DataWorkersMissing if is_missing and not problems else DirectiveError
    if is_missing:
        problems.append(f"{directives[0].origin}: --data-workers=MIN[-MAX] is missing; it says how many data workers")
    if problems:
        raise kind(f"{name} {'; '.join(problems)}")
    try:
        return JobSpec(**fields)
    except DirectiveError as exc:
        raise DirectiveError(f"{name}: {exc}") from exc


# What the options of a script ask for, in numbers: GPUs and tasks. Pure; called by the conversion.


def gpus_per_task(options: SbatchOptions) -> Fraction:
    """GPUs of one trainer task, from whatever form the script uses; 0 when it asks for none."""
    per_task = count(options.value("gpus-per-task")) or _gres_gpus(options.value("tres-per-task"))
    if per_task:
        return Fraction(per_task)
    nodes = _first_number(options.value("nodes")) or 1
    per_node = count(options.value("gpus-per-node")) or _gres_gpus(options.value("gres"))
    per_socket = count(options.value("gpus-per-socket")) or 0
    per_node = per_node or per_socket * (options.number("sockets-per-node") or 1)
    total = count(options.value("gpus")) or per_node * nodes
    per_gpu = options.number("ntasks-per-gpu")
    if per_gpu and total:
        return Fraction(1, per_gpu)
    tasks = options.number("ntasks") or nodes * (options.number("ntasks-per-node") or 1)
    return Fraction(total, tasks)


def asks_for_gpus(options: SbatchOptions) -> bool:
    """Return whether a script asks for GPUs, or for shares of some, in any form."""
    if options.has("gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket"):
        return True
    resources = f"{options.value('gres') or ''},{options.value('tres-per-task') or ''}".split(",")
    kinds = (re.split(r"[:=]", re.sub(r"^gres[/:]", "", resource.strip()))[0] for resource in resources)
    return any(kind in ("gpu", "shard", "mps") for kind in kinds)


def tasks_per_node(options: SbatchOptions) -> int:
    """Trainer tasks on the fullest node, from whatever form the script uses; at least 1."""
    if options.number("ntasks-per-node"):
        return options.number("ntasks-per-node") or 1
    nodes = _first_number(options.value("nodes")) or 1
    tasks = options.number("ntasks")
    per_gpu = options.number("ntasks-per-gpu")
    if tasks is None and per_gpu:
        per_node = count(options.value("gpus-per-node")) or _gres_gpus(options.value("gres"))
        total = count(options.value("gpus")) or per_node * nodes
        tasks = max(1, total * per_gpu)
    return math.ceil((tasks or 1) / nodes) if tasks else 1


def tasks_and_nodes(options: SbatchOptions) -> tuple[int, int | None]:
    """Trainer tasks in all, and nodes; None where the request leaves their number open."""
    given = options.number("nodes")
    nodes = given or _first_number(options.value("nodes")) or 1
    tasks = options.number("ntasks") or nodes * tasks_per_node(options)
    if given is None and (options.has("nodes") or tasks > 1):
        return tasks, None
    return tasks, nodes


def count(text: str | None) -> int | None:
    """Return the number in `2`, `h200:2` or `2(S:0)`; `h200` alone is one. None for other forms."""
    if not text:
        return None
    last = (text.partition("(")[0] if text.endswith(")") else text).split(":")[-1]
    return int(last) if last.isascii() and last.isdigit() else (1 if re.fullmatch(r"[A-Za-z][\w.-]*", last) else None)


def _gres_gpus(text: str | None) -> int:
    """GPUs per node in a --gres list (`gpu:2`, `gres/gpu:h200:4,shard:1`, since 23.02 also `gpu=2`)."""
    total = 0
    for part in (text or "").split(","):
        resource = part.strip().removeprefix("gres/").removeprefix("gres:").replace("=", ":")
        if resource == "gpu" or resource.startswith("gpu:"):
            total += (count(resource.removeprefix("gpu").removeprefix(":")) or 1) if resource != "gpu" else 1
    return total


def _first_number(text: str | None) -> int | None:
    """The minimum in sbatch's node counts: `2`, `2-4`."""
    match = re.match(r"\d+", text or "", re.ASCII)
    return int(match[0]) if match and int(match[0]) > 0 else None
