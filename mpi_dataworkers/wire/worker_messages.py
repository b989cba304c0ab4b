"""Messages between data worker and dispatcher, in both directions. Holds no logic."""

from __future__ import annotations

import msgspec

from hetstream.mpi_dataworkers.wire.work import (
    Device,
    Failure,
    Interpreter,
    Message,
    Program,
    Ranges,
    SessionSpec,
    StepList,
)


class HeldLease(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A lease that a data worker still works on when it registers again."""

    token: int
    session_id: str
    first_step: int
    stop_step: int
    shift: int = 0


class Fate(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a data worker process ended.

    Attributes:
        reason: in words that follow "the process".
        session_id, token, step: what it was at; an empty session when it was at none.
        failure: of that step.
    """

    reason: str
    session_id: str
    token: int
    step: int
    failure: Failure | None


class RegisterWorker(Message, frozen=True, omit_defaults=True):
    """A data worker process offers itself.

    Attributes:
        replaces: a dead sibling, whose leases are free at once; `fate` is how it ended.
        slurm_job: id of the Slurm job that it belongs to; "" outside of Slurm.
        slot: its place among the processes of its supervisor, of which several may be there for several programs; ""
            for a process that nobody can replace.
        program: that it serves; None while it serves none.
        interpreter: of its process.
        device: what it makes steps with.
    """

    host: str
    pid: int
    replaces: str
    held: list[HeldLease]
    fate: Fate | None = None
    slurm_job: str = ""
    slot: str = ""
    program: Program | None = None
    interpreter: Interpreter = Interpreter()
    device: Device = "cpu"


class WorkerHeartbeat(Message, frozen=True, omit_defaults=True):
    """Still alive, with the tokens it holds, and the memory that counts for this process; 0: not known."""

    tokens: list[int]
    resident_bytes: int = 0


class FinishLease(Message, frozen=True, omit_defaults=True):
    """All steps of the lease were sent; `busy_s` is the time it took to make them.

    `dropped` are the positions that left this worker's cache since it last said so, by share key; `snapshot` is that of
    the last batch, and `snapshot_step` the step after it. `waited_s` was spent waiting for the loader or the network.
    """

    token: int
    busy_s: float
    dropped: dict[str, Ranges] = {}
    snapshot: bytes = b""
    snapshot_step: int = 0
    waited_s: float = 0.0


class FailLease(Message, frozen=True):
    """The worker could not reach the loader, or lost it: the lease goes to someone else."""

    token: int
    reason: str


class FailStep(Message, frozen=True):
    """User code raised for this step. The steps of the lease before it were sent, those after it are not made."""

    token: int
    step: int
    failure: Failure


class EndOfShard(Message, frozen=True):
    """The shard of this lease's session has `num_steps` steps; also said to the loader, on the batch connection."""

    session_id: str
    num_steps: int
    token: int


class FetchPipeline(Message, frozen=True):
    """The worker meets a pipeline for the first time."""

    pipeline_id: str


class Draining(Message, frozen=True, omit_defaults=True):
    """The worker finishes the step it is at and takes no more leases.

    Attributes:
        leases: (token, stop) of each lease it holds: steps at or above `stop` are not made.
        renews: a process is forked in its slot, and comes in a moment.
    """

    leases: list[tuple[int, int]]
    renews: bool = False


class LeaveWorker(Message, frozen=True):
    """Orderly end: what it still held may be leased again; what it has sent is on its way."""


# --- dispatcher -> data worker --------------------------------------------------------------------------------------


class WorkerRegistered(Message, frozen=True):
    """Answer to `RegisterWorker`: its number among the data workers of this service."""

    number: int


class GrantLease(Message, frozen=True, omit_defaults=True):
    """Make steps [first_step, stop_step) of the session and send them to its receiver.

    In a shared stream, `shift` steps further than the session's own numbering says; `again` when they were leased
    before, for whichever session. `left_out` has the steps that failed before, with the samples to leave out and what
    they did. `snapshot` is where a reader of the shard was at or before the first step, "" for its beginning.
    """

    token: int
    session: SessionSpec
    first_step: int
    stop_step: int
    steps: StepList | None
    shift: int = 0
    again: bool = False
    left_out: dict[int, list[Failure]] = {}
    snapshot: bytes = b""


class TrimLease(Message, frozen=True):
    """Steps at or above `stop_step` went to a worker that was idle; those already begun do no harm."""

    token: int
    stop_step: int


class DrainWorker(Message, frozen=True):
    """Leave after the step in work, as after SIGTERM."""


class RenewWorker(Message, frozen=True):
    """Leave after the step in work, to be forked anew: the process's program is over, and another one is there."""


class AddProcess(Message, frozen=True):
    """Have one more process forked in this one's slot, for another program that is there at the same time."""


class RevokeLease(Message, frozen=True):
    """Stop working on it; with `reconnect` the connection to the loader is in doubt too."""

    token: int
    session_id: str
    reconnect: bool
    reason: str


class DropSession(Message, frozen=True):
    """Nobody reads this session any more: leases of it need not be made."""

    session_id: str


class DropPipeline(Message, frozen=True):
    """No loader uses this pipeline any more: what was made of it may go."""

    pipeline_id: str


class UnknownPeer(Message, frozen=True):
    """The dispatcher has been restarted or took the peer for dead: register again and say what you hold."""


class Refused(Message, frozen=True):
    """The request is not granted; `code` names the error class that the peer raises."""

    code: str
    text: str


class Alive(Message, frozen=True):
    """Answer to a heartbeat: the dispatcher is there and knows the peer."""


class ShutDown(Message, frozen=True):
    """The service ends."""
