"""The policies by name, and the rules that hold under any of them.

A policy is a function of the form `Policy` in a file of its own, and a line here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.policy.caps import with_caps
from hetstream.slurm_plugin.policy.check import checked
from hetstream.slurm_plugin.policy.dlrover import dlrover
from hetstream.slurm_plugin.policy.fair import fair
from hetstream.slurm_plugin.policy.floors import FLOOR, with_floor
from hetstream.slurm_plugin.policy.leftovers import with_leftovers
from hetstream.slurm_plugin.policy.maxtp import maxtp
from hetstream.slurm_plugin.policy.share import share
from hetstream.slurm_plugin.policy.srtf import srtf
from hetstream.slurm_plugin.policy.staleness import (
    FALL_BACK_AFTER_S,
    FREEZE_AFTER_S,
    MACHINE_CPUS_PER_GPU,
    with_staleness,
)
from hetstream.slurm_plugin.policy.steadiness import MoveCost, with_steadiness
from hetstream.slurm_plugin.policy.stretch import stretch
from hetstream.slurm_plugin.policy.table import Policy

DEFAULT_POLICY = "share"
POLICIES: Mapping[str, Policy] = MappingProxyType(
    {"share": share, "fair": fair, "maxtp": maxtp, "srtf": srtf, "dlrover": dlrover, "stretch": stretch}
)


@dataclass(frozen=True)
class Rules:
    """What holds under any policy; see `floors.py`, `staleness.py` and `steadiness.py`.

    Attributes:
        floor: share of its greatest speed that every job has, as far as the pool goes.
        move: what a change costs.
        freeze_after_s: a job of which nothing has been heard for longer stays as it is.
        fall_back_after_s: of which nothing has been heard for longer still counts by the machines' ratio.
        cpus_per_gpu: that ratio.
    """

    floor: float = FLOOR
    move: MoveCost = field(default_factory=MoveCost)
    freeze_after_s: float = FREEZE_AFTER_S
    fall_back_after_s: float = FALL_BACK_AFTER_S
    cpus_per_gpu: float = MACHINE_CPUS_PER_GPU


def under_all_rules(policy: Policy, rules: Rules | None = None) -> Policy:
    """The policy as the daemon runs it.

    Raises:
        PolicyError: when it is called: the policy gave out what it must not.
    """
    rules = rules or Rules()
    found = with_floor(checked(policy), rules.floor)
    found = with_staleness(found, rules.freeze_after_s, rules.fall_back_after_s, rules.cpus_per_gpu)
    found = with_steadiness(with_leftovers(found), rules.move, rules.floor)
    return with_caps(found)


def policy_named(name: str) -> Policy:
    """The policy of this name.

    Raises:
        PolicyError: there is none.
    """
    if name not in POLICIES:
        raise PolicyError(f"no policy {name!r}: there are {', '.join(POLICIES)}")
    return POLICIES[name]
