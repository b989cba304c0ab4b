"""Which policy divides, and within which limits: what `hetstream policy set` changes. Kept in the daemon's store. Pure.

Made by the command line, checked here, used by the registry.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from hetstream.base import typed_json
from hetstream.slurm_plugin.errors import PolicyError
from hetstream.slurm_plugin.placement.data_workers import DEFAULT_LINK_SHARE
from hetstream.slurm_plugin.policy.choices import DEFAULT_POLICY, policy_named
from hetstream.slurm_plugin.policy.floors import FLOOR
from hetstream.slurm_plugin.policy.staleness import MACHINE_CPUS_PER_GPU

_Cpus = Annotated[int, msgspec.Meta(ge=0, le=1 << 30)]


class PolicySettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an admin has set.

    Attributes:
        policy: by name.
        floor: share of its greatest speed that every job has, as far as the pool goes.
        cpus_per_gpu: of the site's machines, for jobs that have measured nothing.
        user_caps: CPUs of data workers at most, by user; `caps.EVERYBODY` for those that are not named.
        tenant_caps: the same by Slurm account.
        network_gbps: what a node's link carries; 0: not known, and then no budget.
        network_share: of each node's link that data workers of all jobs may use.
    """

    policy: str = DEFAULT_POLICY
    floor: Annotated[float, msgspec.Meta(ge=0, le=0.5)] = FLOOR
    cpus_per_gpu: Annotated[float, msgspec.Meta(gt=0, le=1024)] = MACHINE_CPUS_PER_GPU
    user_caps: dict[str, _Cpus] = {}
    tenant_caps: dict[str, _Cpus] = {}
    network_gbps: Annotated[float, msgspec.Meta(ge=0, le=100_000)] = 0.0
    network_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = DEFAULT_LINK_SHARE

    def check(self) -> None:
        """Refuse the name of no policy.

        Raises:
            PolicyError: there is none of this name.
        """
        policy_named(self.policy)


def decode_settings(text: str | bytes) -> PolicySettings:
    """Read settings.

    Raises:
        PolicyError: they are none, or name no policy.
    """
    try:
        settings = typed_json.decode(text, PolicySettings)
    except msgspec.MsgspecError as error:
        raise PolicyError(f"not the settings of a policy: {error}") from error
    settings.check()
    return settings
