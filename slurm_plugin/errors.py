"""Errors of the cluster side.

    HetstreamError
    ├── DamagedRecord            the record of an installation is not what install wrote
    ├── StillInUse               slurm.conf names files that were to be removed
    ├── UnreadableAnswer         a Slurm command printed what no known version prints
    ├── UnsupportedSlurm         the cluster's Slurm is older than hetstream reads
    ├── NodesHidden              Slurm tells this user nothing of nodes (PrivateData=nodes)
    ├── UnsafePlace              somebody else could change what is believed there
    ├── UnknownJob               no such job in the queue
    ├── HistoryError             the file with a cluster's history, or with that of its jobs, cannot be used
    ├── DaemonStateError         the site daemon's directory is in use, damaged or another program's
    ├── PolicyError              a policy gave out what it must not, or no policy has this name
    ├── QuotaError               tenants' quotas that cannot be read, or cannot be kept
    ├── ServeError               an address cannot be listened on, or a package for it is missing
    ├── SimulationInputError     a trace, an export or a cluster to simulate cannot be read: all its problems at once
    └── SimulationFault          a simulation broke a rule of its own: a policy gave more than there is, or a defect

Slurm commands that fail raise `hetstream.hetjob.errors.SlurmCommandError`.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetstream.base.errors import HetstreamError
from hetstream.base.text import count_words, shortened

__all__ = [
    "DaemonStateError",
    "DamagedRecord",
    "HistoryError",
    "NodesHidden",
    "PolicyError",
    "QuotaError",
    "ServeError",
    "SimulationFault",
    "SimulationInputError",
    "StillInUse",
    "UnknownJob",
    "UnreadableAnswer",
    "UnsafePlace",
    "UnsupportedSlurm",
]


class DamagedRecord(HetstreamError):
    """The record of an installation is not what install wrote."""


class StillInUse(HetstreamError):
    """slurm.conf asks for files that were to be removed; submissions would fail without them."""


class UnreadableAnswer(HetstreamError):
    """A Slurm command printed what no known version prints.

    Args:
        problem: what is wrong with it.
        record: the part of the output that could not be read.
    """

    def __init__(self, problem: str, record: str) -> None:
        super().__init__(
            f"Slurm's answer could not be read: {shortened(problem, 300)} in {record[:200]!r}. "
            "Please report it with the output of: scontrol --version"
        )


class UnsupportedSlurm(HetstreamError):
    """The cluster's Slurm is older than hetstream reads."""


class NodesHidden(HetstreamError):
    """Slurm tells this user nothing of nodes, and will not in the next reading either."""


class UnsafePlace(HetstreamError):
    """Somebody else than root and this user could change what is believed in a directory."""


class UnknownJob(HetstreamError):
    """No such job is in the queue."""


class HistoryError(HetstreamError):
    """The file with a cluster's history cannot be read or written, or is another program's."""


class DaemonStateError(HetstreamError):
    """The site daemon's directory is in use by another one, damaged or another program's."""


class PolicyError(HetstreamError):
    """A policy gave out what it must not, what it was told is impossible, or no policy has this name."""


class QuotaError(HetstreamError):
    """The site's quotas cannot be read, are more than the cluster has, or name tenants that nobody knows."""


class ServeError(HetstreamError):
    """An address cannot be listened on, or a package that serving needs is missing."""


class SimulationInputError(HetstreamError):
    """What was to be simulated cannot be read.

    Args:
        source: the file, or what it is.
        problems: each with its line where there is one; the message has the first of them, and how many there are.
        hint: what can be done.
    """

    MOST_SHOWN = 20

    def __init__(self, source: str, problems: Sequence[str], hint: str = "") -> None:
        self.source = source
        self.problems = tuple(problems)
        shown = "".join(f"\n  {problem}" for problem in self.problems[: self.MOST_SHOWN])
        left = len(self.problems) - self.MOST_SHOWN
        more = f"\n  and {left:,} more" if left > 0 else ""
        next_step = f"\n  {hint}" if hint else ""
        super().__init__(f"{source}: {count_words(len(self.problems), 'problem')}:{shown}{more}{next_step}")


class SimulationFault(HetstreamError):
    """A simulation broke a rule of its own: more was given than there is, or time went back."""
