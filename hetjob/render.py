"""Write a plan into the user's script. Called by the command line; pure; never changes a byte that the user wrote.

Everything is added in one block after the last option line: options for the trainer (later ones win in sbatch), the
data-worker component, and the shell lines that start the job master and the checkpoint writers.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from hetstream.hetjob.option_lines import prologue_length
from hetstream.hetjob.plan import HetPlan

# Lines that sbatch reads options from: the block's own must come after them all.
_OPTION_LINES = ("#!", "#SBATCH", "#SLURM", "#PBS", "#BSUB", "#HETSTREAM")
_BEGIN = "# >>> hetstream >>>"
_END = "# <<< hetstream <<<"


def render(script: str, plan: HetPlan, program: Sequence[str]) -> str:
    """The sbatch text of a plan.

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
    """The user's own script again: what `render` added is taken out, if it is there."""
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
                (*program, "master", "start", *plan.master_options),
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
