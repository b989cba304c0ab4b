"""Messages between data worker and loader: who is there, and batches. Holds no logic."""

from __future__ import annotations

from typing import Literal

from hetstream.mpi_dataworkers.wire.work import Failure, Message


class Hello(Message, frozen=True):
    """First message of a batch connection; the nonce is 32 random bytes, `receiver` the address connected to."""

    worker_id: str
    receiver: str
    nonce: bytes


class Challenge(Message, frozen=True):
    """The loader proves that it holds the job's key, and asks the same of the worker; and to `compress`, if it can."""

    nonce: bytes
    proof: bytes
    compress: bool = False


class Proof(Message, frozen=True):
    """The worker proves that it holds the job's key; batches follow."""

    proof: bytes


class Compressed(Message, frozen=True):
    """Header of a delivery whose frames are compressed.

    Attributes:
        sizes: of its own header and of the frames, before they were compressed; -1 for one that is as it was.
        header: its own header, as the frames are.
    """

    sizes: list[int]
    header: bytes


class Batch(Message, frozen=True, omit_defaults=True):
    """Header of one step's batch; the tensors' bytes are the frames after it.

    Attributes:
        session_id, step, token: which lease made it.
        num_samples: samples in it; 0 when all were left out, and there is no batch.
        spec: structure of the batch, as `ops.tree` writes it.
        buffers: (frame, offset, num_bytes) of each leaf with bytes of its own.
        origin: `made` for this loader first, from the `cache` of what was made for another one, or made `again`.
        shift: as in `GrantLease`.
        num_skipped: samples of the step that are not in it, for `on_error`.
        left_out: those of them that failed at this step, with what they did; index -1 stands for all.
        snapshot: of a shard whose dataset has a state: where its reader is after this step, see `snapshots`.
        wrote: what its samples were seen to make or change in the file system, on one line.
    """

    session_id: str
    step: int
    token: int
    num_samples: int
    spec: bytes
    buffers: list[tuple[int, int, int]]
    origin: Literal["made", "cache", "again"] = "made"
    shift: int = 0
    num_skipped: int = 0
    left_out: list[Failure] = []
    snapshot: bytes = b""
    wrote: str = ""


class Batches(Message, frozen=True):
    """Small batches of one lease that share a message: their `buffers` are places in the frames of all of them."""

    batches: list[Batch]
