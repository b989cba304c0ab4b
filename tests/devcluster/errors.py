"""Errors of the throw-away cluster, all of them a `DevclusterError`."""

from __future__ import annotations

from hetstream.base.errors import HetstreamError


class DevclusterError(HetstreamError):
    """Something about the throw-away Slurm cluster."""


class SlurmMissing(DevclusterError):
    """Programs or packages that the cluster needs are not on this machine."""


class InstallFailed(DevclusterError):
    """apt could not install or fetch Slurm's packages."""


class ClusterExists(DevclusterError):
    """The state directory is used by a running cluster, or by something else."""


class NoCluster(DevclusterError):
    """No cluster lives in the state directory."""


class BootFailed(DevclusterError):
    """A daemon ended, or the nodes were not idle in time."""


class NetworkFailed(DevclusterError):
    """The network of a cluster could not be made or removed."""


class TeardownFailed(DevclusterError):
    """Processes of the cluster outlived SIGKILL."""
