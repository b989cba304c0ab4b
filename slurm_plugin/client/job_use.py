"""What jobs were given and what they used of it, of any job of Slurm's. Reads only; called by `hetstream job`.

Of a job that has ended, sacct knows it where the site has accounting; of one that runs, the daemons on its nodes do
(sstat). Both know what `JobAcctGatherType` gathers. Without it there is only what the job was given.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.slurm_plugin.client.accounting import SACCT_FIELDS, Row, Usage, cpu_seconds, sacct_rows, usages_of
from hetstream.slurm_plugin.client.model import Job
from hetstream.slurm_plugin.client.parse_text import new_separators
from hetstream.slurm_plugin.client.read import plain_environ
from hetstream.slurm_plugin.client.run import run_slurm
from hetstream.slurm_plugin.client.slurm_units import megabytes, tres
from hetstream.slurm_plugin.errors import UnreadableAnswer

# The name stands last, and may have any characters.
_FIELDS = (*SACCT_FIELDS[:-1], "JobID", "TRESUsageInTot", "ExitCode", SACCT_FIELDS[-1])
_STEP_FIELDS = ("JobID", "TRESUsageInTot")
_ONE_S = 120.0


@dataclass(frozen=True, slots=True)
class JobUse:
    """One run of a job, of a component or of an array task.

    Attributes:
        label: as users write it: `12`, `12+1`, `12_3`.
        number: the record's own.
        state: in Slurm's spelling.
        usage: what it held, and its CPU time and its GPUs' as far as these are known.
        num_nodes: that it has.
        memory_mb: that it was given, on all nodes; None where nothing says so.
        memory_used_mb: the most that a step of it had, on all nodes; None where nobody gathered it.
        limit_s: its time limit; None if it has none.
        exit_code: as sacct says it, `1:0`; empty where nothing says so.
    """

    label: str
    number: str
    state: str
    usage: Usage
    num_nodes: int = 0
    memory_mb: int | None = None
    memory_used_mb: int | None = None
    limit_s: float | None = None
    exit_code: str = ""

    @property
    def cpu_share(self) -> float | None:
        """CPU time that it used, of what its CPUs had; None where it is not known."""
        held_s = self.usage.cpus * (self.usage.ran_s or 0.0)
        return None if self.usage.cpu_used_s is None or not held_s else self.usage.cpu_used_s / held_s

    @property
    def memory_share(self) -> float | None:
        """The most memory that it had, of what it was given; None where it is not known."""
        return None if self.memory_used_mb is None or not self.memory_mb else self.memory_used_mb / self.memory_mb


def recorded(jobs: Sequence[str], environ: Mapping[str, str], cluster: str) -> tuple[JobUse, ...]:
    """What sacct knows of jobs; those that it does not know are left out.

    Args:
        jobs: arguments that choose them, such as `--jobs=12`.
        environ: to run sacct in.
        cluster: the cluster's name; empty for that of its slurm.conf.

    Raises:
        SlurmCommandError: sacct failed.
        UnreadableAnswer: it printed another form.
    """
    delimiter = new_separators()[0]
    argv = [
        "sacct", *jobs, "--noheader", "--parsable2", f"--delimiter={delimiter}", f"--format={','.join(_FIELDS)}",
        *([f"--clusters={cluster}"] if cluster else []),
    ]  # fmt: skip
    done = run_slurm(
        argv, env=plain_environ(environ), hint="Check whether slurmdbd answers: sacctmgr show cluster", timeout_s=_ONE_S
    )
    return uses_of(sacct_rows(done.stdout, delimiter, _FIELDS))


def uses_of(rows: Iterable[Row]) -> tuple[JobUse, ...]:
    """The jobs in the lines of sacct, with the most that one of their steps used.

    Raises:
        UnreadableAnswer: a value has another form.
    """
    rows = list(rows)
    steps: dict[str, list[Row]] = {}
    jobs: dict[str, Row] = {}
    for row in rows:
        number, _, step = row["JobIDRaw"].partition(".")
        if step:
            steps.setdefault(number, []).append(row)
        else:
            jobs[number] = row
    found = []
    for usage in usages_of(rows):
        row = jobs[usage.job]
        allocated = tres(row["AllocTRES"])
        try:
            used = [memory for step in steps.get(usage.job, []) if (memory := _memory_mb(step)) is not None]
            found.append(
                JobUse(
                    label=row["JobID"],
                    number=usage.job,
                    state=row["State"].partition(" ")[0],
                    usage=usage,
                    num_nodes=int(allocated.get("node", 0)),
                    memory_mb=megabytes(allocated["mem"]) if allocated.get("mem") else None,
                    memory_used_mb=max(used, default=None),
                    limit_s=60 * float(row["TimelimitRaw"]) if row["TimelimitRaw"].isdecimal() else None,
                    exit_code=row["ExitCode"],
                )
            )
        except ValueError as error:
            raise UnreadableAnswer(str(error), repr(row)) from error
    return tuple(found)


def _memory_mb(step: Row) -> int | None:
    """What all tasks of a step had at most; None where nobody gathered it."""
    text = tres(step["TRESUsageInTot"]).get("mem")
    # 0 is no measurement: a step that is over before the first look.
    return megabytes(text) or None if text else None


def of_queue(job: Job, usage: Usage) -> JobUse:
    """A job that squeue shows: what it was given.

    Args:
        job: its record.
        usage: what it holds.
    """
    return JobUse(
        label=job.label,
        number=str(job.job_id),
        state=job.state,
        usage=usage,
        num_nodes=len(job.nodes) or job.num_nodes,
        memory_mb=job.memory_mb or None,
        limit_s=job.time_limit_s,
    )


def with_steps(uses: Sequence[JobUse], environ: Mapping[str, str]) -> tuple[tuple[JobUse, ...], str]:
    """Jobs that run, with what their steps have used until now, and why that is not known; empty if it is.

    sstat asks the nodes, which answer to the job's user, and to operators.
    """
    # It takes no delimiter of ours (22.05 to 26.05); none of these fields has a user's text.
    delimiter, found = "|", dict[str, list[Row]]()
    argv = ["sstat", "--allsteps", "--noheader", "--parsable2"]
    argv += [f"--format={','.join(_STEP_FIELDS)}", f"--jobs={','.join(use.number for use in uses)}"]
    try:
        for row in sacct_rows(run_slurm(argv, env=plain_environ(environ)).stdout, delimiter, _STEP_FIELDS):
            found.setdefault(re.sub(r"[.].*", "", row["JobID"]), []).append(row)
        return tuple(_with_own_steps(use, found) for use in uses), ""
    except SlurmCommandError as error:
        return tuple(uses), f"sstat: {error.reason}"
    except (UnreadableAnswer, ValueError) as error:
        return tuple(uses), f"sstat: {error}"


def _with_own_steps(use: JobUse, steps: Mapping[str, Sequence[Row]]) -> JobUse:
    own = steps.get(use.number) or steps.get(use.label) or ()
    used_s = sum(cpu_seconds(tres(step["TRESUsageInTot"]).get("cpu", "")) for step in own)
    used_mb = max((memory for step in own if (memory := _memory_mb(step)) is not None), default=None)
    return replace(use, usage=replace(use.usage, cpu_used_s=used_s or None), memory_used_mb=used_mb)
