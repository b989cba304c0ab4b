"""How many CPUs the steps that a script starts need at the least. Pure; called by `convert_trainer.py`.

The trainer gives CPUs away only where the text proves that nothing in it asks for more: every command is understood
(`understood_commands.py`), every `srun` and every other launcher is found, also in variables, quotes, functions,
here-documents and scripts that the script calls, and what it asks for can be computed. Otherwise the trainer keeps its
CPUs, and the reason names the line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hetstream.hetjob.files_named import reachable
from hetstream.hetjob.mpi_options import OF_MPI, processes_of_mpi
from hetstream.hetjob.python_processes import check_python
from hetstream.hetjob.sbatch_options import TRES_CPUS
from hetstream.hetjob.shell_text import Command, UnreadableText, Word, commands, inner_texts, unquoted
from hetstream.hetjob.shell_values import Unknown, Values, as_number
from hetstream.hetjob.srun_options import Step, steps_of
from hetstream.hetjob.understood_commands import LAUNCHERS, SHELLS, Placed, UnderstoodCommands, functions_of

# What starts processes in ways that are not read here, or chooses CPUs by their numbers.
_OPAQUE = ("aprun", "jsrun", "prun", "taskset", "numactl", "likwid-pin", "likwid-mpirun")
_NAMES = "|".join(re.escape(name) for name in (*LAUNCHERS, *_OPAQUE))
_MENTION = re.compile(rf"(?<![\w./-])(?:[\w./-]*/)?({_NAMES})(?![\w./-])")
# Variables of srun that ask for CPUs or say where they are.
_OF_SRUN = re.compile(
    r"S(?:RUN|LURM)_\w*(?:CPU|TASK|PROC|CORE|THREAD|EXACT|EXCLUSIVE|HINT|BIND|TRES|OVERLAP|MEM_PER_)\w*"
)
# Slurm gives them to each job anew.
_OF_JOB = re.compile(
    r"SLURM_(JOB_CPUS_PER_NODE|CPUS_ON_NODE|TASKS_PER_NODE|PROCID|TASK_PID|PRIO_PROCESS|STEP_\w+|\w+_(HET|PACK)_GROUP_\d+)"
)
_HANDLED = ("SRUN_CPUS_PER_TASK", "SLURM_CPUS_PER_TASK", "SLURM_NTASKS", "SLURM_NPROCS")
# Files that set up an environment and start no steps; they are found by paths of the site that nobody else knows.
_SETTING_UP = re.compile(
    r"(^|/)(activate|conda\.sh|mamba\.sh|setup-env\.sh|\.?\w*profile(\.d/.*)?|\.?bashrc|\w*modules?\.sh)$|/init/"
)
_PROCESSES = re.compile(r"--(?:nproc[-_]per[-_]node|num[-_]processes)(?:=(.*))?$", re.DOTALL)
_NO_CALLS = (
    *("echo", "printf", "rm", "chmod", "cp", "mv", "ln", "mkdir", "cat", "ls"),
    *("test", "[", "[[", "cd", "module", "ml"),
)
_DEEPEST, _MOST_STEPS = 4, 200


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


@dataclass(frozen=True)
class _Launch:
    """A launcher's words behind its name, and where it stands."""

    launcher: str
    words: tuple[Word, ...]
    where: str


@dataclass
class _Text:
    """What was found in a script and in what it calls."""

    launches: list[_Launch] = field(default_factory=list)
    commands: list[Command] = field(default_factory=list)
    placed: list[Placed] = field(default_factory=list)
    was_read: set[str] = field(default_factory=set)
    has_background: bool = False
    is_complete: bool = True

    def processes_per_node(self) -> list[Word]:
        """What `--nproc-per-node` of a launcher says, and of `accelerate`, which says it of all nodes: no fewer."""
        found = []
        for command in self.commands:
            for word, following in zip(command.words, (*command.words[1:], None), strict=True):
                option = _PROCESSES.match(unquoted(word.text))
                number = "" if not option else option[1] or (unquoted(following.text) if following else "")
                if number not in ("", "gpu", "auto", "cpu"):
                    found.append(Word(number, word.line))
        return found


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
        text = _find(script, surroundings.read)
        _check_given(surroundings.environ, text)
        values, processes = Values(text.commands, {}, is_complete=text.is_complete), text.processes_per_node()

        def with_cpus(number: int) -> _Of:
            return number, values.with_given({**surroundings.environ, **allocation.variables(number)})

        before = with_cpus(asked)
        for cpus in range(kept, asked):
            try:
                _check_all(text, processes, allocation, with_cpus(cpus), before)
            except _NoRoom as error:
                why = str(error)
            else:
                functions, was_read = functions_of(text.commands), text.was_read
                UnderstoodCommands(before[1], functions, was_read, _check_python).check_all(text.placed)
                return cpus, why
    except (Unknown, UnreadableText) as error:
        return None, f"{error}, so nothing proves that fewer CPUs are enough (--trainer-cpus=N says that they are)"
    return asked, why


def is_of_srun(name: str) -> bool:
    """Whether a variable from outside asks srun for CPUs in a way that is not followed here."""
    return bool(_OF_SRUN.fullmatch(name)) and not _OF_JOB.fullmatch(name) and name not in _HANDLED


def _check_given(environ: Mapping[str, str], text: _Text) -> None:
    """Refuse variables from outside, or of the script, that say how launchers choose CPUs."""
    for name in environ:
        if is_of_srun(name):
            raise Unknown(f"the environment of the submission has {name}")
    if any(launch.launcher != "srun" for launch in text.launches):
        assigned = (re.match(r"(\w+)\+?=", word.text) for command in text.commands for word in command.words)
        for name in [*environ, *(found[1] for found in assigned if found)]:
            if OF_MPI.fullmatch(name):
                raise Unknown(f"{name} says how MPI chooses CPUs")


def _check_python(text: str, where: str) -> None:
    check_python(text, where, _MENTION)


class _NoRoom(ValueError):
    """A step that needs more CPUs than there would be."""


_Of = tuple[int, Values]


def _check_all(
    text: _Text, processes: Sequence[Word], allocation: Allocation, now: _Of, before: _Of
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
            numbers = [as_number(found) for found in now[1].of(word.text)]
        except Unknown as error:
            raise Unknown(f"line {word.line} starts processes on each node: {error}") from error
        for number in numbers:
            if not allocation.holds(number * (allocation.nodes or 1), 1, None, now[0]):
                raise _NoRoom(f"line {word.line} starts {number} processes on each node, which need a CPU each")


def _check_srun(launch: _Launch, allocation: Allocation, now: _Of, before: _Of, *, is_alone: bool) -> None:
    def readings(values: Values) -> list[_Needs]:
        return [_needs(options, allocation, values) for options in steps_of(launch.words, values)]

    def exact_sizes(found: Sequence[_Needs]) -> list[int]:
        return [tasks * cpus for step in found if step.is_exact for tasks, cpus in step.sizes]

    steps = readings(now[1])
    for step in steps:
        for tasks, cpus_per_task in step.sizes:
            what = f"{cpus_per_task} CPUs per task" if step.is_whole else f"{tasks} tasks of {cpus_per_task} CPUs"
            if not cpus_per_task or not allocation.holds(tasks, cpus_per_task, step.nodes, now[0]):
                raise _NoRoom(f"{launch.where} runs srun with {what}, which needs as many in the job")
        if step.cpus_per_gpu > (
            now[0] if allocation.unit == "cpus-per-gpu" else allocation.units * now[0] // max(1, allocation.gpus)
        ):
            raise _NoRoom(
                f"{launch.where} runs srun with {step.cpus_per_gpu} CPUs per GPU, which needs as many in the job"
            )
    # Steps side by side share the CPUs: that is as before where each has a share of them.
    sizes = [] if is_alone else exact_sizes(steps)
    if sizes and [size * before[0] for size in sizes] != [size * now[0] for size in exact_sizes(readings(before[1]))]:
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


def _check_mpi(launch: _Launch, allocation: Allocation, now: _Of) -> None:
    """Of mpirun and its like the number of processes is read, each of which needs a CPU."""
    tasks, is_per_node = processes_of_mpi(launch.words, now[1])
    tasks = [number * (allocation.nodes or allocation.tasks) for number in tasks] if is_per_node else tasks
    if not all(allocation.holds(number, 1, None, now[0]) for number in tasks or [allocation.tasks]):
        raise _NoRoom(f"{launch.where} runs {launch.launcher} with {max(tasks)} processes, which need a CPU each")


def _find(script: str, read: Callable[[str], str | None]) -> _Text:
    """All that a script starts, and what it calls.

    Raises:
        Unknown: something of it cannot be read.
    """
    found = _Text()
    pending, seen = [(script, "", 0)], set[str]()
    while pending:
        text, place, depth = pending.pop()
        try:
            parsed = commands(text)
        except UnreadableText as error:
            raise Unknown(f"{place or 'the script '}cannot be split into commands ({error})") from error
        found.commands += parsed
        values = Values(found.commands, {})
        is_beside = False
        for command in parsed:
            before = len(found.launches)
            _look_at(command, values, found, place)
            is_launch = len(found.launches) > before
            found.has_background |= is_beside and (is_launch or command.words[0].text == "while")
            is_beside = command.is_piped and (is_launch or is_beside or len(command.words) == 1)
            found.placed.append(Placed(command, place))
            for path, is_needed in _called(command, values, place):
                called = read(path)
                if called is not None:
                    found.was_read.add(path)
                if called is None:
                    if is_needed:
                        raise Unknown(f"{_at(place, command.words[0])} runs {path}, which cannot be read here")
                elif path.endswith(".py"):
                    continue  # read below
                elif depth >= _DEEPEST:
                    raise Unknown(f"{_at(place, command.words[0])} runs scripts that run scripts ({path})")
                elif is_needed or re.match(r"#!.*sh\b", called) or re.search(r"\.(sh|bash|ksh|zsh)$", path):
                    pending.append((called, f"{path} ", depth + 1))
                    seen.add(path)
        if len(found.launches) > _MOST_STEPS:
            raise Unknown(f"the script starts more than {_MOST_STEPS} steps")
    found.is_complete = all(read(path) is not None for command in found.commands for path in _sourced(command))
    for path, text in reachable(tuple(found.commands), Values(found.commands, {}), read, _NO_CALLS):
        if path.endswith(".py"):
            _check_python(text, path)
        elif _SETTING_UP.search(path):
            for assigned in re.finditer(r"^[ \t]*(?:export[ \t]+)?(\w+=[^\s;]*)", text, re.MULTILINE):
                word = Word(assigned[1], text.count("\n", 0, assigned.start()) + 1)
                _check_variable(word, f"{path} ")
                found.commands.append(Command((word,)))
        elif path not in seen and (mention := _MENTION.search(text)):
            line = text.count("\n", 0, mention.start()) + 1
            raise Unknown(f"{path} line {line} has {mention[1]}, and nothing says what runs it")
    return found


def _at(place: str, word: Word) -> str:
    return f"{place}line {word.line}"


def _look_at(command: Command, values: Values, found: _Text, place: str, depth: int = 0) -> None:
    """Note the steps that a command starts, and those in texts in it."""
    found.has_background |= command.in_background
    arguments = list(values.with_launchers(command.words, _MENTION))
    first = unquoted(arguments[0].text) if arguments else ""
    if first == "alias" and any(_MENTION.search(word.text) for word in arguments):
        raise Unknown(f"{_at(place, arguments[0])} has a launcher in an alias")
    if first in ("parallel", "xargs", "coproc", "make"):
        found.has_background = True
    if (
        first in ("echo", "printf", "logger")
        and not command.goes_on
        and not any("$(" in word.text for word in arguments)
    ):
        return  # it only says so
    for index, word in enumerate(arguments):
        _check_variable(word, place)
        if not _MENTION.search(word.text) and not _MENTION.search(unquoted(word.text)):
            continue
        found_by = re.fullmatch(r'"?\$\((?:which|command -v|type -p)\s+([\w.]+)\s*\)"?', word.text)
        plain = found_by[1] if found_by else unquoted(word.text)
        name = plain.rpartition("/")[2]
        if name in _OPAQUE and re.fullmatch(r"[\w./-]+", plain):
            if name != "numactl" or _binds_cpus(arguments[index + 1 :]):
                raise Unknown(f"{_at(place, word)} runs {name}")
        elif name in LAUNCHERS and re.fullmatch(r"[\w./-]+", plain):
            found.launches.append(_Launch(name, tuple(arguments[index + 1 :]), _at(place, word)))
        else:
            _look_inside(word, values, found, place, depth)


def _look_inside(word: Word, values: Values, found: _Text, place: str, depth: int) -> None:
    """The same for a word that has a launcher somewhere in it: as a text of its own, or nobody knows."""
    name, equals, value = word.text.partition("=")
    texts = list(inner_texts(word.text))
    if equals and re.fullmatch(r"\w+\+?", name):
        texts = list(inner_texts(word.text[len(name) :])) or [value]
    outside = _MENTION.search(re.sub(r"\s+", " ", _without(word.text, texts)))
    if outside and not (equals and re.fullmatch(r"\w+\+?", name)):
        raise Unknown(f"{_at(place, word)} has {outside[1]} in {unquoted(word.text)[:40]!r}")
    for text in texts:
        if not _MENTION.search(text):
            continue
        if not equals and _MENTION.fullmatch(text.strip()):
            raise Unknown(f"{_at(place, word)} has {text.strip()} in {unquoted(word.text)[:40]!r}")
        if depth >= _DEEPEST:
            raise Unknown(f"{_at(place, word)} has {_MENTION.findall(text)[0]} in texts of texts")
        try:
            inner = commands(text, word.line)
        except UnreadableText as error:
            raise Unknown(f"{_at(place, word)} has text that is no command ({error})") from error
        for command in inner:
            first = unquoted(command.words[0].text)
            is_made = word.text.lstrip('"').startswith(("$(", "`")) and first in ("echo", "printf", "cat")
            if is_made or not re.search(r"[\w$]", first):
                raise Unknown(f"{_at(place, word)} has a launcher in {text[:40]!r}")
            _look_at(Command(command.words, command.in_background, goes_on=True), values, found, place, depth + 1)


def _without(text: str, parts: Sequence[str]) -> str:
    for part in parts:
        text = text.replace(part, "", 1)
    return text


def _check_variable(word: Word, place: str) -> None:
    """Refuse assignments to srun's own variables whose meaning is not followed."""
    name = re.match(r"(\w+)\+?=", word.text)
    if name and _OF_SRUN.fullmatch(name[1]) and name[1] not in _HANDLED:
        raise Unknown(f"{_at(place, word)} sets {name[1]}")


def _binds_cpus(arguments: Sequence[Word]) -> bool:
    return any(re.match(r"-C|-N|--physcpubind|--cpunodebind|--cpubind|-c", unquoted(word.text)) for word in arguments)


def _called(command: Command, values: Values, place: str) -> Iterator[tuple[str, bool]]:
    """Paths of what a command may run, and whether it certainly does, as a shell script."""
    arguments = [word for word in command.words if not re.match(r"\w+=", word.text)]
    if not arguments or arguments[0].text in _NO_CALLS:
        return
    shell = ""
    for index, word in enumerate(arguments):
        plain = unquoted(word.text)
        if plain.startswith("-"):
            shell = "" if re.match(r"-\w*[cs]$", plain) else shell  # text, or standard input
            continue
        is_needed = bool(shell) or (index == 0 and plain.endswith(".sh"))
        shell = plain.rpartition("/")[2] if plain.rpartition("/")[2] in (*SHELLS, "source", ".") else ""
        if (
            _SETTING_UP.search(plain)
            or re.match(r"[<>(]|/dev/", plain)
            or not (is_needed or re.search(r"/|\.py$", plain))
        ):
            continue
        try:
            for path in values.of(word.text):
                yield path, is_needed
        except Unknown:
            if is_needed:
                raise Unknown(f"{_at(place, word)} runs {plain}, which is known only in the job") from None


def _sourced(command: Command) -> Iterator[str]:
    """Files that a command reads into this shell."""
    parts = [unquoted(word.text) for word in command.words if word.text not in ("if", "then", "else", "do", "!", "{")]
    if len(parts) > 1 and parts[0] in ("source", "."):
        yield parts[1]
