"""Which pending jobs are short of licenses: (jobs, `scontrol show licenses`) -> jobs. Pure; called by `read.py`.

slurmctld says Priority of a job behind others, also where no license is left for it. It starts one if what it asks for,
what is used and what reservations of others keep is no more than there is (license_job_test in licenses.c).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from hetstream.slurm_plugin.client.model import Job

_RECORD = re.compile(r"LicenseName=(\S+) Total=(\d+) Used=(\d+) Free=(\d+) Reserved=(\d+)")
# Names of licenses and how many, all of them or, with `|`, any (sbatch(1), --licenses).
_ASKED = re.compile(r"([^,;|:=()\s]+)(?:[:=](\d+))?")


@dataclass(frozen=True, slots=True)
class Licenses:
    """Licenses of one name: how many are free, and how many of these reservations keep."""

    free: int
    reserved: int


def parse_licenses(text: str) -> dict[str, Licenses]:
    """The licenses of `scontrol --oneliner show licenses`, by their names."""
    return {name: Licenses(int(free), int(reserved)) for name, _, _, free, reserved in _RECORD.findall(text)}


def with_short_licenses(jobs: Iterable[Job], licenses: Mapping[str, Licenses]) -> tuple[Job, ...]:
    """The jobs, with the names of the licenses of which too few are left."""
    return tuple(
        replace(job, short_licenses=short)
        if job.licenses and job.waits_for_resources and (short := _short(job, licenses))
        else job
        for job in jobs
    )


def _short(job: Job, licenses: Mapping[str, Licenses]) -> tuple[str, ...]:
    asked = [(name, int(number or 1)) for name, number in _ASKED.findall(job.licenses)]
    short = tuple(
        name
        for name, number in asked
        if (known := licenses.get(name)) and number > known.free - (0 if job.reservation else known.reserved)
    )
    return () if "|" in job.licenses and len(short) < len(asked) else short
