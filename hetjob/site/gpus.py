"""What nodes tell the site daemon of their shared GPUs, and what it tells the packer: parts of messages. Pure.

Sent by `hetstream gpu report` and read by `hetstream packer`; `messages.py` has them in its protocol since version 3.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

# More GPUs has no node, and more processes no GPU, that is shared sensibly.
MAX_GPUS = 64
MAX_SHARING = 32

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]
_JobId = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
_Share = Annotated[float, msgspec.Meta(ge=0.0, le=1.0)]
_Whole = Annotated[int, msgspec.Meta(ge=0)]
_Seconds = Annotated[float, msgspec.Meta(ge=0.0)]


class SharingNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An opportunistic job on a GPU.

    Attributes:
        job: its id.
        paused_s: for how long it has not been let run at all.
        complaint: what it does against its orders; empty if nothing.
    """

    job: _JobId
    paused_s: Annotated[float, msgspec.Meta(ge=0.0)] = 0.0
    complaint: _Text = ""


class JobNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a job fares on a GPU, as it says itself: for people. Nothing is decided by it.

    Attributes:
        job: its id.
        uid: whose it is.
        is_guaranteed: it has the GPU; else it is opportunistic.
        held_bytes: memory of the GPU that it holds.
        host_bytes: most that its last mini-batch had on the host for want of memory of the GPU.
        batch_s: how long a mini-batch takes; 0: not known.
        alone_s: how long one takes when nobody else is there; 0: not known.
    """

    job: _JobId
    uid: _Whole
    is_guaranteed: bool = False
    held_bytes: _Whole = 0
    host_bytes: _Whole = 0
    batch_s: _Seconds = 0.0
    alone_s: _Seconds = 0.0


class GpuNow(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One GPU, as its node sees it; but for `jobs`, nothing in it is a job's word about itself alone.

    Attributes:
        index: its number on the node.
        gpu: what jobs call it.
        used_share: of the last seconds, in which something ran on it.
        free_bytes: of its memory, without the most that the guaranteed job has needed, and what processes without an
            agent hold.
        is_reserved: a guaranteed job has it, by its grant.
        guaranteed: those jobs, as far as they have an agent.
        closed: why an opportunistic job could do nothing there; empty if it could.
        sharing: the opportunistic jobs on it.
        capacity_bytes: memory that its jobs may hold together; 0: not told.
        idle_share: of the guaranteed job's mini-batches, in which it has nothing on the GPU; None: not known.
        jobs: how those on it fare.
    """

    index: Annotated[int, msgspec.Meta(ge=0, lt=MAX_GPUS)]
    gpu: _Name
    used_share: _Share
    free_bytes: Annotated[int, msgspec.Meta(ge=0)]
    is_reserved: bool = False
    guaranteed: Annotated[tuple[_JobId, ...], msgspec.Meta(max_length=MAX_SHARING)] = ()
    closed: _Text = ""
    sharing: Annotated[tuple[SharingNow, ...], msgspec.Meta(max_length=MAX_SHARING)] = ()
    capacity_bytes: _Whole = 0
    idle_share: _Share | None = None
    jobs: Annotated[tuple[JobNow, ...], msgspec.Meta(max_length=MAX_SHARING)] = ()


class ReportGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="report_gpus"):
    """The shared GPUs of a node; from root, the daemon's user, or one of `hetstream daemon --gpu-reporters`.

    Attributes:
        node: by Slurm's name.
    """

    node: _Name
    gpus: Annotated[tuple[GpuNow, ...], msgspec.Meta(max_length=MAX_GPUS)]


class AskGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="ask_gpus"):
    """What have the nodes told of their GPUs?"""


class NodeGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one node told last, and how long ago by the daemon's clock."""

    node: str
    age_s: float
    gpus: tuple[GpuNow, ...]


class TakeGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="take_gpus"):
    """A report counts; the next one is due after so many seconds."""

    next_s: float


class ShowGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="show_gpus"):
    """The answer to `AskGpus`.

    Attributes:
        nodes: by name.
        wait_shares: job id -> share of time in which its trainers waited for data; for the packer alone.
    """

    nodes: tuple[NodeGpus, ...]
    wait_shares: dict[str, float]


class RefuseGpus(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="refuse_gpus"):
    """It is not for this user to report, or to see."""

    reason: str
