"""What a script becomes: components, the words for sbatch and for the job master, and why each thing changed.

Made by `convert.py`, written out by `render.py`. Plain values; nothing here decides or does anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from hetstream.base.text import count_words
from hetstream.hetjob.convert.sbatch_options import (
    TRES_CPUS,
    SbatchOption,
    SbatchOptions,
    megabytes,
    memory_words,
    time_limit_s,
)
from hetstream.hetjob.convert.spec import (
    DEFAULT_TRAINER_CPUS_PER_GPU,
    GUARANTEED,
    NO_RESERVATION,
    OPPORTUNISTIC,
    JobSpec,
    asks_for_gpus,
    count,
    gpus_per_task,
    tasks_and_nodes,
    tasks_per_node,
)
from hetstream.hetjob.convert.step_demand import Allocation, SubmitContext, least_cpus
from hetstream.hetjob.errors import ConversionError
from hetstream.hetjob.ports import ClusterLimits
from hetstream.hetjob.site.site_file import site_value


@dataclass(frozen=True)
class Component:
    """One component of the heterogeneous job.

    Attributes:
        het_job_offset: 0 is the leader, where the batch script runs.
        role: `trainer`, `data_workers` or `embedding_servers`.
        options: sbatch options of this component. For the trainer these are only the ones that conversion adds; they
            stand after the user's own and win over them.
    """

    het_job_offset: int
    role: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """One difference between the user's script and the result, and the reason for it."""

    change: str
    why: str


@dataclass(frozen=True)
class HetPlan:
    """The result of a conversion.

    Attributes:
        components: one (companions or checkpoints only) to three.
        changes: what differs and why, in the order of the script.
        master_options: arguments of `hetstream internal master start`; None without data workers and embedding servers.
        writer_options: arguments of `hetstream ckpt start`; None without checkpoints.
        sbatch_options: the options for sbatch's command line: those of the user's that are for the whole job.
        exports: variables that the script gives the job again, because sbatch is called without them.
    """

    components: tuple[Component, ...]
    changes: tuple[Change, ...]
    master_options: tuple[str, ...] | None
    writer_options: tuple[str, ...] | None = None
    sbatch_options: tuple[str, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict)


# What checkpoints change in a job's request: memory for the slots, and the permission to requeue. Pure.
#
# Called by `convert.py` for a script with `--checkpoint`. A slot is a file in /dev/shm, and Slurm counts its pages
# against the memory of the job that writes them: without more memory in the request, the first saves would end the job.
#
# No `--signal` is added. Slurm gives `--signal=B:...` to the batch shell alone, which ends of it, or holds a trap back
# until its `srun` has ended; without `B:` every process of every step gets it, and the user's helper processes end of
# it. The checkpoint writers know when the job ends and need no signal (`slurm_plugin/cli/ckpt.py`).

# One slot is written while one is persisted and one holds the newest: then no save ever waits.
NUM_SLOTS = 3
# What a host keeps for a rank of another: the newest whole one, and the one that comes.
NUM_REPLICA_SLOTS = 2


def checkpoint_overrides(spec: JobSpec, options: SbatchOptions) -> tuple[list[SbatchOption], list[Change]]:
    """Return what component 0 gets beside what it asks for.

    Args:
        spec: with `checkpoint` and `checkpoint_size`.
        options: of the script, with what conversion has changed in it so far.
    """
    assert spec.checkpoint_size is not None
    size_mb, shared_mb = megabytes(spec.checkpoint_size), megabytes(spec.checkpoint_shared or "") or 0.0
    assert size_mb is not None
    overrides: list[SbatchOption] = []
    changes: list[Change] = []
    tasks = tasks_per_node(options)
    num_slots = NUM_SLOTS + NUM_REPLICA_SLOTS * spec.checkpoint_replicas
    of_others = f", {NUM_REPLICA_SLOTS} of them for another host's replicas" if spec.checkpoint_replicas else ""
    why = (
        f"{num_slots} slots of {spec.checkpoint_size} in /dev/shm for each of {count_words(tasks, 'trainer task')} of "
        "a node"
    )
    why += f"; the {spec.checkpoint_shared} that all share once" if shared_mb else ""
    why += of_others
    node_mb = num_slots * (tasks * (size_mb - shared_mb) + shared_mb)
    # The part of it that one unit of the option must hold more. There are at least as many units as tasks need.
    cpus = Fraction(
        options.number("cpus-per-task") or (options.number("cpus-per-gpu") or 1) * gpus_per_task(options) or 1
    )
    shares = {
        "mem": Fraction(1),
        "mem-per-cpu": 1 / (cpus * tasks),
        "mem-per-gpu": 1 / ((gpus_per_task(options) or Fraction(1)) * tasks),
    }
    asked = next((item for item in reversed(options.items) if item.name in shares), None)
    present_mb = megabytes(asked.value or "") if asked else None
    if asked and present_mb:
        value = memory_words(present_mb + node_mb * float(shares[asked.name]))
        overrides.append(SbatchOption(asked.name, value, "hetstream", (f"--{asked.name}={value}",)))
        changes.append(Change(f"trainer: --{asked.name}={value} (was {asked.value}, {asked.origin})", why))
    else:
        held = "--mem=0 is all memory of the node" if asked else "the script asks for none; the partition's must hold"
        changes.append(Change("trainer: memory unchanged", f"{held}: {why}"))
    if options.has("no-requeue"):
        changes.append(Change("trainer: not requeued", "the script says --no-requeue; else it would go on by itself"))
    elif not options.has("requeue"):
        overrides.append(SbatchOption("requeue", None, "hetstream", ("--requeue",)))
        changes.append(Change("trainer: --requeue", "after a node fails, the job starts again from its checkpoint"))
    changes.append(
        Change(
            "a line before the first command starts the checkpoint writers, a step of its own on each node",
            f"--checkpoint={spec.checkpoint}: they outlive a trainer that crashes, and write its last state to disk",
        )
    )
    return overrides, changes


# What a job's class changes in its request: the partition, and words in its Comment that say so to everybody.
#
# Called by `convert.py` for a script with `--job-class` or `--opportunistic-after`. Slurm and its guard know classes by
# partitions and QOS alone; so what a user says must agree with the partition, or a place is chosen that agrees.
#
#     ConversionError
#     └── ClassNotPossible     the class and the rest of the request contradict each other

# Where the site says which partitions are for opportunistic jobs: names with spaces between them.
PARTITIONS_VARIABLE = "HETSTREAM_OPPORTUNISTIC_PARTITIONS"
# Words of a job's Comment, which squeue shows: the packer and all tools read them there.
CLASS_MARK, AFTER_MARK = "hetstream:class=", "hetstream:opportunistic-after="
_ADVICE = (
    "it gets one GPU on each node; for more, or for more memory, write --comment='hetstream:gpus=2 "
    "hetstream:gpu-memory=16G'"
)


def opportunistic_partitions(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the partitions of opportunistic jobs, by the environment or the site's file; empty where neither names
    any.
    """
    return tuple((site_value(PARTITIONS_VARIABLE, environ) or "").replace(",", " ").split())


class ClassNotPossible(ConversionError):
    """A class that contradicts the rest of the request."""


def class_overrides(
    spec: JobSpec, options: SbatchOptions, opportunistic: tuple[str, ...], name: str
) -> tuple[list[SbatchOption], list[Change]]:
    """Return what the job gets beside what it asks for, with the reasons.

    Args:
        spec: of the job. Without a class, or a time after which it changes, it gets nothing.
        options: of the script and the command line.
        opportunistic: partitions of opportunistic jobs, as far as the site names them.
        name: of the script, for messages.

    Raises:
        ClassNotPossible: see there.
    """
    if spec.job_class is None and spec.opportunistic_after is None:
        return [], []
    overrides: list[SbatchOption] = []
    changes: list[Change] = []
    asked = [part for part in (options.value("partition") or "").split(",") if part]
    matching = [part for part in asked if part in opportunistic]
    if spec.job_class != OPPORTUNISTIC:
        if matching:
            raise ClassNotPossible(
                f"{name}: --job-class={GUARANTEED}, and partition {matching[0]} is for opportunistic jobs. Remove one "
                "of the two"
            )
    else:
        _check_opportunistic(asked, matching, options, opportunistic, name)
        if not asked:
            overrides.append(_option("partition", opportunistic[0]))
            why = f"--job-class={OPPORTUNISTIC}: it starts on a GPU that another job leaves, chosen by the site"
            changes.append(Change(f"--partition={opportunistic[0]}", why))
    marks = [f"{CLASS_MARK}{spec.job_class or GUARANTEED}"]
    if spec.opportunistic_after is not None:
        marks.append(f"{AFTER_MARK}{time_limit_s(spec.opportunistic_after):.0f}")
    comment = " ".join([*marks, *(options.value("comment") or "").split()])
    overrides.append(_option("comment", comment))
    changes.append(Change(f"--comment={comment!r}", "its class stands there for the packer, squeue and hetstream jobs"))
    return overrides, changes


def _check_opportunistic(
    asked: list[str], matching: list[str], options: SbatchOptions, opportunistic: tuple[str, ...], name: str
) -> None:
    if asks_for_gpus(options):
        raise ClassNotPossible(
            f"{name}: --job-class={OPPORTUNISTIC}, and it asks for GPUs: the site chooses the one that it shares. "
            f"Remove --gpus and --gres=gpu; {_ADVICE}"
        )
    if asked and opportunistic and len(matching) < len(asked):
        other = next(part for part in asked if part not in matching)
        raise ClassNotPossible(
            f"{name}: --job-class={OPPORTUNISTIC}, and partition {other} is not for opportunistic jobs: write "
            f"--partition={opportunistic[0]}, or no partition"
        )
    if not asked and not opportunistic:
        raise ClassNotPossible(
            f"{name}: --job-class={OPPORTUNISTIC}: nothing here names a partition of opportunistic jobs. Name it with "
            f"--partition, or have the site set {PARTITIONS_VARIABLE} in /etc/hetstream/daemon.env"
        )


def _option(name: str, value: str) -> SbatchOption:
    return SbatchOption(name, value, "hetstream", (f"--{name}={value}",))


# What a stage on GPUs adds to a job: sbatch options of its data workers, and what is said about it. Pure.
#
# Called by `convert.py`. All data workers of that stage are companion jobs with one GPU each: they come when the
# training loop waits for them, so the trainer never waits in the queue for a second GPU.

# Of each CPU: torch with CUDA's libraries, and batches of the stage before.
_MB_PER_CPU = 4096
# A companion is a job of its own: of the trainer's options it has these.
_INHERITED = ("account", "qos", "time", "reservation", "exclude")


def gpu_companion_options(spec: JobSpec, options: SbatchOptions, default_partition: str | None) -> tuple[str, ...]:
    """sbatch options that every data worker with a GPU needs.

    Args:
        spec: what the directives ask for.
        options: of the script and the command line.
        default_partition: of the cluster; None where that is not known, and Slurm decides.
    """
    partition = spec.gpu_data_worker_partition or options.value("partition") or default_partition
    arguments = [f"--partition={partition}"] if partition else []
    arguments.append(f"--gres={spec.gpu_data_worker_gres}")
    if spec.gpu_data_worker_mem:
        size_mb = megabytes(spec.gpu_data_worker_mem) or 0.0
        arguments.append(f"--mem-per-cpu={memory_words(size_mb / spec.gpu_data_worker_cpus)}")
    elif options.has("mem", "mem-per-cpu", "mem-per-gpu"):
        arguments.append(f"--mem-per-cpu={memory_words(_MB_PER_CPU)}")
    return (*arguments, *inherited(options, ()))


def inherited(options: SbatchOptions, given: Sequence[str]) -> list[str]:
    """What a companion has of the trainer's options, which Slurm copies between components alone.

    Args:
        options: of the script and the command line.
        given: what is said otherwise.
    """
    names = [name for name in _INHERITED if not any(word.startswith(f"--{name}=") for word in given)]
    return [f"--{name}={options.value(name)}" for name in names if options.value(name)]


def gpu_stage_changes(spec: JobSpec) -> list[Change]:
    """Return what is said about them; empty without such data workers."""
    if not spec.gpu_data_workers_max:
        return []
    low, high = spec.gpu_data_workers_min, spec.gpu_data_workers_max
    jobs = count_words(high, "companion job")
    number = jobs if low == high else f"{low} to {jobs}"
    return [
        Change(
            f"{number} with {spec.gpu_data_worker_gres} and {count_words(spec.gpu_data_worker_cpus, 'CPU')}, "
            "one data worker each",
            f"--gpu-data-workers={low}-{high}: they run the gpu_stage of the program's loaders; each stage has a "
            "controller of its own",
        )
    ]


# What the trainer's component gets instead of what the script asks for: fewer CPUs, and the same memory. Pure.
#
# Called by `convert.py`. A script without GPUs trains on its CPUs, and keeps them.

_DIVIDED = (
    "the script does not say how many nodes there are: with fewer CPUs more tasks and GPUs might go to a node, and "
    "share what it has. --nodes=N lets the trainer have fewer"
)
_SPREAD = (
    "the script does not say how many tasks each node has, and with fewer CPUs Slurm might divide them in another "
    "way. --ntasks-per-node=N lets the trainer have fewer"
)
_BY_WHOLE_CORES = (
    "the script's memory goes by its CPUs, and with fewer of them it would be another one. --mem=SIZE lets the trainer "
    "have fewer"
)
_BY_CPUS = ": the script asks for none, and this partition gives it by CPUs. --mem=SIZE leaves more to others"


@dataclass(frozen=True)
class TrainerPartition:
    """What counts of the partitions that the trainer may run in.

    Attributes:
        max_mb_per_cpu: the most memory for each CPU (`MaxMemPerCPU`); None without a limit.
        default_mb_per_cpu: what a job gets for each that asks for none (`DefMemPerCPU`), 0 where CPUs do not decide;
            None where it is not known.
        alone: by which setting no job of others comes to a job's nodes; "" where one may.
        threads_per_core: the most that a core has, as far as is known.
    """

    max_mb_per_cpu: float | None = None
    default_mb_per_cpu: float | None = None
    alone: str = ""
    threads_per_core: int = 1


@dataclass(frozen=True)
class _Asked:
    """CPUs as the script asks for them.

    Attributes:
        option: the option's name.
        cpus: for each task, or for each GPU.
        write: the option's value with another number.
    """

    option: str
    cpus: int
    write: Callable[[int], str]


def _asked_for(options: SbatchOptions) -> _Asked | None:
    per_task = options.number("cpus-per-task")
    if per_task is not None:
        return _Asked("cpus-per-task", per_task, str)
    resources = options.value("tres-per-task") or ""
    if found := TRES_CPUS.search(resources):
        kept = resources[: found.start(1)], resources[found.end(1) :]
        return _Asked("tres-per-task", int(found[1]), lambda cpus: f"{kept[0]}{cpus}{kept[1]}")
    per_gpu = options.number("cpus-per-gpu")
    return _Asked("cpus-per-gpu", per_gpu, str) if per_gpu is not None else None


def trainer_overrides(
    spec: JobSpec,
    script: str,
    options: SbatchOptions,
    partition: TrainerPartition,
    foreign: int | None = None,
    surroundings: SubmitContext | None = None,
) -> tuple[list[SbatchOption], list[Change]]:
    """Return what component 0 gets instead of what the script asks for, with the reasons.

    Args:
        spec: what the directives ask for.
        script: the whole text.
        options: of the script and the command line.
        partition: where it is to run.
        foreign: line with options of another batch system, if there is one.
        surroundings: of the script; None for nothing.
    """
    asked = _asked_for(options)
    why = _why_unchanged(spec, options, asked, foreign, partition.alone)
    if asked is None or why:
        return [], [Change("trainer: CPUs unchanged", why)]
    kept, why = _kept_for_steps(spec, script, options, asked, surroundings or SubmitContext())
    max_mb_per_cpu, default_mb_per_cpu = partition.max_mb_per_cpu, partition.default_mb_per_cpu
    is_default = not options.has("mem", "mem-per-cpu", "mem-per-gpu")
    per_cpu = (default_mb_per_cpu if is_default else megabytes(options.value("mem-per-cpu") or "")) or 0.0
    if is_default and default_mb_per_cpu is None and kept < asked.cpus:
        kept = asked.cpus
        why = (
            "the script asks for no memory, and how much its CPUs bring (DefMemPerCPU) is not known of the cluster "
            "that it goes to: with fewer it might have less. With --mem=SIZE it needs no more CPUs than it uses"
        )
    if max_mb_per_cpu and kept < (needed := _least_for_limit(options, asked, per_cpu, max_mb_per_cpu)):
        kept = needed
        why = (
            f"this partition gives at most {memory_words(max_mb_per_cpu)} for each CPU (MaxMemPerCPU), and the trainer "
            f"keeps its memory: with fewer CPUs in the request Slurm would add them again"
        )
    if kept < asked.cpus and not spec.trainer_cpus:
        kept, why = (kept, why) if _says_how_many_nodes(options) else (asked.cpus, _DIVIDED)
        kept, why = (kept, why) if kept == asked.cpus or _says_division(options) else (asked.cpus, _SPREAD)
    if per_cpu and kept < asked.cpus and not spec.trainer_cpus:
        kept = _kept_for_memory(asked.cpus, kept, per_cpu, partition.threads_per_core)
        why = why if kept < asked.cpus else _BY_WHOLE_CORES
    if kept >= asked.cpus:
        why = f"the script asks for {asked.cpus}, the trainer may keep {kept}" if kept > asked.cpus else why
        return [], [Change("trainer: CPUs unchanged", why)]
    overrides, changes = _override(options, asked.option, asked.write(kept), why)
    if per_cpu:
        size = memory_words(per_cpu * asked.cpus / kept)
        why = "the trainer keeps its memory although it has fewer CPUs" + (_BY_CPUS if is_default else "")
        more = _override(options, "mem-per-cpu", size, why)
        overrides, changes = overrides + more[0], changes + more[1]
    return overrides, changes


def _why_unchanged(
    spec: JobSpec, options: SbatchOptions, asked: _Asked | None, foreign: int | None, alone: str
) -> str:  # fmt: skip
    """Why the trainer's CPUs cannot be fewer, or would free none; empty if they can."""
    # Specialized cores have the rest of their nodes with them (sbatch(1), NOTE at --core-spec).
    for option in filter(None, map(options.last, ("exclusive", "core-spec", "thread-spec"))):
        alone = f"--{option.name}={option.value}" if option.value else f"--{option.name}"
    if alone:
        return f"{alone}: no job of others comes to its nodes, so fewer CPUs for the trainer would free none for them"
    if options.has("mincpus"):
        return "--mincpus asks for CPUs of each node, whatever its tasks have"
    if options.has("overcommit"):
        return "with --overcommit Slurm allocates a CPU for each node, whatever the script asks for each task"
    if spec.trainer_cpus is None and not asks_for_gpus(options):
        return "the script asks for no GPUs, so the trainer computes on its CPUs (--trainer-cpus=N gives it fewer)"
    if asked is None:
        return f"the script asks for no CPUs per task or GPU{_hint(options)}"
    if foreign is not None:
        return f"line {foreign} asks for resources in the way of another batch system, which only sbatch reads"
    return ""


def _kept_for_task(spec: JobSpec, options: SbatchOptions) -> tuple[int, str]:
    """How many CPUs one task keeps, and why."""
    default = math.ceil(DEFAULT_TRAINER_CPUS_PER_GPU * max(gpus_per_task(options), Fraction(1)))
    kept = spec.trainer_cpus or max(1, default)
    share = f"--trainer-cpus={kept}" if spec.trainer_cpus else f"{DEFAULT_TRAINER_CPUS_PER_GPU} CPUs per GPU"
    return kept, f"data workers do the preprocessing; the trainer keeps {share}"


def _kept_for_steps(
    spec: JobSpec, script: str, options: SbatchOptions, asked: _Asked, surroundings: SubmitContext
) -> tuple[int, str]:
    """How many CPUs a task or GPU keeps, so that the steps of the script have room, and why."""
    kept, why = _kept_for_task(spec, options)
    if asked.option == "cpus-per-gpu":
        kept = math.ceil(kept / max(gpus_per_task(options), Fraction(1)))
    if kept < asked.cpus:
        least, reason = least_cpus(script, _allocation(options, asked.option), kept, asked.cpus, surroundings)
        if least is not None:
            return least, reason or why
        return (kept, f"{why}; {reason}") if spec.trainer_cpus else (asked.cpus, reason)
    return kept, why


def _least_for_limit(options: SbatchOptions, asked: _Asked, per_cpu_mb: float, most_mb: float) -> int:
    """CPUs of a task or GPU with which none has more memory than `MaxMemPerCPU`.

    Of `--mem` Slurm makes a number of CPUs of each node (`_valid_pn_min_mem` in src/slurmctld/job_mgr.c).
    """
    allocation = _allocation(options, asked.option)
    of_node = math.ceil((megabytes(options.value("mem") or "") or 0.0) / most_mb)
    on_node = max(1, allocation.units // (allocation.nodes or 1))
    return min(asked.cpus, max(math.ceil(per_cpu_mb * asked.cpus / most_mb), math.ceil(of_node / on_node)))


def _says_how_many_nodes(options: SbatchOptions) -> bool:
    """Whether the job has as many nodes with fewer CPUs.

    Else Slurm gives as few nodes as its tasks and GPUs have room on, and room depends on CPUs, on cores that GPUs are
    bound to, on memory, and on what other jobs have there.
    """
    _, nodes = tasks_and_nodes(options)
    is_one_node = options.has("ntasks-per-node") and not options.has("ntasks", "nodes")
    gpus = count(options.value("gpus")) or 0
    return is_one_node or (nodes is not None and (options.has("nodes") or gpus < 2))


def _kept_for_memory(asked: int, kept: int, per_cpu_mb: float, threads_per_core: int) -> int:
    """The fewest CPUs, from `kept` on, among which the memory of those asked for is divided without a rest.

    Slurm takes whole MB for each CPU, so a rest makes the job larger than its node may be. And of a node whose cores
    have several threads a task gets whole cores, with the memory of all (`SelectTypeParameters`, slurm.conf(5)): what
    fills cores stays what it is, and of another number nobody knows here how much memory it brings. Of nodes of which
    nothing is known cores may have two.
    """
    core = math.lcm(2, threads_per_core)
    if asked % core:
        return asked
    filling = range(math.ceil(kept / core) * core, asked + 1, core)
    return next(cpus for cpus in filling if per_cpu_mb * asked % cpus == 0 or cpus == asked)


def _allocation(options: SbatchOptions, unit: str) -> Allocation:
    tasks, nodes = tasks_and_nodes(options)
    gpus = math.ceil(gpus_per_task(options) * tasks)
    # sbatch exports these where an option gives them (src/sbatch/opt.c; seen on 22.05 to 26.05).
    may_lack = (
        *(() if options.has("ntasks") else ("SLURM_NTASKS", "SLURM_NPROCS")),
        *(() if options.has("ntasks-per-node") else ("SLURM_NTASKS_PER_NODE",)),
    )
    by_cpus = () if _says_tasks_of_nodes(options, unit) else ("SLURM_TASKS_PER_NODE", "SLURM_STEP_TASKS_PER_NODE")
    return Allocation(unit, gpus if unit == "cpus-per-gpu" else tasks, tasks, nodes, gpus, may_lack, by_cpus)


def _says_tasks_of_nodes(options: SbatchOptions, unit: str) -> bool:
    """Whether each node has as many tasks with fewer CPUs, also in what Slurm tells the script.

    Without a number of tasks and of CPUs for each, Slurm makes as many as a node has CPUs for the job.
    """
    is_counted = unit != "cpus-per-gpu" or options.has("ntasks", "ntasks-per-node", "ntasks-per-gpu")
    return is_counted and _says_division(options)


def _says_division(options: SbatchOptions) -> bool:
    """Whether the tasks are divided over nodes as they are with fewer CPUs.

    Those that Slurm divides itself go where CPUs are: `-N2 -n4 -c2` comes to 3 and 1 on nodes of 16 CPUs, and `-c8` to
    2 and 2 (seen on 22.05 to 26.05).
    """
    tasks, nodes = tasks_and_nodes(options)
    per_node = 1 if tasks == nodes else options.number("ntasks-per-node") or 0
    is_one_node = nodes is None and options.has("ntasks-per-node") and not options.has("ntasks", "nodes")
    return is_one_node or nodes == 1 or (nodes is not None and tasks == nodes * per_node)


def _override(options: SbatchOptions, name: str, value: str, why: str) -> tuple[list[SbatchOption], list[Change]]:
    old = options.last(name)
    was = f" (was {old.value}, {old.origin})" if old else ""
    written = f"--{name}={value}"
    return [SbatchOption(name, value, "hetstream", (written,))], [Change(f"trainer: {written}{was}", why)]


def _hint(options: SbatchOptions) -> str:
    tasks, gpus = options.number("ntasks") or 1, count(options.value("gpus")) or 0
    return " (for one program with several CPUs write --ntasks=1 --cpus-per-task=N)" if tasks > max(1, gpus) else ""


# The components of data workers and of embedding servers: what they ask for, and what of the trainer's they must not
# have. Pure.
#
# Called by `convert.py`. sbatch carries some options from one component to the next, and applies all of its command
# line and environment to every component (src/common/slurm_opt.c, `reset_each_pass`); a component can only say
# otherwise.

# One process per CPU: Python with its libraries, the dataset, and a few finished batches of large images.
_DATA_WORKER_MB_PER_CPU = 2048
# Where Slurm wants memory per node, data workers are packed onto nodes in groups of at most this many CPUs: any CPU
# node has that many, and no group asks for more memory than such a node carries.
_CPUS_PER_GROUP = 16
# Of an embedding server: one CPU for messages, one for its log.
EMBEDDING_SERVER_CPUS = 2
# Of what sbatch carries, options of the trainer's nodes and tasks for which an empty value is Slurm's word for none.
_EMPTY_IS_NONE = ("prefer", "container", "container-id", "container-type")
# Before, the components of one job wait for each other (`_find_singleton_job` in src/slurmctld/job_scheduler.c).
_SINGLETON_SINCE = (23, 11)


def cpu_components(
    spec: JobSpec,
    options: SbatchOptions,
    partition: str,
    cluster: ClusterLimits,
    foreign: int | None,
) -> tuple[list[Component], list[Change]]:
    """The components behind the trainer's, if there are any, and what is said about what runs there.

    Args:
        spec: what the directives ask for.
        options: of the script, the environment and the command line.
        partition: where data workers run.
        cluster: what is known of it.
        foreign: line with options of another batch system, if there is one.
    """
    components: list[Component] = []
    changes: list[Change] = []
    if spec.data_workers_min:
        largest = max(
            (node.cpus for limit in cluster.limits_of(partition) for node in limit.nodes), default=_CPUS_PER_GROUP
        )
        per_group = min(_CPUS_PER_GROUP, largest)
        # Of a #PBS line `mem` may come, and then be carried like --mem; asking for memory per node is right either way.
        is_per_node = options.has("mem") or foreign is not None
        worker_mb = worker_megabytes(spec, options, is_default=foreign is not None)
        of_each = (spec.data_workers_min, spec.data_worker_cpus, worker_mb)
        memory = _component_memory(*of_each, per_group if is_per_node else None)
        apart, added = _kept_apart(1, options, cluster, foreign)
        arguments = (
            *worker_options(spec, partition, spec.data_worker_cpus),
            f"--ntasks={spec.data_workers_min}",
            *memory,
            *apart,
        )
        components.append(Component(1, "data_workers", arguments))
        changes.append(
            Change(
                f"component 1 added: {count_words(spec.data_workers_min, 'data worker')} of "
                f"{count_words(spec.data_worker_cpus, 'CPU')} in partition {partition}",
                f"--data-workers={spec.data_workers_min}: they read, transform and batch; they start with the trainer",
            )
        )
        changes += added
    if spec.embedding_servers_min:
        component, added = _embedding_component(len(components) + 1, spec, options, partition, cluster, foreign)
        components.append(component)
        changes += added
    return components, [*changes, *_other_changes(spec)]


def _embedding_component(
    offset: int, spec: JobSpec, options: SbatchOptions, partition: str, cluster: ClusterLimits, foreign: int | None
) -> tuple[Component, list[Change]]:
    """The component of the embedding servers that start together with the trainer."""
    partition = spec.embedding_server_partition or partition
    server_mb = megabytes(spec.embedding_server_memory or "") or 0.0
    per_group = None
    if options.has("mem") or foreign is not None:
        largest_mb = max((node.memory_mb for limit in cluster.limits_of(partition) for node in limit.nodes), default=0)
        per_group = min(_CPUS_PER_GROUP, EMBEDDING_SERVER_CPUS * max(1, int(largest_mb // server_mb)))
    memory = _component_memory(spec.embedding_servers_min, EMBEDDING_SERVER_CPUS, server_mb, per_group)
    apart, changes = _kept_apart(offset, options, cluster, foreign)
    arguments = worker_options(spec, partition, EMBEDDING_SERVER_CPUS)
    arguments += [f"--ntasks={spec.embedding_servers_min}", *memory, *apart]
    low, high = spec.embedding_servers_min, spec.embedding_servers_max
    added = Change(
        f"component {offset} added: {count_words(low, 'embedding server')} of {spec.embedding_server_memory} in "
        f"partition {partition}",
        f"--embedding-servers={low if low == high else f'{low}-{high}'}: they hold the rows of embedding tables",
    )
    return Component(offset, "embedding_servers", tuple(arguments)), [added, *changes]


def _other_changes(spec: JobSpec) -> list[Change]:
    """What is said about companions, and about the job master."""
    changes: list[Change] = []
    if spec.companions:
        when = f" in backfill holes of {spec.data_worker_time_min} or more" if spec.data_worker_time_min else ""
        changes.append(
            Change(
                f"up to {count_words(spec.companions, 'companion job')}, one data worker each{when}, submitted while "
                "the trainer waits for data",
                "the job master measures how many pay, lets those go that do not, and cancels them at the end",
            )
        )
    if spec.embedding_servers_max > spec.embedding_servers_min:
        changes.append(
            Change(
                f"up to {count_words(spec.embedding_servers_max - spec.embedding_servers_min, 'companion job')}, one "
                "embedding server each, submitted before memory runs out, or while one server has twice the load of "
                "the others",
                "the job master watches how they fill, lets the newest go when half would be enough, and cancels them "
                "at the end",
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
            "it runs the dispatcher and the data workers, and points the program's DataLoader at them"
            if spec.data_workers_max
            else "it runs the dispatcher and the embedding servers, and points the program at them",
        )
    )
    return changes


def _kept_apart(
    offset: int, options: SbatchOptions, cluster: ClusterLimits, foreign: int | None
) -> tuple[list[str], list[Change]]:
    """Options of a component that undo what sbatch carries there from the trainer and is for the trainer alone."""
    component = f"component {offset}"
    arguments: list[str] = []
    changes: list[Change] = []
    dependency = options.value("dependency") or ""
    if re.search(r"(^|[,?])\s*singleton", dependency, re.IGNORECASE) and cluster.release < _SINGLETON_SINCE:
        parts = [part for part in dependency.split(",") if not part.strip().lower().startswith("singleton")]
        # Any one of a list with `?` is enough for the trainer: none of them may hold the data workers.
        kept = "" if "?" in dependency else ",".join(parts)
        arguments.append(f"--dependency={kept}")
        why = f"--dependency={dependency} holds the trainer; of the same name, its own {component} would wait for it"
        changes.append(Change(f"{component}: --dependency={kept}", why))
    prefix, colon, signal = (options.value("signal") or "").rpartition(":")
    if signal and "B" not in prefix.upper():
        arguments.append(f"--signal=B:{signal}")
        why = f"--signal={prefix}{colon}{signal} is for the trainer; the others work until the job ends"
        changes.append(Change(f"{component}: --signal=B:{signal}, which nothing there receives", why))
    if foreign is not None:
        arguments.append("--ignore-pbs")
        changes.append(
            Change(f"{component}: --ignore-pbs", f"line {foreign}: sbatch applies such lines to the trainer")
        )
    for name in _EMPTY_IS_NONE:
        if options.value(name):
            arguments.append(f"--{name}=")
            changes.append(Change(f"{component}: no --{name}", f"--{name}={options.value(name)} is for the trainer"))
    if options.has("hint"):
        # sbatch sets SLURM_HINT for the trainer and reads it for the next component. The two options exclude each
        # other, and `*` asks for nothing (`validate_hint_option` in src/common/slurm_opt.c).
        arguments.append("--extra-node-info=*")
        why = f"--hint={options.value('hint')} is for the trainer, and sbatch would apply it here, too"
        changes.append(Change(f"{component}: --extra-node-info=*, which is no hint", why))
    if options.has("reboot"):
        why = "sbatch carries --reboot to every component; companion jobs (--data-workers=0-N) do not have it"
        changes.append(Change(f"{component}: its nodes are rebooted, and whole, too", why))
    return arguments, changes


def worker_options(spec: JobSpec, partition: str, cpus: int) -> list[str]:
    """sbatch options that every data worker or embedding server needs, in its component and as a companion."""
    arguments = [f"--partition={partition}", f"--cpus-per-task={cpus}"]
    for option_name in ("constraint", "account", "qos"):
        value = getattr(spec, f"data_worker_{option_name}")
        if value is not None:
            arguments.append(f"--{option_name}={value}")
    if spec.data_worker_reservation is not None:
        # Empty is Slurm's word for none: a later component has the first one's otherwise.
        name = spec.data_worker_reservation
        arguments.append(f"--reservation={'' if name == NO_RESERVATION else name}")
    return arguments


def worker_megabytes(spec: JobSpec, options: SbatchOptions, *, is_default: bool = False) -> float | None:
    """Return memory of one data worker in MB; None leaves it to the partition, as the script leaves its own."""
    if spec.data_worker_mem:
        return megabytes(spec.data_worker_mem)
    if is_default or options.has("mem", "mem-per-cpu", "mem-per-gpu"):
        return float(_DATA_WORKER_MB_PER_CPU * spec.data_worker_cpus)
    return None


def memory_per_cpu(cpus: int, each_mb: float | None) -> list[str]:
    return [f"--mem-per-cpu={memory_words(each_mb / cpus)}"] if each_mb else []


def _component_memory(tasks: int, cpus: int, each_mb: float | None, cpus_per_group: int | None) -> list[str]:
    """Memory options of a component; per node, in groups of so many CPUs, or per CPU (None).

    Slurm copies `--mem` (per node) from component 0 to later ones and refuses `--mem-per-cpu` beside it ("mutually
    exclusive"). A script with `--mem` therefore needs a size per node, and with it a known number of tasks per node.
    """
    if cpus_per_group is None or each_mb is None:
        return memory_per_cpu(cpus, each_mb)
    num_in_group = max(1, cpus_per_group // cpus)
    nodes = math.ceil(tasks / num_in_group)
    per_group = math.ceil(tasks / nodes)
    return [f"--ntasks-per-node={per_group}", f"--mem={memory_words(each_mb * per_group)}"]
