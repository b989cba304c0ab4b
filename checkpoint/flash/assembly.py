"""Plugs `handover/` and `replica/` into a checkpointer; nothing else on the trainer's side knows them."""

from __future__ import annotations

from hetstream.checkpoint.config import takes_over
from hetstream.checkpoint.disk.directory import CheckpointDirectory
from hetstream.checkpoint.disk.ownership import JobIdentity
from hetstream.checkpoint.flash.handover.handover import JobHandover
from hetstream.checkpoint.flash.options import CheckpointOptions
from hetstream.checkpoint.flash.ports import OtherHosts, Succession
from hetstream.checkpoint.policy.retention import Retention


def succession_of(job: str, directory: CheckpointDirectory, keep: Retention, options: CheckpointOptions) -> Succession:
    """How a job comes to its directory, and gives it to the next.

    Args:
        job: Slurm's id, with the component.
        directory: of the checkpoints.
        keep: which of them stay.
        options: of the checkpointer.
    """
    return JobHandover(directory, JobIdentity.of_this_process(job), keep, takes_over(), options.hand_over_timeout_s)


def other_hosts_of(directory: CheckpointDirectory, rank: int, options: CheckpointOptions) -> OtherHosts | None:
    """Who else keeps what a rank saves; None: nobody.

    Args:
        directory: of the checkpoints.
        rank: of this process.
        options: of the checkpointer.
    """
    if not options.replica:
        return None
    # Here, so that a program without replicas does not load what talks with other hosts.
    from hetstream.checkpoint.replica.trainer import TrainerReplicas

    return TrainerReplicas(directory.path, rank)
