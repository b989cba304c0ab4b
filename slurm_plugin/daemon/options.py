"""How the daemon runs. Made by `hetstream daemon`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from hetstream.hetjob.site.address import SiteSettings
from hetstream.slurm_plugin.daemon.pace import Pace


@dataclass(frozen=True)
class DaemonOptions:
    """How the daemon runs.

    Attributes:
        settings: where it listens.
        state_dir: what it keeps.
        allocating: whether jobs are told limits.
        partitions: whose CPUs are divided; None for those without GPUs.
        interval_s: between two readings of the cluster.
        pace: its other times.
        gpu_reporters: users who tell of the nodes' GPUs and may see all of that, beside root and the daemon's own.
    """

    settings: SiteSettings
    state_dir: Path
    allocating: bool
    partitions: tuple[str, ...] | None
    interval_s: float
    pace: Pace = field(default_factory=Pace)
    gpu_reporters: frozenset[int] = frozenset()
