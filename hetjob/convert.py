"""Decide what a script becomes: JobSpec + sbatch options -> HetPlan, or the Slurm limit that forbids it.

Called by the command line. Pure: it never reads a file, never asks Slurm, and leaves writing to `render.py`.

The limits are Slurm's (https://slurm.schedmd.com/heterogeneous_jobs.html, "Limitations"), each a named error:

    ConversionError
    ├── JobArrayNotSupported       Slurm has no arrays of heterogeneous jobs
    ├── AlreadyHeterogeneous       the script or the command line already has components
    ├── BurstBufferNotShared       a job's burst buffer belongs to one component
    ├── CheckpointNotShared        the tasks of a job array would write one checkpoint directory
    ├── MissingPartition           no partition for the data workers, or one that does not exist
    ├── NoSuchNode             no node of the partition could hold one data worker
    ├── TimeMinTooLong             data workers for holes that are longer than they may run
    ├── NeedsBackfill              heterogeneous jobs start only through sched/backfill
    ├── NotAShellScript            the job master is started by shell lines
    ├── ClassNotPossible           a job's class contradicts the rest of the request (`convert_class.py`)
    └── WrappedCommand             --wrap leaves no script to convert

Licences are Slurm's one more limit (first component only). Conversion keeps the user's there, so it needs no error.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Sequence

from hetstream.base.errors import UsageError
from hetstream.base.text import shortened
from hetstream.hetjob.convert_checkpoint import checkpoint_overrides
from hetstream.hetjob.convert_class import class_overrides
from hetstream.hetjob.convert_gpu_stage import gpu_companion_options, gpu_stage_changes
from hetstream.hetjob.convert_trainer import trainer_overrides
from hetstream.hetjob.directives import is_own, prologue_length, split_line
from hetstream.hetjob.errors import ConversionError
from hetstream.hetjob.plan import Change, Component, HetPlan
from hetstream.hetjob.ports import UNKNOWN_CLUSTER, Cluster, PartitionLimits
from hetstream.hetjob.sbatch_options import (
    OF_ONE_COMPONENT,
    SbatchOption,
    SbatchOptions,
    megabytes,
    memory_words,
    parse_words,
    plain_words,
    refuse_line_breaks,
    time_limit_s,
    words_of,
)
from hetstream.hetjob.spec import NO_RESERVATION, JobSpec

_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh")
# One process per CPU: Python with its libraries, the dataset, and a few finished batches of large images.
_DATA_WORKER_MB_PER_CPU = 2048
# Where Slurm wants memory per node, data workers are packed onto nodes in groups of at most this many CPUs: any CPU
# node has that many, and no group asks for more memory than such a node carries.
_CPUS_PER_GROUP = 16


class JobArrayNotSupported(ConversionError):
    """`--array` with a data-worker component."""


class AlreadyHeterogeneous(ConversionError):
    """`#SBATCH hetjob` in the script, or `:` on the command line."""


class BurstBufferNotShared(ConversionError):
    """A burst buffer that the data workers' component could not read."""


class CheckpointNotShared(ConversionError):
    """`--array` with one checkpoint directory."""


class MissingPartition(ConversionError):
    """No partition for the data workers."""


class NoSuchNode(ConversionError):
    """A data worker that is larger than every node of its partition: the job would wait for ever."""


class TimeMinTooLong(ConversionError):
    """A least time of data workers above the time that they may have."""


class NeedsBackfill(ConversionError):
    """The cluster's scheduler never starts heterogeneous jobs, and looks for no holes."""


class NotAShellScript(ConversionError):
    """The script's interpreter is not a POSIX shell."""


class WrappedCommand(ConversionError):
    """`--wrap` instead of a script."""


def script_options(script: str, name: str) -> list[SbatchOption]:
    """The `#SBATCH` options of a script, as sbatch finds them.

    Raises:
        AlreadyHeterogeneous: a `#SBATCH hetjob` line.
        UsageError: a line that sbatch could not read either.
    """
    lines = script.split("\n")
    options: list[SbatchOption] = []
    for number, line in enumerate(lines[: prologue_length(lines)], start=1):
        if not line.startswith("#SBATCH"):
            continue
        text = line.removeprefix("#SBATCH")
        if re.match(r"\s*(hetjob|packjob)(\s|$)", text, re.IGNORECASE):
            raise AlreadyHeterogeneous(
                f"{name} line {number}: {line.strip()!r} starts a component, but hetstream adds the data workers as "
                "component 1 itself. Remove the components, or remove the #HETSTREAM lines to submit it as it is"
            )
        try:
            arguments = split_line(text)
        except ValueError as error:
            shown = shortened(repr(line.strip()), 200)
            raise UsageError(
                f"{name} line {number}: {error} in {shown}. Close the quote, or shorten the line"
            ) from error
        found, others = parse_words(arguments, f"line {number}")
        if others:
            raise UsageError(f"{name} line {number}: {others[0]!r} is not an sbatch option. Remove it, or write --NAME")
        options += found
    return options


def convert(
    spec: JobSpec,
    script: str,
    name: str,
    *,
    command_line: Sequence[SbatchOption] = (),
    cluster: Cluster = UNKNOWN_CLUSTER,
) -> HetPlan:
    """Convert one script.

    Args:
        spec: what the directives ask for.
        script: the whole text of the script.
        name: its name, for messages.
        command_line: sbatch options from the environment and the command line, in sbatch's order; they win over the
            script's. hetstream's own options among them are dropped from the result.
        cluster: what is known of the cluster.

    Raises:
        ConversionError: one of the limits above.
        UsageError: an `#SBATCH` line that sbatch could not read either, or an option with a line break in it.
    """
    outside = [option for option in command_line if not is_own(option.name)]
    options = SbatchOptions((*script_options(script, name), *outside))
    refuse_line_breaks(options.items)
    _check_limits(spec, script, name, options)
    overrides: list[SbatchOption] = []
    changes: list[Change] = []
    components: list[Component] = []
    master_options: tuple[str, ...] | None = None
    writer_options: tuple[str, ...] | None = None
    if spec.data_workers_max:
        partition = _partition(spec, name, cluster)
        overrides, changes = trainer_overrides(spec, script, options, _max_mb_per_cpu(options, cluster))
        worker = _worker_options(spec, partition)
        worker_mb = _worker_mb(spec, options)
        _check_size(spec, worker_mb, partition, cluster, name)
        components, added = _data_workers(spec, options, worker, partition, cluster)
        changes += [*added, *gpu_stage_changes(spec)]
        longest_s = _longest_s(spec, options, partition, cluster, name)
        worker = [*worker, *_memory_per_cpu(spec, worker_mb)]
        gpu_worker = gpu_companion_options(spec, options, cluster.default_partition)
        master_options = tuple(_master_options(spec, worker, gpu_worker, options, longest_s))
    if spec.checkpoint is not None:
        more, added = checkpoint_overrides(spec, SbatchOptions((*options.items, *overrides)))
        # Of two with one name the checkpoint's is the last word: it was made from the other.
        replaced = {option.name for option in more}
        overrides = [*(option for option in overrides if option.name not in replaced), *more]
        changes += added
        writer_options = _writer_options(spec)
    more, added = class_overrides(spec, options, cluster.opportunistic, name)
    overrides, changes = [*overrides, *more], [*changes, *added]
    trainer, sbatch_options = _of_component_and_job(spec, outside, overrides)
    return HetPlan(
        components=(Component(0, "trainer", trainer), *components),
        changes=tuple(changes),
        master_options=master_options,
        writer_options=writer_options,
        sbatch_options=sbatch_options,
    )


def _of_component_and_job(
    spec: JobSpec, outside: Sequence[SbatchOption], overrides: Sequence[SbatchOption]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words for the trainer's component, and those of the command line that stay the whole job's."""
    overridden = {option.name for option in overrides}
    own = _of_trainer(spec)
    of_trainer = [option for option in outside if option.name in own - overridden]
    of_job = [option for option in outside if option.name not in own]
    names = {option.name for option in of_job}
    return (
        (*plain_words(of_trainer), *words_of(overrides)),
        (*plain_words(of_job), *words_of(item for item in overrides if item.name in names)),
    )


def _partition(spec: JobSpec, name: str, cluster: Cluster) -> str:
    """Where the data workers are to run."""
    partition = spec.data_worker_partition or cluster.default_partition
    if partition is None:
        raise MissingPartition(
            f"{name}: no directive names the data workers' partition and the cluster's default is not known here. "
            "Add --data-worker-partition=NAME; see the names with: sinfo -s"
        )
    return partition


def check_cluster(spec: JobSpec, cluster: Cluster) -> None:
    """Compare a wish with the cluster it is going to.

    Raises:
        MissingPartition: the partition does not exist.
        NeedsBackfill: the scheduler never starts heterogeneous jobs, or never looks for holes.
    """
    wanted = (spec.data_worker_partition or "").split(",")
    missing = [name for name in wanted if name and cluster.partitions and name not in cluster.partitions]
    if missing:
        raise MissingPartition(
            f"--data-worker-partition={spec.data_worker_partition}: partition {missing[0]!r} does not exist. "
            f"This cluster has {', '.join(sorted(cluster.partitions))}. Check: sinfo -s"
        )
    if spec.data_workers_min and cluster.scheduler not in (None, "sched/backfill"):
        raise NeedsBackfill(
            f"this cluster runs SchedulerType={cluster.scheduler}, and Slurm starts heterogeneous jobs only through "
            f"sched/backfill. Use --data-workers=0-{spec.data_workers_max}: companion jobs start under any scheduler"
        )
    if spec.data_worker_time_min is not None and cluster.scheduler not in (None, "sched/backfill"):
        raise NeedsBackfill(
            f"--data-worker-time-min={spec.data_worker_time_min}: this cluster runs SchedulerType={cluster.scheduler}, "
            "and only sched/backfill starts jobs in holes. Remove the option: companion jobs start under any scheduler"
        )


def _data_workers(
    spec: JobSpec, options: SbatchOptions, worker: Sequence[str], partition: str, cluster: Cluster
) -> tuple[list[Component], list[Change]]:
    """Component 1, if there is one, and what is said about the data workers."""
    components: list[Component] = []
    changes: list[Change] = []
    if spec.data_workers_min:
        largest = max(
            (node.cpus for limit in _limits_of(partition, cluster) for node in limit.nodes), default=_CPUS_PER_GROUP
        )
        per_group = min(_CPUS_PER_GROUP, largest)
        memory = _component_memory(spec, _worker_mb(spec, options), per_group if options.has("mem") else None)
        arguments = (*worker, f"--ntasks={spec.data_workers_min}", *memory)
        components.append(Component(1, "data_workers", arguments))
        changes.append(
            Change(
                f"component 1 added: {spec.data_workers_min} data worker(s) of {spec.data_worker_cpus} CPUs in "
                f"partition {partition}",
                f"--data-workers={spec.data_workers_min}: they read, transform and batch; they start with the trainer",
            )
        )
    if spec.companions:
        when = f" in backfill holes of {spec.data_worker_time_min} or more" if spec.data_worker_time_min else ""
        changes.append(
            Change(
                f"up to {spec.companions} companion job(s), one data worker each{when}, submitted while the trainer "
                "waits for data",
                "the job master measures how many pay, lets those go that do not, and cancels them at the end",
            )
        )
    if spec.on_memory_warning == "migrate":
        changes.append(
            Change(
                "a trainer that is about to run out of memory moves, once, to a job with more",
                "--on-memory-warning=migrate: as by `hetstream migrate`, which goes on from the very step",
            )
        )
    changes.append(
        Change(
            "a line before the first command starts the job master",
            "it runs the dispatcher and the data workers, and points the program's DataLoader at them",
        )
    )
    return components, changes


def _check_limits(spec: JobSpec, script: str, name: str, options: SbatchOptions) -> None:
    lines = script.split("\n")
    if options.has("wrap"):
        raise WrappedCommand(f"{name}: --wrap leaves no script to convert. Put the command into a script file")
    interpreter = _interpreter(lines[0])
    if interpreter and interpreter not in _SHELLS:
        raise NotAShellScript(
            f"{name} line 1: interpreter {interpreter!r} is not a shell, and the job master is started by shell lines. "
            f"Call the program from a script that starts with #!/bin/bash"
        )
    array = options.last("array")
    if array and spec.data_workers_min:
        raise JobArrayNotSupported(
            f"{name} {array.origin}: --array={array.value} is not supported with a heterogeneous job (Slurm limit). "
            f"Remove --array, or use --data-workers=0-{spec.data_workers_max}: companion jobs work with arrays"
        )
    if array and spec.checkpoint:
        raise CheckpointNotShared(
            f"{name} {array.origin}: all tasks of --array={array.value} would write to one checkpoint directory. "
            "Remove --array, or --checkpoint and name a directory for each task in the program"
        )
    buffered = options.last("bb") or options.last("bbf")
    buffer_line = next(
        (number for number, line in enumerate(lines[: prologue_length(lines)], 1) if re.match(r"#(BB|DW)\s", line)), 0
    )
    if (buffered or buffer_line) and spec.data_workers_max:
        raise BurstBufferNotShared(
            f"{name} {buffered.origin if buffered else f'line {buffer_line}'}: a job's burst buffer belongs to one "
            "component, so data workers could not read it (Slurm limit). Read from the shared file system instead"
        )


def _interpreter(first_line: str) -> str | None:
    """The base name of the `#!` program, looking through `env`; None without a `#!` line (sbatch judges that)."""
    if not first_line.startswith("#!"):
        return None
    names = [word.rsplit("/", 1)[-1] for word in first_line[2:].split()]
    if names and names[0] == "env":
        names = [word for word in names[1:] if not word.startswith("-") and "=" not in word]
    return names[0] if names else None


def _limits_of(partitions: str, cluster: Cluster) -> list[PartitionLimits]:
    """What is known of the partitions of a list; empty where something is not."""
    found = [cluster.limits.get(name) for name in partitions.split(",")]
    return [limits for limits in found if limits is not None] if all(found) else []


def _max_mb_per_cpu(options: SbatchOptions, cluster: Cluster) -> float | None:
    """The most memory for each CPU where the trainer runs; of several partitions the smallest limit."""
    limits = _limits_of(options.value("partition") or cluster.default_partition or "", cluster)
    return min((limit.max_mb_per_cpu for limit in limits if limit.max_mb_per_cpu), default=None)


def _check_size(spec: JobSpec, worker_mb: float | None, partition: str, cluster: Cluster, name: str) -> None:
    """Refuse data workers that no node, or not all nodes together, could hold; features are left to Slurm."""
    limits = _limits_of(partition, cluster)
    nodes = [node for limit in limits for node in limit.nodes]
    room = sum(node.holds(spec.data_worker_cpus, worker_mb or 0.0) for node in nodes)
    if not nodes or room >= max(1, spec.data_workers_min):
        return
    asked = f"{spec.data_worker_cpus} CPUs" + (f" and {memory_words(worker_mb)}" if worker_mb else "")
    largest = max(nodes, key=lambda node: (node.cpus, node.memory_mb))
    what = (
        f"{spec.data_workers_min} data workers of {asked} do not fit into partition {partition}: it holds {room}"
        if room
        else f"a data worker of {asked} fits no node of partition {partition}: the largest has {largest.cpus} CPUs and "
        f"{memory_words(largest.memory_mb)}"
    )
    raise NoSuchNode(
        f"{name}: {what}, and the job would wait for ever. Use fewer or smaller ones (--data-workers, "
        "--data-worker-cpus, --data-worker-mem), or another --data-worker-partition; see: sinfo -e -o '%P %c %m %D'"
    )


def _longest_s(
    spec: JobSpec, options: SbatchOptions, partitions: str, cluster: Cluster, name: str
) -> float | None:  # fmt: skip
    """How long a companion in a hole may run at the most; None where nothing limits it.

    Raises:
        TimeMinTooLong: that is less than the least time that it asks for.
    """
    if spec.data_worker_time_min is None:
        return None
    least_s = time_limit_s(spec.data_worker_time_min) or 0.0
    script_s = time_limit_s(options.value("time") or "")
    limits = {f"--time={options.value('time')} of the job": script_s} if script_s else {}
    for partition, limit in zip(partitions.split(","), _limits_of(partitions, cluster), strict=False):
        if limit.max_time_s:
            limits[f"MaxTime of {limit.max_time_s / 60:g} minutes of partition {partition}"] = limit.max_time_s
    for what, limit_s in limits.items():
        if limit_s < least_s:
            raise TimeMinTooLong(
                f"{name}: --data-worker-time-min={spec.data_worker_time_min} is above {what}, so no data worker could "
                "run. Use a shorter one; 2:00 is enough"
            )
    return min(limits.values(), default=None)


def _of_trainer(spec: JobSpec) -> frozenset[str]:
    """Options that, said outside the script, are the trainer's alone: sbatch would give them to all components."""
    given = {name for name in ("account", "qos", "reservation") if getattr(spec, f"data_worker_{name}") is not None}
    return OF_ONE_COMPONENT | given


def _worker_options(spec: JobSpec, partition: str) -> list[str]:
    """sbatch options that every data worker needs, in component 1 and as a companion."""
    arguments = [f"--partition={partition}", f"--cpus-per-task={spec.data_worker_cpus}"]
    for option_name in ("constraint", "account", "qos"):
        value = getattr(spec, f"data_worker_{option_name}")
        if value is not None:
            arguments.append(f"--{option_name}={value}")
    if spec.data_worker_reservation is not None:
        # Empty is Slurm's word for none: a later component has the first one's otherwise.
        name = spec.data_worker_reservation
        arguments.append(f"--reservation={'' if name == NO_RESERVATION else name}")
    return arguments


def _worker_mb(spec: JobSpec, options: SbatchOptions) -> float | None:
    """Memory of one data worker in MB; None leaves it to the partition, as the script leaves its own."""
    if spec.data_worker_mem:
        return megabytes(spec.data_worker_mem)
    if options.has("mem", "mem-per-cpu", "mem-per-gpu"):
        return float(_DATA_WORKER_MB_PER_CPU * spec.data_worker_cpus)
    return None


def _memory_per_cpu(spec: JobSpec, worker_mb: float | None) -> list[str]:
    return [f"--mem-per-cpu={memory_words(worker_mb / spec.data_worker_cpus)}"] if worker_mb else []


def _component_memory(spec: JobSpec, worker_mb: float | None, cpus_per_group: int | None) -> list[str]:
    """Memory options of component 1; per node, in groups of so many CPUs, or per CPU (None).

    Slurm copies `--mem` (per node) from component 0 to later ones and refuses `--mem-per-cpu` beside it ("mutually
    exclusive"). A script with `--mem` therefore needs a size per node, and with it a known number of tasks per node.
    """
    if cpus_per_group is None or worker_mb is None:
        return _memory_per_cpu(spec, worker_mb)
    num_in_group = max(1, cpus_per_group // spec.data_worker_cpus)
    nodes = math.ceil(spec.data_workers_min / num_in_group)
    per_group = math.ceil(spec.data_workers_min / nodes)
    return [f"--ntasks-per-node={per_group}", f"--mem={memory_words(worker_mb * per_group)}"]


def _writer_options(spec: JobSpec) -> tuple[str, ...]:
    place = (f"--jobs-dir={spec.jobs_dir}",) if spec.jobs_dir else ()
    return (f"--checkpoint={spec.checkpoint}", *place)


def _master_options(
    spec: JobSpec,
    worker: Sequence[str],
    gpu_worker: Sequence[str],
    options: SbatchOptions,
    longest_s: float | None,
) -> list[str]:
    arguments = [f"--data-workers={spec.data_workers_min}", f"--data-worker-cpus={spec.data_worker_cpus}"]
    if spec.data_worker_python is not None:
        arguments.append(f"--data-worker-python={spec.data_worker_python}")
    arguments += [
        f"--{name}={value}" for name, value in (("jobs-dir", spec.jobs_dir), ("journal-dir", spec.journal_dir)) if value
    ]
    if spec.data_worker_threads > 1:
        arguments.append(f"--data-worker-threads={spec.data_worker_threads}")
    if spec.data_worker_cooldown is not None and (spec.companions or spec.gpu_data_workers_max):
        arguments.append(f"--cooldown={spec.data_worker_cooldown}")
    if spec.gpu_data_workers_max:
        arguments.append(f"--gpu-companions={spec.gpu_data_workers_min}-{spec.gpu_data_workers_max}")
        arguments.append(f"--gpu-companion-cpus={spec.gpu_data_worker_cpus}")
        arguments.append(f"--gpu-companion-options={shlex.join(gpu_worker)}")
    if spec.offload is not None:
        arguments.append(f"--offload={spec.offload}")
    if spec.companions:
        arguments.append(f"--companions={spec.companions}")
        if spec.data_worker_smallest_cpus is not None:
            arguments.append(f"--smallest-cpus={spec.data_worker_smallest_cpus}")
        if spec.data_worker_time_min is not None:
            arguments.append(f"--time-min={time_limit_s(spec.data_worker_time_min):.0f}")
            arguments += [f"--longest={longest_s:.0f}"] if longest_s else []
        if spec.total_steps is not None:
            arguments.append(f"--total-steps={spec.total_steps}")
        if spec.total_epochs is not None:
            arguments.append(f"--total-epochs={spec.total_epochs}")
        if spec.on_memory_warning == "migrate":
            arguments.append("--on-memory-warning=migrate")
        # A companion is a job of its own: what Slurm copies between components has to be said here.
        inherited = [
            f"--{option_name}={options.value(option_name)}"
            for option_name in ("account", "qos", "time", "reservation", "exclude")
            if options.value(option_name) and not any(word.startswith(f"--{option_name}=") for word in worker)
        ]
        arguments += ["--", *worker, *inherited]
    return arguments
