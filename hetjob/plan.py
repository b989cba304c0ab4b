"""What a script becomes: components, the words for sbatch and for the job master, and why each thing changed.

Made by `convert.py`, written out by `render.py`. Plain values; nothing here decides or does anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Component:
    """One component of the heterogeneous job.

    Attributes:
        het_job_offset: 0 is the leader, where the batch script runs.
        role: `trainer` or `data_workers`.
        options: sbatch options of this component. For the trainer these are only the ones that conversion adds; they
            stand after the user's own and win over them.
    """

    het_job_offset: int
    role: str
    options: tuple[str, ...]


@dataclass(frozen=True)
class Change:
    """One difference between the user's script and the result, and the reason for it."""

    change: str
    why: str


@dataclass(frozen=True)
class HetPlan:
    """The result of a conversion.

    Attributes:
        components: one (companions or checkpoints only) or two.
        changes: what differs and why, in the order of the script.
        master_options: arguments of `hetstream master start`; None without data workers.
        writer_options: arguments of `hetstream ckpt start`; None without checkpoints.
        sbatch_options: the options for sbatch's command line: those of the user's that are for the whole job.
        exports: variables that the script gives the job again, because sbatch is called without them.
    """

    components: tuple[Component, ...]
    changes: tuple[Change, ...]
    master_options: tuple[str, ...] | None
    writer_options: tuple[str, ...] | None = None
    sbatch_options: tuple[str, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict)
