"""The data workers' component: what it asks for, and what of the trainer's it must not have. Pure.

Called by `convert.py`. sbatch carries some options from one component to the next, and applies all of its command line
and environment to every component (src/common/slurm_opt.c, `reset_each_pass`); a component can only say otherwise.
"""

from __future__ import annotations

import math
import re

from hetstream.hetjob.plan import Change, Component
from hetstream.hetjob.ports import Cluster
from hetstream.hetjob.sbatch_options import SbatchOptions, megabytes, memory_words
from hetstream.hetjob.spec import NO_RESERVATION, JobSpec

# One process per CPU: Python with its libraries, the dataset, and a few finished batches of large images.
_DATA_WORKER_MB_PER_CPU = 2048
# Where Slurm wants memory per node, data workers are packed onto nodes in groups of at most this many CPUs: any CPU
# node has that many, and no group asks for more memory than such a node carries.
_CPUS_PER_GROUP = 16
# Of what sbatch carries, options of the trainer's nodes and tasks for which an empty value is Slurm's word for none.
_EMPTY_IS_NONE = ("prefer", "container", "container-id", "container-type")
# Before, the components of one job wait for each other (`_find_singleton_job` in src/slurmctld/job_scheduler.c).
_SINGLETON_SINCE = (23, 11)


def data_worker_component(
    spec: JobSpec,
    options: SbatchOptions,
    partition: str,
    cluster: Cluster,
    foreign: int | None,
) -> tuple[list[Component], list[Change]]:
    """Component 1, if there is one, and what is said about the data workers.

    Args:
        spec: what the directives ask for.
        options: of the script, the environment and the command line.
        partition: where they run.
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
        memory = _component_memory(spec, worker_mb, per_group if is_per_node else None)
        apart, added = _kept_apart(options, cluster, foreign)
        arguments = (*worker_options(spec, partition), f"--ntasks={spec.data_workers_min}", *memory, *apart)
        components.append(Component(1, "data_workers", arguments))
        changes.append(
            Change(
                f"component 1 added: {spec.data_workers_min} data worker(s) of {spec.data_worker_cpus} CPUs in "
                f"partition {partition}",
                f"--data-workers={spec.data_workers_min}: they read, transform and batch; they start with the trainer",
            )
        )
        changes += added
    return components, [*changes, *_other_changes(spec)]


def _other_changes(spec: JobSpec) -> list[Change]:
    """What is said about companions, and about the job master."""
    changes: list[Change] = []
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
    return changes


def _kept_apart(options: SbatchOptions, cluster: Cluster, foreign: int | None) -> tuple[list[str], list[Change]]:
    """Options of component 1 that undo what sbatch carries there from the trainer and is not for data workers."""
    arguments: list[str] = []
    changes: list[Change] = []
    dependency = options.value("dependency") or ""
    if re.search(r"(^|[,?])\s*singleton", dependency, re.IGNORECASE) and cluster.release < _SINGLETON_SINCE:
        parts = [part for part in dependency.split(",") if not part.strip().lower().startswith("singleton")]
        # Any one of a list with `?` is enough for the trainer: none of them may hold the data workers.
        kept = "" if "?" in dependency else ",".join(parts)
        arguments.append(f"--dependency={kept}")
        why = f"--dependency={dependency} holds the trainer; of the same name, its own component 1 would wait for it"
        changes.append(Change(f"component 1: --dependency={kept}", why))
    prefix, colon, signal = (options.value("signal") or "").rpartition(":")
    if signal and "B" not in prefix.upper():
        arguments.append(f"--signal=B:{signal}")
        why = f"--signal={prefix}{colon}{signal} is for the trainer; data workers work until the job ends"
        changes.append(Change(f"component 1: --signal=B:{signal}, which nothing there receives", why))
    if foreign is not None:
        arguments.append("--ignore-pbs")
        changes.append(Change("component 1: --ignore-pbs", f"line {foreign}: sbatch applies such lines to the trainer"))
    for name in _EMPTY_IS_NONE:
        if options.value(name):
            arguments.append(f"--{name}=")
            changes.append(Change(f"component 1: no --{name}", f"--{name}={options.value(name)} is for the trainer"))
    if options.has("hint"):
        # sbatch sets SLURM_HINT for the trainer and reads it for the next component. The two options exclude each
        # other, and `*` asks for nothing (`validate_hint_option` in src/common/slurm_opt.c).
        arguments.append("--extra-node-info=*")
        why = f"--hint={options.value('hint')} is for the trainer, and sbatch would apply it here, too"
        changes.append(Change("component 1: --extra-node-info=*, which is no hint", why))
    if options.has("reboot"):
        why = "sbatch carries --reboot to every component; companion jobs (--data-workers=0-N) do not have it"
        changes.append(Change("component 1: its nodes are rebooted, and whole, too", why))
    return arguments, changes


def worker_options(spec: JobSpec, partition: str) -> list[str]:
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


def worker_megabytes(spec: JobSpec, options: SbatchOptions, *, is_default: bool = False) -> float | None:
    """Memory of one data worker in MB; None leaves it to the partition, as the script leaves its own."""
    if spec.data_worker_mem:
        return megabytes(spec.data_worker_mem)
    if is_default or options.has("mem", "mem-per-cpu", "mem-per-gpu"):
        return float(_DATA_WORKER_MB_PER_CPU * spec.data_worker_cpus)
    return None


def memory_per_cpu(spec: JobSpec, worker_mb: float | None) -> list[str]:
    return [f"--mem-per-cpu={memory_words(worker_mb / spec.data_worker_cpus)}"] if worker_mb else []


def _component_memory(spec: JobSpec, worker_mb: float | None, cpus_per_group: int | None) -> list[str]:
    """Memory options of component 1; per node, in groups of so many CPUs, or per CPU (None).

    Slurm copies `--mem` (per node) from component 0 to later ones and refuses `--mem-per-cpu` beside it ("mutually
    exclusive"). A script with `--mem` therefore needs a size per node, and with it a known number of tasks per node.
    """
    if cpus_per_group is None or worker_mb is None:
        return memory_per_cpu(spec, worker_mb)
    num_in_group = max(1, cpus_per_group // spec.data_worker_cpus)
    nodes = math.ceil(spec.data_workers_min / num_in_group)
    per_group = math.ceil(spec.data_workers_min / nodes)
    return [f"--ntasks-per-node={per_group}", f"--mem={memory_words(worker_mb * per_group)}"]
