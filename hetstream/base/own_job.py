"""Which Slurm job a process runs in, and what of its environment is another job's.

`sbatch`, `salloc` and an `srun` outside of a job hand on the whole environment (`--export=ALL`). So a job that is
submitted from another one's script finds what that script exported, and those of Slurm's variables of a heterogeneous
job that it does not get itself. What hetstream exports therefore comes with the job that it is meant for.

Source: `env_array_merge` in src/sbatch/sbatch.c, and seen on Slurm 22.05 to 26.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

# Behind the name of a variable: the job that it is for and its value, so that another value is nobody's but the user's.
_MARK = "_OF_JOB"
_OF_COMPONENTS = re.compile(r"SLURM_(?:\w+_(?:HET|PACK)_GROUP_\d+|HET_SIZE|HET_GROUP_ID|PACK_SIZE)")
_COMPONENT_ID = re.compile(r"SLURM_JOB_ID_HET_GROUP_\d+")


def of_own_job(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment without what another, heterogeneous job has left in it of Slurm's variables."""
    components = _components(environ)
    if not components or environ.get("SLURM_JOB_ID", "") in {"", *components}:
        return dict(environ)
    return {name: value for name, value in environ.items() if not _OF_COMPONENTS.fullmatch(name)}


def own_job(environ: Mapping[str, str]) -> str:
    """Slurm's id of the job that a process runs in, that of the leader in a heterogeneous job; "" outside of Slurm."""
    return of_own_job(environ).get("SLURM_JOB_ID_HET_GROUP_0") or environ.get("SLURM_JOB_ID", "")


def with_job(variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Variables to be exported, each of ours with the job that it is for: the one of this environment, or none."""
    job = own_job(environ)
    marks = {f"{name}{_MARK}": f"{job} {value}" for name, value in variables.items() if name.startswith("HETSTREAM_")}
    return {**variables, **marks}


def other_job(name: str, environ: Mapping[str, str]) -> str:
    """Why a variable is not for this job: whose it is, in words; "" if it is for this one, or nobody has said.

    A process that does not know its job, as in a container without Slurm's variables, takes what it finds.
    """
    job, _, value = environ.get(f"{name}{_MARK}", "").partition(" ")
    own = {environ.get("SLURM_JOB_ID", ""), *_components(of_own_job(environ))} - {""}
    if f"{name}{_MARK}" not in environ or value != environ.get(name) or not own or job in own:
        return ""
    return f"of job {job}" if job else "of a program outside of Slurm"


def _components(environ: Mapping[str, str]) -> set[str]:
    return {value for name, value in environ.items() if _COMPONENT_ID.fullmatch(name)}
