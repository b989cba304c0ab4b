"""The policies by name. A policy is a function of the form `Policy` in a file of its own, and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from hetstream.slurm_plugin.policy.dlrover import dlrover
from hetstream.slurm_plugin.policy.fair import fair
from hetstream.slurm_plugin.policy.maxtp import maxtp
from hetstream.slurm_plugin.policy.share import share
from hetstream.slurm_plugin.policy.srtf import srtf
from hetstream.slurm_plugin.policy.table import Policy

DEFAULT_POLICY = "share"
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"share": share, "fair": fair, "maxtp": maxtp, "srtf": srtf, "dlrover": dlrover}
)
