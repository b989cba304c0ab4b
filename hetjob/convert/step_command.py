"""What `srun` in a converted script becomes, so that its tasks have what they have in an ordinary job.

Run by `commands/srun`. In a heterogeneous job srun does two things otherwise, also for a step of one component (seen on
22.05 to 26.05):

- The step's nodes are told to tasks as those of the job (`het_job_nnodes` in src/srun/srun_job.c and
  src/common/env.c). A prolog of each task puts back what the script has.
- Since 23.11 the tasks are counted from -1 where one is named for its files (`het_step_offset` in src/srun/srun_job.c,
  `_job_init_task_info` in src/slurmd/slurmstepd/slurmstepd_job.c): with `--output=rank-%t` task 1 writes rank-0, and
  with `--input=0` task 1 would get what srun sends to task 0. So each task opens these files itself.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hetstream.base.errors import UsageError
from hetstream.hetjob.convert.launch_options import SRUN
from hetstream.hetjob.convert.sbatch_options import SbatchOptions, parse_words, plain_words

_PROLOG = str(Path(__file__).parents[1] / "commands" / "task_prolog")
# For the prolog. srun hands on what begins with SLURM_ whatever --export says.
_OF_JOB, _OWN_PROLOG = "SLURM_HETSTREAM_OF_JOB", "SLURM_HETSTREAM_TASK_PROLOG"
_NAMES_OF_JOB = ("SLURM_JOB_NUM_NODES", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
_PRESERVED = ("SLURM_NNODES", "SLURM_TASKS_PER_NODE")  # by -E
_FILES = {
    "input": ("SRUN_INPUT", "SLURM_STDINMODE"),
    "output": ("SRUN_OUTPUT", "SLURM_STDOUTMODE"),
    "error": ("SRUN_ERROR", "SLURM_STDERRMODE"),
}
# With these a task cannot begin with a shell, or not where the files are; by option, with its variables.
_NO_SHELL = {
    "label": ("SLURM_LABELIO",),
    "multi-prog": ("SLURM_SRUN_MULTI",),
    "bcast": ("SLURM_BCAST",),
    "container": ("SRUN_CONTAINER",),
    "container-id": ("SRUN_CONTAINER_ID",),
}
_DESCRIPTORS = {"input": ("", "<"), "output": ("", ">>"), "error": ("2", ">>")}
_NODES = "SLURM_JOB_NUM_NODES_HET_GROUP_0"
_OF_PLUGIN = "_SLURM_SPANK_OPTION"
_SEVERAL = (
    "srun A : B would run B on the data workers' nodes, which are component 1 of this job. Start two sruns, each with "
    "& behind it, or name components with --het-group"
)
_PIECE = re.compile(r"%%|%(\d*)([a-zA-Z])|[^%]+|%", re.ASCII)
_WIDEST = 10
_NO_ARRAY_TASK = "4294967294"
# What slurmstepd says and does of a program that is not there.
_RUN = """\
command -v -- "$1" >/dev/null || { echo "slurmstepd: error: execve(): $1: No such file or directory" >&2; exit 2; }
exec "$@"
"""


@dataclass(frozen=True)
class StepCommand:
    """How srun is called.

    Attributes:
        arguments: behind its name; None where it would do what the script does not mean.
        variables: more of its environment.
        note: what the user should know; "" for nothing.
    """

    arguments: tuple[str, ...] | None
    variables: Mapping[str, str] = field(default_factory=dict)
    note: str = ""


def step_command(
    arguments: Sequence[str], environ: Mapping[str, str], of_plugins: Mapping[str, bool] = {}, *, appends: bool = False
) -> StepCommand:
    """Return what an srun becomes. Pure.

    Args:
        arguments: as the script calls it.
        environ: of the script.
        of_plugins: options of the site's plugins, and whether each takes a value.
        appends: whether steps write behind what a file has (`JobFileAppend`, slurm.conf(5)).
    """
    taking = [name for name, takes_value in of_plugins.items() if takes_value]
    try:
        options, program = parse_words(arguments, "srun", taking, table=SRUN)
    except UsageError:
        return StepCommand(tuple(arguments))  # srun has its own words for it
    step = _Step(tuple(arguments), SbatchOptions(tuple(options)), tuple(program), environ, appends)
    group = step.options.value("het-group") or step.options.value("pack-group")
    if ":" in program and group is None:
        return StepCommand(None, note=_SEVERAL)
    is_known = all(option.name in SRUN.takes_value or option.name in of_plugins for option in options)
    if not program or not is_known or group not in (None, "0"):
        return StepCommand(tuple(arguments))
    is_elsewhere = any(map(step.options.has, of_plugins)) or any(name.startswith(_OF_PLUGIN) for name in environ)
    return step.command("an option of a plugin" if is_elsewhere else "")


@dataclass(frozen=True)
class _Step:
    """An srun as it was called: its options, the program with its arguments, and what is around it."""

    arguments: tuple[str, ...]
    options: SbatchOptions
    program: tuple[str, ...]
    environ: Mapping[str, str]
    appends: bool

    def command(self, elsewhere: str) -> StepCommand:
        """Return what it becomes.

        Args:
            elsewhere: why tasks may see other files than srun, as in a container; "" if they do not.
        """
        files, of_job = self._files_of_tasks(), self._of_job()
        obstacle = next((f"--{name}" for name, names in _NO_SHELL.items() if self._says(name, names)), elsewhere)
        note = ""
        if files and obstacle:
            note = f"{', '.join(f'--{kind}={name}' for kind, name in files.items())}: in a job with data workers Slurm "
            note += f"counts tasks from -1 in such names since 23.11, and with {obstacle} hetstream cannot put it right"
            if "input" in files:
                return StepCommand(None, note=note)
            files = {}
        text = self._opening(files)
        prolog = {}
        if of_job and elsewhere and not self._says("multi-prog", _NO_SHELL["multi-prog"]):
            text = "".join(f"export {shlex.quote(f'{name}={value}')}\n" for name, value in of_job.items()) + text
        elif of_job and not elsewhere:
            prolog = self._prolog(of_job)
        own_words = self._own_words()
        if not text and not prolog:
            return StepCommand(self.arguments, own_words, note)
        added = [f"--task-prolog={_PROLOG}"] if prolog else []
        replaced = [*files, *(["task-prolog"] if prolog else [])]
        if "output" in files and not self._file("error"):
            files = {**files, "error": ""}
        added += [f"--{kind}=all" for kind in files]
        return StepCommand((*self._words(replaced, added, text, elsewhere),), own_words | prolog, note)

    def _words(self, replaced: Sequence[str], added: Sequence[str], text: str, elsewhere: str) -> list[str]:
        """The words for srun; with a text the program begins with a shell that runs it."""
        options = plain_words(item for item in self.options.items if item.name not in replaced)
        if not text:
            return [*options, *added, "--", *self.program]
        if not self.options.has("job-name"):  # the step's; srun tells it to the tasks as the job's
            added = [*added, f"--job-name={self.program[0].rpartition('/')[2]}"]
            text = f"export SLURM_JOB_NAME={shlex.quote(self.environ.get('SLURM_JOB_NAME', ''))}\n{text}"
        # bash leaves functions in the environment with -p; in a container there may be another shell alone.
        shell = ["/bin/sh"] if elsewhere else ["/bin/bash", "-p"]
        return [*options, *added, "--", *shell, "-c", text + _RUN, "srun", *self.program]

    def _own_words(self) -> dict[str, str]:
        """What the script says of the job: srun takes these of component 0 after it (`_opt_env` in src/srun/opt.c)."""
        pairs = [(name, f"{name}_{kind}_GROUP_0") for name in _NAMES_OF_JOB for kind in ("HET", "PACK")]
        found = {of_component: self.environ.get(name) for name, of_component in pairs if of_component in self.environ}
        return {name: value for name, value in found.items() if value and value != self.environ[name]}

    def _says(self, name: str, variables: Sequence[str]) -> bool:
        return self.options.has(name) or any(self.environ.get(variable) for variable in variables)

    def _of_job(self) -> dict[str, str]:
        """Variables that srun would change for the tasks, and does not in an ordinary job."""
        is_preserved = self._says("preserve-env", ("SLURM_PRESERVE_ENV",))
        names = [*(_NAMES_OF_JOB if self.environ.get(_NODES) != "1" else ()), *(_PRESERVED if is_preserved else ())]
        found = {name: self.environ[name] for name in names if name in self.environ}
        return {name: value for name, value in found.items() if not re.search(r"\s", value)}

    def _prolog(self, of_job: Mapping[str, str]) -> dict[str, str]:
        """What the prolog is told: the variables of the job, and which prolog the script has."""
        own = self.options.value("task-prolog") or self.environ.get("SLURM_TASK_PROLOG", "")
        for_prolog = {_OF_JOB: " ".join(f"{name}={value}" for name, value in of_job.items())}
        return for_prolog | ({_OWN_PROLOG: own} if own and own.lower() != "none" else {})

    def _file(self, kind: str) -> str:
        """The name of a file as it is in force; "" without one."""
        from_outside = (self.environ[name] for name in _FILES[kind] if self.environ.get(name))
        return self.options.value(kind) or next(from_outside, "")

    def _files_of_tasks(self) -> dict[str, str]:
        """Those of the three files that depend on the task. With --pty only the first one has any."""
        if self.options.has("pty"):
            return {}
        return {kind: name for kind in _FILES if is_of_tasks(name := self._file(kind))}

    def _opening(self, files: Mapping[str, str]) -> str:
        """Text for a shell that opens the files of its task, as slurmstepd does."""
        mode = self.options.value("open-mode") or self.environ.get("SLURM_OPEN_MODE", "")
        appends = mode[:1] == "a" or (mode[:1] != "t" and self.appends)
        text = ""
        for kind, name in files.items():
            number, sign = _DESCRIPTORS[kind]
            both = " 2>&1" if kind == "output" and not self._file("error") else ""
            if name.strip().isdecimal():
                # A number that no task has is the name of a file.
                file = f"{number}{sign}{shlex.quote(name)}{both}"
                text += f'if [ {int(name)} -ge "$SLURM_STEP_NUM_TASKS" ]; then exec {file}\n'
                text += f'elif [ {int(name)} -ne "$SLURM_PROCID" ]; then exec {number}{sign}/dev/null{both}\n'
                text += f"else exec{both}; fi\n"
                continue
            text += f"file={name_for_shell(name, self.environ)}\n"
            if kind != "input":
                text += 'case $file in */*) mkdir -p -- "${file%/*}/" ;; esac\n'
                text += "" if appends else ': >"$file"\n'
            text += f'exec {number}{sign}"$file"{both}\n'
        return text + ("unset file\n" if text else "")


def is_of_tasks(name: str) -> bool:
    """Return whether the name of a file, or its absence, depends on the number of a task. Pure."""
    if "\\" in name:
        return False  # srun takes such a name as it is
    return name.strip().isdecimal() or any(found[2] == "t" for found in _PIECE.finditer(name))


def name_for_shell(name: str, environ: Mapping[str, str]) -> str:
    """Shell words for the name that a task's file has (filename pattern, srun(1)). Pure.

    Args:
        name: as srun is given it.
        environ: of srun.
    """
    array_task = environ.get("SLURM_ARRAY_TASK_ID") or _NO_ARRAY_TASK
    numbers = {
        **{"t": '"$SLURM_PROCID"', "n": '"$SLURM_NODEID"', "s": '"$SLURM_STEP_ID"'},
        **{"j": '"$SLURM_JOB_ID"', "J": '"$SLURM_JOB_ID"', "a": array_task, "b": str(int(array_task) % 10)},
        "A": environ.get("SLURM_ARRAY_JOB_ID") or '"$SLURM_JOB_ID"',
    }
    texts = {
        **{"N": '"$SLURMD_NODENAME"', "u": '"$SLURM_JOB_USER"', "x": shlex.quote(environ.get("SLURM_JOB_NAME", ""))},
    }
    found = ""
    for piece in _PIECE.finditer(name):
        width = min(int(piece[1] or 0), _WIDEST)
        if piece[2] in numbers:
            found += f"$(printf %0{width}d {numbers[piece[2]]})" if width else numbers[piece[2]]
            found += '."$SLURM_STEP_ID"' if piece[2] == "J" else ""
        elif piece[2] in texts:
            found += texts[piece[2]]
        else:
            found += shlex.quote("%" if piece[0] == "%%" else piece[0])
    return found


def main() -> None:
    """Call srun, whose path and arguments are this program's.

    Its environment is this process's first one: Python may have put a locale into its own.
    """
    srun, *arguments = sys.argv[1:]
    entries = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    environ = dict(entry.partition("=")[::2] for entry in entries if "=" in entry)
    command = step_command(arguments, environ, _of_plugins(srun, arguments), appends=_appends(arguments))
    if command.note:
        sys.stderr.write(f"hetstream: {command.note}\n")
        sys.stderr.flush()
    if command.arguments is None:
        raise SystemExit(1)
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python
        signal.signal(ignored, signal.SIG_DFL)
    os.execve(srun, ["srun", *command.arguments], {**environ, **command.variables})


def _of_plugins(srun: str, arguments: Sequence[str]) -> dict[str, bool]:
    """Long options that are in no table and that srun knows; empty where there is no such word."""
    names = {word[2:].partition("=")[0] for word in arguments if word.startswith("--")}
    if all(any(known.startswith(name) for known in SRUN.takes_value) for name in names):
        return {}
    said = subprocess.run([srun, "--help"], capture_output=True, text=True, check=False).stdout
    found = re.findall(r"^\s+(?:-\w, )?--([\w-]+)(=|\[=)?", said, re.MULTILINE)
    return {name: value == "=" for name, value in found if name not in SRUN.takes_value}


def _appends(arguments: Sequence[str]) -> bool:
    """Whether the site's steps write behind what a file has; asked only where a file's name may count."""
    if not any("%" in word or word[-1:].isdecimal() for word in arguments):
        return False
    said = subprocess.run(["scontrol", "show", "config"], capture_output=True, text=True, check=False).stdout
    return bool(re.search(r"^JobFileAppend\s*=\s*1", said, re.MULTILINE))


if __name__ == "__main__":
    main()
