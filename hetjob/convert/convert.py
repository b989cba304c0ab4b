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
    ├── ClassNotPossible           a job's class contradicts the rest of the request (`plan.py`)
    └── WrappedCommand             --wrap leaves no script to convert

Licences are Slurm's one more limit (first component only). Conversion keeps the user's there, so it needs no error.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hetstream.base.errors import UsageError
from hetstream.base.text import shortened
from hetstream.hetjob.convert.directives import foreign_line, is_own, option_lines, prologue_length, split_line
from hetstream.hetjob.convert.plan import (
    EMBEDDING_SERVER_CPUS,
    Change,
    Component,
    HetPlan,
    TrainerPartition,
    checkpoint_overrides,
    class_overrides,
    cpu_components,
    gpu_companion_options,
    gpu_stage_changes,
    inherited,
    memory_per_cpu,
    trainer_overrides,
    worker_megabytes,
    worker_options,
)
from hetstream.hetjob.convert.sbatch_options import (
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
from hetstream.hetjob.convert.spec import EMBEDDING_SERVER_BASE_MB, JobSpec
from hetstream.hetjob.convert.step_demand import SubmitContext
from hetstream.hetjob.errors import ConversionError
from hetstream.hetjob.ports import UNKNOWN_CLUSTER, ClusterLimits

_SHELLS = ("sh", "bash", "dash", "ash", "ksh", "mksh", "zsh")


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
    """Return the `#SBATCH` options of a script, as sbatch finds them.

    Raises:
        AlreadyHeterogeneous: a `#SBATCH hetjob` line.
        UsageError: a line that sbatch could not read either.
    """
    readings = [_options_of_lines(script, name, blank_can_be_escaped) for blank_can_be_escaped in (True, False)]
    # Releases before 24.05 read a backslash and a blank in another way: the one that leaves no word over is meant.
    options, others = next((reading for reading in readings if not reading[1]), readings[0])
    if others:
        number, word = others[0]
        raise UsageError(f"{name} {number}: {word!r} is not an sbatch option. Remove it, or write --NAME")
    return options


def _options_of_lines(
    script: str, name: str, blank_can_be_escaped: bool
) -> tuple[list[SbatchOption], list[tuple[str, str]]]:
    """The options of these lines; and the words that are no options, with their lines."""
    arguments: list[str] = []
    origins: list[str] = []
    for line in option_lines(script):
        if line.starts_component:
            raise AlreadyHeterogeneous(
                f"{name} line {line.number}: {line.line.strip()!r} starts a component, but hetstream adds the data "
                "workers as component 1 itself. Remove the components, or remove the #HETSTREAM lines to submit it as "
                "it is"
            )
        try:
            found = split_line(line.text, blank_can_be_escaped=blank_can_be_escaped)
        except ValueError as error:
            shown = shortened(repr(line.line.strip()), 200)
            raise UsageError(
                f"{name} line {line.number}: {error} in {shown}. Close the quote, or shorten the line"
            ) from error
        arguments += found
        origins += [f"line {line.number}"] * len(found)

    def is_value(index: int) -> bool:
        return not arguments[index].startswith("-")

    options, others = parse_words(arguments, origins, is_value=is_value)
    return options, list(zip(origins[len(arguments) - len(others) :], others, strict=True))


def convert(
    spec: JobSpec,
    script: str,
    name: str,
    *,
    command_line: Sequence[SbatchOption] = (),
    cluster: ClusterLimits = UNKNOWN_CLUSTER,
    surroundings: SubmitContext | None = None,
) -> HetPlan:
    """Convert one script.

    Args:
        spec: what the directives ask for.
        script: the whole text of the script.
        name: its name, for messages.
        command_line: sbatch options from the environment and the command line, in sbatch's order; they win over the
            script's. hetstream's own options among them are dropped from the result.
        cluster: what is known of the cluster.
        surroundings: of the script.

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
    if spec.has_master:
        partition = _partition(spec, name, cluster)
        foreign = None if options.has("ignore-pbs") else foreign_line(script)
        if spec.data_workers_max:
            runs_in = _trainer_partition(options, cluster)
            overrides, changes = trainer_overrides(spec, script, options, runs_in, foreign, surroundings)
        for asked in _asked(spec, options, partition):
            _check_size(asked, cluster, name)
        components, added = cpu_components(spec, options, partition, cluster, foreign)
        changes += [*added, *gpu_stage_changes(spec)]
        longest_s = _longest_s(spec, options, partition, cluster, name)
        master_options = tuple(_master_options(spec, partition, options, longest_s, cluster))
    if spec.checkpoint is not None:
        more, added = checkpoint_overrides(spec, SbatchOptions((*options.items, *overrides)))
        # Of two with one name the checkpoint's is the last word: it was made from the other.
        replaced = {option.name for option in more}
        overrides = [*(option for option in overrides if option.name not in replaced), *more]
        changes += added
    more, added = class_overrides(spec, options, cluster.opportunistic, name)
    overrides, changes = [*overrides, *more], [*changes, *added]
    trainer, sbatch_options = _of_component_and_job(components, outside, overrides)
    return HetPlan(
        components=(Component(0, "trainer", trainer), *components),
        changes=tuple(changes),
        master_options=master_options,
        writer_options=_writer_options(spec),
        sbatch_options=sbatch_options,
    )


def _of_component_and_job(
    others: Sequence[Component], outside: Sequence[SbatchOption], overrides: Sequence[SbatchOption]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The words for the trainer's component, and those of the command line that stay the whole job's."""
    # sbatch's command line wins over every component's own lines: nothing that component 1 says itself may stand there.
    said = {word.removeprefix("--").partition("=")[0] for component in others for word in component.options}
    overridden = {option.name for option in overrides}
    own = OF_ONE_COMPONENT | said
    of_trainer = [option for option in outside if option.name in own - overridden]
    of_job = [option for option in outside if option.name not in own | overridden]
    return (*plain_words(of_trainer), *words_of(overrides)), tuple(plain_words(of_job))


def _partition(spec: JobSpec, name: str, cluster: ClusterLimits) -> str:
    """Where the data workers are to run."""
    partition = spec.data_worker_partition or cluster.default_partition
    if partition is None and not spec.data_workers_max and spec.embedding_server_partition is not None:
        return spec.embedding_server_partition
    if partition is None:
        raise MissingPartition(
            f"{name}: no directive names the data workers' partition and the cluster's default is not known here. "
            "Add --data-worker-partition=NAME; see the names with: sinfo -s"
        )
    return partition


def check_cluster(spec: JobSpec, cluster: ClusterLimits) -> None:
    """Compare a wish with the cluster it is going to.

    Raises:
        MissingPartition: the partition does not exist.
        NeedsBackfill: the scheduler never starts heterogeneous jobs, or never looks for holes.
    """
    for option, wanted in (
        ("data-worker-partition", spec.data_worker_partition or ""),
        ("embedding-server-partition", spec.embedding_server_partition or ""),
    ):
        missing = [name for name in wanted.split(",") if name and cluster.partitions and name not in cluster.partitions]
        if missing:
            raise MissingPartition(
                f"--{option}={wanted}: partition {missing[0]!r} does not exist. This cluster has "
                f"{', '.join(sorted(cluster.partitions))}. Check: sinfo -s"
            )
    if spec.embedding_servers_min and cluster.scheduler not in (None, "sched/backfill"):
        raise NeedsBackfill(
            f"this cluster runs SchedulerType={cluster.scheduler}, and Slurm starts heterogeneous jobs, such as those "
            "with --embedding-servers, only through sched/backfill. Remove the option"
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
    if array and spec.embedding_servers_min:
        raise JobArrayNotSupported(
            f"{name} {array.origin}: --array={array.value} is not supported with a heterogeneous job (Slurm limit), "
            "such as one with --embedding-servers. Remove --array, and submit one job for each task"
        )
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
    if (buffered or buffer_line) and spec.has_master:
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


def _trainer_partition(options: SbatchOptions, cluster: ClusterLimits) -> TrainerPartition:
    """Of several partitions the smallest limit of memory, the largest default, and a setting that one of them has.

    And the most threads of a core: nobody knows where the job will run.
    """
    names = (options.value("partition") or cluster.default_partition or "").split(",")
    known = cluster.default_mb_per_cpu
    of_each = [cluster.limits[name] for name in names if name in cluster.limits]
    limits = [limit.max_mb_per_cpu for limit in of_each if limit.max_mb_per_cpu]
    is_whole = options.has("mem") and megabytes(options.value("mem") or "") == 0
    whole_memory = "--mem=0" if is_whole and any(limit.allocates_memory for limit in of_each) else ""
    return TrainerPartition(
        min(limits, default=None),
        None if known is None else max((known.get(name, 0) for name in names), default=0),
        next((limit.alone for limit in of_each if limit.alone), whole_memory),
        max((limit.threads_per_core for limit in of_each), default=1),
    )


@dataclass(frozen=True)
class _Asked:
    """What a component asks for.

    Attributes:
        what: runs there, in words.
        options: that say how many and how large.
        count: of them.
        cpus, memory_mb: of each; None where the partition decides.
        partition: where.
    """

    what: str
    options: str
    count: int
    cpus: int
    memory_mb: float | None
    partition: str


def _asked(spec: JobSpec, options: SbatchOptions, partition: str) -> Iterator[_Asked]:
    if spec.data_workers_max:
        of_workers = (spec.data_workers_min, spec.data_worker_cpus, worker_megabytes(spec, options))
        own = "(--data-workers, --data-worker-cpus, --data-worker-mem), or another --data-worker-partition"
        yield _Asked("data worker", own, *of_workers, partition)
    if spec.embedding_servers_max:
        of_servers = (spec.embedding_servers_min, EMBEDDING_SERVER_CPUS, megabytes(spec.embedding_server_memory or ""))
        own = "(--embedding-servers, --embedding-server-memory), or another --embedding-server-partition"
        yield _Asked("embedding server", own, *of_servers, spec.embedding_server_partition or partition)


def _check_size(asked: _Asked, cluster: ClusterLimits, name: str) -> None:
    """Refuse what no node, or not all nodes together, could hold; features are left to Slurm."""
    limits = cluster.limits_of(asked.partition)
    nodes = [node for limit in limits for node in limit.nodes]
    room = sum(node.holds(asked.cpus, asked.memory_mb or 0.0) for node in nodes)
    if not nodes or not all(limit.nodes for limit in limits) or room >= max(1, asked.count):
        return
    of_each = f"{asked.cpus} CPUs" + (f" and {memory_words(asked.memory_mb)}" if asked.memory_mb else "")
    largest = max(nodes, key=lambda node: (node.cpus, node.memory_mb))
    what = (
        f"{asked.count} {asked.what}s of {of_each} do not fit into partition {asked.partition}: it holds {room}"
        if room
        else f"{'an' if asked.what[0] == 'e' else 'a'} {asked.what} of {of_each} fits no node of partition "
        f"{asked.partition}: the largest has {largest.cpus} CPUs and {memory_words(largest.memory_mb)}"
    )
    raise NoSuchNode(
        f"{name}: {what}, and the job would wait for ever. Use fewer or smaller ones {asked.options}; see: sinfo -e -o "
        "'%P %c %m %D'"
    )


def _longest_s(
    spec: JobSpec, options: SbatchOptions, partitions: str, cluster: ClusterLimits, name: str
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
    for partition, limit in zip(partitions.split(","), cluster.limits_of(partitions), strict=False):
        if limit.max_time_s:
            limits[f"MaxTime of {limit.max_time_s / 60:g} minutes of partition {partition}"] = limit.max_time_s
    for what, limit_s in limits.items():
        if limit_s < least_s:
            raise TimeMinTooLong(
                f"{name}: --data-worker-time-min={spec.data_worker_time_min} is above {what}, so no data worker could "
                "run. Use a shorter one; 2:00 is enough"
            )
    return min(limits.values(), default=None)


def _writer_options(spec: JobSpec) -> tuple[str, ...] | None:
    if spec.checkpoint is None:
        return None
    place = (f"--jobs-dir={spec.jobs_dir}",) if spec.jobs_dir else ()
    return (f"--checkpoint={spec.checkpoint}", *place)


def _master_options(
    spec: JobSpec, partition: str, options: SbatchOptions, longest_s: float | None, cluster: ClusterLimits
) -> list[str]:
    cpus = spec.data_worker_cpus
    worker = [*worker_options(spec, partition, cpus), *memory_per_cpu(cpus, worker_megabytes(spec, options))]
    gpu_worker = gpu_companion_options(spec, options, cluster.default_partition)
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
    if spec.embedding_servers_max:
        arguments += _embedding_options(spec, options, spec.embedding_server_partition or partition)
    if spec.offload is not None:
        arguments.append(f"--offload={spec.offload}")
    if spec.cache is not None:
        arguments.append(f"--cache={spec.cache}")
    if spec.stream_in_process_loaders:
        arguments.append("--stream-in-process-loaders")
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
        arguments += ["--", *worker, *inherited(options, worker)]
    return arguments


def _embedding_options(spec: JobSpec, options: SbatchOptions, partition: str) -> list[str]:
    """What the job master is told of embedding servers."""
    low, high = spec.embedding_servers_min, spec.embedding_servers_max
    server_mb = megabytes(spec.embedding_server_memory or "") or 0.0
    rows_mb = server_mb - max(EMBEDDING_SERVER_BASE_MB, server_mb / 16)
    arguments = [f"--embedding-servers={low}-{high}", f"--embedding-server-bytes={int(rows_mb * 2**20)}"]
    arguments += [f"--embedding-dir={spec.embedding_dir}"] if spec.embedding_dir is not None else []
    if high > low:
        cpus = EMBEDDING_SERVER_CPUS
        server = [*worker_options(spec, partition, cpus), *memory_per_cpu(cpus, server_mb)]
        arguments.append(f"--embedding-companion-options={shlex.join([*server, *inherited(options, server)])}")
    return arguments
