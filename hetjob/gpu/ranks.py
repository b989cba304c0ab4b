"""Which of a job's GPUs one of its processes uses, and which rank of the job it is: by its environment. Pure.

Slurm's prolog names all GPUs that a job has on the node; a launcher says which of its processes this is. On a real GPU
the driver knows better which one a process uses (`devices/cuda.py`); what stands here counts where it does not say.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hetstream.hetjob.errors import GpuJobRefused

# Who numbers the processes of a node; the innermost launcher comes first: torchrun may run within srun.
_NUMBERED_BY = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
_COUNTED_BY = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE")
# Together they are another text for each launch that a job has at the same time.
_LAUNCHES = ("SLURM_STEP_ID", "HETSTREAM_GPU_JOB", "TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT")
# What Slurm says of a step's tasks: "2(x3),1" are 2 on each of three nodes, and 1 on another one.
_TASKS = re.compile(r"(\d{1,6})(?:\(x(\d{1,6})\))?", re.ASCII)
_MOST_LAUNCH_CHARACTERS = 200


@dataclass(frozen=True)
class LocalRank:
    """One process among those of its launch on this node.

    Attributes:
        number: from 0; without a launcher 0, as PyTorch takes the first GPU.
        count: how many there are; 0: nobody says.
        launch: another text for each launch of the job.
        said_by: the variable that has the number; empty: none.
    """

    number: int = 0
    count: int = 0
    launch: str = ""
    said_by: str = ""


def local_rank(environ: Mapping[str, str]) -> LocalRank:
    """What the launcher says of this process."""
    said_by = next((name for name in _NUMBERED_BY if _number(environ.get(name)) is not None), "")
    counts = [count for name in _COUNTED_BY if (count := _number(environ.get(name)))]
    if said_by == "SLURM_LOCALID" and not counts:
        counts = [_tasks_here(environ)]
    launch = "/".join(environ.get(name, "") for name in _LAUNCHES)
    return LocalRank(
        _number(environ.get(said_by)) or 0, counts[0] if counts else 0, launch[:_MOST_LAUNCH_CHARACTERS], said_by
    )


def gpu_of(gpus: Sequence[str], numbers: Sequence[str], rank: LocalRank, visible: str | None) -> str:
    """The GPU of one process.

    Args:
        gpus: that the job has on this node, as the coordinator calls them.
        numbers: of these GPUs, in the same order; empty: not known.
        rank: of the process.
        visible: its CUDA_VISIBLE_DEVICES; None: not set.

    Returns:
        Its GPU; empty if the process lets itself see none.

    Raises:
        GpuJobRefused: it names a GPU that the job has not, or there are more processes than GPUs.
    """
    if len(gpus) == 1:
        return gpus[0]
    seen = list(gpus) if visible is None else _visible(visible, gpus, numbers)
    if len(seen) == 1:  # the others are hidden from it, whatever its rank is
        return seen[0]
    if not seen:
        return ""
    if rank.number >= len(seen):
        raise GpuJobRefused(
            f"{rank.said_by}={rank.number}, and the job has {len(seen)} GPUs on this node, with numbers from 0. Start "
            f"{len(seen)} processes on it (torchrun --nproc-per-node={len(seen)}, srun --ntasks-per-node={len(seen)}), "
            "or set CUDA_VISIBLE_DEVICES to one GPU in each process, where several share one"
        )
    return seen[rank.number]


def _visible(text: str, gpus: Sequence[str], numbers: Sequence[str]) -> list[str]:
    """The GPUs behind CUDA_VISIBLE_DEVICES, in its order; as CUDA does it, those before a -1."""
    entries = [entry.strip() for entry in text.split(",") if entry.strip()]
    entries = entries[: entries.index("-1")] if "-1" in entries else entries
    by_number = dict(zip(numbers, gpus, strict=False))
    if not {*entries} <= by_number.keys():  # where Slurm constrains devices, it counts those of the job from 0
        by_number = {str(place): gpu for place, gpu in enumerate(gpus)}
    found = []
    for entry in entries:
        named = [gpu for gpu in gpus if gpu.startswith(entry) and not entry.isdecimal()]
        if len(named) != 1 and entry not in by_number:
            raise GpuJobRefused(
                f"CUDA_VISIBLE_DEVICES={text[:100]}: {entry[:50]} is none of the {len(gpus)} GPUs that the job has on "
                f"this node ({', '.join(numbers or gpus)}). Leave the variable as the job has it, or name some of these"
            )
        found.append(named[0] if len(named) == 1 else by_number[entry])
    return list(dict.fromkeys(found))


def _tasks_here(environ: Mapping[str, str]) -> int:
    """Tasks of this step on this node; 0: not known."""
    before = _number(environ.get("SLURM_NODEID")) or 0  # so many nodes come first
    for part in environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        found = _TASKS.fullmatch(part)
        if found is None:
            return 0
        if before < int(found[2] or 1):
            return int(found[1])
        before -= int(found[2] or 1)
    return 0


def _number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,6}", text) else None
