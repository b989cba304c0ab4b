"""Moving a training job: what is submitted in its place, and how far the hand-over is. Called by `hetstream migrate`.

Pure. The hand-over itself is between the two trainers (`checkpoint/flash/ownership.py`); here it is only
watched.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hetstream.base.errors import UsageError
from hetstream.checkpoint.config import TAKES_OVER
from hetstream.checkpoint.disk.ownership import Event, Owner
from hetstream.hetjob.convert.sbatch_options import SbatchOption, SbatchOptions


def export_option(job_id: str, script: Sequence[SbatchOption], given: Sequence[SbatchOption]) -> SbatchOption:
    """Return the `--export` that tells a job whose training it takes over, beside what it exports anyway.

    Args:
        job_id: of the predecessor.
        script: the options of the script.
        given: those of the command line, which win.
    """
    present = SbatchOptions((*script, *given)).value("export") or "ALL"
    kept = [word for word in present.split(",") if word not in ("NONE", "NIL", "") and not word.startswith(TAKES_OVER)]
    value = ",".join([*kept, f"{TAKES_OVER}={job_id}"])
    return SbatchOption("export", value, "hetstream", (f"--export={value}",))


# As sbatch has them in a script; --mem is not the beginning of --mem-bind.
_MEMORY = re.compile(r"(?<=\s)--mem(?:-per-[cg]pu)?(?:=|\s+)\S+")
_HET = re.compile(r"#SBATCH\s+(?:hetjob|packjob)\b")


def with_memory(script: str, given: Sequence[SbatchOption]) -> str:
    """Return the script with the memory of the command line in the place of its own; unchanged if that names none.

    sbatch ends with an error where a script has `--mem-per-cpu` and its command line `--mem`. Written into the script,
    it is also what the next migration finds. Components that the user wrote have each their own memory: they are left
    alone.
    """
    memory = [word for option in given if option.name in ("mem", "mem-per-cpu", "mem-per-gpu") for word in option.words]
    lines = script.splitlines(keepends=True)
    if not memory or any(_HET.match(line) for line in lines):
        return script
    for index, line in enumerate(lines):
        if line.strip() and not line.startswith("#"):
            break  # sbatch reads no further
        if line.startswith("#SBATCH"):
            lines[index] = _MEMORY.sub(lambda _: " ".join(memory), line)
    return "".join(lines)


def arguments_of(command: str, files: Collection[str], given: Sequence[str] | None, job_id: str) -> list[str]:
    """Return the script's arguments.

    Args:
        command: the path and the arguments of the predecessor, with blanks between them.
        files: which beginnings of it are files.
        given: on the command line behind `--`; None: nothing was.
        job_id: of the predecessor.

    Raises:
        UsageError: there were arguments, and where each ends is not known.
    """
    if given is not None:
        return list(given)
    path = max(files, key=len, default=command.partition(" ")[0])
    arguments = command.removeprefix(path).strip()
    if arguments:
        raise UsageError(
            f"job {job_id} was submitted with arguments ({arguments}), and Slurm does not say where each of them ends. "
            f"Repeat them at the end: hetstream migrate {job_id} ... -- {arguments}"
        )
    return []


@dataclass(frozen=True)
class Sight:
    """What is seen of a migration.

    Attributes:
        old: id of the job that trains.
        new: id of the job that is to go on.
        old_state: its state in Slurm's spelling; "" once the queue has it no more.
        new_state: likewise.
        asked_by: id of the job whose request for the checkpoint directory is there; "" if none is.
        owner: of the checkpoint directory; None if it is not known.
        events: the directory's history.
    """

    old: str
    new: str
    old_state: str
    new_state: str
    asked_by: str = ""
    owner: Owner | None = None
    events: Sequence[Event] = ()


@dataclass(frozen=True)
class Stage:
    """How far a migration is.

    Attributes:
        text: in words.
        is_over: nothing more is to be waited for.
        is_done: the new job trains.
        pause_s: how long nobody trained, where that is known.
        step: the last one before that.
    """

    text: str
    is_over: bool = False
    is_done: bool = False
    pause_s: float | None = None
    step: int | None = None


def stage(sight: Sight) -> Stage:
    """Return how far it is."""
    old, new = sight.old, sight.new
    took, handed = (
        next((event for event in reversed(sight.events) if event.event == kind and _job(event) == new), None)
        for kind in ("took over", "handed over")
    )
    if took:
        pause = f": nobody trained for {took.pause_s:.2f} s" if took.pause_s is not None else f", as job {old} died"
        step = f" after step {took.step}" if took.step is not None else ""
        return Stage(f"job {new} has taken over{step}{pause}", True, True, took.pause_s, took.step)
    if not sight.new_state:
        goes_on = f"job {old} trains on" if sight.old_state and not handed else f"job {old} has stopped"
        return Stage(f"job {new} has ended and did not take over; {goes_on}", is_over=True)
    if sight.owner and sight.owner.identity.job.partition("+")[0] == new:
        if not handed and not sight.asked_by:
            return Stage(f"job {new} trains; job {old} had ended before it was asked", True, True)
        return Stage(f"job {new} has the checkpoints and restores")
    if handed:
        return Stage(f"job {old} has saved step {handed.step} and stopped")
    if sight.asked_by == new:
        return Stage(f"job {new} is ready and has asked job {old} to hand over")
    if sight.new_state == "PENDING":
        return Stage(f"job {new} is pending (hetstream why {new}); job {old} trains")
    if sight.old_state:
        return Stage(f"job {new} starts its program; job {old} trains")
    if sight.owner is None:
        return Stage(f"job {old} has ended and job {new} runs", True, True)
    return Stage(f"job {old} has ended; job {new} starts its program and goes on from the newest checkpoint")


def _job(event: Event) -> str:
    return event.identity.job.partition("+")[0] if event.identity else ""
