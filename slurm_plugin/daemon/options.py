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
    """

    settings: SiteSettings
    state_dir: Path
    allocating: bool
    partitions: tuple[str, ...] | None
    interval_s: float
    pace: Pace = field(default_factory=Pace)
