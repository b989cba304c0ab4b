"""How many CPUs the steps that a script starts need at the least. Pure; called by `plan.py`.

The trainer gives CPUs away only where the text proves that nothing in it asks for more: every command is understood
(`understood_commands.py`), every `srun` and every other launcher is found, also in variables, quotes, functions,
here-documents and scripts that the script calls, and what it asks for can be computed. Otherwise the trainer keeps its
CPUs, and the reason names the line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hetstream.hetjob.convert.launch_options import Step, processes_of_mpi, program_of_mpi, steps_of
from hetstream.hetjob.convert.launches import Launch, ScriptText, check_program, check_variables, launches_of
from hetstream.hetjob.convert.sbatch_options import TRES_CPUS
from hetstream.hetjob.convert.shell import Unknown, UnreadableText, Values, Word, as_number
from hetstream.hetjob.convert.understood_commands import OfCpus, UnderstoodCommands, functions_of

# srun takes one of them for its -c: the first before Slurm 23.11, the second since then (env_vars in src/srun/opt.c). A
# script that sets the other one means it, too, so there is to be room by both.
_VARIABLES_OF_SRUN = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK")
# Options of srun that say how many CPUs a step has, and what its programs are told.
_MAY_FOLLOW = ("cpus-per-task", "cpus-per-gpu", "tres-per-task", "export")


@dataclass(frozen=True)
class Allocation:
    """What a job has.

    Attributes:
        unit: option by which CPUs are asked for: `cpus-per-task`, `cpus-per-gpu` or `tres-per-task`.
        units: tasks or GPUs in all, which have so many CPUs each.
        tasks: in all.
        nodes: None where the request leaves that open.
        gpus: in all.
        may_lack: of Slurm's variables those that the job has only if it says how many tasks there are.
        by_cpus: of Slurm's variables those that depend on CPUs in this job, and not in each.
    """

    unit: str
    units: int
    tasks: int
    nodes: int | None
    gpus: int
    may_lack: tuple[str, ...] = ()
    by_cpus: tuple[str, ...] = ()

    def holds(self, tasks: int, cpus_per_task: int, nodes: int | None, cpus: int) -> bool:
        """Return whether a step has room where each unit has this number of CPUs."""
        if self.nodes == 1 or self.units == 1:
            return tasks * cpus_per_task <= max(self.units * cpus, self.tasks)
        if self.nodes is None:  # nobody knows how units share nodes: each task must fit into its unit
            return math.ceil(tasks / max(1, self.units)) * cpus_per_task <= cpus
        on_node = math.ceil(tasks / min(nodes or self.nodes, self.nodes))
        return on_node * cpus_per_task <= max(self.units // self.nodes * cpus, self.tasks // self.nodes)

    def variables(self, cpus: int) -> dict[str, str]:
        """Slurm's variables in the batch script where each unit has this number of CPUs."""
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
class SubmitContext:
    """What there is around a script when it is submitted.

    Attributes:
        read: a file's text by its path in the script; None if it cannot be read as text.
        environ: variables that the job will have from outside.
    """

    read: Callable[[str], str | None] = _no_file
    environ: Mapping[str, str] = field(default_factory=dict)


def least_cpus(
    script: str, allocation: Allocation, kept: int, asked: int, surroundings: SubmitContext
) -> tuple[int | None, str]:  # fmt: skip
    """Return the fewest CPUs of each unit, from `kept` on, with which all steps of a script have room.

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

        functions = functions_of(text.commands)
        of_cpus = OfCpus(text.commands, [*functions, *text.was_read], allocation.by_cpus)

        def with_cpus(number: int) -> _JobSize:
            given = {**surroundings.environ, **allocation.variables(number)}
            return _JobSize(number, values.with_given(given, allocation.may_lack))

        before = with_cpus(asked)
        for cpus in range(kept, asked):
            try:
                for variable in _VARIABLES_OF_SRUN:
                    _Check(text, processes, allocation, with_cpus(cpus), before, of_cpus, variable).check_all()
            except _NoRoom as error:
                why = str(error)
            else:
                has_mpi = any(launch.launcher != "srun" for launch in text.launches)
                UnderstoodCommands(
                    before.values, functions, text.was_read, check_program, of_cpus, has_mpi=has_mpi
                ).check_all(text.placed)
                return cpus, why
    except (Unknown, UnreadableText) as error:
        return None, f"{error}, so nothing proves that fewer CPUs are enough (--trainer-cpus=N says that they are)"
    return asked, why


class _NoRoom(ValueError):
    """A step that needs more CPUs than there would be."""


class _JobSize(NamedTuple):
    """A job by the CPUs of each unit: their number, and the variables of its script then."""

    cpus: int
    values: Values


@dataclass(frozen=True)
class _Check:
    """Whether all steps have room, and are as many and of as many tasks as before.

    Attributes:
        text: what was found in the script.
        processes: that it starts on each node, as its words say.
        allocation: what its job has.
        now: with fewer CPUs.
        before: with those that it asks for.
        of_cpus: which of its words depend on them.
        variable: that srun takes for its -c.
    """

    text: ScriptText
    processes: Sequence[Word]
    allocation: Allocation
    now: _JobSize
    before: _JobSize
    of_cpus: OfCpus
    variable: str

    def check_all(self) -> None:
        """Look at all steps.

        Raises:
            _NoRoom: one has none.
            Unknown: that cannot be known, or they would be others.
        """
        for launch in self.text.launches:
            try:
                if any(word.text == ":" for word in launch.words):
                    raise Unknown("it starts several programs, with : between them")
                if launch.launcher == "srun":
                    self._check_srun(launch)
                else:
                    self._check_mpi(launch)
            except Unknown as error:
                raise Unknown(f"{launch.where} runs {launch.launcher}: {error}") from error
        for word in self.processes:
            try:
                numbers, numbers_before = (
                    [as_number(found) for found in size.values.of(word.text)] for size in (self.now, self.before)
                )
                _refuse_another("number of them", numbers, numbers_before)
            except Unknown as error:
                raise Unknown(f"line {word.line} starts processes on each node: {error}") from error
            for number in numbers:
                if not self.allocation.holds(number * (self.allocation.nodes or 1), 1, None, self.now.cpus):
                    raise _NoRoom(f"line {word.line} starts {number} processes on each node, which need a CPU each")

    def _check_srun(self, launch: Launch) -> None:
        now, before = (
            [(options, _needs(options, self.allocation, size.values, self.variable)) for options in options_of]
            for size, options_of in ((size, steps_of(launch.words, size.values)) for size in (self.now, self.before))
        )
        for _, step in now:
            self._check_room(launch, step)
        self._check_others(now, before)
        # Steps side by side share the CPUs: that is as before where each has a share of them.
        sizes, sizes_before = (
            [tasks * cpus for _, step in found if step.is_exact for tasks, cpus in step.sizes]
            for found in (now, before)
        )
        shares = [size * self.before.cpus for size in sizes]
        if self.text.has_background and sizes and shares != [size * self.now.cpus for size in sizes_before]:
            raise Unknown("steps may run side by side")

    def _check_room(self, launch: Launch, step: _Needs) -> None:
        allocation, now = self.allocation, self.now.cpus
        for tasks, cpus_per_task in step.sizes:
            what = f"{cpus_per_task} CPUs per task" if step.is_whole else f"{tasks} tasks of {cpus_per_task} CPUs"
            if not cpus_per_task or not allocation.holds(tasks, cpus_per_task, step.nodes, now):
                raise _NoRoom(f"{launch.where} runs srun with {what}, which needs as many in the job")
        of_gpu = now if allocation.unit == "cpus-per-gpu" else allocation.units * now // max(1, allocation.gpus)
        if step.cpus_per_gpu > of_gpu:
            raise _NoRoom(
                f"{launch.where} runs srun with {step.cpus_per_gpu} CPUs per GPU, which needs as many in the job"
            )

    def _check_others(self, now: Sequence[tuple[Step, _Needs]], before: Sequence[tuple[Step, _Needs]]) -> None:
        """Whether all but CPUs is as before."""
        for what in ("tasks", "nodes"):
            _refuse_another(
                f"number of {what}",
                *({str(getattr(step, what)) for _, step in found} for found in (now, before)),
            )
        for name in {name for options, _ in (*now, *before) for name in options if name not in _MAY_FOLLOW}:
            given, given_before = ([options.get(name) for options, _ in found] for found in (now, before))
            try:
                texts, texts_before = (
                    {text for item in items if item for text in item.texts(size.values)}
                    for items, size in ((given, self.now), (given_before, self.before))
                )
                _refuse_another(f"--{name}", texts, texts_before)
            except Unknown:
                if any(item and self.of_cpus.is_in(item.word.text) for item in given) or name in ("ntasks", "nodes"):
                    raise

    def _check_mpi(self, launch: Launch) -> None:
        """Of mpirun and its like the number of processes is read, each of which needs a CPU."""
        (tasks, is_per_node), (tasks_before, _) = (
            processes_of_mpi(launch.words, size.values) for size in (self.now, self.before)
        )
        _refuse_another("number of processes", tasks, tasks_before)
        options = launch.words[: len(launch.words) - len(program_of_mpi(launch.words, self.now.values))]
        if text := self.of_cpus.first([word for word in options if not re.match(r"\w+=", word.text)]):
            raise Unknown(f"its {text[:40]!r} depends on how many CPUs there are")
        allocation = self.allocation
        tasks = [number * (allocation.nodes or allocation.tasks) for number in tasks] if is_per_node else tasks
        if not all(allocation.holds(number, 1, None, self.now.cpus) for number in tasks or [allocation.tasks]):
            raise _NoRoom(f"{launch.where} runs {launch.launcher} with {max(tasks)} processes, which need a CPU each")


def _refuse_another(what: str, now: Iterable[object], before: Iterable[object]) -> None:
    if {*now} != {*before}:
        raise Unknown(f"its {what} depends on how many CPUs there are")


@dataclass(frozen=True)
class _Needs:
    """What a step asks for: tasks and CPUs of each, in all readings.

    Attributes:
        sizes: numbers of tasks with CPUs of each.
        tasks: those numbers.
        nodes: that it runs on; None for all of the job's.
        cpus_per_gpu: 0 where it does not say.
        is_exact: it takes only the CPUs that it asks for, so that another can run beside it.
        is_whole: it has as many tasks as the job.
    """

    sizes: tuple[tuple[int, int], ...]
    tasks: tuple[int, ...]
    nodes: int | None
    cpus_per_gpu: int
    is_exact: bool
    is_whole: bool


def _needs(options: Step, allocation: Allocation, values: Values, variable: str) -> _Needs:
    def numbers(name: str, default: Sequence[str]) -> list[int]:
        given = options.get(name)
        return [as_number(text) for text in (given.texts(values) if given else default)]

    if "mem-per-cpu" in options:
        raise Unknown("with fewer CPUs its --mem-per-cpu would be less memory")
    binding = options.get("cpu-bind") or options.get("cpu_bind")
    if binding and any("map_cpu" in text or "mask_cpu" in text for text in binding.texts(values)):
        raise Unknown("it chooses CPUs by their numbers")
    own = values.of(f"${variable}") if values.has(variable) else ["1"]
    cpus = numbers("cpus-per-task", own)
    if resources := options.get("tres-per-task"):
        cpus = [int(found[1]) if (found := TRES_CPUS.search(text)) else 1 for text in resources.texts(values)]
    nodes = numbers("nodes", [])
    tasks = numbers("ntasks", sorted({*values.of("$SLURM_NTASKS"), *values.of("$SLURM_NPROCS")}))
    if "ntasks" not in options and (per_node := numbers("ntasks-per-node", [])):
        tasks = [number * count for number in per_node for count in nodes or [allocation.nodes or allocation.tasks]]
    says_cpus = bool(options.keys() & {"cpus-per-task", "tres-per-task", "cpus-per-gpu"}) or own != ["1"]
    return _Needs(
        tuple((count, each) for count in tasks for each in cpus),
        tuple(tasks),
        min(nodes) if nodes else None,
        max(numbers("cpus-per-gpu", ["0"])),
        (says_cpus or bool(options.keys() & {"exact", "exclusive"})) and "overlap" not in options,
        tasks == [allocation.tasks],
    )
