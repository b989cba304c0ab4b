"""Messages between loader and dispatcher, in both directions. Holds no logic."""

from __future__ import annotations

import msgspec

from hetstream.base.training_progress import TrainingProgress
from hetstream.mpi_dataworkers.wire.work import (
    Device,
    Failure,
    FeatureCut,
    Interpreter,
    LoaderStats,
    Message,
    OptimizerCalls,
    Program,
    Ranges,
    SessionSpec,
    StepList,
)


class RegisterLoader(Message, frozen=True):
    """A loader introduces itself.

    `ordinal`, `occurrence`, `place`, `made_at` and `divides` are as in `naming.LoaderName`.

    Attributes:
        description: compared between programs of one job name.
        trainer: random name of its process; the loaders of one process have the same.
        interpreter: of its process.
        title: what a person knows it by.
        device: what data workers make its batches with.
        feeds: id of the data worker that makes steps of its batches; "" for a trainer's.
    """

    job_name: str
    ordinal: int
    rank: int
    world_size: int
    host: str
    pid: int
    pipeline_id: str
    description: dict[str, str]
    occurrence: int = 0
    place: str = ""
    made_at: str = ""
    divides: bool = False
    trainer: str = ""
    interpreter: Interpreter = Interpreter()
    title: str = ""
    device: Device = "cpu"
    feeds: str = ""


class Contents(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The bytes that a pickle stream refers to, or that are too large for a message: see `pipeline_transfer.py`.

    Attributes:
        sizes: of each buffer, in bytes.
        data: all of them, one after the other; b"" when they are in a file.
        sha256: of the file's bytes, in hexadecimal; it also names the file. "" when there is none.
        with_blob: the first buffer is the pickle stream itself.
    """

    sizes: list[int] = []
    data: bytes = b""
    sha256: str = ""
    with_blob: bool = False


class ProvidePipeline(Message, frozen=True, omit_defaults=True):
    """The pickled pipeline, the program that it comes from, and what that has set, as `ops.program` writes it.

    The dispatcher keeps it and gives it to data workers that fetch it. `blob` is the pickle stream, `shared` are the
    numbers of the buffers that samples could write to, and the trainer would see it.
    """

    pipeline_id: str
    program: Program
    settings: bytes
    blob: bytes
    contents: Contents = Contents()
    shared: list[int] = []


class OpenSession(Message, frozen=True):
    """Begin a session, or continue it with a restarted dispatcher; `num_steps` -1 while the sampler's end is unknown.

    `shift` is how far the loader is from its own numbering in a stream that it shares in window mode, `snapshot` where
    the reader of a shard was at or before `consumed`.
    """

    session: SessionSpec
    num_steps: int
    consumed: int
    received: Ranges
    window: int
    steps: StepList | None
    shift: int = 0
    snapshot: bytes = b""


class ExtendSession(Message, frozen=True):
    """More steps of a listed order; `num_steps` is the total once the sampler has ended, else -1."""

    session_id: str
    steps: StepList
    num_steps: int


class ReportProgress(Message, frozen=True):
    """How far a session is: steps below `consumed` reached the training loop, `received` wait in its buffer.

    Attributes:
        training: of the program's training loop; None where no framework told it.
        optimizer: of its process; None while none has stepped.
        features: where its feature graph is cut; None without one.
    """

    session_id: str
    consumed: int
    received: Ranges
    window: int
    stats: LoaderStats
    training: TrainingProgress | None = None
    optimizer: OptimizerCalls | None = None
    features: FeatureCut | None = None


class LoaderHeartbeat(Message, frozen=True):
    """The loader is alive and reads no epoch at the moment."""

    stats: LoaderStats


class CloseSession(Message, frozen=True):
    """The session ended, by count or because the program left the loop."""

    session_id: str
    consumed: int
    stats: LoaderStats


class EndProcesses(Message, frozen=True):
    """End the processes that have made steps of this loader: the program wants what they hold, a lock or a port."""


class LeaveLoader(Message, frozen=True):
    """The loader was closed."""

    stats: LoaderStats


# --- dispatcher -> loader -------------------------------------------------------------------------------------------


class LoaderRegistered(Message, frozen=True):
    """Answer to `RegisterLoader`; the pipeline is sent once, by the first loader that has it.

    `pipeline_id` is the one of that registration: the loader may have come to another one since.
    """

    need_pipeline: bool
    num_data_workers: int
    pipeline_id: str = ""


class ProcessesEnded(Message, frozen=True):
    """Answer to `EndProcesses`: none of them is left."""


class NeedPipeline(Message, frozen=True):
    """A data worker asks for a pipeline of this loader, and the dispatcher does not have it."""

    pipeline_id: str


class Notice(Message, frozen=True):
    """Something that the user should know; nothing changes by it."""

    text: str


class Membership(Message, frozen=True):
    """How many data workers can reach this loader now."""

    num_data_workers: int


class LeaseRevoked(Message, frozen=True):
    """Batches that carry this fencing token are no longer wanted.

    `suspects` are the steps that its data worker was at when it was lost: they may have ended it.
    """

    session_id: str
    token: int
    suspects: Ranges = []


class StepsLost(Message, frozen=True):
    """These steps were held by a data worker that was lost, in a session that is read at most once: go on without.

    Attributes:
        stop_step: -1 for all that follow: the rest of a shard.
    """

    session_id: str
    first_step: int
    stop_step: int


class BatchFailed(Message, frozen=True):
    """In the place of a step's batch: nobody could make it, and the loader raises the failure there."""

    session_id: str
    step: int
    failure: Failure
