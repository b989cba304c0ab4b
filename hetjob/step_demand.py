"""How many CPUs the steps that a script starts need at the least. Pure; called by `convert_trainer.py`.

The trainer gives CPUs away only where the text proves that nothing in it asks for more: every command is understood
(`understood_commands.py`), every `srun` and every other launcher is found, also in variables, quotes, functions,
here-documents and scripts that the script calls, and what it asks for can be computed. Otherwise the trainer keeps its
CPUs, and the reason names the line.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hetstream.hetjob.mpi_options import processes_of_mpi
from hetstream.hetjob.sbatch_options import TRES_CPUS
from hetstream.hetjob.script_launches import Launch, ScriptText, check_program, check_variables, launches_of
from hetstream.hetjob.shell_text import UnreadableText, Word
from hetstream.hetjob.shell_values import Unknown, Values, as_number
from hetstream.hetjob.srun_options import Step, steps_of
from hetstream.hetjob.understood_commands import UnderstoodCommands, functions_of


@dataclass(frozen=True)
class Allocation:
    """What a job has.

    Attributes:
        unit: option by which CPUs are asked for: `cpus-per-task`, `cpus-per-gpu` or `tres-per-task`.
        units: tasks or GPUs in all, which have so many CPUs each.
        tasks: in all.
        nodes: None where the request leaves that open.
        gpus: in all.
    """

    unit: str
    units: int
    tasks: int
    nodes: int | None
    gpus: int

    def holds(self, tasks: int, cpus_per_task: int, nodes: int | None, cpus: int) -> bool:
        """Whether a step has room where each unit has so many CPUs."""
        if self.nodes == 1 or self.units == 1:
            return tasks * cpus_per_task <= max(self.units * cpus, self.tasks)
        if self.nodes is None:  # nobody knows how units share nodes: each task must fit into its unit
            return math.ceil(tasks / max(1, self.units)) * cpus_per_task <= cpus
        on_node = math.ceil(tasks / min(nodes or self.nodes, self.nodes))
        return on_node * cpus_per_task <= max(self.units // self.nodes * cpus, self.tasks // self.nodes)

    def variables(self, cpus: int) -> dict[str, str]:
        """Slurm's variables in the batch script where each unit has so many CPUs."""
        found = {"SLURM_NTASKS": self.tasks, "SLURM_NPROCS": self.tasks}
        found["SLURM_CPUS_PER_GPU" if self.unit == "cpus-per-gpu" else "SLURM_CPUS_PER_TASK"] = cpus
        if self.nodes is not None:
            found |= {"SLURM_NNODES": self.nodes, "SLURM_JOB_NUM_NODES": self.nodes}
            if self.tasks % self.nodes == 0:
                found["SLURM_NTASKS_PER_NODE"] = self.tasks // self.nodes
            if self.gpus % self.nodes == 0:
                found["SLURM_GPUS_ON_NODE"] = self.gpus // self.nodes
            if self.nodes == 1 or self.units % self.nodes == 0:
                found["SLURM_CPUS_ON_NODE"] = self.units // self.nodes * cpus
        return {name: str(value) for name, value in found.items()}


def _no_file(path: str) -> str | None:
    del path
    return None


@dataclass(frozen=True)
class Surroundings:
    """What there is around a script when it is submitted.

    Attributes:
        read: a file's text by its path in the script; None if it cannot be read as text.
        environ: variables that the job will have from outside.
    """

    read: Callable[[str], str | None] = _no_file
    environ: Mapping[str, str] = field(default_factory=dict)


def least_cpus(
    script: str, allocation: Allocation, kept: int, asked: int, surroundings: Surroundings
) -> tuple[int | None, str]:  # fmt: skip
    """The fewest CPUs of each unit, from `kept` on, with which all steps of a script have room.

    Args:
        script: the whole text.
        allocation: what its job has.
        kept: CPUs that it would keep.
        asked: CPUs that it asks for.
        surroundings: see there.

    Returns:
        The number, None where nobody can know it, and why it is more than `kept`; "" if it is not.
    """
    why = ""
    try:
        text = launches_of(script, surroundings.read)
        check_variables(surroundings.environ, text)
        values, processes = Values(text.commands, {}, is_complete=text.is_complete), text.processes_per_node()

        def with_cpus(number: int) -> _JobSize:
            return _JobSize(number, values.with_given({**surroundings.environ, **allocation.variables(number)}))

        before = with_cpus(asked)
        for cpus in range(kept, asked):
            try:
                _check_all(text, processes, allocation, with_cpus(cpus), before)
            except _NoRoom as error:
                why = str(error)
            else:
                functions, was_read = functions_of(text.commands), text.was_read
                UnderstoodCommands(before.values, functions, was_read, check_program).check_all(text.placed)
                return cpus, why
    except (Unknown, UnreadableText) as error:
        return None, f"{error}, so nothing proves that fewer CPUs are enough (--trainer-cpus=N says that they are)"
    return asked, why


class _NoRoom(ValueError):
    """A step that needs more CPUs than there would be."""


class _JobSize(NamedTuple):
    """What a job is with so many CPUs of each unit: the number, and the variables of its script then."""

    cpus: int
    values: Values


def _check_all(
    text: ScriptText, processes: Sequence[Word], allocation: Allocation, now: _JobSize, before: _JobSize
) -> None:  # fmt: skip
    """Whether all steps have room.

    Raises:
        _NoRoom: one has none.
        Unknown: that cannot be known.
    """
    for launch in text.launches:
        try:
            if any(word.text == ":" for word in launch.words):
                raise Unknown("it starts several programs, with : between them")
            if launch.launcher == "srun":
                _check_srun(launch, allocation, now, before, is_alone=not text.has_background)
            else:
                _check_mpi(launch, allocation, now)
        except Unknown as error:
            raise Unknown(f"{launch.where} runs {launch.launcher}: {error}") from error
    for word in processes:
        try:
            numbers = [as_number(found) for found in now.values.of(word.text)]
        except Unknown as error:
            raise Unknown(f"line {word.line} starts processes on each node: {error}") from error
        for number in numbers:
            if not allocation.holds(number * (allocation.nodes or 1), 1, None, now.cpus):
                raise _NoRoom(f"line {word.line} starts {number} processes on each node, which need a CPU each")


def _check_srun(launch: Launch, allocation: Allocation, now: _JobSize, before: _JobSize, *, is_alone: bool) -> None:
    def readings(values: Values) -> list[_Needs]:
        return [_needs(options, allocation, values) for options in steps_of(launch.words, values)]

    def exact_sizes(found: Sequence[_Needs]) -> list[int]:
        return [tasks * cpus for step in found if step.is_exact for tasks, cpus in step.sizes]

    steps = readings(now.values)
    for step in steps:
        for tasks, cpus_per_task in step.sizes:
            what = f"{cpus_per_task} CPUs per task" if step.is_whole else f"{tasks} tasks of {cpus_per_task} CPUs"
            if not cpus_per_task or not allocation.holds(tasks, cpus_per_task, step.nodes, now.cpus):
                raise _NoRoom(f"{launch.where} runs srun with {what}, which needs as many in the job")
        if step.cpus_per_gpu > (
            now.cpus if allocation.unit == "cpus-per-gpu" else allocation.units * now.cpus // max(1, allocation.gpus)
        ):
            raise _NoRoom(
                f"{launch.where} runs srun with {step.cpus_per_gpu} CPUs per GPU, which needs as many in the job"
            )
    # Steps side by side share the CPUs: that is as before where each has a share of them.
    sizes = [] if is_alone else exact_sizes(steps)
    if sizes and [size * before.cpus for size in sizes] != [
        size * now.cpus for size in exact_sizes(readings(before.values))
    ]:
        raise Unknown("steps may run side by side")


@dataclass(frozen=True)
class _Needs:
    """What a step asks for: tasks and CPUs of each, in all readings.

    Attributes:
        sizes: numbers of tasks with CPUs of each.
        nodes: that it runs on; None for all of the job's.
        cpus_per_gpu: 0 where it does not say.
        is_exact: it takes only the CPUs that it asks for, so that another can run beside it.
        is_whole: it has as many tasks as the job.
    """

    sizes: tuple[tuple[int, int], ...]
    nodes: int | None
    cpus_per_gpu: int
    is_exact: bool
    is_whole: bool


def _needs(options: Step, allocation: Allocation, values: Values) -> _Needs:
    def numbers(name: str, default: Sequence[str]) -> list[int]:
        given = options.get(name)
        return [as_number(text) for text in (given.texts(values) if given else default)]

    if "mem-per-cpu" in options:
        raise Unknown("with fewer CPUs its --mem-per-cpu would be less memory")
    binding = options.get("cpu-bind") or options.get("cpu_bind")
    if binding and any("map_cpu" in text or "mask_cpu" in text for text in binding.texts(values)):
        raise Unknown("it chooses CPUs by their numbers")
    own = values.of("$SRUN_CPUS_PER_TASK") if values.has("SRUN_CPUS_PER_TASK") else ["1"]
    cpus = numbers("cpus-per-task", own)
    if resources := options.get("tres-per-task"):
        cpus = [int(found[1]) if (found := TRES_CPUS.search(text)) else 1 for text in resources.texts(values)]
    nodes = numbers("nodes", [])
    tasks = numbers("ntasks", values.of("$SLURM_NTASKS"))
    if "ntasks" not in options and (per_node := numbers("ntasks-per-node", [])):
        tasks = [number * count for number in per_node for count in nodes or [allocation.nodes or allocation.tasks]]
    says_cpus = bool(options.keys() & {"cpus-per-task", "tres-per-task", "cpus-per-gpu"}) or own != ["1"]
    return _Needs(
        tuple((count, each) for count in tasks for each in cpus),
        min(nodes) if nodes else None,
        max(numbers("cpus-per-gpu", ["0"])),
        (says_cpus or bool(options.keys() & {"exact", "exclusive"})) and "overlap" not in options,
        tasks == [allocation.tasks],
    )


def _check_mpi(launch: Launch, allocation: Allocation, now: _JobSize) -> None:
    """Of mpirun and its like the number of processes is read, each of which needs a CPU."""
    tasks, is_per_node = processes_of_mpi(launch.words, now.values)
    tasks = [number * (allocation.nodes or allocation.tasks) for number in tasks] if is_per_node else tasks
    if not all(allocation.holds(number, 1, None, now.cpus) for number in tasks or [allocation.tasks]):
        raise _NoRoom(f"{launch.where} runs {launch.launcher} with {max(tasks)} processes, which need a CPU each")
