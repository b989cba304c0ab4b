"""The memory of this job on this node and its limit, as the kernel counts them in the job's cgroup. For `elastic.py`.

Slurm's steps live in cgroups below one of the job (`job_ID`), in version 1 and version 2 of cgroups. Where Slurm limits
no memory (`ConstrainRAMSpace`) there is no such limit, and nothing is read.
"""

from __future__ import annotations

from pathlib import Path

from hetstream.hetjob.master.trainer_memory import MemoryReading

# Version 1 writes the largest number of pages for "no limit", version 2 the word `max`.
_NO_LIMIT_BYTES = 1 << 60
# What counts against the limit and cannot be given back: page cache is not among it.
_COUNTED = {"memory.max": ("anon", "shmem"), "memory.limit_in_bytes": ("total_rss", "total_shmem")}


def read_job_memory(
    job_id: str, own: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> MemoryReading | None:
    """What the job has of memory on this node; None where no cgroup of this job limits it.

    Args:
        job_id: of component 0.
        own: the cgroups of this process, see cgroups(7).
        root: where they are mounted.
    """
    try:
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            head, found, _ = f"{path}/".partition(f"/job_{job_id}/")
            if not found or controllers not in ("", "memory"):
                continue
            place = root / controllers / f"{head}/job_{job_id}".lstrip("/")
            for limit_file, counted in _COUNTED.items():
                if (place / limit_file).exists():
                    return _read(place, limit_file, counted)
    except (OSError, ValueError):
        return None  # it is of another form, or goes away: then nobody knows
    return None


def _read(place: Path, limit_file: str, counted: tuple[str, ...]) -> MemoryReading | None:
    text = (place / limit_file).read_text().strip()
    if text == "max" or not 0 < int(text) < _NO_LIMIT_BYTES:
        return None
    lines = (line.split() for line in (place / "memory.stat").read_text().splitlines())
    values = {name: int(value) for name, value in lines}
    return MemoryReading(sum(values.get(name, 0) for name in counted), int(text))
