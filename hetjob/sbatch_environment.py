"""sbatch's environment as options: which variables it reads, and what of them holds beside a script's own options.

Called for every conversion. sbatch reads a variable as an option of *every* component, over a component's own lines:
SBATCH_PARTITION would take the data workers to the trainer's partition, too. So these options become the trainer's, and
sbatch is called without the variables.

Source: `env_vars` in src/sbatch/opt.c and `validate_options_salloc_sbatch_srun` in src/common/slurm_opt.c of Slurm
22.05 to 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Literal

from hetstream.hetjob.sbatch_options import TAKES_VALUE, TRES_CPUS, SbatchOption, SbatchOptions

# In sbatch's order: of two variables with one option the later wins. Variables of sbatch itself (SBATCH_WAIT) and of
# what it carries from component to component anyway (SBATCH_TIMELIMIT) are not listed, but for those of which component
# 1 may have its own.
_VARIABLES: Mapping[str, str] = {
    "SBATCH_ACCOUNT": "account",
    "SBATCH_ARRAY_INX": "array",
    "SBATCH_BURST_BUFFER": "bb",
    "SBATCH_CONSOLIDATE_SEGMENTS": "consolidate-segments",
    "SBATCH_CONSTRAINT": "constraint",
    "SBATCH_CONTAINER": "container",
    "SBATCH_CONTAINER_ID": "container-id",
    "SBATCH_CONTAINER_TYPE": "container-type",
    "SBATCH_CORE_SPEC": "core-spec",
    "SBATCH_CPU_FREQ_REQ": "cpu-freq",
    "SBATCH_CPUS_PER_GPU": "cpus-per-gpu",
    "SBATCH_DISTRIBUTION": "distribution",
    "SBATCH_EXCLUSIVE": "exclusive",
    "SBATCH_GRES": "gres",
    "SBATCH_GRES_FLAGS": "gres-flags",
    "SBATCH_GPUS": "gpus",
    "SBATCH_GPU_BIND": "gpu-bind",
    "SBATCH_GPU_FREQ": "gpu-freq",
    "SBATCH_GPUS_PER_NODE": "gpus-per-node",
    "SBATCH_GPUS_PER_SOCKET": "gpus-per-socket",
    "SBATCH_GPUS_PER_TASK": "gpus-per-task",
    "SLURM_HINT": "hint",
    "SBATCH_HINT": "hint",
    "SBATCH_MEM_BIND": "mem-bind",
    "SBATCH_MEM_PER_CPU": "mem-per-cpu",
    "SBATCH_MEM_PER_GPU": "mem-per-gpu",
    "SBATCH_MEM_PER_NODE": "mem",
    "SBATCH_NETWORK": "network",
    "SBATCH_OVERCOMMIT": "overcommit",
    "SBATCH_PARTITION": "partition",
    "SBATCH_POWER": "power",
    "SBATCH_QOS": "qos",
    "SBATCH_RESERVATION": "reservation",
    "SBATCH_SEGMENT_SIZE": "segment",
    "SBATCH_SIGNAL": "signal",
    "SBATCH_SPREAD_JOB": "spread-job",
    "SBATCH_SPREAD_SEGMENTS": "spread-segments",
    "SBATCH_THREAD_SPEC": "thread-spec",
    "SBATCH_THREADS_PER_CORE": "threads-per-core",
    "SBATCH_TRES_BIND": "tres-bind",
    "SBATCH_TRES_PER_TASK": "tres-per-task",
    "SBATCH_USE_MIN_NODES": "use-min-nodes",
}
# Both parts of --switches=COUNT@TIME, and the file with the nodes, which is no option's.
_SWITCHES, _SWITCH_TIME, _HOSTFILE = "SBATCH_REQ_SWITCH", "SBATCH_WAIT4SWITCH", "SLURM_HOSTFILE"
_FLAGS = ("consolidate-segments", "overcommit", "spread-job", "spread-segments", "use-min-nodes")
# An option of the script or the command line on the left makes sbatch forget those of its environment on the right. Of
# CPUs only newer releases do so, and 22.05 refuses both; its own variable stays in sbatch's environment, which decides.
_THREADS = ("ntasks-per-core", "threads-per-core", "extra-node-info", "cores-per-socket", "sockets-per-node")
_LEFT_TO_SBATCH = ("cpus-per-gpu",)
_GIVES_WAY: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (("mem",), ("mem-per-cpu", "mem-per-gpu")),
    (("mem-per-cpu",), ("mem", "mem-per-gpu")),
    (("mem-per-gpu",), ("mem", "mem-per-cpu")),
    (("cpus-per-task",), _LEFT_TO_SBATCH),
    (("hint",), _THREADS),
    (_THREADS, ("hint",)),
)


def from_environment(
    environ: Mapping[str, str], script: Sequence[SbatchOption] = (), command_line: Sequence[SbatchOption] = ()
) -> list[SbatchOption]:
    """The options that sbatch would read from its environment, for those that a component may have for itself.

    Args:
        environ: of sbatch.
        script: options of the script, which the environment's win over.
        command_line: its options, which win over the environment's.

    Returns:
        Without those that sbatch forgets beside another option of the script or the command line.
    """
    found = [
        SbatchOption(name, value, variable, (_written(name, value),))
        for variable, name in _VARIABLES.items()
        if variable in environ and (value := _value(name, environ[variable])) is not False
    ]
    others = SbatchOptions((*script, *command_line))
    found += _switches(environ, others)
    if _HOSTFILE in environ and not others.has("nodelist", "nodefile"):
        path = environ[_HOSTFILE]
        for name, value in (("nodelist", path if "/" in path else f"./{path}"), ("distribution", "arbitrary")):
            found.append(SbatchOption(name, value, _HOSTFILE, (_written(name, value),)))
    dropped = _forgotten(environ, script, command_line)
    return [option for option in found if option.name not in dropped]


def taken_variables(
    environ: Mapping[str, str], script: Sequence[SbatchOption] = (), command_line: Sequence[SbatchOption] = ()
) -> list[str]:
    """The variables that have become options, or give way to one: sbatch is to be called without them.

    Not those beside whose option some releases refuse the job: sbatch sees them, and says so or forgets them.
    """
    dropped = _forgotten(environ, script, command_line)
    left = dropped.intersection(_LEFT_TO_SBATCH)
    read = [
        variable
        for variable, name in _VARIABLES.items()
        if variable in environ and name not in left and _value(name, environ[variable]) is not False
    ]
    return sorted([*read, *(environ.keys() & {_SWITCHES, _SWITCH_TIME, _HOSTFILE})])


def _forgotten(
    environ: Mapping[str, str], script: Sequence[SbatchOption], command_line: Sequence[SbatchOption]
) -> set[str]:
    """The options of the environment that give way to others of the script or the command line."""
    of_environment = {name for variable, name in _VARIABLES.items() if variable in environ}
    firm = {option.name for option in script} - of_environment | {option.name for option in command_line}
    if TRES_CPUS.search(SbatchOptions((*script, *command_line)).value("tres-per-task") or ""):
        firm.add("cpus-per-task")
    dropped = {name for strong, weak in _GIVES_WAY if firm & {*strong} for name in weak}
    # One value of sbatch's: the command line's is the last. As options newer releases refuse both.
    return dropped | ({"exclusive"} if any(option.name == "oversubscribe" for option in command_line) else set())


def handed_on(environ: Mapping[str, str], script: SbatchOptions, command_line: SbatchOptions) -> dict[str, str]:
    """The variables that sbatch hands on to the job, as far as no file has them (`--export-file`).

    The command line wins over SBATCH_EXPORT, and that over the script.
    """
    if command_line.has("export-file") or script.has("export-file"):
        return {}
    export = command_line.value("export") or environ.get("SBATCH_EXPORT") or script.value("export") or "ALL"
    listed = export.split(",")
    is_whole = any(word.upper() == "ALL" for word in listed)
    named = {name: value for name, value in environ.items() if is_whole or name in listed}
    return {**named, **dict(word.split("=", 1) for word in listed if "=" in word)}


def _value(name: str, text: str) -> str | Literal[False] | None:
    """The option's value, None for a flag; False where the variable takes a flag of the script back."""
    if name in _FLAGS:
        is_set = text == "" or text.lower() == "yes" or bool(re.fullmatch(r"\s*[+-]?0*[1-9]\d*", text, re.ASCII))
        return None if is_set else False
    return text if text or TAKES_VALUE[name] else None


def _written(name: str, value: str | None) -> str:
    return f"--{name}" if value is None else f"--{name}={value}"


def _switches(environ: Mapping[str, str], others: SbatchOptions) -> list[SbatchOption]:
    """`--switches=COUNT@TIME`, which sbatch reads from a variable for each of the two."""
    count, _, time = (others.value("switches") or "").partition("@")
    if (_SWITCHES not in environ and _SWITCH_TIME not in environ) or not (count := environ.get(_SWITCHES, count)):
        return []
    time = environ.get(_SWITCH_TIME, time)
    value = f"{count}@{time}" if time else count
    origin = _SWITCHES if _SWITCHES in environ else _SWITCH_TIME
    return [SbatchOption("switches", value, origin, (_written("switches", value),))]
