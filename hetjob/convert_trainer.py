"""What the trainer's component gets instead of what the script asks for: fewer CPUs, and the same memory. Pure.

Called by `convert.py`. A script without GPUs trains on its CPUs, and keeps them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from hetstream.hetjob.plan import Change
from hetstream.hetjob.request import asks_for_gpus, count, gpus_per_task, tasks_and_nodes
from hetstream.hetjob.sbatch_options import TRES_CPUS, SbatchOption, SbatchOptions, megabytes, memory_words
from hetstream.hetjob.spec import DEFAULT_TRAINER_CPUS_PER_GPU, JobSpec
from hetstream.hetjob.step_demand import Allocation, Surroundings, least_cpus

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
    surroundings: Surroundings | None = None,
) -> tuple[list[SbatchOption], list[Change]]:
    """What component 0 gets instead of what the script asks for, with the reasons.

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
    kept, why = _kept_for_steps(spec, script, options, asked, surroundings or Surroundings())
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
    spec: JobSpec, script: str, options: SbatchOptions, asked: _Asked, surroundings: Surroundings
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
