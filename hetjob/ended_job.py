"""What a job's record tells when the job is over: how many CPUs its trainers need next time. Called by the job master,
which writes the record (`summary.json` in the job's directory), and by `hetstream advise`, which reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetstream.base.users import user_name
from hetstream.hetjob.summary import load_own_summary


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job that had an elastic controller, and is over.

    Attributes:
        job: its id in Slurm.
        name: as squeue showed it.
        user: whose it was.
        ended_s: when, in seconds since the epoch.
        num_ranks: trainer tasks that read data.
        trainer_cpus: CPUs that each of them had; None if the script did not ask for them by task.
        needed_cpus: those that the busiest one needs besides data workers, with some to spare.
    """

    job: str
    name: str
    user: str
    ended_s: float
    num_ranks: int
    trainer_cpus: int | None
    needed_cpus: int

    @property
    def advice(self) -> str:
        """What to ask for next time; empty if it had no more than it needs."""
        if self.trainer_cpus is None:
            return f"its busiest trainer task needs {self.needed_cpus} CPUs besides its data workers"
        if self.needed_cpus >= self.trainer_cpus:
            return ""
        return f"its busiest trainer task needs {self.needed_cpus} of its {self.trainer_cpus} CPUs besides data workers"


def read_ended(directory: Path) -> EndedJob | None:
    """What this user's record in a job's directory tells; None if there is none, or it tells nothing of trainers.

    Raises:
        OSError: it cannot be read, or is another user's.
    """
    try:
        summary, status = load_own_summary(directory)
        ended_s = float(summary.get("ended_s") or status.st_mtime)  # a copy's file is younger
        return ended_of(summary, directory.name.split("-")[1], user_name(status.st_uid), ended_s)
    except FileNotFoundError:
        return None
    except (ValueError, ArithmeticError, LookupError, TypeError, AttributeError):
        return None  # of another version, or no record of ours


def ended_of(summary: Mapping[str, Any], job: str, user: str, ended_s: float) -> EndedJob | None:
    """The same of a record that was read already."""
    # Known to the controller of the stage that the trainer takes its batches from.
    records = [summary.get(name) or {} for name in ("elastic", "elastic_gpu")]
    elastic = next((record for record in records if record.get("trainer_cpus_recommended") is not None), None)
    if elastic is None:
        return None
    needed, held = elastic["trainer_cpus_recommended"], elastic.get("trainer_cpus")
    ranks = {loader["rank"] for loader in summary.get("loaders", [])}
    name = str(summary.get("job_name", ""))
    return EndedJob(job, name, user, ended_s, max(1, len(ranks)), None if held is None else int(held), int(needed))
