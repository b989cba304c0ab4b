"""Where Slurm says that a job works, from any number that names a part of it: squeue while it remembers, then sacct."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hetstream.hetjob.errors import SlurmCommandError
from hetstream.hetjob.find_service import JobPlace
from hetstream.hetjob.jobs_dir import jobs_dir_in
from hetstream.slurm_plugin.client.run import run_slurm

# Ids, states and users hold no blank, so what follows the fourth one is the directory, whatever is in it.
_SQUEUE = ("squeue", "--noheader", "--states=all", "--format=%i %A %T %u %Z")
_COMPANION = re.compile(r"(?:^|\s)hets:trainer=(\d+)(?:\s|$)")


def job_place(job: str, environ: Mapping[str, str]) -> JobPlace:
    """Where a job is, which `N`, `N+COMPONENT`, `N_TASK` or the number of a companion names.

    Raises:
        SlurmCommandError: Slurm does not know it, or does not answer.
    """
    try:
        shown = run_slurm([*_SQUEUE, f"--jobs={job}"], env=environ, hint="Check: squeue --me").stdout
        found = parse_place(shown)
        if found is None:
            argv = [*_SQUEUE, f"--jobs={job}"]
            raise SlurmCommandError(argv, 0, shown, "Invalid job id specified", "Check: squeue --me")
    except SlurmCommandError as error:
        found = _from_accounting(job, environ)
        if found is None:
            raise error
        return found
    comment = run_slurm(["squeue", "--noheader", "--states=all", "--format=%k", f"--jobs={job}"], env=environ)
    trainer = _COMPANION.search(comment.stdout)
    found = replace(found, job_id=trainer[1]) if trainer else found
    return replace(found, jobs_dir=_named_in_script(found.job_id, environ))


def _named_in_script(job_id: str, environ: Mapping[str, str]) -> str:
    """The place of the job's directory that its script names; slurmctld shows scripts to their owners and operators."""
    try:
        return jobs_dir_in(run_slurm(["scontrol", "write", "batch_script", job_id, "-"], env=environ).stdout)
    except SlurmCommandError:
        return ""


def parse_place(text: str) -> JobPlace | None:
    """The place in lines of id, own number, state, user and directory; of several components the first one's."""
    found: dict[str, JobPlace] = {}
    for line in text.splitlines():
        job_id, own, state, user, directory = [*line.strip().split(" ", 4), "", "", "", ""][:5]
        component = re.fullmatch(r"(\d+)\+\d+", job_id)
        if own.isdigit() and directory.startswith("/"):
            found.setdefault(job_id, JobPlace(component[1] if component else own, Path(directory), state, user))
    return next((found[job_id] for job_id in sorted(found, key=lambda job_id: (len(job_id), job_id))), None)


def _from_accounting(job: str, environ: Mapping[str, str]) -> JobPlace | None:
    """The same from sacct, which remembers jobs for longer; None without accounting, or if it does not know the job."""
    argv = ["sacct", "--noheader", "--parsable2", "--delimiter= ", "--allocations", f"--jobs={job}"]
    if environ.get("SLURM_CLUSTERS"):
        argv.append(f"--clusters={environ['SLURM_CLUSTERS']}")  # sacct does not read it, squeue does
    try:
        shown = run_slurm([*argv, "--format=JobID,JobIDRaw,State%20,User,WorkDir"], env=environ).stdout
    except SlurmCommandError:
        return None
    # Of a cancelled job sacct says by whom: `CANCELLED by 1000`.
    return parse_place(re.sub(r"^(\S+ \S+ CANCELLED) by \d+ ", r"\1 ", shown, flags=re.MULTILINE))
