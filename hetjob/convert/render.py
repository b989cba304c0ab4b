"""Write a plan into the user's script. Called by the command line; pure; never changes a byte that the user wrote.

Everything is added in one block after the last option line: options for the trainer (later ones win in sbatch), the
data-worker component, and the shell lines that start the job master and the checkpoint writers.
"""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from hetstream.hetjob.convert.directives import prologue_length
from hetstream.hetjob.convert.plan import HetPlan

# Lines that sbatch reads options from: the block's own must come after them all.
_OPTION_LINES = ("#!", "#SBATCH", "#SLURM", "#PBS", "#BSUB", "#HETSTREAM")
_BEGIN = "# >>> hetstream >>>"
_END = "# <<< hetstream <<<"


def render(script: str, plan: HetPlan, program: Sequence[str]) -> str:
    """Return the sbatch text of a plan.

    Args:
        script: the user's script; decoded with `surrogateescape`, its bytes survive.
        plan: what to add.
        program: how the job calls hetstream: words, the first an absolute path.

    Returns:
        The script with one block added.
    """
    lines = script.split("\n")
    prologue = lines[: prologue_length(lines)]
    place = max((number for number, line in enumerate(prologue, start=1) if line.startswith(_OPTION_LINES)), default=0)
    return "\n".join([*lines[:place], *_block(plan, program), *lines[place:]])


def without_block(script: str) -> str:
    """Return the user's own script again: what `render` added is taken out, if it is there."""
    lines = script.split("\n")
    if _BEGIN not in lines or _END not in lines:
        return script
    begin, end = lines.index(_BEGIN), lines.index(_END)
    return "\n".join([*lines[:begin], *lines[end + 1 :]]) if begin < end else script


def _block(plan: HetPlan, program: Sequence[str]) -> list[str]:
    trainer, *others = plan.components
    block = [_BEGIN]
    if trainer.options:
        block.append("# Component 0, the trainer: these win over the lines above.")
        block.append(f"#SBATCH {_slurm_words(trainer.options)}")
    for component in others:
        block.append(f"# Component {component.het_job_offset}, the {component.role.replace('_', ' ')}.")
        block.append("#SBATCH hetjob")
        block.append(f"#SBATCH {_slurm_words(component.options)}")
    if plan.master_options is not None:
        block += [
            "# Start the job master. If it cannot start, the script goes on and the trainer loads its own data.",
            *_start(
                (*program, "internal", "master", "start", *plan.master_options),
                "no job master, so no data workers: the trainer loads its own data",
            ),
        ]
    if plan.writer_options is not None:
        block += [
            "# Start the checkpoint writers, one on each node. If they cannot start, each trainer starts its own.",
            *_start(
                (*program, "ckpt", "start", *plan.writer_options),
                "no checkpoint writers of the job: each trainer starts its own",
            ),
        ]
    if plan.exports:
        block.append("# Of the environment of sbatch, where these would be options of every component.")
        block += [f"export {_words([f'{name}={value}'])}" for name, value in plan.exports.items()]
    return [*block, _END]


def _start(command: Sequence[str], note: str) -> list[str]:
    """Lines that run a command, export the variables that it prints, and say so if it fails; nothing else changes."""
    return [
        f"_hetstream=$({_words(command)}) ||",
        f'  echo "hetstream: {note}" >&2',
        'eval "$_hetstream"',
        "unset _hetstream",
    ]


def _words(arguments: Sequence[str]) -> str:
    return " ".join(shlex.quote(word) for word in arguments)


def _slurm_words(arguments: Sequence[str]) -> str:
    """For a `#SBATCH` line: there a backslash escapes also within quotes, other than in a shell."""
    return " ".join(shlex.quote(word).replace("\\", "\\\\") for word in arguments)


# What a script runs, as two short digests by which jobs are compared: (script) -> `WhatRuns`. Pure.
#
# Called when a job ends, with the script that Slurm has of it, and before a submission, with the user's. Two scripts
# run the same if their commands are equal but for numbers that stand alone: a sweep changes `--lr 0.1`, and a
# directory's copy nothing. A script that was edited still names the same files (`train.py`, `vit.yaml`), unless it runs
# something else. Digests, because commands may hold what their user keeps to himself.

_NUMBER = re.compile(r"""(?<![^\s=,:;"'(\[])[-+]?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![^\s,:;"')\]])""")
_FILE_NAME = re.compile(r"""[^\s"'=,;()|&<>/]+\.[A-Za-z]\w*""")
_DIGITS = 16


@dataclass(frozen=True, slots=True)
class WhatRuns:
    """Of one script.

    Attributes:
        commands: of all its commands without their numbers; "" for a script without a command.
        files: of the names of files and modules in them, in whatever folder; "" where they name none.
    """

    commands: str = ""
    files: str = ""


def what_runs(script: str) -> WhatRuns:
    """Return the digests of a script, converted or not.

    Args:
        script: its text; bytes that are no UTF-8 may come as surrogates.
    """
    lines = (line.strip() for line in re.sub(r"\\\r?\n", " ", without_block(script)).split("\n"))
    text = "\n".join(
        " ".join(_NUMBER.sub("0", line).split()) for line in lines if line and not line.startswith("#")
    )  # fmt: skip
    return WhatRuns(_digest(text), _digest("\n".join(sorted(set(_FILE_NAME.findall(text))))))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:_DIGITS] if text else ""
